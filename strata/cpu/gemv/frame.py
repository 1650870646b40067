"""The loops around a step of a quantised product, for the kernels written with `strata.cpu.simd`.

A step is a few blocks of one matrix row: `Step` says how they are unpacked and multiplied, `emit_product` does the
rest: rows, steps, the short last step, activation rows, lanes, trees. A row's sums do not depend on the others.

One matrix row at a time: two side by side would share the loads of the activations, but memory is then read in two
places, which more than halved its speed on the machine this was tuned on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from strata.cpu.gemv.prefetch import FAR, HINTS, NEAR, Prefetch, emit_prefetch
from strata.cpu.simd import Simd, Value, f32, i64, vector

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
    asks            a kernel of one activation row prefetches every line; those of several always do
    far             it does so, and far ahead
    hints           if it does not ask, it gives hints
    """

    values: int
    blocks: int
    block_bytes: int
    record_bytes: int
    unpack: Callable[[Simd, Value, int, Value | None], Any]
    multiply: Callable[[Simd, Any, Value, int, Lanes], None]
    parts: int = 1
    lowest: int = 0
    asks: bool = True
    far: bool = False
    hints: bool = False

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_bytes

    def prefetch(self, R: int) -> Prefetch:
        """What a kernel of R activation rows asks for at a step."""
        if self.far and R == 1:
            return FAR
        if self.asks or R > 1:
            return NEAR
        return HINTS if self.hints else ()


def _log2(n: int) -> int:
    return n.bit_length() - 1


def emit_product(s: Simd, step: Step, tier: int, R: int, prefetch: Prefetch | None = None) -> None:
    """The body of a kernel (w, w_stride, n_rows, act, K, out, out_stride) for R activation rows.

    prefetch  to ask for at every step; None: what the step says
    """
    b, prefetch = s.b, step.prefetch(R) if prefetch is None else prefetch
    w, w_stride, n_rows, act, K, out, out_stride = s.args
    w, out = s.pointer(w), s.pointer(out)
    full = b.lshr(K, s.const(i64, _log2(step.values)))
    n_blocks = b.lshr(K, s.const(i64, _log2(step.values // step.blocks)))
    left = b.and_(n_blocks, s.const(i64, step.blocks - 1))
    n_steps = b.add(full, b.zext(b.icmp_unsigned("!=", left, s.const(i64, 0)), i64))
    record = s.times(n_steps, step.record_bytes)
    xs = [s.pointer(b.add(act, s.times(record, r))) for r in range(R)]
    lanes = [Lanes(s, tier, step.lowest) for _ in range(R)]

    def take(row: Value, u: Value, left: Value | None) -> None:
        blocks = s.at(row, s.times(u, step.bytes))
        for part in range(step.parts):
            unpacked = step.unpack(s, blocks, part, left)
            for r in range(R):
                step.multiply(s, unpacked, s.at(xs[r], s.times(u, step.record_bytes)), part, lanes[r])

    with s.loop(n_rows) as i:
        row = s.at(w, b.mul(i, w_stride))
        for r in range(R):
            lanes[r].clear()
        with s.loop(full) as u:
            emit_prefetch(s, prefetch, s.at(row, s.times(u, step.bytes)), u, step.bytes)
            take(row, u, None)
        if step.blocks > 1:
            with b.if_then(b.icmp_unsigned("!=", left, s.const(i64, 0))):
                take(row, full, left)
        for r in range(R):
            s.store(lanes[r].total(), out, b.add(s.times(i, 4), s.times(out_stride, r)), align=4)
