"""Requests for the stand-in of the device side of the doorbell, with the sums that they must get.

Expected sums come from the CPU op: its outputs of single entries, weighted and summed with numpy.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from strata.base import arithmetic
from strata.base.doorbell import CPU, LINK
from strata.base.program import ERROR_WORDS, Buffer, Op, Program
from strata.cli.bench.doorbell.stand_in import Device, Request
from strata.cpu.lower import Lowering, Memory
from strata.cpu.weights import Weights
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors

__all__ = ["Device", "Model", "Request"]

POOL_ROWS = 16


class Model:
    """Experts of a file, and what single entries of them give."""

    def __init__(self, path: Path, layers: int, K: int):
        self.gguf = GgufFile(path)
        self.weights = Weights(Tensors(self.gguf), expert_layout(self.gguf, layers))
        self.K, self.L = K, layers
        self.E, self.F, self.D = self.weights.experts.E, self.weights.experts.F, self.weights.experts.D
        self.x = np.random.default_rng(5).standard_normal((POOL_ROWS, self.D)).astype(np.float32)
        self.outputs = cache(self._outputs)

    def _outputs(self, layer: int) -> np.ndarray:
        """(rows of x, E, D) float32: outputs of single experts before their weights, as the CPU op leaves them."""
        T, K = POOL_ROWS, self.K
        shared = [f"blk.{layer}.ffn_{part}_shexp.weight" for part in ("gate", "up", "down")]
        shapes = {"u": ((T, self.D), "float32"), "ids": ((T, K), "int32"), "w": ((T, K), "float32"),
                  "sg": ((T, 1), "float32"), "y": ((T, self.D), "float32")}  # fmt: skip
        buffers = {n: Buffer(n, shape, dtype, "scratch") for n, (shape, dtype) in shapes.items()}
        consts = {"E": self.E, "K": K, "F": self.F, "D": self.D,
                  "shared_width": self.gguf.info(shared[0]).shape[0]}  # fmt: skip
        ports = {"x": "u", "ids": "ids", "weights": "w", "shared_gate": "sg", "y": "y"}
        ports |= {f"shared_{part}_w": name for part, name in zip(("gate", "up", "down"), shared, strict=True)}
        program = Program("trunk", T, (Op("experts", layer, ports, consts),), buffers)
        memory, error = Memory([program], {}), np.zeros(ERROR_WORDS, np.int64)
        Lowering(program, memory, self.weights, 0, 1, error.ctypes.data).run()
        memory.allocate()
        walk = Lowering(program, memory, self.weights, 0, 1, error.ctypes.data).run()
        memory.arrays["u"][:] = self.x
        out = np.empty((T, self.E, self.D), np.float32)
        for first in range(0, self.E, K):
            ids = np.arange(first, first + K) % self.E
            memory.arrays["ids"][:] = ids
            assert walk.run() < 0
            entry_of = memory.private["experts.entry_of"].view(np.int32)[: T * K]
            entries = memory.private["experts.routed.out"].view(np.float32)[: T * K * self.D].reshape(-1, self.D)
            out[:, ids] = entries[entry_of].reshape(T, K, self.D)
        return out

    def sums(self, layer: int, rows: np.ndarray, ids: np.ndarray, weights: np.ndarray, here: np.ndarray) -> np.ndarray:
        """(T, D) int64: the exact sums of the entries `here`."""
        total = np.zeros((len(rows), self.D), np.int64)
        scales = self.weights.expert_scales(layer)
        for t, j in np.argwhere(here):
            y = self.outputs(layer)[rows[t], ids[t, j]]
            if scales is not None:
                y = y * scales[2][ids[t, j]]
            terms, overflow = arithmetic.combine_terms(weights[t, j], y)
            assert not overflow
            total[t] += terms
        return total

    def request(self, rng: np.random.Generator, T: int | None = None, layer: int | None = None,
                misses: float | None = None) -> Request:  # fmt: skip
        """A request by chance; `misses`: chance of an entry to be the CPU's."""
        T = int(rng.integers(1, 9)) if T is None else T
        layer = int(rng.integers(self.L)) if layer is None else layer
        rows = rng.permutation(POOL_ROWS)[:T]
        few = int(rng.integers(self.K, self.E + 1))  # rows share experts, more or less
        ids = np.stack([rng.permutation(few)[: self.K] for _ in range(T)]).astype(np.int32)
        weights = rng.uniform(0, 1, (T, self.K)).astype(np.float32)
        chance = rng.uniform(0, 1) if misses is None else misses
        decisions = np.where(rng.uniform(0, 1, ids.shape) < chance, CPU, rng.integers(1, LINK + 1, ids.shape))
        here = decisions == CPU
        return Request(layer, decisions.astype(np.uint8), ids, weights, self.x[rows],
                       self.sums(layer, rows, ids, weights, here))  # fmt: skip
