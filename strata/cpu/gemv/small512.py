"""Products of the 32- and 64-value formats in tier 512: two to four blocks a step, 64 bytes of packed codes.

The weights are made unsigned by adding a bias, which vpdpbusd wants; the activation record holds the integer that takes
it out again, per lane. Q8_0 is the other way round: its activations are unsigned and the correction is made of the
weights, once for all activation rows.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir

from strata.base.compiled import CFunction
from strata.cpu.gemv.frame import N_ARGS, Lanes, Step, emit_product
from strata.cpu.gemv.prefetch import asks_far, prefetch_of, suffix_of
from strata.cpu.gemv.records import SCALE_BYTES, records_for
from strata.cpu.gemv.small import SMALL, Small, bytes_of, e4m3_scales, e8m0_scales, nibbles, twos
from strata.cpu.simd import Simd, Value, f32, i8, i16, i32, i64, i128, kernel_intrinsic
from strata.cpu.tiers import needs_asking

TIER = 512

_ASKING, _HINTING = ("Q2_0", "Q4_1"), ("IQ4_NL", "MXFP4", "Q4_0", "Q8_0")
"""Formats whose kernel of one activation row runs faster from memory with prefetches on a Zen 4, and with hints; the
others lose by both. See `needs_asking` for other processors."""


class _Blocks:
    """The bytes of a step in two registers, of which any can be picked. `left` blocks are there in a short step."""

    def __init__(self, s: Simd, f: Small, w: Value, left: Value | None):
        self.s, total = s, f.blocks * f.block_bytes
        tail = 16 if total <= 80 else 32 if total < 96 else 64
        self.high_at = total - tail
        if left is None:
            low, high = s.load(w, 0, i8, 64), s.load(w, self.high_at, i8, tail)
        else:
            mask = s.low_bits(i128, s.times(left, f.block_bytes))
            low = s.load_masked(w, 0, i8, 64, s.b.trunc(mask, i64))
            above = s.b.lshr(mask, s.const(i128, self.high_at))
            high = s.load_masked(w, self.high_at, i8, tail, s.b.trunc(above, ir.IntType(tail)))
        self.low, self.high = low, s.pick(high, [k % tail for k in range(64)])

    def pick(self, offsets: list[int | None]) -> Value:
        """Bytes by their offset in the step; None: 0."""
        index = [64 if at is None else at if at < 64 else 64 + at - self.high_at for at in offsets]
        if any(at is None for at in offsets):
            return self.s.pick(self.low, index, self.s.zero(i8, 64))
        return self.s.pick(self.low, index, None if max(index) < 64 else self.high)


def _lane_scales(s: Simd, f: Small, blocks: _Blocks) -> Value:
    """16 float32 weight scales."""
    n, lanes = f.block_bytes, 16 // f.blocks
    if f.scale == "e8m0":
        top = blocks.pick([at for l in range(16) for at in (None, None, None, n * (l // lanes))])
        return e8m0_scales(s, s.cast(top, i32, 16))
    if f.scale == "e4m3":
        top = blocks.pick([at for l in range(16) for at in (None, n * (l // 8) + l % 8 // 2)])
        return e4m3_scales(s, s.cast(top, i16, 16))
    return s.widen_half(blocks.pick([n * (l // lanes) + k for l in range(16) for k in (0, 1)]))


def _planes(s: Simd, f: Small, blocks: _Blocks) -> list[Value]:
    """Unsigned weights, 64 bytes a plane."""
    starts = [f.block_bytes * k for k in range(f.blocks)]
    packed = blocks.pick([start + f.codes + i for start in starts for i in range(f.code_bytes)])
    if f.planes == "twos":
        return twos(s, packed)
    if f.planes == "table":  # vpermb looks at six bits of its index: four copies of the table save the mask
        table = bytes_of(s, f.table, 4)
        return [s.permb(table, packed), s.permb(table, s.shr_bytes(packed, 4))]
    planes = nibbles(s, packed)
    if f.planes == "fives":
        fifth = blocks.pick([start + f.fifth + i % 4 for start in starts for i in range(16)])
        for k in range(2):
            bit = s.shufbit(fifth, s.constant(i8, [16 * k + i for i in range(16)] * 4))
            planes[k] = s.b.add(planes[k], s.b.select(bit, s.splat(i8, 64, 16), s.zero(i8, 64)))
    return planes


def _step(f: Small) -> Step:
    layout = records_for(f.name, TIER)

    def unpack(s: Simd, w: Value, part: int, left: Value | None):
        blocks = _Blocks(s, f, w, left)
        lowest = None
        if f.minimum and f.planes == "fives":  # one conversion for both: faster here, not in Q4_1
            starts = [f.block_bytes * k + at for at in (f.minimum, 0) for k in range(4)]
            both = s.widen_half(blocks.pick([start + i for start in starts for i in (0, 1)]))
            return _planes(s, f, blocks), s.pick(both, [4 + k // 4 for k in range(16)]), s.part(both, 0, 4)
        if f.minimum:
            lowest = s.widen_half(blocks.pick([f.block_bytes * k + f.minimum + i for k in range(4) for i in (0, 1)]))
        return _planes(s, f, blocks), _lane_scales(s, f, blocks), lowest

    def multiply(s: Simd, weights, x: Value, part: int, lanes: Lanes) -> None:
        planes, scales, lowest = weights
        at = layout.values
        total = s.load(x, at + SCALE_BYTES, i32, 16) if f.bias else s.zero(i32, 16)
        for k, plane in enumerate(planes):
            total = s.dpbusd(total, plane, s.load(x, 64 * k, i8, 64))
        lanes.add(0, total, s.b.fmul(scales, s.load(x, at, f32, 16)))
        if lowest is not None:
            sums, d = (s.load(x, at + SCALE_BYTES + 16 * k, f32, 4) for k in range(2))
            lanes.add_lowest(sums, s.b.fmul(lowest, d))

    return Step(
        layout.values, f.blocks, f.block_bytes, layout.step_bytes, unpack, multiply, lowest=1 if f.minimum else 0,
        asks=f.name in _ASKING or needs_asking(), far=asks_far(f.name), hints=f.name in _HINTING,
    )  # fmt: skip


def _q8_0_step() -> Step:
    layout = records_for("Q8_0", TIER)

    def unpack(s: Simd, w: Value, part: int, left: Value | None):
        second = s.at(w, 34)
        if left is not None:  # the short step is one block
            second = s.zero_bytes(34)
        codes = s.join(s.load(w, 2, i8, 32), s.load(second, 2, i8, 32))
        scales = s.join(*(s.spread(s.load(block, 0, i16), 8) for block in (w, second)))
        too_much = s.dpbusd(s.zero(i32, 16), s.splat(i8, 64, -128), codes)
        return codes, s.widen_half(scales), s.negate(too_much)

    def multiply(s: Simd, weights, x: Value, part: int, lanes: Lanes) -> None:
        codes, scales, correction = weights
        total = s.dpbusd(correction, s.load(x, 0, i8, 64), codes)
        lanes.add(0, total, s.b.fmul(scales, s.load(x, layout.values, f32, 16)))

    return Step(
        layout.values, 2, 34, layout.step_bytes, unpack, multiply, asks=needs_asking(), far=asks_far("Q8_0"),
        hints="Q8_0" in _HINTING,
    )  # fmt: skip


@cache
def _step_of(name: str) -> Step:
    return _q8_0_step() if name == "Q8_0" else _step(SMALL[name])


def _emit(s: Simd, name: str, R: int, asked: str) -> None:
    emit_product(s, _step_of(name), TIER, R, prefetch_of(asked) if asked else None)


_product = kernel_intrinsic("small512", _emit, N_ARGS)


def kernel(name: str, R: int, asked: str = "") -> CFunction:
    """The kernel of a format for R activation rows, as `gemv.table` describes it. asked: text of other prefetches."""

    def product(w, w_stride, n_rows, act, K, out, out_stride):
        _product(name, R, asked, w, w_stride, n_rows, act, K, out, out_stride)

    product.__qualname__ = f"{name}_{R}_rows_512{suffix_of(asked)}"
    return CFunction(product, N_ARGS)


FORMATS = ("Q8_0", *SMALL)
