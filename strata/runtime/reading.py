"""How a prompt is read: what can be reused, and in which pieces the rest goes through the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from strata.base.errors import ContextFull
from strata.base.geometry import CELL_ROWS, CONTEXT_RESERVE, WINDOW_ROWS
from strata.base.numbers import shown

CHECKPOINT_EVERY = 4096
"""Tokens between automatic checkpoints of a long prompt."""


@dataclass(frozen=True)
class Piece:
    """Rows [start, start + n) read in one go: a chunk of whole cells through the prefill program, or a window of n <= 8
    rows."""

    start: int
    n: int
    cell: bool


def pieces(
    start: int, stop: int, marks: Iterable[int] = (), windows_only: bool = False, chunk_rows: int = CELL_ROWS
) -> Iterator[Piece]:
    """Cut [start, stop) into windows and chunks of whole cells of the grid, up to chunk_rows; no piece crosses a mark.

    Which rows form whole cells depends only on the grid, start, stop and marks, and how cells are put together into
    chunks changes no bit, so any split of a prompt at cell borders reads it alike.
    """
    borders = sorted({m for m in marks if start < m < stop} | {stop})
    at = start
    for border in borders:
        while at < border:
            if not windows_only and at % CELL_ROWS == 0 and at + CELL_ROWS <= border:
                n, cell = min(border - at, chunk_rows) // CELL_ROWS * CELL_ROWS, True
            else:
                edge = border if windows_only else min(border, (at // CELL_ROWS + 1) * CELL_ROWS)
                n, cell = min(WINDOW_ROWS, edge - at), False
            yield Piece(at, n, cell)
            at += n


def checkpoint_marks(start: int, stop: int, turn_starts: Iterable[int], chunk_rows: int = CELL_ROWS) -> list[int]:
    """Positions in (start, stop] where a checkpoint is taken: given turn starts, and every 4,096 tokens or chunk."""
    distance = max(CHECKPOINT_EVERY, chunk_rows)
    every = range((start // distance + 1) * distance, stop + 1, distance)
    return sorted({t for t in turn_starts if start < t <= stop} | set(every))


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of equal tokens at the start of both."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if different.size else n


def check_room(n_prompt: int, max_tokens: int | None, context: int) -> int:
    """Tokens the answer may have: max_tokens, or what is left. Raises ContextFull with the three numbers."""
    room = context - CONTEXT_RESERVE - n_prompt
    if room < 1:
        raise ContextFull(
            "no room for an answer",
            found=f"{n_prompt} prompt tokens + {CONTEXT_RESERVE} reserved in a context of {context}",
            needed="at least 1 token more",
            advice="Shorten the prompt or load with a larger context=.",
        )
    if max_tokens is None:
        return room
    if max_tokens > room:
        raise ContextFull(
            "prompt and answer exceed the context",
            found=f"{n_prompt} prompt tokens + {shown(max_tokens)} max_tokens + {CONTEXT_RESERVE} reserved",
            needed=f"at most {context} (the context)",
            advice=f"Use max_tokens <= {room}, a shorter prompt, or load with a larger context=.",
        )
    return max_tokens
