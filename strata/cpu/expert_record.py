"""The record of the experts of some rows (`strata.cpu.expert_jobs`): int64 words, jobs, counters."""

from __future__ import annotations

MOST_PIECES = 256
"""Chunks of gate and up of one expert."""

MOST_BLOCKS = 64
"""Blocks of columns of the result."""

# The record, in int64 words. Given:
(IDS, WEIGHTS, DECISIONS, SHARED_GATE, Y, TOTAL, T_, E_, K_, D_, ERROR, LAYER, POOL, THREADS, LEAST, MOST, CHUNK,
 SWIGLU, JOBS, ENTRY_OF, ROW_OF, SEEN, COUNTERS, BAD, X, X_KINDS) = range(26)  # fmt: skip
"""ids int32 and weights float32 (T, K); decisions uint8 (T, K) or 0 (all entries count); Y float32 (T, D), or 0: the
int64 sums in TOTAL (T, D) are the result, of rows that have entries. LEAST bytes of a chunk, MOST of a run of rows in
it. X_KINDS quantisers of X float32 (T, D), three words each from QUANTISERS on: quantiser, records, bytes of a record.
"""
QUANTISERS = 26
# Found while grouping:
(JOB_COUNT, ALL_JOBS, ENTRIES, N_QUANTISE, N_COPY, N_UP, N_CHUNKS, DOWN_BLOCKS) = range(32, 40)
ROUTED, SHARED = 40, 64
# Offsets inside ROUTED and SHARED (TABLE = 0: there is none). A projection is five words: bytes a row, kernels,
# activation records of x in its layout, bytes of one record, scales by expert (float32) or 0.
(TABLE, WIDTH, GATE, UP, DOWN, QUANTISE, UP_PIECES, GATHER, G, U, H, OUT) = (
    0, 1, 2, 7, 12, 17, 18, 19, 20, 21, 22, 23,
)  # fmt: skip
# Given: room for the blocks, counted through all jobs, at which chunks of down products start (int32). Found: how many
# of these chunks there are.
(DOWN_STARTS, N_DOWN) = range(88, 90)
WORDS = 90

# A job: expert, first entry, rows, activation address of gate, of up, first row of x, records to copy, error of its h.
(EXPERT, FIRST, COUNT, ACT_GATE, ACT_UP, ROW, COPY, JOB_BAD) = range(8)
JOB_WORDS = 8

# Counters, one line each: rows quantised; one a job; one a block of columns (down products that are done).
LINE_BYTES = 64
UP_DONE, COPIED, READY = 0, 8, 16
"""Of a job: pieces of gate and up that are done; whether its rows are together; whether its h is there."""


def counter_bytes(entries: int) -> int:
    """Bytes of the counters for up to `entries` routed entries."""
    return (1 + entries + 1 + MOST_BLOCKS) * LINE_BYTES


def starts_bytes(entries: int, experts: int) -> int:
    """Bytes of DOWN_STARTS for up to `entries` entries that choose from so many experts."""
    return 4 * ((min(entries, experts) + 1) * MOST_BLOCKS + 1)
