"""Unbuffered page reads of one table: the file opened past the page cache, and the threads that read it."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np

from strata.base.errors import Closed, StrataError, need
from strata.pack import ngram_jobs as jobs
from strata.pack.gguf_file import GgufFile
from strata.pack.ngram_jobs import READ_BYTES, read_pages, serve_jobs
from strata.pack.ngram_words import HAS_QUEUE, close_queue, open_queue

log = logging.getLogger("strata")

READS_IN_FLIGHT = 64
"""Page reads that a disk is given at a time."""

MOST_READS_IN_FLIGHT = 128
CLOSE_LIMIT_S = 10.0


def reader_bytes(depth: int = READS_IN_FLIGHT) -> int:
    """Memory of a reader: a page and a record for every read in flight."""
    return depth * (READ_BYTES + 8 * 4 + 8 * jobs.SCRATCH_WORDS) + 8 * jobs.SPEC_WORDS


def direct_problem(gguf: GgufFile, name: str) -> str | None:
    """Why a tensor's file cannot be read past the page cache, or None. Reads one page."""
    if not hasattr(os, "O_DIRECT"):
        return "this system has no unbuffered reads (O_DIRECT)"
    tensor = gguf.info(name)
    shard = gguf.shards[tensor.shard]
    try:
        fd = _open(shard.path)
    except OSError as error:
        return f"'{shard.path}' cannot be opened for unbuffered reads: {error.strerror}"
    page = mmap.mmap(-1, READ_BYTES)
    try:
        n_bytes = os.fstat(fd).st_size
        got = os.preadv(fd, [page], tensor.offset // READ_BYTES * READ_BYTES)
    except OSError as error:
        return f"unbuffered reads of '{shard.path}' fail: {error.strerror}"
    finally:
        os.close(fd)
    inside = tensor.offset % READ_BYTES
    found = np.frombuffer(page, np.uint8)[inside:got]
    same = n_bytes == shard.file_bytes
    if not same or not np.array_equal(found, gguf.raw(name).reshape(-1)[: len(found)]):
        return f"'{shard.path}' is no longer the file that was opened"
    return None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)


class PageReader:
    """Serves jobs of `ngram_jobs` over one tensor with `depth` page reads in flight, and closes without a trace.

    kind and out_width say how rows are dequantised, -1 for a type that is not: such jobs must have no OUT.
    half, levels  tables of the dequantisers
    queued        False: with a worker a read even where the system has queues for reads

    StrataError where the file cannot be read this way: `direct_problem`.
    """

    def __init__(
        self,
        gguf: GgufFile,
        name: str,
        kind: int,
        out_width: int,
        half: np.ndarray,
        levels: np.ndarray,
        depth: int = READS_IN_FLIGHT,
        queued: bool = True,
    ):
        need(
            0 < depth <= MOST_READS_IN_FLIGHT,
            "reads in flight are out of range",
            found=depth,
            needed=f"1 to {MOST_READS_IN_FLIGHT}",
        )
        problem = direct_problem(gguf, name)
        if problem is not None:
            raise StrataError(
                f"the n-gram table of {gguf.path.name} cannot be read directly",
                found=problem,
                needed="direct reads",
                advice='Load with ngram="mapped".',
            )
        tensor = gguf.info(name)
        shard = gguf.shards[tensor.shard]
        self.path, self.depth = shard.path, depth
        self.spec = np.zeros(jobs.SPEC_WORDS, np.int64)
        self._words = np.zeros((depth, 4), np.int64)
        self._records = np.zeros(jobs.SCRATCH_WORDS * depth, np.int64)
        self._pages = mmap.mmap(-1, depth * READ_BYTES)
        fd = _open(self.path)
        address = np.frombuffer(self._pages, np.uint8).ctypes.data
        self.spec[: jobs.QUEUE] = (
            fd, tensor.offset, tensor.row_bytes, shard.file_bytes, depth, kind, out_width, address
        )  # fmt: skip
        self.queued = queued and HAS_QUEUE and open_queue(depth, self.spec[jobs.QUEUE :].ctypes.data) == 0
        self._compile(half, levels, address)
        commands, requests, results = os.pipe(), os.pipe(), os.pipe()
        self._post_fd = commands[1]
        server = threading.Thread(
            target=serve_jobs,
            args=(commands[0], requests[1], results[0], self.spec, half, levels, self._records),
            name="strata-ngram",
            daemon=True,
        )
        workers = [
            threading.Thread(
                target=read_pages,
                args=(requests[0], results[1], address + k * READ_BYTES, self._words[k], self.spec),
                name=f"strata-ngram-{k}",
                daemon=True,
            )
            for k in range(0 if self.queued else depth)
        ]
        memory = (self.spec, self._pages, self._words, self._records, half, levels)
        self._stop = weakref.finalize(self, _stop, server, workers, (commands, requests, results), fd, memory)
        for thread in (server, *workers):
            thread.start()

    def _compile(self, half: np.ndarray, levels: np.ndarray, address: int) -> None:
        """Compiles what the threads run, by running it on pipes that are closed at once."""
        ends, sink = os.pipe(), os.open(os.devnull, os.O_WRONLY)
        os.close(ends[1])
        serve_jobs(ends[0], sink, ends[0], self.spec, half, levels, self._records)
        if not self.queued:
            read_pages(ends[0], sink, address, self._words[0], self.spec)
        os.close(ends[0])
        os.close(sink)

    @property
    def closed(self) -> bool:
        return not self._stop.alive

    def post(self, job: np.ndarray) -> None:
        """Start a job, int64 (JOB_WORDS,); it and all it points to must live until its STATE is not RUNNING."""
        if self.closed:
            raise Closed("the n-gram reader was closed", needed="an open one", advice="Load the model again.")
        os.write(self._post_fd, int(job.ctypes.data).to_bytes(8, "little"))

    def put_faults(self, latency_us: int = 0, fail_at: int = 0, short_at: int = 0) -> None:
        """For tests: wait before every read, let the n-th read from now on fail or come back cut; 0 is never."""
        asked = int(self.spec[jobs.READS_ASKED])
        self.spec[jobs.LATENCY_US] = latency_us
        self.spec[jobs.FAIL_AT] = asked + fail_at if fail_at else 0
        self.spec[jobs.SHORT_AT] = asked + short_at if short_at else 0

    def close(self) -> None:
        """End all threads. Jobs that were posted are served first, so cancel them before. May be called twice."""
        self._stop()


def _stop(
    server: threading.Thread,
    workers: list[threading.Thread],
    pipes: tuple[tuple[int, int], ...],
    fd: int,
    memory: tuple,
) -> None:
    """Closes pipe after pipe, each when those who write to it have ended. Holds `memory` until then."""
    commands, requests, results = pipes
    end = time.monotonic() + CLOSE_LIMIT_S
    for writer, threads in ((commands[1], [server]), (requests[1], workers)):
        os.close(writer)
        for thread in threads:
            with suppress(RuntimeError):  # never started
                thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            log.warning("the disk does not answer: reads of the n-gram table are left behind")
            _LEFT_BEHIND.append(memory)
            return
    queue = int(memory[0][jobs.QUEUE])
    if queue:
        close_queue(queue)
    for each in (commands[0], requests[0], *results, fd):
        os.close(each)


_LEFT_BEHIND: list[tuple] = []
"""Memory that threads which never came back still write to."""
