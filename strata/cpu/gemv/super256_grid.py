"""Grid formats in the tier 256: IQ1_*, IQ2_*, IQ3_*.

Grid entries are read one by one from tables in memory. A part of a step is 8 lanes of 16 values: four vectors, word k
of every lane in vector k, as the records hold the codes. Weights stay magnitudes and the codes take over their signs,
so that several products fit into one int16. IQ1 weights are small enough to be biased instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from strata.cpu.gemv.frame import Lanes, Step
from strata.cpu.gemv.records256 import GRID_BIAS, LANE_SUMS, STEP, WORDS
from strata.cpu.gemv.super_parts import first_half, part_scales, scattered_half
from strata.cpu.simd import Simd, Value, f32, i8, i16, i32, i64, vector
from strata.pack.grids import GRID

LANES = 8
"""Lanes of a part."""

# ---- entries


def _at(s: Simd, w: Value, at: int) -> Value:
    """A byte of the block as int64."""
    return s.b.zext(s.load(w, at, i8), i64)


def _bits(s: Simd, value: Value, first: int, to: int, mask: int) -> Value:
    """Bits of an int64 from `first` on, at bit `to`, under a mask."""
    count = s.const(i64, abs(first - to))
    moved = s.b.lshr(value, count) if first >= to else s.b.shl(value, count)
    return s.b.and_(moved, s.const(i64, mask))


def _words_of_4(s: Simd, name: str, index: Callable[[int], Value]) -> list[Value]:
    """Four vectors from the entries index(4 * lane + k) of a four-value grid, int8 (32,)."""
    values = np.ascontiguousarray(GRID[name]).view(np.uint32)[:, 0]
    table = s.table(f"strata_{name.lower()}_words", i32, values)
    found = [[s.load(table, s.times(index(4 * lane + k), 4), i32, align=4) for lane in range(LANES)] for k in range(4)]
    return [s.cast(s.gather(words), i8, 32) for words in found]


def _words_of_8(s: Simd, name: str, grid: np.ndarray, index: Callable[[int], Value]) -> list[Value]:
    """The same from the entries index(2 * lane) and index(2 * lane + 1) of an eight-value grid."""
    values = np.ascontiguousarray(grid.astype(np.int8)).view(np.uint64)[:, 0]
    table = s.table(f"strata_{name.lower()}_quads", i64, values)
    words = []
    for which in range(2):
        vectors = []
        for lanes in ((0, 1, 4, 5), (2, 3, 6, 7)):  # so that one shuffle inside 128 bits puts the lanes in order
            quads = [s.load(table, s.times(index(2 * lane + which), 8), i64, align=8) for lane in lanes]
            vectors.append(s.cast(s.gather(quads), i32, 8))
        for k in range(2):
            order = [k, k + 2, k + 8, k + 10, k + 4, k + 6, k + 12, k + 14]
            words.append(s.cast(s.pick(vectors[0], order, vectors[1]), i8, 32))
    return words


# ---- signs


def _even(s: Simd, fields: Value) -> Value:
    """Bytes with seven sign bits, the top bit 0 -> with the eighth, which makes the number of signs even."""
    odd = s.constant(i8, [-128 * (bin(k).count("1") & 1) for k in range(16)] * (fields.type.count // 16))
    folded = s.b.xor(fields, s.shr_bytes(fields, 4))
    return s.b.or_(fields, s.pshufb(odd, s.and_(folded, 15)))


def _spaced(s: Simd, fields: Value) -> Value:
    """Four fields of seven bits in the lower 28 bits of i32 (8,) -> bytes for `_even`."""
    total = None
    for k in range(4):
        field = s.and_(s.shl(fields, k), 0x7F << (8 * k))
        total = field if total is None else s.b.or_(total, field)
    return s.cast(total, i8, 32)


def _signs_of(s: Simd, signs: Value, part: int) -> list[Value]:
    """32 sign bytes of a block -> four vectors of 1 or -1 for the part."""
    lanes = s.b.zext(s.cast(s.part(signs, 16 * part, 16), i16, LANES), vector(i32, LANES))
    lanes, result = s.cast(lanes, i8, 32), []
    for k in range(4):
        which = [4 * (lane % 4) + k // 2 for lane in range(LANES) for _ in range(4)]
        bits = s.constant(i8, [(1 << (i + 4 * (k % 2)) ^ 128) - 128 for i in range(4)] * LANES)
        chosen = s.b.and_(s.pshufb(lanes, s.constant(i8, which)), bits)
        minus = s.b.sext(s.b.icmp_signed("==", chosen, bits), vector(i8, 32))
        result.append(s.or_(minus, 1))
    return result


# ---- scales


def _fields(s: Simd, word: Value, starts: Sequence[int], mask: int) -> Value:
    """int32 -> i32 (8,): its bits from `starts` on, under a mask."""
    return s.and_(s.b.lshr(s.spread(word, LANES), s.constant(i32, list(starts))), mask)


def _by_two(s: Simd, values: Value, part: int) -> Value:
    """One of 8 values for every two lanes of the part."""
    return s.pick(values, [4 * part + lane // 2 for lane in range(LANES)])


# ---- sums


def _multiply(s: Simd, unpacked: tuple, x: Value, part: int, lanes: Lanes, at_once: int) -> None:
    """at_once: how many words of a lane may be added up as int16."""
    words, signs, scales = unpacked
    total = None
    for first in range(0, 4, at_once):
        pairs = None
        for k in range(first, first + at_once):
            codes = s.psignb(s.load(x, 128 * part + 32 * k, i8, 32), signs[k])
            term = s.maddubs(words[k], codes)
            pairs = term if pairs is None else s.b.add(pairs, term)
        term = s.pairs(pairs)
        total = term if total is None else s.b.add(total, term)
    d_x = s.spread(s.load(x, WORDS.scale_at, f32), LANES)
    lanes.add(part, total, s.b.fmul(scales, d_x))


# ---- IQ3


def _iq3_xxs(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    words = _words_of_4(s, "IQ3_XXS", lambda k: _at(s, w, 2 + 32 * part + k))
    fields = s.load(w, 66, i32, 8)
    signs = _signs_of(s, _even(s, _spaced(s, fields)), part)
    return words, signs, part_scales(s, first_half(s, w), _by_two(s, s.shr(fields, 28), part), 0.5, 0.5)


def _iq3_s(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    ninth = s.b.zext(s.load(w, 66 + 4 * part, i32), i64)
    words = _words_of_4(
        s, "IQ3_S", lambda k: s.b.or_(_at(s, w, 2 + 32 * part + k), _bits(s, ninth, k, 8, 256))
    )  # fmt: skip
    signs = _signs_of(s, s.load(w, 74, i8, 32), part)
    scales = _fields(s, s.load(w, 106, i32), [4 * (4 * part + lane // 2) for lane in range(LANES)], 15)
    return words, signs, part_scales(s, first_half(s, w), scales, 0.5, 2.0)


# ---- IQ2


def _iq2_xxs(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    def index(k: int) -> Value:
        return _at(s, w, 2 + 32 * part + 8 * (k // 4) + k % 4)

    words = _words_of_8(s, "IQ2_XXS", GRID["IQ2_XXS"], index)
    fields = s.pick(s.load(w, 2, i32, 16), range(1, 16, 2))
    signs = _signs_of(s, _even(s, _spaced(s, fields)), part)
    return words, signs, part_scales(s, first_half(s, w), _by_two(s, s.shr(fields, 28), part), 0.5, 0.25)


def _nibbles(s: Simd, w: Value, at: int, part: int) -> Value:
    return _fields(s, s.load(w, at + 4 * part, i32), range(0, 32, 4), 15)


def _iq2_xs(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    def index(k: int) -> Value:
        return s.b.and_(s.b.zext(s.load(w, 2 + 32 * part + 2 * k, i16), i64), s.const(i64, 511))

    words = _words_of_8(s, "IQ2_XS", GRID["IQ2_XS"], index)
    fields = s.b.trunc(s.shr(s.load(w, 2, i16, 32), 9), vector(i8, 32))
    signs = _signs_of(s, _even(s, fields), part)
    return words, signs, part_scales(s, first_half(s, w), _nibbles(s, w, 66, part), 0.5, 0.25)


def _iq2_s(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    high = [_at(s, w, 66 + 4 * part + k) for k in range(4)]

    def index(k: int) -> Value:
        return s.b.or_(_at(s, w, 2 + 16 * part + k), _bits(s, high[k // 4], 2 * (k % 4), 8, 0x300))

    words = _words_of_8(s, "IQ2_S", GRID["IQ2_S"], index)
    signs = _signs_of(s, s.load(w, 34, i8, 32), part)
    return words, signs, part_scales(s, first_half(s, w), _nibbles(s, w, 74, part), 0.5, 0.25)


# ---- IQ1: eight times the grid, plus or minus 1

IQ1_BIAS = 16
"""Makes these weights unsigned, and eight products with them still fit into int16."""


def _delta(s: Simd, minus: Value) -> Value:
    """1 in the four bytes of a lane, or -1 where `minus` (8 x i1) is set."""
    return s.cast(s.b.select(minus, s.splat(i32, LANES, -1), s.splat(i32, LANES, 0x01010101)), i8, 32)


def _bit(s: Simd, value: Value, bit: int) -> Value:
    return s.b.icmp_signed("!=", s.and_(value, 1 << bit), s.zero(i32, LANES))


def _shifted(s: Simd, words: list[Value], deltas: list[Value]) -> list[Value]:
    return [s.b.add(word, delta) for word, delta in zip(words, deltas, strict=True)]


def _multiply_biased(s: Simd, unpacked: tuple, x: Value, part: int, lanes: Lanes) -> None:
    """IQ1_BIAS is in the weights; the record's sums are for GRID_BIAS, a power of two times that."""
    words, scales = unpacked
    pairs = None
    for k, word in enumerate(words):
        term = s.maddubs(word, s.load(x, 128 * part + 32 * k, i8, 32))
        pairs = term if pairs is None else s.b.add(pairs, term)
    sums = s.load(x, LANE_SUMS + 32 * part, i32, LANES)
    shift = (GRID_BIAS // IQ1_BIAS).bit_length() - 1
    total = s.b.add(s.pairs(pairs), s.b.ashr(sums, s.splat(i32, LANES, shift)))
    lanes.add(part, total, s.b.fmul(scales, s.spread(s.load(x, WORDS.scale_at, f32), LANES)))


def _iq1_s(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    high = [s.b.zext(s.load(w, 34 + 8 * part + 2 * k, i16), i64) for k in range(4)]

    def index(k: int) -> Value:
        return s.b.or_(_at(s, w, 2 + 16 * part + k), _bits(s, high[k // 4], 3 * (k % 4), 8, 0x700))

    words = _words_of_8(s, "IQ1", 8 * GRID["IQ1_S"] + IQ1_BIAS, index)
    both = _by_two(s, s.b.zext(s.load(w, 34, i16, 8), vector(i32, 8)), part)
    words = _shifted(s, words, [_delta(s, _bit(s, both, 15))] * 4)
    return words, part_scales(s, first_half(s, w), s.and_(s.shr(both, 12), 7), 0.5, 0.25)


def _iq1_m(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    high = [_at(s, w, 32 + 8 * part + k) for k in range(8)]

    def index(k: int) -> Value:
        return s.b.or_(_at(s, w, 16 * part + k), _bits(s, high[k // 2], 4 * (k % 2), 8, 0x700))

    words = _words_of_8(s, "IQ1", 8 * GRID["IQ1_M"] + IQ1_BIAS, index)
    lanes = s.b.zext(s.load(w, 32 + 8 * part, i8, 8), vector(i32, LANES))
    deltas = [_delta(s, _bit(s, lanes, bit)) for bit in (3, 3, 7, 7)]
    scales = _fields(s, s.load(w, 48 + 4 * part, i32), [16 * (j // 4) + 3 * (j % 4) for j in range(LANES)], 7)
    half = scattered_half(s, s.load(w, 48, i64))
    return _shifted(s, words, deltas), part_scales(s, half, scales, 0.5, 0.25)


def _step(block_bytes: int, unpack: Callable[..., tuple], most: int) -> Step:
    """most: largest magnitude of a weight. A word of a lane adds up two products to one int16, and again two."""
    at_once = next(n for n in (4, 2, 1) if 2 * n * most * 127 <= 32767)
    return Step(STEP, 1, block_bytes, WORDS.step_bytes, unpack, partial(_multiply, at_once=at_once), parts=2)


STEPS: dict[str, Step] = {
    "IQ1_S": Step(STEP, 1, 50, WORDS.step_bytes, _iq1_s, _multiply_biased, parts=2),
    "IQ1_M": Step(STEP, 1, 56, WORDS.step_bytes, _iq1_m, _multiply_biased, parts=2),
    "IQ2_XXS": _step(66, _iq2_xxs, 43),
    "IQ2_XS": _step(74, _iq2_xs, 43),
    "IQ2_S": _step(82, _iq2_s, 43),
    "IQ3_XXS": _step(98, _iq3_xxs, 62),
    "IQ3_S": _step(110, _iq3_s, 15),
}
