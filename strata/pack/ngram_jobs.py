"""Compiled threads of the page reader: one that serves jobs in order and hands the disk many pages at a time.

Where the system has queues for reads (Linux AIO), that thread fills one by itself: no other thread has to wake for a
read. Elsewhere workers read one page each. Threads talk through pipes, so that none of them needs the interpreter's
lock while it works or waits:

    commands  8 bytes, the address of a job        to `serve_jobs`
    requests  16 bytes, job and page               to whichever worker is free
    results   16 bytes, page and how it ended      back to `serve_jobs`

Records are shorter than a pipe's atomic size, and all of a pipe are equally long, so a read takes whole ones. A closed
pipe ends its readers. A job is one ticket: an int64 record of addresses and counts, indexed by the names below.
"""

from __future__ import annotations

import errno

import numpy as np

from strata.base.addresses import clock_ns, f32_view2, i32_view, i64_view, ld_acquire64, st_release64, u8_view2
from strata.base.compiled import cached_njit
from strata.pack.ngram_rows import spread_bytes, spread_f16, spread_iq4_nl, spread_q8_0
from strata.pack.ngram_words import EINTR, completed, last_error, read_at, receive, send, sleep_us, submit

READ_BYTES = 4096
"""Bytes of one read: the smallest that every disk's unbuffered reads allow."""

SLOT_BITS = 24
MOST_IDS = 1 << SLOT_BITS
"""Row ids of one job."""

# fmt: off
(N_ROWS, N_IDS, UNIQUE, LANDED, STAGING, INDEX, ORDER, PAGES, FIRST, ENTRIES, CAPACITY, OUT, DONE, VALUE,
 STATE, CANCELLED, N_PAGES, N_ENTRIES, READS, ERROR, ERROR_AT, ERROR_BYTES, FINISHED_NS, JOB_WORDS) = range(24)
"""A job. Addresses: UNIQUE of int64 row ids (N_ROWS), LANDED of uint8, STAGING of rows, INDEX of int32 (N_IDS), scratch
ORDER PAGES (int64) FIRST ENTRIES (int32; CAPACITY of them), OUT of float32 rows or 0, DONE of the word that becomes
VALUE or -VALUE, or 0. Then how far it is: STATE below, pages and rows in them, pages read, the first failure (errno, or
SHORT; the offset in the file; bytes read), and when it ended."""

(FD, TABLE_OFFSET, ROW_BYTES, FILE_BYTES, DEPTH, KIND, OUT_WIDTH, BUFFERS, QUEUE, LATENCY_US, FAIL_AT, SHORT_AT,
 READS_ASKED, SPEC_WORDS) = range(14)
"""What all jobs of a table share. BUFFERS is the address of DEPTH pages, QUEUE a queue of the system's or 0. The others
put faults in, for tests: a delay of every read, and the number of the read, counted from 1 by READS_ASKED, that fails
or is cut; 0 is never."""
# fmt: on

RUNNING, LANDED_ALL, FAILED = 0, 1, -1
SHORT, STOPPED = -1, -2
"""ERROR besides the system's numbers: fewer bytes than the file should have; cancelled."""

IQ4_NL, Q8_0, F16, BF16, F32 = range(5)
KINDS = {"IQ4_NL": IQ4_NL, "Q8_0": Q8_0, "F16": F16, "BF16": BF16, "F32": F32}
"""Row types that `serve_jobs` dequantises."""

_PAGE_BITS = 48
_PAGE_MASK = (1 << _PAGE_BITS) - 1
_FAIL, _CUT = 1, 2
_EIO, _EAGAIN = errno.EIO, errno.EAGAIN

_IOCB_WORDS, _EVENT_WORDS = 8, 4
SCRATCH_WORDS = _IOCB_WORDS + 1 + _EVENT_WORDS + 2
"""Scratch of `serve_jobs` for every read in flight."""


def pages_of_row(row_bytes: int) -> int:
    """Most pages that a row touches."""
    return (row_bytes + READ_BYTES - 2) // READ_BYTES + 1


@cached_njit
def plan_pages(n, unique, landed, offset, row_bytes, order, pages, first, entries):
    """Which pages of the file hold the rows that have not landed, each page once and in the file's order.

    pages    out: page numbers in the file; of the rows entries[first[p] : first[p + 1]] of `unique` a part lies in p
    order    scratch, int64 (n,); entries holds `pages_of_row` places a row
    Returns (pages, rows in them).
    """
    m = 0
    for i in range(n):
        if not landed[i]:
            order[m] = unique[i] << SLOT_BITS | i
            m += 1
    order[:m].sort()
    n_pages, n_entries, last = 0, 0, np.int64(-1)
    for j in range(m):
        start = offset + (order[j] >> SLOT_BITS) * row_bytes
        for page in range(start // READ_BYTES, (start + row_bytes - 1) // READ_BYTES + 1):
            if page != last:
                last = page
                pages[n_pages] = page
                first[n_pages] = n_entries
                n_pages += 1
            entries[n_entries] = order[j] & (MOST_IDS - 1)
            n_entries += 1
    first[n_pages] = n_entries
    return n_pages, n_entries


@cached_njit
def take_page(job, p, buffer, got, fault, spec):
    """Copies the rows of page p of a job to where it wants them. got: bytes read to `buffer`, or a negative errno.

    Returns 0, an errno, or SHORT - n for n bytes where the file should have more.
    """
    start = i64_view(job[PAGES], p + 1)[p] * READ_BYTES
    wanted = min(READ_BYTES, spec[FILE_BYTES] - start)
    if fault == _FAIL:
        return np.int64(_EIO)
    if fault == _CUT:
        got = min(got, wanted // 2)
    if got < 0:
        return -got
    if got < wanted:
        return SHORT - got
    row_bytes, page = spec[ROW_BYTES], u8_view2(buffer, 1, READ_BYTES)[0]
    first = i32_view(job[FIRST], p + 2)
    entries = i32_view(job[ENTRIES], first[p + 1])
    unique = i64_view(job[UNIQUE], job[N_ROWS])
    staging = u8_view2(job[STAGING], job[N_ROWS], row_bytes)
    for e in range(first[p], first[p + 1]):
        row_start = spec[TABLE_OFFSET] + unique[entries[e]] * row_bytes - start
        for b in range(max(row_start, 0), min(row_start + row_bytes, READ_BYTES)):
            staging[entries[e], b - row_start] = page[b]
    return np.int64(0)


@cached_njit
def note_failure(job, p, status):
    """Names page p as the reason why a job failed; status as of `take_page`."""
    job[ERROR] = status if status > 0 else SHORT
    job[ERROR_AT] = i64_view(job[PAGES], p + 1)[p] * READ_BYTES
    job[ERROR_BYTES] = SHORT - status if status < 0 else 0


@cached_njit
def next_fault(spec):
    """Counts a read; the fault that it shall have, or 0."""
    spec[READS_ASKED] += 1
    if spec[READS_ASKED] == spec[FAIL_AT]:
        return _FAIL
    if spec[READS_ASKED] == spec[SHORT_AT]:
        return _CUT
    return 0


@cached_njit
def be_slow(spec):
    """Sleeps for the latency that is put in; it ends early when that is taken back."""
    waited = 0
    while waited < spec[LATENCY_US]:
        us = min(spec[LATENCY_US] - waited, 1000)
        sleep_us(us)
        waited += us


@cached_njit
def read_pages(requests, results, buffer, words, spec):
    """A worker: reads pages and copies their rows to where the job wants them, until `requests` is closed.

    buffer  address of one page, aligned to it; words (4,) int64 scratch; spec (SPEC_WORDS,) int64
    """
    record = words.ctypes.data
    while receive(requests, record, 16) == 16:
        job = i64_view(words[0], JOB_WORDS)
        p, fault = words[1] & _PAGE_MASK, words[1] >> _PAGE_BITS
        start = i64_view(job[PAGES], p + 1)[p] * READ_BYTES
        be_slow(spec)
        got = read_at(spec[FD], buffer, READ_BYTES, start)
        if got < 0:
            got = -last_error()
        words[2], words[3] = p, take_page(job, p, buffer, got, fault, spec)
        send(results, record + 16, 16)


@cached_njit
def _prepare(record, slot, page, spec):
    """Writes the system's record (an iocb) for reading a page of the file into the buffer of a slot."""
    record[:] = 0
    record[0] = slot
    record[2] = spec[FD] << 32  # above the code of a plain read, which is 0
    record[3], record[4], record[5] = spec[BUFFERS] + slot * READ_BYTES, READ_BYTES, page * READ_BYTES


@cached_njit
def _submit_all(queue, n, pointers):
    """Gives n prepared reads to the queue: (how many it took, errno or 0)."""
    done = 0
    while done < n:
        taken = submit(queue, n - done, pointers[done:].ctypes.data)
        if taken > 0:
            done += taken
        elif last_error() != EINTR:
            return done, last_error()
    return done, np.int64(0)


@cached_njit
def _read_queued(at, spec, words):
    """Reads the pages of a job through the system's queue; False after a failure, which the job then names."""
    job, depth = i64_view(at, JOB_WORDS), spec[DEPTH]
    pointers, events = words[_IOCB_WORDS * depth :], words[(_IOCB_WORDS + 1) * depth :]
    free, page_of = words[(SCRATCH_WORDS - 2) * depth :], words[(SCRATCH_WORDS - 1) * depth :]
    for slot in range(depth):
        free[slot] = slot
    pages = i64_view(job[PAGES], job[N_PAGES])
    n_pages, asked, back, n_free, good = job[N_PAGES], 0, 0, depth, True
    while back < asked or (good and asked < n_pages):
        more = min(n_free, n_pages - asked) if good else 0
        for i in range(more):
            slot = free[n_free - 1 - i]
            record = words[_IOCB_WORDS * slot : _IOCB_WORDS * (slot + 1)]
            _prepare(record, slot, pages[asked + i], spec)
            page_of[slot] = asked + i
            pointers[i] = record.ctypes.data
        done, error = _submit_all(spec[QUEUE], more, pointers)
        asked, n_free = asked + done, n_free - done
        if error and (error != _EAGAIN or asked == back):
            good = False
            note_failure(job, asked, error)
        if asked == back:
            break
        be_slow(spec)
        got = completed(spec[QUEUE], depth, events.ctypes.data)
        if got < 0:
            note_failure(job, back, last_error())
            return False
        for i in range(got):
            slot = events[_EVENT_WORDS * i]
            buffer, p = spec[BUFFERS] + slot * READ_BYTES, page_of[slot]
            status = take_page(job, p, buffer, events[_EVENT_WORDS * i + 2], next_fault(spec), spec)
            free[n_free] = slot
            n_free += 1
            back += 1
            if status and good:
                good = False
                note_failure(job, p, status)
        job[READS] = back
        if good and ld_acquire64(at + 8 * CANCELLED):
            good = False
            job[ERROR] = STOPPED
    return good


@cached_njit
def _read_by_workers(at, requests, results, spec, words):
    """Reads the pages of a job through the workers; False after a failure, which the job then names."""
    job = i64_view(at, JOB_WORDS)
    record, n_pages, asked, back, good = words.ctypes.data, job[N_PAGES], 0, 0, True
    while back < asked or (good and asked < n_pages):
        more = min(spec[DEPTH] - (asked - back), n_pages - asked) if good else 0
        for i in range(more):
            words[2 * i] = at
            words[2 * i + 1] = asked + i | next_fault(spec) << _PAGE_BITS
        if more:
            send(requests, record, 16 * more)
            asked += more
        got = receive(results, record, 16 * spec[DEPTH])
        if got <= 0:
            job[ERROR] = STOPPED
            return False
        for i in range(got // 16):
            back += 1
            if words[2 * i + 1] and good:
                good = False
                note_failure(job, words[2 * i], words[2 * i + 1])
        job[READS] = back
        if good and ld_acquire64(at + 8 * CANCELLED):
            good = False
            job[ERROR] = STOPPED
    return good


@cached_njit
def spread_rows(kind, staging, index, half, levels, out):
    """Dequantises rows index[i] of `staging` to out[i] (n, row_width) float32; half and levels as in `ngram_rows`."""
    if kind == IQ4_NL:
        spread_iq4_nl(staging, index, half, levels, out)
    elif kind == Q8_0:
        spread_q8_0(staging, index, half, levels, out)
    elif kind == F16:
        spread_f16(staging, index, half, levels, out)
    else:
        width = 2 if kind == BF16 else 4
        spread_bytes(staging, index, width, 4 - width, out.view(np.uint8))


@cached_njit
def serve_jobs(commands, requests, results, spec, half, levels, words):
    """Serves jobs one after the other until `commands` is closed; words (SCRATCH_WORDS DEPTH,) int64 scratch.

    A job ends with its done word, if it has one, and then with STATE: after that nothing here touches it any more.
    """
    record = words.ctypes.data
    while receive(commands, record, 8) == 8:
        at = words[0]
        job = i64_view(at, JOB_WORDS)
        n, rows = job[N_ROWS], job[CAPACITY]
        good = ld_acquire64(at + 8 * CANCELLED) == 0
        if good:
            job[N_PAGES], job[N_ENTRIES] = plan_pages(
                n,
                i64_view(job[UNIQUE], n),
                u8_view2(job[LANDED], 1, n)[0],
                spec[TABLE_OFFSET],
                spec[ROW_BYTES],
                i64_view(job[ORDER], n),
                i64_view(job[PAGES], rows),
                i32_view(job[FIRST], rows + 1),
                i32_view(job[ENTRIES], rows),
            )
            if spec[QUEUE]:
                good = _read_queued(at, spec, words)
            else:
                good = _read_by_workers(at, requests, results, spec, words)
        else:
            job[ERROR] = STOPPED
        if good and job[OUT]:
            spread_rows(
                spec[KIND],
                u8_view2(job[STAGING], n, spec[ROW_BYTES]),
                i32_view(job[INDEX], job[N_IDS]),
                half,
                levels,
                f32_view2(job[OUT], job[N_IDS], spec[OUT_WIDTH]),
            )
        job[FINISHED_NS] = clock_ns()
        if job[DONE]:
            st_release64(job[DONE], job[VALUE] if good else -job[VALUE])
        st_release64(at + 8 * STATE, LANDED_ALL if good else FAILED)


@cached_njit
def wait_for(at, most_us):
    """STATE of a job once it is not RUNNING any more, or RUNNING after `most_us`."""
    waited = 0
    state = ld_acquire64(at + 8 * STATE)
    while state == RUNNING and waited < most_us:
        us = min(20 + waited // 8, 200)
        sleep_us(us)
        waited += us
        state = ld_acquire64(at + 8 * STATE)
    return state
