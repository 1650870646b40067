"""Calls of the C library and of the system, for the compiled page reader."""

from __future__ import annotations

import errno

import numpy as np
from numba import njit, types

from strata.base.addresses import MACHINE, i32_view
from strata.base.compiled import cached_njit

EINTR = errno.EINTR
_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}.get(MACHINE, (-1, -1, -1, -1))
_IO_SETUP, _IO_DESTROY, _IO_SUBMIT, _IO_GETEVENTS = _CALLS
HAS_QUEUE = _IO_SETUP >= 0
"""Whether the numbers of the system's calls for queued reads are known."""


_read = types.ExternalFunction("read", types.int64(types.int32, types.int64, types.int64))
_write = types.ExternalFunction("write", types.int64(types.int32, types.int64, types.int64))
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.int64, types.int64, types.int64))
_usleep = types.ExternalFunction("usleep", types.int32(types.int64))
_syscall = types.ExternalFunction(
    "syscall", types.int64(types.int64, types.int64, types.int64, types.int64, types.int64, types.int64)
)
_errno_location = types.ExternalFunction("__errno_location", types.int64())


@njit(error_model="numpy")
def last_error():
    """errno of this thread."""
    return np.int64(i32_view(_errno_location(), 1)[0])


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
