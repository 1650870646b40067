"""Worker pool: chunks of a job are claimed by one atomic add, and join waits for chunks, never for workers.

A worker is a Python daemon thread inside one long nogil call. It polls the ticket for `spin_us`, then sleeps on a
futex. A sleeping or descheduled worker stalls nothing, because the caller claims chunks like everybody else.

Protocol. `ticket = stop << 62 | n_chunks << 31 | next`: one fetch_add claims a chunk and tells how many the job has, so
a claim by a thread that woke late fails by itself (next >= n_chunks). A claimed chunk keeps its job alive: the caller
leaves `dispatch` only when all chunks are counted in DONE, hence JOB words and the ticket are never replaced under a
running chunk. A worker going to sleep reads WAKE_WORD, sets SLEEPERS and then looks at the ticket; the caller writes
the ticket and then looks at SLEEPERS; both are seq_cst, so one of them sees the other. The caller clears SLEEPERS
before it changes WAKE_WORD, so a worker that set the flag in between finds another word than it read and does not
sleep.

Only one job runs at a time. A dispatch from inside a job, from a second thread at the same moment, or after close runs
its chunks one after another on its own caller, with the same results; `stats()` counts these. It is not a pattern to
use: jobs should not dispatch.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref

import numpy as np
from numba import njit

from strata.base.compiled import cached_njit
from strata.base.errors import Closed, StrataError, need
from strata.base.process import OwnProcess
from strata.cpu.cores import MOST_THREADS, core_facts, default_threads, one_cpu_per_core
from strata.cpu.machine_code import (
    call3,
    clock_ns,
    compare_exchange64,
    exact_floats,
    fetch_add32,
    fetch_add64,
    futex_wait,
    futex_wake,
    ld64,
    ld_acquire32,
    ld_acquire64,
    ld_seq_cst64,
    pause,
    set_float_control,
    st64,
    st_seq_cst64,
    yield_cpu,
)

DEFAULT_SPIN_US = 1000.0
"""Longer than the serial ops between two jobs and than a few GPU layers without misses, short enough for idle peace."""

CLOSE_AT_EXIT_S = 5.0
"""How long interpreter exit waits for a running job before it leaves the workers to the end of the process."""

# Byte offsets of the control words. Words written by different threads lie 128 bytes apart: neighbouring cache lines
# are fetched in pairs. The job lies beside the ticket: who claims a chunk holds that line anyway.
TICKET, JOB_FUNCTION, JOB_DESC = 0, 8, 16
DONE = 128
SLEEPERS = 256
WAKE_WORD = 384  # 32 bit, what sleepers wait on
OWNER = 512  # 0 free, 1 a job runs, 2 closed
JOBS, CHUNKS, WORKER_CHUNKS, WAKES = 520, 528, 536, 544  # written by the owner only
SERIAL_JOBS = 640
THREADS, SPIN_NS, YIELD_NS = 768, 776, 784  # written before the workers start, spin also later
CONTROL_BYTES = 896

STOP = 1 << 62
FIELD = (1 << 31) - 1
FREE, RUNNING, CLOSED = 0, 1, 2
YIELD_AFTER_NS = 50_000
"""A thread that found nothing for this long offers its CPU to others before it looks again (about 0.3 us a turn)."""


@njit
def _drain(pool):
    """Run chunks of the current job until none is left; returns how many."""
    mine = 0
    while True:
        ticket = fetch_add64(pool + TICKET, 1)
        chunk = ticket & FIELD
        n_chunks = (ticket >> 31) & FIELD
        if chunk >= n_chunks:
            return mine
        call3(ld64(pool + JOB_FUNCTION), ld64(pool + JOB_DESC), chunk, n_chunks)
        mine += 1


@njit
def _idle(ticket):
    """No chunk to claim and no order to stop."""
    return (ticket & FIELD) >= ((ticket >> 31) & FIELD) and ticket < STOP


@njit
def _sleep(pool):
    """Until the wake word changes; returns at once if there is work."""
    seen = ld_acquire32(pool + WAKE_WORD)
    st_seq_cst64(pool + SLEEPERS, 1)
    if _idle(ld_seq_cst64(pool + TICKET)):
        futex_wait(pool + WAKE_WORD, seen)


@cached_njit
def _worker(pool):
    exact_floats()
    while True:
        turns = 0
        idle_since = 0
        ticket = ld_acquire64(pool + TICKET)
        while _idle(ticket):
            pause()
            turns += 1
            if turns & 31 == 0:
                now = clock_ns()
                if idle_since == 0:
                    idle_since = now
                elif now - idle_since > ld_acquire64(pool + SPIN_NS):
                    _sleep(pool)
                    idle_since = 0
                elif now - idle_since > ld64(pool + YIELD_NS):
                    yield_cpu()
            ticket = ld_acquire64(pool + TICKET)
        if ticket >= STOP:
            return
        mine = _drain(pool)
        # Counted once per job: the job cannot end before, so the claim that failed was still a claim on it.
        if mine:
            fetch_add64(pool + DONE, mine)


@njit
def _wake_sleepers(pool):
    st_seq_cst64(pool + SLEEPERS, 0)
    fetch_add32(pool + WAKE_WORD, 1)
    futex_wake(pool + WAKE_WORD, 0x7FFFFFFF)


@njit
def _run_here(n_chunks, function, desc):
    for chunk in range(n_chunks):
        call3(function, desc, chunk, n_chunks)


@njit
def dispatch(pool, n_chunks, function, desc):
    """Run void function(desc, chunk, n_chunks) for every chunk below n_chunks (< 2^31); returns when all are done.

    pool  address of a pool (`Pool.address`), or 0 for "no pool"
    Writes made before are seen by the chunks, writes of the chunks are seen after. Order and placement are free.
    """
    if n_chunks <= 1 or pool == 0:
        _run_here(n_chunks, function, desc)
        return
    if ld64(pool + THREADS) == 1:
        _run_here(n_chunks, function, desc)
        return
    if compare_exchange64(pool + OWNER, FREE, RUNNING) != FREE:
        fetch_add64(pool + SERIAL_JOBS, 1)
        _run_here(n_chunks, function, desc)
        return
    st64(pool + JOB_FUNCTION, function)
    st64(pool + JOB_DESC, desc)
    st_seq_cst64(pool + DONE, 0)
    st_seq_cst64(pool + TICKET, n_chunks << 31)
    if ld_seq_cst64(pool + SLEEPERS) != 0:
        _wake_sleepers(pool)
        st64(pool + WAKES, ld64(pool + WAKES) + 1)
    mine = _drain(pool)
    turns = 0
    waiting_since = 0
    while ld_acquire64(pool + DONE) != n_chunks - mine:
        pause()
        turns += 1
        if turns & 31 == 0:
            now = clock_ns()
            if waiting_since == 0:
                waiting_since = now
            elif now - waiting_since > ld64(pool + YIELD_NS):
                yield_cpu()  # a worker with a claimed chunk may be waiting for this very CPU
    st64(pool + JOBS, ld64(pool + JOBS) + 1)
    st64(pool + CHUNKS, ld64(pool + CHUNKS) + n_chunks)
    st64(pool + WORKER_CHUNKS, ld64(pool + WORKER_CHUNKS) + n_chunks - mine)
    st_seq_cst64(pool + OWNER, FREE)


@njit
def wake(pool):
    """Get sleeping workers to spin for one spin budget, ahead of work that will come soon."""
    if pool != 0 and ld_seq_cst64(pool + SLEEPERS) != 0:
        _wake_sleepers(pool)


@cached_njit
def _run(pool, n_chunks, function, desc):
    before = exact_floats()
    dispatch(pool, n_chunks, function, desc)
    set_float_control(before)


@cached_njit
def _wake(pool):
    wake(pool)


@cached_njit
def _try_stop(pool):
    """Take the pool for good if no job runs; true when it is closed."""
    if compare_exchange64(pool + OWNER, FREE, CLOSED) == RUNNING:
        return False
    st_seq_cst64(pool + TICKET, STOP)
    _wake_sleepers(pool)
    return True


def _control_words() -> np.ndarray:
    """Control words that live as long as the process.

    An address of them may be baked into a walk list, and a worker may outlive the interpreter's last objects: freeing
    1 KB a pool is not worth either risk. The extra reference keeps the array out of reach of module teardown.
    """
    raw = np.zeros(CONTROL_BYTES + 128, np.uint8)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))
    skip = -raw.ctypes.data % 128
    return raw[skip : skip + CONTROL_BYTES].view(np.int64)


def _close(words: np.ndarray, workers: list[threading.Thread], pid: int, limit_s: float | None) -> bool:
    """Stop and join the workers once no job runs; false if a job still ran after `limit_s`."""
    if os.getpid() != pid:  # a forked child has no workers, and may have inherited a half-done job
        words[OWNER // 8] = CLOSED
        return True
    began = time.monotonic()
    while not _try_stop(words.ctypes.data):
        if limit_s is not None and time.monotonic() - began > limit_s:
            return False
        time.sleep(0.0005)
    for worker in workers:
        worker.join()
    return True


def _closed() -> Closed:
    return Closed("the worker pool was closed", needed="an open one", advice="Load the model again.")


class Pool:
    """Threads that share the chunks of one job at a time; see the module text for the protocol.

    threads        threads of a job, the caller included; None: `default_threads` of this process
    reserve_cores  cores that the default leaves free: 1 beside a GPU, 0 for the CPU backend alone
    pin            bind worker k to the k-th allowed physical core (the caller is left alone)
    spin_us        how long an idle worker polls before it sleeps

    Closing waits for a running job, may be repeated, and happens by itself at exit or when the pool is collected.
    """

    def __init__(
        self,
        threads: int | None = None,
        pin: bool = False,
        spin_us: float = DEFAULT_SPIN_US,
        reserve_cores: int = 1,
    ):
        facts = core_facts()
        if threads is None:
            threads = default_threads(facts, reserve_cores)
        need(isinstance(threads, int) and 1 <= threads <= MOST_THREADS, "threads is out of range", found=threads,
             needed=f"1 to {MOST_THREADS}", advice="None is one thread per physical core.")  # fmt: skip
        cpus = one_cpu_per_core(facts)
        need(not pin or threads <= len(cpus), "pinned threads need a physical core each", found=f"{threads} threads",
             needed=f"at most {len(cpus)}", advice="Use fewer threads or pin=False.")  # fmt: skip
        self.threads = threads
        self._process = OwnProcess()
        self._words = _control_words()
        self._address = self._words.ctypes.data
        self._words[THREADS // 8] = threads
        self._words[YIELD_NS // 8] = YIELD_AFTER_NS
        self.spin_us = spin_us
        workers: list[threading.Thread] = []
        # Before the first worker starts and not at interpreter exit, when it is too late to compile.
        for function in (_worker, _try_stop):
            function.compile("(int64,)")
        self._close = weakref.finalize(self, _close, self._words, workers, os.getpid(), CLOSE_AT_EXIT_S)
        self._workers = workers
        for k in range(1, threads):
            worker = threading.Thread(target=_worker, args=(self._address,), name=f"strata-worker-{k}", daemon=True)
            try:
                worker.start()
                if pin:
                    os.sched_setaffinity(worker.native_id, {cpus[k]})
            except (RuntimeError, OSError) as error:
                self.close()
                raise StrataError(f"worker {k} of the pool did not start", found=str(error),
                                  needed=f"{threads} threads", advice="Use fewer threads.") from error  # fmt: skip
            workers.append(worker)

    @property
    def address(self) -> int:
        """Address of the control words, for `dispatch` and `wake` in compiled code; valid until the process ends."""
        return self._address

    @property
    def closed(self) -> bool:
        return int(self._words[OWNER // 8]) == CLOSED

    @property
    def spin_us(self) -> float:
        """How long an idle worker polls before it sleeps; may be changed at any time."""
        return float(self._words[SPIN_NS // 8]) / 1e3

    @spin_us.setter
    def spin_us(self, value: float) -> None:
        need(0 <= value <= 1e7, "spin_us is out of range", found=value, needed="0 to 1e7")
        self._words[SPIN_NS // 8] = int(value * 1e3)

    def run(self, function: int, desc: int, n_chunks: int) -> None:
        """Run void function(desc, chunk, n_chunks), given by address (or a `chunk` function), for every chunk."""
        self._process.need("the worker pool")
        if self.closed:
            raise _closed()
        need(0 <= n_chunks <= FIELD - 2048, "n_chunks is out of range", found=n_chunks, needed="0 to 2^31 - 2049")
        _run(self._address, int(n_chunks), int(getattr(function, "address", function)), int(desc))

    def wake(self) -> None:
        """Get sleeping workers to poll for one spin budget, ahead of work that will come soon."""
        self._process.need("the worker pool")
        if self.closed:
            raise _closed()
        _wake(self._address)

    def stats(self) -> dict[str, int]:
        """Counts since the start: jobs shared, chunks of them, chunks run by workers, jobs that had to wake a sleeper,
        jobs that ran on their caller alone because another job was running."""
        word = {"jobs": JOBS, "chunks": CHUNKS, "worker_chunks": WORKER_CHUNKS, "wakes": WAKES,
                "serial_jobs": SERIAL_JOBS}  # fmt: skip
        return {name: int(self._words[offset // 8]) for name, offset in word.items()}

    def close(self) -> None:
        """Stop and join the workers after the running job, if there is one. Repeating it does nothing."""
        if _close(self._words, self._workers, os.getpid(), None):
            self._close.detach()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
