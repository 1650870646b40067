"""Sparse attention, first part: q, k and v of T rows normed, rotated, stored; the indexer's queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, f32, i32, launch, pointer

SOURCE = Source("qsa_append.cu", ("qsa_append", "qsa_index", "qsa_store", "qsa_ring"))
WARPS = 4


@dataclass(frozen=True)
class KvSlots:
    """Addresses of the words that hold a session's K and V cells; scales 0 for float16 cells."""

    k: int
    v: int
    k_scales: int = 0
    v_scales: int = 0


@dataclass(frozen=True)
class Append:
    """What `qsa_append` does with T rows: q_gate (T, H, 2, dh) -> q_out (T, H, dh), k_in and v_in (T, Hkv, dh) into
    cells. Addresses; H may be 0."""

    q_gate: int
    k_in: int
    v_in: int
    q_norm: int
    k_norm: int
    q_out: int
    cells: KvSlots
    H: int
    Hkv: int
    dh: int
    rotary: int
    eps: float

    def __post_init__(self) -> None:
        cells, dh = self.cells, self.dh
        need(self.rotary % 2 == 0 and self.rotary <= dh, "rotated values of a head", found=self.rotary,
             needed=f"even, up to {dh}")  # fmt: skip
        need((cells.k_scales == 0) == (cells.v_scales == 0), "K and V have one format")
        need(cells.k_scales == 0 or dh % 64 == 0, "int8 cells need heads in 64s", found=dh)

    @property
    def args(self) -> tuple[np.generic, ...]:
        places = (self.q_gate, self.k_in, self.v_in, self.q_norm, self.k_norm, self.q_out, self.cells.k,
                  self.cells.k_scales, self.cells.v, self.cells.v_scales)  # fmt: skip
        return (*map(pointer, places), i32(self.H), i32(self.Hkv), i32(self.dh))

    @property
    def blocks(self) -> int:
        return -(-(self.H + 2 * self.Hkv) // WARPS)


@dataclass(frozen=True)
class Index:
    """What `qsa_index` does with T rows: iq (T, heads, dim) in place, pooled keys of blocks that end in them, raw keys
    ik (T, dim) into the ring. Addresses."""

    iq: int
    ik: int
    q_norm: int
    k_norm: int
    keys_slot: int
    ring_slot: int
    heads: int
    dim: int
    block: int
    ring_rows: int
    rotary: int
    eps: float

    def __post_init__(self) -> None:
        need(self.rotary % 2 == 0 and self.rotary <= self.dim, "rotated values of an indexer head", found=self.rotary,
             needed=f"even, <= {self.dim}")  # fmt: skip

    def together(self, T: int) -> bool:
        """Whether one kernel does all of it: no row's ring entry is one that another row reads."""
        return T + self.block - 1 <= self.ring_rows

    def args(self, T: int) -> tuple[np.generic, ...]:
        places = (self.iq, self.ik, self.q_norm, self.k_norm, self.keys_slot, self.ring_slot)
        return (*map(pointer, places), i32(self.heads), i32(self.dim), i32(self.block), i32(self.ring_rows),
                i32(self.together(T)))  # fmt: skip

    @property
    def blocks(self) -> int:
        return -(-(self.heads + 2) // WARPS)


def qsa_append(a: Append, pos: int, rope: int, T: int, error: int, where: np.uint64) -> list[Launch]:
    """Positions *pos + t, an int64; rope: table (context, rotary)."""
    args = (*a.args, pointer(pos), pointer(rope), i32(a.rotary), f32(a.eps), pointer(error), where)
    return [launch(SOURCE, "qsa_append", (a.blocks, T), 32 * WARPS, *args, shared_bytes=4 * WARPS * a.dh)]


def qsa_index(x: Index, pos: int, rope: int, T: int, error: int, where: np.uint64) -> list[Launch]:
    """Positions and table as for `qsa_append`."""
    args = (*x.args(T), pointer(pos), pointer(rope), i32(x.rotary), f32(x.eps), pointer(error), where)
    out = [launch(SOURCE, "qsa_index", (x.blocks, T), 32 * WARPS, *args, shared_bytes=4 * WARPS * x.dim)]
    if not x.together(T):
        skip = max(0, T - x.ring_rows)
        ring = (pointer(x.ik), pointer(x.ring_slot), pointer(pos), i32(skip), i32(x.dim), i32(x.ring_rows))
        out.append(launch(SOURCE, "qsa_ring", T - skip, 128, *ring))
    return out


def qsa_store(
    a: Append, x: Index, pos: int, rope: int, T: int, error: int, where: np.uint64, index_where: np.uint64
) -> list[Launch]:
    """Both as one launch, for rows that `x.together` takes."""
    need(x.together(T), "rows of an index in one kernel", found=T, needed=f"at most {x.ring_rows - x.block + 1}")
    args = (*a.args, *x.args(T), pointer(pos), pointer(rope), i32(a.rotary), i32(x.rotary), f32(a.eps), f32(x.eps),
            pointer(error), where, index_where)  # fmt: skip
    grid = (x.blocks + a.blocks, T)
    return [launch(SOURCE, "qsa_store", grid, 32 * WARPS, *args, shared_bytes=4 * WARPS * max(a.dh, x.dim))]
