"""Sparse attention, second part: the best blocks of every row."""

from __future__ import annotations

import numpy as np

from strata.gpu.launch import Launch, Source, i32, launch, pointer

SOURCE = Source("qsa_select.cu", ("qsa_scores", "qsa_select"))
SCORE_THREADS, SELECT_THREADS = 256, 1024
MOST_SCORE_BLOCKS = 264
"""Thread blocks a row for the scores: the grid is fixed, the number of blocks of cells is not."""


def score_bytes(T: int, context: int, block: int) -> int:
    """Bytes of the scratch for scores."""
    return 4 * T * (context // block)


def qsa_select(
    iq: int, keys_slot: int, pos: int, blocks: int, scores: int, T: int, heads: int, dim: int, block: int, budget: int,
    context: int, error: int, where: np.uint64,
) -> list[Launch]:  # fmt: skip
    """blocks (T, budget) int32 ascending, from iq (T, heads, dim) and the pooled keys (context / block, dim).

    scores: scratch of score_bytes. A row that sees no more complete blocks than `budget` gets them all.
    """
    most = context // block
    grid = min(MOST_SCORE_BLOCKS, max(1, -(-most * 32 // SCORE_THREADS)))
    args = (pointer(iq), pointer(keys_slot), pointer(pos), pointer(scores), i32(heads), i32(dim), i32(block),
            i32(budget), i32(most), pointer(error), where)  # fmt: skip
    choose = (pointer(scores), pointer(pos), pointer(blocks), i32(block), i32(budget), i32(most))
    return [
        launch(SOURCE, "qsa_scores", (grid, T), SCORE_THREADS, *args, shared_bytes=4 * heads * dim),
        launch(SOURCE, "qsa_select", T, SELECT_THREADS, *choose),
    ]
