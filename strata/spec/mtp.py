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
"""Complete cells that may wait to be stored."""

RING_ROWS = QUEUE_ROWS + 1
"""Those and the row that waits for its token."""


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
        # rings addressed by position: streams of the last rows, and the tokens after them
        self._x = np.zeros((RING_ROWS, stream_values), np.float32)
        self._tokens = [0] * RING_ROWS
        self._chain = np.zeros(stream_values, np.float32)
        self.clear()

    def clear(self) -> None:
        """Forget everything: the session is empty."""
        self._rows = 0  # rows seen; the last of them waits for the token after it
        self._first = 0  # cells before this one were skipped
        self._done = 0  # cells before this one are stored or skipped; _rows after a draft step, which stores the last
        self._drafted_after = -1  # the token that the draft step took for the one after the last row

    def rows_kept(self, state: State, x: np.ndarray, tokens: np.ndarray, eager: bool) -> None:
        """At most 8 rows were committed behind those seen so far.

        x (n, C*D): their streams, in order; tokens (n,): their own tokens; eager: store complete cells at once.
        """
        rows, n = self._rows, len(tokens)
        if rows:
            token = int(tokens[0])
            self._tokens[(rows - 1) % RING_ROWS] = token
            if self._done == rows and token != self._drafted_after:
                self._done -= 1
        if rows + n - 1 - self._done > QUEUE_ROWS:  # too long without drafts: skip the oldest window
            self._first = self._done = self._done + WINDOW_ROWS
        for j in range(n - 1):
            self._tokens[(rows + j) % RING_ROWS] = int(tokens[j + 1])
        for j in range(n):
            self._x[(rows + j) % RING_ROWS] = x[j]
        self._rows = rows + n
        if eager:
            self.catch_up(state)

    @property
    def behind(self) -> int:
        """Cells that `catch_up` has to store."""
        return max(0, self._rows - 1 - self._done)

    def catch_up(self, state: State) -> None:
        """Store the cells whose token is known."""
        while self._done < self._rows - 1:
            at = self._done % RING_ROWS
            n = min(WINDOW_ROWS, self._rows - 1 - self._done, RING_ROWS - at)
            tokens = np.array(self._tokens[at : at + n], np.int32)
            self._backend.draft_append(state, self._x[at : at + n], tokens, self._done)
            self._done += n

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
        self._drafted_after = token
        x, position = self._x[(self._rows - 1) % RING_ROWS], self._rows - 1
        while len(tokens) < k:
            logits, streams = self._backend.draft_step(state, x, token, position, self._first)
            self._done = self._rows
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
        last = self._x[(self._rows - 1) % RING_ROWS].copy() if self._rows else None
        return DraftSlot(self._rows, self._first, last)

    def restore(self, slot: DraftSlot) -> None:
        self.clear()
        self._rows, self._first, self._done = slot.rows, slot.first, max(slot.rows - 1, 0)
        if slot.x is not None:
            self._x[(slot.rows - 1) % RING_ROWS] = slot.x
