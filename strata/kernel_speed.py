"""Rates of the CPU's product kernels, beside the rate at which the same cores read memory in the same run.

Weights are random blocks and lie in one area several times the last-level cache; a pass over it is one job of chunks of
CHUNK_BYTES, as in a model. One core is timed by its own CPU time, several by the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from strata.base.compiled import chunk
from strata.cpu.gemv.table import kernel_table, layout_of
from strata.cpu.linear import CHUNK_BYTES, linear_chunk, split_rows
from strata.cpu.lower import aligned_bytes, quantise
from strata.cpu.machine_code import i64_view
from strata.cpu.pool import Pool
from strata.cpu.self_test import check_format
from strata.cpu.walker import WalkList
from strata.pack.formats import BlockFormat
from strata.pack.random_blocks import random_rows
from strata.planner.probes import last_level_cache_bytes

COLUMNS = 2560
HOT_ROWS = 64
"""Rows that stay in a core's own cache: 35 to 700 KB."""

LEAST_COLD_BYTES = 160 << 20
TILE_BYTES = 4 << 20


def cold_bytes() -> int:
    """Four times the last-level cache, at least LEAST_COLD_BYTES."""
    return max(4 * (last_level_cache_bytes() or 0), LEAST_COLD_BYTES)


@chunk
def read_chunk(a, k, n_chunks):
    """Sum of the int64 words of one chunk. Record: address, words of a chunk, address of n_chunks results."""
    p = i64_view(a, 3)
    words = i64_view(p[0] + 8 * p[1] * k, p[1])
    total = 0
    for i in range(words.size):
        total += words[i]
    i64_view(p[2] + 8 * k, 1)[0] = total


@dataclass(frozen=True)
class Job:
    """Chunks for a pool. keep: what the addresses in `record` point at."""

    function: int
    record: np.ndarray
    n_chunks: int
    n_bytes: int
    keep: tuple

    def run(self, pool: Pool) -> None:
        pool.run(self.function, self.record.ctypes.data, self.n_chunks)


def core_seconds(job: Job, pool: Pool) -> float:
    """CPU time of one pass by the caller alone; pool has one thread."""
    began = time.thread_time()
    job.run(pool)
    return time.thread_time() - began


def wall_seconds(job: Job, pool: Pool) -> float:
    began = time.perf_counter()
    job.run(pool)
    return time.perf_counter() - began


def reading(area: np.ndarray) -> Job:
    """Reads an area of bytes, whole chunks of it."""
    n_chunks = area.size // CHUNK_BYTES
    sums = np.zeros(n_chunks, np.int64)
    record = np.array([area.ctypes.data, CHUNK_BYTES // 8, sums.ctypes.data], np.int64)
    return Job(read_chunk.address, record, n_chunks, n_chunks * CHUNK_BYTES, (area, sums))


@dataclass(frozen=True)
class Records:
    """R activation rows in the layout of a kernel."""

    address: int
    row_bytes: int
    keep: tuple


def activation_records(format: BlockFormat, K: int, R: int, tier: int) -> Records:
    """Records of R random rows of K values."""
    x = np.random.default_rng(R).standard_normal((R, K)).astype(np.float32)
    layout = layout_of(format, tier)
    n_bytes = layout.record_bytes(K)
    if not layout.group:
        return Records(x.ctypes.data, n_bytes, (x,))
    area, error = aligned_bytes(R * n_bytes), np.zeros(4, np.int64)
    walk = WalkList()
    walk.add(quantise, layout.quantise_address, x, K, R, 4 * K, area, error, 0, 1)
    walk.run()
    return Records(area.ctypes.data, n_bytes, (area,))


@dataclass(frozen=True)
class Product:
    """One matrix of a job of products: where its rows lie, what multiplies them, where the results go."""

    address: int
    row_bytes: int
    rows: int
    columns: int
    kernels: np.ndarray
    records: Records
    out: np.ndarray


def kernels_of(format: BlockFormat, tier: int) -> np.ndarray:
    return kernel_table(format, tier)


def multiplying(products: list[Product], R: int, pieces: np.ndarray | None = None) -> Job:
    """All products over R activation rows. pieces (n, 3) int64 of (product, first row, last row), one a chunk, if the
    rows are not to be taken once each in order."""
    words = np.array(
        [(p.address, p.row_bytes, p.rows, p.columns, p.kernels.ctypes.data, p.records.address, p.records.row_bytes,
          p.out.ctypes.data, 4 * p.rows) for p in products], np.int64,
    )  # fmt: skip
    if pieces is None:
        starts, pieces = split_rows([p.rows for p in products], [p.row_bytes for p in products], 2)
    else:
        starts = np.arange(len(pieces) + 1, dtype=np.int64)
    n_bytes = sum(int(last - first) * products[i].row_bytes for i, first, last in pieces)
    record = np.array([starts.ctypes.data, pieces.ctypes.data, words.ctypes.data, R], np.int64)
    return Job(linear_chunk.address, record, len(starts) - 1, n_bytes, (starts, pieces, words, products))


@dataclass(frozen=True)
class Rates:
    """GB/s of weights of one format at R rows; each list holds one figure a repeat. `stream` and `stream_all` are the
    reading rates measured around them."""

    format_name: str
    R: int
    cold: list[float]
    hot: list[float]
    all_threads: list[float]
    stream: list[float]
    stream_all: list[float]


class KernelBench:
    """Times kernels of one tier over one area of memory, which all formats share in turn.

    threads: of the figures for several; n_bytes: of weights in a cold pass; columns: values of a row
    """

    def __init__(self, tier: int, threads: int, n_bytes: int, columns: int = COLUMNS):
        self.tier, self.threads, self.columns = tier, threads, columns
        self._area = aligned_bytes(n_bytes // CHUNK_BYTES * CHUNK_BYTES)
        self._area[:] = 1  # pages of its own, not the shared page of zeros
        self._one, self._all = Pool(1), Pool(threads)

    def close(self) -> None:
        self._one.close()
        self._all.close()

    def __enter__(self) -> KernelBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _reading(self) -> Job:
        return reading(self._area)

    def stream_gbps(self) -> float:
        """One core's rate of reading the area."""
        return self._reading.n_bytes / core_seconds(self._reading, self._one) / 1e9

    def stream_all_gbps(self) -> float:
        return self._reading.n_bytes / wall_seconds(self._reading, self._all) / 1e9

    @property
    def one_thread(self) -> Pool:
        return self._one

    def fill(self, format: BlockFormat) -> np.ndarray:
        """Rows of random blocks of `columns` values all over the area; returns it, bytes."""
        row_bytes = format.row_bytes(self.columns)
        n_bytes = self._area.size // row_bytes * row_bytes
        tile = random_rows(format, TILE_BYTES // row_bytes, self.columns, 0.02, np.random.default_rng(format.ggml_id))
        flat = tile.reshape(-1)
        for at in range(0, n_bytes, flat.size):
            part = min(flat.size, n_bytes - at)
            self._area[at : at + part] = flat[:part]
        return self._area

    def measure(
        self, format: BlockFormat, rows: list[int], repeats: int, on_progress: Callable[[], None] = lambda: None
    ) -> list[Rates]:
        """Check the format's kernels against the arithmetic (SelfTestFailed), then time them; repeats alternate between
        row counts and reading, so that all see the same minute."""
        check_format(format, self.tier)
        row_bytes = format.row_bytes(self.columns)
        n = self.fill(format).size // row_bytes
        kernels = kernels_of(format, self.tier)
        jobs = {}
        for R in rows:
            records = activation_records(format, self.columns, R, self.tier)
            address = self._area.ctypes.data
            cold = Product(address, row_bytes, n, self.columns, kernels, records, np.zeros((R, n), np.float32))
            few = min(HOT_ROWS, n)
            hot = Product(address, row_bytes, few, self.columns, kernels, records, np.zeros((R, few), np.float32))
            passes = max(1, n // 4 // few)
            jobs[R] = (multiplying([cold], R), multiplying([hot], R, np.array([(0, 0, few)] * passes, np.int64)))
        found = {R: Rates(format.name, R, [], [], [], [], []) for R in rows}
        for i in range(-1, repeats):
            for R, (cold_job, hot_job) in jobs.items():
                stream, stream_all = self.stream_gbps(), self.stream_all_gbps()
                cold_s = core_seconds(cold_job, self._one)
                hot_s = core_seconds(hot_job, self._one)
                all_s = wall_seconds(cold_job, self._all)
                if i < 0:
                    continue
                r = found[R]
                r.stream.append(stream)
                r.stream_all.append(stream_all)
                r.cold.append(cold_job.n_bytes / cold_s / 1e9)
                r.hot.append(hot_job.n_bytes / hot_s / 1e9)
                r.all_threads.append(cold_job.n_bytes / all_s / 1e9)
            on_progress()
        return list(found.values())
