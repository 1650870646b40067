"""K-quants and IQ4_XS in the tier 256. A part of a step is one vector of lanes: four vectors of 32 weights.

Weights times codes become int16 pairs, and those times int16 sub-scales int32 lanes. The records are those of the tier
512, so the vectors of a part lie at 64-byte distance, the second part 32 bytes behind the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.cpu.gemv.frame import Lanes, Step
from strata.cpu.gemv.records256 import K2, K4, K6, PAIRS_2K, PAIRS_6K, STEP, SUMS_16, SUMS_32, XS
from strata.cpu.gemv.super_parts import halves_at, times_x
from strata.cpu.simd import Simd, Value, i8, i16, i32, i64, vector
from strata.pack.grids import CODEBOOK

# ---- weights


def _load(s: Simd, w: Value, at: int) -> Value:
    return s.load(w, at, i8, 32)


def _nibble(s: Simd, packed: Value, upper: int) -> Value:
    return s.and_(s.shr_bytes(packed, 4) if upper else packed, 15)


def _bits(s: Simd, packed: Value, first: int, to: int, mask: int) -> Value:
    """The bits from `first` on of every byte at bit `to`, under a mask."""
    words = s.cast(packed, i16, 16)
    words = s.shr(words, first - to) if first > to else s.shl(words, to - first)
    return s.and_(s.cast(words, i8, 32), mask)


# ---- integer scales


def _twice(s: Simd, eight: Value) -> Value:
    """int16 (8,) in both halves of a vector, for `_spread`."""
    return s.pick(eight, [*range(8)] * 2)


def _spread(s: Simd, scales: Value, low: Sequence[int], high: Sequence[int]) -> Value:
    """int16 (16,) of `_twice`: the scales `low`, repeated to 8, then `high`."""
    index = [2 * i + k for part in (low, high) for i in [*part] * (8 // len(part)) for k in range(2)]
    return s.cast(s.pshufb(s.cast(scales, i8, 32), s.constant(i8, index)), i16, 16)


def _bytes_of(s: Simd, *quads: Value) -> Value:
    """int64 as bytes."""
    return s.cast(s.gather(quads), i8, 8 * len(quads))


def _masked(s: Simd, value: Value, byte: int) -> Value:
    """int64 under a mask that is the same in all bytes."""
    return s.b.and_(value, s.const(i64, int.from_bytes(bytes([byte] * 8), "little")))


def _shifted(s: Simd, value: Value, count: int) -> Value:
    """int64, to the left or, for a negative count, to the right."""
    amount = s.const(i64, abs(count))
    return s.b.shl(value, amount) if count >= 0 else s.b.lshr(value, amount)


# ---- sums


def _scaled_sum(s: Simd, x: Value, part: int, weights: Sequence[Value], scales: Sequence[Value]) -> Value:
    total = None
    for k, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        term = s.maddwd(s.maddubs(weight, _load(s, x, 64 * k + 32 * part)), scale)
        total = term if total is None else s.b.add(total, term)
    return total


# ---- Q4_K, Q5_K: part h has the runs 2h, 2h + 1, 2h + 4, 2h + 5


def _k4_scales(s: Simd, w: Value, part: int) -> tuple[list[Value], Value]:
    """Sub-scales of 6 bits for the part, and the eight minima."""
    ab, c = s.load(w, 4, i64), s.b.zext(s.load(w, 12, i32), i64)
    low = _masked(s, ab, 0x3F)
    top = s.b.or_(_masked(s, _shifted(s, ab, -2), 0x30), _masked(s, s.b.or_(c, _shifted(s, c, 28)), 0x0F))
    both = s.b.zext(_bytes_of(s, low, top), vector(i16, 16))  # scales 0..3, minima 0..3, scales 4..7, minima 4..7
    twice = s.pick(both, [*range(4), *range(8, 12)] * 2)
    scales = [_spread(s, twice, [run], [run]) for run in (2 * part, 2 * part + 1, 2 * part + 4, 2 * part + 5)]
    return scales, s.pick(both, [*range(4, 8), *range(12, 16)])


def _unpack_q4(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    packed = [_load(s, w, 16 + 32 * part + 64 * k) for k in range(2)]
    return [_nibble(s, p, k) for p in packed for k in range(2)], *_k4_scales(s, w, part), halves_at(s, w, 0)


def _unpack_q5(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    high, weights = _load(s, w, 16), []
    for k in range(2):
        packed = _load(s, w, 48 + 32 * part + 64 * k)
        for upper in range(2):
            fifth = _bits(s, high, 4 * k + 2 * part + upper, 4, 16)
            weights.append(s.b.or_(_nibble(s, packed, upper), fifth))
    return weights, *_k4_scales(s, w, part), halves_at(s, w, 0)


def _multiply_k4(s: Simd, unpacked: tuple, x: Value, part: int, lanes: Lanes) -> None:
    weights, scales, minima, halves = unpacked
    floats = times_x(s, halves, x, K4.scale_at)
    lanes.add(part, _scaled_sum(s, x, part, weights, scales), s.pick(floats, [0] * 8))
    if part == 0:
        lanes.add_lowest(s.maddwd(minima, s.load(x, SUMS_32, i16, 8)), s.pick(floats, [1] * 4))


# ---- Q2_K, Q3_K: part h has the runs 4h .. 4h + 3


def _unpack_q2(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    both, packed = s.load(w, 0, i8, 16), _load(s, w, 16 + 32 * part)
    eight = s.b.zext(s.and_(s.part(both, 8 * part, 8), 15), vector(i16, 8))
    twice = _twice(s, eight)
    scales = [_spread(s, twice, [2 * k], [2 * k + 1]) for k in range(4)]
    minima = s.b.zext(s.and_(s.shr_bytes(both, 4), 15), vector(i16, 16))
    return [_bits(s, packed, 2 * k, 0, 3) for k in range(4)], scales, minima, halves_at(s, w, 76)


def _multiply_q2(s: Simd, unpacked: tuple, x: Value, part: int, lanes: Lanes) -> None:
    weights, scales, minima, halves = unpacked
    floats = times_x(s, halves, x, K2.scale_at)
    lanes.add(part, _scaled_sum(s, x, part, weights, scales), s.pick(floats, [2] * 8))
    if part == 0:
        terms = s.maddwd(minima, s.load(x, SUMS_16, i16, 16))
        lanes.add_lowest(s.b.add(s.part(terms, 0, 4), s.part(terms, 4, 4)), s.pick(floats, [3] * 4))


def _q3_scales(s: Simd, w: Value) -> Value:
    """Sixteen sub-scales of 6 bits, minus 32, as int16."""
    low, t = s.load(w, 96, i64), s.b.zext(s.load(w, 104, i32), i64)
    tops = [s.b.or_(t, _shifted(s, t, 30)), s.b.or_(_shifted(s, t, -4), _shifted(s, t, 26))]
    lows = [low, _shifted(s, low, -4)]
    quads = [
        s.b.or_(_masked(s, n, 0x0F), _shifted(s, _masked(s, top, 0x03), 4)) for n, top in zip(lows, tops, strict=True)
    ]
    return s.b.sext(s.b.sub(_bytes_of(s, *quads), s.splat(i8, 16, 32)), vector(i16, 16))


def _unpack_q3(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    high, packed, weights = _load(s, w, 0), _load(s, w, 32 + 32 * part), []
    for k in range(4):
        third = _bits(s, high, 4 * part + k, 2, 4)
        weights.append(s.b.or_(_bits(s, packed, 2 * k, 0, 3), third))
    twice = _twice(s, s.part(_q3_scales(s, w), 8 * part, 8))
    scales = [_spread(s, twice, [2 * k], [2 * k + 1]) for k in range(4)]
    less = s.shl(s.negate(twice), 2)
    offsets = [_spread(s, less, [k, k + 2], [k + 1, k + 3]) for k in (0, 4)]
    return weights, scales, offsets, halves_at(s, w, 102)


# ---- Q6_K: part p has the runs p, p + 2, p + 4, p + 6


def _unpack_q6(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    weights = []
    for half in range(2):
        packed, high = _load(s, w, 64 * half + 32 * part), _load(s, w, 128 + 32 * half)
        for upper in range(2):
            top = _bits(s, high, 4 * upper + 2 * part, 4, 0x30)
            weights.append(s.b.or_(_nibble(s, packed, upper), top))
    all_scales = s.b.sext(s.load(w, 192, i8, 16), vector(i16, 16))
    halves = [_twice(s, s.part(all_scales, k, 8)) for k in (0, 8)]
    scales = [_spread(s, t, [k + 2 * part], [k + 2 * part + 1]) for t in halves for k in (0, 4)]
    less = [s.shl(s.negate(t), 5) for t in halves]
    offsets = [_spread(s, t, [2 * part, 2 * part + 4], [2 * part + 1, 2 * part + 5]) for t in less]
    return weights, scales, offsets, halves_at(s, w, 202)


def _multiplier(scale_at: int, pairs_at: int):
    def multiply(s: Simd, unpacked: tuple, x: Value, part: int, lanes: Lanes) -> None:
        weights, scales, offsets, halves = unpacked
        total = _scaled_sum(s, x, part, weights, scales)
        for k, offset in enumerate(offsets):
            sums = s.load(x, pairs_at + 64 * k + 32 * part, i16, 16)
            total = s.b.add(total, s.maddwd(sums, offset))
        lanes.add(part, total, s.pick(times_x(s, halves, x, scale_at), [3] * 8))

    return multiply


# ---- IQ4_XS: part p has the runs 2p, 2p + 1, 2p + 4, 2p + 5


def _xs_scales(s: Simd, w: Value) -> Value:
    """Eight sub-scales of 6 bits, minus 32, as int16."""
    low = s.cast(s.load(w, 4, i32), i8, 4)
    low, top = s.and_(low, 15), s.shr(low, 4)
    nibbles = s.b.zext(s.pick(low, [0, 4, 1, 5, 2, 6, 3, 7], top), vector(i16, 8))
    words = s.b.mul(s.spread(s.load(w, 2, i16), 8), s.constant(i16, [1 << (14 - 2 * k) for k in range(8)]))
    return s.b.sub(s.b.or_(nibbles, s.and_(s.shr(words, 10), 0x30)), s.splat(i16, 8, 32))


def _unpack_xs(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    table = s.constant(i8, [int(v) for v in CODEBOOK["IQ4_XS"]] * 2)
    packed = [_load(s, w, 8 + 64 * k + 32 * part) for k in range(2)]
    weights = [s.pshufb(table, _nibble(s, p, upper)) for p in packed for upper in range(2)]
    twice = _twice(s, _xs_scales(s, w))
    scales = [_spread(s, twice, [4 * k + 2 * part], [4 * k + 2 * part + 1]) for k in range(2) for _ in range(2)]
    return weights, [s.abs(v) for v in weights], scales, halves_at(s, w, 0)


def _multiply_xs(s: Simd, unpacked: tuple, x: Value, part: int, lanes: Lanes) -> None:
    """Magnitudes times codes that took over the sign of their weight: 127 * 127 * 2 still fits into int16."""
    weights, magnitudes, scales, halves = unpacked
    total = None
    for k in range(4):
        codes = s.psignb(_load(s, x, 64 * k + 32 * part), weights[k])
        term = s.maddwd(s.maddubs(magnitudes[k], codes), scales[k])
        total = term if total is None else s.b.add(total, term)
    lanes.add(part, total, s.pick(times_x(s, halves, x, XS.scale_at), [0] * 8))


STEPS: dict[str, Step] = {
    "Q2_K": Step(STEP, 1, 84, K2.step_bytes, _unpack_q2, _multiply_q2, parts=2, lowest=-1),
    "Q3_K": Step(STEP, 1, 110, K2.step_bytes, _unpack_q3, _multiplier(K2.scale_at, PAIRS_2K), parts=2),
    "Q4_K": Step(STEP, 1, 144, K4.step_bytes, _unpack_q4, _multiply_k4, parts=2, lowest=-1),
    "Q5_K": Step(STEP, 1, 176, K4.step_bytes, _unpack_q5, _multiply_k4, parts=2, lowest=-1),
    "Q6_K": Step(STEP, 1, 210, K6.step_bytes, _unpack_q6, _multiplier(K6.scale_at, PAIRS_6K), parts=2),
    "IQ4_XS": Step(STEP, 1, 136, XS.step_bytes, _unpack_xs, _multiply_xs, parts=2),
}
