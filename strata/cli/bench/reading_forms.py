"""strata bench cpu-kernels --reading: what threads get that only read memory, by the form of their loop.

Huge pages; all forms take turns, so that all see the same minute. Every line of 64 bytes is loaded once.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from strata.base.compiled import CFunction
from strata.cli.bench.numbers import spread
from strata.cpu.gemv.prefetch import FAR, NONE, emit_prefetch, prefetch_of, suffix_of, text_of
from strata.cpu.machine_code import i64_view
from strata.cpu.pool import Pool
from strata.cpu.simd import Simd, i32, i64, kernel_intrinsic, vector
from strata.kernel_speed import Job, wall_seconds

LINE, LANES = 64, 16
CHUNK_BYTES = 1 << 20
HUGE_BYTES = 2 << 20
SPIN_US = 200.0


@dataclass(frozen=True)
class Form:
    """Neighbouring pieces of a chunk that are read side by side, and what is asked for ahead at every line."""

    streams: int
    prefetch: str = NONE


FORMS = {
    "one load a line": Form(1),
    "four streams": Form(4),
    "first cache, 1 KB ahead": Form(1, "1:1024"),
    "first cache, 4 KB ahead": Form(1, "1:4096"),
    "second cache, 4 KB ahead": Form(1, "2:4096"),
    "second cache, 8 KB ahead": Form(1, "2:8192"),
    "second 8 KB, first 1 KB": Form(1, text_of(FAR)),
}


def _emit_read(s: Simd, streams: int, prefetch: str) -> None:
    """(address, lines of a stream, out): sums of int32 lanes of all lines."""
    x, lines = s.pointer(s.args[0]), s.args[1]
    sums = [s.variable(vector(i32, LANES)) for _ in range(streams)]
    for one in sums:
        s.set(one, s.zero(i32, LANES))
    with s.loop(lines) as i:
        for k, one in enumerate(sums):
            line = s.b.add(i, s.b.mul(lines, s.const(i64, k)))
            at = s.times(line, LINE)
            emit_prefetch(s, prefetch_of(prefetch), s.at(x, at), i, LINE)
            s.set(one, s.b.add(s.get(one), s.load(x, at, i32, LANES)))
    total = s.get(sums[0])
    for one in sums[1:]:
        total = s.b.add(total, s.get(one))
    s.store(total, s.pointer(s.args[2]))


_read = kernel_intrinsic("bench_read", _emit_read, 3)


@cache
def read_function(form: Form) -> CFunction:
    """A chunk function. Record: address, address of the chunks' sums."""
    streams, prefetch = form.streams, form.prefetch
    lines = CHUNK_BYTES // LINE // streams

    def read(a, k, n_chunks):
        p = i64_view(a, 2)
        _read(streams, prefetch, p[0] + CHUNK_BYTES * k, lines, p[1] + LINE * k)

    read.__qualname__ = f"read_{streams}_{suffix_of(prefetch)}"
    return CFunction(read, 3)


def job_of(form: Form, area: np.ndarray) -> Job:
    """Reads whole chunks of an area; the last thing kept is (chunks, 16) int32 sums."""
    n_chunks = area.size // CHUNK_BYTES
    sums = np.zeros((n_chunks, LANES), np.int32)
    record = np.array([area.ctypes.data, sums.ctypes.data], np.int64)
    return Job(read_function(form).address, record, n_chunks, n_chunks * CHUNK_BYTES, (area, sums))


def huge_area(n_bytes: int) -> np.ndarray:
    """Touched memory of the process's own, in huge pages where the system has them."""
    whole = -(-n_bytes // HUGE_BYTES) * HUGE_BYTES
    area = mmap.mmap(-1, whole + HUGE_BYTES)
    area.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(area, np.uint8)
    start = -view.ctypes.data % HUGE_BYTES
    view = view[start : start + whole]
    view[:] = 1
    return view


def measure(
    n_bytes: int, threads: Sequence[int], repeats: int, on_progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """GB/s by form and number of threads."""
    area, found = huge_area(n_bytes), []
    jobs = {name: job_of(form, area) for name, form in FORMS.items()}
    for at, n in enumerate(threads):
        on_progress(at, len(threads))
        rates: dict[str, list[float]] = {name: [] for name in jobs}
        with Pool(n, spin_us=SPIN_US) as pool:
            for i in range(-1, repeats):
                for name, job in jobs.items():
                    gbps = job.n_bytes / wall_seconds(job, pool) / 1e9
                    if i >= 0:
                        rates[name].append(gbps)
        found += [{"form": name, "threads": n, "gbps": spread(some)} for name, some in rates.items()]
    return found


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """A table: forms down, threads across."""
    threads = sorted({f["threads"] for f in found})
    cells = {(f["form"], f["threads"]): f["gbps"]["median"] for f in found}
    head = f"{'GB/s from huge pages':<26}" + "".join(f"{f'{n} thr.':>9}" for n in threads)
    return [head, *(f"{name:<26}" + "".join(f"{cells[name, n]:>9.1f}" for n in threads) for name in FORMS)]
