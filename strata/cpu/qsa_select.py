"""Sparse attention, second part: scores of complete blocks and the exact best of them.

score(b) = sum over heads of max(0, q_h . key_b), 32 lanes a dot product, heads ascending. The factor 1/sqrt(dim) of the
model's definition does not change the ranking and is left out. The best `budget` blocks are taken, ties to the lowest
block; they are listed in ascending order. Scores are not negative, so their bits rank like their values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from strata.base.compiled import chunk
from strata.base.errors import need
from strata.base.program import NOT_FINITE
from strata.cpu.error_word import report
from strata.cpu.float_bits import f32_bits
from strata.cpu.float_sums import all_finite
from strata.cpu.float_vectors import LANES
from strata.cpu.head_vectors import scores_of
from strata.cpu.machine_code import i32_view, i64_view, ld64

if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering

F = np.float32
I = np.int32
PART = 256
"""Blocks scored at a time."""


@njit(error_model="numpy")
def score_blocks(q, keys, scores, heads, dim, n):
    """scores[b] for b < n; q and keys are addresses of (heads, dim) and (n, dim) float32, dim a multiple of 16."""
    by_head, spare = np.empty((heads, PART), np.float32), np.empty(heads * 256 + 2 * dim, np.float32)
    one = np.ones(1, np.float32)
    for base in range(0, n, PART):
        width = min(PART, n - base)
        scores_of("f32", q, heads, dim, keys + base * dim * 4, 0, 0, width, one.ctypes.data, spare.ctypes.data,
                  by_head.ctypes.data, 4 * PART)  # fmt: skip
        for b in range(width):
            scores[base + b] = F(0)
        for h in range(heads):
            for b in range(width):
                s = by_head[h, b]
                total = scores[base + b] + (s if s > F(0) else F(0))
                scores[base + b] = total if s == s else s
    spare[0] = by_head[0, 0] = F(0)  # the last use: what lies at their addresses lives as long


@njit(error_model="numpy")
def _digit_of_kth(counts, left):
    """(digit, how many are still to be found among values of that digit), from the largest digit down."""
    digit = counts.size - 1
    while counts[digit] < left:
        left -= counts[digit]
        digit -= 1
    return digit, left


@njit(error_model="numpy")
def kth_largest_bits(scores, n, k):
    """(bits of the k-th largest of n non-negative scores, how many of that value are among the k largest).

    Found digit by digit from the top: exponent and three more bits, then 12 and 8 bits of what shares them.
    """
    counts, rest = np.empty(4096, np.int32), np.empty(n, np.int32)
    counts[:2048] = 0
    for b in range(n):
        counts[f32_bits(scores[b]) >> I(20)] += 1
    high, left = _digit_of_kth(counts[:2048], k)
    m = 0
    for b in range(n):
        u = f32_bits(scores[b])
        rest[m] = u
        m += 1 if (u >> I(20)) == high else 0
    counts[:] = 0
    for b in range(m):
        counts[(rest[b] >> I(8)) & I(4095)] += 1
    middle, left = _digit_of_kth(counts, left)
    counts[:256] = 0
    for b in range(m):
        if ((rest[b] >> I(8)) & I(4095)) == middle:
            counts[rest[b] & I(255)] += 1
    low, left = _digit_of_kth(counts[:256], left)
    return I((high << 20) | (middle << 8) | low), left


@njit(error_model="numpy")
def take_best(scores, n, k, out):
    """out[:k] = indices of the k largest scores, ascending; of equal ones at the edge the lowest indices."""
    edge, at_edge = kth_largest_bits(scores, n, k)
    m = 0
    for b in range(n):
        u = f32_bits(scores[b])
        if u > edge or (u == edge and at_edge > 0):
            if u == edge:
                at_edge -= 1
            out[m] = b
            m += 1


@chunk
def qsa_select(a, t, T):
    """One row. Record: iq, block keys slot, pos, blocks out (T, budget), heads, dim, block, budget, error, layer.

    With no more complete blocks than the budget nothing is scored: all are taken.
    """
    p = i64_view(a, 10)
    heads, dim, block, budget = p[4], p[5], p[6], p[7]
    n = (ld64(p[2]) + t + 1) // block
    out = i32_view(p[3] + t * budget * 4, budget)
    if n <= budget:
        for b in range(n):
            out[b] = b
        return
    scores = np.empty(n, np.float32)
    score_blocks(p[0] + t * heads * dim * 4, ld64(p[1]), scores, heads, dim, n)
    if not all_finite(scores):
        report(p[8], NOT_FINITE, p[9], t)
        return
    take_best(scores, n, budget, out)


def lower_qsa_select(c: Lowering, op: Op) -> None:
    k = op.consts
    need(k["dim"] % LANES == 0, "indexer heads have an odd size", found=k["dim"], needed=f"a multiple of {LANES}")
    c.parallel(c.T, qsa_select, c.at(op, "iq"), c.slot(op, "keys"), c.at(op, "pos"), c.at(op, "blocks"), k["heads"],
               k["dim"], k["block"], k["budget"], c.error, op.layer)  # fmt: skip
