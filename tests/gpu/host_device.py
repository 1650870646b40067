"""A Device on numpy memory that runs kernels through the CPU shim: the whole GPU backend without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np

from strata.gpu.device import ALIGN
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


class HostDevice:
    """Memory between guards; `reverse` runs blocks and lanes of every kernel in the opposite order."""

    name = "shim"

    def __init__(self, reverse: bool = False):
        self.reverse, self.launched, self.taken_bytes = reverse, 0, 0
        self._kept: list[np.ndarray] = []

    def _array(self, n_bytes: int) -> np.ndarray:
        raw = np.full(n_bytes + 3 * ALIGN, POISON, np.uint8)
        start = ALIGN + -(raw.ctypes.data + ALIGN) % ALIGN
        self._kept.append(raw)
        out = raw[start : start + n_bytes]
        out[:] = 0
        return out

    def alloc(self, n_bytes: int) -> int:
        self.taken_bytes += -(-n_bytes // ALIGN) * ALIGN
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

    def run(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self.launched += 1
            run(launch, reverse=self.reverse)

    def graph(self, launches: Sequence[Launch]) -> Callable[[], None]:
        fixed = in_branches(launches)
        return lambda: self.run(fixed)

    def synchronize(self) -> None:
        """Everything has run already."""

    def close(self) -> None:
        self.check_guards()
        self._kept.clear()

    def check_guards(self) -> None:
        """AssertionError if something was written in front of an allocation."""
        for raw in self._kept:
            assert (raw[:ALIGN] == POISON).all(), "written in front of an allocation"
