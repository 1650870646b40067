"""K-quants in the tier 512: Q2_K to Q6_K.

Four operands of 64 weight bytes a block, in the order of the records. Weights times codes become int16 pairs, and those
times int16 sub-scales int32 lanes. Q2_K is small enough to have the sub-scale in the byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.cpu.gemv.frame import Lanes, Step
from strata.cpu.gemv.prefetch import asks_far
from strata.cpu.gemv.records256 import K2, K4, K6, PAIRS_2K, PAIRS_6K, STEP, SUMS_16, SUMS_32, Arrangement
from strata.cpu.gemv.super_parts import halves_at, times_x
from strata.cpu.simd import Simd, Value, i8, i16, i32, vector

# ---- weights


def _twice(s: Simd, w: Value, at: int) -> Value:
    """32 bytes, two times."""
    return s.pick(s.load(w, at, i8, 32), [*range(32), *range(32)])


def _field(s: Simd, value: Value, low: int, high: int) -> Value:
    """Bits from `low` on in the first 32 bytes and from `high` on in the others, at bit 0 of every byte (at bit -low
    for a negative number); other bits come along, for the caller to mask."""
    starts = [(8 * (i % 8) + (low if i < 32 else high)) % 64 for i in range(64)]
    return s.multishift(s.constant(i8, starts), value)


def _nibbles(s: Simd, w: Value, at: int) -> list[Value]:
    """Low and high nibbles of 64 bytes."""
    packed = s.load(w, at, i8, 64)
    return [s.and_(packed, 15), s.and_(s.shr_bytes(packed, 4), 15)]


def _widened(s: Simd, values: Value, index: Sequence[int]) -> Value:
    """Unsigned bytes, picked, as int16."""
    n = values.type.count
    with_zeros = [k for i in index for k in (i, n)]
    return s.cast(s.pick(values, with_zeros, s.zero(i8, n)), i16, len(index))


# ---- sums


def _operand(s: Simd, x: Value, o: int) -> Value:
    return s.load(x, 64 * o, i8, 64)


def _scaled_sum(s: Simd, x: Value, weights: Sequence[Value], scales: Sequence[Value]) -> Value:
    """int32 (16,): sum over operands of sub-scale times weights times codes."""
    total = s.zero(i32, 16)
    for o, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        total = s.dpwssd(total, s.maddubs(weight, _operand(s, x, o)), scale)
    return total


def _scales_by(arrangement: Arrangement, sub_block: int) -> list[list[int]]:
    """For every operand, which sub-scale meets each int16 pair; `sub_block` values share one."""
    return [[int(v) // sub_block for v in arrangement.order[64 * o : 64 * o + 64 : 2]] for o in range(4)]


def _pairs_by(arrangement: Arrangement) -> list[list[int]]:
    """Sub-scales of 16 values that meet the sums of four neighbours, stored as pairs of operands."""
    of = [[int(v) // 16 for v in arrangement.order[64 * o : 64 * o + 64 : 4]] for o in range(4)]
    return [[scale for both in zip(of[k], of[k + 1], strict=True) for scale in both] for k in (0, 2)]


def _minus(s: Simd, total: Value, x: Value, at: int, offsets: Sequence[Value]) -> Value:
    """Takes the offset of unsigned codes back: sub-scales times -offset, times sums of four codes."""
    for k, scales in enumerate(offsets):
        total = s.dpwssd(total, s.load(x, at + 64 * k, i16, 32), scales)
    return total


def _signed_scales(s: Simd, scales: Value, arrangement: Arrangement, offset: int) -> tuple[list[Value], list[Value]]:
    """int16 (16,) sub-scales -> those of every operand, and -offset times those of the pairs of sums."""
    less = s.b.mul(scales, s.splat(i16, 16, -offset))
    pairs = [s.pick(less, index) for index in _pairs_by(arrangement)]
    return [s.pick(scales, index) for index in _scales_by(arrangement, 16)], pairs


# ---- Q4_K, Q5_K


def _six_bits(s: Simd, w: Value, at: int) -> Value:
    """12 bytes -> eight scales and eight minima of 6 bits (16 bytes)."""
    raw = s.load(w, at, i8, 16)  # the codes begin behind the 12 bytes: still inside the block
    a, b, c = ([*range(k, k + 4)] for k in (0, 4, 8))
    fields = s.pick(raw, [*a, *c, *b, *c])
    low = s.multishift(s.constant(i8, [0, 8, 16, 24, 32, 40, 48, 56, 0, 8, 16, 24, 36, 44, 52, 60]), fields)
    top = s.multishift(s.constant(i8, [0, 0, 0, 0, 2, 10, 18, 26] * 2), fields)
    mask, mask_top = s.constant(i8, ([63] * 4 + [15] * 4) * 2), s.constant(i8, ([0] * 4 + [0x30] * 4) * 2)
    return s.b.or_(s.b.and_(low, mask), s.b.and_(top, mask_top))


def _with_scales(s: Simd, w: Value, weights: list[Value]) -> tuple:
    both = _six_bits(s, w, 4)
    scales = [_widened(s, both, index) for index in _scales_by(K4, 32)]
    return weights, scales, _widened(s, both, range(8, 16)), halves_at(s, w, 0)


def _unpack_q4(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    return _with_scales(s, w, [*_nibbles(s, w, 16), *_nibbles(s, w, 80)])


def _unpack_q5(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    high = _twice(s, w, 16)
    fifth = [s.and_(_field(s, high, run - 4, run - 2), 16) for run in (0, 1, 4, 5)]
    nibbles = [*_nibbles(s, w, 48), *_nibbles(s, w, 112)]
    return _with_scales(s, w, [s.b.or_(n, f) for n, f in zip(nibbles, fifth, strict=True)])


def _multiply_k4(s: Simd, unpacked: tuple, x: Value, part: int, lanes: Lanes) -> None:
    weights, scales, minima, halves = unpacked
    floats = times_x(s, halves, x, K4.scale_at)
    lanes.add(0, _scaled_sum(s, x, weights, scales), s.pick(floats, [0] * 16))
    lanes.add_lowest(s.maddwd(minima, s.load(x, SUMS_32, i16, 8)), s.pick(floats, [1] * 4))


# ---- Q2_K


def _unpack_q2(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    """Products of code and sub-scale, at most 45, by tables whose 6-bit index holds both. The code stays where it is in
    its byte if it is in the first or third field; fields 1 and 3 are shifted to the third."""
    both, packed = s.load(w, 0, i8, 16), s.load(w, 16, i8, 64)
    low, above = s.and_(both, 15), s.and_(s.cast(s.shl(s.cast(both, i16, 8), 2), i8, 16), 0x3C)
    code_low = s.constant(i8, [(k & 3) * (k >> 2) for k in range(64)])
    code_high = s.constant(i8, [(k >> 4) * (k & 15) for k in range(64)])
    left2 = s.cast(s.shl(s.cast(packed, i16, 32), 2), i8, 64)
    sources = [(packed, 3, above, code_low)]
    sources += [(codes, 0x30, low, code_high) for codes in (left2, packed, s.shr_bytes(packed, 2))]
    weights = []
    for (codes, mask, scales, table), index in zip(sources, _scales_by(K2, 16), strict=True):
        scale = s.pick(scales, [i for i in index for _ in range(2)])
        weights.append(s.permb(table, s.b.or_(s.and_(codes, mask), scale)))
    minima = _widened(s, s.and_(s.shr_bytes(both, 4), 15), range(16))
    return weights, minima, halves_at(s, w, 76)


def _multiply_q2(s: Simd, unpacked: tuple, x: Value, part: int, lanes: Lanes) -> None:
    weights, minima, halves = unpacked
    floats = times_x(s, halves, x, K2.scale_at)
    total = s.zero(i32, 16)
    for o, weight in enumerate(weights):
        total = s.dpbusd(total, weight, _operand(s, x, o))
    lanes.add(0, total, s.pick(floats, [2] * 16))
    terms = s.maddwd(minima, s.load(x, SUMS_16, i16, 16))
    lanes.add_lowest(s.b.add(s.part(terms, 0, 4), s.part(terms, 4, 4)), s.pick(floats, [3] * 4))


# ---- Q3_K, Q6_K


def _q3_scales(s: Simd, w: Value) -> Value:
    """Sixteen sub-scales of 6 bits, minus 32, as int16."""
    raw = s.load(w, 94, i8, 16)  # two bytes of codes, 12 of scales, d: nothing lies behind the block
    low_starts = [8 * k + part for part in (0, 4) for k in range(8)]
    top_starts = [(8 * (k % 4) + 2 * (k // 4) - 4) % 64 for k in range(16)]
    low = s.multishift(s.constant(i8, low_starts), s.pick(raw, [*range(2, 10)] * 2))
    top = s.multishift(s.constant(i8, top_starts), s.pick(raw, [*range(10, 14)] * 4))
    scales = s.b.or_(s.and_(low, 15), s.and_(top, 0x30))
    # Subtracted as words: of extended bytes the compiler makes two instructions for every pick, not one.
    return s.b.sub(s.b.zext(scales, vector(i16, 16)), s.splat(i16, 16, 32))


def _unpack_q3(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    """Two codes and their third bits are a 6-bit index, of which a table for each makes a weight."""
    high, packed, weights = _twice(s, w, 0), s.load(w, 32, i8, 64), []
    tables = [s.constant(i8, [k >> 2 * part & 3 | (k >> 4 + part & 1) << 2 for k in range(64)]) for part in (0, 1)]
    for codes, bit in ((packed, 0), (s.shr_bytes(packed, 4), 2)):
        index = s.b.or_(s.and_(codes, 15), s.and_(_field(s, high, bit - 4, bit), 0xF0 - 256))
        weights += [s.permb(table, index) for table in tables]
    return weights, *_signed_scales(s, _q3_scales(s, w), K2, 4), halves_at(s, w, 102)


def _unpack_q6(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    weights = []
    for half in range(2):
        high = _twice(s, w, 128 + 32 * half)
        for k, low in enumerate(_nibbles(s, w, 64 * half)):
            weights.append(s.b.or_(low, s.and_(_field(s, high, 4 * k - 4, 4 * k - 2), 0x30)))
    scales = s.b.sext(s.load(w, 192, i8, 16), vector(i16, 16))
    return weights, *_signed_scales(s, scales, K6, 32), halves_at(s, w, 202)


def _multiplier(arrangement: Arrangement, pairs_at: int):
    def multiply(s: Simd, unpacked: tuple, x: Value, part: int, lanes: Lanes) -> None:
        weights, scales, offsets, halves = unpacked
        total = _minus(s, _scaled_sum(s, x, weights, scales), x, pairs_at, offsets)
        lanes.add(0, total, s.pick(times_x(s, halves, x, arrangement.scale_at), [3] * 16))

    return multiply


STEPS: dict[str, Step] = {
    "Q2_K": Step(STEP, 1, 84, K2.step_bytes, _unpack_q2, _multiply_q2, lowest=-1),
    "Q3_K": Step(STEP, 1, 110, K2.step_bytes, _unpack_q3, _multiplier(K2, PAIRS_2K)),
    "Q4_K": Step(STEP, 1, 144, K4.step_bytes, _unpack_q4, _multiply_k4, lowest=-1, far=asks_far("Q4_K")),
    "Q5_K": Step(STEP, 1, 176, K4.step_bytes, _unpack_q5, _multiply_k4, lowest=-1, far=asks_far("Q5_K")),
    "Q6_K": Step(STEP, 1, 210, K6.step_bytes, _unpack_q6, _multiplier(K6, PAIRS_6K), far=asks_far("Q6_K")),
}
