"""Sparse attention, second part: the best blocks of every row."""

from __future__ import annotations

import numpy as np

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, i32, launch, pointer

KEYS_A_WARP, MOST_HEADS = 2, 16
"""Of the scores of any shape: keys that a warp scores at once, and pairs of row and head for each of them."""
MOST_BUDGET = 1024
"""Blocks of cells that can be chosen: the selection has a thread for each."""
MOST_BLOCKS = 1 << 21
"""Blocks of cells that the selection can count."""
SCORES = Source("qsa_scores.cu", (f"qsa_scores<{KEYS_A_WARP}, {MOST_HEADS}>", "qsa_scores_4x128"))
SOURCE = Source("qsa_select.cu", ("qsa_select",))
SCORE_THREADS, SELECT_THREADS = 256, 1024
MOST_SCORE_BLOCKS = 528
"""Thread blocks for the scores: the grid is fixed, the number of blocks of cells is not."""
WIDE_SHAPE, WIDE_ROWS, WIDE_THREADS, WIDE_KEYS = (4, 128), 8, 128, 64
"""Heads and values of a head that have scores of their own, for up to 8 rows; keys of one of their thread blocks."""


def score_bytes(T: int, context: int, block: int) -> int:
    """Bytes of the scratch for scores."""
    return 4 * T * (context // block)


def select(scores: int, pos: int, blocks: int, rows: int, block: int, budget: int, most: int) -> list[Launch]:
    """blocks (rows, budget) int32 from scores (rows, most), 16-byte aligned; row r is that of position *pos + r."""
    need(budget <= MOST_BUDGET, "blocks of cells to choose", found=budget, needed=f"at most {MOST_BUDGET}")
    need(most % 4 == 0 and most <= MOST_BLOCKS, "blocks of cells of a context", found=most,
         needed=f"a multiple of 4, at most {MOST_BLOCKS}")  # fmt: skip
    args = (pointer(scores), pointer(pos), pointer(blocks), i32(block), i32(budget), i32(most))
    return [launch(SOURCE, "qsa_select", rows, SELECT_THREADS, *args)]


def qsa_select(
    iq: int, keys_slot: int, pos: int, blocks: int, scores: int, T: int, heads: int, dim: int, block: int, budget: int,
    context: int, error: int, where: np.uint64, *, wide: bool = True,
) -> list[Launch]:  # fmt: skip
    """blocks (T, budget) int32 ascending, from iq (T, heads, dim) and the pooled keys (context / block, dim).

    scores: scratch of score_bytes. A row that sees no more complete blocks than `budget` gets them all. Without `wide`
    the scores of 4 heads of 128 values are those of any other shape: the same bits.
    """
    most = context // block
    inputs, rest = (pointer(iq), pointer(keys_slot), pointer(pos), pointer(scores), i32(T)), (pointer(error), where)
    if wide and (heads, dim) == WIDE_SHAPE and T <= WIDE_ROWS:
        args = (*inputs, i32(block), i32(budget), i32(most), *rest)
        scored = launch(SCORES, "qsa_scores_4x128", -(-most // WIDE_KEYS), WIDE_THREADS, *args,
                        shared_bytes=4 * T * heads * dim)  # fmt: skip
    else:
        need(1 <= heads <= MOST_HEADS, "heads of the indexer", found=heads, needed=f"1 to {MOST_HEADS}")
        grid = min(MOST_SCORE_BLOCKS, max(1, -(-most * 32 // (KEYS_A_WARP * SCORE_THREADS))))
        args = (*inputs, i32(heads), i32(dim), i32(block), i32(budget), i32(most), *rest)
        scored = launch(SCORES, f"qsa_scores<{KEYS_A_WARP}, {MOST_HEADS}>", grid, SCORE_THREADS, *args,
                        shared_bytes=4 * T * heads * dim)  # fmt: skip
    return [scored, *select(scores, pos, blocks, T, block, budget, most)]
