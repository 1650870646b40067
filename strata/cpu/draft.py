"""The draft layer on the CPU: rows wait in the session's ring, and steps run one by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from strata.base.program import DraftPrograms, Program
from strata.base.state import State
from strata.cpu.head_rows import most_likely
from strata.cpu.lower import Lowering, Memory

RING = "mtp.waiting"


class CpuDraft:
    """The draft layer of a backend.

    ids  (rows of the draft head,) int32 tokens, or None where they are the whole vocabulary
    bind makes a session the one that programs work on; run runs a program on it, raising what it reports
    """

    def __init__(
        self,
        programs: DraftPrograms,
        memory: Memory,
        lowered: Callable[[Program], Lowering],
        bind: Callable[[State], None],
        run: Callable[[Lowering, State], None],
        ids: np.ndarray | None = None,
    ):
        self._appends = {T: lowered(p) for T, p in programs.appends.items()}
        self._step = lowered(programs.step)
        self._arrays, self._bind, self._run, self._ids = memory.arrays, bind, run, ids

    @property
    def lowerings(self) -> list[Lowering]:
        return [*self._appends.values(), self._step]

    # ---- rows that wait

    def keep(self, state: State, first_row: int, n: int, position: int) -> None:
        """Keep n rows of the last window or chunk, from row first_row on; they are the session's from `position` on."""
        ring, streams = state.arrays[RING], self._arrays["streams"]
        while n:
            at = position % len(ring)
            part = min(n, len(ring) - at)
            ring[at : at + part] = streams[first_row : first_row + part]
            first_row, position, n = first_row + part, position + part, n - part

    def row(self, state: State, position: int) -> np.ndarray:
        """(C*D,) float32: a copy of a row that waits."""
        ring = state.arrays[RING]
        return ring[position % len(ring)].copy()

    def set_row(self, state: State, position: int, x: np.ndarray) -> None:
        """Put back what `row` gave."""
        ring = state.arrays[RING]
        ring[position % len(ring)] = x

    # ---- work

    def append(self, state: State, tokens: np.ndarray, position: int) -> None:
        """Store the draft layer's K and V of T <= 8 cells whose rows wait, from `position` on.

        tokens (T,) int32: the tokens after them.
        """
        T, ring, a = len(tokens), state.arrays[RING], self._arrays
        a["mtp.x"][:T] = ring[np.arange(position, position + T) % len(ring)]
        self._feed(state, tokens, position)
        self._run(self._appends[T], state)

    def append_chunk(self, state: State, first_row: int, tokens: np.ndarray, position: int) -> bool:
        """False: this backend stores the cells of a prefill chunk by windows, with the same bits."""
        return False

    def _feed(self, state: State, tokens: np.ndarray, position: int) -> None:
        self._bind(state)
        self._arrays["mtp.tokens"][: len(tokens)] = tokens
        self._arrays["mtp.pos"][0] = position

    def steps(
        self, state: State, token: int | None, position: int, first: int, n: int
    ) -> tuple[list[int], list[float]]:
        """n greedy drafts, each from the one before, and their softmax probabilities over the draft head's rows.

        token: what follows the row that waits at `position`; None: the chain of the last call goes on, whose next cell
        is `position`. Cells from `first` on are attended. Raises NotFinite.
        """
        a = self._arrays
        a["mtp.first"][0] = first
        ids: list[int] = []
        probabilities: list[float] = []
        for j in range(n):
            goes_on = token is None or j > 0
            a["mtp.x"][0] = a["mtp.streams"][0] if goes_on else self.row(state, position)
            tokens = np.array([self._last if goes_on else token], np.int32)
            self._feed(state, tokens, position + j)
            self._run(self._step, state)
            best, probability = most_likely(a["mtp.logits"][0])
            self._last = best if self._ids is None else int(self._ids[best])
            ids.append(self._last)
            probabilities.append(probability)
        return ids, probabilities
