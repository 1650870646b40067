"""Float sums as whole vectors: any CPU, any vector width; the compiler cuts 16 lanes to size.

The compiler's own vectoriser keeps the lanes of a sum in memory or gives up on them; here they stay in registers. Order
and rounding are those of `float_sums` and `float_bits`: the same bits in every tier.
"""

from __future__ import annotations

from collections.abc import Sequence

from numba import njit

from strata.base import arithmetic
from strata.cpu.float_bits import HAS_FMA
from strata.cpu.gemv.vectors import Vectors
from strata.cpu.gemv.words import real, stack
from strata.cpu.machine_code import MACHINE
from strata.cpu.simd import Simd, Value, f16, f32, i8, i16, i32, i64, kernel_intrinsic, vector
from strata.cpu.tiers import target_features

LANES = 16
"""Values of one vector value; a line of the cache."""

_FEATURES = target_features()
WIDE = "avx512f" in _FEATURES
"""Whether there are 32 registers of 16 floats. Otherwise at least 16 of 8 or 32 of 4."""

HAS_HALVES = "f16c" in _FEATURES or MACHINE == "aarch64"
"""Whether vectors convert to and from float16 by an instruction."""


def fma(s: Simd, x: Value, y: Value, z: Value) -> Value:
    """x * y + z, rounded once, as `fma32`."""
    return s.fma(x, y, z) if HAS_FMA else Vectors(s.b).fma(x, y, z)


def splat(s: Simd, number: float) -> Value:
    return s.splat(f32, LANES, float(number))


def load(s: Simd, pointer: Value, offset: int | Value = 0) -> Value:
    return s.load(pointer, offset, f32, LANES)


def lesser(s: Simd, x: Value, y: Value) -> Value:
    """The smaller of two int64."""
    return s.b.select(s.b.icmp_signed("<", x, y), x, y)


def halve(s: Simd, vectors: Sequence[Value]) -> Value:
    """The steps of a halving tree that add whole vectors; a power of two of them."""
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [s.b.fadd(vectors[i], vectors[i + half]) for i in range(half)]
    return vectors[0]


def trees(s: Simd, rows: Sequence[Value]) -> Value:
    """Halving trees over each of 16 vectors, their sums side by side: 45 instructions, not 16 times 8."""
    half = LANES // 2
    # rows[k] holds the sums of `count` rows; row r's partial sums are `half` apart in it.
    while half:
        count = len(rows) // 2
        group = LANES // half // 2  # sums that one vector holds already
        index_low = [g * 2 * half + i for g in range(group) for i in range(half)]
        merged = []
        for k in range(count):
            a, b = rows[2 * k], rows[2 * k + 1]
            low = index_low + [LANES + i for i in index_low]
            high = [i + half for i in low]
            merged.append(s.b.fadd(s.pick(a, low, b), s.pick(a, high, b)))
        rows, half = merged, half // 2
    return rows[0]


def exp(s: Simd, t: Value) -> Value:
    """`exp32` of 16 values."""
    high, low = splat(s, arithmetic.EXP_HIGH), splat(s, arithmetic.EXP_LOW)
    t = s.b.select(s.b.fcmp_ordered("<=", t, high), t, high)
    t = s.b.select(s.b.fcmp_ordered(">=", t, low), t, low)
    n = s.call("llvm.rint.v16f32", t.type, s.b.fmul(t, splat(s, arithmetic.LOG2E)))
    r = fma(s, n, splat(s, arithmetic.NEG_LN2_HIGH), t)
    r = fma(s, n, splat(s, arithmetic.NEG_LN2_LOW), r)
    p = splat(s, arithmetic.EXP_POLY[0])
    for factor in arithmetic.EXP_POLY[1:]:
        p = fma(s, p, r, splat(s, factor))
    y = s.b.fadd(fma(s, p, s.b.fmul(r, r), r), splat(s, 1.0))
    exponent = s.shl(s.b.fptosi(n, vector(i32, LANES)), 23)
    return s.cast(s.b.add(s.cast(y, i32, LANES), exponent), f32, LANES)


# ---- float16


def widen_half(s: Simd, halves: Value) -> Value:
    """16 float16 as i16 -> float32, exact, as `half_f32`."""
    return s.widen_half(halves) if HAS_HALVES else widen_half_in_integers(s, halves)


def widen_half_in_integers(s: Simd, halves: Value) -> Value:
    bits = s.b.zext(halves, vector(i32, LANES))
    magnitude = s.shl(s.and_(bits, 0x7FFF), 13)
    value = s.cast(s.b.fmul(s.cast(magnitude, f32, LANES), splat(s, 2.0**112)), i32, LANES)
    large = s.b.icmp_signed(">=", magnitude, s.splat(i32, LANES, 0x0F800000))
    value = s.b.select(large, s.or_(magnitude, 0x7F800000), value)
    return s.cast(s.b.or_(value, s.shl(s.and_(bits, 0x8000), 16)), f32, LANES)


def round_half(s: Simd, x: Value) -> Value:
    """16 float32 to the nearest float16 values, ties to even, as `f16_value(f16_bits(x))`."""
    if HAS_HALVES:
        return s.b.fpext(s.b.fptrunc(x, vector(f16, LANES)), vector(f32, LANES))
    return round_half_in_integers(s, x)


def round_half_in_integers(s: Simd, x: Value) -> Value:
    bits = s.cast(x, i32, LANES)
    m = s.and_(bits, 0x7FFFFFFF)
    # Below 2^-14 a multiple of 2^-24, which adding 0.5 rounds to; above, 13 bits are rounded away.
    small = s.b.fsub(s.b.fadd(s.cast(m, f32, LANES), splat(s, 0.5)), splat(s, 0.5))
    odd = s.and_(s.shr(m, 13), 1)
    whole = s.and_(s.b.add(s.b.add(m, odd), s.splat(i32, LANES, 0xFFF)), ~0x1FFF)

    def from_on(first: int) -> Value:
        return s.b.icmp_signed(">=", m, s.splat(i32, LANES, first))

    value = s.b.select(from_on(0x38800000), whole, s.cast(small, i32, LANES))
    value = s.b.select(from_on(0x477FF000), s.splat(i32, LANES, 0x7F800000), value)
    value = s.b.select(from_on(0x7F800001), s.splat(i32, LANES, 0x7FC00000), value)
    return s.cast(s.b.or_(value, s.b.sub(bits, m)), f32, LANES)


def load_cells(s: Simd, kind: str, pointer: Value, offset: Value, scale: Value | None) -> Value:
    """16 values of a cell from value number `offset` on. kind: f32, f16, or i8 with the scale of their group."""
    if kind == "f32":
        return load(s, pointer, s.times(offset, 4))
    if kind == "f16":
        return widen_half(s, s.load(pointer, s.times(offset, 2), i16, LANES))
    codes = s.b.sext(s.load(pointer, offset, i8, LANES), vector(i32, LANES))
    return round_half(s, s.b.fmul(s.to_float(codes), scale))


# ---- dot products


def _emit_dot(s: Simd, lanes: int) -> None:
    """(x, y, n, out): n a multiple of the lanes. As many lanes at a time as registers hold."""
    x, y = s.pointer(s.args[0]), s.pointer(s.args[1])
    together = min(lanes, 128 if WIDE else 64)
    turns = s.b.udiv(s.args[2], s.const(i64, lanes))
    sums = []
    for start in range(0, lanes, together):
        places = [s.variable(vector(f32, LANES)) for _ in range(together // LANES)]
        for place in places:
            s.set(place, splat(s, 0.0))
        with s.loop(turns) as turn:
            for k, place in enumerate(places):
                at = s.b.add(s.times(turn, 4 * lanes), s.const(i64, 4 * (start + k * LANES)))
                s.set(place, fma(s, load(s, x, at), load(s, y, at), s.get(place)))
        sums += [s.get(place) for place in places]
    s.store(s.tree(halve(s, sums)), s.pointer(s.args[3]))


_dot = kernel_intrinsic("dot", _emit_dot, 4)


@njit(error_model="numpy")
def dot256(x, y, n):
    """Sum of x[i] y[i] in 256 lanes; addresses of float32, n a multiple of 256."""
    out = stack(4)
    _dot(256, x, y, n, out)
    return real(out, 0)


@njit(error_model="numpy")
def dot128(x, y, n):
    """The same in 128 lanes."""
    out = stack(4)
    _dot(128, x, y, n, out)
    return real(out, 0)


@njit(error_model="numpy")
def dot64(x, y, n):
    """The same in 64 lanes."""
    out = stack(4)
    _dot(64, x, y, n, out)
    return real(out, 0)
