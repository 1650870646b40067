"""The delta rule over several rows, a few columns of a state at a time.

A column of the state needs nothing of the others, so a block of columns goes through all rows while it lies in the
first cache, and a state is read from memory once. Decayed states are kept, not states: the next row needs just these,
and what is added to them is in registers when it is needed. Sums over k have 4 lanes (k mod 4).
"""

from __future__ import annotations

from collections.abc import Iterator

from numba import literally, njit

from strata.cpu.float_vectors import LANES, WIDE, fma, load, splat
from strata.cpu.simd import Simd, Value, f32, i64, kernel_intrinsic, vector

_VECTORS = 2 if WIDE else 1
_LINE = 64
BLOCK = _VECTORS * LANES
"""Columns of a block: as many as registers hold sums of."""

_AHEAD = 64
"""Rows of the state that are asked for ahead."""


class _Sums:
    """Four lanes of sums over k, for each vector of a block."""

    def __init__(self, s: Simd, n_vectors: int):
        self.s = s
        self.places = [[s.variable(vector(f32, LANES)) for _ in range(n_vectors)] for _ in range(4)]

    def clear(self) -> None:
        for lane in self.places:
            for place in lane:
                self.s.set(place, splat(self.s, 0.0))

    def take(self, lane: int, j: int, x: Value, factor: Value) -> None:
        place = self.places[lane][j]
        self.s.set(place, fma(self.s, x, factor, self.s.get(place)))

    def total(self, j: int) -> Value:
        s = self.s
        a, b, c, d = (s.get(lane[j]) for lane in self.places)
        return s.b.fadd(s.b.fadd(a, c), s.b.fadd(b, d))


class _Block:
    """Columns of one head: reads, writes and the passes over k."""

    def __init__(self, s: Simd, outputs: bool, keep: bool, n_vectors: int):
        self.s, self.outputs, self.keep, self.n_vectors = s, outputs, keep, n_vectors
        state, self.row_bytes, self.dk, self.T, k, q, gates, v, self.v_stride, y, self.y_stride, spare, later = s.args
        self.later = later
        self.state, self.k, self.q, self.gates, self.v, self.y, self.spare = (
            s.pointer(a) for a in (state, k, q, gates, v, y, spare)
        )
        self.block_bytes = 4 * LANES * n_vectors
        self.predicted, self.made = _Sums(s, n_vectors), _Sums(s, n_vectors)
        self.deltas = [s.variable(vector(f32, LANES)) for _ in range(n_vectors)]

    def many(self, pointer: Value, index: Value) -> Value:
        """16 times the float32 number `index`."""
        return self.s.spread(self.s.load(pointer, self.s.times(index, 4), f32), LANES)

    def gate(self, t: Value, which: int) -> Value:
        """Decay (0) or beta (1) of row t."""
        return self.many(self.gates, self.s.b.add(self.s.times(t, 2), self.s.const(i64, which)))

    def factor(self, rows: Value, t: Value, i: Value) -> Value:
        """k or q of row t at i."""
        return self.many(rows, self.s.b.add(self.s.b.mul(t, self.dk), i))

    def over_k(self) -> Iterator[tuple[Value, int]]:
        """A loop over k, four steps a turn; yields (index, lane)."""
        s = self.s
        with s.loop(s.b.udiv(self.dk, s.const(i64, 4))) as turn:
            for lane in range(4):
                yield s.b.add(s.times(turn, 4), s.const(i64, lane)), lane

    def load(self, pointer: Value, offset: Value, j: int) -> Value:
        return load(self.s, pointer, self.s.b.add(offset, self.s.const(i64, 4 * LANES * j)))

    def store(self, value: Value, pointer: Value, offset: Value, j: int) -> None:
        self.s.store(value, pointer, self.s.b.add(offset, self.s.const(i64, 4 * LANES * j)))

    def ask(self, i: Value, distance: Value) -> None:
        """Prefetch what lies `distance` bytes behind row i of the block."""
        s = self.s
        row = s.at(self.state, s.b.add(s.b.mul(i, self.row_bytes), distance))
        for line in range(0, self.block_bytes, _LINE):
            s.prefetch(row, line, level=2)

    def first_pass(self) -> None:
        """Decay the state for row 0 and sum what it predicts."""
        s, zero = self.s, self.s.const(i64, 0)
        decay = self.gate(zero, 0)
        self.predicted.clear()
        for i, lane in self.over_k():
            at = s.b.mul(i, self.row_bytes)
            self.ask(i, s.times(self.row_bytes, _AHEAD))
            factor = self.factor(self.k, zero, i)
            for j in range(self.n_vectors):
                x = s.b.fmul(self.load(self.state, at, j), decay)
                self.store(x, self.spare, s.times(i, self.block_bytes), j)
                self.predicted.take(lane, j, x, factor)

    def delta(self, t: Value) -> None:
        s, beta = self.s, self.gate(t, 1)
        for j, place in enumerate(self.deltas):
            v = self.load(self.v, s.b.mul(t, self.v_stride), j)
            s.set(place, s.b.fmul(beta, s.b.fsub(v, self.predicted.total(j))))

    def pass_over(self, t: Value, last: bool) -> None:
        """Add row t to the decayed state; then decay it for the next row, or keep it if t is the last."""
        s = self.s
        self.made.clear()
        if not last:
            following = s.b.add(t, s.const(i64, 1))
            decay = self.gate(following, 0)
            self.predicted.clear()
        deltas = [s.get(place) for place in self.deltas]
        for i, lane in self.over_k():
            at = s.times(i, self.block_bytes)
            k = self.factor(self.k, t, i)
            q = self.factor(self.q, t, i) if self.outputs else None
            k_next = None if last else self.factor(self.k, following, i)
            if last:
                self.ask(i, self.later)
            for j in range(self.n_vectors):
                x = fma(s, k, deltas[j], self.load(self.spare, at, j))
                if self.outputs:
                    self.made.take(lane, j, x, q)
                if last and self.keep:
                    self.store(x, self.state, s.b.mul(i, self.row_bytes), j)
                if not last:
                    x = s.b.fmul(x, decay)
                    self.store(x, self.spare, at, j)
                    self.predicted.take(lane, j, x, k_next)
        if self.outputs:
            for j in range(self.n_vectors):
                self.store(self.made.total(j), self.y, s.b.mul(t, self.y_stride), j)


def _emit(s: Simd, outputs: int, keep: int, n_vectors: int) -> None:
    """(state, row_bytes, dk, T, k, q, gates, v, v_stride, y, y_stride, spare, later)

    state: the block's first column in a (dk, dv) float32 state with rows of row_bytes; it becomes the state after
    T >= 1 rows if `keep`. k, q (T, dk); gates (T, 2): decay and beta; v, y: the block's columns in rows v_stride,
    y_stride bytes apart, y written if `outputs`. spare: dk * 16 n_vectors floats. later: bytes to the state that is
    worked on next: it is asked for into the second cache (rows are so far apart that a column of them does not fit
    into the first), piece by piece, while this one is computed.
    """
    block = _Block(s, bool(outputs), bool(keep), n_vectors)
    block.first_pass()
    last = s.b.sub(block.T, s.const(i64, 1))
    with s.loop(last) as t:
        block.delta(t)
        block.pass_over(t, last=False)
    block.delta(last)
    block.pass_over(last, last=True)


_columns = kernel_intrinsic("delta_columns", _emit, 13)


@njit(error_model="numpy")
def delta_rows(outputs, keep, state, dk, dv, T, k, q, gates, v, v_stride, y, y_stride, spare, later):
    """T >= 1 rows of one head; see `_emit`. outputs, keep: literals 0 or 1. dk a multiple of 4, dv of 16; spare holds
    dk * BLOCK floats."""
    row_bytes, j = 4 * dv, 0
    while j < dv:
        whole = dv - j >= BLOCK
        following = j + (BLOCK if whole else LANES)
        if whole:
            _columns(literally(outputs), literally(keep), _VECTORS, state + 4 * j, row_bytes, dk, T, k, q, gates,
                     v + 4 * j, v_stride, y + 4 * j, y_stride, spare, later)  # fmt: skip
        else:
            _columns(literally(outputs), literally(keep), 1, state + 4 * j, row_bytes, dk, T, k, q, gates,
                     v + 4 * j, v_stride, y + 4 * j, y_stride, spare, later)  # fmt: skip
        j = following
