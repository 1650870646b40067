"""The row loop of super-block kernels in the tiers 512 and 256: everything but what a block's bytes mean.

A format gives `block(rows, place)`: it reads the block at `place` and hands exact integers and scales of every
activation row to `rows`. The 16 float32 lanes of a row are one vector in the tier 512 and two in the tier 256.
"""

from __future__ import annotations

from collections.abc import Callable

from strata.cpu.gemv.records256 import STEP, STEP_BYTES
from strata.cpu.simd import Kind, Simd, Value, f32, vector

LANES = 16
AHEAD = 4096
"""Bytes to prefetch ahead: hardware prefetchers stop at the end of a page."""

LINE = 64


class Rows:
    """The accumulators of R activation rows, and their records at the current step."""

    def __init__(self, s: Simd, R: int, tier: int, minima: bool):
        self.s, self.R, self.width = s, R, tier // 32
        self.parts = LANES // self.width
        self._lanes = [[s.variable(vector(f32, self.width)) for _ in range(self.parts)] for _ in range(R)]
        self._minima = [s.variable(vector(f32, 4)) for _ in range(R)] if minima else []
        self._records: list[Value] = []

    def clear(self) -> None:
        for variable in [*sum(self._lanes, []), *self._minima]:
            self.s.set(variable, self.s.zero(f32, variable.type.pointee.count))

    def go_to(self, records: list[Value], offset: Value) -> None:
        self._records = [self.s.at(record, offset) for record in records]

    def load(self, r: int, offset: int, kind: Kind, n: int | None = None) -> Value:
        """From the record of row r."""
        return self.s.load(self._records[r], offset, kind, n, align=4 if n is None else 1)

    def _step(self, variable: Value, integers: Value, weight_scale: Value, r: int, scale_at: int) -> None:
        n = integers.type.count
        scale = self.s.b.fmul(weight_scale, self.s.spread(self.load(r, scale_at, f32), n))
        self.s.set(variable, self.s.fma(self.s.to_float(integers), scale, self.s.get(variable)))

    def add(self, r: int, part: int, integers: Value, weight_scale: Value, scale_at: int) -> None:
        """One fma for every lane of a part: exact integers, exact float32 weight scales."""
        self._step(self._lanes[r][part], integers, weight_scale, r, scale_at)

    def add_minima(self, r: int, integers: Value, weight_scale: Value, scale_at: int) -> None:
        self._step(self._minima[r], integers, weight_scale, r, scale_at)

    def total(self, r: int) -> Value:
        s, lanes = self.s, [self.s.get(v) for v in self._lanes[r]]
        whole = s.tree(lanes[0] if self.parts == 1 else s.b.fadd(*lanes))
        if self._minima:
            whole = s.b.fsub(whole, s.tree(s.get(self._minima[r])))
        return s.b.fadd(whole, s.const(f32, 0.0))


Block = Callable[[Rows, Value], None]


def emit_rows(s: Simd, R: int, tier: int, arrangement: str, block_bytes: int, block: Block, minima: bool) -> None:
    """Body of a kernel (w, w_stride, n_rows, act, K, out, out_stride), as described in `gemv.table`."""
    w, w_stride, n_rows, act, K, out, out_stride = s.args
    n_blocks = s.b.udiv(K, s.const(K.type, STEP))
    record_bytes = s.times(n_blocks, STEP_BYTES[arrangement])
    records = [s.pointer(s.b.add(act, s.times(record_bytes, r))) for r in range(R)]
    rows, matrix, results = Rows(s, R, tier, minima), s.pointer(w), s.pointer(out)
    with s.loop(n_rows) as i:
        rows.clear()
        row = s.at(matrix, s.b.mul(i, w_stride))
        with s.loop(n_blocks) as k:
            place = s.at(row, s.times(k, block_bytes))
            for line in range(0, block_bytes, LINE):
                s.prefetch(place, AHEAD + line)
            rows.go_to(records, s.times(k, STEP_BYTES[arrangement]))
            block(rows, place)
        for r in range(R):
            s.store(rows.total(r), results, s.b.add(s.times(i, 4), s.times(out_stride, r)), align=4)
