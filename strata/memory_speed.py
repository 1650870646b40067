"""What CPU threads and a device's link read from RAM, each alone and both at once: they share one memory.

A bound of windows that adds what both get alone is no bound where memory gives less than that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.gpu.device import COPY_STREAMS, Device

BYTES = 2 << 30
"""Read by the threads: far more than caches hold."""
LINK_BYTES = 512 << 20
PIECE_BYTES = 32 << 20
SECONDS = 0.3
UNDER_WAY = 3
"""Copies that are queued at any time, so that the link does not wait for Python."""


@dataclass(frozen=True)
class MemoryRates:
    """GB/s of threads and link alone, and of both at once."""

    threads_gbps: float
    link_gbps: float
    threads_beside_gbps: float
    link_beside_gbps: float

    @property
    def both_gbps(self) -> float:
        """What memory gives to both together."""
        return self.threads_beside_gbps + self.link_beside_gbps

    @property
    def most_gbps(self) -> float:
        """The most that was read in any way."""
        return max(self.threads_gbps, self.both_gbps)


class _Readers:
    """Threads that read their parts of a buffer over and over, between `start` and `stop`."""

    def __init__(self, threads: int, n_bytes: int):
        self._parts = np.array_split(np.ones(n_bytes // 8, np.int64), threads)
        self._stop = threading.Event()
        self._rates = [0.0] * threads
        self._threads: list[threading.Thread] = []

    def _read(self, i: int) -> None:
        began, passes = time.perf_counter(), 0
        while not self._stop.is_set():
            np.add.reduce(self._parts[i])
            passes += 1
        self._rates[i] = passes * self._parts[i].nbytes / (time.perf_counter() - began) / 1e9

    def start(self) -> None:
        self._stop.clear()
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(len(self._parts))]
        for thread in self._threads:
            thread.start()

    def stop(self) -> float:
        """GB/s of all threads together."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return sum(self._rates)


def memory_rates(
    device: Device, threads: int, *, n_bytes: int = BYTES, link_bytes: int = LINK_BYTES, seconds: float = SECONDS
) -> MemoryRates:
    """Measure, for `seconds` each.

    Takes n_bytes of memory meanwhile, and until the device is closed link_bytes of pinned memory, a multiple of
    PIECE_BYTES, and PIECE_BYTES of the device's.
    """
    need(threads >= 1 and n_bytes >= 8 * threads and link_bytes > 0 and link_bytes % PIECE_BYTES == 0,
         "what to read is out of range", found=(threads, n_bytes, link_bytes),
         needed=f"threads, 8 bytes for each, whole pieces of {PIECE_BYTES}")  # fmt: skip
    source, target = device.host(link_bytes), device.alloc(PIECE_BYTES)
    source[:] = 1
    stream = COPY_STREAMS[0]

    def copy() -> float:
        """GB/s of the link."""
        under_way: deque = deque()
        began, done, at = time.perf_counter(), 0, 0
        while time.perf_counter() - began < seconds:
            device.copy_in(target, source.ctypes.data + at, PIECE_BYTES, stream)
            under_way.append(device.record(stream))
            at = (at + PIECE_BYTES) % link_bytes
            if len(under_way) == UNDER_WAY:
                device.wait(under_way.popleft())
                done += PIECE_BYTES
        while under_way:
            device.wait(under_way.popleft())
            done += PIECE_BYTES
        return done / (time.perf_counter() - began) / 1e9

    readers = _Readers(threads, n_bytes)
    readers.start()
    time.sleep(seconds)
    alone = readers.stop()
    link = copy()
    readers.start()
    beside = copy()
    return MemoryRates(alone, link, readers.stop(), beside)
