"""The product of a router's logits with the choice of its experts as one launch, in windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.gpu.float_gemv import FloatMatrix
from strata.gpu.launch import Launch, Source, f32, i32, launch, pointer
from strata.gpu.router import MOST_EXPERTS

ROUTED_ROWS: tuple[int, ...] = (1, 2, 5, 6, 7, 8)
"""Rows of windows in which the product of logits chooses as well, and not a kernel behind it. Windows of three and four
rows were 1 to 2 % slower with it."""
INSTANCE_ROWS = (1, 2, 8)
SOURCE = Source("route.cu", tuple(f"route<{T}>" for T in INSTANCE_ROWS))
BLOCK_ROWS = 4
LEAST_VALUES, MOST_VALUES = 256, 2560
"""Of a row of the matrices: its sums have 256 lanes, and registers hold so many."""
MOST_LOGITS = 512
ARRIVED_BYTES = 4
"""Of the counter of arrived blocks: zero, and zero again afterwards."""


@dataclass(frozen=True)
class Choice:
    """Addresses: logits (T, E) float32 to choose from, ids (T, K) int32 by descending logit, weights (T, K) float32;
    scale of the weights; arrived: a counter of `ARRIVED_BYTES`."""

    logits: int
    ids: int
    weights: int
    K: int
    scale: float
    arrived: int


def routes(T: int, D: int, format_names: Sequence[str], E: int, K: int) -> bool:
    """Whether windows of T rows of D values take `route`, for the router's matrix of E rows and at most one other."""
    return T in ROUTED_ROWS and _fits(T, D, format_names, E, K)


def _fits(T: int, D: int, format_names: Sequence[str], E: int, K: int) -> bool:
    return (
        1 <= T <= INSTANCE_ROWS[-1]
        and D % 8 == 0
        and LEAST_VALUES <= D <= MOST_VALUES
        and 1 <= len(format_names) <= 2
        and set(format_names) == {"BF16"}
        and E <= MOST_LOGITS
        and 1 <= K <= min(E, MOST_EXPERTS)
    )


def route(
    x: int, T: int, D: int, matrices: Sequence[FloatMatrix], choice: Choice, error: int, where: np.uint64
) -> list[Launch]:
    """Products of x (T, D) float32 with the router's matrix and at most one more, and the choice. A logit that is not
    finite is reported as `where`; ids are valid all the same."""
    router, *others = matrices
    formats = [m.format_name for m in matrices]
    need(_fits(T, D, formats, router.rows, choice.K), "logits with the choice of experts",
         found=f"{T} rows of {D} values, {' and '.join(formats)}, {choice.K} of {router.rows} experts",
         needed=f"up to {INSTANCE_ROWS[-1]} rows of {LEAST_VALUES} to {MOST_VALUES} values, one or two matrices in "
         f"BF16, up to {MOST_EXPERTS} of up to {MOST_LOGITS} experts")  # fmt: skip
    aligned = all(at % 16 == 0 for at in (x, *(m.address for m in matrices)))
    need(aligned, "alignment of a float product", needed="16 bytes")
    need(router.rows % 4 != 0 or choice.logits % 16 == 0, "alignment of logits", found=choice.logits % 16,
         needed="16 bytes")  # fmt: skip
    other = others[0] if others else FloatMatrix("BF16", 0, 0, 0)
    words = [w for m in (router, other) for w in (pointer(m.address), pointer(m.y), i32(m.rows))]
    to = (pointer(choice.logits), pointer(choice.ids), pointer(choice.weights), i32(choice.K), f32(choice.scale),
          pointer(choice.arrived))  # fmt: skip
    blocks = -(-(router.rows + other.rows) // BLOCK_ROWS)
    args = (pointer(x), i32(D), i32(T), *words, *to, pointer(error), where)
    instance = next(n for n in INSTANCE_ROWS if n >= T)
    return [launch(SOURCE, f"route<{instance}>", blocks, 256, *args)]
