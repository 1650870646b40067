"""Experts that a window on another device leaves to the CPU: one record a layer, and requests checked before they run.

A request lies in the mailbox (`strata.base.doorbell`). Ids, weights and decisions are copied out first and checked
there, so what is computed is what was checked, whatever the other side does to its memory. A request that makes no
sense gets a status and touches nothing.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.base.doorbell import CPU, CPU_ENTRIES, HEADER, LAYER, LINK, ROWS, Mailbox
from strata.base.errors import need
from strata.base.program import ERROR_WORDS, EXPERTS_FAILED, OK
from strata.cpu import expert_record as job
from strata.cpu.expert_jobs import run_jobs
from strata.cpu.experts import fill_common, fill_side
from strata.cpu.gemv.table import ActivationLayout
from strata.cpu.lower import Memory
from strata.cpu.machine_code import copy_bytes, ld8, ld32, ld64, st64
from strata.cpu.pool import Pool
from strata.cpu.weights import Weights

# Details of EXPERTS_FAILED.
BAD_LAYER, BAD_ROWS, BAD_DECISION, BAD_EXPERT, BAD_COUNT = range(1, 6)
DETAIL_TEXT = {
    BAD_LAYER: "a layer that the model does not have",
    BAD_ROWS: "more rows than the mailbox holds, or none",
    BAD_DECISION: "an unknown decision",
    BAD_EXPERT: "an expert that the layer does not have",
    BAD_COUNT: "another number of entries than its header says",
}

# The request record, in int64 words: places, limits, and what the last request was.
(MAILBOX, IDS_AT, WEIGHTS_AT, DECISIONS_AT, OWN_IDS, OWN_WEIGHTS, OWN_DECISIONS, MOST_ROWS, K_, E_, LAYERS, ERROR_AT,
 RECORDS, EXPERT_BYTES, EXPERTS_OUT, ENTRIES_OUT, BYTES_OUT, LAYER_OUT) = range(18)  # fmt: skip


@njit(error_model="numpy")
def _failed(detail):
    return np.int64(EXPERTS_FAILED | detail << 8)


@njit(error_model="numpy")
def _take(r, rows):
    """Copy a request's small parts and check them; returns the status."""
    n = rows * ld64(r + 8 * K_)
    ids, decisions = ld64(r + 8 * OWN_IDS), ld64(r + 8 * OWN_DECISIONS)
    copy_bytes(decisions, ld64(r + 8 * DECISIONS_AT), n)
    copy_bytes(ids, ld64(r + 8 * IDS_AT), 4 * n)
    copy_bytes(ld64(r + 8 * OWN_WEIGHTS), ld64(r + 8 * WEIGHTS_AT), 4 * n)
    entries = 0
    for i in range(n):
        decision = ld8(decisions + i)
        if decision > LINK:
            return _failed(BAD_DECISION)
        if decision == CPU:
            entries += 1
            if not 0 <= ld32(ids + 4 * i) < ld64(r + 8 * E_):
                return _failed(BAD_EXPERT)
    if entries != ld64(ld64(r + 8 * MAILBOX) + HEADER + 8 * CPU_ENTRIES):
        return _failed(BAD_COUNT)
    return np.int64(OK)


@njit(error_model="numpy")
def answer(r):
    """Compute the request that lies in the mailbox of the request record at `r`; returns the status for its reply.

    LAYER_OUT (-1: unknown), EXPERTS_OUT, ENTRIES_OUT and BYTES_OUT then say what was done.
    """
    header = ld64(r + 8 * MAILBOX) + HEADER
    layer, rows = ld64(header + 8 * LAYER), ld64(header + 8 * ROWS)
    st64(r + 8 * LAYER_OUT, -1)
    for word in (EXPERTS_OUT, ENTRIES_OUT, BYTES_OUT):
        st64(r + 8 * word, 0)
    if not 0 <= layer < ld64(r + 8 * LAYERS):
        return _failed(BAD_LAYER)
    st64(r + 8 * LAYER_OUT, layer)
    if not 1 <= rows <= ld64(r + 8 * MOST_ROWS):
        return _failed(BAD_ROWS)
    status = _take(r, rows)
    if status != OK:
        return status
    record = ld64(r + 8 * RECORDS) + layer * job.WORDS * 8
    error = ld64(r + 8 * ERROR_AT)
    for k in range(ERROR_WORDS):
        st64(error + 8 * k, 0)
    st64(record + 8 * job.T_, rows)
    run_jobs(record)
    experts = ld64(record + 8 * job.JOB_COUNT)
    st64(r + 8 * EXPERTS_OUT, experts)
    st64(r + 8 * ENTRIES_OUT, ld64(record + 8 * job.ENTRIES))
    st64(r + 8 * BYTES_OUT, experts * ld64(ld64(r + 8 * EXPERT_BYTES) + 8 * layer))
    return ld64(error) | ld64(error + 24) << 8


def _build(weights: Weights, mailbox: Mailbox, memory: Memory, pool: int, threads: int) -> list[list]:
    """Records of all layers. With a measuring memory only the scratch they need is found out."""
    layout, T, K = weights.experts, mailbox.rows, mailbox.K
    records = []
    for layer in range(layout.n_layers):
        record: list = [0] * job.WORDS
        kinds: dict[str, tuple[ActivationLayout, int]] = {}

        def of_x(kind: ActivationLayout, kinds: dict = kinds) -> tuple[int, int]:
            n_bytes = kind.record_bytes(layout.D)
            if kind.group == 0:
                return 0, n_bytes
            if kind.name not in kinds:
                kinds[kind.name] = kind, memory.scratch(f"miss.records.{kind.name}", T * n_bytes)
            return kinds[kind.name][1], n_bytes

        names, scales = weights.expert_names(layer), weights.expert_scales(layer)
        fill_side(record, job.ROUTED, names, layout.F, layout.D, T * K, weights, memory, of_x, scales)
        fill_common(record, T, K, layout.D, layout.E, memory, pool, threads)
        record[job.BAD] = memory.scratch("miss.bad", 8 * T)
        record[job.LAYER], record[job.X_KINDS] = layer, len(kinds)
        for word, name, size in ((job.IDS, "ids", 4), (job.WEIGHTS, "weights", 4), (job.DECISIONS, "decisions", 1)):
            record[word] = memory.scratch(f"miss.{name}", size * T * K)
        for i, (kind, area) in enumerate(kinds.values()):
            at = job.QUANTISERS + 3 * i
            quantiser = 0 if memory.measuring else kind.quantise_address
            record[at : at + 3] = quantiser, area, kind.record_bytes(layout.D)
        records.append(record)
    return records


def scratch_bytes(weights: Weights, mailbox: Mailbox) -> int:
    """Memory that `MissJobs` allocates for its scratch, without compiling or allocating anything."""
    memory = Memory([], {})
    _build(weights, mailbox, memory, 0, 1)
    return memory.n_bytes


class MissJobs:
    """Requests of a mailbox as jobs of a pool. Everything is allocated and compiled here.

    weights  experts of all layers        mailbox, address  where requests lie and sums go
    Only one request may be computed at a time, by one thread.
    """

    def __init__(self, weights: Weights, mailbox: Mailbox, address: int, pool: Pool):
        layout = weights.experts
        need(mailbox.D == layout.D, "the mailbox has rows of another width", found=mailbox.D, needed=layout.D)
        need(1 <= mailbox.rows and 1 <= mailbox.K <= layout.E, "the mailbox has impossible sizes",
             found=f"{mailbox.rows} rows, {mailbox.K} choices", needed=f"up to {layout.E} choices")  # fmt: skip
        need(address % 64 == 0 and address > 0, "the mailbox is not aligned", found=hex(address), needed="64 bytes")
        self.layers = layout.n_layers
        self._memory = Memory([], {})
        _build(weights, mailbox, self._memory, pool.address, pool.threads)
        self._memory.allocate()
        self._error = np.zeros(ERROR_WORDS, np.int64)
        rows = _build(weights, mailbox, self._memory, pool.address, pool.threads)
        self._keep = weights, pool, rows
        x = address + mailbox.x
        for layer, row in enumerate(rows):
            row[job.X], row[job.TOTAL], row[job.ERROR] = x, address + mailbox.sums, self._error.ctypes.data
            row[job.ROUTED + job.TABLE] = weights.expert_table(layer)
            for part in (job.GATE, job.UP):  # a layout without records: the rows of x themselves
                row[job.ROUTED + part + 2] = row[job.ROUTED + part + 2] or x
        self.records = np.array([[_word(w) for w in row] for row in rows], np.int64)
        self._bytes = np.array([layout.blob_bytes(layer) for layer in range(self.layers)], np.int64)
        first = self.records[0]
        self._request = np.array([
            address, address + mailbox.ids, address + mailbox.weights, address + mailbox.decisions,
            first[job.IDS], first[job.WEIGHTS], first[job.DECISIONS], mailbox.rows, mailbox.K, layout.E, self.layers,
            self._error.ctypes.data, self.records.ctypes.data, self._bytes.ctypes.data, 0, 0, 0, -1,
        ], np.int64)  # fmt: skip

    @property
    def address(self) -> int:
        """Address of the request record, for `answer`."""
        return self._request.ctypes.data

    @property
    def n_bytes(self) -> int:
        """Scratch, as `scratch_bytes` prices it."""
        return self._memory.n_bytes


def _word(word: int | np.ndarray) -> int:
    return word.ctypes.data if isinstance(word, np.ndarray) else int(word)
