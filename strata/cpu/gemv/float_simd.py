"""Products of BF16, F16 and F32 matrices with float32 rows, in the tiers 512 and 256.

The rule has 256 lanes (fewer for short rows), more than the registers hold for several activation rows. So a row is
taken in passes: each keeps some of the lanes in registers over the whole row. The lanes of a pass are runs of a cache
line where possible, so that every line is read once, and spaced so that the first halvings of the tree fit in too.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from strata.base.arithmetic import MAX_LANES
from strata.cpu.compiled import CFunction
from strata.cpu.gemv.frame import N_ARGS, PREFETCH_BYTES
from strata.cpu.simd import Simd, Value, emitted, f32, i16, i64, kernel_intrinsic, vector

FORMATS = ("F32", "F16", "BF16")

_LINE = 64
_ACCUMULATORS = {512: 16, 256: 8}
"""Registers for lanes."""

_BLOCK_ROWS = 8
"""Matrix rows that share the passes."""

_ROWS = {1: 4, 2: 4, 3: 2, 4: 2}
"""Matrix rows at a time for R activation rows."""

_LONG = {1: 4096, 2: 1024, 3: 1024, 4: 1024}
"""From how many values on rows are taken in passes: activations and one matrix row no longer fit the first cache."""


@dataclass(frozen=True)
class _Plan:
    """How `lanes` lanes of some rows are taken.

    R, rows  activation and matrix rows at a time
    width    values of a vector
    run      neighbouring vectors of a pass, a cache line of weights where registers allow
    runs     of them, lanes / runs apart
    passes   over the row
    """

    R: int
    rows: int
    lanes: int
    width: int
    run: int
    runs: int

    @property
    def passes(self) -> int:
        return self.lanes // (self.width * self.run * self.runs)

    @property
    def vectors(self) -> list[tuple[int, int]]:
        """(run, number in the run) of the vectors of a pass."""
        return [(run, k) for run in range(self.runs) for k in range(self.run)]


def _plan(tier: int, R: int, value_bytes: int) -> _Plan:
    """For long rows."""
    width, rows = tier // 32, _ROWS[R]
    each = max(1, _ACCUMULATORS[tier] // (R * rows))
    each = 1 << (each.bit_length() - 1)
    run = min(each, max(1, _LINE // (width * value_bytes)))
    return _Plan(R, rows, MAX_LANES, width, run, each // run)


class _Matrix:
    """Reads weights and activations of one kernel."""

    def __init__(self, s: Simd, name: str, tier: int):
        self.s, self.name, self.width = s, name, tier // 32
        self.kind, self.value_bytes = (f32, 4) if name == "F32" else (i16, 2)
        self.masks = tier == 512 or name == "F32"
        w, self.stride, self.n_rows, self.act, self.K, out, self.out_stride = s.args
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
        y = s.b.fadd(s.tree(_halve(s, vectors, 1)[0]), s.const(f32, 0.0))
        s.store(y, self.out, s.b.add(s.times(i, 4), s.b.mul(self.out_stride, r)), align=4)


def _copy_i16(s: Simd) -> None:
    """(to, from, count)"""
    to, source = s.pointer(s.args[0]), s.pointer(s.args[1])
    with s.loop(s.args[2]) as i:
        s.store(s.load(source, s.times(i, 2), i16), to, s.times(i, 2))


def _halve(s: Simd, vectors: list[Value], until: int) -> list[Value]:
    while len(vectors) > until:
        half = len(vectors) // 2
        vectors = [s.b.fadd(vectors[i], vectors[i + half]) for i in range(half)]
    return vectors


class _Pass:
    """One pass over plan.rows matrix rows of at least `plan.lanes` values."""

    def __init__(self, m: _Matrix, plan: _Plan):
        s = m.s
        self.m, self.plan = m, plan
        self.lanes = [
            [[s.variable(vector(f32, plan.width)) for _ in plan.vectors] for _ in range(plan.R)]
            for _ in range(plan.rows)
        ]
        self.full = s.b.lshr(m.K, s.const(i64, plan.lanes.bit_length() - 1))
        self.start = s.times(self.full, plan.lanes)
        self.left = s.b.sub(m.K, self.start)
        some = s.b.icmp_unsigned("!=", self.left, s.const(i64, 0))
        self.turns = s.b.add(self.full, s.b.zext(some, i64))
        self.ahead_bytes = max(_LINE, plan.rows * plan.lanes * m.value_bytes // plan.passes)
        """Bytes asked for at every turn: the turns of all passes together make up the rows."""

    def _ask(self, ahead: Value, turn: Value) -> None:
        s = self.m.s
        for line in range(0, self.ahead_bytes, _LINE):
            place = s.b.add(s.times(turn, self.ahead_bytes), s.const(i64, line))
            s.prefetch(ahead, place, level=1 if self.plan.passes == 1 else 2)

    def _take(self, j: int, w: list[Value], x: list[Value]) -> None:
        s = self.m.s
        for r in range(self.plan.R):
            for k in range(self.plan.rows):
                place = self.lanes[k][r][j]
                s.set(place, s.fma(w[k], x[r], s.get(place)))

    def _take_whole(self, j: int, rows: list[Value], xs: list[Value], index: Value) -> None:
        m = self.m
        self._take(j, [m.weights(row, index) for row in rows], [m.values(x, index) for x in xs])

    def _take_some(self, j: int, rows: list[Value], xs: list[Value], index: Value, n: Value) -> None:
        m = self.m
        self._take(j, [m.some_weights(row, index, n) for row in rows], [m.some_values(x, index, n) for x in xs])

    def sums(self, rows: list[Value], xs: list[Value], p: Value, ahead: Value) -> list[list[list[Value]]]:
        """By matrix and activation row, the lanes of pass p after the halvings inside the pass: plan.run vectors.

        ahead: pointer to the bytes of later rows that this pass asks for
        """
        m, plan = self.m, self.plan
        s, b, width = m.s, m.s.b, plan.width
        every = [place for of_row in self.lanes for lanes in of_row for place in lanes]
        for place in every:
            s.set(place, s.zero(f32, width))
        places = [
            s.b.add(s.times(p, plan.run * width), s.const(i64, run * plan.lanes // plan.runs + k * width))
            for run, k in plan.vectors
        ]
        with s.loop(self.full) as u:
            self._ask(ahead, u)
            for j, place in enumerate(places):
                self._take_whole(j, rows, xs, b.add(s.times(u, plan.lanes), place))
        done = b.append_basic_block("done")
        with b.if_then(b.icmp_signed("==", self.left, s.const(i64, 0))):
            b.branch(done)
        self._ask(ahead, self.full)
        for j, place in enumerate(places):  # the rest of the row: vectors up to the first one that is not whole
            here, index = b.sub(self.left, place), b.add(self.start, place)
            with b.if_then(b.icmp_signed("<", here, s.const(i64, width))):
                with b.if_then(b.icmp_signed(">", here, s.const(i64, 0))):
                    self._take_some(j, rows, xs, index, here)
                b.branch(done)
            self._take_whole(j, rows, xs, index)
        b.branch(done)
        b.position_at_end(done)
        return [[_halve(s, [s.get(v) for v in lanes], plan.run) for lanes in of_row] for of_row in self.lanes]


def _row_by_row(m: _Matrix, plan: _Plan, R: int) -> None:
    """One activation row at a time, lanes in registers. For R > 1 the matrix row, short then, stays in the cache."""
    s = m.s
    one = _Pass(m, plan)
    with s.loop(m.n_rows) as i, s.loop(R) as r:
        row = m.row(i)
        m.finish(i, r, one.sums([row], [m.x(r)], s.const(i64, 0), s.at(row, PREFETCH_BYTES))[0][0])


def _in_passes(m: _Matrix, plan: _Plan) -> None:
    """Blocks of rows: a pass goes over all rows of a block, so that its part of the activations stays in the cache."""
    s, b, R = m.s, m.s.b, plan.R
    one = _Pass(m, plan)
    xs = [m.x(r) for r in range(R)]
    n, vector_bytes = plan.passes * plan.run, 4 * plan.width
    kept = s.scratch(_BLOCK_ROWS * R * n * vector_bytes)
    n_blocks = b.lshr(b.add(m.n_rows, s.const(i64, _BLOCK_ROWS - 1)), s.const(i64, _BLOCK_ROWS.bit_length() - 1))
    with s.loop(n_blocks) as block:
        first = s.times(block, _BLOCK_ROWS)
        rest = b.sub(m.n_rows, first)
        count = b.select(b.icmp_signed("<", rest, s.const(i64, _BLOCK_ROWS)), rest, s.const(i64, _BLOCK_ROWS))
        ahead = m.row(b.add(first, count))
        groups = b.lshr(b.add(count, s.const(i64, plan.rows - 1)), s.const(i64, plan.rows.bit_length() - 1))
        last = b.sub(count, s.const(i64, 1))
        with s.loop(plan.passes) as p, s.loop(groups) as g:
            index = [s.times(g, plan.rows)]
            for k in range(1, plan.rows):  # the last group may be short: it takes the last row twice
                i = b.add(index[0], s.const(i64, k))
                index.append(b.select(b.icmp_signed("<", i, count), i, last))
            rows = [m.row(b.add(first, i)) for i in index]
            turn = b.mul(b.add(b.mul(p, groups), g), s.times(one.turns, one.ahead_bytes))
            for i, of_row in zip(index, one.sums(rows, xs, p, s.at(ahead, turn)), strict=True):
                for r, vectors in enumerate(of_row):
                    for k, value in enumerate(vectors):
                        place = b.add(s.times(i, R * n), b.add(s.times(p, plan.run), s.const(i64, r * n + k)))
                        s.store(value, kept, s.times(place, vector_bytes), align=vector_bytes)
        with s.loop(count) as i, s.loop(R) as r:
            mine = s.at(kept, s.times(b.add(s.times(i, R), r), n * vector_bytes))
            vectors = [s.load(mine, vector_bytes * k, f32, plan.width, align=vector_bytes) for k in range(n)]
            m.finish(b.add(first, i), r, vectors)


def _short_rows(m: _Matrix, R: int) -> None:
    """Rows of less than a vector: the largest power of two of values, then the rest on the same lanes."""
    s, b = m.s, m.s.b
    n = s.const(i64, 1)
    for k in range(1, m.width.bit_length() - 1):
        n = b.select(b.icmp_signed(">=", m.K, s.const(i64, 1 << k)), s.const(i64, 1 << k), n)
    with s.loop(m.n_rows) as i, s.loop(R) as r:
        row, x, total = m.row(i), m.x(r), s.zero(f32, m.width)
        for start, count in ((s.const(i64, 0), n), (n, b.sub(m.K, n))):
            total = s.fma(m.some_weights(row, start, count), m.some_values(x, start, count), total)
        m.finish(i, r, [total])


def _emit(s: Simd, name: str, R: int, tier: int) -> None:
    m, b = _Matrix(s, name, tier), s.b
    bound = _LONG[R]
    with b.if_then(b.icmp_signed(">=", m.K, s.const(i64, bound))):
        _in_passes(m, _plan(tier, R, m.value_bytes))
    lanes = MAX_LANES
    while lanes >= m.width:
        fits = b.and_(
            b.icmp_signed(">=", m.K, s.const(i64, lanes)), b.icmp_signed("<", m.K, s.const(i64, bound))
        )
        with b.if_then(fits):
            _row_by_row(m, _Plan(1, 1, lanes, m.width, 1, lanes // m.width), R)
        bound, lanes = lanes, lanes // 2
    with b.if_then(b.icmp_signed("<", m.K, s.const(i64, m.width))):
        _short_rows(m, R)


_product = kernel_intrinsic("floats", _emit, N_ARGS)


def kernel(name: str, R: int, tier: int) -> CFunction:
    """The kernel of a float format for R activation rows, as `gemv.table` describes it."""

    def product(w, w_stride, n_rows, act, K, out, out_stride):
        _product(name, R, tier, w, w_stride, n_rows, act, K, out, out_stride)

    product.__qualname__ = f"{name}_{R}_rows_{tier}"
    return CFunction(product, N_ARGS)
