"""Rates of this machine's kernels, measured: one core in products of each type, and its pace in other ops."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterable

import numpy as np
from numba import njit

from strata.cpu.gemv.table import kernel, layout_of
from strata.cpu.machine_code import call7
from strata.pack.formats import BlockFormat, by_name
from strata.planner.facts import ModelFacts
from strata.planner.machine import kernel_tier
from strata.planner.rates import CpuCosts

NARROW, WIDE, PROBE_BYTES, PASSES, PASS_S = 256, 2560, 192 << 10, 7, 0.6e-3
"""A probe matrix lies in the second-level cache: what is measured is the kernel, not the memory."""

STREAM_BYTES, STREAM_PASSES = 96 << 20, 3
"""Beyond the caches: what is measured is the kernel while memory is read."""


@njit(nogil=True)
def _repeat(times, f, w, stride, n_rows, act, K, out):
    for _ in range(times):
        call7(f, w, stride, n_rows, act, K, out, 4 * n_rows)


YARD_VALUES, YARD_NS = 4096, 0.406
"""Values of the yardstick, which lie in the first-level cache, and ns a value where the listed costs were fitted."""


@njit(nogil=True)
def _yardstick(times, x, out):
    """What other ops spend their time on: short sums in a fixed order, four lanes side by side."""
    for _ in range(times):
        for lane in range(4):
            out[lane] = 0
        for i in range(0, x.size, 4):
            for lane in range(4):
                out[lane] = out[lane] * np.float32(0.5) + x[i + lane]


def measure_costs(types: Iterable[str]) -> CpuCosts:
    """Costs with the rates of this machine's kernels, for the given type names, and its pace in other ops.

    Two widths give the cost of a row and that of its bytes, in the cache; then the bytes are read from memory. About
    50 ms a type, and the kernels' compilation if they are not in the cache. The calling thread's CPU time counts, so
    that other programs disturb little.
    """
    rates, rows, streams = {}, {}, {}
    memory = _memory_like_a_file(STREAM_BYTES)
    for name in types:
        form = by_name(name)
        narrow, wide = _row_ns(form, NARROW), _row_ns(form, WIDE)
        more_bytes = form.row_bytes(WIDE) - form.row_bytes(NARROW)
        ns_per_byte = max(wide - narrow, 1e-3) / more_bytes
        rates[name] = 1 / ns_per_byte
        rows[name] = max(narrow - form.row_bytes(NARROW) * ns_per_byte, 0.0)
        in_memory = max(_stream_ns(form, memory) - rows[name], 1e-3) / form.row_bytes(WIDE)
        streams[name] = 1 / in_memory
    return CpuCosts(kernel_tier(), rates, rows, streams, pace=_pace())


def types_of(m: ModelFacts) -> list[str]:
    """Every type that products of this model use."""
    found = {k for c in (*m.dense, m.head) for k in c.by_type} | {k for layer in m.expert_parts for k, _, _ in layer}
    return sorted(found)


def _memory_like_a_file(n_bytes: int) -> np.ndarray:
    """Zeros in small pages, as those of a mapped file are: a core reads large ones by a third faster."""
    memory = mmap.mmap(-1, n_bytes)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages refuses the advice and has only small ones
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    values = np.frombuffer(memory, np.uint8)
    values[:] = 0
    return values


def _row_ns(form: BlockFormat, columns: int) -> float:
    """ns of one matrix row of `columns` values times one activation row, in the second-level cache."""
    stride = form.row_bytes(columns)
    rows = max(PROBE_BYTES // stride, 8)
    w = np.zeros(rows * stride + 64, np.uint8)
    act = np.zeros(layout_of(form).record_bytes(columns) + 64, np.uint8)
    out = np.zeros(rows, np.float32)
    start = -act.ctypes.data % 64
    arguments = (kernel(form, 1), w.ctypes.data, stride, rows, act.ctypes.data + start, columns, out.ctypes.data)
    return _seconds(_repeat, *arguments) / rows * 1e9


def _stream_ns(form: BlockFormat, memory: np.ndarray) -> float:
    """ns of one matrix row of WIDE values times one activation row, read from memory."""
    stride = form.row_bytes(WIDE)
    rows = len(memory) // stride
    act = np.zeros(layout_of(form).record_bytes(WIDE) + 64, np.uint8)
    out = np.zeros(rows, np.float32)
    address = act.ctypes.data + -act.ctypes.data % 64
    arguments = (kernel(form, 1), memory.ctypes.data, stride, rows, address, WIDE, out.ctypes.data)
    seconds = []
    for _ in range(STREAM_PASSES):
        began = time.thread_time()
        _repeat(1, *arguments)
        seconds.append(time.thread_time() - began)
    return min(seconds) / rows * 1e9


def _pace() -> float:
    """Time of the yardstick as a multiple of what it takes where the listed costs were fitted."""
    x, lanes = np.ones(YARD_VALUES, np.float32), np.zeros(4, np.float32)
    return _seconds(_yardstick, x, lanes) * 1e9 / YARD_VALUES / YARD_NS


def _seconds(repeat: Callable[..., None], *arguments: object) -> float:
    """Shortest CPU time of one turn of repeat(times, *arguments): other programs only ever make it longer."""
    repeat(1, *arguments)
    began = time.thread_time()
    repeat(2, *arguments)
    times = max(1, min(int(PASS_S / max((time.thread_time() - began) / 2, 1e-7)), 10_000))
    seconds = []
    for _ in range(PASSES):
        began = time.thread_time()
        repeat(times, *arguments)
        seconds.append((time.thread_time() - began) / times)
    return min(seconds)
