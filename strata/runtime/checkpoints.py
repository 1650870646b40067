"""Checkpoints: copies of a session's recurrent state at a position, and which of them still hold.

K, V and pooled keys are addressed by position and stay where they are, so a checkpoint at position L is good for as
long as no cell before L is written again. `Ledger` knows all checkpoints of a session and kills those that a write
outdates. """

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field

import numpy as np

from strata.base.state import State


@dataclass(eq=False)
class Checkpoint:
    """State after `rows` tokens. `alive` turns false when an earlier cell is written again."""

    tokens: np.ndarray
    recurrent: np.ndarray
    drafter: object = None
    alive: bool = True
    used: int = 0
    owner: object = field(default=None, repr=False)

    @property
    def rows(self) -> int:
        return len(self.tokens)


class Ledger:
    """Checkpoints of one session: `capacity` automatic ones in memory allocated up front, and the user's own.

    Automatic ones are replaced least recently used first; the one with the fewest rows (the common root of all
    conversations, as a rule the system prompt) goes last.
    """

    def __init__(self, state: State, capacity: int):
        self.state, self.capacity = state, capacity
        self._free = [np.zeros_like(state.recurrent) for _ in range(capacity)]
        self._kept: list[Checkpoint] = []
        self._users: weakref.WeakSet[Checkpoint] = weakref.WeakSet()
        self._deepest = 0
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        """Memory of the automatic checkpoints."""
        return self.capacity * self.state.recurrent.nbytes

    def take(self, tokens: np.ndarray, drafter: object = None) -> None:
        """Keep an automatic checkpoint of the current state; one at the same position is replaced."""
        if self.capacity == 0 or len(tokens) == 0:
            return
        for old in [c for c in self._kept if c.rows == len(tokens)]:
            self._drop(old)
        if not self._free:
            spare = sorted(self._kept, key=lambda c: c.rows)[1:] or self._kept
            self._drop(min(spare, key=lambda c: c.used))
        place = self._free.pop()
        place[:] = self.state.recurrent
        self._add(Checkpoint(tokens.copy(), place, drafter, used=next(self._clock)), self._kept.append)

    def give(self, tokens: np.ndarray, drafter: object = None) -> Checkpoint:
        """A checkpoint that the caller owns."""
        made = Checkpoint(tokens.copy(), self.state.recurrent.copy(), drafter, owner=self)
        self._add(made, self._users.add)
        return made

    def _add(self, made: Checkpoint, add) -> None:
        add(made)
        self._deepest = max(self._deepest, made.rows)

    def disown(self) -> None:
        """Kill every checkpoint that a caller owns."""
        for c in self._users:
            c.alive = False

    def owns(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.owner is self

    def longest(self, prompt: np.ndarray, limit: int) -> Checkpoint | None:
        """The longest automatic checkpoint of at most `limit` rows whose tokens begin the prompt."""
        fitting = [c for c in self._kept if c.rows <= limit and np.array_equal(c.tokens, prompt[: c.rows])]
        best = max(fitting, key=lambda c: c.rows, default=None)
        if best is not None:
            best.used = next(self._clock)
        return best

    def wrote(self, position: int) -> None:
        """Cells from `position` on are about to be written: every checkpoint behind it dies."""
        if position >= self._deepest:
            return
        for dead in [c for c in self._kept if c.rows > position]:
            self._drop(dead)
        for c in self._users:
            c.alive = c.alive and c.rows <= position
        alive = [c.rows for c in (*self._kept, *(u for u in self._users if u.alive))]
        self._deepest = max(alive, default=0)

    def _drop(self, checkpoint: Checkpoint) -> None:
        checkpoint.alive = False
        self._kept.remove(checkpoint)
        self._free.append(checkpoint.recurrent)
