"""The n-gram embedding table: row ids hashed from the last tokens, rows read in two steps, issue and collect.

Rows come from the file's mapping, or from the disk directly: then reads run on threads of their own while the caller
works, and `deliver` lets a window start before its rows have landed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np

from strata.base.errors import BadArgument, Closed, FileError, StrataError, need
from strata.base.geometry import NgramGeometry
from strata.pack.formats import BlockFormat
from strata.pack.gguf_file import GgufFile
from strata.pack.ngram_check import check_table
from strata.pack.ngram_held import MOST_IDS as MOST_HELD
from strata.pack.ngram_held import hash_few, keep_few, look_up_few, spread_few
from strata.pack.ngram_jobs import (
    CANCELLED,
    ERROR,
    ERROR_AT,
    ERROR_BYTES,
    FAILED,
    FINISHED_NS,
    KINDS,
    LANDED_ALL,
    MOST_IDS,
    N_ENTRIES,
    N_PAGES,
    READ_BYTES,
    READS,
    RUNNING,
    SHORT,
    spread_rows,
    wait_for,
)
from strata.pack.ngram_reader import READS_IN_FLIGHT, PageReader, reader_bytes
from strata.pack.ngram_rows import (
    HITS,
    MISSES,
    WAYS,
    WILL_NEED,
    hash_rows,
    keep_rows,
    look_up,
    prefetch_rows,
    read_rows,
)
from strata.pack.ngram_ticket import Buffers, NgramStats, Ticket, capacity_of

TABLE_NAME = "per_layer_token_embd.weight"
MODES = ("mapped", "direct")
DISK = "Check the disk."
SLOW_READ_US = 3.0
"""Rows that take longer than this come from the disk and not from the page cache; a row in memory takes below 1 us."""

_IQ4_NL_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


class NgramTable:
    """The table of one model, `geometry.heads` rows a token. One lock: any thread may call.

    gguf        the model's file; the table keeps its mapping alive
    geometry    hash constants and sizes, checked against the table's tensor
    cache_rows  bound of the row cache, rounded up to whole sets of 8; 0 switches it off
    prefetch    mapped: `issue` asks the system for the pages of missing rows, so that the disk reads them side by side;
                None: as long as the rows of the last `collect` came from the disk (the request costs 1 us a row)
    mode        "mapped": through the file's mapping and the page cache. "direct": past it, in pages of 4 KiB, up to
                `depth` at a time; such a table must be closed
    queued      direct: by the system's queue for reads where it has one; False: by a thread a read

    limit_s     how long `collect` waits for the disk (direct)

    Errors: ModelError where tensor and geometry do not fit, FileError for a row id outside the table, StrataError where
    the file cannot be read directly.
    """

    def __init__(
        self,
        gguf: GgufFile,
        geometry: NgramGeometry,
        cache_rows: int = 65536,
        prefetch: bool | None = None,
        name: str = TABLE_NAME,
        mode: str = "mapped",
        depth: int = READS_IN_FLIGHT,
        queued: bool = True,
    ):
        tensor = gguf.info(name)
        check_table(tensor, geometry, gguf.path.name)
        if cache_rows < 0:
            raise BadArgument("cache_rows is negative", found=cache_rows, needed="0 or more")
        need(mode in MODES, "mode of the n-gram table is unknown", found=repr(mode), needed=" or ".join(MODES))
        self.geometry = geometry
        self.format: BlockFormat = tensor.format
        self.rows, self.row_width, self.row_bytes = tensor.shape[0], tensor.shape[1], tensor.row_bytes
        self.mode, self.limit_s = mode, 30.0
        self._stats = NgramStats(mode)
        self._table = gguf.raw(name)
        self._address = gguf.address(name)
        self._prefetch = prefetch
        self._slow_reads = True  # nothing is in memory yet
        gguf.advise(name, "random")  # neighbours of a hashed row are never the next ones asked for
        sets = -(-min(cache_rows, self.rows) // WAYS)
        self.cache_rows = sets * WAYS
        self._keys = np.full((sets, WAYS), -1, np.int64)
        self._used = np.zeros((sets, WAYS), np.uint8)
        self._hands = np.zeros(sets, np.uint8)
        self._cached = np.zeros((sets, WAYS, self.row_bytes), np.uint8)
        self._cache = (self._keys, self._used, self._hands, self._cached)
        self._counts = np.zeros(2, np.int64)
        self._free: dict[int, list[Buffers]] = {}
        self._lock = threading.Lock()
        self._multipliers = np.array(geometry.multipliers, np.uint64)
        self._moduli = np.array(geometry.moduli, np.uint64)
        self._offsets = np.array(geometry.offsets, np.uint64)
        self._token_limit = (2**63 - 1) // max(geometry.multipliers) + 1
        half = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
        self._kind = KINDS.get(self.format.name, -1)
        self._spread = _spreader(self.format, half)
        self._in_flight: list[Buffers] = []
        self._delivered: Buffers | None = None
        self.reader: PageReader | None = None
        if mode == "direct":
            self.reader = PageReader(gguf, name, self._kind, self.row_width, half, _IQ4_NL_LEVELS, depth, queued)
            self._warm_up()

    def _warm_up(self) -> None:
        """Compiles everything that reads need, by reading a row; leaves no trace in cache and counters."""
        try:
            self.fetch(np.zeros((1, self.geometry.heads), np.int64))
        except BaseException:
            self.reader.close()
            raise
        self._keys.fill(-1)
        self._stats = NgramStats(self.mode)

    @property
    def stats(self) -> NgramStats:
        """Counters; those of reads that ended meanwhile are in."""
        with self._lock:
            self._sweep()
            return self._stats

    @property
    def cache_bytes(self) -> int:
        """Memory of the row cache, and of the reader's pages if there is one."""
        return sum(part.nbytes for part in self._cache) + (reader_bytes(self.reader.depth) if self.reader else 0)

    def row_ids(self, tokens: np.ndarray, prev1: int, prev2: int) -> np.ndarray:
        """(T, heads) int64 row ids of a window.

        tokens (T,) integers; prev1 and prev2 are the tokens one and two places before tokens[0], negative before the
        start of the sequence. BadArgument for a token the hash cannot take.
        """
        tokens = _integers(tokens, 1, "tokens of the n-gram hash", "(T,)")
        prev1, prev2, limit, g = int(prev1), int(prev2), self._token_limit, self.geometry
        if max(prev1, prev2) >= limit:
            raise BadArgument("a token before the window", found=max(prev1, prev2), needed=f"below {limit}")
        out = np.empty((tokens.size, g.heads), np.int64)
        bad = (hash_few if out.size <= MOST_HELD else hash_rows)(
            tokens,
            prev1,
            prev2,
            g.reset_token,
            self._multipliers,
            self._moduli,
            self._offsets,
            g.heads_per_order,
            limit,
            out,
        )
        if bad >= 0:
            raise BadArgument(f"token {bad} of the window", found=int(tokens[bad]), needed=f"0 to {limit - 1}")
        return out

    def issue(self, ids: np.ndarray) -> Ticket:
        """Starts fetching rows: ids (T, heads) integers. Rows in the cache are copied at once."""
        ids = _integers(ids, 2, "n-gram row ids", "(T, heads)")
        with self._lock:
            b, n, reads = self._look_up(ids.reshape(-1))
            if reads and self.reader is not None:
                b.start(n, ids.size, None, None)
                self._post(b)
            elif reads and (self._slow_reads if self._prefetch is None else self._prefetch) and WILL_NEED >= 0:
                prefetch_rows(n, b.unique, b.landed, self._address, self.row_bytes)
        return Ticket(ids.shape, n, reads, b)

    def collect(self, ticket: Ticket, out: np.ndarray) -> None:
        """Waits for the ticket's rows and dequantises them into out, float32 (T, heads * row_width), C order.

        Direct: FileError naming file and offset for a failed read, StrataError after `limit_s`, Closed after `close`.
        """
        T, heads = ticket.shape
        self._check_out(ticket.shape, out)
        with self._lock:
            b = ticket._buffers
            if b is None:
                raise BadArgument("the n-gram ticket was used", found="one that was collected", needed="an open one")
            ticket._buffers = None
        start_ns = time.perf_counter_ns()
        if ticket.reads and self.reader is not None:
            self._wait(b)
        with self._lock:
            if ticket.reads:
                if self.reader is not None:
                    self._sweep()
                    _keep(ticket.n_unique, b.unique, b.landed, *self._cache, b.staging)
                else:
                    read_rows(ticket.n_unique, b.unique, b.landed, self._table, *self._cache, b.staging)
                wait_us = (time.perf_counter_ns() - start_ns) * 1e-3
                self._stats.wait_us += wait_us
                self._stats.wait_us_max = max(self._stats.wait_us_max, wait_us)
                self._slow_reads = wait_us > SLOW_READ_US * ticket.reads
            self._spread(b.staging, b.index[: T * heads], ticket.n_unique, out.reshape(T * heads, self.row_width))
            self._give_back(b)

    def fetch(self, ids: np.ndarray) -> np.ndarray:
        """`issue` and `collect` in one call: (T, heads) ids -> new float32 (T, heads * row_width)."""
        out = np.empty((len(ids), self.geometry.width), np.float32)
        self.collect(self.issue(ids), out)
        return out

    def drop(self, ticket: Ticket) -> None:
        """Gives a ticket up that is not wanted any more; reads that have not begun are left out."""
        with self._lock:
            b, ticket._buffers = ticket._buffers, None
            if b is not None and b in self._in_flight:
                b.job[CANCELLED] = 1

    def deliver(self, ids: np.ndarray, out: np.ndarray, words: np.ndarray) -> None:
        """Starts filling `out` and returns: words[1] becomes words[0] when all rows are there, its negative if not.

        ids (T, heads) integers; out float32 (T, heads * row_width), C order; words (2,) int64, words[0] above that of
        every earlier call. Both must live until then, or until `close`. Mapped tables, and rows of a type without a
        compiled dequantiser, are there when this returns. `failed` says why rows did not come.

        Deliveries end in the order of their calls, so one that comes late cannot spoil the rows of a newer one.
        """
        if self.reader is None or self._kind < 0:
            self.collect(self.issue(ids), out)
            words[1] = words[0]
            return
        ids = _integers(ids, 2, "n-gram row ids", "(T, heads)")
        self._check_out(ids.shape, out)
        with self._lock:
            b, n, reads = self._look_up(ids.reshape(-1))
            if reads or any(other.delivered for other in self._in_flight):
                b.start(n, ids.size, out, words)
                self._delivered = b
                self._post(b)
                return
            self._spread(b.staging, b.index[: ids.size], n, out.reshape(ids.size, self.row_width))
            self._give_back(b)
            words[1] = words[0]

    def failed(self, message: str, waited_ms: int = 0) -> StrataError:
        """The error for a window whose rows of the last `deliver` did not come; waited_ms: 0 unless it gave up."""
        b = self._delivered
        if b is None:
            found = f"none after {waited_ms} ms" if waited_ms else "none"
            return StrataError(message, found=found, needed="all rows of the window", advice=DISK)
        if waited_ms:
            found = f"{b.job[READS]} of {b.job[N_PAGES]} pages of '{self.reader.path}' after {waited_ms} ms"
            return StrataError(message, found=found, needed="all", advice=DISK)
        return self._failure(b, message)

    def close(self) -> None:
        """Stops reads and ends the reader's threads; open tickets fail. Does nothing for a mapped table."""
        if self.reader is not None:
            with self._lock:
                for b in self._in_flight:
                    b.job[CANCELLED] = 1
            self.reader.close()

    # ---- direct reads

    def _post(self, b: Buffers) -> None:
        b.issued_ns = time.perf_counter_ns()
        self.reader.post(b.job)
        self._in_flight.append(b)

    def _sweep(self) -> None:
        """Counts jobs that have ended, and takes rows that were delivered into the cache."""
        for b in [b for b in self._in_flight if b.state != RUNNING]:
            self._in_flight.remove(b)
            stats, job = self._stats, b.job
            stats.pages += int(job[READS])
            stats.page_dedup += int(job[N_ENTRIES] - job[N_PAGES])
            read_us = (int(job[FINISHED_NS]) - b.issued_ns) * 1e-3
            stats.read_us += read_us
            stats.read_us_max = max(stats.read_us_max, read_us)
            stats.errors += b.state == FAILED
            if b.delivered:
                if b.state == LANDED_ALL:
                    _keep(b.n_unique, b.unique, b.landed, *self._cache, b.staging)
                self._give_back(b)

    def _wait(self, b: Buffers) -> None:
        end = time.monotonic() + self.limit_s
        while (state := wait_for(b.job.ctypes.data, 20_000)) == RUNNING:
            if time.monotonic() > end:
                found = f"{b.job[READS]} of {b.job[N_PAGES]} pages of '{self.reader.path}' after {self.limit_s:g} s"
                raise StrataError("no n-gram rows within the limit", found=found, needed="all", advice=DISK)
        if state == FAILED:
            raise self._failure(b, "n-gram rows could not be read")

    def _failure(self, b: Buffers, message: str) -> StrataError:
        """The error that a failed job stands for."""
        error, at, path = int(b.job[ERROR]), int(b.job[ERROR_AT]), self.reader.path
        if error == SHORT:
            found, advice = f"{b.job[ERROR_BYTES]} bytes", "The file was cut short, or its disk fails."
        elif error > 0:
            found, advice = os.strerror(error), DISK
        else:
            return Closed(f"{message}: reading was stopped", needed="an open table", advice="Load the model again.")
        return FileError(message, found=f"{found} at byte {at} of '{path}'", needed=f"a page of {READ_BYTES} bytes",
                         advice=advice)  # fmt: skip

    # ---- both ways

    def _look_up(self, flat: np.ndarray) -> tuple[Buffers, int, int]:
        """(buffers, unique rows, rows to read) of a ticket, counted; the cache's rows are in the buffers."""
        if self.reader is not None:
            if self.reader.closed:
                raise Closed("the n-gram table was closed", needed="an open one", advice="Load the model again.")
            need(flat.size <= MOST_IDS, "n-gram row ids of one call", found=flat.size, needed=f"up to {MOST_IDS}")
            self._sweep()
        b = self._take(flat.size)
        n = (look_up_few if flat.size <= MOST_HELD else look_up)(
            flat, self.rows, b.places, b.index[: flat.size], b.unique, b.landed, self._keys, self._used, self._cached,
            b.staging, self._counts,
        )  # fmt: skip
        if n < 0:
            self._give_back(b)
            raise FileError(
                "n-gram row outside the table",
                found=f"row {int(flat[-1 - n])}",
                needed=f"0 to {self.rows - 1} ({self.rows} rows)",
            )
        stats, reads = self._stats, int(self._counts[MISSES])
        stats.requests += flat.size
        stats.dedup += flat.size - n
        stats.hits += int(self._counts[HITS])
        stats.reads += reads
        stats.read_bytes += reads * self.row_bytes
        return b, n, reads

    def _check_out(self, shape: tuple[int, int], out: np.ndarray) -> None:
        needed = (shape[0], shape[1] * self.row_width)
        if out.shape != needed or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise BadArgument("n-gram output", found=f"{out.dtype} {out.shape}", needed=f"float32 {needed}, C order")

    def _take(self, n: int) -> Buffers:
        """Buffers for n ids, reused if some of that size are free: after warm-up nothing is allocated."""
        capacity = capacity_of(n)
        free = self._free.get(capacity)
        return free.pop() if free else Buffers(capacity, self.row_bytes, self.reader is not None)

    def _give_back(self, buffers: Buffers) -> None:
        buffers.keeps = ()
        self._free.setdefault(buffers.index.size, []).append(buffers)


def _keep(n: int, *places: np.ndarray) -> None:
    """`keep_rows` of n rows."""
    (keep_few if n <= MOST_HELD else keep_rows)(n, *places)


def _integers(values: np.ndarray, axes: int, what: str, shape: str) -> np.ndarray:
    """`values` as contiguous int64; floats are refused rather than truncated."""
    array = np.asarray(values)
    if array.ndim != axes or (array.dtype.kind not in "iu" and array.size):
        raise BadArgument(f"{what} have another form", found=f"{array.dtype} {array.shape}", needed=f"integers {shape}")
    return np.ascontiguousarray(array, np.int64)


Spread = Callable[[np.ndarray, np.ndarray, int, np.ndarray], None]


def _spreader(block: BlockFormat, half: np.ndarray) -> Spread:
    """spread(staging, index, n_unique, out): row index[i] of `staging`, dequantised, to out[i] (n, row_width)."""
    kind = KINDS.get(block.name)
    if kind is not None:

        def spread(staging: np.ndarray, index: np.ndarray, n: int, out: np.ndarray) -> None:
            few = index.size <= MOST_HELD
            (spread_few if few else spread_rows)(kind, staging, index, half, _IQ4_NL_LEVELS, out)

        return spread

    def through_format(staging: np.ndarray, index: np.ndarray, n: int, out: np.ndarray) -> None:
        np.take(block.dequantise(staging[:n]), index, axis=0, out=out)

    return through_format
