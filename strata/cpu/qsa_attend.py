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

from strata.base.program import NOT_FINITE
from strata.cpu.compiled import chunk
from strata.cpu.error_word import report
from strata.cpu.float_bits import exp32, fma32, sigmoid32
from strata.cpu.float_sums import HEAD_LANES, all_finite, dot_lanes, is_finite, lanes_of, tree
from strata.cpu.kv_cells import load_head
from strata.cpu.machine_code import f32_view, i32_view, i64_view, ld64, ldf32
from strata.cpu.walker import float_argument

if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering

F = np.float32
TILE = 64
HEADS_A_CHUNK = 4


@njit(error_model="numpy")
def _cell(entry, blocks, n_blocks, block, tail_start):
    """Position of list entry number `entry`."""
    if block == 0:
        return tail_start + entry
    if entry < n_blocks * block:
        return blocks[entry // block] * block + entry % block
    return tail_start + entry - n_blocks * block


@chunk
def qsa_attend(a, k, n_chunks):
    """Some query heads of one KV head of one row.

    Record: q, q_gate, y, pos, k cells slot, k scales slot or 0, v cells slot, v scales slot or 0, blocks or 0, H, Hkv,
    dh, block, budget, 1/sqrt(dh) (a float32 argument), error, layer, splits of a KV head's query heads,
    address of the first cell for block 0, or 0.
    """
    p = i64_view(a, 19)
    H, Hkv, dh, block, budget, splits = p[9], p[10], p[11], p[12], p[13], p[17]
    scale = ldf32(a + 8 * 14)
    t, rest = k // (Hkv * splits), k % (Hkv * splits)
    kv, split = rest // splits, rest % splits
    group = H // Hkv
    first, last = split * group // splits, (split + 1) * group // splits
    heads, head0 = last - first, kv * group + first
    n = ld64(p[3]) + t + 1
    k_scales = ld64(p[5]) if p[5] != 0 else 0
    v_scales = ld64(p[7]) if p[7] != 0 else 0
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
    lanes = lanes_of(dh, HEAD_LANES)
    acc, row = np.empty(HEAD_LANES, np.float32), np.empty(dh, np.float32)
    s, sums = np.empty((heads, TILE), np.float32), np.empty(TILE, np.float32)
    o, o_tile = np.empty((heads, dh), np.float32), np.empty((heads, dh), np.float32)
    m, l = np.empty(heads, np.float32), np.empty(heads, np.float32)
    m_tile, l_tile = np.empty(heads, np.float32), np.empty(heads, np.float32)
    fine = True
    for base in range(0, entries, TILE):
        width = min(TILE, entries - base)
        for e in range(width):
            cell = _cell(base + e, blocks, n_blocks, block, tail_start)
            load_head(ld64(p[4]), k_scales, cell * Hkv + kv, row, dh)
            for h in range(heads):
                q = f32_view(p[0] + (t * H + head0 + h) * dh * 4, dh)
                s[h, e] = dot_lanes(q, row, dh, lanes, acc) * scale
                fine = fine and is_finite(s[h, e])
        for h in range(heads):
            top = s[h, 0]
            for e in range(1, width):
                top = max(top, s[h, e])
            for e in range(TILE):
                s[h, e] = exp32(s[h, e] - top) if e < width else F(0)
                sums[e] = s[h, e]
            m_tile[h], l_tile[h] = top, tree(sums, TILE)
            for i in range(dh):
                o_tile[h, i] = F(0)
        for e in range(width):
            cell = _cell(base + e, blocks, n_blocks, block, tail_start)
            load_head(ld64(p[6]), v_scales, cell * Hkv + kv, row, dh)
            for h in range(heads):
                weight = s[h, e]
                for i in range(dh):
                    o_tile[h, i] = fma32(weight, row[i], o_tile[h, i])
        for h in range(heads):
            if base == 0:
                m[h], l[h] = m_tile[h], l_tile[h]
                for i in range(dh):
                    o[h, i] = o_tile[h, i]
                continue
            top = max(m[h], m_tile[h])
            old, new = exp32(m[h] - top), exp32(m_tile[h] - top)
            m[h] = top
            l[h] = fma32(l_tile[h], new, l[h] * old)
            for i in range(dh):
                o[h, i] = fma32(o_tile[h, i], new, o[h, i] * old)
    for h in range(heads):
        gate = f32_view(p[1] + ((t * H + head0 + h) * 2 + 1) * dh * 4, dh)
        y = f32_view(p[2] + (t * H + head0 + h) * dh * 4, dh)
        for i in range(dh):
            y[i] = (o[h, i] / l[h]) * sigmoid32(gate[i])
        # An infinite gate would end as a finite sigmoid.
        fine = fine and all_finite(y) and all_finite(gate)
    if not fine:
        report(p[15], NOT_FINITE, p[16], t)


def lower_qsa_attend(c: Lowering, op: Op) -> None:
    k = op.consts
    splits = -(-(k["H"] // k["Hkv"]) // HEADS_A_CHUNK)
    scale = float(np.float32(1) / np.sqrt(np.float32(k["dh"])))
    c.parallel(c.T * k["Hkv"] * splits, qsa_attend, c.at(op, "q"), c.at(op, "q_gate"), c.at(op, "y"), c.at(op, "pos"),
               c.slot(op, "k"), c.slot(op, "k_scales"), c.slot(op, "v"), c.slot(op, "v_scales"), c.at(op, "blocks"),
               k["H"], k["Hkv"], k["dh"], k["block"], k["budget"], float_argument(scale), c.error, op.layer,
               splits, c.at(op, "first"))  # fmt: skip
