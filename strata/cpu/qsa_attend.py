"""Sparse attention, third part: softmax over the selected cells of each row, gated.

Selected cells are listed in ascending order: the chosen blocks, then the incomplete tail; with block 0 the last
`budget` cells (all for budget 0), from a given first cell on. Tiles of 64 list entries are computed on their own and
merged in order, so a row's bits do not depend on the other rows of the window:

    s = (q . k) / sqrt(dh) (32 lanes); m = max s; p = exp(s - m); l = tree of p (64); o = ascending fma of p and v
    merge: M = max(m, m'); c = exp(m - M), c' = exp(m' - M); l = fma(l', c', l c); o = fma(o', c', o c)
    y = (o / l) sigmoid(gate)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from strata.base.compiled import chunk
from strata.base.errors import need
from strata.base.program import NOT_FINITE
from strata.cpu.error_word import report
from strata.cpu.float_bits import exp32, fma32, sigmoid32
from strata.cpu.float_sums import all_finite
from strata.cpu.float_vectors import LANES
from strata.cpu.head_vectors import AHEAD, TILE, scores_of, softmax_tile, weigh_tile
from strata.cpu.machine_code import f32_view, i32_view, i64_view, ld64
from strata.cpu.walker import float_argument

if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering

F = np.float32
HEADS_A_CHUNK = 4
"""Query heads that share one widening of a cell, at least."""


@njit(error_model="numpy")
def _list_places(places, base, entries, blocks, n_blocks, block, tail_start, Hkv, kv):
    """places[e] = row of list entry base + e in the cache, of the last entry behind the end."""
    listed = n_blocks * block
    in_blocks = max(0, min(listed - base, places.size))
    n, k = 0, base // max(block, 1)
    offset = base - k * block
    while n < in_blocks:
        first = blocks[k] * block
        while offset < block and n < in_blocks:
            places[n] = (first + offset) * Hkv + kv
            n, offset = n + 1, offset + 1
        k, offset = k + 1, 0
    for e in range(n, places.size):
        places[e] = (tail_start + min(base + e, entries - 1) - listed) * Hkv + kv


@chunk
def qsa_attend(a, k, n_chunks):
    """Some query heads of one KV head of one row.

    Record: q, q_gate, y, pos, k cells slot, k scales slot or 0, v cells slot, v scales slot or 0, blocks or 0, H, Hkv,
    dh, block, budget, 1/sqrt(dh) (a float32 argument), error, layer, splits of a KV head's query heads,
    address of the first cell for block 0, or 0. dh is a multiple of 16.
    """
    p = i64_view(a, 19)
    H, Hkv, dh, block, budget, splits = p[9], p[10], p[11], p[12], p[13], p[17]
    t, rest = k // (Hkv * splits), k % (Hkv * splits)
    kv, split = rest // splits, rest % splits
    group = H // Hkv
    first, last = split * group // splits, (split + 1) * group // splits
    heads, head0 = last - first, t * H + kv * group + first
    n = ld64(p[3]) + t + 1
    blocks = i32_view(p[8] + t * budget * 4, max(budget, 1))
    n_blocks, entries, tail_start = 0, n, 0
    if block == 0:
        if budget > 0:
            tail_start = max(0, n - budget)
        if p[18] != 0:
            tail_start = max(tail_start, min(ld64(p[18]), n - 1))
        entries = n - tail_start
    if block != 0:
        tail_start = n // block * block
        n_blocks = min(budget, n // block)
        entries = n_blocks * block + n - tail_start
    int8 = p[5] != 0
    k_cells, v_cells = ld64(p[4]), ld64(p[6])
    k_scales, v_scales = (ld64(p[5]), ld64(p[7])) if int8 else (0, 0)
    q, places = p[0] + head0 * dh * 4, np.empty(TILE + AHEAD, np.int64)
    # Floats: weights, spare room of the scores, o; per head m and l so far, of the tile, and factors of the merge.
    space = np.empty(heads * (TILE + 256 + dh) + 2 * dh + 16, np.float32)
    weights = (space.ctypes.data + 63) & -64
    o = weights + heads * TILE * 4
    spare = o + heads * dh * 4
    m, l = np.empty(heads, np.float32), np.empty(heads, np.float32)
    m_tile, l_tile = np.empty(heads, np.float32), np.empty(heads, np.float32)
    old, new = np.empty(heads, np.float32), np.empty(heads, np.float32)
    worst = np.zeros(1, np.int32)
    for base in range(0, entries, TILE):
        width = min(TILE, entries - base)
        _list_places(places, base, entries, blocks, n_blocks, block, tail_start, Hkv, kv)
        at = places.ctypes.data
        if int8:
            scores_of("i8", q, heads, dh, k_cells, k_scales, at, width, a + 8 * 14, spare, weights, 4 * TILE)
        else:
            scores_of("f16", q, heads, dh, k_cells, 0, at, width, a + 8 * 14, spare, weights, 4 * TILE)
        softmax_tile(weights, heads, width, m_tile.ctypes.data, l_tile.ctypes.data, worst.ctypes.data)
        factors = 0
        if base == 0:
            m[:] = m_tile
            l[:] = l_tile
        else:
            factors = new.ctypes.data
            for h in range(heads):
                top = max(m[h], m_tile[h])
                old[h], new[h] = exp32(m[h] - top), exp32(m_tile[h] - top)
                m[h], l[h] = top, fma32(l_tile[h], new[h], l[h] * old[h])
        if int8:
            weigh_tile("i8", weights, heads, width, dh, v_cells, v_scales, at, old.ctypes.data, factors, o)
        else:
            weigh_tile("f16", weights, heads, width, dh, v_cells, 0, at, old.ctypes.data, factors, o)
    fine = worst[0] < 0x7F800000
    for h in range(heads):
        sums = f32_view(o + h * dh * 4, dh)
        gate = f32_view(p[1] + ((head0 + h) * 2 + 1) * dh * 4, dh)
        y = f32_view(p[2] + (head0 + h) * dh * 4, dh)
        total = l[h]
        for i in range(dh):
            y[i] = (sums[i] / total) * sigmoid32(gate[i])
        # An infinite gate would end as a finite sigmoid.
        fine = fine and all_finite(y) and all_finite(gate)
    if not fine:
        report(p[15], NOT_FINITE, p[16], t)
    space[0] = F(0)  # the last use: what lies at its address lives as long


def attend_splits(T: int, H: int, Hkv: int, threads: int) -> int:
    """Chunks that the query heads of one KV head are cut into: two a thread, if cells are not widened too often."""
    group = H // Hkv
    wanted = -(-2 * threads // (T * Hkv)) if threads > 1 else 1
    heads = max(HEADS_A_CHUNK, group // wanted // HEADS_A_CHUNK * HEADS_A_CHUNK)
    return -(-group // heads)


def lower_qsa_attend(c: Lowering, op: Op) -> None:
    k = op.consts
    need(k["dh"] % LANES == 0, "attention heads have an odd size", found=k["dh"], needed=f"a multiple of {LANES}")
    splits = attend_splits(c.T, k["H"], k["Hkv"], c.threads)
    scale = float(np.float32(1) / np.sqrt(np.float32(k["dh"])))
    c.parallel(c.T * k["Hkv"] * splits, qsa_attend, c.at(op, "q"), c.at(op, "q_gate"), c.at(op, "y"), c.at(op, "pos"),
               c.slot(op, "k"), c.slot(op, "k_scales"), c.slot(op, "v"), c.slot(op, "v_scales"), c.at(op, "blocks"),
               k["H"], k["Hkv"], k["dh"], k["block"], k["budget"], float_argument(scale), c.error, op.layer,
               splits, c.at(op, "first"))  # fmt: skip
