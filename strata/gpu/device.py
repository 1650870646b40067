"""The device as the backend sees it: memory by address, launches, graphs. `CupyDevice` is the real one.

Everything goes through one stream, so what is queued runs in order; `synchronize` waits for all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from strata.base.errors import DoesNotFit, StrataError
from strata.gpu.compile import compile_source
from strata.gpu.launch import Launch, Source

ALIGN = 256
DEFAULT_SHARED_BYTES = 48 << 10


class Device(Protocol):
    """Memory and launches. Addresses are ints, multiples of 256."""

    name: str

    def alloc(self, n_bytes: int) -> int:
        """Zeroed device memory that lives until close."""

    def host(self, n_bytes: int) -> np.ndarray:
        """uint8 host memory that kernels read and write at the array's own address."""

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous array to the device; on return it may be changed."""

    def download(self, address: int, array: np.ndarray) -> None:
        """Copy into a contiguous array, after everything queued before."""

    def run(self, launches: Sequence[Launch]) -> None:
        """Queue launches one by one."""

    def graph(self, launches: Sequence[Launch]) -> Callable[[], None]:
        """Make launches one unit; calling it queues them."""

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


def import_cupy() -> Any:
    """CuPy, or StrataError saying how to get it."""
    try:
        import cupy
    except ImportError as error:
        raise StrataError(
            "the GPU backend needs CuPy",
            found=str(error),
            advice="pip install 'strata[cuda12]' or 'strata[cuda13]', after the CUDA version of the driver.",
        ) from error
    return cupy


class CupyDevice:
    """One CUDA device through CuPy: its own memory, one non-blocking stream, kernels loaded once a source."""

    def __init__(self, index: int = 0, limit_bytes: int | None = None):
        self._cupy = cp = import_cupy()
        self._runtime = cp.cuda.runtime
        try:
            self._device = cp.cuda.Device(index)
            self._device.use()
            major, minor = int(self._device.compute_capability[:-1]), int(self._device.compute_capability[-1])
        except self._runtime.CUDARuntimeError as error:
            raise StrataError(f"CUDA device {index} cannot be used", found=str(error)) from error
        self.arch = 10 * major + minor
        properties = self._runtime.getDeviceProperties(index)
        name = properties["name"]
        self.name = name.decode() if isinstance(name, bytes) else str(name)
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.limit_bytes, self.taken_bytes = limit_bytes, 0
        self._functions: dict[tuple[Source, str], Any] = {}
        self._kept: list[Any] = []

    # ---- memory

    def alloc(self, n_bytes: int) -> int:
        n_bytes = -(-max(n_bytes, 1) // ALIGN) * ALIGN
        free = self._runtime.memGetInfo()[0]
        room = free if self.limit_bytes is None else min(free, self.limit_bytes - self.taken_bytes)
        if n_bytes > room:
            raise DoesNotFit("the device has too little memory left", found=f"{room} bytes", needed=f"{n_bytes} bytes")
        memory = self._cupy.cuda.Memory(n_bytes)
        self._runtime.memsetAsync(memory.ptr, 0, n_bytes, self.stream.ptr)
        self._kept.append(memory)
        self.taken_bytes += n_bytes
        return int(memory.ptr)

    def host(self, n_bytes: int) -> np.ndarray:
        memory = self._cupy.cuda.alloc_pinned_memory(n_bytes)
        self._kept.append(memory)
        array = np.frombuffer(memory, np.uint8, n_bytes)
        array[:] = 0
        return array

    def upload(self, address: int, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        if array.nbytes:
            # From pageable memory the call returns when the data is staged; the stream keeps the order.
            self._runtime.memcpyAsync(address, array.ctypes.data, array.nbytes, 1, self.stream.ptr)
            self.stream.synchronize()

    def download(self, address: int, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        if array.nbytes:
            self._runtime.memcpyAsync(array.ctypes.data, address, array.nbytes, 2, self.stream.ptr)
        self.stream.synchronize()

    # ---- launches

    def _function(self, launch: Launch) -> Any:
        key = (launch.source, launch.kernel)
        if key not in self._functions:
            binary = compile_source(launch.source, self.arch)
            module = self._cupy.cuda.function.Module()
            module.load(binary.cubin)
            self._kept.append(module)
            for kernel in launch.source.instances:
                self._functions[launch.source, kernel] = module.get_function(binary.lowered[kernel])
        return self._functions[key]

    def _prepare(self, launches: Sequence[Launch]) -> list[tuple[Any, Launch]]:
        prepared = []
        for launch in launches:
            function = self._function(launch)
            if launch.shared_bytes > DEFAULT_SHARED_BYTES:
                attribute = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._cupy.cuda.driver.funcSetAttribute(function.ptr, attribute, launch.shared_bytes)
            prepared.append((function, launch))
        return prepared

    def run(self, launches: Sequence[Launch]) -> None:
        for function, launch in self._prepare(launches):
            function(launch.grid, launch.block, launch.args, launch.shared_bytes, self.stream)

    def graph(self, launches: Sequence[Launch]) -> Callable[[], None]:
        prepared = self._prepare(launches)  # loading a module is not allowed while a stream is captured
        self.stream.synchronize()
        with self.stream:
            self.stream.begin_capture()
            try:
                for function, launch in prepared:
                    function(launch.grid, launch.block, launch.args, launch.shared_bytes, self.stream)
            finally:
                graph = self.stream.end_capture()
            graph.upload(self.stream)
        self._kept.append(graph)
        return lambda: graph.launch(self.stream)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        """Free everything. The device's memory is in use until queued work has ended."""
        self.stream.synchronize()
        self._functions.clear()
        self._kept.clear()
        self.taken_bytes = 0
