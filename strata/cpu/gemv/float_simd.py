"""Products of BF16, F16 and F32 matrices with float32 rows, in the tiers 512 and 256.

The rule has 256 lanes (fewer for short rows), more than the registers hold for several activation rows. So a row is
taken in passes: each keeps some of the lanes in registers over the whole row, which is then in the cache for the next.
The lanes of a pass are runs of a cache line, spaced so that the first halvings of the tree happen in registers too.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from strata.base.arithmetic import MAX_LANES
from strata.cpu.compiled import CFunction
from strata.cpu.gemv.frame import N_ARGS, PREFETCH_BYTES
from strata.cpu.simd import Simd, Value, emitted, f32, i8, i16, i64, kernel_intrinsic, vector

FORMATS = ("F32", "F16", "BF16")

_LINE = 64
_ACCUMULATORS = {512: 16, 256: 8}
"""Registers for lanes."""


@dataclass(frozen=True)
class _Plan:
    """How `lanes` lanes are taken by R activation rows.

    width   values of a vector
    run     neighbouring vectors of a pass, a cache line of weights where registers allow
    runs    of them, lanes / runs apart
    passes  over the row
    """

    lanes: int
    width: int
    run: int
    runs: int
    passes: int

    def vector_of(self, run: int, k: int, p: Value, s: Simd) -> Value:
        """Index (int64) of the vector that pass p takes as vector k of a run."""
        spacing = self.lanes // self.width // self.runs
        return s.b.add(s.times(p, self.run), s.const(i64, run * spacing + k))


def _plan(lanes: int, tier: int, R: int, value_bytes: int) -> _Plan:
    width = tier // 32
    vectors = lanes // width
    each = _ACCUMULATORS[tier] // R
    each = min(vectors, 1 << (each.bit_length() - 1))
    run = min(each, max(1, _LINE // (width * value_bytes)))
    return _Plan(lanes, width, run, each // run, vectors // each)


class _Matrix:
    """Reads weights and activations of one kernel."""

    def __init__(self, s: Simd, name: str, tier: int, R: int):
        self.s, self.name, self.width, self.R = s, name, tier // 32, R
        self.kind, self.value_bytes = (f32, 4) if name == "F32" else (i16, 2)
        self.masks = tier == 512 or name == "F32"
        w, self.stride, self.n_rows, act, self.K, out, self.out_stride = s.args
        self.w, self.out = s.pointer(w), s.pointer(out)
        self.xs = [s.pointer(s.b.add(act, s.b.mul(self.K, s.const(i64, 4 * r)))) for r in range(R)]
        # Prefetches go to the same place of a later row.
        rows_ahead = s.b.udiv(s.b.add(self.stride, s.const(i64, PREFETCH_BYTES)), self.stride)
        self.ahead = s.b.mul(rows_ahead, self.stride)
        self.spare = None if self.masks else s.scratch(2 * self.width)

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

    def x(self, r: int, index: Value) -> Value:
        return self.s.load(self.xs[r], self.s.times(index, 4), f32, self.width)

    def some_x(self, r: int, index: Value, count: Value) -> Value:
        return self.s.load_masked(self.xs[r], self.s.times(index, 4), f32, self.width, self._mask(count))


def _copy_i16(s: Simd) -> None:
    """(to, from, count)"""
    to, source = s.pointer(s.args[0]), s.pointer(s.args[1])
    with s.loop(s.args[2]) as i:
        s.store(s.load(source, s.times(i, 2), i16), to, s.times(i, 2))


def _row(m: _Matrix, plan: _Plan, row: Value, totals: list[Value]) -> None:
    """One matrix row of at least `plan.lanes` values: the sums of all activation rows into the variables `totals`."""
    s, b, R, width = m.s, m.s.b, m.R, plan.width
    each = [(run, k) for run in range(plan.runs) for k in range(plan.run)]
    lanes = {(j, r): s.variable(vector(f32, width)) for j in range(len(each)) for r in range(R)}
    full = b.lshr(m.K, s.const(i64, plan.lanes.bit_length() - 1))
    start = s.times(full, plan.lanes)
    left = b.sub(m.K, start)
    share = max(_LINE, plan.lanes * m.value_bytes // plan.passes)
    kept = s.scratch(plan.passes * plan.run * R * 4 * width) if plan.passes > 1 else None

    def take(j: int, w: Value, x: list[Value]) -> None:
        for r in range(R):
            s.set(lanes[j, r], s.fma(w, x[r], s.get(lanes[j, r])))

    def take_whole(j: int, index: Value) -> None:
        take(j, m.weights(row, index), [m.x(r, index) for r in range(R)])

    def finish(p: Value) -> None:
        """The first halvings, then to memory if there are other passes."""
        for r in range(R):
            sums = [s.get(lanes[j, r]) for j in range(len(each))]
            while len(sums) > plan.run:
                half = len(sums) // 2
                sums = [b.fadd(sums[i], sums[i + half]) for i in range(half)]
            if kept is None:
                _set_total(s, totals[r], sums)
            else:
                for k, value in enumerate(sums):
                    at = b.add(s.times(p, plan.run), s.const(i64, r * plan.passes * plan.run + k))
                    s.store(value, kept, s.times(at, 4 * width), align=4 * width)

    with s.loop(plan.passes) as p:
        for place in lanes.values():
            s.set(place, s.zero(f32, width))
        places = [s.times(plan.vector_of(run, k, p, s), width) for run, k in each]
        with s.loop(full) as u:
            # One pass after the other would read with gaps: the lines ahead are asked for in order.
            lines = s.at(row, b.add(m.ahead, s.times(b.add(b.mul(p, full), u), share)))
            for line in range(0, share, _LINE):
                s.prefetch(lines, line)
            for j in range(len(each)):
                take_whole(j, b.add(s.times(u, plan.lanes), places[j]))
        done = b.append_basic_block("done")
        for j in range(len(each)):  # the rest of the row: vectors up to the first one that is not whole
            here, index = b.sub(left, places[j]), b.add(start, places[j])
            with b.if_then(b.icmp_signed("<", here, s.const(i64, width))):
                with b.if_then(b.icmp_signed(">", here, s.const(i64, 0))):
                    take(j, m.some_weights(row, index, here), [m.some_x(r, index, here) for r in range(R)])
                b.branch(done)
            take_whole(j, index)
        b.branch(done)
        b.position_at_end(done)
        finish(p)
    if kept is not None:
        n = plan.passes * plan.run
        for r in range(R):
            sums = [s.load(kept, 4 * width * (n * r + k), f32, width, align=4 * width) for k in range(n)]
            _set_total(s, totals[r], sums)


def _short_row(m: _Matrix, row: Value, totals: list[Value]) -> None:
    """A row of less than a vector: the largest power of two of values, then the rest on the same lanes."""
    s, b = m.s, m.s.b
    n = s.const(i64, 1)
    for k in range(1, m.width.bit_length() - 1):
        longer = b.icmp_signed(">=", m.K, s.const(i64, 1 << k))
        n = b.select(longer, s.const(i64, 1 << k), n)
    sums = [s.zero(f32, m.width)] * m.R
    for start, count in ((s.const(i64, 0), n), (n, b.sub(m.K, n))):
        w = m.some_weights(row, start, count)
        sums = [s.fma(w, m.some_x(r, start, count), sums[r]) for r in range(m.R)]
    for r in range(m.R):
        _set_total(s, totals[r], [sums[r]])


def _set_total(s: Simd, total: Value, sums: list[Value]) -> None:
    """Halving tree of vectors, their lanes last; lanes of zeros above the short rows' change nothing."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [s.b.fadd(sums[i], sums[i + half]) for i in range(half)]
    s.set(total, s.b.fadd(s.tree(sums[0]), s.const(f32, 0.0)))


def _emit(s: Simd, name: str, R: int, tier: int) -> None:
    m, b = _Matrix(s, name, tier, R), s.b
    totals = [s.variable(f32) for _ in range(R)]

    def all_rows(one_row) -> None:
        with s.loop(m.n_rows) as i:
            one_row(s.at(m.w, b.mul(i, m.stride)))
            for r in range(R):
                s.store(s.get(totals[r]), m.out, b.add(s.times(i, 4), s.times(m.out_stride, r)), align=4)

    lanes = MAX_LANES
    while lanes >= m.width:
        fits = b.icmp_signed(">=", m.K, s.const(i64, lanes))
        if lanes < MAX_LANES:
            fits = b.and_(fits, b.icmp_signed("<", m.K, s.const(i64, 2 * lanes)))
        with b.if_then(fits):
            plan = _plan(lanes, tier, R, m.value_bytes)
            all_rows(lambda row, plan=plan: _row(m, plan, row, totals))
        lanes //= 2
    with b.if_then(b.icmp_signed("<", m.K, s.const(i64, m.width))):
        all_rows(lambda row: _short_row(m, row, totals))


_product = kernel_intrinsic("floats", _emit, N_ARGS)


def kernel(name: str, R: int, tier: int) -> CFunction:
    """The kernel of a float format for R activation rows, as `gemv.table` describes it."""

    def product(w, w_stride, n_rows, act, K, out, out_stride):
        _product(name, R, tier, w, w_stride, n_rows, act, K, out, out_stride)

    product.__qualname__ = f"{name}_{R}_rows_{tier}"
    return CFunction(product, N_ARGS)
