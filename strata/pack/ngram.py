"""The n-gram embedding table: row ids hashed from the last tokens, rows read in two steps, issue and collect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strata.base.errors import BadArgument, FileError, ModelError
from strata.base.geometry import NgramGeometry
from strata.pack.formats import BlockFormat
from strata.pack.gguf_file import GgufFile, TensorInfo
from strata.pack.ngram_rows import (
    HITS,
    MISSES,
    WAYS,
    WILL_NEED,
    hash_rows,
    look_up,
    prefetch_rows,
    read_rows,
    spread_bytes,
    spread_f16,
    spread_iq4_nl,
    spread_q8_0,
)

TABLE_NAME = "per_layer_token_embd.weight"
ORDERS = (2, 3)
SLOW_READ_US = 3.0
"""Rows that take longer than this come from the disk and not from the page cache; a row in memory takes below 1 us."""

_IQ4_NL_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


@dataclass
class NgramStats:
    """Counters since load: requests = dedup + hits + reads once every ticket is collected.

    requests    rows asked for
    dedup       of them, repeats within their window
    hits        of them, served by the row cache
    reads       of them, read from the table; read_bytes their bytes
    wait_us     time `collect` spent until all rows had landed
    """

    requests: int = 0
    dedup: int = 0
    hits: int = 0
    reads: int = 0
    read_bytes: int = 0
    wait_us: float = 0.0


class _Buffers:
    """Scratch and landing place of one ticket of up to `capacity` ids, a power of two."""

    __slots__ = ("index", "landed", "places", "staging", "unique")

    def __init__(self, capacity: int, row_bytes: int):
        self.places = np.empty(2 * capacity, np.int32)
        self.index = np.empty(capacity, np.int32)
        self.unique = np.empty(capacity, np.int64)
        self.landed = np.empty(capacity, np.uint8)
        self.staging = np.empty((capacity, row_bytes), np.uint8)


class Ticket:
    """Rows on their way, between `issue` and `collect`: shape is (T, heads). Collected once; may be dropped instead."""

    __slots__ = ("_buffers", "n_unique", "reads", "shape")

    def __init__(self, shape: tuple[int, int], n_unique: int, reads: int, buffers: _Buffers):
        self.shape, self.n_unique, self.reads, self._buffers = shape, n_unique, reads, buffers


class NgramTable:
    """The table of one model, `geometry.heads` rows a token, read through the file's mapping.

    gguf        the model's file; the table keeps its mapping alive
    geometry    hash constants and sizes, checked against the table's tensor
    cache_rows  bound of the row cache, rounded up to whole sets of 8; 0 switches it off
    prefetch    `issue` asks the system for the pages of missing rows, so that the disk reads them side by side; None:
                as long as the rows of the last `collect` came from the disk (the request costs 1 us a row)

    Errors: ModelError where tensor and geometry do not fit, FileError for a row id outside the table.
    """

    def __init__(
        self,
        gguf: GgufFile,
        geometry: NgramGeometry,
        cache_rows: int = 65536,
        prefetch: bool | None = None,
        name: str = TABLE_NAME,
    ):
        tensor = gguf.info(name)
        _check(tensor, geometry)
        if cache_rows < 0:
            raise BadArgument("cache_rows", found=cache_rows, needed="0 or more")
        self.geometry = geometry
        self.format: BlockFormat = tensor.format
        self.rows, self.row_width, self.row_bytes = tensor.shape[0], tensor.shape[1], tensor.row_bytes
        self.stats = NgramStats()
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
        self._counts = np.zeros(2, np.int64)
        self._free: dict[int, list[_Buffers]] = {}
        self._lock = threading.Lock()
        self._multipliers = np.array(geometry.multipliers, np.uint64)
        self._moduli = np.array(geometry.moduli, np.uint64)
        self._offsets = np.array(geometry.offsets, np.uint64)
        self._token_limit = (2**63 - 1) // max(geometry.multipliers) + 1
        self._spread = _spreader(self.format)

    @property
    def cache_bytes(self) -> int:
        """Memory of the row cache."""
        return self._keys.nbytes + self._used.nbytes + self._hands.nbytes + self._cached.nbytes

    def row_ids(self, tokens: np.ndarray, prev1: int, prev2: int) -> np.ndarray:
        """(T, heads) int64 row ids of a window.

        tokens (T,) integers; prev1 and prev2 are the tokens one and two places before tokens[0], negative before the
        start of the sequence. BadArgument for a token the hash cannot take.
        """
        tokens = _integers(tokens, 1, "tokens of the n-gram hash", "(T,)")
        prev1, prev2, limit, g = int(prev1), int(prev2), self._token_limit, self.geometry
        if max(prev1, prev2) >= limit:
            raise BadArgument("token before the window", found=max(prev1, prev2), needed=f"below {limit}")
        out = np.empty((tokens.size, g.heads), np.int64)
        bad = hash_rows(
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
        flat = ids.reshape(-1)
        with self._lock:
            b = self._take(flat.size)
            n = look_up(
                flat,
                self.rows,
                b.places,
                b.index[: flat.size],
                b.unique,
                b.landed,
                self._keys,
                self._used,
                self._cached,
                b.staging,
                self._counts,
            )
            if n < 0:
                self._give_back(b)
                raise FileError(
                    "n-gram row outside the table",
                    found=f"row {int(flat[-1 - n])}",
                    needed=f"0 to {self.rows - 1} ({self.rows} rows)",
                )
            reads = int(self._counts[MISSES])
            if reads and (self._slow_reads if self._prefetch is None else self._prefetch) and WILL_NEED >= 0:
                prefetch_rows(n, b.unique, b.landed, self._address, self.row_bytes)
            stats = self.stats
            stats.requests += flat.size
            stats.dedup += flat.size - n
            stats.hits += int(self._counts[HITS])
            stats.reads += reads
            stats.read_bytes += reads * self.row_bytes
        return Ticket(ids.shape, n, reads, b)

    def collect(self, ticket: Ticket, out: np.ndarray) -> None:
        """Waits for the ticket's rows and dequantises them into out, float32 (T, heads * row_width), C order."""
        T, heads = ticket.shape
        needed = (T, heads * self.row_width)
        if out.shape != needed or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise BadArgument("n-gram output", found=f"{out.dtype} {out.shape}", needed=f"float32 {needed}, C order")
        with self._lock:
            b = ticket._buffers
            if b is None:
                raise BadArgument("n-gram ticket", found="one that was collected", needed="an open one")
            ticket._buffers = None
            if ticket.reads:
                start_ns = time.perf_counter_ns()
                read_rows(
                    ticket.n_unique,
                    b.unique,
                    b.landed,
                    self._table,
                    self._keys,
                    self._used,
                    self._hands,
                    self._cached,
                    b.staging,
                )
                wait_us = (time.perf_counter_ns() - start_ns) * 1e-3
                self.stats.wait_us += wait_us
                self._slow_reads = wait_us > SLOW_READ_US * ticket.reads
            self._spread(b.staging, b.index[: T * heads], ticket.n_unique, out.reshape(T * heads, self.row_width))
            self._give_back(b)

    def fetch(self, ids: np.ndarray) -> np.ndarray:
        """`issue` and `collect` in one call: (T, heads) ids -> new float32 (T, heads * row_width)."""
        out = np.empty((len(ids), self.geometry.width), np.float32)
        self.collect(self.issue(ids), out)
        return out

    def _take(self, n: int) -> _Buffers:
        """Buffers for n ids, reused if some of that size are free: after warm-up nothing is allocated."""
        capacity = 1 << max(4, (n - 1).bit_length())
        free = self._free.get(capacity)
        return free.pop() if free else _Buffers(capacity, self.row_bytes)

    def _give_back(self, buffers: _Buffers) -> None:
        self._free.setdefault(buffers.index.size, []).append(buffers)


def _integers(values: np.ndarray, axes: int, what: str, shape: str) -> np.ndarray:
    """`values` as contiguous int64; floats are refused rather than truncated."""
    array = np.asarray(values)
    if array.ndim != axes or (array.dtype.kind not in "iu" and array.size):
        raise BadArgument(what, found=f"{array.dtype} {array.shape}", needed=f"integers {shape}")
    return np.ascontiguousarray(array, np.int64)


def _check(tensor: TensorInfo, g: NgramGeometry) -> None:
    def fits(condition: bool, what: str, found: object, needed: object) -> None:
        if not condition:
            raise ModelError(f"n-gram table '{tensor.name}': {what}", found=found, needed=needed)

    fits(len(tensor.shape) == 2, "shape", tensor.shape, "(rows, row width)")
    fits(tensor.shape[1] == g.row_width, "row width", tensor.shape[1], g.row_width)
    fits(tensor.format.name != "I8", "row type", "I8", "a floating-point or quantised type")
    fits(g.order in ORDERS, "n-gram order", g.order, " or ".join(map(str, ORDERS)))
    fits(len(g.multipliers) == g.order, "hash multipliers", len(g.multipliers), g.order)
    fits(all(0 < m < 2**63 for m in g.multipliers), "hash multipliers", g.multipliers, "above 0 and below 2^63")
    fits(g.heads > 0, "heads", g.heads, "at least 1")
    fits(len(g.moduli) == g.heads, "hash moduli", len(g.moduli), g.heads)
    fits(len(g.offsets) == g.heads, "hash offsets", len(g.offsets), g.heads)
    fits(min(g.moduli) > 0, "hash moduli", g.moduli, "above 0")
    fits(min(g.offsets) >= 0, "hash offsets", g.offsets, "0 or more")
    end = max(m + o for m, o in zip(g.moduli, g.offsets, strict=True))
    fits(max(end, sum(g.moduli)) <= tensor.shape[0], "rows", tensor.shape[0], f"at least {max(end, sum(g.moduli))}")
    fits(0 <= g.reset_token <= (2**63 - 1) // max(g.multipliers), "reset token", g.reset_token, "one the hash can take")


Spread = Callable[[np.ndarray, np.ndarray, int, np.ndarray], None]


def _spreader(block: BlockFormat) -> Spread:
    """spread(staging, index, n_unique, out): row index[i] of `staging`, dequantised, to out[i] (n, row_width)."""
    compiled = {"IQ4_NL": spread_iq4_nl, "Q8_0": spread_q8_0, "F16": spread_f16}.get(block.name)
    if compiled is not None:
        half = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
        return lambda staging, index, n, out: compiled(staging, index, half, _IQ4_NL_LEVELS, out)
    if block.name in ("BF16", "F32"):
        width = block.block_bytes
        return lambda staging, index, n, out: spread_bytes(staging, index, width, 4 - width, out.view(np.uint8))

    def through_format(staging: np.ndarray, index: np.ndarray, n: int, out: np.ndarray) -> None:
        np.take(block.dequantise(staging[:n]), index, axis=0, out=out)

    return through_format
