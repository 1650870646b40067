"""Weights on the device: float matrices as they are, quantised ones relaid, small vectors widened to float32.

Addresses exist before anything is uploaded: asking for a tensor in the measuring pass notes it, `allocate` takes one
piece of memory for all of them, `upload` fills it. The routed experts of the trunk lie in `slots`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from strata.base.errors import ModelError
from strata.base.progress import UPLOADING, report
from strata.gpu.device import Device
from strata.gpu.gemv import Place, relayout_bytes
from strata.gpu.memory import MADE_UP, aligned
from strata.gpu.slots import ExpertSlots, ExpertSource
from strata.gpu.upload import Uploader
from strata.pack.experts import ExpertLayout
from strata.pack.formats import BlockFormat
from strata.pack.tensor_class import DRAFT, EXPERTS, classify, vram_line
from strata.pack.tensors import Tensors

DRAFT_EXPERTS = ("mtp.ffn_gate_exps.weight", "mtp.ffn_up_exps.weight", "mtp.ffn_down_exps.weight")
"""Experts of the draft layer, whose number is that of the layers."""

HEAD, DRAFT_HEAD = "output.weight", "mtp.output.weight"


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
class _Part:
    """An array to upload, `at` bytes behind the start of its piece: in the layout of `format`, or as it is."""

    data: np.ndarray
    format: BlockFormat | None = None
    at: int = 0


@dataclass(frozen=True)
class _Piece:
    """Something to upload: n_bytes at offset `at` of the memory, made by calling parts()."""

    at: int
    n_bytes: int
    kind: str
    parts: Callable[[], Iterable[_Part]]
    key: tuple


class Weights:
    """Everything that tensor names of programs stand for: one piece of device memory, and the slots of experts.

    Without `slots` all experts of the trunk are held.
    """

    def __init__(self, tensors: Tensors, experts: ExpertLayout, slots: ExpertSlots | None = None):
        self.tensors, self.experts = tensors, experts
        self.slots = ExpertSlots(experts) if slots is None else slots
        self.measuring = True
        self._places: dict[tuple, int] = {}
        self._pieces: list[_Piece] = []
        self._end = MADE_UP
        self._base = 0

    # ---- places

    def _address(self, key: tuple, n_bytes: int, kind: str, parts: Callable[[], Iterable[_Part]]) -> int:
        if key not in self._places:
            assert self.measuring, f"{key} was not asked for in the measuring pass"
            self._places[key] = self._end
            self._pieces.append(_Piece(self._end, n_bytes, kind, parts, key))
            self._end += aligned(n_bytes)
        return self._places[key] + self._base

    @property
    def n_bytes(self) -> int:
        """Device bytes of everything, slots included."""
        return self._end - MADE_UP + self.slots.n_bytes

    def bytes_by_kind(self) -> dict[str, int]:
        """Device bytes of matrices, experts, lookup rows, vectors and tables."""
        total: dict[str, int] = {"experts": self.slots.n_bytes - self.slots.table_bytes}
        total["tables"] = self.slots.table_bytes
        for p in self._pieces:
            total[p.kind] = total.get(p.kind, 0) + aligned(p.n_bytes)
        return total

    def bytes_by_line(self) -> dict[str, int]:
        """The same by lines of a plan."""
        table = self.slots.table_bytes
        total = {vram_line(EXPERTS): self.slots.n_bytes - table, "small tables": table}
        for p in self._pieces:
            line = self._line_of(p)
            total[line] = total.get(line, 0) + aligned(p.n_bytes)
        return total

    def _line_of(self, p: _Piece) -> str:
        name = p.key[0]
        if p.kind == "tables" or p.key[1] == "expert scales":
            return "RoPE table" if name == "rope" else "small tables"
        if isinstance(name, int):
            return vram_line(EXPERTS if name < self.experts.n_layers else DRAFT)
        return vram_line(classify(name))

    def allocate(self, device: Device, uploader: Uploader, source: ExpertSource) -> None:
        """Take the memory; `source` has the bytes of the trunk's experts. DoesNotFit if the device has less."""
        self.measuring = False
        self._base = device.alloc(self._end - MADE_UP) - MADE_UP
        self.slots.allocate(device, uploader, source)

    def upload(self, uploader: Uploader, order: Iterable[tuple[int, int]] | None = None) -> None:
        """Fill the memory, and the slots by rank; waits. Every piece is made, uploaded and dropped.

        Without an order, slots that kernels read through the table are left to whoever swaps.
        """
        done, total = 0, sum(p.n_bytes for p in self._pieces)
        for p in self._pieces:
            report(UPLOADING, done, total, str(p.key[0]))
            done += p.n_bytes
            for part in p.parts():
                assert part.at + part.data.nbytes <= p.n_bytes or part.format, p
                target = p.at + self._base + part.at
                if part.format is None:
                    uploader.raw(target, part.data)
                else:
                    uploader.matrix(part.format, target, part.data)
        uploader.finish()
        report(UPLOADING, done, total)
        if order is not None or not self.slots.by_table:
            self.slots.fill(order)

    def release(self) -> None:
        """Let go of what was uploaded; places stay."""
        self._pieces = [replace(p, parts=list) for p in self._pieces]
        self.tensors = self.tensors.without_data()

    # ---- what ops ask for

    def array(self, name: str, kind: str, array: np.ndarray) -> int:
        """Address of a host array that is the same for all programs."""
        return self._address((name, kind), array.nbytes, kind, lambda: [_Part(array)])

    def place_of(self, name: str, kind: str) -> int:
        """Address of an `array` that was asked for before."""
        return self._places[name, kind] + self._base

    def vector(self, name: str, transposed: bool = False) -> int:
        """Address of a small tensor as float32; refuses values that are not finite, which no window could survive."""

        def values() -> list[_Part]:
            v = self.tensors.values(name)
            if not np.isfinite(v).all():
                bad = int(np.argmin(np.isfinite(v.reshape(-1))))
                raise ModelError(
                    f"tensor {name} holds a non-finite value",
                    found=f"index {bad}",
                    needed="finite numbers",
                    advice="The file is damaged: download it again.",
                )
            return [_Part(np.ascontiguousarray(v.T if transposed else v, np.float32))]

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
        at = self._address((name, "rows"), n_bytes, "lookup rows", lambda: [_Part(self._raw(name))])
        return Matrix(name, info.format, rows, columns, info.format.row_bytes(columns), at)

    def matrix(self, name: str) -> Matrix:
        """A 2-D tensor, or a vector as a matrix of one row, for products."""
        if name == DRAFT_HEAD and self._is_whole_head():
            name = HEAD
        info = self.tensors.info(name)
        rows, columns = info.shape if len(info.shape) == 2 else (1, info.shape[0])
        format, row_bytes = info.format, info.format.row_bytes(columns)
        relaid = format if format.group else None
        n_bytes = relayout_bytes(format, rows, columns) if relaid else rows * row_bytes
        at = self._address((name, "matrix"), n_bytes, "matrices", lambda: [_Part(self._raw(name), relaid)])
        return Matrix(name, format, rows, columns, row_bytes, at)

    def _is_whole_head(self) -> bool:
        """Whether drafts are scored on all rows of the head, which then lies on the device once."""
        return self.tensors.info(DRAFT_HEAD).shape == self.tensors.gguf.info(HEAD).shape

    # ---- experts

    def expert_names(self, layer: int) -> tuple[str, ...]:
        if layer == self.experts.n_layers:
            return DRAFT_EXPERTS
        return tuple(p.tensor.name for p in self.experts.layers[layer].projections)

    def expert_format(self, layer: int, part: int) -> BlockFormat:
        return self.tensors.info(self.expert_names(layer)[part]).format

    def expert_place(self, layer: int, part: int, E: int, rows: int, columns: int) -> Place:
        """Where kernels find gate (0), up (1) or down (2) of a layer's E experts, each (rows, columns)."""
        if layer < self.experts.n_layers:
            p = self.experts.layers[layer].projections[part]
            assert (E, rows, columns) == (self.experts.E, p.rows, p.columns)
            return self.slots.matrices(layer, part)
        return Place(*self._draft_experts(layer, part, E, rows, columns))

    def _draft_experts(self, layer: int, part: int, E: int, rows: int, columns: int) -> tuple[int, int]:
        """(address of expert 0's matrix, bytes from expert to expert)."""
        format = self.expert_format(layer, part)
        one = relayout_bytes(format, rows, columns) if format.group else rows * format.row_bytes(columns)
        stride = aligned(one)

        def parts() -> Iterable[_Part]:
            raw = self._raw(DRAFT_EXPERTS[part])
            for e in range(E):
                yield _Part(raw[e * rows : (e + 1) * rows], format if format.group else None, e * stride)

        return self._address((layer, "experts", part), E * stride, "experts", parts), stride

    def expert_scales(self, layer: int) -> tuple[int, int, int]:
        """Addresses of (E,) float32 output factors of gate, up and down; zeros where the file has none."""
        if layer == self.experts.n_layers or all(p.scale is None for p in self.experts.layers[layer].projections):
            return 0, 0, 0
        E = self.experts.E
        stride = aligned(4 * E)

        def parts() -> list[_Part]:
            out = np.zeros((3, stride // 4), np.float32)
            out[:, :E] = self.experts.scales(layer)
            return [_Part(out)]

        at = self._address((layer, "expert scales"), 3 * stride, "vectors", parts)
        return at, at + stride, at + 2 * stride
