"""Before the experts of some rows run: entries grouped by expert, and the work cut into chunks (`expert_jobs`)."""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.base.doorbell import CPU
from strata.base.program import NOT_FINITE
from strata.cpu.error_word import report
from strata.cpu.expert_record import (
    ACT_GATE,
    ACT_UP,
    ALL_JOBS,
    BAD,
    COPY,
    COUNT,
    COUNTERS,
    D_,
    DECISIONS,
    DOWN,
    DOWN_BLOCKS,
    DOWN_STARTS,
    E_,
    ENTRIES,
    ENTRY_OF,
    ERROR,
    EXPERT,
    FIRST,
    GATE,
    GATHER,
    IDS,
    JOB_BAD,
    JOB_COUNT,
    JOB_WORDS,
    JOBS,
    K_,
    LAYER,
    LEAST,
    LINE_BYTES,
    MOST,
    MOST_BLOCKS,
    MOST_PIECES,
    N_CHUNKS,
    N_COPY,
    N_DOWN,
    N_QUANTISE,
    N_UP,
    QUANTISERS,
    ROUTED,
    ROW,
    ROW_OF,
    SEEN,
    SHARED,
    T_,
    TABLE,
    THREADS,
    UP,
    UP_PIECES,
    WIDTH,
    X_KINDS,
    X,
)
from strata.cpu.gemv.rows import MOST_ROWS
from strata.cpu.machine_code import call6, i32_view, i64_view, ld8, ld64, st64, zero_bytes

LEAST_CHUNK_BYTES, MOST_RUN_BYTES = 16 << 10, 512 << 10
"""Of weights: chunks get smaller where few experts are wanted, but not below 2 us; a run of rows of one matrix starts
with cold lines, so the longer the better."""

MOST_TILE_BYTES = 128 << 10
"""The longest run where rows are more than one kernel takes: it is read again for the others, from the second cache."""

UP_PER_THREAD, MORE_FOR_FEW = 3, 5
"""Chunks of gate and up: down products of other experts cover the time to the last one's end, if there are others."""

BLOCKS_PER_THREAD = 32
"""Of down products. Their chunks are many blocks at first and single ones at the end: the threads end together."""

SERIAL_VALUES = 8192
"""Rows with fewer values in all are quantised by the caller: about 3 us."""


@njit(error_model="numpy")
def _mine(p, i):
    return p[DECISIONS] == 0 or ld8(p[DECISIONS] + i) == CPU


@njit(error_model="numpy")
def _group(p):
    """Fill the job list, the entry of each (row, choice), -1 for those of others, and the row of each entry. Entries
    of a job are consecutive, rows ascending."""
    T, K = p[T_], p[K_]
    ids, jobs = i32_view(p[IDS], T * K), i64_view(p[JOBS], (T * K + 1) * JOB_WORDS)
    entry_of, row_of, seen = i32_view(p[ENTRY_OF], T * K), i32_view(p[ROW_OF], T * K), i32_view(p[SEEN], p[E_])
    n_jobs = 0
    for i in range(T * K):
        if _mine(p, i):
            seen[ids[i]] = -1
    for i in range(T * K):
        if not _mine(p, i):
            continue
        e = ids[i]
        if seen[e] < 0:
            seen[e] = n_jobs
            jobs[n_jobs * JOB_WORDS + EXPERT] = e
            jobs[n_jobs * JOB_WORDS + COUNT] = 0
            n_jobs += 1
        jobs[seen[e] * JOB_WORDS + COUNT] += 1
    first = 0
    for j in range(n_jobs):
        job = jobs[j * JOB_WORDS : (j + 1) * JOB_WORDS]
        job[FIRST] = first
        first += job[COUNT]
        job[COUNT], job[COPY], job[JOB_BAD] = 0, 0, 0
    for i in range(T * K):
        entry_of[i] = -1
        if not _mine(p, i):
            continue
        t = i // K
        job = jobs[seen[ids[i]] * JOB_WORDS : (seen[ids[i]] + 1) * JOB_WORDS]
        if job[COUNT] == 0:
            job[ROW] = t
        elif t != job[ROW] + job[COUNT]:
            job[COPY] = 1
        entry_of[i] = job[FIRST] + job[COUNT]
        row_of[entry_of[i]] = t
        job[COUNT] += 1
    p[JOB_COUNT], p[ALL_JOBS], p[ENTRIES] = n_jobs, n_jobs, first


@njit(error_model="numpy")
def _gather_area(p, part):
    return p[ROUTED + GATHER] + part * p[T_] * p[K_] * p[ROUTED + GATE + 3]


@njit(error_model="numpy")
def _point(p):
    """Point each job at the activation records of its rows; returns whether some have to be copied first."""
    copies = False
    for j in range(p[JOB_COUNT]):
        job = i64_view(p[JOBS] + j * JOB_WORDS * 8, JOB_WORDS)
        copies = copies or job[COPY] != 0
        for part in range(2):
            m = ROUTED + (GATE if part == 0 else UP)
            if part == 1 and p[m + 2] == p[ROUTED + GATE + 2]:
                job[ACT_UP] = job[ACT_GATE]
            elif job[COPY] != 0:
                job[ACT_GATE + part] = _gather_area(p, part) + job[FIRST] * p[m + 3]
            else:
                job[ACT_GATE + part] = p[m + 2] + job[ROW] * p[m + 3]
    return copies


@njit(error_model="numpy")
def _add_shared(p):
    n_jobs = p[JOB_COUNT]
    job = i64_view(p[JOBS] + n_jobs * JOB_WORDS * 8, JOB_WORDS)
    job[EXPERT], job[FIRST], job[COUNT], job[ROW], job[COPY], job[JOB_BAD] = 0, 0, p[T_], 0, 0, 0
    job[ACT_GATE], job[ACT_UP] = p[SHARED + GATE + 2], p[SHARED + UP + 2]
    p[ALL_JOBS] = n_jobs + 1


@njit(error_model="numpy")
def _most(p):
    return p[MOST] if p[T_] <= MOST_ROWS else min(p[MOST], MOST_TILE_BYTES)


@njit(error_model="numpy")
def _up_pieces(p, job_bytes, rows):
    """Chunks of gate and up of one job; each takes a run of rows of both."""
    if p[THREADS] == 1:
        return np.int64(1)
    n_bytes = job_bytes * p[ALL_JOBS] // ((UP_PER_THREAD + MORE_FOR_FEW // p[ALL_JOBS]) * p[THREADS])
    n_bytes = max(p[LEAST], min(2 * _most(p), n_bytes))
    return max(np.int64(1), min(min(rows, MOST_PIECES), -(-job_bytes // n_bytes)))


@njit(error_model="numpy")
def _plan_down(p):
    """Cut the columns into blocks and the blocks of all jobs, one job behind the other, into chunks."""
    job_bytes, threads, n_blocks = p[D_] * p[ROUTED + DOWN], p[THREADS], np.int64(1)
    if threads > 1:
        least = max(p[LEAST], job_bytes * p[ALL_JOBS] // (BLOCKS_PER_THREAD * threads))
        n_blocks = max(n_blocks, min(min(p[D_], MOST_BLOCKS), job_bytes // least))
    total, size = p[ALL_JOBS] * n_blocks, max(np.int64(1), _most(p) * n_blocks // job_bytes)
    starts = i32_view(p[DOWN_STARTS], total + 1)
    at, end, n = np.int64(0), n_blocks, 0
    while at < total:
        while size > 1 and total - at < 2 * threads * size:
            size -= 1
        starts[n] = at
        n += 1
        at = min(at + size, end)
        if at == end:  # of the job
            end += n_blocks
    starts[n] = total
    p[DOWN_BLOCKS], p[N_DOWN] = n_blocks, n


@njit(error_model="numpy")
def quantise_row(p, t):
    """Activation records of row t of x, if it has entries, in every layout that is asked for."""
    K, D, bad = p[K_], p[D_], p[BAD] + t * 8
    if i32_view(p[ENTRY_OF] + 4 * t * K, K).max() < 0:
        return
    st64(bad, 0)
    for i in range(p[X_KINDS]):
        q = QUANTISERS + 3 * i
        call6(p[q], p[X] + t * D * 4, D, 1, D * 4, p[q + 1] + t * p[q + 2], bad)
    if ld64(bad) != 0:
        report(p[ERROR], NOT_FINITE, p[LAYER], t)


@njit(error_model="numpy")
def plan_jobs(p):
    """Group the entries and decide on chunks; p: the record. Returns their number, 0 if there is nothing to do."""
    _group(p)
    copies = _point(p)
    if p[SHARED + TABLE] != 0:
        _add_shared(p)
    p[N_CHUNKS] = 0
    if p[ALL_JOBS] == 0:
        return np.int64(0)
    p[N_QUANTISE] = 0
    if p[X_KINDS] != 0:
        if p[THREADS] > 1 and p[T_] > 1 and p[T_] * p[D_] > SERIAL_VALUES:
            p[N_QUANTISE] = p[T_]
        else:
            for t in range(p[T_]):
                quantise_row(p, t)
    p[N_COPY] = p[JOB_COUNT] if copies else 0
    p[N_UP] = 0
    for side in (ROUTED, SHARED):
        n = p[JOB_COUNT] if side == ROUTED else p[ALL_JOBS] - p[JOB_COUNT]
        if n != 0:
            width = p[side + WIDTH]
            p[side + UP_PIECES] = _up_pieces(p, width * (p[side + GATE] + p[side + UP]), width)
            p[N_UP] += n * p[side + UP_PIECES]
    _plan_down(p)
    p[N_CHUNKS] = p[N_QUANTISE] + p[N_COPY] + p[N_UP] + p[N_DOWN]
    zero_bytes(p[COUNTERS], (1 + p[ALL_JOBS] + p[DOWN_BLOCKS]) * LINE_BYTES)
    return p[N_CHUNKS]
