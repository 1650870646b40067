"""Kernels around the products: portable quantisers of activation rows, and SwiGLU, as vectors on any CPU."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from strata.base.arithmetic import INF_BITS, TINY_BITS
from strata.base.compiled import c_function
from strata.base.program import NOT_FINITE
from strata.cpu.float_bits import bits_f32, silu32
from strata.cpu.float_vectors import LANES, exp, load, splat
from strata.cpu.gemv.rows import record_bytes, scales_at, sums_at
from strata.cpu.gemv.vectors import Vectors
from strata.cpu.gemv.words import long, real, set_long, set_real, set_word
from strata.cpu.machine_code import zero_bytes
from strata.cpu.simd import Simd, kernel_intrinsic

I, F = np.int32, np.float32

_i8, _i32, _f32 = ir.IntType(8), ir.IntType(32), ir.FloatType()
_LIMIT = F(127)


def _function(builder, name, result, *arguments):
    module = builder.module
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, arguments), name)


@intrinsic
def _largest32(typingctx, address):
    """Largest magnitude of 32 float32, as bits."""

    def generate(context, builder, signature, arguments):
        bits = Vectors(builder).load(arguments[0], 0, _i32, 32)
        magnitudes = builder.and_(bits, ir.Constant(bits.type, [0x7FFFFFFF] * 32))
        largest = _function(builder, "llvm.vector.reduce.umax.v32i32", _i32, bits.type)
        return builder.call(largest, [magnitudes])

    return types.int32(types.int64), generate


@intrinsic
def _round16(typingctx, address, inverse, codes):
    """Writes the int8 codes of 16 float32, rint(fl(x inverse)), and returns their sum."""

    def generate(context, builder, signature, arguments):
        address, inverse, codes = arguments
        v = Vectors(builder)
        x = v.load(address, 0, _f32, 16)
        one = builder.insert_element(ir.Constant(x.type, ir.Undefined), inverse, ir.Constant(_i32, 0))
        rint = _function(builder, "llvm.rint.v16f32", x.type, x.type)
        whole = builder.call(rint, [builder.fmul(x, v.pick(one, [0] * 16))])
        numbers = builder.fptosi(whole, ir.VectorType(_i32, 16))
        v.store(builder.trunc(numbers, ir.VectorType(_i8, 16)), codes)
        return builder.call(_function(builder, "llvm.vector.reduce.add.v16i32", _i32, numbers.type), [numbers])

    return types.int32(types.int64, types.float32, types.int64), generate


@njit(error_model="numpy")
def _scale(largest, place):
    """Writes the scale of a group; returns the factor for its values, 0 for a group whose codes are 0."""
    if largest < TINY_BITS or largest >= INF_BITS:
        set_real(place, 0, F(0))
        return F(0)
    amax = bits_f32(largest)
    set_real(place, 0, amax / _LIMIT)
    return _LIMIT / amax


@njit(error_model="numpy")
def _mark(largest, error_word):
    if largest >= INF_BITS and long(error_word, 0) == 0:
        set_long(error_word, 0, NOT_FINITE)


@c_function(6)
def quantise_p32(x, K, R, x_stride, records, error_word):
    """R rows of K float32, x_stride bytes apart, into records with a scale per 32 values."""
    for r in range(R):
        row, record = x + r * x_stride, records + r * record_bytes(K, 32)
        zero_bytes(record, record_bytes(K, 32))
        sums, scales = record + sums_at(K), record + scales_at(K, 32)
        for g in range(K // 32):
            largest = _largest32(row + 128 * g)
            _mark(largest, error_word)
            inverse = _scale(largest, scales + 4 * g)
            if inverse != F(0):
                low = _round16(row + 128 * g, inverse, record + 32 * g)
                high = _round16(row + 128 * g + 64, inverse, record + 32 * g + 16)
                set_word(sums, 4 * g, I(low + high))


@c_function(6)
def quantise_p256(x, K, R, x_stride, records, error_word):
    """R rows of K float32, x_stride bytes apart, into records with a scale per 256 values."""
    for r in range(R):
        row, record = x + r * x_stride, records + r * record_bytes(K, 256)
        zero_bytes(record, record_bytes(K, 256))
        sums, scales = record + sums_at(K), record + scales_at(K, 256)
        for g in range(K // 256):
            largest = I(0)
            for k in range(8):
                largest = max(largest, _largest32(row + 1024 * g + 128 * k))
            _mark(largest, error_word)
            inverse = _scale(largest, scales + 4 * g)
            if inverse != F(0):
                for k in range(16 * g, 16 * g + 16):
                    set_word(sums, 4 * k, _round16(row + 64 * k, inverse, record + 16 * k))


def _emit_swiglu(s: Simd) -> None:
    """(g, u, h, groups of 16 values)."""
    g, u, h = (s.pointer(a) for a in s.args[:3])
    with s.loop(s.args[3]) as i:
        at = s.times(i, 4 * LANES)
        x = load(s, g, at)
        silu = s.b.fdiv(x, s.b.fadd(splat(s, 1.0), exp(s, s.b.fneg(x))))
        s.store(s.b.fmul(silu, load(s, u, at)), h, at)


_swiglu = kernel_intrinsic("swiglu", _emit_swiglu, 4)


@c_function(4)
def swiglu_rows(g, u, h, n):
    """h[i] = silu(g[i]) * u[i] for i < n, float32. h may be g or u."""
    groups = n // LANES
    _swiglu(g, u, h, groups)
    for i in range(4 * LANES * groups, 4 * n, 4):
        set_real(h, i, silu32(real(g, i)) * real(u, i))
