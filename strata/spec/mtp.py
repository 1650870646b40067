"""Driver of the draft layer (MTP) for one session: keeps its K and V in step with the conversation, makes drafts.

Cell i of the draft layer needs the trunk's streams of row i and the token after it, so the last row always waits for
its token. Streams of the last rows wait in the backend, in a ring by position; here are only tokens and counts.
Prompt rows are stored at once. In rounds without drafts, rows only queue up in that ring, and nobody is told of them:
the driver looks at the session when it is needed. At most the last QUEUE_ROWS are then stored and the layer attends
from there, so that not drafting costs a copy of 4 streams a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from strata.base.geometry import DRAFT_QUEUE_ROWS, DRAFT_RING_ROWS, WINDOW_ROWS
from strata.base.state import State

QUEUE_ROWS, RING_ROWS = DRAFT_QUEUE_ROWS, DRAFT_RING_ROWS


class DraftBackend(Protocol):
    """The draft layer of a backend; see `strata.cpu.draft.CpuDraft`. Its commits keep the streams of their rows."""

    def keep(self, state: State, first_row: int, n: int, position: int) -> None: ...
    def row(self, state: State, position: int) -> np.ndarray: ...
    def set_row(self, state: State, position: int, x: np.ndarray) -> None: ...
    def append(self, state: State, tokens: np.ndarray, position: int) -> None: ...
    def append_chunk(self, state: State, first_row: int, tokens: np.ndarray, position: int) -> bool: ...
    def steps(
        self, state: State, token: int | None, position: int, first: int, n: int
    ) -> tuple[list[int], list[float]]: ...


@dataclass(frozen=True)
class DraftSlot:
    """What a checkpoint keeps of the drafter: the row that waits for its token, and the first cell that counts."""

    rows: int
    first: int
    x: np.ndarray | None


class MtpDrafter:
    """Drafts of one session. The backend and its lock are the caller's."""

    def __init__(self, backend: DraftBackend):
        self._backend = backend
        self._session: tuple[State, np.ndarray] | None = None
        self._tokens = [0] * RING_ROWS  # by position: the tokens after the last rows
        self.clear()

    def clear(self, rows: int = 0) -> None:
        """Forget everything: the session is empty, or holds `rows` rows that the draft layer never saw."""
        self._rows = rows  # rows seen; the last of them waits for the token after it
        self._first = rows  # cells before this one were skipped
        self._done = rows  # cells before this one are stored or skipped; _rows after a draft step: it stores the last
        self._drafted_after = -1  # the token that the draft step took for the one after the last row

    def follow(self, state: State, tokens: np.ndarray) -> None:
        """Belong to a session: what its windows commit is taken in from here on, when it is needed.

        tokens (context,) int32: memory of the session's own tokens, the first state.rows of which count.
        """
        self._session = state, tokens

    def _take_in(self, end: int | None = None) -> None:
        """See the rows that windows have committed since; end: without the chunk behind that row."""
        if self._session is not None:
            state, tokens = self._session
            end = state.rows if end is None else end
            if end < self._rows:
                self.clear(end)
            elif end > self._rows:
                self._see(tokens[self._rows : end].tolist(), self._rows)

    def _see(self, tokens: list[int], position: int) -> None:
        """Rows from `position` on have come. Rows that nobody told of are not there."""
        if position != self._rows:
            self.clear(position)
        rows, n = position, len(tokens)
        if rows > self._first:
            token = self._tokens[(rows - 1) % RING_ROWS] = tokens[0]
            if self._done == rows and token != self._drafted_after:
                self._done -= 1
        too_many = rows + n - 1 - self._done - QUEUE_ROWS
        if too_many > 0:  # too long without drafts: skip the oldest, by windows
            self._first = self._done = self._done + -(-too_many // WINDOW_ROWS) * WINDOW_ROWS
        for at in range(max(rows, rows + n - 1 - RING_ROWS), rows + n - 1):
            self._tokens[at % RING_ROWS] = tokens[at + 1 - rows]
        self._rows = rows + n

    def chunk_kept(self, state: State, tokens: np.ndarray) -> None:
        """A prefill chunk of n rows was read behind those seen so far; its streams are still in the backend.

        tokens (n,): their own tokens. All complete cells are stored.
        """
        n, first, start = len(tokens), WINDOW_ROWS, state.rows - len(tokens)
        self._take_in(start)
        self._chunk_window(state, 0, tokens[:first], start)
        # The last row seen waits for its token. All but the last window's rows go to the backend in one piece, if it
        # takes them so.
        end = n - WINDOW_ROWS
        if end > first and self._backend.append_chunk(state, first - 1, tokens[first:end], self._rows - 1):
            self._rows += end - first
            self._done = self._rows - 1
            self._backend.keep(state, end - 1, 1, self._rows - 1)
            first = end
        for row in range(first, n, WINDOW_ROWS):
            self._chunk_window(state, row, tokens[row : row + WINDOW_ROWS], start + row)

    def _chunk_window(self, state: State, row: int, tokens: np.ndarray, position: int) -> None:
        """Rows of a chunk, from its row `row` on, as if they were a window."""
        self._backend.keep(state, row, len(tokens), position)
        self._see(tokens.tolist(), position)
        self._store(state)

    @property
    def behind(self) -> int:
        """Cells that `catch_up` has to store."""
        self._take_in()
        return max(0, self._rows - 1 - self._done)

    def catch_up(self, state: State) -> None:
        """Store the cells whose token is known."""
        self._take_in()
        self._store(state)

    def _store(self, state: State) -> None:
        while self._done < self._rows - 1:
            n = min(WINDOW_ROWS, self._rows - 1 - self._done)
            tokens = np.array([self._tokens[at % RING_ROWS] for at in range(self._done, self._done + n)], np.int32)
            self._backend.append(state, tokens, self._done)
            self._done += n

    def propose(
        self,
        state: State,
        token: int,
        k: int,
        go_on: Callable[[list[float]], bool] | None = None,
        at_once: int = 1,
    ) -> tuple[list[int], list[float]]:
        """Up to k greedy drafts for the tokens after `token`, which follows the last row seen, and their probabilities.

        go_on    asked after drafts with the probabilities so far; False ends the chain
        at_once  drafts that are made before it is asked for the first time: the backend waits once for all of them
        """
        tokens: list[int] = []
        probabilities: list[float] = []
        self._take_in()
        if self._rows <= self._first or k <= 0:
            return tokens, probabilities
        self._store(state)
        self._drafted_after = token
        n, start = min(at_once, k), self._rows - 1
        while True:
            made = self._backend.steps(state, None if tokens else token, start + len(tokens), self._first, n)
            self._done = self._rows
            tokens += made[0]
            probabilities += made[1]
            if len(tokens) == k or (go_on is not None and not go_on(probabilities)):
                return tokens, probabilities
            n = 1 if go_on is not None else k - len(tokens)

    def snapshot(self, state: State) -> DraftSlot:
        """For a checkpoint at the rows seen so far."""
        self.catch_up(state)
        last = self._backend.row(state, self._rows - 1) if self._rows > self._first else None
        return DraftSlot(self._rows, self._first, last)

    def restore(self, state: State, slot: DraftSlot) -> None:
        """Back to a checkpoint."""
        if slot.x is not None:
            self._backend.set_row(state, slot.rows - 1, slot.x)
        self.clear(slot.rows)
        if slot.x is not None:
            self._first, self._done = slot.first, slot.rows - 1
