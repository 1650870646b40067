"""Sparse attention, first part: q, k and v of T rows normed, rotated, stored; the indexer's queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, f32, i32, launch, pointer

SOURCE = Source("qsa_append.cu", ("qsa_append", "qsa_index", "qsa_ring"))
WARPS = 4


@dataclass(frozen=True)
class KvSlots:
    """Addresses of the words that hold a session's K and V cells; scales 0 for float16 cells."""

    k: int
    v: int
    k_scales: int = 0
    v_scales: int = 0


def qsa_append(
    q_gate: int, k_in: int, v_in: int, q_norm: int, k_norm: int, q_out: int, pos: int, rope: int, cells: KvSlots,
    T: int, H: int, Hkv: int, dh: int, rotary: int, eps: float, error: int, where: np.uint64,
) -> list[Launch]:  # fmt: skip
    """q_gate (T, H, 2, dh) -> q_out (T, H, dh); k_in and v_in (T, Hkv, dh) into the cells of positions *pos + t.

    rope: table (context, rotary); pos: address of an int64. H may be 0.
    """
    need(rotary % 2 == 0 and rotary <= dh, "rotated values of a head", found=rotary, needed=f"even, up to {dh}")
    need((cells.k_scales == 0) == (cells.v_scales == 0), "K and V have one format")
    need(cells.k_scales == 0 or dh % 64 == 0, "int8 cells need heads in 64s", found=dh)
    args = (
        pointer(q_gate),
        pointer(k_in),
        pointer(v_in),
        pointer(q_norm),
        pointer(k_norm),
        pointer(q_out),
        pointer(pos),
        pointer(rope),
        pointer(cells.k),
        pointer(cells.k_scales),
        pointer(cells.v),
        pointer(cells.v_scales),
        i32(H),
        i32(Hkv),
        i32(dh),
        i32(rotary),
        f32(eps),
        pointer(error),
        where,
    )
    grid = (-(-(H + 2 * Hkv) // WARPS), T)
    return [launch(SOURCE, "qsa_append", grid, 32 * WARPS, *args, shared_bytes=4 * WARPS * dh)]


def qsa_index(
    iq: int, ik: int, q_norm: int, k_norm: int, keys_slot: int, ring_slot: int, pos: int, rope: int, T: int, heads: int,
    dim: int, block: int, ring_rows: int, rotary: int, eps: float, error: int, where: np.uint64,
) -> list[Launch]:  # fmt: skip
    """iq (T, heads, dim) in place; pooled keys of blocks that end in these rows; raw keys ik (T, dim) into the ring."""
    need(rotary % 2 == 0 and rotary <= dim, "rotated values of an indexer head", found=rotary, needed=f"even, <= {dim}")
    together = T + block - 1 <= ring_rows
    args = (pointer(iq), pointer(ik), pointer(q_norm), pointer(k_norm), pointer(keys_slot), pointer(ring_slot),
            pointer(pos), pointer(rope), i32(heads), i32(dim), i32(block), i32(ring_rows), i32(rotary), f32(eps),
            i32(together), pointer(error), where)  # fmt: skip
    grid = (-(-(heads + 2) // WARPS), T)
    out = [launch(SOURCE, "qsa_index", grid, 32 * WARPS, *args, shared_bytes=4 * WARPS * dim)]
    if not together:
        skip = max(0, T - ring_rows)
        ring = (pointer(ik), pointer(ring_slot), pointer(pos), i32(skip), i32(dim), i32(ring_rows))
        out.append(launch(SOURCE, "qsa_ring", T - skip, 128, *ring))
    return out
