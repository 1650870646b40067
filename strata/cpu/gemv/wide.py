"""Products of quantised matrices with many activation rows, in the tier 512: the bits of the kernels for a few rows.

A kernel for a few rows holds the 16 lanes of one output in a vector, unpacks every weight once for each call and adds
the lanes up with shuffles. Here a vector holds one lane of 16 matrix rows. The weights of 16 rows are unpacked once for
all activation rows into a tile that stays in the second cache; an activation word is spread by the instruction that
multiplies it; the multiplications that make scales serve 16 outputs, and the trees are additions of whole vectors.

The lanes of an output are taken four at a time: a *unit*. The records are those of the kernels for a few rows, where
word l of every 64 bytes of codes belongs to lane l, so unit q finds its words 16 q bytes further on. A format is a
`Wide`: how a block of 16 rows becomes units of a tile (`wide_small`, `wide_k`, `wide_grid`), and how a unit meets
activations (`wide_products`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.cpu.gemv.tiles import Tiles, halve
from strata.cpu.simd import Simd, Value, f32, i8, i16, i32, i64, vector

WIDTH = 16
"""Matrix rows of a tile."""

LINE = 64
"""Bytes of a vector."""

UNITS, LANES = 4, 4
"""Of an output with 16 lanes, and lanes of a unit."""

GROUPS = (4, 2)
"""Activation rows taken at a time, and the last ones."""

MOST_NOTES = 9

MOST_VALUES = 10240
"""Of a row: the tile is on the stack and in the second cache."""


class Rows:
    """One block of 16 matrix rows. Values come as vectors with one element a row."""

    def __init__(self, s: Simd, blocks: Sequence[Value]):
        self.s, self._blocks = s, blocks

    def at(self, offset: int | Value) -> Rows:
        return Rows(self.s, [self.s.at(p, offset) for p in self._blocks])

    def words4(self, offset: int, skip: int = 0) -> list[Value]:
        """Four i32 (16,) from 16 bytes of each row; `skip`: without the first of those bytes, the last ones are 0."""
        s, fours = self.s, []
        for g in range(4):
            # Row 4 p + g in part p: then all that is left is a transposition inside of parts.
            four = s.join(*(s.load(self._blocks[4 * p + g], offset, i32, 4) for p in range(4)))
            if skip:
                index = [16 * p + k if k < 16 else 64 for p in range(4) for k in range(skip, skip + 16)]
                four = s.cast(s.pick(s.cast(four, i8, 64), index, s.zero(i8, 64)), i32, 16)
            fours.append(four)
        low = [4 * p + k for p in range(4) for k in (0, 16, 1, 17)]
        high = [4 * p + k for p in range(4) for k in (2, 18, 3, 19)]
        near = [4 * p + k for p in range(4) for k in (0, 1, 16, 17)]
        far = [4 * p + k for p in range(4) for k in (2, 3, 18, 19)]
        words = []
        for index in (low, high):
            a, b = (s.pick(fours[k], index, fours[k + 1]) for k in (0, 2))
            words += [s.pick(a, near, b), s.pick(a, far, b)]
        return words

    def words2(self, offset: int) -> list[Value]:
        """Two i32 (16,) from 8 bytes of each row."""
        s = self.s
        pairs = [s.load(p, offset, i32, 2) for p in self._blocks]
        low, high = s.join(*pairs[:8]), s.join(*pairs[8:])
        return [s.pick(low, [2 * r + k for r in range(16)], high) for k in range(2)]

    def word(self, offset: int) -> Value:
        """i32 (16,)."""
        return self.s.gather([self.s.load(p, offset, i32) for p in self._blocks])

    def bytes(self, offset: int) -> Value:
        """Bytes as i32 (16,)."""
        return self.s.b.zext(self.s.gather([self.s.load(p, offset, i8) for p in self._blocks]), vector(i32, 16))

    def halfwords(self, offset: int) -> Value:
        """Unsigned 16-bit words as i32 (16,)."""
        return self.s.b.zext(self.s.gather([self.s.load(p, offset, i16) for p in self._blocks]), vector(i32, 16))

    def half(self, offset: int) -> Value:
        """float16 as f32 (16,)."""
        return self.s.widen_half(self.s.gather([self.s.load(p, offset, i16) for p in self._blocks]))


class Notes:
    """Vectors that all units of a block need, one element a row."""

    def __init__(self, s: Simd, most: int):
        self._s, self._place = s, s.scratch(most * LINE)

    def write(self, values: Sequence[Value]) -> None:
        for k, value in enumerate(values):
            self._s.store(value, self._place, LINE * k, align=LINE)

    def word(self, k: int | Value) -> Value:
        """i32 (16,): the k-th."""
        at = LINE * k if isinstance(k, int) else self._s.times(k, LINE)
        return self._s.load(self._place, at, i32, WIDTH, align=LINE)

    def real(self, k: int) -> Value:
        """f32 (16,)."""
        return self._s.load(self._place, LINE * k, f32, WIDTH, align=LINE)


@dataclass(frozen=True)
class Wide:
    """A format.

    values, blocks  of a step of the records; a block fills 4 / blocks units
    block_bytes     of the matrix
    step_bytes      of the records
    unit_bytes      of the tile, for 16 rows
    note(s, rows)                  vectors for the units of a block, up to MOST_NOTES
    unpack(s, rows, q, notes, to)  writes unit q (a Value) of a block
    multiply(s, w, xs, q, lanes)   adds unit q to lanes [activation row][lane], variables; xs: records of the step,
                                   16 q bytes further on
    lowest          +1 or -1: minima are added or subtracted; 0: the format has none
    lowest_bytes    of the minima of a step
    unpack_lowest(s, rows, notes, to)  writes those of one block; to: its place in the step
    multiply_lowest(s, w, xs, lanes)
    least_rows      activation rows from which this is faster than kernels for a few
    """

    name: str
    values: int
    blocks: int
    block_bytes: int
    step_bytes: int
    unit_bytes: int
    note: Callable[[Simd, Rows], Sequence[Value]]
    unpack: Callable[[Simd, Rows, Value, Notes, Value], None]
    multiply: Callable[[Simd, Value, list[Value], Value, list[list[Value]]], None]
    lowest: int = 0
    lowest_bytes: int = 0
    unpack_lowest: Callable[[Simd, Rows, Notes, Value], None] | None = None
    multiply_lowest: Callable[[Simd, Value, list[Value], list[list[Value]]], None] | None = None
    least_rows: int = 5

    @property
    def block_values(self) -> int:
        return self.values // self.blocks


def _log2(n: int) -> int:
    return n.bit_length() - 1


class _Product:
    def __init__(self, s: Simd, wide: Wide):
        self.s, self.b, self.wide = s, s.b, wide
        b, K = s.b, s.args[4]
        self.n_blocks = b.lshr(K, s.const(i64, _log2(wide.block_values)))
        steps = b.lshr(b.add(K, s.const(i64, wide.values - 1)), s.const(i64, _log2(wide.values)))
        self.n_steps = steps
        self.tiles = Tiles(s, s.times(steps, wide.step_bytes), WIDTH)
        most_steps = -(-MOST_VALUES // wide.values)
        self.units = s.scratch(most_steps * UNITS * wide.unit_bytes)
        self.unit_stride = s.times(steps, wide.unit_bytes)
        self.notes = Notes(s, MOST_NOTES)
        self.minima = s.scratch(most_steps * wide.lowest_bytes) if wide.lowest else None
        self.sums = s.scratch(GROUPS[0] * (UNITS + 1) * LANES * LINE)
        self.lanes = [[s.variable(vector(f32, WIDTH)) for _ in range(LANES)] for _ in range(GROUPS[0])]

    def write(self) -> None:
        tiles, s, b = self.tiles, self.s, self.b
        # Of what is left behind groups of four, three rows are worth another four.
        fours = b.lshr(b.add(tiles.T, s.const(i64, 1)), s.const(i64, 2))
        done = s.times(fours, GROUPS[0])
        with s.loop(tiles.blocks(tiles.n_rows, WIDTH)) as block:
            i = s.times(block, WIDTH)
            self._unpack(i)
            with s.loop(fours) as part:
                self._rows(i, s.times(part, GROUPS[0]), GROUPS[0])
            with b.if_then(b.icmp_signed("<", done, tiles.T)):
                self._rows(i, done, GROUPS[1])

    def _unit(self, q: Value, u: Value) -> Value:
        return self.s.at(self.units, self.b.add(self.b.mul(q, self.unit_stride), self.s.times(u, self.wide.unit_bytes)))

    # ---- unpacking

    def _unpack(self, i: Value) -> None:
        tiles, s, b, wide = self.tiles, self.s, self.b, self.wide
        pointers = tiles.rows(i, WIDTH)
        with s.loop(self.n_blocks) as k:
            at = s.times(k, wide.block_bytes)
            self._block(Rows(s, [s.at(p, at) for p in pointers]), k)
        missing = b.sub(s.times(self.n_steps, wide.blocks), self.n_blocks)
        if wide.blocks > 1:
            with s.loop(missing) as more:
                self._clear(b.add(self.n_blocks, more))

    def _place(self, k: Value) -> tuple[Value, Value]:
        """Step of a block, and its place in the step."""
        s, b, n = self.s, self.b, self.wide.blocks
        return b.lshr(k, s.const(i64, _log2(n))), b.and_(k, s.const(i64, n - 1))

    def _block(self, rows: Rows, k: Value) -> None:
        s, b, wide = self.s, self.b, self.wide
        u, place = self._place(k)
        self.notes.write(wide.note(s, rows))
        with s.loop(UNITS // wide.blocks) as q:
            wide.unpack(s, rows, q, self.notes, self._unit(b.add(s.times(place, UNITS // wide.blocks), q), u))
        if wide.lowest:
            wide.unpack_lowest(s, rows, self.notes, self._minimum(u, place))

    def _minimum(self, u: Value, place: Value) -> Value:
        wide, s = self.wide, self.s
        at = self.b.add(s.times(u, wide.lowest_bytes), s.times(place, wide.lowest_bytes // wide.blocks))
        return s.at(self.minima, at)

    def _clear(self, k: Value) -> None:
        s, b, wide = self.s, self.b, self.wide
        u, place = self._place(k)

        def clear(to: Value, n_bytes: int) -> None:
            with s.loop(n_bytes // LINE) as line:
                s.store(s.zero(i32, WIDTH), to, s.times(line, LINE), align=LINE)

        for q in range(UNITS // wide.blocks):
            clear(self._unit(b.add(s.times(place, UNITS // wide.blocks), s.const(i64, q)), u), wide.unit_bytes)
        if wide.lowest:
            clear(self._minimum(u, place), wide.lowest_bytes // wide.blocks)

    # ---- products

    def _rows(self, i: Value, t: Value, n: int) -> None:
        """The outputs of the tile's matrix rows for n activation rows from t on."""
        tiles, s, b, wide = self.tiles, self.s, self.b, self.wide
        xs, lanes = tiles.xs(t, n), self.lanes[:n]
        following = s.at(tiles.w, b.mul(b.add(i, s.const(i64, WIDTH)), tiles.stride))
        ask = b.icmp_signed("==", t, s.const(i64, 0))
        ask_bytes = WIDTH * wide.blocks * wide.block_bytes // UNITS

        def lines(first: Value, r: int, j: int) -> Value:
            at = b.add(s.times(first, n * LINE), s.const(i64, LINE * (r + n * j)))
            return s.at(self.sums, at)

        def summed(first: Value, multiply: Callable[[Value], None]) -> None:
            for row in lanes:
                for place in row:
                    s.set(place, s.zero(f32, WIDTH))
            with s.loop(self.n_steps) as u:
                multiply(u)
            for r, row in enumerate(lanes):
                for j, place in enumerate(row):
                    s.store(s.get(place), lines(first, r, j), align=LINE)

        with s.loop(UNITS) as q:
            of_unit = [s.at(x, s.times(q, 4 * LANES)) for x in xs]

            def multiply(u: Value) -> None:
                with b.if_then(ask):
                    # The next tile's matrix rows, a part of them each time: prefetches in a burst would be dropped.
                    part = s.times(b.add(b.mul(q, self.n_steps), u), ask_bytes)
                    for line in range(0, ask_bytes, LINE):
                        s.prefetch(following, b.add(part, s.const(i64, line)), level=2)
                here = [s.at(x, s.times(u, wide.step_bytes)) for x in of_unit]
                wide.multiply(s, self._unit(q, u), here, q, lanes)

            summed(s.times(q, LANES), multiply)
        if wide.lowest:

            def multiply_lowest(u: Value) -> None:
                here = [s.at(x, s.times(u, wide.step_bytes)) for x in xs]
                wide.multiply_lowest(s, s.at(self.minima, s.times(u, wide.lowest_bytes)), here, lanes)

            summed(s.const(i64, UNITS * LANES), multiply_lowest)
        with s.loop(n) as r:
            first = s.at(self.sums, s.times(r, LINE))
            n_lanes = (UNITS + bool(wide.lowest)) * LANES
            sums = [s.load(first, n * LINE * l, f32, WIDTH, align=LINE) for l in range(n_lanes)]
            total = halve(s, sums[: UNITS * LANES])[0]
            if wide.lowest:
                low = halve(s, sums[UNITS * LANES :])[0]
                total = b.fadd(total, low) if wide.lowest > 0 else b.fsub(total, low)
            tiles.store(total, i, b.add(t, r))


def emit_wide(s: Simd, wide: Wide) -> None:
    """The body of a kernel (w, w_stride, n_rows, act, K, T, out, out_stride); K <= MOST_VALUES."""
    _Product(s, wide).write()
