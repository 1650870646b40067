"""Sparse attention, second part: the best blocks of every row."""

from __future__ import annotations

import numpy as np

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, i32, launch, pointer

SUMMED = ((4, 4), (2, 16))
"""Instances of the scores: keys that a warp scores at once, and pairs of row and head for each of them."""
MOST_HEADS = SUMMED[-1][1]
MOST_BUDGET = 1024
"""Blocks of cells that can be chosen: a thread of the selection counts for one."""
KEPT = (8, 32)
"""Instances of the selection: scores that a thread keeps in registers."""
SOURCE = Source(
    "qsa_select.cu", (*(f"qsa_scores<{k}, {n}>" for k, n in SUMMED), *(f"qsa_select<{n}>" for n in KEPT))
)
SCORE_THREADS, SELECT_THREADS = 256, 1024
MOST_SCORE_BLOCKS = 528
"""Thread blocks for the scores: the grid is fixed, the number of blocks of cells is not."""


def score_bytes(T: int, context: int, block: int) -> int:
    """Bytes of the scratch for scores."""
    return 4 * T * (context // block)


def select(scores: int, pos: int, blocks: int, rows: int, block: int, budget: int, most: int) -> list[Launch]:
    """blocks (rows, budget) int32 from scores (rows, most); row r is that of position *pos + r."""
    need(budget <= MOST_BUDGET, "blocks of cells to choose", found=budget, needed=f"at most {MOST_BUDGET}")
    kept = next((n for n in KEPT if n * SELECT_THREADS >= most), KEPT[-1])
    args = (pointer(scores), pointer(pos), pointer(blocks), i32(block), i32(budget), i32(most))
    return [launch(SOURCE, f"qsa_select<{kept}>", rows, SELECT_THREADS, *args)]


def qsa_select(
    iq: int, keys_slot: int, pos: int, blocks: int, scores: int, T: int, heads: int, dim: int, block: int, budget: int,
    context: int, error: int, where: np.uint64,
) -> list[Launch]:  # fmt: skip
    """blocks (T, budget) int32 ascending, from iq (T, heads, dim) and the pooled keys (context / block, dim).

    scores: scratch of score_bytes. A row that sees no more complete blocks than `budget` gets them all.
    """
    need(1 <= heads <= MOST_HEADS, "heads of the indexer", found=heads, needed=f"1 to {MOST_HEADS}")
    most = context // block
    keys, pairs = next((k, n) for k, n in SUMMED if n >= min(T * heads, MOST_HEADS))
    grid = min(MOST_SCORE_BLOCKS, max(1, -(-most * 32 // (keys * SCORE_THREADS))))
    args = (pointer(iq), pointer(keys_slot), pointer(pos), pointer(scores), i32(T), i32(heads), i32(dim), i32(block),
            i32(budget), i32(most), pointer(error), where)  # fmt: skip
    shared_bytes = 4 * T * heads * dim
    scored = launch(SOURCE, f"qsa_scores<{keys}, {pairs}>", grid, SCORE_THREADS, *args, shared_bytes=shared_bytes)
    return [scored, *select(scores, pos, blocks, T, block, budget, most)]
