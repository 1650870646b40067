"""Summaries of a window's logits on the device: largest logits, log-sum-exp, penalties and bias."""

from __future__ import annotations

import numpy as np

from strata.base.errors import need
from strata.base.window import CANDIDATES
from strata.gpu.launch import Launch, Source, i32, launch, pointer

SOURCE = Source("head_rows.cu", ("head_scan", "head_top", "head_lanes", "head_sums", "head_modify"))
RUN = 64
LANES = 256
"""Partial sums of a row's log-sum-exp."""


def runs_of(V: int) -> int:
    return -(-V // RUN)


def top(
    logits: int, tops: int, ids: int, values: int, status: int, T: int, V: int, n: int, *, bans: bool = False
) -> list[Launch]:
    """The n <= 64 largest logits of T rows: ids int32 and values float32 (T, 64), status int32 (T).

    tops: scratch, uint32 (T, runs_of(V)). status is -1, or the id of the row's first logit that is not finite (with
    `bans`, -inf is allowed), and then the row's ids and values have no meaning.
    """
    need(1 <= n <= min(CANDIDATES, V), "largest logits", found=n, needed=f"1..{min(CANDIDATES, V)}")
    runs = runs_of(V)
    scan = (pointer(logits), pointer(tops), i32(V), i32(runs), i32(bans))
    args = (pointer(logits), pointer(tops), pointer(ids), pointer(values), pointer(status), i32(V), i32(runs), i32(n),
            i32(CANDIDATES), i32(bans))  # fmt: skip
    return [launch(SOURCE, "head_scan", (-(-runs // 8), T), 256, *scan), launch(SOURCE, "head_top", T, 1024, *args)]


def lane_bytes(T: int) -> int:
    """Bytes of the scratch of log_sum_exp: sums of lanes, float64 (T, LANES). Terms stay on the chip."""
    return 8 * T * LANES


def log_sum_exp(logits: int, values: int, lanes: int, sums: int, T: int, V: int) -> list[Launch]:
    """sums float64 (T) of T rows whose largest logits `top` left in values. lanes: scratch of lane_bytes."""
    largest = (pointer(values), i32(CANDIDATES))
    return [
        launch(SOURCE, "head_lanes", (32, T), 288, pointer(logits), *largest, pointer(lanes), i32(V)),
        launch(SOURCE, "head_sums", T, 32, pointer(lanes), *largest, pointer(sums)),
    ]


def modify(
    logits: int, out: int, counts: int, history: int, n_history: int, rows: int, last_n: int, repetition: float,
    presence: float, frequency: float, bias_ids: int, bias: int, n_bias: int, T: int, V: int,
) -> list[Launch]:  # fmt: skip
    """out (T, V) = logits after penalties and bias. history and rows int32 tokens, bias_ids int32, bias float64.

    n_history -1: no penalties. counts: int32 (T, V) of zeros, left as zeros.
    """
    args = (
        pointer(logits),
        pointer(out),
        pointer(counts),
        pointer(history),
        i32(n_history),
        pointer(rows),
        i32(last_n),
        np.float64(repetition),
        np.float64(presence),
        np.float64(frequency),
        pointer(bias_ids),
        pointer(bias),
        i32(n_bias),
        i32(V),
    )
    return [launch(SOURCE, "head_modify", T, 1024, *args)]
