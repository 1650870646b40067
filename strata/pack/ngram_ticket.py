"""Rows on their way: counters, tickets and the memory behind them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.pack import ngram_jobs as jobs


@dataclass
class NgramStats:
    """Counters since load: requests = dedup + hits + reads once every ticket is collected.

    mode        "mapped" or "direct"
    requests    rows asked for
    dedup       of them, repeats within their window
    hits        of them, served by the row cache
    reads       of them, read from the table; read_bytes their bytes
    wait_us     time `collect` spent until all rows had landed; wait_us_max the longest
    pages       direct: pages read from the disk; page_dedup further rows, or parts of rows, that lay in the same pages
    read_us     direct: time from the issue of a ticket that read until its rows had landed; read_us_max the longest
    errors      direct: tickets whose read failed or was stopped
    """

    mode: str = "mapped"
    requests: int = 0
    dedup: int = 0
    hits: int = 0
    reads: int = 0
    read_bytes: int = 0
    wait_us: float = 0.0
    wait_us_max: float = 0.0
    pages: int = 0
    page_dedup: int = 0
    read_us: float = 0.0
    read_us_max: float = 0.0
    errors: int = 0


class Buffers:
    """Scratch and landing place of one ticket of up to `capacity` ids, a power of two.

    direct: with the record and the scratch of a job of the page reader.
    """

    __slots__ = ("delivered", "index", "issued_ns", "job", "keeps", "landed", "n_unique", "pages", "places", "staging",
                 "unique")  # fmt: skip

    def __init__(self, capacity: int, row_bytes: int, direct: bool = False):
        self.places = np.empty(2 * capacity, np.int32)
        self.index = np.empty(capacity, np.int32)
        self.unique = np.empty(capacity, np.int64)
        self.landed = np.empty(capacity, np.uint8)
        self.staging = np.empty((capacity, row_bytes), np.uint8)
        self.n_unique, self.issued_ns, self.delivered = 0, 0, False
        self.keeps: tuple = ()
        self.job: np.ndarray | None = None
        self.pages: tuple[np.ndarray, ...] = ()
        if direct:
            entries = capacity * jobs.pages_of_row(row_bytes)
            self.pages = (np.empty(capacity, np.int64), np.empty(entries, np.int64),
                          np.empty(entries + 1, np.int32), np.empty(entries, np.int32))  # fmt: skip
            self.job = np.zeros(jobs.JOB_WORDS, np.int64)
            own = (self.unique, self.landed, self.staging, self.index, *self.pages)
            self.job[jobs.UNIQUE : jobs.CAPACITY] = [a.ctypes.data for a in own]
            self.job[jobs.CAPACITY] = entries

    @property
    def state(self) -> int:
        """How far the reader is with the job."""
        return int(self.job[jobs.STATE])

    def start(self, n_unique: int, n_ids: int, out: np.ndarray | None, words: np.ndarray | None) -> None:
        """Fills the job's record in: the ids are looked up. out and words as in `NgramTable.deliver`."""
        job = self.job
        self.n_unique = n_unique
        job[jobs.N_ROWS], job[jobs.N_IDS] = n_unique, n_ids
        job[jobs.OUT :] = 0
        self.delivered = words is not None
        self.keeps = (out, words)
        if words is not None:
            job[jobs.OUT], job[jobs.DONE], job[jobs.VALUE] = out.ctypes.data, words.ctypes.data + 8, words[0]


def ticket_bytes(n_ids: int, row_bytes: int, direct: bool) -> int:
    """Memory of a ticket of `n_ids` rows."""
    capacity = capacity_of(n_ids)
    n_bytes = capacity * (8 + 4 + 8 + 1 + row_bytes)
    if direct:
        entries = capacity * jobs.pages_of_row(row_bytes)
        n_bytes += 8 * capacity + 16 * entries + 4 + 8 * jobs.JOB_WORDS
    return n_bytes


LEAST_CAPACITY = 16


def capacity_of(n_ids: int) -> int:
    return max(LEAST_CAPACITY, 1 << (n_ids - 1).bit_length())


def kept_ticket_bytes(n_ids: int, row_bytes: int, direct: bool) -> int:
    """Memory of all tickets of a table that is asked for up to `n_ids` rows at once, with the ids of the largest: one
    of every capacity, since they are kept for later."""
    capacity, n_bytes = capacity_of(n_ids), 8 * n_ids
    while capacity >= LEAST_CAPACITY:
        n_bytes += ticket_bytes(capacity, row_bytes, direct)
        capacity //= 2
    return n_bytes


class Ticket:
    """Rows on their way, between `issue` and `collect`: shape is (T, heads). Collected once; may be dropped instead."""

    __slots__ = ("_buffers", "n_unique", "reads", "shape")

    def __init__(self, shape: tuple[int, int], n_unique: int, reads: int, buffers: Buffers):
        self.shape, self.n_unique, self.reads, self._buffers = shape, n_unique, reads, buffers
