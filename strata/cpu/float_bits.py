"""Exact float32 building blocks for compiled code: the same bits as `strata.base.arithmetic`, value by value.

    bits_f32 f32_bits     reinterpretation between float32 and int32
    fma32 rint32 sqrt32   one rounding each
    i32_f32               int32 to float32, one rounding
    half_f32              float16 bits (int32) to float32, exact
    bf16_f32              bfloat16 bits (int32) to float32, exact
    exp32 log1p32 sigmoid32 softplus32 silu32

Call them from `njit` or C functions that are not compiled with fastmath.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from strata.base import arithmetic

F, I = np.float32, np.int32

_f32, _f64, _i16, _i32, _i64 = ir.FloatType(), ir.DoubleType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _target_features() -> set[str]:
    """Instruction sets that Numba compiles for (which NUMBA_CPU_FEATURES may restrict)."""
    names = cpu_target.target_context.codegen().magic_tuple()[2]
    return {name[1:] for name in names.split(",") if name.startswith("+")}


HAS_FMA = bool(_target_features() & {"fma", "neon", "v8a", "fp-armv8"})
"""Whether fma is an instruction here. Otherwise llvm.fma would be a library call, and float64 is faster."""


def _bitcast(name, source, target, ir_target):
    def typer(typingctx, x):
        return target(source), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], ir_target)

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


bits_f32 = _bitcast("bits_f32", types.int32, types.float32, _f32)
f32_bits = _bitcast("f32_bits", types.float32, types.int32, _i32)
_f64_bits = _bitcast("_f64_bits", types.float64, types.int64, _i64)
_bits_f64 = _bitcast("_bits_f64", types.int64, types.float64, _f64)


def _float_call(name, n):
    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(_f32, [_f32] * n)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.f32"), arguments)

    return types.float32(*[types.float32] * n), generate


@intrinsic
def _fma_instruction(typingctx, x, y, z):
    return _float_call("fma", 3)


@intrinsic
def rint32(typingctx, x):
    """To the nearest integer, ties to even."""
    return _float_call("rint", 1)


@intrinsic
def sqrt32(typingctx, x):
    return _float_call("sqrt", 1)


@intrinsic
def i32_f32(typingctx, x):
    def generate(context, builder, signature, arguments):
        return builder.sitofp(arguments[0], _f32)

    return types.float32(types.int32), generate


@njit(error_model="numpy")
def fma_soft(x, y, z):
    """fma without the instruction: exact product in float64, sum rounded to odd, one last rounding."""
    product, addend = np.float64(x) * np.float64(y), np.float64(z)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = _f64_bits(total)
    if error != 0.0 and (bits & 1) == 0 and (bits & 0x7FF0000000000000) != 0x7FF0000000000000:
        bits = bits + 1 if (error > 0.0) == (total > 0.0) else bits - 1
    return F(_bits_f64(bits))


fma32 = _fma_instruction if HAS_FMA else fma_soft
"""x * y + z, rounded once."""

_HALF_UP = F(2.0**112)


@njit(error_model="numpy")
def half_f32(h):
    """float16 bits in an int32 -> float32, exact; written in integers because not every CPU converts halves."""
    magnitude = I((h & I(0x7FFF)) << I(13))
    value = bits_f32(magnitude) * _HALF_UP
    if magnitude >= I(0x0F800000):
        value = bits_f32(I(magnitude | I(0x7F800000)))
    return -value if h & I(0x8000) else value


@njit(error_model="numpy")
def bf16_f32(h):
    return bits_f32(I(h << I(16)))


_HIGH, _LOW = arithmetic.EXP_HIGH, arithmetic.EXP_LOW
_LOG2E, _NEG_HIGH, _NEG_LOW = arithmetic.LOG2E, arithmetic.NEG_LN2_HIGH, arithmetic.NEG_LN2_LOW
_E0, _E1, _E2, _E3, _E4, _E5 = arithmetic.EXP_POLY
_L0, _L1, _L2, _L3 = arithmetic.LOG1P_POLY
_ZERO, _ONE, _TWO = F(0), F(1), F(2)


@njit(error_model="numpy")
def exp32(t):
    """e^t for t clamped to [-87, 88]; NaN counts as 88."""
    t = t if t <= _HIGH else _HIGH
    t = t if t >= _LOW else _LOW
    n = rint32(t * _LOG2E)
    r = fma32(n, _NEG_HIGH, t)
    r = fma32(n, _NEG_LOW, r)
    p = fma32(_E0, r, _E1)
    p = fma32(p, r, _E2)
    p = fma32(p, r, _E3)
    p = fma32(p, r, _E4)
    p = fma32(p, r, _E5)
    y = fma32(p, r * r, r) + _ONE
    return bits_f32(I(f32_bits(y) + I(I(n) << I(23))))


@njit(error_model="numpy")
def log1p32(e):
    """log(1 + e) for e in [0, 1]."""
    s = e / (_TWO + e)
    z = s * s
    p = fma32(_L0, z, _L1)
    p = fma32(p, z, _L2)
    p = fma32(p, z, _L3)
    return fma32(-s, e - z * p, e)


@njit(error_model="numpy")
def sigmoid32(x):
    """1 / (1 + exp32(-x)); a NaN stays NaN."""
    s = _ONE / (_ONE + exp32(-x))
    return s if x == x else x


@njit(error_model="numpy")
def softplus32(x):
    """log(1 + e^x); a NaN stays NaN."""
    magnitude = bits_f32(I(f32_bits(x) & I(0x7FFFFFFF)))
    s = (x if x > _ZERO else _ZERO) + log1p32(exp32(-magnitude))
    return s if x == x else x


@njit(error_model="numpy")
def silu32(x):
    """x / (1 + exp32(-x))."""
    return x / (_ONE + exp32(-x))
