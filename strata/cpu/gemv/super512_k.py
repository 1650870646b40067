"""K-quants in the tier 512: Q2_K to Q6_K, and IQ4_XS, which shares their integer sub-scales.

Four operands of 64 bytes a block: operand o holds the runs of 32 values s and s + 2 for s = RUNS[o], as the records
do. Bytes of weights times codes become int16 pairs, and those times int16 sub-scales int32 lanes. Where the lanes
of a rule are the two halves of an operand the sum is ready; elsewhere `_add_halves` adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.cpu.gemv.records256 import SCALED_SCALE, SUMS_4, SUMS_16, SUMS_32
from strata.cpu.gemv.super_rows import Rows
from strata.cpu.simd import Simd, Value, f32, i8, i16, i32, i64
from strata.pack.grids import CODEBOOK

RUNS = (0, 1, 4, 5)
"""First run of every operand; the second is two further."""

_LOW_HALVES, _HIGH_HALVES = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]


# ---- weights


def _twice(s: Simd, place: Value, at: int) -> Value:
    """32 bytes, two times."""
    return s.pick(s.load(place, at, i8, 32), [*range(32), *range(32)])


def _field(s: Simd, value: Value, low: int, high: int) -> Value:
    """Bits from `low` on in the first half and from `high` on in the second at bit 0 of every byte (from bit -low for a
    negative number); other bits come along, for the caller to mask."""
    starts = [(8 * (i % 8) + (low if i < 32 else high)) % 64 for i in range(64)]
    return s.multishift(s.constant(i8, starts), value)


def _nibbles(s: Simd, runs: Value) -> list[Value]:
    return [s.and_(runs, 15), s.and_(s.shr_bytes(runs, 4), 15)]


def _bytes_to_scales(s: Simd, scales: Value, index: Sequence[int]) -> Value:
    """Unsigned bytes, picked, as int16."""
    zero, n = s.zero(i8, scales.type.count), scales.type.count
    return s.cast(s.pick(scales, [k for i in index for k in (i, n)], zero), i16, len(index))


def _of_runs(o: int) -> list[int]:
    """Index of the sub-scale of every int16 pair of operand o, one for a run of 32."""
    return [RUNS[o]] * 16 + [RUNS[o] + 2] * 16


def _of_half_runs(o: int) -> list[int]:
    """The same, one for 16 values."""
    return [2 * run + half for run in (RUNS[o], RUNS[o] + 2) for half in range(2) for _ in range(8)]


def _spread_half(s: Simd, place: Value, at: int, n: int = 16) -> Value:
    return s.spread(s.widen_half(s.load(place, at, i16)), n)


# ---- sums


def _operand(rows: Rows, r: int, o: int) -> Value:
    return rows.load(r, 64 * o, i8, 64)


def _scaled_sum(rows: Rows, r: int, operands: Sequence[int], weights: list[Value], scales: list[Value]) -> Value:
    """int32 (16,): sum over operands of sub-scale times weights times codes."""
    total = rows.s.zero(i32, 16)
    for o in operands:
        total = rows.s.dpwssd(total, rows.s.maddubs(weights[o], _operand(rows, r, o)), scales[o])
    return total


def _add_halves(s: Simd, a: Value, b: Value) -> Value:
    """Lanes: the halves of a added up, then those of b."""
    return s.b.add(s.pick(a, _LOW_HALVES, b), s.pick(a, _HIGH_HALVES, b))


def _minus(rows: Rows, r: int, total: Value, k: int, scales: Value) -> Value:
    """Takes the offset of unsigned codes back: vector k of `_negative_pairs` times the sums of four codes."""
    return rows.s.dpwssd(total, rows.load(r, SUMS_4 + 64 * k, i16, 32), scales)


def _negative_pairs(s: Simd, scales: Value, offset: int) -> list[Value]:
    """-offset times the sub-scales (int16, 16) that meet the pairs of sums: run s with s + 2."""
    scaled = s.b.mul(scales, s.splat(i16, 16, -offset))
    pairs = [[(2 * run + g // 4, 2 * run + 4 + g // 4) for run in runs for g in range(8)] for runs in ((0, 1), (4, 5))]
    return [s.pick(scaled, sum(index, ())) for index in pairs]


# ---- formats


def _six_bits(s: Simd, place: Value, at: int) -> Value:
    """12 bytes -> eight scales and eight minima of 6 bits (16 bytes)."""
    raw = s.load(place, at, i8, 16)  # the codes begin behind the 12 bytes: still inside the block
    a, b, c = ([*range(k, k + 4)] for k in (0, 4, 8))
    fields = s.pick(raw, [*a, *c, *b, *c])
    low = s.multishift(s.constant(i8, [0, 8, 16, 24, 32, 40, 48, 56, 0, 8, 16, 24, 36, 44, 52, 60]), fields)
    top = s.multishift(s.constant(i8, [0, 0, 0, 0, 2, 10, 18, 26] * 2), fields)
    mask, mask_top = s.constant(i8, ([63] * 4 + [15] * 4) * 2), s.constant(i8, ([0] * 4 + [0x30] * 4) * 2)
    return s.b.or_(s.b.and_(low, mask), s.b.and_(top, mask_top))


def _q4_or_q5(rows: Rows, place: Value, weights: list[Value]) -> None:
    s = rows.s
    scales_and_minima = _six_bits(s, place, 4)
    scales = [_bytes_to_scales(s, scales_and_minima, _of_runs(o)) for o in range(4)]
    minima = _bytes_to_scales(s, scales_and_minima, range(8, 16))
    d, dmin = _spread_half(s, place, 0), _spread_half(s, place, 2, 4)
    for r in range(rows.R):
        rows.add(r, 0, _scaled_sum(rows, r, range(4), weights, scales), d, SCALED_SCALE)
        rows.add_minima(r, s.maddwd(minima, rows.load(r, SUMS_32, i16, 8)), dmin, SCALED_SCALE)


def q4_k(rows: Rows, place: Value) -> None:
    s = rows.s
    _q4_or_q5(rows, place, [n for at in (16, 80) for n in _nibbles(s, s.load(place, at, i8, 64))])


def q5_k(rows: Rows, place: Value) -> None:
    s = rows.s
    nibbles = [n for at in (48, 112) for n in _nibbles(s, s.load(place, at, i8, 64))]
    high = _twice(s, place, 16)
    fifth = [s.and_(_field(s, high, run - 4, run - 2), 16) for run in RUNS]
    _q4_or_q5(rows, place, [s.b.or_(n, f) for n, f in zip(nibbles, fifth, strict=True)])


def _two_bits(s: Simd, place: Value, at: int) -> list[Value]:
    """Codes of 2 bits in 64 bytes, as operands."""
    halves = [_twice(s, place, at), _twice(s, place, at + 32)]
    return [s.and_(_field(s, half, 2 * k, 2 * k + 4), 3) for half in halves for k in range(2)]


def q2_k(rows: Rows, place: Value) -> None:
    s = rows.s
    weights, both = _two_bits(s, place, 16), s.load(place, 0, i8, 16)
    low, high = s.and_(both, 15), s.and_(s.shr_bytes(both, 4), 15)
    scales = [_bytes_to_scales(s, low, _of_half_runs(o)) for o in range(4)]
    minima = _bytes_to_scales(s, high, range(16))
    d, dmin = _spread_half(s, place, 80), _spread_half(s, place, 82, 4)
    for r in range(rows.R):
        halves = [_scaled_sum(rows, r, pair, weights, scales) for pair in ((0, 1), (2, 3))]
        rows.add(r, 0, _add_halves(s, *halves), d, SCALED_SCALE)
        terms = s.maddwd(minima, rows.load(r, SUMS_16, i16, 16))
        rows.add_minima(r, s.b.add(s.part(terms, 0, 4), s.part(terms, 4, 4)), dmin, SCALED_SCALE)


def _q3_scales(s: Simd, place: Value) -> Value:
    """Sixteen sub-scales of 6 bits, minus 32, as int16."""
    raw = s.load(place, 94, i8, 16)  # the last 14 bytes of codes and 12 of scales: nothing lies behind the block
    low = s.pick(raw, [*range(2, 10)] * 2)
    low = s.multishift(s.constant(i8, [8 * k + part for part in (0, 4) for k in range(8)]), low)
    top = s.pick(raw, [*range(10, 14)] * 4)
    top = s.multishift(s.constant(i8, [(8 * (k % 4) + 2 * (k // 4) - 4) % 64 for k in range(16)]), top)
    scales = s.b.or_(s.and_(low, 15), s.and_(top, 0x30))
    return s.b.sext(s.b.sub(scales, s.splat(i8, 16, 32)), s.zero(i16, 16).type)


def q3_k(rows: Rows, place: Value) -> None:
    s = rows.s
    high = _twice(s, place, 0)
    third = [s.and_(_field(s, high, run - 2, run), 4) for run in RUNS]
    weights = [s.b.or_(c, t) for c, t in zip(_two_bits(s, place, 32), third, strict=True)]
    sub_scales = _q3_scales(s, place)
    scales = [s.pick(sub_scales, _of_half_runs(o)) for o in range(4)]
    negative, d = _negative_pairs(s, sub_scales, 4), _spread_half(s, place, 108)
    for r in range(rows.R):
        halves = [_scaled_sum(rows, r, pair, weights, scales) for pair in ((0, 1), (2, 3))]
        halves = [_minus(rows, r, half, k, negative[k]) for k, half in enumerate(halves)]
        rows.add(r, 0, _add_halves(s, *halves), d, SCALED_SCALE)


def q6_k(rows: Rows, place: Value) -> None:
    s = rows.s
    weights = []
    for half in range(2):
        high = _twice(s, place, 128 + 32 * half)
        for k in range(2):
            low = _field(s, _twice(s, place, 64 * half + 32 * k), 0, 4)
            top = _field(s, high, 2 * k - 4, 2 * k)
            weights.append(s.b.or_(s.and_(low, 15), s.and_(top, 0x30)))
    sub_scales = s.b.sext(s.load(place, 192, i8, 16), s.zero(i16, 16).type)
    scales = [s.pick(sub_scales, _of_half_runs(o)) for o in range(4)]
    negative, d = _negative_pairs(s, sub_scales, 32), _spread_half(s, place, 208)
    for r in range(rows.R):
        even, odd = (_scaled_sum(rows, r, pair, weights, scales) for pair in ((0, 2), (1, 3)))
        total = _minus(rows, r, _minus(rows, r, _add_halves(s, even, odd), 0, negative[0]), 1, negative[1])
        rows.add(r, 0, total, d, SCALED_SCALE)


def _xs_scales(s: Simd, place: Value) -> Value:
    """Eight sub-scales of 6 bits, minus 32, as int16."""
    whole = s.cast(s.gather([s.load(place, 0, i64)] * 2), i8, 16)
    low = s.multishift(s.constant(i8, [32 + 4 * (k % 8) for k in range(16)]), whole)
    top = s.multishift(s.constant(i8, [16 + 2 * (k % 8) - 4 for k in range(16)]), whole)
    scales = s.part(s.b.or_(s.and_(low, 15), s.and_(top, 0x30)), 0, 8)
    return s.b.sext(s.b.sub(scales, s.splat(i8, 8, 32)), s.zero(i16, 8).type)


def iq4_xs(rows: Rows, place: Value) -> None:
    """Signed bytes up to 127: magnitudes as weights, and codes with the sign of their weight."""
    s = rows.s
    magnitudes = s.constant(i8, [abs(int(v)) for v in CODEBOOK["IQ4_XS"]] * 4)
    weights, minus = [], []
    for at in (8, 72):
        quads = s.cast(s.load(place, at, i8, 64), i64, 8)
        for k in (0, 2):  # 16 bytes of a run, twice; the low nibbles are its first 16 values
            run = s.cast(s.pick(quads, [k, k + 1, k, k + 1, k + 4, k + 5, k + 4, k + 5]), i16, 32)
            nibbles = s.cast(s.b.lshr(run, s.constant(i16, ([0] * 8 + [4] * 8) * 2)), i8, 64)
            weights.append(s.permb(magnitudes, nibbles))
            minus.append(s.b.icmp_signed("==", s.and_(nibbles, 8), s.zero(i8, 64)))  # the codebook ascends
    sub_scales, d = _xs_scales(s, place), _spread_half(s, place, 0)
    scales = [s.pick(sub_scales, _of_runs(o)) for o in range(4)]
    for r in range(rows.R):
        sums = []
        for pair in ((0, 2), (1, 3)):
            total = s.zero(i32, 16)
            for o in pair:
                codes = _operand(rows, r, o)
                codes = s.b.select(minus[o], s.negate(codes), codes)
                total = s.dpwssd(total, s.maddubs(weights[o], codes), scales[o])
            sums.append(total)
        first = [*range(4), *range(16, 20), *range(8, 12), *range(24, 28)]
        both = s.b.add(s.pick(sums[0], first, sums[1]), s.pick(sums[0], [k + 4 for k in first], sums[1]))
        rows.add(r, 0, both, d, SCALED_SCALE)
