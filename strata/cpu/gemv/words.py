"""Words at (base address, byte offset), scratch on the stack, and arithmetic on four bytes at once.

The offset is an operand of its own, not added to the address first: that is what lets the compiler see consecutive
accesses in a loop and vectorise it. Every access may be unaligned. Integers are int32 (`long`: int64).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

I = np.int32

_i8, _i16, _i32, _i64, _f32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _place(builder, base, offset, ir_type):
    start = builder.inttoptr(base, _i8.as_pointer())
    return builder.bitcast(builder.gep(start, [offset]), ir_type.as_pointer())


def _read(name, ir_type, result, widen=None):
    def typer(typingctx, base, offset):
        def generate(context, builder, signature, arguments):
            value = builder.load(_place(builder, *arguments, ir_type), align=1)
            return getattr(builder, widen)(value, _i32) if widen else value

        return result(types.int64, types.int64), generate

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


def _write(name, ir_type, value_type):
    def typer(typingctx, base, offset, value):
        def generate(context, builder, signature, arguments):
            base, offset, value = arguments
            builder.store(value, _place(builder, base, offset, ir_type), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, value_type), generate

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


byte = _read("byte", _i8, types.int32, "zext")
signed_byte = _read("signed_byte", _i8, types.int32, "sext")
short = _read("short", _i16, types.int32, "zext")
word = _read("word", _i32, types.int32)
long = _read("long", _i64, types.int64)
real = _read("real", _f32, types.float32)
set_word = _write("set_word", _i32, types.int32)
set_long = _write("set_long", _i64, types.int64)
set_real = _write("set_real", _f32, types.float32)


@intrinsic(prefer_literal=True)
def stack(typingctx, n_bytes):
    """Address of n_bytes (a constant) of this function's stack, 64-byte aligned, not cleared."""
    count = n_bytes.literal_value

    def generate(context, builder, signature, arguments):
        space = cgutils.alloca_once(builder, ir.ArrayType(_i8, count))
        space.align = 64
        return builder.ptrtoint(space, _i64)

    return types.int64(types.literal(count)), generate


_TOPS, _TOPS8 = I(-0x7F7F7F80), -0x7F7F7F7F7F7F7F80
_ONES, _ONES8 = I(0x01010101), 0x0101010101010101
_SPREAD = I(0x00204081)


@njit
def less(codes, bias):
    """Four bytes below 128, each minus `bias`, as signed bytes. The top bits keep borrows inside their bytes."""
    return I(((codes | _TOPS) - I(bias * _ONES)) ^ _TOPS)


@njit
def less8(codes, bias):
    """`less` on the eight bytes of an int64."""
    return ((codes | _TOPS8) - bias * _ONES8) ^ _TOPS8


@njit
def negate8(bytes8, mask):
    """Eight bytes, none of them 0, each negated where the mask byte is 0xff."""
    return (bytes8 ^ mask) + (mask & _ONES8)


@njit
def spread4(bits):
    """The low four bits, one per byte: bit k to bit 0 of byte k."""
    return I(I((bits & I(15)) * _SPREAD) & _ONES)
