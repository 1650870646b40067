"""Numba intrinsics for code on plain addresses: loads and stores, atomics, futex, calls, clock, float control.

Every address is an int64. Plain loads and stores may be moved or merged by the compiler; a word that another thread
writes is read and written with the atomic forms only. Nothing here checks an address.

plain      ld8 lds8 ld16 ld32 ld64 ldf32 ldf64, st8 st16 st32 st64 stf32 stf64      (ld8, ld16: unsigned; lds8: signed)
atomic     ld_acquire32/64, and seq_cst: ld_seq_cst64 st_seq_cst32/64 fetch_add32/64 compare_exchange64 (old value)
waiting    pause, yield_cpu, futex_wait(addr, seen32), futex_wake(addr, n_waiters)
calls      call1(fp, a), call3(fp, a, b, c), call4, call6, call7, call8(fp, 8 x int64): void functions by address
memory     copy_bytes(dst, src, n), zero_bytes(dst, n)
clock      clock_ns() monotonic
floats     float_control() -> int64, set_float_control(v), exact_floats() -> old value after clearing flush-to-zero
views      f32_view(addr, n), f64_ i8_ u8_ u16_ i32_ i64_view; two axes: f32_view2(addr, rows, cols)
"""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from strata.base.addresses import (  # noqa: F401  # most of these are here for whoever imports this module
    MACHINE,
    as_pointer,
    at,
    clock_ns,
    external,
    f32_view,
    f32_view2,
    f64_view,
    i8_view,
    i32_view,
    i64_view,
    ld_acquire32,
    ld_acquire64,
    u8_view,
    u16_view,
)
from strata.base.errors import StrataError

FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(MACHINE)
if FUTEX_SYSCALL is None:
    raise StrataError(
        "the CPU backend knows no system calls for this machine", found=MACHINE, needed="x86_64 or aarch64"
    )

_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129

_i8, _i16, _i32, _i64 = (ir.IntType(n) for n in (8, 16, 32, 64))
_void = ir.VoidType()


# ---- plain loads and stores --------------------------------------------------------------------------------------


def _load(name, ir_type, result, widen=None):
    def typer(typingctx, address):
        def generate(context, builder, signature, arguments):
            value = builder.load(at(builder, arguments[0], ir_type), align=1)
            return getattr(builder, widen)(value, _i64) if widen else value

        return result(types.int64), generate

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


def _store(name, ir_type, value_type, narrow=False):
    def typer(typingctx, address, value):
        def generate(context, builder, signature, arguments):
            value = builder.trunc(arguments[1], ir_type) if narrow else arguments[1]
            builder.store(value, at(builder, arguments[0], ir_type), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


ld8 = _load("ld8", _i8, types.int64, "zext")
lds8 = _load("lds8", _i8, types.int64, "sext")
ld16 = _load("ld16", _i16, types.int64, "zext")
ld32 = _load("ld32", _i32, types.int32)
ld64 = _load("ld64", _i64, types.int64)
ldf32 = _load("ldf32", ir.FloatType(), types.float32)
ldf64 = _load("ldf64", ir.DoubleType(), types.float64)
st8 = _store("st8", _i8, types.int64, narrow=True)
st16 = _store("st16", _i16, types.int64, narrow=True)
st32 = _store("st32", _i32, types.int32)
st64 = _store("st64", _i64, types.int64)
stf32 = _store("stf32", ir.FloatType(), types.float32)
stf64 = _store("stf64", ir.DoubleType(), types.float64)


@intrinsic
def copy_bytes(typingctx, destination, source, n_bytes):
    """memcpy; the ranges must not overlap."""

    def generate(context, builder, signature, arguments):
        to, source, count = arguments
        cgutils.raw_memcpy(builder, at(builder, to, _i8), at(builder, source, _i8), count, 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def zero_bytes(typingctx, destination, n_bytes):
    def generate(context, builder, signature, arguments):
        cgutils.memset(builder, at(builder, arguments[0], _i8), arguments[1], 0)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


# ---- atomics -----------------------------------------------------------------------------------------------------


def _atomic_store(name, ir_type, value_type, n_bytes):
    def typer(typingctx, address, value):
        def generate(context, builder, signature, arguments):
            builder.store_atomic(arguments[1], at(builder, arguments[0], ir_type), "seq_cst", n_bytes)
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


def _fetch_add(name, ir_type, value_type):
    def typer(typingctx, address, value):
        def generate(context, builder, signature, arguments):
            return builder.atomic_rmw("add", at(builder, arguments[0], ir_type), arguments[1], "seq_cst")

        return value_type(types.int64, value_type), generate

    typer.__name__ = typer.__qualname__ = name
    return intrinsic(typer)


st_seq_cst32 = _atomic_store("st_seq_cst32", _i32, types.int32, 4)
st_seq_cst64 = _atomic_store("st_seq_cst64", _i64, types.int64, 8)
fetch_add32 = _fetch_add("fetch_add32", _i32, types.int32)
fetch_add64 = _fetch_add("fetch_add64", _i64, types.int64)


@intrinsic
def ld_seq_cst64(typingctx, address):
    """A load that takes part in the single order of all seq_cst operations (acquire alone does not on aarch64)."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(at(builder, arguments[0], _i64), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def compare_exchange64(typingctx, address, expected, new):
    """Write `new` if the word is `expected`; returns what was there."""

    def generate(context, builder, signature, arguments):
        pair = builder.cmpxchg(at(builder, arguments[0], _i64), arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return types.int64(types.int64, types.int64, types.int64), generate


# ---- waiting -----------------------------------------------------------------------------------------------------


@intrinsic
def pause(typingctx):
    """Hint that this is a spin loop. An intrinsic, because Numba has no parser for inline assembly."""

    def generate(context, builder, signature, arguments):
        if MACHINE == "x86_64":
            builder.call(external(builder, "llvm.x86.sse2.pause", _void), [])
        else:
            builder.call(external(builder, "llvm.aarch64.hint", _void, _i32), [ir.Constant(_i32, 1)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def yield_cpu(typingctx):
    """Let another thread that waits for this CPU run (sched_yield)."""

    def generate(context, builder, signature, arguments):
        builder.call(external(builder, "sched_yield", _i32), [])
        return context.get_dummy_value()

    return types.void(), generate


def _futex(builder, address, operation, value):
    syscall = external(builder, "syscall", _i64, *[_i64] * 7)
    zero = ir.Constant(_i64, 0)
    number, operation = ir.Constant(_i64, FUTEX_SYSCALL), ir.Constant(_i64, operation)
    return builder.call(syscall, [number, address, operation, builder.zext(value, _i64), zero, zero, zero])


@intrinsic
def futex_wait(typingctx, address, seen):
    """Sleep while the 32-bit word at `address` is `seen`. May return for no reason: check again."""

    def generate(context, builder, signature, arguments):
        return _futex(builder, arguments[0], _FUTEX_WAIT_PRIVATE, arguments[1])

    return types.int64(types.int64, types.int32), generate


@intrinsic
def futex_wake(typingctx, address, n_waiters):
    """Wake up to `n_waiters` sleepers on the word at `address`; returns how many."""

    def generate(context, builder, signature, arguments):
        return _futex(builder, arguments[0], _FUTEX_WAKE_PRIVATE, arguments[1])

    return types.int64(types.int64, types.int32), generate


# ---- calls by address --------------------------------------------------------------------------------------------


def _generate_call(context, builder, signature, arguments):
    kind = ir.FunctionType(_void, [_i64] * (len(arguments) - 1))
    builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
    return context.get_dummy_value()


@intrinsic
def call1(typingctx, function, a):
    """void function(int64) at an address. Callers are compiled once, whatever they call."""
    return types.void(*[types.int64] * 2), _generate_call


@intrinsic
def call3(typingctx, function, a, b, c):
    """void function(int64, int64, int64) at an address."""
    return types.void(*[types.int64] * 4), _generate_call


@intrinsic
def call4(typingctx, function, a, b, c, d):
    """void function(4 x int64) at an address."""
    return types.void(*[types.int64] * 5), _generate_call


@intrinsic
def call6(typingctx, function, a, b, c, d, e, f):
    """void function(6 x int64) at an address."""
    return types.void(*[types.int64] * 7), _generate_call


@intrinsic
def call7(typingctx, function, a, b, c, d, e, f, g):
    """void function(7 x int64) at an address."""
    return types.void(*[types.int64] * 8), _generate_call


@intrinsic
def call8(typingctx, function, a, b, c, d, e, f, g, h):
    """void function(8 x int64) at an address."""
    return types.void(*[types.int64] * 9), _generate_call


# ---- float control -----------------------------------------------------------------------------------------------

FLUSH_BITS = 0x8040 if MACHINE == "x86_64" else (1 << 24) | (1 << 19)
"""x86: FTZ and DAZ of MXCSR. aarch64: FZ and FZ16 of FPCR."""


@intrinsic
def float_control(typingctx):
    """The calling thread's MXCSR (x86-64) or FPCR (aarch64)."""

    def generate(context, builder, signature, arguments):
        if MACHINE == "x86_64":
            word = cgutils.alloca_once(builder, _i32)
            place = builder.bitcast(word, _i8.as_pointer())
            builder.call(external(builder, "llvm.x86.sse.stmxcsr", _void, _i8.as_pointer()), [place])
            return builder.zext(builder.load(word), _i64)
        return builder.call(external(builder, "llvm.aarch64.get.fpcr", _i64), [])

    return types.int64(), generate


@intrinsic
def set_float_control(typingctx, value):
    def generate(context, builder, signature, arguments):
        if MACHINE == "x86_64":
            word = cgutils.alloca_once_value(builder, builder.trunc(arguments[0], _i32))
            place = builder.bitcast(word, _i8.as_pointer())
            builder.call(external(builder, "llvm.x86.sse.ldmxcsr", _void, _i8.as_pointer()), [place])
        else:
            builder.call(external(builder, "llvm.aarch64.set.fpcr", _void, _i64), [arguments[0]])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@njit
def exact_floats():
    """Clear flush-to-zero on this thread, so that subnormals count; returns the old control word for the way out."""
    before = float_control()
    if before & FLUSH_BITS:
        set_float_control(before & ~FLUSH_BITS)
    return before
