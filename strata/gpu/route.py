"""The product of a router's logits with the choice of its experts as one launch, in windows of one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.gpu.float_gemv import FloatMatrix
from strata.gpu.launch import Launch, Source, f32, i32, launch, pointer
from strata.gpu.router import MOST_EXPERTS

ROUTED_ROWS = 1
"""Most rows of a window in which the product of logits chooses as well, and not a kernel behind it: 1, or 0 for never.
Of more rows product and choice are faster apart: 3.7 us instead of 4.4 for two, 3.4 instead of 5.1 for four."""
SOURCE = Source("route.cu", ("route",))
BLOCK_ROWS = 4
LEAST_VALUES, MOST_VALUES = 256, 2560
"""Of a row of the matrices: its sums have 256 lanes, and registers hold so many."""
MOST_LOGITS = 512
ARRIVED_BYTES = 4
"""Of the counter of arrived blocks: zero, and zero again afterwards."""


@dataclass(frozen=True)
class Choice:
    """Addresses: logits (E) float32 to choose from, ids (K) int32 by descending logit, weights (K) float32; scale of
    the weights; arrived: a counter of `ARRIVED_BYTES`."""

    logits: int
    ids: int
    weights: int
    K: int
    scale: float
    arrived: int


def routes(T: int, D: int, format_names: Sequence[str], E: int, K: int) -> bool:
    """Whether windows of T rows of D values take `route`, for the router's matrix of E rows and at most one other."""
    return T == 1 <= ROUTED_ROWS and _fits(D, format_names, E, K)


def _fits(D: int, format_names: Sequence[str], E: int, K: int) -> bool:
    return (
        D % 8 == 0
        and LEAST_VALUES <= D <= MOST_VALUES
        and 1 <= len(format_names) <= 2
        and set(format_names) == {"BF16"}
        and E <= MOST_LOGITS
        and 1 <= K <= min(E, MOST_EXPERTS)
    )


def route(
    x: int, D: int, matrices: Sequence[FloatMatrix], choice: Choice, error: int, where: np.uint64
) -> list[Launch]:
    """Products of x (D) float32 with the router's matrix and at most one more, and the choice. A logit that is not
    finite is reported as `where`; ids are valid all the same."""
    router, *others = matrices
    formats = [m.format_name for m in matrices]
    need(_fits(D, formats, router.rows, choice.K), "logits with the choice of experts",
         found=f"{D} values, {' and '.join(formats)}, {choice.K} of {router.rows} experts",
         needed=f"{LEAST_VALUES} to {MOST_VALUES} values, one or two matrices in BF16, up to {MOST_EXPERTS} of up to "
         f"{MOST_LOGITS} experts")  # fmt: skip
    aligned = all(at % 16 == 0 for at in (x, *(m.address for m in matrices)))
    need(aligned, "alignment of a float product", needed="16 bytes")
    need(router.rows % 4 != 0 or choice.logits % 16 == 0, "alignment of logits", found=choice.logits % 16,
         needed="16 bytes")  # fmt: skip
    other = others[0] if others else FloatMatrix("BF16", 0, 0, 0)
    words = [w for m in (router, other) for w in (pointer(m.address), pointer(m.y), i32(m.rows))]
    to = (pointer(choice.logits), pointer(choice.ids), pointer(choice.weights), i32(choice.K), f32(choice.scale),
          pointer(choice.arrived))  # fmt: skip
    blocks = -(-(router.rows + other.rows) // BLOCK_ROWS)
    return [launch(SOURCE, "route", blocks, 256, pointer(x), i32(D), *words, *to, pointer(error), where)]
