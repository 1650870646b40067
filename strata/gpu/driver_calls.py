"""Short calls of the CUDA driver that keep the interpreter's lock.

A call that gives the lock away gets it back late beside a busy Python thread: after the interpreter's switch interval,
milliseconds by default. CuPy's calls do that, and a window with its swaps makes dozens. These take microseconds, so
keeping the lock costs nobody anything; what takes longer is waited for elsewhere.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache, wraps
from typing import Any

import numpy as np

from strata.base.errors import StrataError

NOT_READY = 600

CALLS = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamQuery": (c_void_p,),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
}
"""Arguments by name; all return a code, 0 for success."""


LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def driver_library(kind: type[ctypes.CDLL], calls: Mapping[str, Sequence[Any]]) -> ctypes.CDLL:
    """The driver's library with the arguments of some calls declared; StrataError if it or one of them is missing.

    kind  ctypes.PyDLL, whose calls keep the interpreter's lock, or ctypes.CDLL
    """
    try:
        library = kind(LIBRARY)
        for name, arguments in calls.items():
            call = getattr(library, name)
            call.argtypes, call.restype = arguments, c_int
    except (OSError, AttributeError) as error:
        raise StrataError("the CUDA driver's library cannot be used", found=str(error),
                          needed=f"{LIBRARY} with {', '.join(calls)}",
                          advice="`strata doctor` shows devices and driver.") from error  # fmt: skip
    return library


def device_error(found: str) -> StrataError:
    """Of a device that refuses a call, or failed in work that was queued before it."""
    return StrataError("the device does not do what it was asked", found=found, needed="no error",
                       advice="Load the model again; `strata doctor` shows devices and driver.")  # fmt: skip


def told(method: Callable) -> Callable:
    """Decorator: what CuPy raises for such a device becomes `device_error`."""

    @wraps(method)
    def call(*given: Any, **named: Any) -> Any:
        try:
            return method(*given, **named)
        except RuntimeError as error:  # what all of CuPy's own are
            raise device_error(str(error)) from error

    return call


class DriverCalls:
    """The driver's library, for the context that the calling thread has. Streams, events, graphs and functions are
    addresses, as CuPy's `.ptr` gives them."""

    def __init__(self, library: Any = None):
        library = library or driver_library(ctypes.PyDLL, CALLS)
        self._calls: dict[str, Callable[..., int]] = {name: getattr(library, name) for name in CALLS}
        context = c_void_p()
        self._do("cuCtxGetCurrent", ctypes.addressof(context))
        self._context = context.value

    def use(self) -> None:
        """Make the context the calling thread's own."""
        self._do("cuCtxSetCurrent", self._context)

    def _do(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if code:
            raise self._failed(name, code)

    def _ready(self, name: str, at: int) -> bool:
        code = self._calls[name](at)
        if code not in (0, NOT_READY):
            raise self._failed(name, code)
        return code == 0

    @staticmethod
    def _failed(name: str, code: int) -> StrataError:
        return device_error(f"CUDA error {code} in {name}")

    def graph(self, graph: int, stream: int) -> Callable[[], None]:
        """A call that launches a graph."""
        call = self._calls["cuGraphLaunch"]

        def launch() -> None:
            code = call(graph, stream)
            if code:
                raise self._failed("cuGraphLaunch", code)

        return launch

    def copy(self, target: int, source: int, n_bytes: int, stream: int) -> None:
        """Queue a copy between device and pinned memory, either way, or from device to device."""
        self._do("cuMemcpyAsync", target, source, n_bytes, stream)

    def record(self, event: int, stream: int) -> None:
        self._do("cuEventRecord", event, stream)

    def after(self, stream: int, event: int) -> None:
        """What is queued on the stream from now on waits for an event."""
        self._do("cuStreamWaitEvent", stream, event, 0)

    def event_passed(self, event: int) -> bool:
        return self._ready("cuEventQuery", event)

    def stream_done(self, stream: int) -> bool:
        """Whether everything queued on a stream has ended."""
        return self._ready("cuStreamQuery", stream)

    def launch(
        self, function: int, grid: Sequence[int], block: Sequence[int], args: Sequence[np.generic], shared_bytes: int,
        stream: int,
    ) -> None:  # fmt: skip
        """Queue a kernel. args: numpy scalars."""
        packing, offsets, kind = _packing(tuple(map(type, args)))
        values = bytearray(packing.pack(*args))  # read by the call, not later
        at = ctypes.addressof(c_char.from_buffer(values))
        places = kind(*[at + offset for offset in offsets])
        self._do("cuLaunchKernel", function, *grid, *block, shared_bytes, stream, places, None)


HELD_BYTES = 64 << 10
"""As much is copied in some microseconds."""


def copy_held(target: np.ndarray, source: np.ndarray) -> None:
    """Copy a contiguous array into another of its size. numpy's own copies of 500 values or more give the lock away."""
    memoryview(target).cast("B")[:] = memoryview(source).cast("B")


LETTERS = {np.uint64: "Q", np.int64: "q", np.int32: "i", np.float32: "f", np.float64: "d"}


@cache
def _packing(types: tuple[type, ...]) -> tuple[struct.Struct, list[int], type]:
    """How arguments of these types lie behind each other: packing, offsets, and the type of a list of places."""
    letters = [LETTERS[t] for t in types]
    offsets = [struct.calcsize("<" + "".join(letters[:i])) for i in range(len(letters))]
    return struct.Struct("<" + "".join(letters) + "x"), offsets, c_void_p * max(len(letters), 1)
