"""Sparse attention, first part: norms and rotation of q and k, append of K, V and indexer keys.

Appends are addressed by position, so a window that is never committed leaves nothing behind: its cells are written
again before anything reads them. Raw indexer keys lie in a ring; a block's pooled key is made when its last cell
arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from strata.base.compiled import chunk, step
from strata.base.program import NOT_FINITE
from strata.cpu.error_word import report
from strata.cpu.float_sums import all_finite, inverse_rms
from strata.cpu.kv_cells import store_head
from strata.cpu.machine_code import copy_bytes, f32_view, i64_view, ld64, ldf32
from strata.cpu.rotary import rotate
from strata.cpu.walker import float_argument

if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering

F = np.float32


@njit(error_model="numpy")
def _norm_rotate(x, w, out, n, eps, table_row, rotary, acc):
    """out = rotate(rms(x) * w)."""
    r = inverse_rms(x, n, eps, acc)
    for i in range(n):
        out[i] = (x[i] * r) * w[i]
    rotate(out, table_row, rotary)


@chunk
def qsa_append(a, t, T):
    """One row. Record: q_gate, k, v, q_norm, k_norm, q_out, pos, rope, k cells slot, k scales slot or 0, v cells slot,
    v scales slot or 0, H, Hkv, dh, rotary, eps (a float32 argument), error, layer."""
    p = i64_view(a, 19)
    H, Hkv, dh, rotary = p[12], p[13], p[14], p[15]
    eps = ldf32(a + 8 * 16)
    position = ld64(p[6]) + t
    table_row = f32_view(p[7] + position * rotary * 4, rotary)
    q_norm, k_norm = f32_view(p[3], dh), f32_view(p[4], dh)
    acc, k = np.empty(256, np.float32), np.empty(dh, np.float32)
    k_scales = ld64(p[9]) if p[9] != 0 else 0
    v_scales = ld64(p[11]) if p[11] != 0 else 0
    fine = True
    for h in range(H):
        q_in = f32_view(p[0] + (t * H + h) * 2 * dh * 4, dh)
        q = f32_view(p[5] + (t * H + h) * dh * 4, dh)
        _norm_rotate(q_in, q_norm, q, dh, eps, table_row, rotary, acc)
        fine = fine and all_finite(q)
    for h in range(Hkv):
        at = position * Hkv + h
        _norm_rotate(f32_view(p[1] + (t * Hkv + h) * dh * 4, dh), k_norm, k, dh, eps, table_row, rotary, acc)
        fine = store_head(ld64(p[8]), k_scales, at, k, dh) and fine
        fine = store_head(ld64(p[10]), v_scales, at, f32_view(p[2] + (t * Hkv + h) * dh * 4, dh), dh) and fine
    if not fine:
        report(p[17], NOT_FINITE, p[18], t)


@step
def qsa_index(a):
    """All rows, in order: indexer queries in place; pooled keys of blocks that end here; raw keys into the ring.

    A pooled key is rotate(rms(mean of the block's raw keys) * w, position of its first cell); the mean is an ascending
    sum, then a division. Record: iq, ik, q_norm, k_norm, block keys slot, ring slot, pos, rope, T, heads, dim, block,
    ring rows, rotary, eps (a float32 argument), error, layer.
    """
    p = i64_view(a, 17)
    T, heads, dim, block, ring_rows, rotary = p[8], p[9], p[10], p[11], p[12], p[13]
    eps = ldf32(a + 8 * 14)
    first, keys, ring = ld64(p[6]), ld64(p[4]), ld64(p[5])
    q_norm, k_norm = f32_view(p[2], dim), f32_view(p[3], dim)
    acc, mean = np.empty(256, np.float32), np.empty(dim, np.float32)
    for t in range(T):
        position = first + t
        table_row = f32_view(p[7] + position * rotary * 4, rotary)
        fine = all_finite(f32_view(p[1] + t * dim * 4, dim))
        for h in range(heads):
            q = f32_view(p[0] + (t * heads + h) * dim * 4, dim)
            _norm_rotate(q, q_norm, q, dim, eps, table_row, rotary, acc)
            fine = fine and all_finite(q)
        if (position + 1) % block == 0:
            start = position + 1 - block
            mean[:] = F(0)
            for cell in range(start, position + 1):
                base = p[1] + (cell - first) * dim * 4 if cell >= first else ring + (cell % ring_rows) * dim * 4
                raw = f32_view(base, dim)
                for i in range(dim):
                    mean[i] = mean[i] + raw[i]
            for i in range(dim):
                mean[i] = mean[i] / F(block)
            out = f32_view(keys + (start // block) * dim * 4, dim)
            _norm_rotate(mean, k_norm, out, dim, eps, f32_view(p[7] + start * rotary * 4, rotary), rotary, acc)
            fine = fine and all_finite(out)
        if not fine:
            report(p[15], NOT_FINITE, p[16], t)
    for t in range(max(0, T - ring_rows), T):
        copy_bytes(ring + ((first + t) % ring_rows) * dim * 4, p[1] + t * dim * 4, dim * 4)


def lower_qsa_append(c: Lowering, op: Op) -> None:
    k = op.consts
    c.parallel(c.T, qsa_append, c.at(op, "q"), c.at(op, "k_in"), c.at(op, "v_in"), c.vector(op, "q_norm"),
               c.vector(op, "k_norm"), c.at(op, "q_out"), c.at(op, "pos"), c.at(op, "rope"), c.slot(op, "k"),
               c.slot(op, "k_scales"), c.slot(op, "v"), c.slot(op, "v_scales"), k["H"], k["Hkv"], k["dh"], k["rotary"],
               float_argument(k["eps"]), c.error, op.layer)  # fmt: skip


def lower_qsa_index(c: Lowering, op: Op) -> None:
    k = op.consts
    c.step(qsa_index, c.at(op, "iq"), c.at(op, "ik"), c.vector(op, "q_norm"), c.vector(op, "k_norm"),
           c.slot(op, "keys"), c.slot(op, "raw"), c.at(op, "pos"), c.at(op, "rope"), c.T, k["heads"], k["dim"],
           k["block"], k["ring"], k["rotary"], float_argument(k["eps"]), c.error, op.layer)  # fmt: skip
