"""Grid formats in the tier 512 whose grids stay in registers: IQ2_XXS, IQ2_XS, IQ3_XXS, IQ3_S.

A block becomes four planes of 64 unsigned bytes: plane c holds byte c of every four neighbours, GRID_BIAS added, as the
records hold the codes. A grid entry is 6 or 16 bits of level numbers; permutes fetch the entries of a whole block at
once, and a permute of levels turns numbers into weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from strata.cpu.gemv.frame import Lanes, Step
from strata.cpu.gemv.records256 import BYTES, GRID_BIAS, LANE_SUMS, STEP
from strata.cpu.gemv.super_parts import first_half, part_scales
from strata.cpu.simd import Kind, Simd, Value, f32, i1, i8, i16, i32, i64, vector
from strata.pack.grids import GRID, SIGNS

# ---- tables


def packed(grid: np.ndarray, bits: int) -> np.ndarray:
    """(n, values) -> (n,) int64, level numbers of `bits` bits each, low ones first."""
    numbers = np.unique(grid, return_inverse=True)[1].reshape(grid.shape)
    return (numbers.astype(np.int64) << (bits * np.arange(grid.shape[1]))).sum(1)


def levels_of(grid: np.ndarray, n: int) -> list[int]:
    """The levels of a grid, filled up to n."""
    levels = [int(v) for v in np.unique(grid)]
    return levels + [0] * (n - len(levels))


def as_bytes(values: Sequence[int]) -> list[int]:
    return [(int(v) + 128) % 256 - 128 for v in values]


def _registers(s: Simd, name: str, values: Sequence[int], kind: Kind, n: int) -> list[Value]:
    """A table as vectors of n values."""
    place = s.table(f"strata_{name.lower()}", kind, values)
    return [s.load(place, kind.width // 8 * k, kind, n, align=64) for k in range(0, len(values), n)]


def _has(s: Simd, value: Value, bit: int) -> Value:
    return s.b.icmp_signed("!=", s.and_(value, 1 << bit), s.zero(value.type.element, value.type.count))


def entries_of_8(s: Simd, name: str, index: Value) -> Value:
    """16-bit entries of an eight-value grid for 32 indices (i16; bits above the index may be anything)."""
    table = _registers(s, name, packed(GRID[name], 2), i16, 32)
    found = [s.permi2w(a, index, b) for a, b in zip(table[::2], table[1::2], strict=True)]
    bit = 6
    while len(found) > 1:
        upper = _has(s, index, bit)
        found = [s.b.select(upper, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
        bit += 1
    return found[0]


def pairs_of_4(s: Simd, name: str, index: Value, ninth: Value | None) -> list[Value]:
    """6-bit entries, first and second pair of values, of a four-value grid for 64 indices."""
    upper, found = s.b.icmp_signed("<", index, s.zero(i8, 64)), []
    for k in range(2):
        table = _registers(s, f"{name}_{k}", packed(GRID[name][:, 2 * k : 2 * k + 2], 3), i8, 64)
        near = [s.permi2b(a, index, b) for a, b in zip(table[::2], table[1::2], strict=True)]
        near = [s.b.select(upper, high, low) for low, high in zip(near[::2], near[1::2], strict=True)]
        found.append(near[0] if ninth is None else s.b.select(ninth, near[1], near[0]))
    return found


def planes_of_4(s: Simd, name: str, pairs: list[Value]) -> list[Value]:
    """Biased weights, signs apart, from 6-bit entries."""
    levels = [v + GRID_BIAS for v in levels_of(GRID[name], 8)]
    tables = [s.constant(i8, [levels[k & 7] for k in range(64)]), s.constant(i8, [levels[k >> 3] for k in range(64)])]
    return [s.permb(table, pair) for pair in pairs for table in tables]


def planes_of_8(s: Simd, levels: Sequence[int], entries: Value) -> list[Value]:
    """Biased weights, signs apart, from 16-bit entries: every byte holds a number for each plane. A lookup sees the six
    low bits, so a table for each of the first three fields saves most shifts."""
    fields = [0, 1, 2, 2]
    tables = [s.constant(i8, [levels[k >> (2 * f) & 3] + GRID_BIAS for k in range(64)]) for f in range(3)]
    shifted = s.cast(s.shr(entries, 2), i8, 64)
    sources = [s.cast(entries, i8, 64)] * 3 + [shifted]
    return [s.permb(tables[f], source) for f, source in zip(fields, sources, strict=True)]


# ---- signs and scales


def signed(s: Simd, planes: list[Value], signs: Value) -> list[Value]:
    """signs: 64 bytes; the lower four of every eight are the sign bits of 32 values."""
    opposite = s.splat(i8, 64, -2 * GRID_BIAS)  # 2 bias - plane, modulo 256
    bits = [s.constant(i8, [4 * j + c for j in range(8)] * 8) for c in range(4)]
    return [s.b.select(s.shufbit(signs, bits[c]), s.b.sub(opposite, plane), plane) for c, plane in enumerate(planes)]


def sign_table(s: Simd) -> list[Value]:
    """Sign bytes by 7-bit numbers, in two registers."""
    return _registers(s, "signs", as_bytes(SIGNS), i8, 64)


def _even_signs(s: Simd, starts: Sequence[int], source: Value) -> Value:
    """Sign bytes for `signed` from the 7-bit fields at `starts` of every 64 bits."""
    fields = s.multishift(s.constant(i8, [*starts, *starts] * 8), source)
    low, high = sign_table(s)
    return s.permi2b(low, fields, high)


def plain_signs(s: Simd, w: Value, at: int) -> Value:
    """32 sign bytes of the block, for `signed`."""
    return s.cast(s.b.zext(s.load(w, at, i32, 8), vector(i64, 8)), i8, 64)


def upper_bits(s: Simd, quads: Value, first: int, mask: int = 15) -> Value:
    """i64 (8,) -> i32 (16,): the bits from `first` on, under a mask, two times each."""
    return s.pick(s.cast(s.and_(s.shr(quads, first), mask), i32, 16), [k & 14 for k in range(16)])


def fields_of(s: Simd, word: Value, starts: Sequence[int], mask: int) -> Value:
    """Bits from `starts` on, under a mask, of an integer that repeats to 64 bits -> i32 (16,)."""
    whole = s.cast(s.spread(word, 128 // word.type.width), i8, 16)
    return s.b.zext(s.and_(s.multishift(s.constant(i8, starts), whole), mask), vector(i32, 16))


def nibbles_of(s: Simd, w: Value, at: int) -> Value:
    """Sixteen nibbles of the block as i32 (16,)."""
    return fields_of(s, s.load(w, at, i64), range(0, 64, 4), 15)


def multiply(s: Simd, unpacked: tuple, x: Value, part: int, lanes: Lanes) -> None:
    planes, scales = unpacked
    total = s.load(x, LANE_SUMS, i32, 16)
    for c, plane in enumerate(planes):
        total = s.dpbusd(total, plane, s.load(x, 64 * c, i8, 64))
    lanes.add(0, total, s.b.fmul(scales, s.spread(s.load(x, BYTES.scale_at, f32), 16)))


# ---- formats


def _iq3_xxs(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    planes = planes_of_4(s, "IQ3_XXS", pairs_of_4(s, "IQ3_XXS", s.load(w, 2, i8, 64), None))
    words = s.b.zext(s.load(w, 66, i32, 8), vector(i64, 8))
    planes = signed(s, planes, _even_signs(s, (0, 7, 14, 21), s.cast(words, i8, 64)))
    return planes, part_scales(s, first_half(s, w), upper_bits(s, words, 28), 0.5, 0.5)


def _iq3_s(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    ninth = s.cast(s.load(w, 66, i64), i1, 64)
    planes = planes_of_4(s, "IQ3_S", pairs_of_4(s, "IQ3_S", s.load(w, 2, i8, 64), ninth))
    planes = signed(s, planes, plain_signs(s, w, 74))
    scales = fields_of(s, s.load(w, 106, i32), [4 * (k // 2) for k in range(16)], 15)
    return planes, part_scales(s, first_half(s, w), scales, 0.5, 2.0)


IQ2_LEVELS = levels_of(GRID["IQ2_XS"], 4)


def _iq2_xxs(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    whole = s.load(w, 2, i8, 64)  # eight times: four index bytes, then four fields of 7 sign bits and a scale
    spaced = s.multishift(s.constant(i8, [8 * (k // 2) for k in range(8)] * 8), whole)
    planes = planes_of_8(s, IQ2_LEVELS, entries_of_8(s, "IQ2_XXS", s.cast(spaced, i16, 32)))
    planes = signed(s, planes, _even_signs(s, (32, 39, 46, 53), whole))
    return planes, part_scales(s, first_half(s, w), upper_bits(s, s.cast(whole, i64, 8), 60), 0.5, 0.25)


def _iq2_xs(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    whole = s.load(w, 2, i16, 32)  # nine bits of index, seven of signs
    planes = planes_of_8(s, IQ2_LEVELS, entries_of_8(s, "IQ2_XS", whole))
    planes = signed(s, planes, _even_signs(s, (9, 25, 41, 57), s.cast(whole, i8, 64)))
    return planes, part_scales(s, first_half(s, w), nibbles_of(s, w, 66), 0.5, 0.25)


_step = partial(Step, STEP, 1, record_bytes=BYTES.step_bytes, multiply=multiply)

STEPS: dict[str, Step] = {
    "IQ2_XXS": _step(block_bytes=66, unpack=_iq2_xxs),
    "IQ2_XS": _step(block_bytes=74, unpack=_iq2_xs),
    "IQ3_XXS": _step(block_bytes=98, unpack=_iq3_xxs),
    "IQ3_S": _step(block_bytes=110, unpack=_iq3_s),
}
