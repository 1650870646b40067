"""The inner loops of attention and of block scores as vectors: q . k, softmax of a tile, weighted sums of v.

Scores have 32 lanes; 16 of them are summed side by side. All sizes in values; `dim` is a multiple of 16. A cell is
float16, int8 with a float16 scale per 64 values, or float32 (the pooled keys, which follow each other).
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from strata.cpu.float_vectors import (
    LANES,
    WIDE,
    exp,
    fma,
    halve,
    lesser,
    load,
    load_cells,
    splat,
    trees,
    widen_half,
)
from strata.cpu.kv_cells import SCALE_GROUP
from strata.cpu.simd import Simd, Value, f32, i16, i32, i64, kernel_intrinsic, vector

TILE = 64
"""Cells of a tile of attention."""

_HEADS, _CELLS = (4, 2) if WIDE else (2, 1)
"""Query heads and cells whose sums registers hold at a time: each takes two vectors."""

_COLUMNS = 4 if WIDE else 2
"""Vectors of a value row that are summed at a time, for _HEADS heads."""

AHEAD = 8
"""How many cells ahead of their use rows are asked for: their places are known, but no pattern leads there."""

_AHEAD_IN_ORDER = 32
"""The same for rows that follow each other."""

_VALUE_BYTES = {"f32": 4, "f16": 2, "i8": 1}


class _Cells:
    """Rows of a cache: where they lie, and their values as float32."""

    def __init__(self, s: Simd, kind: str, cells: Value, scales: Value | None, places: Value | None, dim: Value):
        self.s, self.kind, self.dim = s, kind, dim
        self.cells, self.row_bytes = s.pointer(cells), s.times(dim, _VALUE_BYTES[kind])
        self.scales = s.pointer(scales) if kind == "i8" else None
        self.places = None if places is None else s.pointer(places)
        self.ahead = AHEAD if places is not None else _AHEAD_IN_ORDER
        self.groups = s.b.udiv(dim, s.const(i64, SCALE_GROUP))

    def place(self, e: Value) -> Value:
        """Number of the row of list entry e."""
        return e if self.places is None else self.s.load(self.places, self.s.times(e, 8), i64)

    def row(self, place: Value) -> Value:
        return self.s.at(self.cells, self.s.b.mul(place, self.row_bytes))

    def scale(self, place: Value, start: Value) -> Value | None:
        """Scale of the group that value number `start` is in, 16 times."""
        s = self.s
        if self.kind != "i8":
            return None
        at = s.b.add(s.b.mul(place, self.groups), s.b.udiv(start, s.const(i64, SCALE_GROUP)))
        return widen_half(s, s.spread(s.load(self.scales, s.times(at, 2), i16), LANES))

    def widen(self, place: Value, start: Value, to: Value, n_vectors: int) -> None:
        """16 n_vectors values, from `start` on, as float32; they lie in one group."""
        s, row, scale = self.s, self.row(place), self.scale(place, start)
        for k in range(n_vectors):
            value = load_cells(s, self.kind, row, s.b.add(start, s.const(i64, k * LANES)), scale)
            s.store(value, to, 4 * LANES * k)

    def ask(self, e: Value, first_byte: Value, n_bytes: Value) -> None:
        """Prefetch a part of the row `AHEAD` entries behind e."""
        s = self.s
        row = s.at(self.row(self.place(s.b.add(e, s.const(i64, self.ahead)))), first_byte)
        with s.loop(s.b.udiv(s.b.add(n_bytes, s.const(i64, 63)), s.const(i64, 64))) as line:
            s.prefetch(row, s.times(line, 64), level=2)


def _in_groups(s: Simd, count: Value, size: int, body: Callable[[Value, int], None]) -> None:
    """body(first, size) for as many whole groups as count has, then body(first, 1) for the rest."""
    whole = s.b.udiv(count, s.const(i64, size))
    with s.loop(whole) as group:
        body(s.times(group, size), size)
    if size > 1:
        done = s.times(whole, size)
        with s.loop(s.b.sub(count, done)) as k:
            body(s.b.add(done, k), 1)


# ---- scores


def _add_products(s: Simd, rows: list[Value], queries: list[Value], dim: Value, store: Callable[..., None]) -> None:
    """Sums over dim of each query times each row, as 16 lanes that are left: store(query, row, lanes)."""
    pairs = [(h, c) for h in range(len(queries)) for c in range(len(rows))]
    places = {(pair, half): s.variable(vector(f32, LANES)) for pair in pairs for half in (0, 1)}
    for place in places.values():
        s.set(place, splat(s, 0.0))

    def take(at: Value, half: int) -> None:
        keys = [load(s, row, at) for row in rows]
        for h, query in enumerate(queries):
            q = load(s, query, at)
            for c, key in enumerate(keys):
                place = places[(h, c), half]
                s.set(place, fma(s, q, key, s.get(place)))

    steps = s.b.udiv(dim, s.const(i64, 2 * LANES))
    with s.loop(steps) as step:
        for half in (0, 1):
            take(s.b.add(s.times(step, 8 * LANES), s.const(i64, 4 * LANES * half)), half)
    with s.b.if_then(s.b.icmp_signed("!=", s.times(steps, 2 * LANES), dim)):
        take(s.times(steps, 8 * LANES), 0)
    for h, c in pairs:
        store(h, c, halve(s, [s.get(places[(h, c), half]) for half in (0, 1)]))


def _emit_scores(s: Simd, kind: str) -> None:
    """(q, heads, dim, cells, scales, places, n, scale, spare, out, out_stride)

    out[h, e] = (q_h . cell_e) scale for e < n, and something up to the next multiple of 16. q (heads, dim) float32;
    places: int64 row numbers, valid for n + 8 entries (float32: none, the rows follow each other); scale: address of a
    float32; spare: heads * 1024 + 8 * dim bytes; out_stride: bytes.
    """
    q, heads, dim, cells, scales, places, n, factor, spare, out, out_stride = s.args
    cache = _Cells(s, kind, cells, scales, None if kind == "f32" else places, dim)
    q, out, sums = s.pointer(q), s.pointer(out), s.pointer(spare)
    wide = s.at(sums, s.times(heads, LANES * 4 * LANES))
    factor = s.spread(s.load(s.pointer(factor), 0, f32), LANES)
    last, row_bytes = s.b.sub(n, s.const(i64, 1)), s.times(dim, 4)
    with s.loop(s.b.udiv(s.b.add(n, s.const(i64, LANES - 1)), s.const(i64, LANES))) as group:
        first = s.times(group, LANES)
        count = lesser(s, s.const(i64, LANES), s.b.sub(n, first))
        with s.loop(s.b.udiv(s.b.add(count, s.const(i64, _CELLS - 1)), s.const(i64, _CELLS))) as turn:
            rows = []
            for c in range(_CELLS):
                e = lesser(s, s.b.add(first, s.b.add(s.times(turn, _CELLS), s.const(i64, c))), last)
                place = cache.place(e)
                cache.ask(e, s.const(i64, 0), cache.row_bytes)
                if kind == "f32":
                    rows.append(cache.row(place))
                    continue
                rows.append(s.at(wide, s.b.mul(row_bytes, s.const(i64, c))))
                _widen_row(cache, place, rows[-1])

            def some_heads(h: Value, size: int, rows: list[Value] = rows, turn: Value = turn) -> None:
                queries = [s.at(q, s.b.mul(s.b.add(h, s.const(i64, k)), row_bytes)) for k in range(size)]

                def store(k: int, c: int, lanes: Value) -> None:
                    column = s.b.add(s.times(turn, _CELLS), s.const(i64, c))
                    at = s.b.add(s.times(s.b.add(h, s.const(i64, k)), LANES), column)
                    s.store(lanes, sums, s.times(at, 4 * LANES))

                _add_products(s, rows, queries, dim, store)

            _in_groups(s, heads, _HEADS, some_heads)
        with s.loop(heads) as h:
            base = s.at(sums, s.times(h, LANES * 4 * LANES))
            total = trees(s, [load(s, base, 4 * LANES * k) for k in range(LANES)])
            s.store(s.b.fmul(total, factor), out, s.b.add(s.b.mul(h, out_stride), s.times(first, 4)))


def _widen_row(cache: _Cells, place: Value, to: Value) -> None:
    s = cache.s
    step = SCALE_GROUP // LANES if cache.kind == "i8" else 1
    with s.loop(s.b.udiv(cache.dim, s.const(i64, step * LANES))) as k:
        start = s.times(k, step * LANES)
        cache.widen(place, start, s.at(to, s.times(start, 4)), step)


scores_of = kernel_intrinsic("head_scores", _emit_scores, 11)


# ---- softmax


def _emit_softmax(s: Simd) -> None:
    """(scores, heads, n, tops, sums, worst)

    scores (heads, 64) float32 become exp(score - top) for e < n, 0 behind; tops, sums (heads,) float32: the largest
    score and the halving tree over 64. worst: int32, becomes the largest magnitude's bits if it was less.
    """
    scores, heads, n, tops, sums, worst = s.args
    scores, tops, sums, worst = (s.pointer(a) for a in (scores, tops, sums, worst))
    bound = s.spread(n, LANES)
    valid = [s.b.icmp_signed("<", s.constant(i64, range(k * LANES, (k + 1) * LANES)), bound) for k in range(4)]
    lowest = splat(s, float("-inf"))
    with s.loop(heads) as h:
        row = s.at(scores, s.times(h, 4 * TILE))
        found = [load(s, row, 4 * LANES * k) for k in range(4)]
        magnitudes = [s.b.select(ok, s.and_(s.cast(x, i32, LANES), 0x7FFFFFFF), s.zero(i32, LANES))
                      for ok, x in zip(valid, found, strict=True)]  # fmt: skip
        largest = s.largest(s.umax(s.umax(*magnitudes[:2]), s.umax(*magnitudes[2:])))
        before = s.load(worst, 0, i32)
        s.store(s.b.select(s.b.icmp_unsigned(">", largest, before), largest, before), worst)
        values = [s.b.select(ok, x, lowest) for ok, x in zip(valid, found, strict=True)]
        top = _larger(s, _larger(s, values[0], values[1]), _larger(s, values[2], values[3]))
        for half in (8, 4, 2, 1):
            top = _larger(s, s.part(top, 0, half), s.part(top, half, half))
        top = s.element(top, 0)
        many = s.spread(top, LANES)
        powers = [s.b.select(ok, exp(s, s.b.fsub(x, many)), splat(s, 0.0))
                  for ok, x in zip(valid, values, strict=True)]  # fmt: skip
        for k, power in enumerate(powers):
            s.store(power, row, 4 * LANES * k)
        s.store(top, tops, s.times(h, 4))
        s.store(s.tree(halve(s, powers)), sums, s.times(h, 4))


def _larger(s: Simd, x: Value, y: Value) -> Value:
    return s.b.select(s.b.fcmp_ordered(">", x, y), x, y)


softmax_tile = kernel_intrinsic("head_softmax", _emit_softmax, 6)


# ---- weighted sums


def _emit_weigh(s: Simd, kind: str) -> None:
    """(weights, heads, n, dim, cells, scales, places, old, new, out)

    out (heads, dim) float32 becomes fma(sum, new_h, out old_h), where sum is the ascending fma over e < n of weight and
    cell; weights (heads, 64), old and new (heads,) float32. new = 0 (the address): out becomes the sum.
    """
    weights, heads, n, dim, cells, scales, places, old, new, out = s.args
    cache = _Cells(s, kind, cells, scales, places, dim)
    first = s.b.icmp_signed("==", new, s.const(i64, 0))
    weights, old, new, out = (s.pointer(a) for a in (weights, old, new, out))
    wide = s.scratch(TILE * 4 * LANES * _COLUMNS)

    def columns(start: Value, size: int) -> None:
        start = s.times(start, LANES)
        stride = 4 * LANES * size
        part, part_bytes = (s.times(v, _VALUE_BYTES[kind]) for v in (start, s.const(i64, size * LANES)))
        with s.loop(n) as e:
            cache.ask(e, part, part_bytes)
            cache.widen(cache.place(e), start, s.at(wide, s.times(e, stride)), size)
        _in_groups(s, heads, _HEADS, lambda h, count: some_heads(h, count, start, size))

    def some_heads(h: Value, count: int, start: Value, size: int) -> None:
        heads_here = [s.b.add(h, s.const(i64, k)) for k in range(count)]
        rows = [s.at(weights, s.times(head, 4 * TILE)) for head in heads_here]
        places = [[s.variable(vector(f32, LANES)) for _ in range(size)] for _ in rows]
        for place in (p for row in places for p in row):
            s.set(place, splat(s, 0.0))
        with s.loop(n) as e:
            values = [load(s, wide, s.b.add(s.times(e, 4 * LANES * size), s.const(i64, 4 * LANES * j)))
                      for j in range(size)]  # fmt: skip
            for k, row in enumerate(rows):
                weight = s.spread(s.load(row, s.times(e, 4), f32), LANES)
                for j, value in enumerate(values):
                    s.set(places[k][j], fma(s, weight, value, s.get(places[k][j])))
        with s.b.if_else(first) as (alone, merged):
            with alone:
                finish(heads_here, start, places, lambda head, total, before: total)
            with merged:
                finish(heads_here, start, places, merge)

    def merge(head: Value, total: Value, before: Value) -> Value:
        factor_new, factor_old = (s.spread(s.load(x, s.times(head, 4), f32), LANES) for x in (new, old))
        return fma(s, total, factor_new, s.b.fmul(before, factor_old))

    def finish(heads_here: list[Value], start: Value, places: list[list[ir.Value]], rule: Callable) -> None:
        for head, row in zip(heads_here, places, strict=True):
            for j, place in enumerate(row):
                at = s.times(s.b.add(s.b.mul(head, dim), s.b.add(start, s.const(i64, j * LANES))), 4)
                s.store(rule(head, s.get(place), load(s, out, at)), out, at)

    _in_groups(s, s.b.udiv(dim, s.const(i64, LANES)), _COLUMNS, columns)


weigh_tile = kernel_intrinsic("head_weigh", _emit_weigh, 10)
