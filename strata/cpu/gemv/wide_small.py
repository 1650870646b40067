"""Tiles of the formats of 32 and 64 values, see `wide`. A block is a unit, of NVFP4 two: its packed words already lie
as lanes want them."""

from __future__ import annotations

from typing import Any

from strata.cpu.gemv.records import SCALE_BYTES, records_for
from strata.cpu.gemv.small import SMALL, Small, bytes_of, e4m3_scales, e8m0_scales, nibbles, twos
from strata.cpu.gemv.wide import LANES, LINE, Notes, Rows, Wide
from strata.cpu.gemv.wide_products import XScale, dots, lowest_blocks, store_lines
from strata.cpu.simd import Simd, Value, i8, i16, vector

TIER = 512

_LEAST_ROWS = {"Q2_0": 6}
"""Where it is not the usual number."""


def _scales(s: Simd, f: Small, rows: Rows, q: Value) -> list[Value]:
    if f.scale == "e8m0":
        return [e8m0_scales(s, s.shl(rows.bytes(0), 24))]
    if f.scale == "e4m3":
        codes = rows.at(s.times(q, 2)).bytes
        tops = [s.b.trunc(s.shl(codes(k), 8), vector(i16, 16)) for k in range(2)]
        return [e4m3_scales(s, top) for top in tops]
    return [rows.half(0)]


def _planes(s: Simd, f: Small, packed: Value, fifth: Value | None, j: int) -> list[Value]:
    packed = s.cast(packed, i8, LINE)
    if f.planes == "twos":
        return twos(s, packed)
    if f.planes == "table":
        table = bytes_of(s, f.table, 4)
        return [s.permb(table, packed), s.permb(table, s.shr_bytes(packed, 4))]
    planes = nibbles(s, packed)
    if fifth is not None:
        for k in range(2):
            bits = [32 * (r % 2) + 16 * k + 4 * j + i for r in range(16) for i in range(4)]
            bit = s.shufbit(fifth, s.constant(i8, bits))
            planes[k] = s.b.select(bit, s.or_(planes[k], 16), planes[k])
    return planes


def _wide(f: Small) -> Wide:
    layout = records_for(f.name, TIER)
    values, n_scales = layout.values, 2 if f.scale == "e4m3" else 1

    def unpack(s: Simd, rows: Rows, q: Value, notes: Notes, to: Value) -> None:
        packed = (rows.at(s.times(q, 16)) if f.blocks < 4 else rows).words4(f.codes)
        fifth = s.cast(rows.word(f.fifth), i8, LINE) if f.planes == "fives" else None
        for j, word in enumerate(packed):
            store_lines(s, to, _planes(s, f, word, fifth, j), f.n_planes * j)
        store_lines(s, to, _scales(s, f, rows, q), LANES * f.n_planes)

    def unpack_lowest(s: Simd, rows: Rows, notes: Notes, to: Value) -> None:
        s.store(rows.half(f.minimum), to, align=LINE)

    x_scale = XScale(values, lane=4 if f.planes == "twos" else 0)
    correction = values + SCALE_BYTES if f.bias else None
    more: dict[str, Any] = {"least_rows": _LEAST_ROWS[f.name]} if f.name in _LEAST_ROWS else {}
    if f.minimum:
        at = values + SCALE_BYTES
        more |= {"lowest": 1, "lowest_bytes": LANES * LINE, "unpack_lowest": unpack_lowest,
                 "multiply_lowest": lowest_blocks(at, at + 16)}  # fmt: skip
    return Wide(
        f.name, values, f.blocks, f.block_bytes, layout.step_bytes, (LANES * f.n_planes + n_scales) * LINE,
        lambda s, rows: (), unpack, dots(f.n_planes, x_scale, n_scales, correction), **more,
    )  # fmt: skip


WIDES: dict[str, Wide] = {name: _wide(f) for name, f in SMALL.items()}
