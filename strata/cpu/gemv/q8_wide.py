"""Products of Q8_0 matrices with many activation rows, in the tier 512: the bits of `small512`.

A vector holds one lane of 16 matrix rows, and an activation is spread. One multiplication then makes the scales of 32
values of 16 outputs, and the halving trees are additions of whole vectors. The codes of 16 matrix rows are transposed
once for all activation rows. The even blocks of a row belong to its lower eight lanes and the odd ones to the upper:
they are taken one after the other, so that the lanes of two activation rows fit into the registers.
"""

from __future__ import annotations

from strata.base.compiled import CFunction
from strata.cpu.gemv.records import SCALE_BYTES, records_for
from strata.cpu.gemv.tiles import N_ARGS, Tiles, halve, transpose
from strata.cpu.simd import Simd, Value, f32, i8, i16, i32, i64, kernel_intrinsic, vector

FORMAT, TIER = "Q8_0", 512
WIDTH = 16
TOGETHER = 2
"""Activation rows taken at a time."""

BLOCK, BLOCK_BYTES, LANES = 32, 34, 8
"""Values of a block, its bytes, lanes that it belongs to."""

MOST_VALUES = 2560
"""Of a row: its transposed block of rows fits into the second cache."""

_LINE = 64
_CODES, _CORRECTIONS, _SCALES = 0, _LINE * LANES, 2 * _LINE * LANES
_TURNED_BYTES = (2 * LANES + 1) * _LINE
"""Of a block of 16 rows: codes and corrections by lane, then scales."""


class _Product:
    def __init__(self, s: Simd):
        self.s, self.b, self.layout = s, s.b, records_for(FORMAT, TIER)
        K = s.args[4]
        steps = s.b.udiv(s.b.add(K, s.const(i64, 2 * BLOCK - 1)), s.const(i64, 2 * BLOCK))
        self.tiles = Tiles(s, s.times(steps, self.layout.step_bytes), WIDTH)
        self.n_blocks = s.b.udiv(K, s.const(i64, BLOCK))
        self.turned = s.scratch(MOST_VALUES // BLOCK * _TURNED_BYTES)
        self.lower = s.scratch(TOGETHER * LANES * _LINE)
        self.lanes = [[s.variable(vector(f32, WIDTH)) for _ in range(LANES)] for _ in range(TOGETHER)]

    def write(self) -> None:
        tiles, s = self.tiles, self.s
        with s.loop(tiles.blocks(tiles.n_rows, WIDTH)) as block:
            i = s.times(block, WIDTH)
            rows = tiles.rows(i, WIDTH)
            with s.loop(self.n_blocks) as k:
                self._turn([s.at(row, s.times(k, BLOCK_BYTES)) for row in rows], k)
            with s.loop(tiles.blocks(tiles.T, TOGETHER)) as part:
                t = s.times(part, TOGETHER)
                for k, total in enumerate(self._totals(tiles.xs(t, TOGETHER))):
                    tiles.store(total, i, self.b.add(t, tiles.const(k)))

    def _turn(self, blocks: list[Value], k: Value) -> None:
        """Transpose block k of all rows."""
        s = self.s
        codes = [s.load(block, 2, i32, LANES) for block in blocks]
        lanes = transpose(s, [s.join(a, b) for a, b in zip(codes[:LANES], codes[LANES:], strict=True)])
        to = s.at(self.turned, s.times(k, _TURNED_BYTES))
        for l, lane in enumerate(lanes):
            lane = s.cast(lane, i8, 4 * WIDTH)
            # Activation codes are stored with 128 added.
            too_much = s.dpbusd(s.zero(i32, WIDTH), s.splat(i8, 4 * WIDTH, -128), lane)
            s.store(lane, to, _CODES + _LINE * l, align=_LINE)
            s.store(s.negate(too_much), to, _CORRECTIONS + _LINE * l, align=_LINE)
        scales = s.widen_half(s.gather([s.load(block, 0, i16) for block in blocks]))
        s.store(scales, to, _SCALES, align=_LINE)

    def _take(self, xs: list[Value], u: Value, upper: int) -> None:
        """A block of step u."""
        s, b = self.s, self.b
        block = b.add(s.times(u, 2), s.const(i64, upper))
        w = s.at(self.turned, s.times(block, _TURNED_BYTES))
        xs = [s.at(x, s.times(u, self.layout.step_bytes)) for x in xs]
        scales = s.load(w, _SCALES, f32, WIDTH, align=_LINE)
        at = self.layout.values + SCALE_BYTES // 2 * upper
        scales = [b.fmul(scales, s.spread(s.load(x, at, f32), WIDTH)) for x in xs]
        for l in range(LANES):
            codes = s.load(w, _CODES + _LINE * l, i8, 4 * WIDTH, align=_LINE)
            correction = s.load(w, _CORRECTIONS + _LINE * l, i32, WIDTH, align=_LINE)
            for k, x in enumerate(xs):
                activations = s.cast(s.spread(s.load(x, BLOCK * upper + 4 * l, i32), WIDTH), i8, 4 * WIDTH)
                total, place = s.dpbusd(correction, activations, codes), self.lanes[k][l]
                s.set(place, s.fma(s.to_float(total), scales[k], s.get(place)))

    def _totals(self, xs: list[Value]) -> list[Value]:
        s, b = self.s, self.b
        for upper in range(2):
            for lanes in self.lanes:
                for place in lanes:
                    s.set(place, s.zero(f32, WIDTH))
            with s.loop(b.lshr(b.add(self.n_blocks, s.const(i64, 1 - upper)), s.const(i64, 1))) as u:
                self._take(xs, u, upper)
            for k, lanes in enumerate(self.lanes):
                for l, place in enumerate(lanes):
                    at = _LINE * (LANES * k + l)
                    if upper:
                        s.set(place, b.fadd(s.load(self.lower, at, f32, WIDTH, align=_LINE), s.get(place)))
                    else:
                        s.store(s.get(place), self.lower, at, align=_LINE)
        return [halve(s, [s.get(place) for place in lanes])[0] for lanes in self.lanes]


def _emit(s: Simd) -> None:
    _Product(s).write()


_product = kernel_intrinsic("q8_wide", _emit, N_ARGS)


def kernel() -> CFunction:
    """The kernel for any number of activation rows as `gemv.table` describes it; K <= MOST_VALUES."""

    def product(w, w_stride, n_rows, act, K, T, out, out_stride):
        _product(w, w_stride, n_rows, act, K, T, out, out_stride)

    product.__qualname__ = f"Q8_0_wide_{TIER}"
    return CFunction(product, N_ARGS)
