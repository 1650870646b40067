"""Sparse attention, first part: q, k and v of T rows normed, rotated, stored; the indexer's queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, f32, i32, launch, pointer

SOURCE = Source("qsa_append.cu", ("qsa_store<false>", "qsa_store<true>", "qsa_ring"))
WARPS = 4
SCORED_SHAPE, SCORED_HEAD, SCORED_ROTARY, SCORED_ROWS = (4, 128), 256, 64, 8
"""What the kernel that makes scores too is compiled for: heads of the indexer and their values, values of a head of
attention, rotated values of either, most rows."""
KEYS_A_BLOCK = 64
"""Pooled keys that a thread block of it scores."""


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


@dataclass(frozen=True)
class Scores:
    """Scores of complete blocks: their address (T, most) float32, for rows that see more than `budget` of them, and
    where errors are reported."""

    scores: int
    budget: int
    most: int
    where: np.uint64


NO_APPEND = Append(0, 0, 0, 0, 0, 0, KvSlots(0, 0), 0, 0, 0, 0, 1.0)
NO_INDEX = Index(0, 0, 0, 0, 0, 0, -2, 0, 1, 1, 0, 1.0)


def qsa_append(a: Append, pos: int, rope: int, T: int, error: int, where: np.uint64) -> list[Launch]:
    """Positions *pos + t, an int64; rope: table (context, rotary)."""
    return _store(a, NO_INDEX, pos, rope, T, error, where, where)


def qsa_index(x: Index, pos: int, rope: int, T: int, error: int, where: np.uint64) -> list[Launch]:
    """Positions and table as for `qsa_append`."""
    out = _store(NO_APPEND, x, pos, rope, T, error, where, where)
    if not x.together(T):
        skip = max(0, T - x.ring_rows)
        ring = (pointer(x.ik), pointer(x.ring_slot), pointer(pos), i32(skip), i32(x.dim), i32(x.ring_rows))
        out.append(launch(SOURCE, "qsa_ring", T - skip, 128, *ring))
    return out


def qsa_store(
    a: Append, x: Index, pos: int, rope: int, T: int, error: int, where: np.uint64, index_where: np.uint64,
    scores: Scores | None = None,
) -> list[Launch]:  # fmt: skip
    """Both as one launch, for rows that `x.together` takes. With `scores`, for what `scores_too` takes, so are the
    scores that `qsa_select` would make behind it; iq then stays as it is."""
    need(x.together(T), "rows of an index in one kernel", found=T, needed=f"at most {x.ring_rows - x.block + 1}")
    found = (T, x.heads, x.dim, x.rotary, a.dh, a.rotary)
    need(scores is None or scores_too(a, x, T), "scores beside an index", found=found,
         needed=(SCORED_ROWS, *SCORED_SHAPE, SCORED_ROTARY, SCORED_HEAD, SCORED_ROTARY))  # fmt: skip
    return _store(a, x, pos, rope, T, error, where, index_where, scores)


def scores_too(a: Append, x: Index, T: int) -> bool:
    """Whether `qsa_store` takes these rows with scores."""
    indexer, head = (x.heads, x.dim, x.rotary), (a.dh, a.rotary)
    fits = indexer == (*SCORED_SHAPE, SCORED_ROTARY) and head == (SCORED_HEAD, SCORED_ROTARY)
    return fits and x.together(T) and T <= SCORED_ROWS


def _store(
    a: Append, x: Index, pos: int, rope: int, T: int, error: int, where: np.uint64, index_where: np.uint64,
    scores: Scores | None = None,
) -> list[Launch]:  # fmt: skip
    s = scores or Scores(0, 0, 0, where)
    args = (*a.args, *x.args(T), pointer(pos), pointer(rope), i32(a.rotary), i32(x.rotary), f32(a.eps), f32(x.eps),
            i32(T), pointer(s.scores), i32(s.budget), i32(s.most), pointer(error), where, index_where,
            s.where)  # fmt: skip
    shared_bytes, grid = 4 * WARPS * max(a.dh, x.dim), T * (x.blocks + a.blocks)
    if scores is not None:
        heads, dim = SCORED_SHAPE
        shared_bytes = max(shared_bytes, 4 * (-(-T // 4) * 4 * heads * dim + dim + T * (SCORED_ROTARY + dim)))
        grid += -(-s.most // KEYS_A_BLOCK)
    kernel = f"qsa_store<{'false' if scores is None else 'true'}>"
    return [launch(SOURCE, kernel, grid, 32 * WARPS, *args, shared_bytes=shared_bytes)]
