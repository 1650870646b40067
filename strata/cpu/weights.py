"""Weights as the CPU sees them: matrices where they lie, small vectors widened to float32, expert tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from strata.base.errors import ModelError
from strata.base.progress import COMPILING, SELF_TEST, report
from strata.cpu.gemv.table import ActivationLayout, best_tier, kernel_table, layout_of
from strata.cpu.linear import Matrix
from strata.cpu.self_test import check_format
from strata.pack.experts import ExpertLayout
from strata.pack.formats import format_of
from strata.pack.tensors import Tensors

DRAFT_EXPERTS = ("mtp.ffn_gate_exps.weight", "mtp.ffn_up_exps.weight", "mtp.ffn_down_exps.weight")
"""Experts of the draft layer, whose number is that of the layers."""


class Weights:
    """Everything a program's tensor names stand for. No matrix is copied.

    tensors  by name, in the file's mapping or held     experts  where the routed experts of the trunk lie
    tier     of the kernels; None: the fastest            progress(what, name)  called before a format's kernels are
    compiled or tested
    formats  names of all whose products were asked for
    """

    def __init__(
        self,
        tensors: Tensors,
        experts: ExpertLayout,
        tier: int | None = None,
        progress: Callable[[str, str], object] | None = None,
    ):
        self.tensors, self.experts = tensors, experts
        self.tier = best_tier() if tier is None else tier  # asking for it takes 0.1 ms, programs ask thousands of times
        self._progress = progress or (lambda what, name: report(what, 0, 0, name))
        self.formats: set[str] = set()
        self._vectors: dict[tuple[str, bool], np.ndarray] = {}
        self._kernels: dict[int, np.ndarray] = {}
        self._tables: dict[int, np.ndarray] = {}

    def layout(self, name: str) -> ActivationLayout:
        block = self.tensors.info(name).format
        self.formats.add(block.name)
        return layout_of(block, self.tier)

    def kernels(self, ggml_type: int) -> np.ndarray:
        """(8,) int64: a format's `gemv.table.kernel_table`, compiled and self-tested on first use."""
        if ggml_type not in self._kernels:
            block = format_of(ggml_type)
            self._progress(COMPILING, block.name)
            table = kernel_table(block, self.tier)
            self._progress(SELF_TEST, block.name)
            check_format(block, self.tier)
            self._kernels[ggml_type] = table
        return self._kernels[ggml_type]

    def matrix(self, name: str) -> Matrix:
        """A 2-D tensor, or a vector as a matrix of one row."""
        info = self.tensors.info(name)
        rows, columns = info.shape if len(info.shape) == 2 else (1, info.shape[0])
        return Matrix(
            name,
            self.tensors.address(name),
            info.row_bytes,
            rows,
            columns,
            info.format.name,
            self.kernels(info.ggml_type),
        )

    def vector(self, name: str, transposed: bool = False) -> np.ndarray:
        """A small tensor as contiguous float32; refuses non-finite values, which no window could survive."""
        key = (name, transposed)
        if key not in self._vectors:
            values = self.tensors.values(name)
            if not np.isfinite(values).all():
                bad = int(np.argmin(np.isfinite(values.reshape(-1))))
                raise ModelError(
                    f"{self.tensors.file_name(name)}: tensor {name} holds a non-finite value",
                    found=f"index {bad}",
                    needed="finite numbers",
                    advice="The file is damaged: download it again.",
                )
            self._vectors[key] = np.ascontiguousarray(values.T if transposed else values, np.float32)
        return self._vectors[key]

    @property
    def vector_bytes(self) -> int:
        return sum(v.nbytes for v in self._vectors.values())

    @property
    def place_bytes(self) -> int:
        """Memory of the expert tables."""
        return sum(t.nbytes for t in self._tables.values())

    def expert_names(self, layer: int) -> tuple[str, ...]:
        """Tensors of gate, up and down of a layer's routed experts (gate and up may be one tensor)."""
        if layer == self.experts.n_layers:
            return DRAFT_EXPERTS
        return tuple(p.tensor.name for p in self.experts.layers[layer].projections)

    def expert_table(self, layer: int) -> np.ndarray:
        """(E, 3) int64: addresses of gate, up and down of each routed expert."""
        if layer not in self._tables:
            if layer == self.experts.n_layers:
                self._tables[layer] = self._draft_table()
            else:
                self._tables[layer] = np.ascontiguousarray(self.experts.addresses[layer])
        return self._tables[layer]

    def _draft_table(self) -> np.ndarray:
        columns = []
        for name in DRAFT_EXPERTS:
            info = self.tensors.info(name)
            E, rows = info.shape[:2]
            columns.append(self.tensors.address(name) + np.arange(E, dtype=np.int64) * rows * info.row_bytes)
        return np.ascontiguousarray(np.stack(columns, axis=1))

    def expert_scales(self, layer: int) -> tuple[np.ndarray, ...] | None:
        """Per projection (E,) float32 output factors, or None where the file has none (all types but NVFP4)."""
        if layer == self.experts.n_layers or all(p.scale is None for p in self.experts.layers[layer].projections):
            return None
        key = (f"scales.{layer}", False)
        if key not in self._vectors:
            self._vectors[key] = np.ascontiguousarray(self.experts.scales(layer))
        return tuple(self._vectors[key])
