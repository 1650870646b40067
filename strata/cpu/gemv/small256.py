"""Products of the 32- and 64-value formats in tier 256 (AVX2), on the records of tier 512.

A step is taken in two parts of 8 lanes. Weights that are small unsigned numbers go straight into vpmaddubsw; the wide
ones of IQ4_NL and Q8_0 would overflow there, so their signs move to the activations.
"""

from __future__ import annotations

from functools import cache

from strata.base.compiled import CFunction
from strata.cpu.gemv.frame import N_ARGS, Lanes, Step, emit_product
from strata.cpu.gemv.prefetch import prefetch_of, suffix_of
from strata.cpu.gemv.records import SCALE_BYTES, records_for
from strata.cpu.gemv.small import SMALL, Small, bytes_of, e4m3_scales, e8m0_scales, nibbles, twos
from strata.cpu.simd import Simd, Value, f32, i8, i16, i32, i64, kernel_intrinsic, vector
from strata.cpu.tiers import needs_asking
from strata.pack.grids import CODEBOOK

TIER = 256


def _blocks(s: Simd, n: int, block_bytes: int, first: int, w: Value, left: Value | None) -> list[Value]:
    """Pointers to blocks first..first+n-1 of a step; to zeros where they are missing."""
    found = []
    for k in range(first, first + n):
        block = s.at(w, block_bytes * k)
        if left is not None:
            block = s.b.select(s.b.icmp_unsigned(">", left, s.const(i64, k)), block, s.zero_bytes(block_bytes))
        found.append(block)
    return found


def _lane_scales(s: Simd, f: Small, blocks: list[Value]) -> Value:
    """8 float32 weight scales."""
    if f.scale == "e4m3":
        codes = s.b.zext(s.load(blocks[0], 0, i8, 4), vector(i16, 4))
        return e4m3_scales(s, s.shl(s.pick(codes, [l // 2 for l in range(8)]), 8))
    if f.scale == "e8m0":
        top = [s.b.shl(s.b.zext(s.load(block, 0, i8), i32), s.const(i32, 24)) for block in blocks]
        return e8m0_scales(s, s.join(*(s.spread(t, 4) for t in top)))
    return s.join(*(s.spread(s.widen_half(s.load(block, 0, i16)), 4) for block in blocks))


def _fifths(s: Simd, f: Small, blocks: list[Value]) -> list[Value]:
    """16 where the fifth bit is set, for the low and the high plane."""
    words = s.cast(s.join(*(s.spread(s.load(block, f.fifth, i32), 4) for block in blocks)), i8, 32)
    bit = s.constant(i8, [1 << k for k in range(8)] * 4)
    planes = []
    for k in range(2):
        spread = s.pshufb(words, s.constant(i8, [2 * k + i // 8 for i in range(16)] * 2))
        there = s.b.icmp_unsigned("==", s.b.and_(spread, bit), bit)
        planes.append(s.b.select(there, s.splat(i8, 32, 16), s.zero(i8, 32)))
    return planes


def _planes(s: Simd, f: Small, blocks: list[Value]) -> list[Value]:
    if f.code_bytes == 32:
        packed = s.load(blocks[0], f.codes, i8, 32)
    else:
        packed = s.join(*(s.load(block, f.codes, i8, 16) for block in blocks))
    if f.planes == "twos":
        return twos(s, packed)
    planes = nibbles(s, packed)
    if f.planes == "table":
        signed = f.name == "IQ4_NL"
        table = bytes_of(s, tuple(CODEBOOK[f.name].tolist()) if signed else f.table, 2)
        return [s.pshufb(table, plane) for plane in planes]
    if f.planes == "fives":
        return [s.b.or_(plane, fifth) for plane, fifth in zip(planes, _fifths(s, f, blocks), strict=True)]
    return planes


def _step(f: Small) -> Step:
    layout = records_for(f.name, TIER)
    signed = f.name == "IQ4_NL"
    per_part = f.blocks // 2

    def unpack(s: Simd, w: Value, part: int, left: Value | None):
        blocks = _blocks(s, per_part, f.block_bytes, per_part * part, w, left)
        planes, lowest = _planes(s, f, blocks), None
        if f.minimum and part == 1:
            every = _blocks(s, 4, f.block_bytes, 0, w, left)
            lowest = s.widen_half(s.gather([s.load(block, f.minimum, i16) for block in every]))
        return planes, [s.abs(p) for p in planes] if signed else planes, _lane_scales(s, f, blocks), lowest

    def multiply(s: Simd, weights, x: Value, part: int, lanes: Lanes) -> None:
        signs, planes, scales, lowest = weights
        at, total = layout.values, None
        for k, plane in enumerate(planes):
            codes = s.load(x, 64 * k + 32 * part, i8, 32)
            words = s.maddubs(plane, s.psignb(codes, signs[k]) if signed else codes)
            words = s.pairs(words) if signed else words
            total = words if total is None else s.b.add(total, words)
        if not signed:
            total = s.pairs(total)
            if f.bias:
                total = s.b.add(total, s.load(x, at + SCALE_BYTES + 32 * part, i32, 8))
        lanes.add(part, total, s.b.fmul(scales, s.load(x, at + 32 * part, f32, 8)))
        if lowest is not None:
            sums, d = (s.load(x, at + SCALE_BYTES + 16 * k, f32, 4) for k in range(2))
            lanes.add_lowest(sums, s.b.fmul(lowest, d))

    return Step(
        layout.values, f.blocks, f.block_bytes, layout.step_bytes, unpack, multiply, parts=2,
        lowest=1 if f.minimum else 0, asks=f.name == "Q2_0" or needs_asking(),
    )  # fmt: skip


def _q8_0_step() -> Step:
    layout = records_for("Q8_0", TIER)

    def unpack(s: Simd, w: Value, part: int, left: Value | None):
        (block,) = _blocks(s, 1, 34, part, w, left)
        codes = s.load(block, 2, i8, 32)
        return codes, s.abs(codes), s.spread(s.widen_half(s.load(block, 0, i16)), 8)

    def multiply(s: Simd, weights, x: Value, part: int, lanes: Lanes) -> None:
        codes, magnitudes, scales = weights
        total = s.pairs(s.maddubs(magnitudes, s.psignb(s.load(x, 32 * part, i8, 32), codes)))
        lanes.add(part, total, s.b.fmul(scales, s.load(x, layout.values + 32 * part, f32, 8)))

    return Step(layout.values, 2, 34, layout.step_bytes, unpack, multiply, parts=2, asks=needs_asking())


@cache
def _step_of(name: str) -> Step:
    return _q8_0_step() if name == "Q8_0" else _step(SMALL[name])


def _emit(s: Simd, name: str, R: int, asked: str) -> None:
    emit_product(s, _step_of(name), TIER, R, prefetch_of(asked) if asked else None)


_product = kernel_intrinsic("small256", _emit, N_ARGS)


def kernel(name: str, R: int, asked: str = "") -> CFunction:
    """The kernel of a format for R activation rows, as `gemv.table` describes it. asked: text of other prefetches."""

    def product(w, w_stride, n_rows, act, K, out, out_stride):
        _product(name, R, asked, w, w_stride, n_rows, act, K, out, out_stride)

    product.__qualname__ = f"{name}_{R}_rows_256{suffix_of(asked)}"
    return CFunction(product, N_ARGS)


FORMATS = ("Q8_0", *SMALL)
