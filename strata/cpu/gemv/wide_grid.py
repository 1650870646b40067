"""Tiles of the grid formats, see `wide`. A unit is 64 values of a row.

The permutes of `super512_grid` fetch the entries of one block there and those of one lane of 16 rows here; where four
indices of a row lie in a word, the planes come out in the order of the tile. Larger grids are read through stored
indices, as in `super512_far`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from strata.cpu.gemv.records256 import BYTES, GRID_BIAS, LANE_SUMS, STEP
from strata.cpu.gemv.super512_far import FORMATS as FAR
from strata.cpu.gemv.super512_far import IQ1_LEVELS, entries_at
from strata.cpu.gemv.super512_grid import IQ2_LEVELS, entries_of_8, pairs_of_4, planes_of_4, planes_of_8, sign_table
from strata.cpu.gemv.super_parts import scattered_halves
from strata.cpu.gemv.wide import LANES, LINE, WIDTH, Notes, Rows, Wide
from strata.cpu.gemv.wide_products import XScale, dots, pairs_of_bytes, shifted, store_lines
from strata.cpu.simd import Simd, Value, f32, i8, i16, i32, i64

_CODES = 4 * LANES
"""Vectors of codes in a unit."""


def _bits(s: Simd, words: Value, first: int, per_byte: int) -> Sequence[Value]:
    """64 x i1 for c = 0..per_byte - 1: for byte k of a row, bit first + per_byte k + c of the row's word."""
    source = s.cast(words, i8, LINE)
    made = []
    for c in range(per_byte):
        index = [32 * (r % 2) + first + per_byte * k + c for r in range(WIDTH) for k in range(4)]
        made.append(s.shufbit(source, s.constant(i8, index)))
    return made


def _signed(s: Simd, planes: list[Value], words: Value, lane: int) -> list[Value]:
    """words: sign bits of two lanes of every row."""
    opposite = s.splat(i8, LINE, -2 * GRID_BIAS)
    bits = _bits(s, words, 16 * lane, 4)
    return [s.b.select(bit, s.b.sub(opposite, plane), plane) for bit, plane in zip(bits, planes, strict=True)]


def _even_signs(s: Simd, words: Value, starts: Sequence[int]) -> Value:
    """Sign bytes from the 7-bit fields that begin at `starts` of every word."""
    index = [start + 32 * part for _ in range(WIDTH // 2) for part in range(2) for start in starts]
    fields = s.multishift(s.constant(i8, index), s.cast(words, i8, LINE))
    return s.cast(s.permi2b(*_around(fields, sign_table(s))), i32, WIDTH)


def _around(index: Value, tables: Sequence[Value]) -> tuple[Value, Value, Value]:
    return tables[0], index, tables[1]


def _scale(s: Simd, half: Value, index: Value, offset: float, factor: float) -> Value:
    """Exact (index + offset) * (factor * half) of every row."""
    scaled = s.b.fmul(half, s.splat(f32, WIDTH, factor))
    return s.b.fmul(s.b.fadd(s.to_float(index), s.splat(f32, WIDTH, offset)), scaled)


def _store_scales(s: Simd, to: Value, half: Value, indices: Sequence[Value], offset: float, factor: float) -> None:
    store_lines(s, to, [_scale(s, half, index, offset, factor) for index in indices], _CODES)


def _two_bytes(s: Simd, words: Value, lane: int) -> Value:
    """i16 (32,): bytes 2 lane and 2 lane + 1 of every word."""
    return s.cast(pairs_of_bytes(s, words, 2 * lane, 2 * lane + 1), i16, 2 * WIDTH)


# ---- four values an entry


def _note_iq3_xxs(s: Simd, rows: Rows) -> list[Value]:
    """Signs and scales, a word for 32 values; d."""
    return [*rows.words4(66), *rows.words4(82), rows.half(0)]


def _two_words(s: Simd, q: Value, notes: Notes) -> list[Value]:
    """Notes 2 q and 2 q + 1."""
    return [notes.word(s.b.add(s.times(q, 2), s.const(i64, k))) for k in range(2)]


def _iq3_xxs(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value) -> None:
    fields = _two_words(s, q, notes)
    signs = [_even_signs(s, word, (0, 7, 14, 21)) for word in fields]
    for j, index in enumerate(rows.at(s.times(q, 16)).words4(2)):
        planes = planes_of_4(s, "IQ3_XXS", pairs_of_4(s, "IQ3_XXS", s.cast(index, i8, LINE), None))
        store_lines(s, to, _signed(s, planes, signs[j // 2], j % 2), 4 * j)
    _store_scales(s, to, notes.real(8), [s.shr(word, 28) for word in fields], 0.5, 0.5)


def _note_iq3_s(s: Simd, rows: Rows) -> list[Value]:
    """Ninth bits of indices, scales, d."""
    return [*rows.words2(66), rows.word(106), rows.half(0)]


def _half_word(s: Simd, q: Value, words: Sequence[Value]) -> Value:
    """Half q of two words, in the lower half; what is above may be anything."""
    word = s.b.select(s.b.icmp_unsigned("<", q, s.const(i64, 2)), *words)
    return shifted(s, word, s.times(s.b.and_(q, s.const(i64, 1)), 16))


def _iq3_s(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value) -> None:
    ninths = _half_word(s, q, [notes.word(k) for k in range(2)])
    signs = rows.at(s.times(q, 8)).words2(74)
    for j, index in enumerate(rows.at(s.times(q, 16)).words4(2)):
        ninth = _bits(s, ninths, 4 * j, 1)[0]
        planes = planes_of_4(s, "IQ3_S", pairs_of_4(s, "IQ3_S", s.cast(index, i8, LINE), ninth))
        store_lines(s, to, _signed(s, planes, signs[j // 2], j % 2), 4 * j)
    both = shifted(s, notes.word(2), s.times(q, 8))
    _store_scales(s, to, notes.real(3), [s.and_(both, 15), s.and_(s.shr(both, 4), 15)], 0.5, 2.0)


# ---- eight values an entry


def _note_half(s: Simd, rows: Rows) -> list[Value]:
    """d."""
    return [rows.half(0)]


def _iq2_xxs(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value) -> None:
    index_0, fields_0, index_1, fields_1 = rows.at(s.times(q, 16)).words4(2)
    for k, (index, fields) in enumerate(((index_0, fields_0), (index_1, fields_1))):
        signs = _even_signs(s, fields, (0, 7, 14, 21))
        for lane in range(2):
            planes = planes_of_8(s, IQ2_LEVELS, entries_of_8(s, "IQ2_XXS", _two_bytes(s, index, lane)))
            store_lines(s, to, _signed(s, planes, signs, lane), 4 * (2 * k + lane))
    _store_scales(s, to, notes.real(0), [s.shr(fields_0, 28), s.shr(fields_1, 28)], 0.5, 0.25)


def _nibble_scales(s: Simd, both: Value) -> list[Value]:
    """Four nibbles of every word."""
    return [s.and_(s.shr(both, 4 * j), 15) for j in range(LANES)]


def _note_nibbles(s: Simd, rows: Rows, at: int) -> list[Value]:
    """Scales of 16 values from `at` on, d."""
    return [*rows.words2(at), rows.half(0)]


def _iq2_xs(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value) -> None:
    for j, word in enumerate(rows.at(s.times(q, 16)).words4(2)):
        planes = planes_of_8(s, IQ2_LEVELS, entries_of_8(s, "IQ2_XS", s.cast(word, i16, 2 * WIDTH)))
        store_lines(s, to, _signed(s, planes, _even_signs(s, word, (9, 25, 9, 25)), 0), 4 * j)
    nibbles = _nibble_scales(s, _half_word(s, q, [notes.word(k) for k in range(2)]))
    _store_scales(s, to, notes.real(2), nibbles, 0.5, 0.25)


# ---- large grids


def _indices(s: Simd, low: Value, lane: int, fields: Value) -> Value:
    """i16 (32,): two index bytes of every word, and above them the low bytes of `fields`, of which two halves of every
    word hold a field."""
    return s.b.or_(_two_bytes(s, low, lane), s.shl(s.cast(fields, i16, 2 * WIDTH), 8))


def _two_fields(s: Simd, word: Value, start: int, distance: int, mask: int) -> Value:
    """Fields of every word from bits start and start + distance on, as its halves."""
    low = s.shr(word, start)
    high = s.shr(word, start + distance - 16) if start + distance >= 16 else s.shl(word, 16 - start - distance)
    return s.b.or_(s.and_(low, mask), s.and_(high, mask << 16))


def _iq2_s(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value) -> None:
    low, high = rows.at(s.times(q, 8)).words2(2), rows.at(s.times(q, 2)).halfwords(66)
    signs = rows.at(s.times(q, 8)).words2(34)
    indices = [_indices(s, low[j // 2], j % 2, _two_fields(s, high, 4 * j, 2, 3)) for j in range(LANES)]
    for j, entries in enumerate(entries_at(s, FAR["IQ2_S"], indices)):
        planes = _signed(s, planes_of_8(s, IQ2_LEVELS, entries), signs[j // 2], j % 2)
        store_lines(s, to, planes, 4 * j)
    nibbles = _nibble_scales(s, _half_word(s, q, [notes.word(k) for k in range(2)]))
    _store_scales(s, to, notes.real(2), nibbles, 0.5, 0.25)


def _plus_or_minus(s: Simd, planes: list[Value], minus: Value) -> list[Value]:
    """Planes plus 1; minus 1 where a bit of `minus`, of rows (16,) or of halves of words (32,), is set."""
    n = minus.type.count
    kind = {WIDTH: i32, 2 * WIDTH: i16}[n]
    ones = int.from_bytes(bytes([1] * (kind.width // 8)), "little")
    delta = s.cast(s.b.select(minus, s.splat(kind, n, -1), s.splat(kind, n, ones)), i8, LINE)
    return [s.b.add(plane, delta) for plane in planes]


def _is_set(s: Simd, values: Value, bit: int) -> Value:
    return s.b.icmp_signed("!=", s.and_(values, 1 << bit), s.zero(values.type.element, values.type.count))


def _iq1_s(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value) -> None:
    low, both = rows.at(s.times(q, 8)).words2(2), rows.at(s.times(q, 4)).word(34)
    high = [s.and_(both, 0xFFFF), s.shr(both, 16)]
    indices = [_indices(s, low[j // 2], j % 2, _two_fields(s, high[j // 2], 6 * (j % 2), 3, 7)) for j in range(LANES)]
    for j, entries in enumerate(entries_at(s, FAR["IQ1_S"], indices)):
        planes = _plus_or_minus(s, planes_of_8(s, IQ1_LEVELS, entries), _is_set(s, high[j // 2], 15))
        store_lines(s, to, planes, 4 * j)
    _store_scales(s, to, notes.real(0), [s.and_(s.shr(h, 12), 7) for h in high], 0.5, 0.25)


def _note_iq1_m(s: Simd, rows: Rows) -> list[Value]:
    """The words of scales; d."""
    words = rows.words2(48)
    return [*words, scattered_halves(s, words)]


def _iq1_m(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value) -> None:
    low, high = rows.at(s.times(q, 8)).words2(0), rows.at(s.times(q, 4)).word(32)
    fields = [_two_fields(s, high, 8 * j, 4, 15) for j in range(LANES)]
    indices = [_indices(s, low[j // 2], j % 2, s.and_(fields[j], 0x00070007)) for j in range(LANES)]
    for j, entries in enumerate(entries_at(s, FAR["IQ1_M"], indices)):
        minus = _is_set(s, s.cast(fields[j], i16, 2 * WIDTH), 3)
        store_lines(s, to, _plus_or_minus(s, planes_of_8(s, IQ1_LEVELS, entries), minus), 4 * j)
    four = _half_word(s, q, [notes.word(k) for k in range(2)])
    scales = [s.and_(s.shr(four, 3 * j), 7) for j in range(LANES)]
    _store_scales(s, to, notes.real(2), scales, 0.5, 0.25)


def _wide(
    name: str, block_bytes: int, note: Callable[[Simd, Rows], Sequence[Value]],
    unpack: Callable[[Simd, Rows, Value, Notes, Value], None], scales: int, least_rows: int = 5,
) -> Wide:  # fmt: skip
    return Wide(
        name, STEP, 1, block_bytes, BYTES.step_bytes, (_CODES + scales) * LINE, note, unpack,
        dots(4, XScale(BYTES.scale_at, unit=-16), scales, LANE_SUMS), least_rows=least_rows,
    )  # fmt: skip


WIDES: dict[str, Wide] = {
    w.name: w
    for w in (
        _wide("IQ3_XXS", 98, _note_iq3_xxs, _iq3_xxs, 2),
        _wide("IQ3_S", 110, _note_iq3_s, _iq3_s, 2),
        _wide("IQ2_XXS", 66, _note_half, _iq2_xxs, 2),
        _wide("IQ2_XS", 74, partial(_note_nibbles, at=66), _iq2_xs, 4),
        _wide("IQ2_S", 82, partial(_note_nibbles, at=74), _iq2_s, 4, 9),
        _wide("IQ1_S", 50, _note_half, _iq1_s, 2),
        _wide("IQ1_M", 56, _note_iq1_m, _iq1_m, 4),
    )
}
