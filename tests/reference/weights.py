"""Weights of a GGUF file, dequantised to float64 and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from strata.pack.formats import format_of
from strata.pack.gguf_file import GgufFile

Matmul = Callable[[str, np.ndarray, int | None], np.ndarray]
"""(tensor name, x (T, in), expert or None) -> (T, out)."""


class FileWeights:
    """Tensors of one GGUF model by name. `path` is the first shard."""

    def __init__(self, path: str | Path):
        self.file = GgufFile(path)
        self._matrices: dict[str, np.ndarray] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.file.tensors

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes (rows, row_bytes); a one-dimensional tensor is one row."""
        return np.atleast_2d(self.file.raw(name))

    def n_rows(self, name: str) -> int:
        return len(self.raw(name))

    def rows(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Chosen rows of a table, dequantised now and not kept: (n, columns) float64."""
        raw = self.raw(name)[np.asarray(ids, np.int64)]
        block_format = format_of(self.file.tensors[name].ggml_type)
        return np.asarray(block_format.dequantise(raw), np.float64).reshape(len(raw), -1)

    def matrix(self, name: str) -> np.ndarray:
        """All rows, (rows, columns) float64; the experts of a stacked tensor lie one below the other."""
        if name not in self._matrices:
            matrix = self.rows(name, np.arange(self.n_rows(name)))
            matrix.setflags(write=False)
            self._matrices[name] = matrix
        return self._matrices[name]

    def vector(self, name: str) -> np.ndarray:
        """A one-dimensional tensor, (n,) float64."""
        return self.matrix(name).reshape(-1)

    def expert(self, name: str, expert: int, n_experts: int) -> np.ndarray:
        """One expert's matrix of a stacked tensor, (out, in) float64."""
        matrix = self.matrix(name)
        return matrix.reshape(n_experts, -1, matrix.shape[1])[expert]


class Scope:
    """The tensors below one prefix, and the product that multiplies by them."""

    def __init__(self, weights: FileWeights, prefix: str, matmul: Matmul):
        self._weights, self._prefix, self._matmul = weights, prefix, matmul

    def vector(self, name: str) -> np.ndarray:
        return self._weights.vector(self._prefix + name)

    def matrix(self, name: str) -> np.ndarray:
        return self._weights.matrix(self._prefix + name)

    def product(self, name: str, x: np.ndarray, expert: int | None = None) -> np.ndarray:
        """W x for every row of x (T, in): (T, out)."""
        return self._matmul(self._prefix + name, x, expert)
