"""Code on plain addresses that the page reader and the CPU backend share: views, words of other threads, the clock.

Every address is an int64, and nothing here checks one. A word that another thread writes is read and written with the
atomic forms only.

words      ld_acquire32/64(addr), st_release64(addr, value)
views      f32_view(addr, n), f64_ i8_ u8_ u16_ i32_ i64_view; two axes: f32_view2(addr, rows, cols), u8_view2
clock      clock_ns() monotonic
emitting   at(builder, address, type) -> pointer, external(builder, name, result, *arguments) -> function
"""

from __future__ import annotations

import platform

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())

_CLOCK_MONOTONIC = 1
_i32, _i64 = ir.IntType(32), ir.IntType(64)


def at(builder, address, ir_type):
    return builder.inttoptr(address, ir_type.as_pointer())


def external(builder, name, result, *arguments):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


# ---- words of other threads ----------------------------------------------------------------------------------------


def _atomic_load(name, ir_type, result, n_bytes):
    def typer(typingctx, address):
        def generate(context, builder, signature, arguments):
            return builder.load_atomic(at(builder, arguments[0], ir_type), "acquire", n_bytes)

        return result(types.int64), generate

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


ld_acquire32 = _atomic_load("ld_acquire32", _i32, types.int32, 4)
ld_acquire64 = _atomic_load("ld_acquire64", _i64, types.int64, 8)


@intrinsic
def st_release64(typingctx, address, value):
    """Writes a word; who reads it with acquire also sees everything written before."""

    def generate(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], at(builder, arguments[0], _i64), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


# ---- clock -------------------------------------------------------------------------------------------------------


@intrinsic
def clock_ns(typingctx):
    """Monotonic time in ns (clock_gettime: about 20 ns a call). The cycle counter is not readable on every aarch64."""

    def generate(context, builder, signature, arguments):
        clock = external(builder, "clock_gettime", _i32, _i32, _i64.as_pointer())
        words = cgutils.alloca_once(builder, ir.ArrayType(_i64, 2))
        seconds, nanoseconds = (cgutils.gep_inbounds(builder, words, 0, k) for k in (0, 1))
        builder.call(clock, [ir.Constant(_i32, _CLOCK_MONOTONIC), seconds])
        whole = builder.mul(builder.load(seconds), ir.Constant(_i64, 1_000_000_000))
        return builder.add(whole, builder.load(nanoseconds))

    return types.int64(), generate


# ---- array views -------------------------------------------------------------------------------------------------


@intrinsic
def as_pointer(typingctx, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@njit
def f32_view(address, n):
    """(n,) float32 array over memory at `address`; nothing is allocated, the memory's owner must outlive it."""
    return carray(as_pointer(address), (n,), np.float32)


@njit
def f64_view(address, n):
    return carray(as_pointer(address), (n,), np.float64)


@njit
def i8_view(address, n):
    return carray(as_pointer(address), (n,), np.int8)


@njit
def u8_view(address, n):
    return carray(as_pointer(address), (n,), np.uint8)


@njit
def u16_view(address, n):
    return carray(as_pointer(address), (n,), np.uint16)


@njit
def i32_view(address, n):
    return carray(as_pointer(address), (n,), np.int32)


@njit
def i64_view(address, n):
    return carray(as_pointer(address), (n,), np.int64)


@njit
def f32_view2(address, rows, cols):
    """(rows, cols) float32, C order."""
    return carray(as_pointer(address), (rows, cols), np.float32)


@njit
def u8_view2(address, rows, cols):
    return carray(as_pointer(address), (rows, cols), np.uint8)
