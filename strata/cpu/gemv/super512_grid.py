"""Grid formats in the tier 512: IQ1_*, IQ2_*, IQ3_*.

A block becomes four planes of 64 unsigned bytes: plane c holds byte c of every four neighbours, GRID_BIAS added, as
the records hold the codes. Lookups stay in registers: a grid entry is 6 or 16 bits of level numbers, permutes fetch
the entries of a whole block at once, and a permute of levels turns numbers into weights. Only the last ten index bits
of the largest grids go through memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.cpu.gemv.records256 import GRID_BIAS, GRID_SCALE, LANE_SUMS
from strata.cpu.gemv.super_rows import Rows
from strata.cpu.simd import Simd, Value, f32, i8, i16, i32, i64, vector
from strata.pack.grids import GRID, SIGNS

_EVERY_FOURTH = [[4 * j + c for j in range(8)] * 8 for c in range(4)]


# ---- tables


def _numbers(grid: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """A grid as level numbers, and the levels."""
    levels, numbers = np.unique(grid, return_inverse=True)
    return numbers.reshape(grid.shape), [int(v) for v in levels]


def _packed(grid: np.ndarray, bits: int) -> np.ndarray:
    """(n, values) -> (n,) int64, the level numbers of a value row, `bits` each, low ones first."""
    numbers, _ = _numbers(grid)
    return (numbers.astype(np.int64) << (bits * np.arange(grid.shape[1]))).sum(1)


def _bytes(values: Sequence[int]) -> list[int]:
    return [(int(v) + 128) % 256 - 128 for v in values]


def _rows_of_table(s: Simd, name: str, values: np.ndarray, kind, n: int) -> list[Value]:
    """A table as vectors of n values."""
    width = kind.width // 8
    place = s.table(f"strata_{name}", kind, values)
    return [s.load(place, width * k, kind, n, align=64) for k in range(0, len(values), n)]


def _choose(s: Simd, index: Value, found: list[Value], first_bit: int) -> Value:
    """Halves a list of candidates by bits of the index, `first_bit` first."""
    while len(found) > 1:
        bit = s.b.icmp_signed("!=", s.and_(index, 1 << first_bit), s.zero(index.type.element, index.type.count))
        found = [s.b.select(bit, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
        first_bit += 1
    return found[0]


def _entries(s: Simd, name: str, index: Value) -> Value:
    """16-bit entries of an eight-value grid for 32 indices (i16; bits above the index are ignored)."""
    table = _rows_of_table(s, name.lower(), _packed(GRID[name], 2), i16, 32)
    return _choose(s, index, [s.permi2w(a, index, b) for a, b in zip(table[::2], table[1::2], strict=True)], 6)


def _pairs_of_codes(s: Simd, name: str, index: Value, ninth: Value | None) -> list[Value]:
    """Two 6-bit entries (first and second pair of values) of a four-value grid for 64 indices."""
    found = []
    for pair in range(2):
        values = _packed(GRID[name][:, 2 * pair : 2 * pair + 2], 3)
        table = _rows_of_table(s, f"{name.lower()}_{pair}", values, i8, 64)
        near = [s.permi2b(a, index, b) for a, b in zip(table[::2], table[1::2], strict=True)]
        eighth = s.b.icmp_signed("<", index, s.zero(i8, 64))
        near = [s.b.select(eighth, high, low) for low, high in zip(near[::2], near[1::2], strict=True)]
        found.append(near[0] if ninth is None else s.b.select(ninth, near[1], near[0]))
    return found


def _planes_of_4(s: Simd, name: str, pairs: list[Value]) -> list[Value]:
    """Biased weights without signs from 6-bit entries."""
    _, levels = _numbers(GRID[name])
    first = s.constant(i8, [levels[k & 7] + GRID_BIAS for k in range(64)])
    second = s.constant(i8, [levels[k >> 3] + GRID_BIAS for k in range(64)])
    return [s.permb(table, pair) for pair in pairs for table in (first, second)]


def _planes_of_8(s: Simd, levels: Sequence[int], entries: Value) -> list[Value]:
    """Biased weights without signs from 16-bit entries. Four 2-bit fields fill a byte, so plane c is the entries
    shifted by 2c: the lookup sees six bits, and the table repeats by the two that count."""
    table = s.constant(i8, _bytes([levels[k & 3] + GRID_BIAS for k in range(64)]))
    return [s.permb(table, s.cast(s.shr(entries, 2 * c), i8, 64)) for c in range(4)]


# ---- signs and scales


def _signed(s: Simd, planes: list[Value], signs: Value) -> list[Value]:
    """signs: 64 bytes, the lower four of every eight hold the sign bits of 32 values."""
    opposite = s.splat(i8, 64, -2 * GRID_BIAS)  # 2 bias - plane, modulo 256
    return [
        s.b.select(s.shufbit(signs, s.constant(i8, _EVERY_FOURTH[c])), s.b.sub(opposite, plane), plane)
        for c, plane in enumerate(planes)
    ]


def _even_signs(s: Simd, starts: Sequence[int], source: Value) -> Value:
    """Sign bytes from four fields of 7 bits in every 64-bit part, at the bits `starts`."""
    fields = s.multishift(s.constant(i8, [*starts, *starts] * 8), source)
    low, high = _rows_of_table(s, "signs", _bytes(SIGNS), i8, 64)
    return s.permi2b(low, fields, high)


def _part_scales(s: Simd, index: Value, offset: float, factor: float, d: Value) -> Value:
    """Exact float32 (16,) (k + offset) * factor * d for the low bits k of an index i32 (16,)."""
    return s.b.fmul(s.b.fadd(s.to_float(index), s.splat(f32, 16, offset)), s.b.fmul(d, s.splat(f32, 16, factor)))


def _spread_half(s: Simd, half: Value) -> Value:
    return s.spread(s.widen_half(half), 16)


def _top_scales(s: Simd, quads: Value) -> Value:
    """i64 (8,) -> i32 (16,): the upper four bits of every part, two times."""
    return s.pick(s.cast(s.shr(quads, 60), i32, 16), [k & 14 for k in range(16)])


def _nibble_scales(s: Simd, place: Value, at: int) -> Value:
    """Sixteen nibbles of 8 bytes as i32 (16,)."""
    whole = s.cast(s.spread(s.load(place, at, i64), 2), i8, 16)
    return s.b.zext(s.and_(s.multishift(s.constant(i8, [4 * k for k in range(16)]), whole), 15), vector(i32, 16))


# ---- sums


def _add(rows: Rows, planes: list[Value], scales: Value) -> None:
    for r in range(rows.R):
        total = rows.load(r, LANE_SUMS, i32, 16)
        for c, plane in enumerate(planes):
            total = rows.s.dpbusd(total, plane, rows.load(r, 64 * c, i8, 64))
        rows.add(r, 0, total, scales, GRID_SCALE)


# ---- formats


def iq3_xxs(rows: Rows, place: Value) -> None:
    s = rows.s
    planes = _planes_of_4(s, "IQ3_XXS", _pairs_of_codes(s, "IQ3_XXS", s.load(place, 2, i8, 64), None))
    words = s.b.zext(s.load(place, 66, i32, 8), vector(i64, 8))
    signs = _even_signs(s, (0, 7, 14, 21), s.cast(words, i8, 64))
    scales = s.pick(s.cast(s.shr(words, 28), i32, 16), [k & 14 for k in range(16)])
    d = _spread_half(s, s.load(place, 0, i16))
    _add(rows, _signed(s, planes, signs), _part_scales(s, scales, 0.5, 0.5, d))


def iq3_s(rows: Rows, place: Value) -> None:
    s = rows.s
    ninth = s.cast(s.load(place, 66, i64), s.b.icmp_signed("==", s.zero(i8, 64), s.zero(i8, 64)).type)
    planes = _planes_of_4(s, "IQ3_S", _pairs_of_codes(s, "IQ3_S", s.load(place, 2, i8, 64), ninth))
    signs = s.cast(s.b.zext(s.load(place, 74, i32, 8), vector(i64, 8)), i8, 64)
    four = s.cast(s.spread(s.load(place, 106, i32), 4), i8, 16)
    four = s.multishift(s.constant(i8, [4 * (k // 2) for k in range(16)]), four)
    scales = s.shl(s.b.zext(s.and_(four, 15), vector(i32, 16)), 1)
    d = _spread_half(s, s.load(place, 0, i16))
    _add(rows, _signed(s, planes, signs), _part_scales(s, scales, 1.0, 1.0, d))


_IQ2 = (8, 25, 43, 0)
"""Levels of the IQ2 grids."""


def iq2_xxs(rows: Rows, place: Value) -> None:
    s = rows.s
    whole = s.load(place, 2, i8, 64)  # eight times: four index bytes, then four fields of 7 sign bits and a scale
    spaced = s.multishift(s.constant(i8, [8 * (k // 2) for k in range(8)] * 8), whole)
    planes = _planes_of_8(s, _IQ2, _entries(s, "IQ2_XXS", s.cast(spaced, i16, 32)))
    signs = _even_signs(s, (32, 39, 46, 53), whole)
    d = _spread_half(s, s.load(place, 0, i16))
    _add(rows, _signed(s, planes, signs), _part_scales(s, _top_scales(s, s.cast(whole, i64, 8)), 0.5, 0.25, d))


def iq2_xs(rows: Rows, place: Value) -> None:
    s = rows.s
    whole = s.load(place, 2, i16, 32)  # nine bits of index, seven of signs
    planes = _planes_of_8(s, _IQ2, _entries(s, "IQ2_XS", whole))
    signs = _even_signs(s, (9, 25, 41, 57), s.cast(whole, i8, 64))
    d = _spread_half(s, s.load(place, 0, i16))
    _add(rows, _signed(s, planes, signs), _part_scales(s, _nibble_scales(s, place, 66), 0.5, 0.25, d))


def _index_of(s: Simd, low: Value, high: Value, starts: Sequence[int], mask: int) -> tuple[Value, Value]:
    """i16 (32,) index: low bytes i8 (32,), and above them the bits `mask` of four fields at `starts` of every i64 of
    high (8,), whose upper half is 0. Also returned: the fields, unmasked, as the high bytes of i16 (32,)."""
    nothing = 56
    fields = s.multishift(s.constant(i8, [k for start in starts for k in (nothing, start)] * 8), s.cast(high, i8, 64))
    fields = s.cast(fields, i16, 32)
    return s.b.or_(s.b.zext(low, vector(i16, 32)), s.and_(fields, mask << 8)), fields


def _far_entries(s: Simd, name: str, index: Value) -> Value:
    """`_entries` for grids that fill too many registers: indices and entries go through memory."""
    table = s.table(f"strata_{name.lower()}_entries", i16, _packed(GRID[name], 2))
    buffer = s.scratch(64)
    s.store(index, buffer)
    entries = []
    for k in range(32):
        one = s.b.zext(s.load(buffer, 2 * k, i16), i64)
        entries.append(s.load(table, s.times(one, 2), i16))
    return s.gather(entries)


def iq2_s(rows: Rows, place: Value) -> None:
    s = rows.s
    high = s.b.zext(s.load(place, 66, i8, 8), vector(i64, 8))
    index, _ = _index_of(s, s.load(place, 2, i8, 32), high, (0, 2, 4, 6), 3)
    planes = _planes_of_8(s, _IQ2, _far_entries(s, "IQ2_S", index))
    signs = s.cast(s.b.zext(s.load(place, 34, i32, 8), vector(i64, 8)), i8, 64)
    d = _spread_half(s, s.load(place, 0, i16))
    _add(rows, _signed(s, planes, signs), _part_scales(s, _nibble_scales(s, place, 74), 0.5, 0.25, d))


def _shifted(s: Simd, planes: list[Value], minus: Value, n: int) -> list[Value]:
    """Planes plus 1, or minus 1 where `minus` (n x i1 over equal parts) is set."""
    kind = {8: i64, 32: i16}[n]
    ones = int.from_bytes(bytes([1] * (kind.width // 8)), "little")
    delta = s.b.select(minus, s.splat(kind, n, -1), s.splat(kind, n, ones))
    return [s.b.add(plane, s.cast(delta, i8, 64)) for plane in planes]


def _bit(s: Simd, value: Value, bit: int) -> Value:
    return s.b.icmp_signed("!=", s.and_(value, 1 << bit), s.zero(value.type.element, value.type.count))


_IQ1 = (-8, 0, 8, 0)
"""Eight times the levels of the IQ1 grid."""


def iq1_s(rows: Rows, place: Value) -> None:
    s = rows.s
    high = s.b.zext(s.load(place, 34, i16, 8), vector(i64, 8))
    index, _ = _index_of(s, s.load(place, 2, i8, 32), high, (0, 3, 6, 9), 7)
    planes = _shifted(s, _planes_of_8(s, _IQ1, _far_entries(s, "IQ1_S", index)), _bit(s, high, 15), 8)
    twice = s.and_(s.shr(high, 11), 14)
    scales = s.pick(s.cast(twice, i32, 16), [k & 14 for k in range(16)])
    d = _spread_half(s, s.load(place, 0, i16))
    _add(rows, planes, _part_scales(s, scales, 1.0, 0.125, d))


def iq1_m(rows: Rows, place: Value) -> None:
    s = rows.s
    high = s.b.zext(s.load(place, 32, i16, 8), vector(i64, 8))
    index, fields = _index_of(s, s.load(place, 0, i8, 32), high, (0, 4, 8, 12), 7)
    planes = _shifted(s, _planes_of_8(s, _IQ1, _far_entries(s, "IQ1_M", index)), _bit(s, fields, 11), 32)
    quad = s.load(place, 48, i64)  # four words: four scales of 3 bits and a part of the float16 scale each
    whole = s.cast(s.spread(quad, 2), i8, 16)
    threes = s.multishift(s.constant(i8, [16 * (k // 4) + 3 * (k % 4) for k in range(16)]), whole)
    scales = s.shl(s.b.zext(s.and_(threes, 7), vector(i32, 16)), 1)
    half = s.const(i64, 0)
    for k in range(4):
        half = s.b.or_(half, s.b.and_(s.b.lshr(quad, s.const(i64, 12 + 12 * k)), s.const(i64, 15 << (4 * k))))
    _add(rows, planes, _part_scales(s, scales, 1.0, 0.125, _spread_half(s, s.b.trunc(half, i16))))
