"""Products of BF16, F16 and F32 matrices with float32 rows, in the tiers 512 and 256.

The rule has 256 lanes, or the largest power of two of values that a shorter row has; they are all kept in registers, so
one activation row is taken at a time. Every matrix row is read from end to end, as only that runs at memory speed. For
several activation rows this is done for a block of matrix rows, which is then in the cache for the other activation
rows, and while these use it, the next block is asked for. Long rows are cut into segments whose activations fit into
the first cache; between segments the lanes wait in memory. With one activation row they are there all the time, and
such rows are taken in pairs.
"""

from __future__ import annotations

from llvmlite import ir

from strata.base.arithmetic import MAX_LANES
from strata.base.compiled import CFunction
from strata.cpu.gemv.frame import N_ARGS
from strata.cpu.gemv.tiles import halve, lesser
from strata.cpu.simd import Simd, Value, emitted, f32, i16, i64, kernel_intrinsic, vector
from strata.cpu.tiers import needs_asking

FORMATS = ("F32", "F16", "BF16")

_LINE = 64
_BLOCK_ROWS = 8
_SEGMENT_STEPS = 16
"""Steps of 256 values in a segment: 16 KB of activations."""

LONG_FROM = (_SEGMENT_STEPS + 1) * MAX_LANES
"""Values of a row from which its activations leave the first cache."""

_PIECE = 64
"""Values of a row that a pair of rows takes at a time: the rows take turns."""

_HINT_BYTES, _HINT_LINES = 2048, 4
"""How far ahead, and for one in how many lines, hints are given, as in `frame`."""


class Matrix:
    """Reads weights and activations of one kernel, of a few rows or of any number (`gemv.table`)."""

    def __init__(self, s: Simd, name: str, tier: int):
        self.s, self.name, self.width = s, name, tier // 32
        self.kind, self.value_bytes = (f32, 4) if name == "F32" else (i16, 2)
        self.masks = tier == 512 or name == "F32"
        w, self.stride, self.n_rows, self.act, self.K, *_, out, self.out_stride = s.args
        self.w, self.out = s.pointer(w), s.pointer(out)
        self.spare = None if self.masks else s.scratch(2 * self.width)

    def row(self, i: Value) -> Value:
        return self.s.at(self.w, self.s.b.mul(i, self.stride))

    def x(self, r: int | Value) -> Value:
        """Pointer to an activation row."""
        s = self.s
        r = s.const(i64, r) if isinstance(r, int) else r
        return s.pointer(s.b.add(self.act, s.times(s.b.mul(self.K, r), 4)))

    def widen(self, values: Value) -> Value:
        if self.name == "BF16":
            return self.s.widen_bfloat(values)
        return self.s.widen_half(values) if self.name == "F16" else values

    def weights(self, row: Value, index: Value) -> Value:
        return self.widen(self.s.load(row, self.s.times(index, self.value_bytes), self.kind, self.width))

    def some_weights(self, row: Value, index: Value, count: Value) -> Value:
        """The first `count` < width values, then zeros."""
        s, at = self.s, self.s.times(index, self.value_bytes)
        if self.masks:
            return self.widen(s.load_masked(row, at, self.kind, self.width, self._mask(count)))
        s.store(s.zero(i16, self.width), self.spare)
        copy = emitted(s.module, "strata_copy_i16", 3, _copy_i16)
        s.b.call(copy, [s.b.ptrtoint(v, i64) for v in (self.spare, s.at(row, at))] + [count])
        return self.widen(s.load(self.spare, 0, i16, self.width))

    def _mask(self, count: Value) -> Value:
        return self.s.low_bits(ir.IntType(self.width), count)

    def values(self, x: Value, index: Value) -> Value:
        return self.s.load(x, self.s.times(index, 4), f32, self.width)

    def some_values(self, x: Value, index: Value, count: Value) -> Value:
        return self.s.load_masked(x, self.s.times(index, 4), f32, self.width, self._mask(count))

    def finish(self, i: Value, r: int | Value, vectors: list[Value]) -> None:
        """Output of matrix row i: the rest of the halving tree. Zeros above the lanes of a short row change nothing."""
        s = self.s
        r = s.const(i64, r) if isinstance(r, int) else r
        y = s.b.fadd(s.tree(halve(s, vectors)[0]), s.const(f32, 0.0))
        s.store(y, self.out, s.b.add(s.times(i, 4), s.b.mul(self.out_stride, r)), align=4)


def _copy_i16(s: Simd) -> None:
    """(to, from, count)"""
    to, source = s.pointer(s.args[0]), s.pointer(s.args[1])
    with s.loop(s.args[2]) as i:
        s.store(s.load(source, s.times(i, 2), i16), to, s.times(i, 2))


class _Lanes:
    """All lanes of one output in registers; `vectors` of them."""

    def __init__(self, m: Matrix, vectors: int):
        self.m, self._places = m, [m.s.variable(vector(f32, m.width)) for _ in range(vectors)]

    def values(self) -> list[Value]:
        return [self.m.s.get(place) for place in self._places]

    def clear(self) -> None:
        for place in self._places:
            self.m.s.set(place, self.m.s.zero(f32, self.m.width))

    def keep(self, pointer: Value) -> None:
        for k, value in enumerate(self.values()):
            self.m.s.store(value, pointer, 4 * self.m.width * k)

    def fetch(self, pointer: Value) -> None:
        for k, place in enumerate(self._places):
            self.m.s.set(place, self.m.s.load(pointer, 4 * self.m.width * k, f32, self.m.width))

    def _take(self, j: int, w: Value, x: Value) -> None:
        s = self.m.s
        s.set(self._places[j], s.fma(w, x, s.get(self._places[j])))

    def _take_vector(self, j: int, row: Value, x: Value, index: Value) -> None:
        self._take(j, self.m.weights(row, index), self.m.values(x, index))

    def take_step(self, row: Value, x: Value, start: Value) -> None:
        """As many values as there are lanes, from `start` on."""
        s = self.m.s
        for j in range(len(self._places)):
            self._take_vector(j, row, x, s.b.add(start, s.const(i64, j * self.m.width)))

    def take_rest(self, row: Value, x: Value, start: Value, left: Value) -> None:
        """The last left < lanes values of a row: vectors up to the first one that is not whole."""
        m, s, b = self.m, self.m.s, self.m.s.b
        done = b.append_basic_block("done")
        for j in range(len(self._places)):
            at = s.const(i64, j * m.width)
            here, index = b.sub(left, at), b.add(start, at)
            with b.if_then(b.icmp_signed("<", here, s.const(i64, m.width))):
                with b.if_then(b.icmp_signed(">", here, s.const(i64, 0))):
                    self._take(j, m.some_weights(row, index, here), m.some_values(x, index, here))
                b.branch(done)
            self._take_vector(j, row, x, index)
        b.branch(done)
        b.position_at_end(done)


def power_of_two(m: Matrix, powers: range) -> Value:
    """The largest 2^k <= K of the powers k, or the first of them."""
    s = m.s
    n = s.const(i64, 1 << powers[0])
    for k in powers[1:]:
        n = s.b.select(s.b.icmp_signed(">=", m.K, s.const(i64, 1 << k)), s.const(i64, 1 << k), n)
    return n


class _LongRows:
    """Rows of at least 256 values."""

    def __init__(self, m: Matrix, R: int):
        s, b = m.s, m.s.b
        self.m, self.R, self.lanes = m, R, _Lanes(m, MAX_LANES // m.width)
        self.full = b.lshr(m.K, s.const(i64, MAX_LANES.bit_length() - 1))
        self.start = s.times(self.full, MAX_LANES)
        self.left = b.sub(m.K, self.start)
        self.step_bytes = MAX_LANES * m.value_bytes
        self.segment_steps = s.const(i64, _SEGMENT_STEPS)

    def _ask(self, row: Value, r: Value, at: Value, next_block: Value) -> None:
        """Prefetches of step `at` of a row: the same place in the next block, into the second cache.

        A single activation row reads in order. Some processors follow that best by themselves, with hints. Of several
        activation rows the first reads in order, and the others ask, each for its part.
        """
        s, b = self.m.s, self.m.s.b
        here, lines = s.at(row, s.times(at, self.step_bytes)), self.step_bytes // _LINE
        if self.R > 1:
            lines = -(-lines // (self.R - 1))
            with b.if_then(b.icmp_signed(">", r, s.const(i64, 0))):
                part = s.times(b.sub(r, s.const(i64, 1)), lines * _LINE)
                place = s.at(here, b.add(next_block, part))
                for line in range(lines):
                    s.prefetch(place, _LINE * line, level=2)
        elif needs_asking():
            place = s.at(here, next_block)
            for line in range(lines):
                s.prefetch(place, _LINE * line, level=2)
        else:
            for line in range(0, lines, _HINT_LINES):
                s.prefetch(here, _HINT_BYTES + _LINE * line, level=2)

    def _segment(self, i: Value, r: Value, segment: Value, kept: Value, next_block: Value) -> None:
        """A segment of matrix row i times activation row r. kept: where the lanes wait."""
        m, s, b = self.m, self.m.s, self.m.s.b
        row, x = m.row(i), m.x(r)
        first = b.mul(segment, self.segment_steps)
        steps = lesser(s, self.segment_steps, b.sub(self.full, first))
        self.lanes.clear()
        with b.if_then(b.icmp_signed(">", segment, s.const(i64, 0))):
            self.lanes.fetch(kept)
        with s.loop(steps) as u:
            at = b.add(first, u)
            self._ask(row, r, at, next_block)
            self.lanes.take_step(row, x, s.times(at, MAX_LANES))
        with b.if_else(b.icmp_signed("<", b.add(first, steps), self.full)) as (more, last):
            with more:
                self.lanes.keep(kept)
            with last:
                self.lanes.take_rest(row, x, self.start, self.left)
                m.finish(i, r, self.lanes.values())

    def write(self) -> None:
        m, s, b = self.m, self.m.s, self.m.s.b
        kept_bytes = 4 * MAX_LANES
        kept = s.scratch(_BLOCK_ROWS * self.R * kept_bytes)
        n_segments = b.udiv(b.sub(b.add(self.full, self.segment_steps), s.const(i64, 1)), self.segment_steps)
        n_blocks = b.udiv(b.add(m.n_rows, s.const(i64, _BLOCK_ROWS - 1)), s.const(i64, _BLOCK_ROWS))
        with s.loop(n_blocks) as block:
            first = s.times(block, _BLOCK_ROWS)
            count = lesser(s, s.const(i64, _BLOCK_ROWS), b.sub(m.n_rows, first))
            next_block = b.mul(count, m.stride)
            with s.loop(n_segments) as segment, s.loop(self.R) as r, s.loop(count) as i:
                place = s.at(kept, s.times(b.add(s.times(i, self.R), r), kept_bytes))
                self._segment(b.add(first, i), r, segment, place, next_block)


class _PairedRows:
    """One activation row that does not fit into the first cache, and matrix rows in pairs, piece by piece.

    Each piece of activations is read once for both rows. What both read jumps so often that a processor which follows
    by itself does not try, and prefetches have the memory to themselves. It drops those that come too fast: so every
    line is asked for several times, a few rows ahead of its use each time.
    """

    def __init__(self, m: Matrix):
        s, b = m.s, m.s.b
        self.m, self.lanes = m, _Lanes(m, MAX_LANES // m.width)
        self.full = b.lshr(m.K, s.const(i64, MAX_LANES.bit_length() - 1))
        self.start = s.times(self.full, MAX_LANES)
        self.left = b.sub(m.K, self.start)
        self.kept = s.scratch(2 * 4 * MAX_LANES)
        self.asks = [s.times(m.stride, 2 * k) for k in range(1, 3 if m.value_bytes == 2 else 4)]

    def _piece(self, i: Value, rows: list[Value], kept: list[Value], x: Value) -> None:
        """Piece i of one or two rows."""
        m, s, b = self.m, self.m.s, self.m.s.b
        lane = s.times(b.and_(i, s.const(i64, MAX_LANES // _PIECE - 1)), 4 * _PIECE)
        index, at = s.times(i, _PIECE), s.times(i, _PIECE * m.value_bytes)
        for k in range(0, _PIECE, m.width):
            here = b.add(index, s.const(i64, k))
            values = m.values(x, here)
            for row, lanes in zip(rows, kept, strict=True):
                if k * m.value_bytes % _LINE == 0:
                    for ahead in self.asks:
                        s.prefetch(s.at(row, b.add(at, ahead)), k * m.value_bytes, level=2)
                place = b.add(lane, s.const(i64, 4 * k))
                total = s.load(lanes, place, f32, m.width)
                s.store(s.fma(m.weights(row, here), values, total), lanes, place)

    def _rows(self, first: Value, count: int) -> None:
        m, s, b = self.m, self.m.s, self.m.s.b
        numbers = [b.add(first, s.const(i64, k)) for k in range(count)]
        rows, x = [m.row(i) for i in numbers], m.x(0)
        kept = [s.at(self.kept, 4 * MAX_LANES * k) for k in range(count)]
        self.lanes.clear()
        for lanes in kept:
            self.lanes.keep(lanes)
        with s.loop(s.times(self.full, MAX_LANES // _PIECE)) as i:
            self._piece(i, rows, kept, x)
        for i, row, lanes in zip(numbers, rows, kept, strict=True):
            self.lanes.fetch(lanes)
            self.lanes.take_rest(row, x, self.start, self.left)
            m.finish(i, 0, self.lanes.values())

    def write(self) -> None:
        m, s, b = self.m, self.m.s, self.m.s.b
        pairs = b.lshr(m.n_rows, s.const(i64, 1))
        with s.loop(pairs) as k:
            self._rows(s.times(k, 2), 2)
        with b.if_then(b.icmp_signed("!=", s.times(pairs, 2), m.n_rows)):
            self._rows(s.times(pairs, 2), 1)


def _short_rows(m: Matrix, R: int) -> None:
    """Rows of less than 256 values, at least a vector: so many lanes, then the rest on the same lanes."""
    s, b = m.s, m.s.b
    lanes = _Lanes(m, MAX_LANES // 2 // m.width)
    n = power_of_two(m, range(m.width.bit_length() - 1, MAX_LANES.bit_length() - 1))
    with s.loop(m.n_rows) as i, s.loop(R) as r:
        row, x = m.row(i), m.x(r)
        lanes.clear()
        lanes.take_rest(row, x, s.const(i64, 0), n)
        lanes.take_rest(row, x, n, b.sub(m.K, n))
        m.finish(i, r, lanes.values())


def _tiny_rows(m: Matrix, R: int) -> None:
    """Rows of less than a vector."""
    s, b = m.s, m.s.b
    n = power_of_two(m, range(m.width.bit_length() - 1))
    with s.loop(m.n_rows) as i, s.loop(R) as r:
        row, x, total = m.row(i), m.x(r), s.zero(f32, m.width)
        for start, count in ((s.const(i64, 0), n), (n, b.sub(m.K, n))):
            total = s.fma(m.some_weights(row, start, count), m.some_values(x, start, count), total)
        m.finish(i, r, [total])


def _emit(s: Simd, name: str, R: int, tier: int) -> None:
    m, b = Matrix(s, name, tier), s.b
    long, tiny = (b.icmp_signed(sign, m.K, s.const(i64, n)) for sign, n in ((">=", MAX_LANES), ("<", m.width)))
    with b.if_then(long):
        if R == 1:
            with b.if_else(b.icmp_signed(">=", m.K, s.const(i64, LONG_FROM))) as (pairs, segments):
                with pairs:
                    _PairedRows(m).write()
                with segments:
                    _LongRows(m, R).write()
        else:
            _LongRows(m, R).write()
    with b.if_then(tiny):
        _tiny_rows(m, R)
    with b.if_then(b.not_(b.or_(long, tiny))):
        _short_rows(m, R)


_product = kernel_intrinsic("floats", _emit, N_ARGS)


def kernel(name: str, R: int, tier: int) -> CFunction:
    """The kernel of a float format for R activation rows, as `gemv.table` describes it."""

    def product(w, w_stride, n_rows, act, K, out, out_stride):
        _product(name, R, tier, w, w_stride, n_rows, act, K, out, out_stride)

    product.__qualname__ = f"{name}_{R}_rows_{tier}"
    return CFunction(product, N_ARGS)
