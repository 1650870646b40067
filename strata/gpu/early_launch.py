"""Launches that start before the one in front of them has ended: which of a list may, and the driver call that says so.

On sm_90 and later a captured launch can carry the attribute "programmatic stream serialization". Its node then starts
when every block of the node in front has called `let_next_start` or ended, and waits inside the kernel (early.cuh);
other nodes start when the one in front has drained. CuPy's launches take no attributes: these go to the driver.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from strata.base.errors import StrataError
from strata.gpu.compile import headers_of
from strata.gpu.driver_calls import driver_library
from strata.gpu.launch import Launch, Source

log = logging.getLogger("strata")

OFF, MAIN_CHAIN, CHAINS, FORKS, JOINS = range(5)
START_EARLY = JOINS
"""Which launches of a graph start early. MAIN_CHAIN: those of the main branch with one launch directly in front of them
and nothing else behind that. CHAINS: such launches of side branches too. FORKS: also the first of a fork's main branch,
whose neighbours start when the launch in front has ended. JOINS: also launches that wait for side branches as well."""
REFUSAL_IS_ERROR = False
"""Whether a device or driver that refuses is an error; otherwise launches are plain ones and the log says so once."""

LEAST_ARCH = 90
LEAST_DRIVER = 12040
"""Graphs keep such edges from this driver version on."""

STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

# ---- which launches


@cache
def early_kernels(source: Source) -> frozenset[str]:
    """Names of a source's kernels, without template arguments, that are marked STARTS_EARLY."""
    text = "\n".join([*headers_of(source.path).values(), source.path.read_text(encoding="utf-8")])
    return frozenset(re.findall(r"^STARTS_EARLY (?:KERNEL\([^)]*\)|__global__ .*\n)\s*(\w+)\(", text, re.MULTILINE))


def can_start_early(launch: Launch) -> bool:
    """Whether the launch's kernel waits for its inputs itself."""
    return launch.kernel.partition("<")[0] in early_kernels(launch.source)


def early_places(launches: Sequence[Launch], level: int | None = None) -> list[bool]:
    """For every launch of a graph whether it starts early. level: one of the constants, None for START_EARLY.

    What `capture.Capture` makes of forks and launches aside decides what lies in front of a launch.
    """
    level = START_EARLY if level is None else level
    branches: dict[int, set[int]] = {}
    for one in launches:
        branches.setdefault(one.fork, set()).add(one.branch)
    first_of_side, first_of_graph = JOINS + 1, JOINS + 1
    front = {0: first_of_graph}  # by branch: the least level at which its next launch starts early
    places, fork, aside, of_ahead = [], 0, False, first_of_side
    for one in launches:
        if one.ahead:
            if of_ahead == first_of_side:
                front[0] = max(front[0], FORKS)
            places.append(of_ahead <= level and can_start_early(one))
            of_ahead = CHAINS
            continue
        if one.fork != fork:
            if fork and branches[fork] != {0}:
                front = {0: JOINS}
            if one.fork and branches[one.fork] != {0}:
                front = {0: max(front[0], FORKS)}
            fork = one.fork
        if one.aside:
            front[one.branch] = max(front.get(one.branch, first_of_side), FORKS)
            aside = True
            places.append(False)
            continue
        if one.gathers and aside:
            front[0], aside = max(front[0], JOINS), False
        if one.meets and of_ahead != first_of_side:
            front[0], of_ahead = max(front[0], JOINS), first_of_side
        places.append(front.get(one.branch, first_of_side) <= level and can_start_early(one))
        front[one.branch] = CHAINS if one.branch else MAIN_CHAIN
    return places


# ---- the driver


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: id, and a value of 64 bytes at offset 8, here an int."""

    _fields_ = [("id", ctypes.c_int), ("_pad", ctypes.c_char * 4), ("value", ctypes.c_int),
                ("_rest", ctypes.c_char * 60)]  # fmt: skip


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(LaunchAttribute)),
                ("n_attributes", ctypes.c_uint)]  # fmt: skip


class Refused(StrataError):
    """The driver took no early launch."""


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver's library; Refused if it cannot be loaded or is too old for launch attributes."""
    arguments = (ctypes.POINTER(LaunchConfig), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    try:
        return driver_library(ctypes.CDLL, {"cuLaunchKernelEx": arguments})
    except StrataError as error:
        raise Refused("kernels cannot start early", found=error.found, needed=error.needed) from error


def _error_text(code: int) -> str:
    """The driver's name and text of an error code."""
    parts = []
    for function in (driver().cuGetErrorName, driver().cuGetErrorString):
        text = ctypes.c_char_p()
        if function(code, ctypes.byref(text)) == 0 and text.value:
            parts.append(text.value.decode())
    return ": ".join(parts) or f"error {code}"


def problem(arch: int, driver_version: int) -> str | None:
    """Why launches of a device cannot start early, or None. The driver may still refuse."""
    if arch < LEAST_ARCH:
        return f"the device is sm_{arch}, and sm_{LEAST_ARCH} is the first that can"
    if driver_version < LEAST_DRIVER:
        found, least = (f"{v // 1000}.{v % 1000 // 10}" for v in (driver_version, LEAST_DRIVER))
        return f"the driver is for CUDA {found}, and {least} is the first that can"
    try:
        driver()
    except Refused as error:
        return str(error)
    return None


class EarlyFunction:
    """A kernel that is called like CuPy's functions, and starts early. Refused if the driver says no."""

    def __init__(self, function: Any):
        self._function = function  # keeps the module loaded

    def __call__(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[np.generic],
        shared_bytes: int,
        stream: Any,
    ) -> None:
        values = [np.array([a]) for a in args]  # read by the call, not later
        places = (ctypes.c_void_p * max(len(values), 1))(*[v.ctypes.data for v in values])
        attribute = LaunchAttribute(STREAM_SERIALIZATION, b"", 1)
        config = LaunchConfig((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared_bytes, stream.ptr,
                              ctypes.pointer(attribute), 1)  # fmt: skip
        code = driver().cuLaunchKernelEx(ctypes.byref(config), self._function.ptr, places, None)
        if code:
            raise Refused("the driver does not let a kernel start early", found=_error_text(code),
                          needed=f"a driver for CUDA {LEAST_DRIVER // 1000} or newer")  # fmt: skip


Prepared = list[tuple[Any, Launch]]


class EarlyLaunches:
    """Captures graphs with early launches where the device takes them.

    refusal  why it does not, or "": a plain graph is then captured, and the log says so once
    count    launches that start early in the last graph captured
    """

    def __init__(self, arch: int, driver_version: int):
        self.refusal, self.count = problem(arch, driver_version) or "", 0
        self._arch, self._logged = arch, False

    def captured(self, capture: Callable[[Prepared], Any], prepared: Prepared, refusal: type[Exception]) -> Any:
        """What `capture` returns for (function, launch) pairs of a graph, functions of early launches exchanged.

        refusal: the error of a capture that the driver refuses. StrataError then, or where the device cannot do it, if
        REFUSAL_IS_ERROR and a launch should start early.
        """
        places = early_places([launch for _, launch in prepared])
        self.count = 0
        if any(places) and not self.refusal:
            early = [(EarlyFunction(f) if e else f, one) for (f, one), e in zip(prepared, places, strict=True)]
            try:
                graph = capture(early)
                self.count = sum(places)
                return graph
            except (Refused, refusal) as error:
                self.refusal = str(error)
        if any(places):
            self._refused()
        return capture(prepared)

    def _refused(self) -> None:
        if REFUSAL_IS_ERROR:
            raise Refused("kernels cannot start early", found=self.refusal, needed="a device and a driver that can",
                          advice=f"Set START_EARLY to {OFF}.")  # fmt: skip
        if not self._logged:
            self._logged = True
            level = logging.INFO if self._arch < LEAST_ARCH else logging.WARNING  # nobody expects it of older devices
            log.log(level, "kernels of a graph do not start early: %s", self.refusal)
