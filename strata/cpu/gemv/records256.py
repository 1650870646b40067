"""Activation records of the super-block formats in the tiers 512 and 256, and their quantisers.

A record is a row of steps of 256 values; step s of row r lies at records + r * record_bytes + s * step_bytes, at 0 with
256 int8 codes in the order in which a family of formats adds them up: operands of 64 bytes, where byte 4l + i meets
lane l. What else a step holds is at the offsets named below; `scale_at` is where the float32 scale is. Bytes without a
meaning are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strata.base.arithmetic import INF_BITS, TINY_BITS
from strata.base.compiled import CFunction
from strata.base.program import NOT_FINITE
from strata.cpu.simd import Simd, Value, f32, i8, i16, i32, i64, kernel_intrinsic, vector

STEP = 256
"""Values of a step and of a block."""

SUMS_32 = 256
"""Q4_K, Q5_K: int16 sums of runs of 32 codes."""

SUMS_16 = 256
"""Q2_K: int16 sums of 16 codes, in value order."""

TOTALS_2K, Q3_BIAS = 448, 124
"""Q3_K: int32 -Q3_BIAS times the sum of a lane's codes; products of weights and sub-scales are from -124 to 128."""

PAIRS_2K, PAIRS_6K = 320, 256
"""Q3_K and Q6_K: int16 sums of four neighbours: for every lane those of operands 0 and 1, then of operands 2 and 3."""

OFFSETS_6K, Q6_OFFSET = 448, 32
"""Q6_K: the pairs of PAIRS_6K, times -Q6_OFFSET."""

LANE_SUMS = 256
"""IQ4_XS: int32 -XS_BIAS times the sum of a lane's codes in operands 0 and 1, then in operands 2 and 3. Grid formats:
-GRID_BIAS times the sum of a lane's codes."""

XS_BIAS, GRID_BIAS = 128, 64
"""What kernels add to signed weights, to have them unsigned."""


@dataclass(frozen=True)
class Arrangement:
    """order     value index of every code
    pieces    how many neighbours in order stay together, 16 or 32; 0: see `_spread`
    padding   zeros from `scale_at` on, the scale among them

    extras(s, record, fours) writes the sums; fours: four int32 (16,), the sums of four neighbours, in value order.
    """

    name: str
    order: np.ndarray
    pieces: int
    step_bytes: int
    scale_at: int
    padding: int
    extras: Callable[[Simd, Value, list[Value]], None]

    def record_bytes(self, K: int) -> int:
        """Bytes of a record of K values, K a multiple of 256."""
        return K // STEP * self.step_bytes


# ---- sums of codes


def _neighbours(s: Simd, values: Value) -> Value:
    """Sums of two neighbours."""
    n = values.type.count
    return s.b.add(s.pick(values, range(0, n, 2)), s.pick(values, range(1, n, 2)))


def _sixteens(s: Simd, fours: list[Value]) -> Value:
    return s.join(*(_neighbours(s, _neighbours(s, f)) for f in fours))


def _sums_of_32(s: Simd, record: Value, fours: list[Value]) -> None:
    sums = _neighbours(s, _sixteens(s, fours))
    s.store(s.b.trunc(sums, vector(i16, 8)), record, SUMS_32)


def _pairs(s: Simd, record: Value, operands: list[Value], at: int) -> list[Value]:
    made = []
    for k in (0, 2):
        both = s.b.or_(s.and_(operands[k], 0xFFFF), s.shl(operands[k + 1], 16))
        s.store(both, record, at + 32 * k)
        made.append(both)
    return made


def _sums_2k(s: Simd, record: Value, fours: list[Value]) -> None:
    s.store(s.b.trunc(_sixteens(s, fours), vector(i16, 16)), record, SUMS_16)
    halves = [s.part(f, k, 8) for f in fours for k in (0, 8)]
    operands = [s.join(halves[k], halves[4 + k]) for k in range(4)]
    _pairs(s, record, operands, PAIRS_2K)
    total = s.b.add(s.b.add(operands[0], operands[1]), s.b.add(operands[2], operands[3]))
    s.store(s.b.mul(total, s.splat(i32, 16, -Q3_BIAS)), record, TOTALS_2K)


def _sums_6k(s: Simd, record: Value, fours: list[Value]) -> None:
    for k, both in enumerate(_pairs(s, record, fours, PAIRS_6K)):
        s.store(_times_minus(s, s.cast(both, i16, 32), Q6_OFFSET), record, OFFSETS_6K + 64 * k)


def _times_minus(s: Simd, sums: Value, power_of_two: int) -> Value:
    return s.negate(s.shl(sums, power_of_two.bit_length() - 1))


def _sums_xs(s: Simd, record: Value, fours: list[Value]) -> None:
    for v, f in enumerate(fours):  # two runs of 32: words 0..3 of their first and of their second 16
        first, second = (s.pick(f, [*range(k, k + 4), *range(k + 8, k + 12)]) for k in (0, 4))
        s.store(_times_minus(s, s.b.add(first, second), XS_BIAS), record, LANE_SUMS + 32 * v)


def _sums_grid(s: Simd, record: Value, fours: list[Value]) -> None:
    s.store(_times_minus(s, _sixteens(s, fours), GRID_BIAS), record, LANE_SUMS)


# ---- arrangements

_VALUES = np.arange(STEP)

K4 = Arrangement("k4", _VALUES.reshape(2, 2, 2, 32).swapaxes(1, 2).ravel(), 32, 320, 272, 48, _sums_of_32)
"""Q4_K, Q5_K. Operands: runs of 32 values (0, 2), (1, 3), (4, 6), (5, 7)."""

K2 = Arrangement("k2", _VALUES.reshape(2, 4, 32).swapaxes(0, 1).ravel(), 32, 512, 288, 32, _sums_2k)
"""Q2_K, Q3_K. Operands: runs (0, 4), (1, 5), (2, 6), (3, 7)."""

K6 = Arrangement("k6", _VALUES, 32, 576, 384, 64, _sums_6k)
"""Q6_K. Operands: runs (0, 1), (2, 3), (4, 5), (6, 7)."""

XS = Arrangement("xs", _VALUES.reshape(2, 4, 2, 16).swapaxes(1, 2).ravel(), 16, 448, 384, 64, _sums_xs)
"""IQ4_XS. Operands: the first, then the second 16 values of runs 0 to 3; the same of runs 4 to 7."""

BYTES = Arrangement("grid_bytes", _VALUES.reshape(64, 4).T.ravel(), 0, 384, 320, 64, _sums_grid)
"""Grid formats, tier 512. Operand c: byte c of every four neighbours."""

WORDS = Arrangement("grid_words", _VALUES.reshape(2, 8, 4, 4).swapaxes(1, 2).ravel(), 0, 384, 320, 64, _sums_grid)
"""Grid formats, tier 256. For both halves of 128 values: four neighbours of each of the 8 lanes, then the next four."""

ARRANGEMENTS = {a.name: a for a in (K4, K2, K6, XS, BYTES, WORDS)}


# ---- quantiser


def _factor(s: Simd, row: Value, place: Value, error_word: Value) -> Value:
    """Writes the scale of the 256 values at `row`; returns what to multiply them by."""
    largest = None
    for k in range(0, STEP, 32):
        magnitudes = s.and_(s.load(row, 4 * k, i32, 32), 0x7FFFFFFF)
        largest = magnitudes if largest is None else s.umax(largest, magnitudes)
    bits = s.largest(largest)
    infinite = s.b.icmp_unsigned(">=", bits, s.const(i32, INF_BITS))
    with s.b.if_then(infinite, likely=False):
        known = s.load(error_word, 0, i64)
        fresh = s.b.icmp_signed("==", known, s.const(i64, 0))
        s.store(s.b.select(fresh, s.const(i64, NOT_FINITE), known), error_word)
    dead = s.b.or_(infinite, s.b.icmp_unsigned("<", bits, s.const(i32, TINY_BITS)))
    amax, limit, zero = s.cast(bits, f32), s.const(f32, 127.0), s.const(f32, 0.0)
    s.store(s.b.select(dead, zero, s.b.fdiv(amax, limit)), place)
    return s.b.select(dead, zero, s.b.fdiv(limit, amax))


def _codes(s: Simd, row: Value, first: int, factor: Value, lanes: int) -> Value:
    """64 values from `first` on -> their int8 codes. 0 times Inf or NaN becomes the integer -2^31, whose low byte is
    the 0 that a group without a finite scale has."""
    parts = []
    for k in range(first, first + 64, lanes):
        product = s.b.fmul(s.load(row, 4 * k, f32, lanes), s.spread(factor, lanes))
        parts.append(s.round_to_int(product))
    return s.b.trunc(s.join(*parts), vector(i8, 64))


def _fours(s: Simd, codes: Value) -> Value:
    """int8 (64,) -> int32 (16,)."""
    return s.join(*(s.pairs(s.maddubs(s.splat(i8, 32, 1), s.part(codes, k, 32))) for k in (0, 32)))


def _spread(s: Simd, record: Value, arrangement: Arrangement, codes: list[Value]) -> None:
    """Writes codes whose neighbours part: first inside 64 or 128 of them, then as pieces."""
    if arrangement is BYTES:
        for v, c in enumerate(codes):
            apart = s.pick(c, _VALUES[:64].reshape(16, 4).T.ravel())
            for k in range(4):
                s.store(s.part(apart, 16 * k, 16), record, 64 * k + 16 * v)
        return
    for half in range(2):
        words = s.cast(s.join(*codes[2 * half : 2 * half + 2]), i32, 32)
        for k in range(4):
            s.store(s.pick(words, [4 * lane + k for lane in range(8)]), record, 128 * half + 32 * k)


def _emit(s: Simd, name: str, tier: int) -> None:
    arrangement = ARRANGEMENTS[name]
    x, K, R, x_stride, records, error_word = s.args
    n_steps = s.b.lshr(K, s.const(i64, STEP.bit_length() - 1))
    with s.loop(R) as r:
        row = s.pointer(s.b.add(x, s.b.mul(r, x_stride)))
        first = s.pointer(s.b.add(records, s.b.mul(r, s.times(n_steps, arrangement.step_bytes))))
        with s.loop(n_steps) as k:
            values, record = s.at(row, s.times(k, 4 * STEP)), s.at(first, s.times(k, arrangement.step_bytes))
            for at in range(0, arrangement.padding, 16):
                s.store(s.zero(i8, 16), record, arrangement.scale_at + at)
            factor = _factor(s, values, s.at(record, arrangement.scale_at), s.pointer(error_word))
            codes = [_codes(s, values, 64 * v, factor, tier // 32) for v in range(4)]
            pieces = arrangement.pieces
            if pieces:
                for at, value in enumerate(arrangement.order[::pieces]):
                    s.store(s.part(codes[value // 64], value % 64, pieces), record, pieces * at)
            else:
                _spread(s, record, arrangement, codes)
            arrangement.extras(s, record, [_fours(s, c) for c in codes])


_quantise = kernel_intrinsic("quantise256", _emit, n_args=6)


def quantiser(name: str, tier: int) -> CFunction:
    """quantise(x, K, R, x_stride, records, error_word) into records of an arrangement; K a multiple of 256."""

    def quantise(x, K, R, x_stride, records, error_word):
        _quantise(name, tier, x, K, R, x_stride, records, error_word)

    quantise.__qualname__ = f"quantise256_{name}_{tier}"
    return CFunction(quantise, 6)
