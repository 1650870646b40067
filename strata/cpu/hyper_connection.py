"""Hyper-connections between C residual streams: norm, squeeze, mix, add. The two low-rank products are `linear` ops.

N = rms(X[c]) * w            per stream, weight C*D long
low = silu(Wdown N / C)      gate = Wup low
u = mean over c of sigmoid(gate) * N        a = 2 sigmoid(Winject N / C)
X[c] = fma(a[c], y, X[c])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.base.compiled import chunk, step
from strata.base.program import NOT_FINITE
from strata.cpu.error_word import report
from strata.cpu.float_bits import fma32, sigmoid32, silu32
from strata.cpu.float_sums import all_finite, inverse_rms, is_finite
from strata.cpu.machine_code import f32_view, i64_view, ld64, ldf32
from strata.cpu.walker import float_argument

if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering

F = np.float32
MIX_COLUMNS = 1024
"""Columns a mix chunk takes: 1024 x C sigmoids are about 4 us, well above the cost of handing out a chunk."""


@chunk
def hc_norm(a, k, n_chunks):
    """One stream of one row.

    Record: x, w, y, C, D, eps (a float32 argument), address of the first row's index or 0, error, layer.
    """
    p = i64_view(a, 9)
    C, D = p[3], p[4]
    row, c = k // C, k % C
    first = ld64(p[6]) if p[6] != 0 else 0
    acc = np.empty(256, np.float32)
    x = f32_view(p[0] + ((first + row) * C + c) * D * 4, D)
    y = f32_view(p[2] + (row * C + c) * D * 4, D)
    w = f32_view(p[1] + c * D * 4, D)
    r = inverse_rms(x, D, ldf32(a + 8 * 5), acc)
    if not (is_finite(acc[0]) and is_finite(r)):
        report(p[7], NOT_FINITE, p[8], row)
    for i in range(D):
        y[i] = (x[i] * r) * w[i]


@step
def hc_squeeze(a):
    """In place: x = silu(x / C). Record: x, count, C, error, layer."""
    p = i64_view(a, 5)
    x = f32_view(p[0], p[1])
    C = F(p[2])
    for i in range(p[1]):
        x[i] = silu32(x[i] / C)
    if not all_finite(x):
        report(p[3], NOT_FINITE, p[4], 0)


@chunk
def hc_mix(a, k, n_chunks):
    """Some columns of one row; the mean is an ascending sum over streams, then / C.

    Record: normed, gate, u, C, D, inject (or 0), a, error, layer, pieces a row.
    """
    p = i64_view(a, 10)
    C, D, pieces = p[3], p[4], p[9]
    row, piece = k // pieces, k % pieces
    low, high = piece * D // pieces, (piece + 1) * D // pieces
    count = F(C)
    u = f32_view(p[2] + (row * D + low) * 4, high - low)
    fine = True  # an infinite gate would end as a finite sigmoid
    for c in range(C):
        n = f32_view(p[0] + ((row * C + c) * D + low) * 4, high - low)
        gate = f32_view(p[1] + ((row * C + c) * D + low) * 4, high - low)
        fine = all_finite(gate) and fine
        if c == 0:
            for i in range(high - low):
                u[i] = sigmoid32(gate[i]) * n[i]
        else:
            for i in range(high - low):
                u[i] = u[i] + sigmoid32(gate[i]) * n[i]
    for i in range(high - low):
        u[i] = u[i] / count
    fine = all_finite(u) and fine
    if p[5] != 0 and piece == 0:
        inject, strength = f32_view(p[5] + row * C * 4, C), f32_view(p[6] + row * C * 4, C)
        for c in range(C):
            strength[c] = F(2) * sigmoid32(inject[c] / count)
        fine = all_finite(inject) and fine
    if not fine:
        report(p[7], NOT_FINITE, p[8], row)


@chunk
def hc_add(a, row, rows):
    """One row: X[c] = fma(a[c], y, X[c]). Record: x, y, a, C, D."""
    p = i64_view(a, 5)
    C, D = p[3], p[4]
    y = f32_view(p[1] + row * D * 4, D)
    strength = f32_view(p[2] + row * C * 4, C)
    for c in range(C):
        x = f32_view(p[0] + (row * C + c) * D * 4, D)
        s = strength[c]
        for i in range(D):
            x[i] = fma32(s, y[i], x[i])


def mix_pieces(D: int) -> int:
    """Chunks that the columns of one row of a mix are cut into."""
    return max(1, D // MIX_COLUMNS)


def lower_hc_norm(c: Lowering, op: Op) -> None:
    k = op.consts
    first = c.memory.address("head_row") if k["head"] else 0
    c.parallel(c.T * k["C"], hc_norm, c.at(op, "x"), c.vector(op, "w"), c.at(op, "y"), k["C"], k["D"],
               float_argument(k["eps"]), first, c.error, op.layer)  # fmt: skip


def lower_hc_squeeze(c: Lowering, op: Op) -> None:
    c.step(hc_squeeze, c.at(op, "x"), c.T * op.consts["n"], op.consts["C"], c.error, op.layer)


def lower_hc_mix(c: Lowering, op: Op) -> None:
    C, D = op.consts["C"], op.consts["D"]
    pieces = mix_pieces(D)
    c.parallel(c.T * pieces, hc_mix, c.at(op, "normed"), c.at(op, "gate"), c.at(op, "u"), C, D, c.at(op, "inject"),
               c.at(op, "a"), c.error, op.layer, pieces)  # fmt: skip


def lower_hc_add(c: Lowering, op: Op) -> None:
    c.parallel(c.T, hc_add, c.at(op, "x"), c.at(op, "y"), c.at(op, "a"), op.consts["C"], op.consts["D"])
