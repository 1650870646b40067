"""A Device on numpy memory that runs kernels through the CPU shim: the whole GPU backend without a GPU."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from strata.base.errors import DoesNotFit, need
from strata.gpu.device import ALIGN, COPY_STREAMS, MAIN
from strata.gpu.launch import Launch
from tests.gpu.run_on_cpu import run

POISON = 0x5A


def in_branches(launches: Sequence[Launch]) -> list[Launch]:
    """The launches, branches of every fork in the opposite order: allowed, if they do not depend on each other."""
    out, at = [], 0
    while at < len(launches):
        fork, end = launches[at].fork, at + 1
        while end < len(launches) and fork and launches[end].fork == fork:
            end += 1
        part = launches[at:end]
        out += sorted(part, key=lambda one: -one.branch)
        at = end
    return out


@dataclass
class HostEvent:
    stream: int
    passed: bool = False
    at: float = 0.0

    def come(self) -> None:
        self.passed, self.at = True, time.perf_counter()


class HostDevice:
    """Memory between guards; `reverse` runs blocks and lanes of every kernel in the opposite order.

    The main stream works at once. What is queued on a copy stream stays undone, and its source unread, until the host
    or the main stream waits for an event behind it, or polls one; with `hold` polling does not help either, and `land`
    is the way. So code that forgets to wait, or reuses memory too early, gives wrong bytes every time.
    """

    name = "shim"
    clusters = True

    def __init__(
        self,
        reverse: bool = False,
        *,
        limit_bytes: int | None = None,
        can_read_host: bool = True,
        registers_read_only: bool = True,
    ):
        self.reverse, self.launched, self.taken_bytes, self.limit_bytes = reverse, 0, 0, limit_bytes
        self.can_read_host, self.registers_read_only = can_read_host, registers_read_only
        self.hold = False
        self.registered: dict[int, tuple[int, bool]] = {}
        self._queues: dict[int, deque[Callable[[], None]]] = {s: deque() for s in COPY_STREAMS}
        self._kept: list[np.ndarray] = []

    def _array(self, n_bytes: int) -> np.ndarray:
        raw = np.full(n_bytes + 3 * ALIGN, POISON, np.uint8)
        start = ALIGN + -(raw.ctypes.data + ALIGN) % ALIGN
        self._kept.append(raw)
        out = raw[start : start + n_bytes]
        out[:] = 0
        return out

    def current(self) -> nullcontext:
        return nullcontext()

    def alloc(self, n_bytes: int) -> int:
        whole = -(-n_bytes // ALIGN) * ALIGN
        if self.limit_bytes is not None and whole > self.limit_bytes - self.taken_bytes:
            room = self.limit_bytes - self.taken_bytes
            raise DoesNotFit("the device has too little memory left", found=f"{room} bytes", needed=f"{whole} bytes")
        self.taken_bytes += whole
        return self._array(n_bytes).ctypes.data

    def host(self, n_bytes: int) -> np.ndarray:
        return self._array(n_bytes)

    @staticmethod
    def _view(address: int, n_bytes: int) -> np.ndarray:
        return np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))

    def upload(self, address: int, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        if array.nbytes:
            self._view(address, array.nbytes)[:] = np.frombuffer(array.data.cast("B"), np.uint8)

    def download(self, address: int, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        if array.nbytes:
            array.reshape(-1).view(np.uint8)[:] = self._view(address, array.nbytes)

    def clear(self, address: int, n_bytes: int) -> None:
        self._view(address, n_bytes)[:] = 0

    # ---- streams

    def _do(self, stream: int, work: Callable[[], None]) -> None:
        if stream == MAIN:
            work()
        else:
            self._queues[stream].append(work)

    def _run_to(self, event: HostEvent) -> None:
        while not event.passed:
            self._queues[event.stream].popleft()()

    def land(self, n: int | None = None) -> None:
        """Do the first n things queued on each copy stream, or all."""
        for queue in reversed(self._queues.values()):
            for _ in range(len(queue) if n is None else min(n, len(queue))):
                if queue:  # waiting for another stream may have emptied this one
                    queue.popleft()()

    def _inside(self, address: int, n_bytes: int) -> bool:
        """Whether bytes lie in one piece that `alloc` or `host` gave."""
        starts = [a.ctypes.data for a in self._kept]
        return any(at <= address and address + n_bytes <= at + a.size for at, a in zip(starts, self._kept, strict=True))

    def copy_in(self, address: int, source: int, n_bytes: int, stream: int = MAIN) -> None:
        if n_bytes:
            assert self._inside(address, n_bytes), "a copy reaches over the end of its target"
            assert self._inside(source, n_bytes) or self.is_registered(source, n_bytes), "a copy needs pinned memory"
            self._do(stream, lambda: ctypes.memmove(address, source, n_bytes))

    def record(self, stream: int = MAIN, timed: bool = False) -> HostEvent:
        event = HostEvent(stream)
        self._do(stream, event.come)
        return event

    def elapsed_ms(self, first: HostEvent, second: HostEvent) -> float:
        assert first.passed and second.passed, "an event that has not come to pass has no time"
        return 1e3 * (second.at - first.at)

    def done(self, event: HostEvent) -> bool:
        if not self.hold:
            self._run_to(event)
        return event.passed

    def wait(self, event: HostEvent) -> None:
        self._run_to(event)

    def after(self, stream: int, event: HostEvent) -> None:
        self._do(stream, lambda: self._run_to(event))

    # ---- memory of the host

    def register(self, address: int, n_bytes: int, read_only: bool = False) -> None:
        need(self.can_read_host and (self.registers_read_only or not read_only), "this device registers such memory")
        assert address % 4096 == 0 and n_bytes % 4096 == 0, "whole pages"
        for at, (n, _) in self.registered.items():
            assert address + n_bytes <= at or at + n <= address, "registered twice"
        self.registered[address] = n_bytes, read_only

    def unregister(self, address: int) -> None:
        assert not any(self._queues.values()), "something queued may still read this memory"
        del self.registered[address]

    def is_registered(self, address: int, n_bytes: int) -> bool:
        return any(at <= address and address + n_bytes <= at + n for at, (n, _) in self.registered.items())

    # ---- launches

    def run(self, launches: Sequence[Launch], stream: int = MAIN) -> None:
        for launch in launches:
            self.launched += 1
            self._do(stream, lambda launch=launch: run(launch, reverse=self.reverse))

    def prepare(self, launches: Sequence[Launch]) -> None:
        """Kernels are compiled when they run."""

    def graph(self, launches: Sequence[Launch]) -> Callable[[], None]:
        fixed = in_branches(launches)
        return lambda: self.run(fixed)

    def synchronize(self) -> None:
        """The main stream has no queue."""

    def close(self) -> None:
        self.land()
        self.check_guards()
        self.registered.clear()
        self._kept.clear()

    def check_guards(self) -> None:
        """AssertionError if something was written in front of an allocation."""
        for raw in self._kept:
            assert (raw[:ALIGN] == POISON).all(), "written in front of an allocation"
