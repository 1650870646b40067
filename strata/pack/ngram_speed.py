"""How fast rows of an n-gram table come: directly and through the page cache, by how many are asked for at once."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.base.geometry import NgramGeometry
from strata.pack.formats import by_name
from strata.pack.gguf_file import GgufFile
from strata.pack.gguf_write import NewTensor, file_layout
from strata.pack.ngram import TABLE_NAME, NgramTable

ROW_WIDTH, FORMAT = 160, "IQ4_NL"
"""Rows of the released model's table: 90 bytes."""

HEADS = 16
_PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class Reading:
    """Times of windows that ask for `rows` rows each, none of them in the row cache, until all are there.

    depth        page reads in flight; 0 for a mapped table
    caller_us    median time for which the caller was kept: direct reads go on without it
    rows_per_s   while windows follow each other
    """

    mode: str
    depth: int
    rows: int
    windows: int
    median_us: float
    p99_us: float
    caller_us: float
    rows_per_s: float


def write_table(path: Path, n_bytes: int, seed: int = 0) -> None:
    """Writes a GGUF file with a table of about `n_bytes` of random rows, and brings it to the disk."""
    row_bytes = by_name(FORMAT).row_bytes(ROW_WIDTH)
    layout = file_layout({}, [NewTensor(TABLE_NAME, (n_bytes // row_bytes, ROW_WIDTH), FORMAT)])
    rng, left = np.random.default_rng(seed), layout.n_bytes - len(layout.header)
    with path.open("wb") as file:
        file.write(layout.header)
        while left > 0:
            file.write(rng.bytes(min(left, _PIECE_BYTES)))
            left -= _PIECE_BYTES
        file.flush()
        os.fsync(file.fileno())


def measure(
    path: Path, depths: Sequence[int], sizes: Sequence[int], seconds: float, queued: bool = True
) -> Iterator[Reading]:
    """Readings of a table written by `write_table`, for every depth and then mapped, each for every number of rows.

    seconds: of one reading; queued: as of `NgramTable`. Mapped readings start with nothing of the table in memory.
    """
    with GgufFile(path) as gguf:
        rows = gguf.info(TABLE_NAME).rows
        share = rows // HEADS
        geometry = NgramGeometry(
            layer=0, order=3, heads_per_order=HEADS // 2, row_width=ROW_WIDTH, conv_taps=4, reset_token=0,
            image_token=0, multipliers=(3, 5, 7), moduli=(share,) * HEADS,
            offsets=tuple(share * i for i in range(HEADS)),
        )  # fmt: skip
        for depth in depths:
            table = NgramTable(gguf, geometry, 0, mode="direct", depth=depth, queued=queued)
            try:
                for size in sizes:
                    yield _time(table, depth, size, seconds)
            finally:
                table.close()
        table = NgramTable(gguf, geometry, 0)
        for size in sizes:
            _forget(gguf, path)
            yield _time(table, 0, size, seconds)


def _time(table: NgramTable, depth: int, size: int, seconds: float) -> Reading:
    rng, times, kept = np.random.default_rng(depth * 7919 + size), [], []
    out, words = np.empty((1, size * table.row_width), np.float32), np.zeros(2, np.int64)
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times) < 3:
        ids = rng.integers(0, table.rows, (1, size))
        words[0] += 1
        began = time.perf_counter_ns()
        table.deliver(ids, out, words)
        kept.append((time.perf_counter_ns() - began) / 1e3)
        while words[1] != words[0]:  # as op ngram_wait does
            if words[1] == -words[0]:
                raise table.failed("rows could not be read")
        times.append((time.perf_counter_ns() - began) / 1e3)
    rate = size * len(times) / (sum(times) / 1e6)
    p99 = float(np.quantile(times, 0.99))
    return Reading(table.mode, depth, size, len(times), float(np.median(times)), p99, float(np.median(kept)), rate)


def _forget(gguf: GgufFile, path: Path) -> None:
    """Drops a file's pages from this process and from the page cache."""
    address, n_bytes = gguf.address(TABLE_NAME), gguf.info(TABLE_NAME).n_bytes
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + n_bytes - start), mmap.MADV_DONTNEED)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
