"""Tiles of the super-blocks with integer sub-scales, see `wide`: Q2_K to Q6_K and IQ4_XS.

Lane l = 8 h + g of Q2_K to Q5_K belongs to unit q = 2 h + p, where p is g // 4. Sub-scales of 2 and 3 bits' codes are
multiplied into the weights, two bytes at a time: no byte of the products runs over.
"""

from __future__ import annotations

from functools import partial

from strata.cpu.gemv.records256 import (
    K2,
    K4,
    K6,
    LANE_SUMS,
    OFFSETS_6K,
    Q3_BIAS,
    STEP,
    SUMS_16,
    SUMS_32,
    TOTALS_2K,
    XS,
    XS_BIAS,
)
from strata.cpu.gemv.small import bytes_of
from strata.cpu.gemv.wide import LANES, LINE, WIDTH, Notes, Rows, Wide
from strata.cpu.gemv.wide_products import (
    XScale,
    dots,
    low_half,
    lowest_pairs,
    pairs_of_bytes,
    scaled_halves,
    scaled_pairs,
    shifted,
    store_lines,
)
from strata.cpu.simd import Simd, Value, i8, i16, i32, i64
from strata.pack.grids import CODEBOOK

_CODES = 4 * LANES
"""Vectors of codes in a unit."""

_NIBBLES, _TOP_BITS = 0x0F0F0F0F, 0x30303030


def _half_of(s: Simd, q: Value) -> tuple[Value, Value]:
    """h and p of a unit."""
    return s.b.lshr(q, s.const(i64, 1)), s.b.and_(q, s.const(i64, 1))


def _nibbles(s: Simd, word: Value) -> list[Value]:
    return [s.and_(word, _NIBBLES), s.and_(s.shr(word, 4), _NIBBLES)]


def _one_scale(arrangement_scale_at: int) -> XScale:
    return XScale(arrangement_scale_at, unit=-16)


# ---- Q4_K, Q5_K


def _six_bits(s: Simd, rows: Rows) -> list[Value]:
    """The word of d and dmin; bytes: scales 0..3 and 4..7, minima 0..3 and 4..7."""
    head, a, b, c = rows.words4(0)
    scales = [s.and_(a, 0x3F3F3F3F), s.b.or_(s.and_(c, _NIBBLES), s.and_(s.shr(a, 2), _TOP_BITS))]
    minima = [s.and_(b, 0x3F3F3F3F), s.b.or_(s.and_(s.shr(c, 4), _NIBBLES), s.and_(s.shr(b, 2), _TOP_BITS))]
    return [head, *scales, *minima]


def _unpack_k4(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value, codes: int) -> None:
    h, p = _half_of(s, q)
    place = s.b.add(s.times(h, 32), s.times(p, 16))
    nibbles = [rows.at(place).words4(codes), rows.at(place).words4(codes + 64)]
    fifths = [shifted(s, word, s.times(h, 2)) for word in rows.at(s.times(p, 16)).words4(16)] if codes > 16 else None
    for j in range(LANES):
        operands = [*_nibbles(s, nibbles[0][j]), *_nibbles(s, nibbles[1][j])]
        if fifths:
            for o, bit in enumerate((0, 1, 4, 5)):
                fifth = s.shl(fifths[j], 4 - bit) if bit < 4 else s.shr(fifths[j], bit - 4)
                operands[o] = s.b.or_(operands[o], s.and_(fifth, 0x10101010))
        store_lines(s, to, operands, 4 * j)
    scales = [pairs_of_bytes(s, shifted(s, notes.word(k), s.times(h, 16)), 0, 1) for k in (1, 2)]
    store_lines(s, to, [*scales, low_half(s, notes.word(0))], _CODES)


def _lowest_k4(s: Simd, rows: Rows, notes: Notes, to: Value) -> None:
    pairs = [pairs_of_bytes(s, notes.word(3 + j // 2), 2 * (j % 2), 2 * (j % 2) + 1) for j in range(LANES)]
    store_lines(s, to, [*pairs, low_half(s, notes.word(0), upper=True)])


def _k4(name: str, block_bytes: int, codes: int) -> Wide:
    return Wide(
        name, STEP, 1, block_bytes, K4.step_bytes, (_CODES + 3) * LINE, _six_bits,
        partial(_unpack_k4, codes=codes), scaled_pairs(_one_scale(K4.scale_at)), -1, (LANES + 1) * LINE, _lowest_k4,
        lowest_pairs(K4.scale_at, (SUMS_32,)),
    )  # fmt: skip


# ---- Q2_K, Q3_K


def _bytes_twice(s: Simd, words: Value, byte: int) -> Value:
    """An unsigned byte of every word, two times as int16: i16 (32,)."""
    return s.cast(pairs_of_bytes(s, words, byte, byte), i16, 2 * WIDTH)


def _times(s: Simd, codes: Value, scale: Value) -> Value:
    """Bytes times an int16 of their row, modulo 2^16 by twos."""
    return s.b.mul(s.cast(codes, i16, 2 * WIDTH), scale)


def _note_q2(s: Simd, rows: Rows) -> list[Value]:
    """Bytes of scale and minimum, then the word of d and dmin."""
    return [*rows.words4(0), rows.word(80)]


def _unpack_q2(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value) -> None:
    h, p = _half_of(s, q)
    both = [shifted(s, notes.word(s.b.add(s.times(h, 2), s.const(i64, k))), s.times(p, 8)) for k in range(2)]
    scales = [_bytes_twice(s, s.and_(both[i // 2], _NIBBLES), 2 * (i % 2)) for i in range(4)]
    for j, word in enumerate(rows.at(s.times(q, 16)).words4(16)):
        codes = [s.and_(s.shr(word, 2 * i), 0x03030303) for i in range(4)]
        store_lines(s, to, [_times(s, c, scale) for c, scale in zip(codes, scales, strict=True)], 4 * j)
    store_lines(s, to, [low_half(s, notes.word(4))], _CODES)


def _lowest_q2(s: Simd, rows: Rows, notes: Notes, to: Value) -> None:
    minima = [s.and_(s.shr(notes.word(k), 4), _NIBBLES) for k in range(4)]
    pairs = [minima[2 * k + j // 2] for j in range(LANES) for k in range(2)]
    store_lines(s, to, [pairs_of_bytes(s, m, 2 * (n // 2 % 2), 2 * (n // 2 % 2) + 1) for n, m in enumerate(pairs)])
    store_lines(s, to, [low_half(s, notes.word(4), upper=True)], 2 * LANES)


def _note_q3(s: Simd, rows: Rows) -> list[Value]:
    """Low bits of 8 sub-scales, of the others above them, top bits of all; d."""
    return rows.words4(94, skip=2)


def _unpack_q3(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value) -> None:
    h, p = _half_of(s, q)
    low_0, low_1, top = (shifted(s, notes.word(k), s.times(h, 4)) for k in range(3))
    bits = [s.shl(s.and_(t, 0x03030303), 4) for t in (top, s.shr(top, 2))]
    bytes_ = [s.b.or_(s.and_(low, _NIBBLES), t) for low, t in zip((low_0, low_1), bits, strict=True)]
    here = [shifted(s, word, s.times(p, 8)) for word in bytes_]
    bias, both, n = s.splat(i16, 2 * WIDTH, Q3_BIAS), s.splat(i16, 2 * WIDTH, 257), 2 * WIDTH
    scales = [s.b.sub(_bytes_twice(s, here[i // 2], 2 * (i % 2)), s.splat(i16, n, 32)) for i in range(4)]
    # (code - 4) scale + bias for both bytes of a word at once
    less = [s.b.mul(s.b.sub(bias, s.shl(x, 2)), both) for x in scales]
    third = rows.at(s.times(p, 16)).words4(0)
    for j, word in enumerate(rows.at(s.times(q, 16)).words4(32)):
        high = shifted(s, third[j], s.times(h, 4))
        for i in range(4):
            bit = s.shl(high, 2 - i) if i <= 2 else s.shr(high, i - 2)
            codes = s.b.or_(s.and_(s.shr(word, 2 * i), 0x03030303), s.and_(bit, 0x04040404))
            store_lines(s, to, [s.b.add(_times(s, codes, scales[i]), less[i])], 4 * j + i)
    store_lines(s, to, [low_half(s, notes.word(3))], _CODES)


# ---- Q6_K, IQ4_XS


def _note_q6(s: Simd, rows: Rows) -> list[Value]:
    """Sub-scales and d."""
    return [*rows.words4(192), rows.half(208)]


def _unpack_q6(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value) -> None:
    h, p = _half_of(s, q)
    here = rows.at(s.times(q, 16))
    low = [here.words4(0), here.words4(64)]
    high = [rows.at(s.times(p, 16)).words4(at) for at in (128, 160)]
    high = [[shifted(s, word, s.times(h, 2)) for word in words] for words in high]
    for j in range(LANES):
        for k in range(2):
            tops = [s.and_(s.shl(high[k][j], 4), _TOP_BITS), s.and_(high[k][j], _TOP_BITS)]
            codes = [s.b.or_(n, t) for n, t in zip(_nibbles(s, low[k][j]), tops, strict=True)]
            store_lines(s, to, codes, 4 * j + 2 * k)
    # Sub-scale 4 i + q to the top of word i, then down with its sign.
    up = s.spread(s.b.trunc(s.b.sub(s.const(i64, 24), s.times(q, 8)), i32), WIDTH)
    scales = [s.b.ashr(s.b.shl(notes.word(i), up), s.splat(i32, WIDTH, 24)) for i in range(4)]

    def pair(a: Value, b: Value) -> Value:
        return s.b.or_(s.and_(a, 0xFFFF), s.shl(b, 16))

    store_lines(s, to, [pair(*scales[:2]), pair(*scales[2:]), notes.real(4)], _CODES)


def _note_xs(s: Simd, rows: Rows) -> list[Value]:
    """d and top bits of sub-scales; their low bits."""
    return rows.words2(0)


def _unpack_xs(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value) -> None:
    table = bytes_of(s, tuple(int(v) + XS_BIAS for v in CODEBOOK["IQ4_XS"]), 4)
    here = rows.at(s.times(q, 16))
    halves = [here.words4(8), here.words4(72)]
    for j in range(LANES):
        for k in range(2):
            packed = s.cast(halves[k][j], i8, LINE)
            store_lines(s, to, [s.permb(table, packed), s.permb(table, s.shr_bytes(packed, 4))], 4 * j + 2 * k)
    head, low = notes.word(0), notes.word(1)
    tops, lows = shifted(s, head, s.times(q, 2)), shifted(s, low, s.times(q, 4))
    for k in range(2):
        unsigned = s.b.or_(s.and_(s.shr(lows, 16 * k), 15), s.and_(s.shr(tops, 12 + 8 * k), 0x30))
        store_lines(s, to, [s.b.sub(unsigned, s.splat(i32, WIDTH, 32))], _CODES + k)
    store_lines(s, to, [low_half(s, head)], _CODES + 2)


_FOLDED = (_CODES + 1) * LINE

WIDES: dict[str, Wide] = {
    w.name: w
    for w in (
        Wide(
            "Q2_K", STEP, 1, 84, K2.step_bytes, _FOLDED, _note_q2, _unpack_q2, dots(4, _one_scale(K2.scale_at), 1), -1,
            (2 * LANES + 1) * LINE, _lowest_q2, lowest_pairs(K2.scale_at, (SUMS_16, SUMS_16 + 16)),
        ),
        Wide(
            "Q3_K", STEP, 1, 110, K2.step_bytes, _FOLDED, _note_q3, _unpack_q3,
            dots(4, _one_scale(K2.scale_at), 1, TOTALS_2K),
        ),
        _k4("Q4_K", 144, 16),
        _k4("Q5_K", 176, 48),
        Wide(
            "Q6_K", STEP, 1, 210, K6.step_bytes, (_CODES + 3) * LINE, _note_q6, _unpack_q6,
            scaled_pairs(_one_scale(K6.scale_at), OFFSETS_6K), least_rows=6,
        ),
        Wide(
            "IQ4_XS", STEP, 1, 136, XS.step_bytes, (_CODES + 3) * LINE, _note_xs, _unpack_xs,
            scaled_halves(_one_scale(XS.scale_at), LANE_SUMS), least_rows=6,
        ),
    )
}  # fmt: skip
