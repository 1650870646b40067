"""Plain addresses, words shared between threads, and calls of the C library, for the compiled page reader."""

from __future__ import annotations

import errno
import platform

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from strata.base.compiled import cached_njit

EINTR = errno.EINTR
_MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}.get(_MACHINE, (-1, -1, -1, -1))
_IO_SETUP, _IO_DESTROY, _IO_SUBMIT, _IO_GETEVENTS = _CALLS
HAS_QUEUE = _IO_SETUP >= 0
"""Whether the numbers of the system's calls for queued reads are known."""

_CLOCK_MONOTONIC = 1
_i64 = ir.IntType(64)

_read = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.int64, types.int64, types.int64))
_usleep = types.ExternalFunction("usleep", types.int32(types.int64))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_syscall = types.ExternalFunction(
    "syscall", types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64)
)
_errno_location = types.ExternalFunction("__errno_location", types.int64())


@intrinsic
def pointer(typingctx, address):
    """An int64 address as a pointer that `carray` takes."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@intrinsic
def load_acquire(typingctx, address):
    """The int64 word at an address that another thread writes."""

    def generate(context, builder, signature, arguments):
        return builder.load_atomic(builder.inttoptr(arguments[0], _i64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release(typingctx, address, value):
    """Writes the int64 word at an address; who reads it there also sees everything written before."""

    def generate(context, builder, signature, arguments):
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], _i64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@njit(error_model="numpy")
def longs(address, n):
    """(n,) int64 view of memory."""
    return carray(pointer(address), (n,), np.int64)


@njit(error_model="numpy")
def ints(address, n):
    """(n,) int32 view of memory."""
    return carray(pointer(address), (n,), np.int32)


@njit(error_model="numpy")
def byte_rows(address, rows, width):
    """(rows, width) uint8 view of memory."""
    return carray(pointer(address), (rows, width), np.uint8)


@njit(error_model="numpy")
def floats(address, rows, width):
    """(rows, width) float32 view of memory."""
    return carray(pointer(address), (rows, width), np.float32)


@njit(error_model="numpy")
def last_error():
    """errno of this thread."""
    return np.int64(ints(_errno_location(), 1)[0])


@njit(error_model="numpy")
def receive(fd, address, n_bytes):
    """`read` that goes on after a signal: bytes read, 0 when the other end is closed, -1 on an error."""
    got = _read(fd, address, n_bytes)
    while got < 0 and last_error() == EINTR:
        got = _read(fd, address, n_bytes)
    return got


@njit(error_model="numpy")
def send(fd, address, n_bytes):
    """`write` that goes on after a signal."""
    sent = _write(fd, address, n_bytes)
    while sent < 0 and last_error() == EINTR:
        sent = _write(fd, address, n_bytes)
    return sent


@njit(error_model="numpy")
def read_at(fd, address, n_bytes, offset):
    """`pread` that goes on after a signal: bytes read, or -1 with `last_error`."""
    got = _pread(fd, address, n_bytes, offset)
    while got < 0 and last_error() == EINTR:
        got = _pread(fd, address, n_bytes, offset)
    return got


@njit(error_model="numpy")
def sleep_us(us):
    _usleep(us)


@njit(error_model="numpy")
def clock_ns(scratch):
    """Nanoseconds of the monotonic clock. scratch: address of 16 bytes."""
    _clock_gettime(np.int32(_CLOCK_MONOTONIC), scratch)
    time = longs(scratch, 2)
    return time[0] * 1_000_000_000 + time[1]


@cached_njit
def open_queue(n, address):
    """Makes a queue of the system's for `n` reads and writes its handle to `address`, which must hold 0; errno or 0."""
    return 0 if _syscall(_IO_SETUP, n, address, 0, 0, 0) == 0 else last_error()


@cached_njit
def close_queue(queue):
    _syscall(_IO_DESTROY, queue, 0, 0, 0, 0)


@njit(error_model="numpy")
def submit(queue, n, pointers):
    """Gives reads to the queue, `pointers` being the address of their records' addresses: how many, or -1."""
    return _syscall(_IO_SUBMIT, queue, n, pointers, 0, 0)


@njit(error_model="numpy")
def completed(queue, most, events):
    """Waits for at least one read; writes up to `most` records of 4 words to `events`: how many, or -1."""
    got = _syscall(_IO_GETEVENTS, queue, 1, most, events, 0)
    while got < 0 and last_error() == EINTR:
        got = _syscall(_IO_GETEVENTS, queue, 1, most, events, 0)
    return got
