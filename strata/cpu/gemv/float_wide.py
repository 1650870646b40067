"""Products of BF16, F16 and F32 matrices with many float32 rows, in the tiers 512 and 256: the bits of `float_simd`.

A kernel of a few rows converts every weight once for each of them and adds up one output's lanes at its end. With many
activation rows a tile of several matrix and several activation rows shares both:

short rows   (less than 512 values: one or two a lane) a vector holds one value of as many matrix rows as it has places,
             and an activation is spread. The halving tree is then one over whole vectors, without a shuffle. The
             values of a block of matrix rows are transposed once for all activation rows and stay in the first cache.
long rows    a vector holds neighbouring lanes of one output, as many outputs as registers allow are summed at a time,
             and every vector that is read serves a whole row or column of the tile. At the end the trees of the tile's
             outputs are added side by side.
"""

from __future__ import annotations

from llvmlite import ir

from strata.base.arithmetic import MAX_LANES
from strata.base.compiled import CFunction
from strata.cpu.gemv.float_simd import FORMATS, Matrix, power_of_two
from strata.cpu.gemv.tiles import N_ARGS, Tiles, halve, transpose
from strata.cpu.simd import Simd, Value, f32, i8, i64, kernel_intrinsic, vector

LONG = 2 * MAX_LANES
"""Values from which a row is a long one."""

LEAST_VALUES = 16
"""Shorter rows than this are left to the kernels of a few rows."""

__all__ = ["FORMATS", "LEAST_VALUES", "LONG", "kernel"]


# ---- short rows


def _reversed_bits(n: int) -> list[int]:
    bits = n.bit_length() - 1
    return [int(f"{k:0{bits}b}"[::-1], 2) for k in range(n)]


class _ShortRows:
    """Rows of one to two values a lane. Lanes are taken four at a time, those that the tree adds first, in an order in
    which every sum of the tree can be formed as soon as its second part is there."""

    def __init__(self, tiles: Tiles, m: Matrix):
        s = tiles.s
        self.tiles, self.m, self.s, self.b, self.width = tiles, m, s, s.b, tiles.width
        self.together = 8 if self.width == 16 else 4
        self.line = 4 * self.width
        quarter = MAX_LANES // 4
        self.turned = s.scratch(LONG * self.line)
        self.waiting = s.scratch((quarter.bit_length()) * self.together * self.line)
        self.order = s.table("strata_reversed_bits", i8, _reversed_bits(quarter))
        self.lanes = power_of_two(m, range(self.width.bit_length() - 1, MAX_LANES.bit_length()))
        self.quarter = s.b.lshr(self.lanes, tiles.const(2))
        self.left = s.b.sub(m.K, self.lanes)

    def write(self) -> None:
        tiles, s = self.tiles, self.s
        with s.loop(tiles.blocks(tiles.n_rows, self.width)) as block:
            i = s.times(block, self.width)
            self._turn(i)
            with s.loop(tiles.blocks(tiles.T, self.together)) as part:
                t = s.times(part, self.together)
                for k, total in enumerate(self._products(tiles.xs(t, self.together))):
                    tiles.store(total, i, self.b.add(t, tiles.const(k)))

    def _turn(self, i: Value) -> None:
        """Transpose the values of a block of matrix rows."""
        tiles, s, b, m = self.tiles, self.s, self.b, self.m
        rows = tiles.rows(i, self.width)
        whole = b.lshr(m.K, tiles.const(self.width.bit_length() - 1))
        rest = b.and_(m.K, tiles.const(self.width - 1))

        def keep(values: list[Value], first: Value) -> None:
            to = s.at(self.turned, s.times(first, self.line))
            for k, value in enumerate(transpose(s, values)):
                s.store(value, to, self.line * k, align=self.line)

        with s.loop(whole) as u:
            first = s.times(u, self.width)
            keep([m.weights(row, first) for row in rows], first)
        with b.if_then(b.icmp_signed(">", rest, tiles.const(0))):
            first = s.times(whole, self.width)
            keep([m.some_weights(row, first, rest) for row in rows], first)

    def _weights(self, index: Value) -> Value:
        return self.s.load(self.turned, self.s.times(index, self.line), f32, self.width, align=self.line)

    def _spread(self, x: Value, index: Value) -> Value:
        s = self.s
        return s.spread(s.load(x, s.times(index, 4), f32, align=4), self.width)

    def _products(self, xs: list[Value]) -> list[Value]:
        tiles, s, b = self.tiles, self.s, self.b
        n, line = len(xs), self.line
        kind = vector(f32, self.width)
        totals, halves, products = ([s.variable(kind) for _ in xs] for _ in range(3))
        with s.loop(self.quarter) as turn:
            at = b.zext(s.load(self.order, turn, i8), i64)
            lane = b.udiv(b.mul(at, self.quarter), tiles.const(MAX_LANES // 4))
            # In the order of the tree: lanes that lie half of all apart, then a quarter.
            for j, distance in enumerate((0, 2, 1, 3)):
                index = b.add(lane, b.mul(self.quarter, tiles.const(distance)))
                w = self._weights(index)
                for place, x in zip(products, xs, strict=True):
                    s.set(place, b.fmul(w, self._spread(x, index)))
                with b.if_then(b.icmp_signed("<", index, self.left)):
                    more = b.add(index, self.lanes)
                    w = self._weights(more)
                    for place, x in zip(products, xs, strict=True):
                        s.set(place, s.fma(w, self._spread(x, more), s.get(place)))
                for total, half, place in zip(totals, halves, products, strict=True):
                    if j == 0:
                        s.set(total, s.get(place))
                    elif j == 2:
                        s.set(half, s.get(place))
                    else:
                        sums = total if j == 1 else half
                        s.set(sums, b.fadd(s.get(sums), s.get(place)))
            for total, half in zip(totals, halves, strict=True):
                s.set(total, b.fadd(s.get(total), s.get(half)))
            finished = s.call("llvm.cttz.i64", i64, b.not_(turn), s.const(ir.IntType(1), 0))
            with s.loop(finished) as level:
                for k, total in enumerate(totals):
                    at = b.add(s.times(level, n * line), tiles.const(k * line))
                    s.set(total, b.fadd(s.load(self.waiting, at, f32, self.width, align=line), s.get(total)))
            for k, total in enumerate(totals):
                at = b.add(s.times(finished, n * line), tiles.const(k * line))
                s.store(s.get(total), self.waiting, at, align=line)
        return [s.get(total) for total in totals]


# ---- long rows


def _trees(s: Simd, rows: list[Value]) -> Value:
    """Halving trees over as many vectors as one has elements, their sums side by side."""
    n = rows[0].type.count
    half = n // 2
    while half:
        # A vector holds the partial sums of n / (2 half) outputs, `half` apart in it.
        low = [g * 2 * half + i for g in range(n // half // 2) for i in range(half)]
        low += [n + i for i in low]
        high = [i + half for i in low]
        rows = [s.b.fadd(s.pick(a, low, b), s.pick(a, high, b)) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        half //= 2
    return rows[0]


class _LongRows:
    """Rows of at least two values a lane, all 256 lanes. A tile has as many outputs as a vector has places."""

    def __init__(self, tiles: Tiles, m: Matrix):
        s = tiles.s
        self.tiles, self.m, self.s, self.b, self.width = tiles, m, s, s.b, tiles.width
        self.high, self.wide = self.width // 4, 4
        self.line = 4 * self.width
        self.groups = MAX_LANES // self.width
        self.parts = s.scratch(self.groups * self.width * self.line)
        self.full = s.b.lshr(tiles.K, tiles.const(MAX_LANES.bit_length() - 1))
        self.left = s.b.and_(tiles.K, tiles.const(MAX_LANES - 1))

    def write(self) -> None:
        tiles, s, b = self.tiles, self.s, self.b
        with s.loop(tiles.blocks(tiles.T, self.wide)) as part:
            t = s.times(part, self.wide)
            xs = tiles.xs(t, self.wide)
            with s.loop(tiles.blocks(tiles.n_rows, self.high)) as block:
                i = s.times(block, self.high)
                self._sums(tiles.rows(i, self.high), xs)
                totals = self._totals()
                for k in range(self.wide):
                    some = s.part(totals, k * self.high, self.high)
                    tiles.store(some, i, b.add(t, tiles.const(k)))

    def _sums(self, rows: list[Value], xs: list[Value]) -> None:
        """Lanes of all outputs, a group of neighbours at a time, to memory."""
        tiles, s, b, m = self.tiles, self.s, self.b, self.m
        sums = [s.variable(vector(f32, self.width)) for _ in range(self.width)]

        def take(ws: list[Value], values: list[Value]) -> None:
            for k, x in enumerate(values):
                for j, w in enumerate(ws):
                    place = sums[k * self.high + j]
                    s.set(place, s.fma(w, x, s.get(place)))

        with s.loop(self.groups) as group:
            lane = s.times(group, self.width)
            here = b.sub(self.left, lane)
            for place in sums:
                s.set(place, s.zero(f32, self.width))
            one_more = b.zext(b.icmp_signed(">=", here, tiles.const(self.width)), i64)
            with s.loop(b.add(self.full, one_more)) as u:
                at = b.add(s.times(u, MAX_LANES), lane)
                take([m.weights(row, at) for row in rows], [m.values(x, at) for x in xs])
            some = b.and_(b.icmp_signed(">", here, tiles.const(0)), b.icmp_signed("<", here, tiles.const(self.width)))
            with b.if_then(some):
                at = b.add(s.times(self.full, MAX_LANES), lane)
                take([m.some_weights(row, at, here) for row in rows], [m.some_values(x, at, here) for x in xs])
            for k, place in enumerate(sums):
                at = b.add(s.times(group, self.width * self.line), tiles.const(k * self.line))
                s.store(s.get(place), self.parts, at, align=self.line)

    def _totals(self) -> Value:
        s, step = self.s, self.width * self.line
        with s.loop(self.width) as k:
            first = s.at(self.parts, s.times(k, self.line))
            parts = [s.load(first, g * step, f32, self.width, align=self.line) for g in range(self.groups)]
            s.store(halve(s, parts)[0], first, align=self.line)
        n = self.width
        return _trees(s, [s.load(self.parts, k * self.line, f32, n, align=self.line) for k in range(n)])


def _emit(s: Simd, name: str, tier: int) -> None:
    m = Matrix(s, name, tier)
    tiles = Tiles(s, s.times(m.K, 4), m.width)
    with s.b.if_else(s.b.icmp_signed(">=", m.K, s.const(i64, LONG))) as (long, short):
        with long:
            _LongRows(tiles, m).write()
        with short:
            _ShortRows(tiles, m).write()


_product = kernel_intrinsic("float_wide", _emit, N_ARGS)


def kernel(name: str, tier: int) -> CFunction:
    """The kernel of a float format for any number of activation rows, see `gemv.table`; K >= LEAST_VALUES."""

    def product(w, w_stride, n_rows, act, K, T, out, out_stride):
        _product(name, tier, w, w_stride, n_rows, act, K, T, out, out_stride)

    product.__qualname__ = f"{name}_wide_{tier}"
    return CFunction(product, N_ARGS)
