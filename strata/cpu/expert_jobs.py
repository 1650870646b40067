"""Experts of some rows as chunks of one job: grouped by expert, weights read once for all rows that want them.

Entries (row t, choice j) are grouped by expert in order of first appearance; each group is a job, and the shared
expert, where there is one, is one more job over all rows. The chunks are, in this order: quantise rows of x, copy
together the activation records of jobs whose rows do not lie side by side, products of gate and up, products of down.
What is left is done by whoever finishes last: of gate and up, SwiGLU and the records of the down product; of the down
products of one block of columns, the exact sum q = rint(w y 2^32) as int64 over all experts.

Chunks wait for each other through counters, which saves the joins between phases. They are claimed in order and wait
for chunks with lower numbers only, so the lowest one that is not finished never waits, and everything ends: on any
number of threads, and on one that runs them one after another.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.base.compiled import chunk
from strata.base.program import COMBINE_OVERFLOW, NOT_FINITE
from strata.cpu.error_word import report
from strata.cpu.expert_groups import plan_jobs, quantise_row
from strata.cpu.expert_record import (
    ACT_GATE,
    ACT_UP,
    ALL_JOBS,
    CHUNK,
    COPIED,
    COPY,
    COUNT,
    COUNTERS,
    D_,
    DOWN,
    DOWN_BLOCKS,
    DOWN_STARTS,
    ENTRY_OF,
    ERROR,
    EXPERT,
    FIRST,
    GATE,
    IDS,
    JOB_BAD,
    JOB_COUNT,
    JOB_WORDS,
    JOBS,
    K_,
    LAYER,
    LINE_BYTES,
    N_COPY,
    N_QUANTISE,
    N_UP,
    OUT,
    POOL,
    QUANTISE,
    READY,
    ROUTED,
    ROW_OF,
    SHARED,
    SHARED_GATE,
    SWIGLU,
    T_,
    TABLE,
    TOTAL,
    UP,
    UP_DONE,
    UP_PIECES,
    WEIGHTS,
    WIDTH,
    WORDS,
    G,
    H,
    U,
    Y,
)
from strata.cpu.expert_vectors import add_terms, ask_for
from strata.cpu.float_bits import sigmoid32
from strata.cpu.float_sums import is_finite
from strata.cpu.linear import multiply
from strata.cpu.machine_code import (
    call4,
    call6,
    copy_bytes,
    f32_view,
    fetch_add64,
    i32_view,
    i64_view,
    ld64,
    ld_acquire64,
    ldf32,
    pause,
    st_seq_cst64,
    yield_cpu,
    zero_bytes,
)
from strata.cpu.pool import dispatch

F = np.float32
FIRST_LINES = 64
"""Cache lines that are asked for ahead of a run of rows: what kernels ask for themselves starts behind them."""

UNTIL_YIELD = 1024
"""Turns of waiting before the CPU is offered to others: 20 to 50 us."""


@njit(error_model="numpy")
def run_jobs(a):
    """Experts of the record at `a`, shared with its pool."""
    p = i64_view(a, WORDS)
    n_chunks = plan_jobs(p)
    if n_chunks != 0:
        dispatch(p[POOL], n_chunks, p[CHUNK], a)


@njit(error_model="numpy")
def _await(counter, n):
    """Until the counter is at least n."""
    turns = 0
    while ld_acquire64(counter) < n:
        pause()
        turns += 1
        if turns & (UNTIL_YIELD - 1) == 0:
            yield_cpu()  # who counts may be waiting for this very CPU


@njit(error_model="numpy")
def _job_line(p, j):
    return p[COUNTERS] + (1 + j) * LINE_BYTES


@njit(error_model="numpy")
def _copy(p, j):
    """Bring the records of one job's rows together."""
    job = i64_view(p[JOBS] + j * JOB_WORDS * 8, JOB_WORDS)
    if job[COPY] == 0:
        return
    _await(p[COUNTERS], p[N_QUANTISE])
    row_of = i32_view(p[ROW_OF] + 4 * job[FIRST], job[COUNT])
    for part in range(2):
        m = ROUTED + (GATE if part == 0 else UP)
        if part == 0 or job[ACT_UP] != job[ACT_GATE]:
            n_bytes = p[m + 3]
            for r in range(job[COUNT]):
                copy_bytes(job[ACT_GATE + part] + r * n_bytes, p[m + 2] + row_of[r] * n_bytes, n_bytes)
    st_seq_cst64(_job_line(p, j) + COPIED, 1)


@njit(error_model="numpy")
def _scale(x, scales, e):
    if scales != 0:
        s = ldf32(scales + 4 * e)
        for i in range(x.size):
            x[i] = x[i] * s


@njit(error_model="numpy")
def _activate(p, side, job):
    """All rows of one job: G <- silu(G) * U, then its records for the down product."""
    width, rows = p[side + WIDTH], job[COUNT]
    at = job[FIRST] * width * 4
    g, u = p[side + G] + at, p[side + U] + at
    _scale(f32_view(g, rows * width), p[side + GATE + 4], job[EXPERT])
    _scale(f32_view(u, rows * width), p[side + UP + 4], job[EXPERT])
    call4(p[SWIGLU], g, u, g, rows * width)
    if p[side + QUANTISE] != 0:
        bad = job.ctypes.data + 8 * JOB_BAD
        call6(p[side + QUANTISE], g, width, rows, width * 4, p[side + H] + job[FIRST] * p[side + DOWN + 3], bad)
        if job[JOB_BAD] != 0:
            report(p[ERROR], NOT_FINITE, p[LAYER], job[EXPERT])


@njit(error_model="numpy")
def _up_rows(p, k):
    """Side, job, first and last row of chunk k of gate and up."""
    routed = p[JOB_COUNT] * p[ROUTED + UP_PIECES]
    side, j, piece = ROUTED, p[JOB_COUNT], k - routed
    if k < routed:
        j, piece = k // p[ROUTED + UP_PIECES], k % p[ROUTED + UP_PIECES]
    else:
        side = SHARED
    n, width = p[side + UP_PIECES], p[side + WIDTH]
    return side, j, piece * width // n, (piece + 1) * width // n


@njit(error_model="numpy")
def _gate_up(p, k):
    """Some rows of one job's gate and up matrices. Outputs (entries, width) float32 in G and U."""
    side, j, low, high = _up_rows(p, k)
    n, width = p[side + UP_PIECES], p[side + WIDTH]
    job = i64_view(p[JOBS] + j * JOB_WORDS * 8, JOB_WORDS)
    line = _job_line(p, j)
    if job[COPY] != 0:
        _await(line + COPIED, 1)
    else:
        _await(p[COUNTERS], p[N_QUANTISE])
    weights = i64_view(p[side + TABLE] + job[EXPERT] * 24, 3)
    out = (job[FIRST] * width + low) * 4
    ask_for(weights[1] + low * p[side + UP], FIRST_LINES)  # on its way while gate's rows are multiplied
    for part in range(2):
        m = side + (GATE if part == 0 else UP)
        target = p[side + (G if part == 0 else U)] + out
        multiply(weights[part] + low * p[m], p[m], high - low, job[ACT_GATE + part], p[m + 3], job[COUNT], p[D_],
                 target, width * 4, p[m + 1])  # fmt: skip
    if fetch_add64(line + UP_DONE, 1) == n - 1:
        _activate(p, side, job)
        st_seq_cst64(line + READY, 1)


@njit(error_model="numpy")
def _down_blocks(p, k):
    """Job, first and last block of chunk k of the down products."""
    starts = i32_view(p[DOWN_STARTS] + 4 * k, 2)
    first, n = np.int64(starts[0]), p[DOWN_BLOCKS]
    j = first // n
    return j, first - j * n, np.int64(starts[1]) - j * n


@njit(error_model="numpy")
def _down(p, k):
    """Some blocks of one job's down matrix. Output (entries, D) float32 in OUT."""
    j, first, last = _down_blocks(p, k)
    n = p[DOWN_BLOCKS]
    side = ROUTED if j < p[JOB_COUNT] else SHARED
    job = i64_view(p[JOBS] + j * JOB_WORDS * 8, JOB_WORDS)
    _await(_job_line(p, j) + READY, 1)
    D, m = p[D_], side + DOWN
    low, high = first * D // n, last * D // n
    w = ld64(p[side + TABLE] + job[EXPERT] * 24 + 16) + low * p[m]
    act = p[side + H] + job[FIRST] * p[m + 3]
    multiply(w, p[m], high - low, act, p[m + 3], job[COUNT], p[side + WIDTH],
             p[side + OUT] + (job[FIRST] * D + low) * 4, D * 4, p[m + 1])  # fmt: skip
    for block in range(first, last):
        if fetch_add64(_job_line(p, p[ALL_JOBS] + block), 1) == p[ALL_JOBS] - 1:
            combine(p, block * D // n, (block + 1) * D // n)


@njit(error_model="numpy")
def combine(p, low, high):
    """Columns low to high of every row: the exact sum over its entries, with Y over the shared expert too and as
    float32."""
    T, K, D, n = p[T_], p[K_], p[D_], high - low
    entry_of, ids, weights = i32_view(p[ENTRY_OF], T * K), i32_view(p[IDS], T * K), f32_view(p[WEIGHTS], T * K)
    scales = p[ROUTED + DOWN + 4]
    for t in range(T):
        at = t * D + low
        total, shared = p[TOTAL] + at * 8, p[SHARED + OUT] + at * 4
        terms, fine = 0, True
        for j in range(K):
            i = t * K + j
            if entry_of[i] < 0:
                continue
            if terms == 0:
                zero_bytes(total, 8 * n)
            terms += 1
            s = ldf32(scales + 4 * ids[i]) if scales != 0 else F(1)
            row = p[ROUTED + OUT] + (entry_of[i] * D + low) * 4
            fine = add_terms(total, row, n, weights[i], s) and fine
        if p[Y] != 0:
            if terms == 0:
                zero_bytes(total, 8 * n)
            gate = ldf32(p[SHARED_GATE] + 4 * t)
            fine = is_finite(gate) and fine  # an infinite one would end as a finite sigmoid
            fine = add_terms(total, shared, n, sigmoid32(gate), F(1)) and fine
            y, sums = f32_view(p[Y] + at * 4, n), i64_view(total, n)
            for i in range(n):
                y[i] = F(sums[i]) * F(2.3283064365386963e-10)
        if not fine:
            report(p[ERROR], COMBINE_OVERFLOW, p[LAYER], t)


@chunk
def experts_chunk(a, k, n_chunks):
    """Chunk k of the record at `a`, as the module text orders them."""
    p = i64_view(a, WORDS)
    if k < p[N_QUANTISE]:
        quantise_row(p, k)
        fetch_add64(p[COUNTERS], 1)
        return
    k -= p[N_QUANTISE]
    if k < p[N_COPY]:
        _copy(p, k)
        return
    k -= p[N_COPY]
    if k < p[N_UP]:
        _gate_up(p, k)
    else:
        _down(p, k - p[N_UP])
