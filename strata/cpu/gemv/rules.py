"""The lane rules of the quantised formats as index tables, for 256 values of a row.

The 256 products are first added in fours: dot w is the sum of values 4w..4w+3 of the step (64 dots, exact). A rule says
which dots meet in which lane, with which integer sub-scale, and which float scales belong to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Index = tuple[int, ...]


@dataclass(frozen=True)
class Sum:
    """n lanes of integers and their scales; n is a multiple of `width`, one fma per `width` lanes, in order.

    width     lanes of the accumulator
    terms     the integer of lane l is the sum over terms of source[term[l]], times factor[factors[term][l]] if present
    factors   index lists beside `terms`, or None: no integer factors
    weight    float weight scale of every lane: index into the unpacked scales
    x         float activation scale of every lane: index into the scales of the step
    negative  the sum is subtracted
    """

    width: int
    terms: tuple[Index, ...]
    factors: tuple[Index, ...] | None
    weight: Index
    x: Index
    negative: bool = False


@dataclass(frozen=True)
class Rule:
    """group: values an activation scale covers. lanes: from the 64 dots, factors are the sub-scales. lowest: from the
    sums of activation codes, factors are the minima; or None."""

    group: int
    lanes: Sum
    lowest: Sum | None = None


def _index(x: np.ndarray) -> Index:
    return tuple(int(i) for i in np.ravel(x))


def _per(n: int, width: int) -> Index:
    """0, 0, .., 1, 1, ..: n numbers, `width` times each."""
    return _index(np.repeat(np.arange(n), width))


def _zeros(n: int) -> Index:
    return (0,) * n


def _columns(table: np.ndarray) -> tuple[Index, ...]:
    """(lanes, terms) -> one index list a term."""
    return tuple(_index(c) for c in table.T)


_DOTS = np.arange(64)
_LANES = np.arange(16)

# blocks of 32 and 64 values
_words = Sum(16, (_index(_DOTS),), None, _per(8, 8), _per(8, 8))
_halves = Sum(16, _columns(_DOTS.reshape(8, 2, 4).transpose(0, 2, 1).reshape(32, 2)), None, _per(8, 4), _per(8, 4))
_halves_of_16 = Sum(
    16, _columns(_DOTS.reshape(16, 2, 2).transpose(0, 2, 1).reshape(32, 2)), None, _per(16, 2), _per(8, 4)
)
_runs = _columns(_DOTS.reshape(16, 4))
_runs_of_2 = Sum(16, _runs, None, _per(4, 4), _per(8, 2))
_block_minima = Sum(4, (_index(np.arange(8)),), None, _index(np.arange(8)), _index(np.arange(8)))

# super-blocks
_grid = Sum(16, _runs, None, _index(_LANES), _zeros(16))


def _scaled(dots: np.ndarray, sub_block: int) -> Sum:
    """dots (16 lanes, terms), each times the sub-scale of its `sub_block` values."""
    return Sum(16, _columns(dots), _columns(dots // (sub_block // 4)), _zeros(16), _zeros(16))


_k4 = _scaled(_DOTS.reshape(2, 2, 2, 8).transpose(1, 3, 0, 2).reshape(16, 4), 32)
_k2 = _scaled(_DOTS.reshape(2, 4, 8).transpose(0, 2, 1).reshape(16, 4), 16)
_k6 = _scaled(_DOTS.reshape(4, 16).T, 16)
_iq4_xs = _scaled(_DOTS.reshape(2, 4, 2, 4).transpose(1, 3, 0, 2).reshape(16, 4), 32)

_SUMS = np.arange(16)  # sums of 16 codes
_k4_minima = Sum(
    4, _columns(_SUMS.reshape(4, 4)), _columns(_SUMS.reshape(4, 4) // 2), _zeros(4), _zeros(4), negative=True
)
_k2_subs = _SUMS.reshape(2, 4, 2).transpose(1, 0, 2).reshape(4, 4)
_k2_minima = Sum(4, _columns(_k2_subs), _columns(_k2_subs), _zeros(4), _zeros(4), negative=True)

RULES: dict[str, Rule] = {
    "Q4_0": Rule(32, _halves),
    "Q4_1": Rule(32, _halves, _block_minima),
    "Q5_0": Rule(32, _halves),
    "Q5_1": Rule(32, _halves, _block_minima),
    "Q8_0": Rule(32, _words),
    "IQ4_NL": Rule(32, _halves),
    "MXFP4": Rule(32, _halves),
    "NVFP4": Rule(32, _halves_of_16),
    "Q2_0": Rule(32, _runs_of_2),
    "Q2_K": Rule(256, _k2, _k2_minima),
    "Q3_K": Rule(256, _k2),
    "Q4_K": Rule(256, _k4, _k4_minima),
    "Q5_K": Rule(256, _k4, _k4_minima),
    "Q6_K": Rule(256, _k6),
    "IQ4_XS": Rule(256, _iq4_xs),
} | {name: Rule(256, _grid) for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")}
