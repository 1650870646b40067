"""Launches around the draft layer: rows into and out of the ring of those that wait, inputs and results of steps."""

from __future__ import annotations

import numpy as np

from strata.base.errors import need
from strata.base.geometry import WINDOW_ROWS
from strata.gpu import head_rows
from strata.gpu.launch import Launch, Source, i32, launch, pointer

SOURCE = Source("draft_rows.cu", ("draft_keep", "draft_rows", "draft_start", "draft_choice"))

RECORD = np.dtype([("id", np.int64), ("probability", np.float64)])
MOST_STEPS = 8
"""Of a chain: records that it has room for."""

CHAIN_BYTES = 160
BEST, LOGIT, STATUS, SUM = 128, 132, 136, 144
"""Places in a chain of the best id, its logit, its status and the log-sum-exp."""


def _blocks(values: int) -> int:
    return -(-values // 1024)


def keep(words: int, streams: int, ring_slot: int, ring_rows: int, values: int) -> list[Launch]:
    """Rows of streams (8, values) float32 into a ring (ring_rows, values): words (int64, on the host) are the position
    of the first and their number. ring_slot: address of the word that holds the ring's address."""
    args = (pointer(words), pointer(streams), pointer(ring_slot), i32(ring_rows), i32(values))
    return [launch(SOURCE, "draft_keep", (_blocks(values), WINDOW_ROWS), 256, *args)]


def rows(ring_slot: int, ring_rows: int, pos: int, x: int, T: int, values: int) -> list[Launch]:
    """x (T, values) float32 = rows of the ring from position pos (int64) on."""
    args = (pointer(ring_slot), i32(ring_rows), pointer(pos), pointer(x), i32(values))
    return [launch(SOURCE, "draft_rows", (_blocks(values), T), 256, *args)]


def start(
    words: int, ring_slot: int, ring_rows: int, streams: int, chain: int, x: int, token: int, pos: int, first: int,
    values: int, *, goes_on: bool,
) -> list[Launch]:  # fmt: skip
    """Inputs of a step: x (values,) float32, token int32, pos and first int64.

    The first step of a chain takes words (int64, on the host): token, position, first cell; the others (`goes_on`) the
    draft, the streams and the position of the one before.
    """
    args = (pointer(words), pointer(ring_slot), i32(ring_rows), pointer(streams), pointer(chain), pointer(x),
            pointer(token), pointer(pos), pointer(first), i32(values), i32(goes_on))  # fmt: skip
    return [launch(SOURCE, "draft_start", _blocks(values), 256, *args)]


def choice(logits: int, tops: int, lanes: int, chain: int, ids: int, V: int) -> list[Launch]:
    """Behind the logits (V,) float32 of a step: its best token and that one's softmax probability into the chain's next
    record, with the arithmetic of `strata.cpu.head_rows.most_likely`.

    tops, lanes: scratch as for `head_rows.top` and `log_sum_exp` of one row. ids: tokens (V,) int32 of the rows, or 0.
    """
    need(V >= 1, "rows of a draft head", found=V)
    best, logit, status, total = (chain + at for at in (BEST, LOGIT, STATUS, SUM))
    return [
        *head_rows.top(logits, tops, best, logit, status, 1, V, 1),
        *head_rows.log_sum_exp(logits, logit, lanes, total, 1, V),
        launch(SOURCE, "draft_choice", 1, 32, pointer(chain), pointer(ids)),
    ]
