"""The loops around a step of a quantised product, for the kernels written with `strata.cpu.simd`.

A step is a few blocks of one matrix row: `Step` says how they are unpacked and multiplied, `emit_product` does the rest:
rows, steps, the short last step, activation rows, lanes, trees. Nothing here depends on the number of activation rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from strata.cpu.simd import Simd, Value, f32, i64, vector

PREFETCH_BYTES = 4096
"""How far ahead of its use a cache line is asked for: the hardware's own prefetcher stops at pages."""

N_ARGS = 7
"""Arguments of a kernel: w, w_stride, n_rows, act, K, out, out_stride."""


class Lanes:
    """The float32 lanes of one output: 16, as 512 // tier vectors, and four more for minima."""

    def __init__(self, s: Simd, tier: int, lowest: int):
        self.s, self.width, self.sign = s, tier // 32, lowest
        self._parts = [s.variable(vector(f32, self.width)) for _ in range(512 // tier)]
        self._lowest = s.variable(vector(f32, 4)) if lowest else None

    def clear(self) -> None:
        for part in self._parts:
            self.s.set(part, self.s.zero(f32, self.width))
        if self._lowest is not None:
            self.s.set(self._lowest, self.s.zero(f32, 4))

    def _add(self, place: Value, integers: Value, scales: Value) -> None:
        s = self.s
        floats = integers if integers.type.element == f32 else s.to_float(integers)
        s.set(place, s.fma(floats, scales, s.get(place)))

    def add(self, part: int, integers: Value, scales: Value) -> None:
        """lane = fma(float(integer), scale, lane) for the lanes of one vector; floats pass as they are."""
        self._add(self._parts[part], integers, scales)

    def add_lowest(self, integers: Value, scales: Value) -> None:
        """The same for the four lanes of minima."""
        self._add(self._lowest, integers, scales)

    def total(self) -> Value:
        s = self.s
        whole = s.get(self._parts[0])
        for part in self._parts[1:]:
            whole = s.b.fadd(whole, s.get(part))  # the first halving, 16 lanes to 8
        y = s.tree(whole)
        if self._lowest is not None:
            y = (s.b.fadd if self.sign > 0 else s.b.fsub)(y, s.tree(s.get(self._lowest)))
        return s.b.fadd(y, s.const(f32, 0.0))


@dataclass(frozen=True)
class Step:
    """What a format's kernel does with a few blocks.

    values, blocks  of one step; powers of two
    block_bytes     of the matrix
    record_bytes    of the activation record, for one step
    parts           the step is taken in so many parts, to save registers
    unpack(s, w, part, left)       values that `multiply` wants; left: whole blocks that remain, in the short last step
                                   of a row, else None
    multiply(s, weights, x, part, lanes)   adds to the lanes; x: pointer to the record's step
    lowest          +1 or -1: the format has minima, which are added or subtracted; 0: it has none
    rows(R)         matrix rows taken at a time for R activation rows, so that each activation is loaded once for them
    """

    values: int
    blocks: int
    block_bytes: int
    record_bytes: int
    unpack: Callable[[Simd, Value, int, Value | None], Any]
    multiply: Callable[[Simd, Any, Value, int, Lanes], None]
    parts: int = 1
    lowest: int = 0
    rows: Callable[[int], int] = lambda R: 1

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_bytes


def _log2(n: int) -> int:
    return n.bit_length() - 1


def emit_product(s: Simd, step: Step, tier: int, R: int) -> None:
    """The body of a kernel (w, w_stride, n_rows, act, K, out, out_stride) for R activation rows."""
    b = s.b
    w, w_stride, n_rows, act, K, out, out_stride = s.args
    w, out = s.pointer(w), s.pointer(out)
    at_once = step.rows(R)
    full = b.lshr(K, s.const(i64, _log2(step.values)))
    n_blocks = b.lshr(K, s.const(i64, _log2(step.values // step.blocks)))
    left = b.and_(n_blocks, s.const(i64, step.blocks - 1))
    n_steps = b.add(full, b.zext(b.icmp_unsigned("!=", left, s.const(i64, 0)), i64))
    record = s.times(n_steps, step.record_bytes)
    xs = [s.pointer(b.add(act, s.times(record, r))) for r in range(R)]
    lanes = [[Lanes(s, tier, step.lowest) for _ in range(R)] for _ in range(at_once)]

    def take(rows: list[Value], u: Value, left: Value | None) -> None:
        for part in range(step.parts):
            offset = s.times(u, step.bytes)
            unpacked = [step.unpack(s, s.at(row, offset), part, left) for row in rows]
            for r in range(R):
                x = s.at(xs[r], s.times(u, step.record_bytes))
                for k in range(len(rows)):
                    step.multiply(s, unpacked[k], x, part, lanes[k][r])

    groups = b.lshr(b.add(n_rows, s.const(i64, at_once - 1)), s.const(i64, _log2(at_once)))
    last = b.sub(n_rows, s.const(i64, 1))
    with s.loop(groups) as group:
        # The last group may be short: it takes the last row twice.
        first = s.times(group, at_once)
        index = [first]
        for k in range(1, at_once):
            i = b.add(first, s.const(i64, k))
            index.append(b.select(b.icmp_signed("<", i, n_rows), i, last))
        rows = [s.at(w, b.mul(i, w_stride)) for i in index]
        for k in range(at_once):
            for r in range(R):
                lanes[k][r].clear()
        with s.loop(full) as u:
            for row in rows:
                for line in range(0, step.bytes, 64):
                    s.prefetch(s.at(row, s.times(u, step.bytes)), PREFETCH_BYTES + line)
            take(rows, u, None)
        if step.blocks > 1:
            with b.if_then(b.icmp_unsigned("!=", left, ir.Constant(i64, 0))):
                take(rows, full, left)
        for k in range(at_once):
            for r in range(R):
                s.store(lanes[k][r].total(), out, b.add(s.times(index[k], 4), s.times(out_stride, r)), align=4)
