"""Driver of the draft layer (MTP) for one session: keeps its K and V in step with the conversation, makes drafts.

Cell i of the draft layer needs the trunk's streams of row i and the token after it, so the last row always waits for
its token. Prompt rows are stored at once. In rounds without drafts, rows only queue up; when drafting resumes, at most
the last QUEUE_ROWS are stored and the layer attends from there, so that not drafting costs a copy of 4 streams a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from strata.base.geometry import WINDOW_ROWS
from strata.base.state import State
from strata.cpu.head_rows import most_likely

QUEUE_ROWS = 64


class DraftBackend(Protocol):
    """The part of a backend that the driver uses."""

    def draft_append(self, state: State, x: np.ndarray, tokens: np.ndarray, position: int) -> None: ...
    def draft_step(
        self, state: State, x: np.ndarray, token: int, position: int, first: int
    ) -> tuple[np.ndarray, np.ndarray]: ...


@dataclass(frozen=True)
class DraftSlot:
    """What a checkpoint keeps of the drafter: the row that waits for its token, and the first cell that counts."""

    rows: int
    first: int
    x: np.ndarray | None


class MtpDrafter:
    """Drafts of one session. The backend and its lock are the caller's.

    vocabulary  (n,) int32 token ids of the draft head's rows, or None for the whole vocabulary
    """

    def __init__(self, backend: DraftBackend, stream_values: int, vocabulary: np.ndarray | None = None):
        self._backend, self._vocabulary = backend, vocabulary
        self._x = np.zeros((QUEUE_ROWS, stream_values), np.float32)
        self._tokens = np.zeros(QUEUE_ROWS, np.int32)
        self._chain = np.zeros(stream_values, np.float32)
        self._last = np.zeros(stream_values, np.float32)
        self.clear()

    def clear(self) -> None:
        """Forget everything: the session is empty."""
        self._rows = 0  # rows seen; the last of them waits in _last
        self._start = 0  # position of the first queued row
        self._queued = 0
        self._first = 0  # cells before this one were skipped
        self._stored = 0  # the waiting row's cell was stored by a draft step when this equals _rows

    def rows_kept(self, state: State, x: np.ndarray, tokens: np.ndarray, eager: bool) -> None:
        """Rows were committed behind those seen so far.

        x (n, C*D): their streams, in order; tokens (n,): their own tokens; eager: store complete cells at once.
        """
        n = len(tokens)
        if self._rows and self._stored != self._rows:
            self._push(state, self._rows - 1, self._last, int(tokens[0]))
        for j in range(n - 1):
            self._push(state, self._rows + j, x[j], int(tokens[j + 1]))
        self._last[:] = x[n - 1]
        self._rows += n
        if eager:
            self.catch_up(state)

    def _push(self, state: State, position: int, x: np.ndarray, token: int) -> None:
        if self._queued == 0:
            self._start = position
        elif position != self._start + self._queued:  # a draft step stored the cells between
            self.catch_up(state)
            self._start = position
        if self._queued == QUEUE_ROWS:  # drop the oldest window: too long without drafts
            self._x[: QUEUE_ROWS - WINDOW_ROWS] = self._x[WINDOW_ROWS:].copy()
            self._tokens[: QUEUE_ROWS - WINDOW_ROWS] = self._tokens[WINDOW_ROWS:].copy()
            self._start += WINDOW_ROWS
            self._queued -= WINDOW_ROWS
            self._first = self._start
        self._x[self._queued], self._tokens[self._queued] = x, token
        self._queued += 1

    def catch_up(self, state: State) -> None:
        """Store the queued cells."""
        for at in range(0, self._queued, WINDOW_ROWS):
            n = min(WINDOW_ROWS, self._queued - at)
            self._backend.draft_append(state, self._x[at : at + n], self._tokens[at : at + n], self._start + at)
        self._queued = 0

    def propose(
        self, state: State, token: int, k: int, go_on: Callable[[list[float]], bool] | None = None
    ) -> tuple[list[int], list[float]]:
        """Up to k greedy drafts for the tokens after `token`, which follows the last row seen, and their probabilities.

        go_on  asked after each draft with the probabilities so far; False ends the chain
        """
        tokens: list[int] = []
        probabilities: list[float] = []
        if self._rows == 0 or k <= 0:
            return tokens, probabilities
        self.catch_up(state)
        x, position = self._last, self._rows - 1
        while len(tokens) < k:
            logits, streams = self._backend.draft_step(state, x, token, position, self._first)
            self._stored = self._rows
            best, probability = most_likely(logits)
            token = best if self._vocabulary is None else int(self._vocabulary[best])
            tokens.append(token)
            probabilities.append(probability)
            if len(tokens) < k and go_on is not None and not go_on(probabilities):
                break
            self._chain[:] = streams
            x, position = self._chain, position + 1
        return tokens, probabilities

    def snapshot(self, state: State) -> DraftSlot:
        """For a checkpoint at the rows seen so far."""
        self.catch_up(state)
        return DraftSlot(self._rows, self._first, self._last.copy() if self._rows else None)

    def restore(self, slot: DraftSlot) -> None:
        self.clear()
        self._rows, self._first = slot.rows, slot.first
        if slot.x is not None:
            self._last[:] = slot.x
