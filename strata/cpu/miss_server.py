"""The service that answers a device's requests for experts: one thread, asleep between windows, spinning during one.

Protocol with the host. `begin_window` sets IN_FLIGHT and then looks at SLEEPING; the service, going to sleep, reads
WAKE_WORD, sets SLEEPING and then looks at IN_FLIGHT. Both orders are seq_cst, so one of them sees the other: either the
service finds the window, or the host finds the sleeper. The host clears SLEEPING before it changes WAKE_WORD, and the
service sleeps only while WAKE_WORD is what it read before it set the flag, so a wake-up in between makes it not sleep.
`end_window` clears IN_FLIGHT and then waits until ANSWERING is 0; the service sets ANSWERING and then looks at
IN_FLIGHT before it touches a request. So once `end_window` has returned, the service touches neither mailbox nor
experts until the next window.

Protocol with the device: see `strata.base.doorbell`. A request that was left without a reply is answered late, in the
next window at the latest, with its own number: numbers grow, so nobody takes it for the answer to a later one.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from typing import Any

import numpy as np
from numba import njit

from strata.base.compiled import cached_njit, step
from strata.base.doorbell import REPLY, REQUEST, STATUS, STOP, Mailbox
from strata.base.errors import Closed, StrataError, need
from strata.base.program import EXPERTS_FAILED, OK
from strata.cpu import miss_jobs
from strata.cpu.machine_code import (
    clock_ns,
    exact_floats,
    fetch_add32,
    futex_wait,
    futex_wake,
    ld64,
    ld_acquire32,
    ld_acquire64,
    ld_seq_cst64,
    pause,
    st64,
    st_seq_cst64,
    yield_cpu,
    zero_bytes,
)
from strata.cpu.miss_jobs import MissJobs, answer, scratch_bytes
from strata.cpu.pool import CLOSE_AT_EXIT_S, Pool, wake
from strata.cpu.weights import Weights

TELEMETRY = np.dtype([(name, np.int64) for name in ("start_ns", "end_ns", "experts", "entries", "n_bytes", "requests")])
"""Of a layer in one window: when its request was seen and when its reply was written (monotonic clock; of the last one,
if there were several), distinct experts, entries and bytes of weights that the CPU read (of all together), requests."""

TELEMETRY_ROW_BYTES = TELEMETRY.itemsize

WINDOW_YIELD_NS = 200_000
"""Idle for this long in a window the service offers its CPU to others at every look: longer than a few layers without
misses take, because who gets the CPU may keep it for milliseconds."""

SILENCE, ANSWER_STATUS, DELAY = 1, 2, 3
FAULTS = {"silence": SILENCE, "status": ANSWER_STATUS, "delay": DELAY}

# Byte offsets of the control words. Words written by different threads lie 128 bytes apart.
IN_FLIGHT, STOPPED, ANSWERED = 0, 8, 16  # the host
FAULT, FAULT_VALUE, FAULT_AFTER = 24, 32, 40  # the host, and the service once a fault has happened
SLEEPING = 128
WAKE_WORD = 256  # 32 bit, what the service waits on
ANSWERING = 384  # the service, as the counts
REQUESTS, REPLIES, FAILURES, EXPERTS, ENTRIES, BYTES, BUSY_NS, SLEEPS, LAST_STATUS = range(392, 392 + 72, 8)
MAILBOX, JOBS, TELEMETRY_AT, TELEMETRY_BYTES, POOL = 512, 520, 528, 536, 544  # written before the service starts
CONTROL_BYTES = 640


@njit(error_model="numpy")
def _add(address, n):
    st64(address, ld64(address) + n)


@njit(error_model="numpy")
def _sleep(s):
    """Until the wake word changes; returns at once if a window is in flight or the service is to stop."""
    seen = ld_acquire32(s + WAKE_WORD)
    st_seq_cst64(s + SLEEPING, 1)
    if ld_seq_cst64(s + IN_FLIGHT) == 0 and ld_seq_cst64(s + STOPPED) == 0:
        _add(s + SLEEPS, 1)
        futex_wait(s + WAKE_WORD, seen)
    st_seq_cst64(s + SLEEPING, 0)


@njit(error_model="numpy")
def _wake_service(s):
    if ld_seq_cst64(s + SLEEPING) != 0:
        st_seq_cst64(s + SLEEPING, 0)
        fetch_add32(s + WAKE_WORD, 1)
        futex_wake(s + WAKE_WORD, 1)


@njit(error_model="numpy")
def _note(s, began, ended, status):
    """Counts of one request."""
    jobs = ld64(s + JOBS)
    experts, entries, n_bytes = (
        ld64(jobs + 8 * miss_jobs.EXPERTS_OUT), ld64(jobs + 8 * miss_jobs.ENTRIES_OUT),
        ld64(jobs + 8 * miss_jobs.BYTES_OUT),
    )  # fmt: skip
    layer = ld64(jobs + 8 * miss_jobs.LAYER_OUT)
    if layer >= 0:
        row = ld64(s + TELEMETRY_AT) + layer * TELEMETRY_ROW_BYTES
        st64(row, began)
        st64(row + 8, ended)
        _add(row + 16, experts)
        _add(row + 24, entries)
        _add(row + 32, n_bytes)
        _add(row + 40, 1)
    _add(s + FAILURES, 1 if status != OK else 0)
    _add(s + EXPERTS, experts)
    _add(s + ENTRIES, entries)
    _add(s + BYTES, n_bytes)
    _add(s + BUSY_NS, ended - began)
    st64(s + LAST_STATUS, status)


@njit(error_model="numpy")
def _take_fault(s):
    """The fault that the request at hand is to suffer, or 0."""
    fault = ld_acquire64(s + FAULT)
    if fault == 0:
        return fault
    if ld64(s + FAULT_AFTER) > 0:
        _add(s + FAULT_AFTER, -1)
        return np.int64(0)
    st_seq_cst64(s + FAULT, 0)
    return fault


@njit(error_model="numpy")
def _answer(s, request):
    """Compute one request and reply."""
    mailbox, began = ld64(s + MAILBOX), clock_ns()
    _add(s + REQUESTS, 1)
    fault = _take_fault(s)
    if fault == SILENCE:
        return
    if fault == DELAY:
        until = began + ld64(s + FAULT_VALUE)
        while clock_ns() < until and ld_acquire64(s + STOPPED) == 0:
            yield_cpu()
    status = answer(ld64(s + JOBS))
    if fault == ANSWER_STATUS:
        status = ld64(s + FAULT_VALUE)
    _note(s, began, clock_ns(), status)
    _add(s + REPLIES, 1)
    st64(mailbox + STATUS, status)
    st_seq_cst64(mailbox + REPLY, request)


@cached_njit
def _serve(s):
    exact_floats()
    mailbox = ld64(s + MAILBOX)
    seen = ld_acquire64(mailbox + REPLY)
    turns, idle_since = 0, 0
    while ld_acquire64(s + STOPPED) == 0 and ld_acquire64(mailbox + STOP) == 0:
        if ld_acquire64(s + IN_FLIGHT) == 0:
            _sleep(s)
            idle_since = 0
            continue
        request = ld_acquire64(mailbox + REQUEST)
        if request > seen:
            st_seq_cst64(s + ANSWERING, 1)
            if ld_seq_cst64(s + IN_FLIGHT) != 0:
                _answer(s, request)
                seen = request
            st_seq_cst64(s + ANSWERING, 0)
            idle_since = 0
            continue
        pause()
        turns += 1
        if turns & 31 == 0:
            now = clock_ns()
            if idle_since == 0:
                idle_since = now
            elif now - idle_since > WINDOW_YIELD_NS:
                yield_cpu()


@step
def _begin(s):
    zero_bytes(ld64(s + TELEMETRY_AT), ld64(s + TELEMETRY_BYTES))
    st_seq_cst64(s + IN_FLIGHT, 1)
    _wake_service(s)
    wake(ld64(s + POOL))


@step
def _end(s):
    """ANSWERED becomes 0 if a request is under way: then `_until_idle` has to follow."""
    st_seq_cst64(s + IN_FLIGHT, 0)
    st64(s + ANSWERED, 1 if ld_seq_cst64(s + ANSWERING) == 0 else 0)


@cached_njit
def _until_idle(s):
    turns = 0
    while ld_seq_cst64(s + ANSWERING) != 0:
        pause()
        turns += 1
        if turns & 1023 == 0:
            yield_cpu()


@cached_njit
def _stop(s):
    st_seq_cst64(s + STOPPED, 1)
    st_seq_cst64(ld64(s + MAILBOX) + STOP, 1)
    _wake_service(s)


def _control_words() -> np.ndarray:
    """Control words that live as long as the process: the service may outlive the interpreter's last objects."""
    raw = np.zeros(CONTROL_BYTES + 128, np.uint8)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))
    skip = -raw.ctypes.data % 128
    return raw[skip : skip + CONTROL_BYTES].view(np.int64)


def _close(words: np.ndarray, service: list[threading.Thread], pid: int, limit_s: float | None, keep: list) -> bool:
    """Stop and join the service; false if it still answered after `limit_s`. keep: what it reads and writes."""
    if os.getpid() != pid:  # a forked child has no service
        words[STOPPED // 8] = 1
        return True
    if service and service[0].is_alive():
        _stop(words.ctypes.data)
        service[0].join(limit_s)
        if service[0].is_alive():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(keep))  # rather kept for ever than freed under it
            return False
    words[STOPPED // 8] = 1
    keep.clear()
    return True


class MissServer:
    """Answers requests in a mailbox while a window is in flight. The mailbox's words are zero, or as an earlier service
    left them (with STOP cleared).

    weights   the experts of all layers            pool     shares the work with the service's own thread
    mailbox, address  layout and place of the mailbox; `keep` is held until the service has ended, its memory for one

    `begin_window` before a window is launched, `end_window` after it is finished, from one thread at a time. Closing
    finishes a running request, may be repeated, and happens by itself at exit or when the server is collected. When the
    pool is closed first, the service computes alone.
    """

    def __init__(self, weights: Weights, mailbox: Mailbox, address: int, pool: Pool, keep: Any = None):
        self._jobs = MissJobs(weights, mailbox, address, pool)
        self._telemetry = np.zeros(self._jobs.layers, TELEMETRY)
        self._words = w = _control_words()
        self._address, self._pid = w.ctypes.data, os.getpid()
        self._windows = 0
        w[MAILBOX // 8], w[JOBS // 8], w[POOL // 8] = address, self._jobs.address, pool.address
        w[TELEMETRY_AT // 8], w[TELEMETRY_BYTES // 8] = self._telemetry.ctypes.data, self._telemetry.nbytes
        for function in (_serve, _until_idle, _stop):  # not while a window waits, and not at exit
            function.compile("(int64,)")
        # Both take less than a microsecond. Called with the interpreter's lock held, they need not wait to get it back.
        self._begin, self._end = (ctypes.PYFUNCTYPE(None, ctypes.c_int64)(f.address) for f in (_begin, _end))
        service: list[threading.Thread] = []
        held = [self._jobs, self._telemetry, keep]
        self._close = weakref.finalize(self, _close, w, service, self._pid, CLOSE_AT_EXIT_S, held)
        self._service, self._held = service, held
        thread = threading.Thread(target=_serve, args=(self._address,), name="strata-experts", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.close()
            raise StrataError("the service of the CPU's experts did not start", found=str(error),
                              needed="one thread more", advice="Use fewer threads.") from error  # fmt: skip
        service.append(thread)

    @staticmethod
    def scratch_bytes(weights: Weights, mailbox: Mailbox) -> int:
        """Memory that a server allocates, beside the mailbox; found out without allocating it."""
        return scratch_bytes(weights, mailbox)

    @property
    def n_bytes(self) -> int:
        """Memory that this server allocated."""
        return self._jobs.n_bytes

    @property
    def closed(self) -> bool:
        """Also true after STOP was written into the mailbox, and in a forked child."""
        if self._words[STOPPED // 8] or self._pid != os.getpid():
            return True
        return ctypes.c_int64.from_address(int(self._words[MAILBOX // 8]) + STOP).value != 0

    def begin_window(self) -> None:
        """Wake the service and the pool, and zero the telemetry; requests are answered until `end_window`."""
        if self.closed:
            raise Closed("the service of the CPU's experts was closed", needed="an open one",
                         advice="Load the model again.")  # fmt: skip
        need(self._words[IN_FLIGHT // 8] == 0, "a window is in flight already", found="one", needed="none",
             advice="Call end_window() first.")  # fmt: skip
        self._windows += 1
        self._begin(self._address)

    def end_window(self) -> None:
        """Let the service sleep. On return it touches neither mailbox nor experts until the next window; a request
        under way is finished first. Without a window in flight it does nothing."""
        if self._pid == os.getpid():
            self._end(self._address)
            if self._words[ANSWERED // 8] == 0:
                _until_idle(self._address)

    def telemetry(self) -> np.ndarray:
        """(L,) records of type TELEMETRY of the last window; a copy. Layers that asked for nothing have zeros."""
        return self._telemetry.copy()

    def stats(self) -> dict[str, int]:
        """Counts since the start: windows, requests seen, replies, replies with a status, distinct experts, entries and
        bytes of weights that the CPU read, ns between seeing a request and its reply, times the service went to sleep,
        and the status of the last reply."""
        word = {"requests": REQUESTS, "replies": REPLIES, "failures": FAILURES, "experts": EXPERTS, "entries": ENTRIES,
                "n_bytes": BYTES, "busy_ns": BUSY_NS, "sleeps": SLEEPS, "last_status": LAST_STATUS}  # fmt: skip
        return {"windows": self._windows} | {name: int(self._words[at // 8]) for name, at in word.items()}

    def inject(self, fault: str, value: int = 0, after: int = 0) -> None:
        """For tests: after `after` more requests one suffers a fault.

        silence  no reply    status  a reply with the status `value`    delay  a reply `value` us later
        """
        need(fault in FAULTS, "no such fault", found=repr(fault), needed=", ".join(FAULTS))
        need(value >= 0 and after >= 0, "a fault's numbers are negative", found=(value, after), needed="0 or more")
        if fault == "status":
            value = value or EXPERTS_FAILED
        self._words[FAULT_VALUE // 8] = value * 1000 if fault == "delay" else value
        self._words[FAULT_AFTER // 8] = after
        self._words[FAULT // 8] = FAULTS[fault]

    def close(self) -> None:
        """Stop and join the service, after a request under way. Repeating it does nothing."""
        if _close(self._words, self._service, self._pid, None, self._held):
            self._close.detach()

    def __enter__(self) -> MissServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
