"""The routed and the shared expert of a window: grouped by expert, weights read once for all rows that want them.

    y_t = sum over j of w_tj Down_e(silu(Gate_e x) * Up_e x) + sigmoid(shared gate) * the same of the shared expert

Entries (row t, choice j) are grouped by expert in order of first appearance; each group is a job, the shared expert is
one more job over all rows. Three parallel phases (gate and up; activation; down), then the exact combine:
q = rint(w y 2^32) as int64, integer sum, one rounding back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from strata.base.compiled import chunk, step
from strata.base.program import COMBINE_OVERFLOW, NOT_FINITE
from strata.cpu.error_word import report
from strata.cpu.float_bits import rint32, sigmoid32
from strata.cpu.float_sums import is_finite
from strata.cpu.gemv.table import swiglu_rows
from strata.cpu.linear import CHUNK_BYTES, multiply
from strata.cpu.machine_code import (
    call4,
    call6,
    copy_bytes,
    f32_view,
    i32_view,
    i64_view,
    ld64,
    ldf32,
)
from strata.cpu.pool import dispatch

F = np.float32
COMBINE_COLUMNS = 1024
"""Columns of one combine chunk: 11 terms a value, about 5 us."""

# The record of one op, in int64 words. A projection is five words: bytes a row, kernels, activation records of x in its
# layout, bytes of one record, scales by expert (float32) or 0.
(X_RECORDS_DONE, IDS, WEIGHTS, SHARED_GATE, Y, T_, E_, K_, D_, ERROR, LAYER, POOL) = range(12)
ROUTED, SHARED = 12, 40
# Offsets inside ROUTED and SHARED.
(TABLE, WIDTH, GATE, UP, DOWN, QUANTISE, PIECES_UP, PIECES_DOWN, GATHER, G, U, H, OUT) = (
    0, 1, 2, 7, 12, 17, 18, 19, 20, 21, 22, 23, 24,
)  # fmt: skip
if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering
CHUNKS = 68
(CHUNK_GATE_UP, CHUNK_ACTIVATE, CHUNK_DOWN, CHUNK_COMBINE, SWIGLU, COMBINE_PIECES) = range(68, 74)
JOBS, JOB_COUNT, ENTRY_OF, SEEN = 74, 75, 76, 77
WORDS = 78

# A job: expert, first entry, rows, activation address of gate, of up.
JOB_WORDS = 5


@njit(error_model="numpy")
def _group(p):
    """Fill the job list and the entry of each (row, choice). Entries of a job are consecutive, rows ascending."""
    T, K = p[T_], p[K_]
    ids, jobs = i32_view(p[IDS], T * K), i64_view(p[JOBS], (T * K + 1) * JOB_WORDS)
    entry_of, seen = i32_view(p[ENTRY_OF], T * K), i32_view(p[SEEN], p[E_])
    n_jobs = 0
    for i in range(T * K):
        seen[ids[i]] = -1
    for i in range(T * K):
        e = ids[i]
        if seen[e] < 0:
            seen[e] = n_jobs
            jobs[n_jobs * JOB_WORDS] = e
            jobs[n_jobs * JOB_WORDS + 2] = 0
            n_jobs += 1
        jobs[seen[e] * JOB_WORDS + 2] += 1
    first = 0
    for j in range(n_jobs):
        jobs[j * JOB_WORDS + 1] = first
        first += jobs[j * JOB_WORDS + 2]
        jobs[j * JOB_WORDS + 2] = 0
    for i in range(T * K):
        job = seen[ids[i]] * JOB_WORDS
        entry_of[i] = jobs[job + 1] + jobs[job + 2]
        jobs[job + 2] += 1
    return n_jobs


@njit(error_model="numpy")
def _gather(p, n_jobs):
    """Point each job at the activation records of its rows; rows that do not lie side by side are copied together."""
    T, K = p[T_], p[K_]
    entry_of, jobs = i32_view(p[ENTRY_OF], T * K), i64_view(p[JOBS], (n_jobs + 1) * JOB_WORDS)
    for side in range(2):
        at = ROUTED + (GATE if side == 0 else UP)
        records, n_bytes = p[at + 2], p[at + 3]
        area = p[ROUTED + GATHER] + side * T * K * p[ROUTED + GATE + 3]
        if T == 1:
            for j in range(n_jobs):
                jobs[j * JOB_WORDS + 3 + side] = records
        elif side == 1 and records == p[ROUTED + GATE + 2]:
            for j in range(n_jobs):
                jobs[j * JOB_WORDS + 4] = jobs[j * JOB_WORDS + 3]
        else:
            for i in range(T * K):
                copy_bytes(area + entry_of[i] * n_bytes, records + (i // K) * n_bytes, n_bytes)
            for j in range(n_jobs):
                jobs[j * JOB_WORDS + 3 + side] = area + jobs[j * JOB_WORDS + 1] * n_bytes


@njit(error_model="numpy")
def _add_shared(p, n_jobs):
    job = i64_view(p[JOBS] + n_jobs * JOB_WORDS * 8, JOB_WORDS)
    job[0], job[1], job[2] = 0, 0, p[T_]
    job[3], job[4] = p[SHARED + GATE + 2], p[SHARED + UP + 2]


@step
def experts(a):
    """Record: WORDS int64, as laid out at the top of this file."""
    p = i64_view(a, WORDS)
    n_jobs = _group(p)
    _gather(p, n_jobs)
    _add_shared(p, n_jobs)
    p[JOB_COUNT] = n_jobs
    pool = p[POOL]
    dispatch(pool, n_jobs * p[ROUTED + PIECES_UP] + p[SHARED + PIECES_UP], p[CHUNK_GATE_UP], a)
    dispatch(pool, n_jobs + 1, p[CHUNK_ACTIVATE], a)
    dispatch(pool, n_jobs * p[ROUTED + PIECES_DOWN] + p[SHARED + PIECES_DOWN], p[CHUNK_DOWN], a)
    dispatch(pool, p[T_] * p[COMBINE_PIECES], p[CHUNK_COMBINE], a)


@njit(error_model="numpy")
def _locate(p, k, pieces_word):
    """Chunk k -> (side, job, piece, pieces)."""
    routed = p[JOB_COUNT] * p[ROUTED + pieces_word]
    if k < routed:
        n = p[ROUTED + pieces_word]
        return ROUTED, k // n, k % n, n
    return SHARED, p[JOB_COUNT], k - routed, p[SHARED + pieces_word]


@chunk
def gate_up_chunk(a, k, n_chunks):
    """Some rows of one job's gate and up matrices. Outputs (entries, width) float32 in G and U."""
    p = i64_view(a, WORDS)
    side, j, piece, n = _locate(p, k, PIECES_UP)
    job = i64_view(p[JOBS] + j * JOB_WORDS * 8, JOB_WORDS)
    width = p[side + WIDTH]
    low, high = piece * width // n, (piece + 1) * width // n
    weights = i64_view(p[side + TABLE] + job[0] * 24, 3)
    out = (job[1] * width + low) * 4
    for part in range(2):
        m = side + (GATE if part == 0 else UP)
        target = p[side + (G if part == 0 else U)] + out
        multiply(weights[part] + low * p[m], p[m], high - low, job[3 + part], p[m + 3], job[2], p[D_], target,
                 width * 4, p[m + 1])  # fmt: skip


@njit(error_model="numpy")
def _scale(x, scales, e):
    if scales != 0:
        s = ldf32(scales + 4 * e)
        for i in range(x.size):
            x[i] = x[i] * s


@chunk
def activate_chunk(a, j, n_jobs):
    """One job: G <- silu(G) * U, then its records for the down product."""
    p = i64_view(a, WORDS)
    side = ROUTED if j < p[JOB_COUNT] else SHARED
    job = i64_view(p[JOBS] + j * JOB_WORDS * 8, JOB_WORDS)
    width, rows = p[side + WIDTH], job[2]
    at = job[1] * width * 4
    g, u = p[side + G] + at, p[side + U] + at
    _scale(f32_view(g, rows * width), p[side + GATE + 4], job[0])
    _scale(f32_view(u, rows * width), p[side + UP + 4], job[0])
    call4(p[SWIGLU], g, u, g, rows * width)
    if p[side + QUANTISE] != 0:
        bad = np.zeros(1, np.int64)
        call6(p[side + QUANTISE], g, width, rows, width * 4, p[side + H] + job[1] * p[side + DOWN + 3], bad.ctypes.data)
        if bad[0] != 0:
            report(p[ERROR], NOT_FINITE, p[LAYER], job[0])


@chunk
def down_chunk(a, k, n_chunks):
    """Some rows of one job's down matrix. Output (entries, D) float32 in OUT."""
    p = i64_view(a, WORDS)
    side, j, piece, n = _locate(p, k, PIECES_DOWN)
    job = i64_view(p[JOBS] + j * JOB_WORDS * 8, JOB_WORDS)
    D, m = p[D_], side + DOWN
    low, high = piece * D // n, (piece + 1) * D // n
    w = ld64(p[side + TABLE] + job[0] * 24 + 16) + low * p[m]
    act = p[side + H] + job[1] * p[m + 3]
    multiply(w, p[m], high - low, act, p[m + 3], job[2], p[side + WIDTH], p[side + OUT] + (job[1] * D + low) * 4,
             D * 4, p[m + 1])  # fmt: skip


@njit(error_model="numpy")
def add_term(total, w, s, y):
    """Add rint(fl(w fl(s y)) 2^32) to each int64 of total; returns False if a term is not below 2^24 in magnitude."""
    fine = True
    for i in range(total.size):
        t = w * (y[i] * s)
        ok = abs(t) < F(16777216.0)  # false for NaN
        fine = fine and ok
        # |t| >= 2^-9 times 2^32 is a whole float32; below, rint32 rounds to one: the conversion is exact either way.
        total[i] += np.int64(rint32((t if ok else F(0)) * F(4294967296.0)))
    return fine


@chunk
def combine_chunk(a, k, n_chunks):
    """Some columns of one row: the exact sum over its routed experts and the shared one, as float32."""
    p = i64_view(a, WORDS)
    T, K, D, pieces = p[T_], p[K_], p[D_], p[COMBINE_PIECES]
    t, piece = k // pieces, k % pieces
    low, high = piece * D // pieces, (piece + 1) * D // pieces
    n = high - low
    entry_of, ids = i32_view(p[ENTRY_OF], T * K), i32_view(p[IDS], T * K)
    weights = f32_view(p[WEIGHTS], T * K)
    total = np.zeros(n, np.int64)
    fine = True
    scales = p[ROUTED + DOWN + 4]
    for j in range(K):
        i = t * K + j
        s = ldf32(scales + 4 * ids[i]) if scales != 0 else F(1)
        row = f32_view(p[ROUTED + OUT] + (entry_of[i] * D + low) * 4, n)
        fine = add_term(total, weights[i], s, row) and fine
    gate = ldf32(p[SHARED_GATE] + 4 * t)
    fine = is_finite(gate) and fine  # an infinite one would end as a finite sigmoid
    fine = add_term(total, sigmoid32(gate), F(1), f32_view(p[SHARED + OUT] + (t * D + low) * 4, n)) and fine
    y = f32_view(p[Y] + (t * D + low) * 4, n)
    for i in range(n):
        y[i] = F(total[i]) * F(2.3283064365386963e-10)
    if not fine:
        report(p[ERROR], COMBINE_OVERFLOW, p[LAYER], t)


def _projection(c: Lowering, x: str, layer: int, name: str, K: int, scales: np.ndarray | None) -> list:
    """Five words of GATE, UP or DOWN; x = "" for the down product, whose records the activation phase makes."""
    info = c.weights.tensors.info(name)
    layout = c.weights.layout(name)
    act, act_bytes = c.records(x, K, layout, layer) if x else (0, layout.record_bytes(K))
    kernels = 0 if c.memory.measuring else c.weights.kernels(info.ggml_type)
    return [info.row_bytes, kernels, act, act_bytes, 0 if scales is None else scales]


def _pieces(weight_bytes: int, n_jobs: int, threads: int) -> int:
    """Chunks of one job in one phase: about 64 KB each, and enough that the threads end together."""
    if threads == 1:
        return 1
    return max(1, -(-weight_bytes // CHUNK_BYTES), -(-3 * threads // n_jobs))


def lower_experts(c: Lowering, op: Op) -> None:
    k, T, x = op.consts, c.T, op.buffers["x"]
    D, K, m = k["D"], k["K"], c.memory
    scales = c.weights.expert_scales(op.layer)
    entries = T * K
    record: list = [0] * WORDS
    record[IDS], record[WEIGHTS], record[SHARED_GATE], record[Y] = (
        c.at(op, port) for port in ("ids", "weights", "shared_gate", "y")
    )
    record[T_], record[E_], record[K_], record[D_] = T, k["E"], K, D
    record[ERROR], record[LAYER], record[POOL] = c.error, op.layer, c.pool
    shared = tuple(op.buffers[f"shared_{part}_w"] for part in ("gate", "up", "down"))
    routed = c.weights.expert_names(op.layer)
    for side, names, width, rows in ((ROUTED, routed, k["F"], entries), (SHARED, shared, k["shared_width"], T)):
        own = "routed" if side == ROUTED else "shared"
        for i, (at, name) in enumerate(zip((GATE, UP, DOWN), names, strict=True)):
            factor = scales[i] if scales is not None and side == ROUTED else None
            source, values = (x, D) if at != DOWN else ("", width)
            record[side + at : side + at + 5] = _projection(c, source, op.layer, name, values, factor)
        layout = c.weights.layout(names[2])
        g = m.scratch(f"experts.{own}.g", rows * width * 4)
        record[side + WIDTH], record[side + G] = width, g
        record[side + U] = m.scratch(f"experts.{own}.u", rows * width * 4)
        record[side + OUT] = m.scratch(f"experts.{own}.out", rows * D * 4)
        h = m.scratch(f"experts.{own}.h", rows * layout.record_bytes(width))
        record[side + H] = h if layout.group else g
        up_bytes = width * (record[side + GATE] + record[side + UP])
        record[side + PIECES_UP] = _pieces(up_bytes, K + 1, c.threads)
        record[side + PIECES_DOWN] = _pieces(D * record[side + DOWN], K + 1, c.threads)
        if not m.measuring:
            record[side + QUANTISE] = layout.quantise_address if layout.group else 0
            record[side + TABLE] = (
                c.weights.expert_table(op.layer)
                if side == ROUTED
                else np.array([[c.weights.tensors.address(n) for n in names]], np.int64)
            )
    gather = entries * (record[ROUTED + GATE + 3] + record[ROUTED + UP + 3])
    record[ROUTED + GATHER] = m.scratch("experts.gather", gather)
    record[JOBS] = m.scratch("experts.jobs", (entries + 1) * JOB_WORDS * 8)
    record[ENTRY_OF], record[SEEN] = m.scratch("experts.entry_of", entries * 4), m.scratch("experts.seen", k["E"] * 4)
    record[COMBINE_PIECES] = max(1, D // COMBINE_COLUMNS)
    if not m.measuring:
        for word, function in ((CHUNK_GATE_UP, gate_up_chunk), (CHUNK_ACTIVATE, activate_chunk),
                               (CHUNK_DOWN, down_chunk), (CHUNK_COMBINE, combine_chunk)):  # fmt: skip
            record[word] = function.address
        record[SWIGLU] = swiglu_rows.address
        c.step(experts, *record)
