"""Rates of this machine's kernels, measured: GB/s of weight bytes that one core turns into products, by type."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median

import numpy as np
from numba import njit

from strata.cpu.gemv.table import kernel, layout_of
from strata.cpu.machine_code import call7
from strata.pack.formats import BlockFormat, by_name

COLUMNS, PROBE_BYTES, PASSES = 2560, 192 << 10, 5
"""A probe matrix lies in the second-level cache: what is measured is the kernel, not the memory."""


@njit(nogil=True)
def _repeat(times, f, w, stride, n_rows, act, K, out):
    for _ in range(times):
        call7(f, w, stride, n_rows, act, K, out, 4 * n_rows)


def measure_core_gbps(types: Iterable[str]) -> dict[str, float]:
    """GB/s of one core at one activation row, by type name. About 5 ms a type, and the kernels' compilation if they are not
    in the cache. The calling thread's CPU time counts, so that other programs disturb little."""
    return {name: _rate(by_name(name)) for name in types}


def _rate(format: BlockFormat) -> float:
    stride = format.row_bytes(COLUMNS)
    rows = max(PROBE_BYTES // stride, 8)
    w = np.zeros(rows * stride + 64, np.uint8)
    act = np.zeros(layout_of(format).record_bytes(COLUMNS) + 64, np.uint8)
    out = np.zeros(rows, np.float32)
    start = -act.ctypes.data % 64
    arguments = (w.ctypes.data, stride, rows, act.ctypes.data + start, COLUMNS, out.ctypes.data)
    address = kernel(format, 1)
    _repeat(1, address, *arguments)
    began = time.thread_time()
    _repeat(2, address, *arguments)
    times = max(1, min(int(0.8e-3 / max((time.thread_time() - began) / 2, 1e-7)), 1000))
    seconds = []
    for _ in range(PASSES):
        began = time.thread_time()
        _repeat(times, address, *arguments)
        seconds.append((time.thread_time() - began) / times)
    return rows * stride / median(seconds) / 1e9
