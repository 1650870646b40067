"""Grid formats in the tier 512 with grids too large for registers: IQ1_S, IQ1_M, IQ2_S.

Entries of 16 bits are read one by one, through indices that were stored before. A load from a fresh store costs more
than the lookup, so the indices of a few blocks are computed ahead. From the entries on, all is as in `super512_grid`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.cpu.gemv.frame import Lanes
from strata.cpu.gemv.prefetch import LINE_BYTES, NEAR, Prefetch, emit_prefetch
from strata.cpu.gemv.records256 import BYTES, STEP
from strata.cpu.gemv.super512_grid import (
    IQ2_LEVELS,
    fields_of,
    levels_of,
    multiply,
    nibbles_of,
    packed,
    plain_signs,
    planes_of_8,
    signed,
    upper_bits,
)
from strata.cpu.gemv.super_parts import first_half, part_scales, scattered_half
from strata.cpu.simd import Simd, Value, i8, i16, i64, vector
from strata.pack.grids import GRID

BLOCKS_AHEAD = 32
INDEX_BYTES = 64


@dataclass(frozen=True)
class FarFormat:
    """index(s, w) -> i16 (32,) grid indices of a block; unpack(s, w, entries) -> what `multiply` wants."""

    grid: str
    block_bytes: int
    index: Callable[[Simd, Value], Value]
    unpack: Callable[[Simd, Value, Value], tuple]


def _fields(s: Simd, high: Value, starts: Sequence[int]) -> Value:
    """i16 (32,): four fields of every i64 of high (8,), whose upper half is 0, in the high bytes; not masked."""
    nothing = 56
    order = [k for start in starts for k in (nothing, start)] * 8
    return s.cast(s.multishift(s.constant(i8, order), s.cast(high, i8, 64)), i16, 32)


def _index(s: Simd, low: Value, fields: Value, mask: int) -> Value:
    return s.b.or_(s.b.zext(low, vector(i16, 32)), s.and_(fields, mask << 8))


def _shifted(s: Simd, planes: list[Value], minus: Value) -> list[Value]:
    """Planes plus 1; minus 1 in the equal parts where `minus` (n x i1) is set."""
    n = minus.type.count
    kind = {8: i64, 32: i16}[n]
    ones = int.from_bytes(bytes([1] * (kind.width // 8)), "little")
    delta = s.cast(s.b.select(minus, s.splat(kind, n, -1), s.splat(kind, n, ones)), i8, 64)
    return [s.b.add(plane, delta) for plane in planes]


def _bit(s: Simd, value: Value, bit: int) -> Value:
    return s.b.icmp_signed("!=", s.and_(value, 1 << bit), s.zero(value.type.element, value.type.count))


# ---- IQ2_S


def _iq2_s_index(s: Simd, w: Value) -> Value:
    high = s.b.zext(s.load(w, 66, i8, 8), vector(i64, 8))
    return _index(s, s.load(w, 2, i8, 32), _fields(s, high, (0, 2, 4, 6)), 3)


def _iq2_s(s: Simd, w: Value, entries: Value) -> tuple:
    planes = signed(s, planes_of_8(s, IQ2_LEVELS, entries), plain_signs(s, w, 34))
    return planes, part_scales(s, first_half(s, w), nibbles_of(s, w, 74), 0.5, 0.25)


# ---- IQ1_S, IQ1_M: eight times the grid, plus or minus 1

IQ1_LEVELS = [8 * v for v in levels_of(GRID["IQ1_S"], 4)]


def _high_words(s: Simd, w: Value, at: int) -> Value:
    return s.b.zext(s.load(w, at, i16, 8), vector(i64, 8))


def _iq1_s_index(s: Simd, w: Value) -> Value:
    return _index(s, s.load(w, 2, i8, 32), _fields(s, _high_words(s, w, 34), (0, 3, 6, 9)), 7)


def _iq1_s(s: Simd, w: Value, entries: Value) -> tuple:
    high = _high_words(s, w, 34)
    planes = _shifted(s, planes_of_8(s, IQ1_LEVELS, entries), _bit(s, high, 15))
    return planes, part_scales(s, first_half(s, w), upper_bits(s, high, 12, 7), 0.5, 0.25)


def _iq1_m_fields(s: Simd, w: Value) -> Value:
    return _fields(s, _high_words(s, w, 32), (0, 4, 8, 12))


def _iq1_m_index(s: Simd, w: Value) -> Value:
    return _index(s, s.load(w, 0, i8, 32), _iq1_m_fields(s, w), 7)


def _iq1_m(s: Simd, w: Value, entries: Value) -> tuple:
    planes = _shifted(s, planes_of_8(s, IQ1_LEVELS, entries), _bit(s, _iq1_m_fields(s, w), 11))
    words = s.load(w, 48, i64)  # four times: four scales of 3 bits, then a part of the float16 scale
    scales = fields_of(s, words, [16 * (k // 4) + 3 * (k % 4) for k in range(16)], 7)
    return planes, part_scales(s, scattered_half(s, words), scales, 0.5, 0.25)


FORMATS: dict[str, FarFormat] = {
    "IQ2_S": FarFormat("IQ2_S", 82, _iq2_s_index, _iq2_s),
    "IQ1_S": FarFormat("IQ1_S", 50, _iq1_s_index, _iq1_s),
    "IQ1_M": FarFormat("IQ1_S", 56, _iq1_m_index, _iq1_m),
}


def _entries(s: Simd, format: FarFormat, indices: Value) -> Value:
    table = s.table(f"strata_{format.grid.lower()}_entries", i16, packed(GRID[format.grid], 2))
    entries = []
    for k in range(32):
        index = s.b.zext(s.load(indices, 2 * k, i16), i64)
        entries.append(s.load(table, s.times(index, 2), i16, align=2))
    return s.gather(entries)


def entries_at(s: Simd, format: FarFormat, indices: Sequence[Value]) -> list[Value]:
    """Entries for vectors of 32 indices (i16)."""
    place = s.scratch(INDEX_BYTES * len(indices))
    for k, index in enumerate(indices):
        s.store(index, place, INDEX_BYTES * k, align=INDEX_BYTES)
    return [_entries(s, format, s.at(place, INDEX_BYTES * k)) for k in range(len(indices))]


def emit_far(s: Simd, name: str, R: int, prefetch: Prefetch | None = None) -> None:
    """The body of a kernel (w, w_stride, n_rows, act, K, out, out_stride) for R activation rows; asks for a line a
    block, NEAR everywhere: into the second cache only, IQ2_S is a quarter slower on a Zen 4, with FAR a twentieth."""
    b, format = s.b, FORMATS[name]
    w, w_stride, n_rows, act, K, out, out_stride = s.args
    n_blocks = b.lshr(K, s.const(i64, STEP.bit_length() - 1))
    record = s.times(n_blocks, BYTES.step_bytes)
    xs = [s.pointer(b.add(act, s.times(record, r))) for r in range(R)]
    matrix, results = s.pointer(w), s.pointer(out)
    lanes = [Lanes(s, 512, 0) for _ in range(R)]
    indices = s.scratch(INDEX_BYTES * BLOCKS_AHEAD)
    groups = b.lshr(b.add(n_blocks, s.const(i64, BLOCKS_AHEAD - 1)), s.const(i64, BLOCKS_AHEAD.bit_length() - 1))
    with s.loop(n_rows) as i:
        row = s.at(matrix, b.mul(i, w_stride))
        for r in range(R):
            lanes[r].clear()
        with s.loop(groups) as group:
            first = s.times(group, BLOCKS_AHEAD)
            left = b.sub(n_blocks, first)
            ahead = s.const(i64, BLOCKS_AHEAD)
            n = b.select(b.icmp_signed("<", left, ahead), left, ahead)
            blocks = s.at(row, s.times(first, format.block_bytes))
            with s.loop(n) as k:
                block = s.at(blocks, s.times(k, format.block_bytes))
                emit_prefetch(s, NEAR if prefetch is None else prefetch, block, k, LINE_BYTES)
                s.store(format.index(s, block), s.at(indices, s.times(k, INDEX_BYTES)), align=INDEX_BYTES)
            with s.loop(n) as k:
                entries = _entries(s, format, s.at(indices, s.times(k, INDEX_BYTES)))
                unpacked = format.unpack(s, s.at(blocks, s.times(k, format.block_bytes)), entries)
                for r in range(R):
                    x = s.at(xs[r], s.times(b.add(first, k), BYTES.step_bytes))
                    multiply(s, unpacked, x, 0, lanes[r])
        for r in range(R):
            s.store(lanes[r].total(), results, b.add(s.times(i, 4), s.times(out_stride, r)), align=4)
