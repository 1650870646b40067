"""Rates of this machine's kernels, measured: what one core needs for products of each type."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median

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


@njit(nogil=True)
def _repeat(times, f, w, stride, n_rows, act, K, out):
    for _ in range(times):
        call7(f, w, stride, n_rows, act, K, out, 4 * n_rows)


def measure_costs(types: Iterable[str]) -> CpuCosts:
    """Costs with the rates of this machine's kernels, for the given type names.

    Two widths give the cost of a row and that of its bytes. About 10 ms a type, and the kernels' compilation if they
    are not in the cache. The calling thread's CPU time counts, so that other programs disturb little.
    """
    rates, rows = {}, {}
    for name in types:
        form = by_name(name)
        narrow, wide = _row_ns(form, NARROW), _row_ns(form, WIDE)
        more_bytes = form.row_bytes(WIDE) - form.row_bytes(NARROW)
        ns_per_byte = max(wide - narrow, 1e-3) / more_bytes
        rates[name] = 1 / ns_per_byte
        rows[name] = max(narrow - form.row_bytes(NARROW) * ns_per_byte, 0.0)
    return CpuCosts(kernel_tier(), rates, rows)


def types_of(m: ModelFacts) -> list[str]:
    """Every type that products of this model use."""
    found = {k for c in (*m.dense, m.head) for k in c.by_type} | {k for layer in m.expert_parts for k, _, _ in layer}
    return sorted(found)


def _row_ns(form: BlockFormat, columns: int) -> float:
    """ns of one matrix row of `columns` values times one activation row, in the second-level cache."""
    stride = form.row_bytes(columns)
    rows = max(PROBE_BYTES // stride, 8)
    w = np.zeros(rows * stride + 64, np.uint8)
    act = np.zeros(layout_of(form).record_bytes(columns) + 64, np.uint8)
    out = np.zeros(rows, np.float32)
    start = -act.ctypes.data % 64
    arguments = (kernel(form, 1), w.ctypes.data, stride, rows, act.ctypes.data + start, columns, out.ctypes.data)
    _repeat(1, *arguments)
    began = time.thread_time()
    _repeat(2, *arguments)
    times = max(1, min(int(PASS_S / max((time.thread_time() - began) / 2, 1e-7)), 1000))
    seconds = []
    for _ in range(PASSES):
        began = time.thread_time()
        _repeat(times, *arguments)
        seconds.append((time.thread_time() - began) / times)
    return median(seconds) / rows * 1e9
