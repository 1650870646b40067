"""Weights on the device: float matrices as they are, quantised ones relaid, small vectors widened to float32.

Addresses exist before anything is uploaded: `place` notes a tensor in the measuring pass, `allocate` takes one piece
of memory for all of them, `upload` fills it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.errors import ModelError
from strata.gpu.device import Device
from strata.gpu.gemv import relayout, relayout_bytes
from strata.gpu.memory import MADE_UP, aligned
from strata.pack.experts import ExpertLayout
from strata.pack.formats import BlockFormat
from strata.pack.tensors import Tensors

DRAFT_EXPERTS = ("mtp.ffn_gate_exps.weight", "mtp.ffn_up_exps.weight", "mtp.ffn_down_exps.weight")
"""Experts of the draft layer, whose number is that of the layers."""


@dataclass(frozen=True)
class Matrix:
    """A matrix on the device. rows x columns of `format`; row_bytes in the file."""

    name: str
    format: BlockFormat
    rows: int
    columns: int
    row_bytes: int
    address: int


@dataclass(frozen=True)
class _Piece:
    """Something to upload: n_bytes at offset `at` of the memory, made by calling data()."""

    at: int
    n_bytes: int
    kind: str
    data: object


class Weights:
    """Everything that tensor names of programs stand for, in one piece of device memory."""

    def __init__(self, tensors: Tensors, experts: ExpertLayout):
        self.tensors, self.experts = tensors, experts
        self.measuring = True
        self._places: dict[tuple, int] = {}
        self._pieces: list[_Piece] = []
        self._end = MADE_UP
        self._base = 0

    # ---- places

    def _address(self, key: tuple, n_bytes: int, kind: str, data) -> int:
        if key not in self._places:
            assert self.measuring, f"{key} was not asked for in the measuring pass"
            self._places[key] = self._end
            self._pieces.append(_Piece(self._end, n_bytes, kind, data))
            self._end += aligned(n_bytes)
        return self._places[key] + self._base

    @property
    def n_bytes(self) -> int:
        return self._end - MADE_UP

    def bytes_by_kind(self) -> dict[str, int]:
        """Device bytes of matrices, experts, lookup rows, vectors and tables."""
        total: dict[str, int] = {}
        for p in self._pieces:
            total[p.kind] = total.get(p.kind, 0) + aligned(p.n_bytes)
        return total

    def allocate(self, device: Device) -> None:
        self.measuring = False
        self._base = device.alloc(self.n_bytes) - MADE_UP

    def upload(self, device: Device) -> None:
        """Fill the memory; every piece is made, uploaded and dropped."""
        for p in self._pieces:
            data = np.ascontiguousarray(p.data())
            assert data.nbytes == p.n_bytes, (data.nbytes, p)
            device.upload(p.at + self._base, data)

    # ---- what ops ask for

    def array(self, name: str, kind: str, array: np.ndarray) -> int:
        """Address of a host array that is the same for all programs."""
        return self._address((name, kind), array.nbytes, kind, lambda: array)

    def place_of(self, name: str, kind: str) -> int:
        """Address of an `array` that was asked for before."""
        return self._places[name, kind] + self._base

    def vector(self, name: str, transposed: bool = False) -> int:
        """Address of a small tensor as float32; refuses values that are not finite, which no window could survive."""

        def values() -> np.ndarray:
            v = self.tensors.values(name)
            if not np.isfinite(v).all():
                bad = int(np.argmin(np.isfinite(v.reshape(-1))))
                raise ModelError(
                    f"tensor {name} holds a non-finite value",
                    found=f"index {bad}",
                    needed="finite numbers",
                    advice="The file is damaged: download it again.",
                )
            return np.ascontiguousarray(v.T if transposed else v, np.float32)

        n_bytes = 4 * int(np.prod(self.tensors.info(name).shape))
        return self._address((name, "vector", transposed), n_bytes, "vectors", values)

    def _raw(self, name: str) -> np.ndarray:
        """uint8 (rows, row_bytes) of a tensor as the file has it."""
        if name in self.tensors.held:
            return np.ascontiguousarray(self.tensors.held[name].data)
        raw = self.tensors.gguf.raw(name)
        return raw.reshape(-1, self.tensors.info(name).row_bytes)

    def rows(self, name: str) -> Matrix:
        """A tensor for lookups of single rows: the file's bytes."""
        info = self.tensors.info(name)
        rows, columns = info.shape
        n_bytes = rows * info.format.row_bytes(columns)
        at = self._address((name, "rows"), n_bytes, "lookup rows", lambda: self._raw(name))
        return Matrix(name, info.format, rows, columns, info.format.row_bytes(columns), at)

    def matrix(self, name: str) -> Matrix:
        """A 2-D tensor, or a vector as a matrix of one row, for products."""
        info = self.tensors.info(name)
        rows, columns = info.shape if len(info.shape) == 2 else (1, info.shape[0])
        format, row_bytes = info.format, info.format.row_bytes(columns)
        if format.group:
            n_bytes = relayout_bytes(format, rows, columns)
            at = self._address((name, "matrix"), n_bytes, "matrices", lambda: relayout(format, self._raw(name)))
        else:
            at = self._address((name, "matrix"), rows * row_bytes, "matrices", lambda: self._raw(name))
        return Matrix(name, format, rows, columns, row_bytes, at)

    # ---- experts

    def expert_names(self, layer: int) -> tuple[str, ...]:
        if layer == self.experts.n_layers:
            return DRAFT_EXPERTS
        return tuple(p.tensor.name for p in self.experts.layers[layer].projections)

    def expert_format(self, layer: int, part: int) -> BlockFormat:
        return self.tensors.info(self.expert_names(layer)[part]).format

    def _expert_raw(self, layer: int, e: int, part: int, rows: int) -> np.ndarray:
        if layer < self.experts.n_layers:
            return self.experts.raw(layer, e, ("gate", "up", "down")[part])
        return self._raw(DRAFT_EXPERTS[part])[e * rows : (e + 1) * rows]

    def expert_matrices(self, layer: int, part: int, E: int, rows: int, columns: int) -> tuple[int, int]:
        """(address of expert 0's matrix, bytes from expert to expert) of gate (0), up (1) or down (2)."""
        format = self.expert_format(layer, part)
        one = relayout_bytes(format, rows, columns) if format.group else rows * format.row_bytes(columns)
        stride = aligned(one)

        def data() -> np.ndarray:
            out = np.zeros((E, stride), np.uint8)
            for e in range(E):
                raw = np.ascontiguousarray(self._expert_raw(layer, e, part, rows))
                out[e, :one] = (relayout(format, raw) if format.group else raw).reshape(-1)
            return out

        return self._address((layer, "experts", part), E * stride, "experts", data), stride

    def expert_scales(self, layer: int) -> tuple[int, int, int]:
        """Addresses of (E,) float32 output factors of gate, up and down; zeros where the file has none."""
        if layer == self.experts.n_layers or all(p.scale is None for p in self.experts.layers[layer].projections):
            return 0, 0, 0
        E = self.experts.E
        stride = aligned(4 * E)

        def data() -> np.ndarray:
            out = np.zeros((3, stride // 4), np.float32)
            out[:, :E] = self.experts.scales(layer)
            return out

        at = self._address((layer, "expert scales"), 3 * stride, "vectors", data)
        return at, at + stride, at + 2 * stride
