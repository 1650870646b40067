"""Where the time of a token goes, taken from outside: clocks around a backend and around the text of an answer.

Both wrappers stand where the real object stands in the generate loop, so what is timed is the loop that answers run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from strata.base.state import State
from strata.base.window import HeadRequest, HeadRows
from strata.cpu.compiled import chunk
from strata.cpu.lower import parallel
from strata.cpu.machine_code import clock_ns, pause
from strata.cpu.pool import Pool
from strata.cpu.walker import WalkList
from strata.text.stop import TextStop

JOBS = 256
RUNS = 15
CHUNK_NS = 2000


class Clock:
    """Seconds spent in calls made through it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self.seconds += time.perf_counter() - began


class TimedBackend:
    """A backend whose windows, heads, commits and prefill chunks are timed; everything else is the backend's own."""

    def __init__(self, backend: Any):
        self._backend = backend
        self.clock = Clock()

    def new_state(self) -> State:
        return self._backend.new_state()

    def window(self, state: State, tokens: np.ndarray, previous: tuple[int, int]) -> None:
        self.clock.call(self._backend.window, state, tokens, previous)

    def prefill(self, state: State, tokens: np.ndarray, previous: tuple[int, int]) -> None:
        self.clock.call(self._backend.prefill, state, tokens, previous)

    def head(self, first_row: int, T: int, request: HeadRequest) -> HeadRows:
        return self.clock.call(self._backend.head, first_row, T, request)

    def commit(self, state: State, n_keep: int) -> None:
        self.clock.call(self._backend.commit, state, n_keep)


class TimedText:
    """A TextStop whose work is timed."""

    def __init__(self, text: TextStop):
        self._text = text
        self.clock = Clock()

    def __call__(self, tokens: Iterable[int]) -> int:
        return self.clock.call(self._text, tokens)

    def take(self) -> str:
        return self.clock.call(self._text.take)

    def finish(self) -> str:
        return self.clock.call(self._text.finish)

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    @property
    def stopped_on(self) -> str | int | None:
        return self._text.stopped_on


@chunk
def _keep_busy(desc, index, n_chunks):
    """A chunk that takes CHUNK_NS."""
    until = clock_ns() + CHUNK_NS
    while clock_ns() < until:
        pause()


def job_overhead_us(pool: Pool) -> float:
    """What sharing a job adds to its work, in us: the median over runs of many jobs of one 2 us chunk a thread.

    The workers are awake, as they are between the ops of a window. 0 with one thread, where jobs are not shared.
    """
    if pool.threads == 1:
        return 0.0
    walk = WalkList()
    for _ in range(JOBS):
        walk.add(parallel, pool.address, pool.threads, _keep_busy.address)
    walk.run()
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        walk.run()
        times.append(time.perf_counter() - began)
    return max(float(np.median(times)) / JOBS * 1e6 - CHUNK_NS / 1e3, 0.0)
