"""The device as the backend sees it: memory by address, launches, graphs. `CupyDevice` is the real one.

Windows and whatever belongs to them go through the main stream, so what is queued there runs in order; `synchronize`
waits for all of it. Bulk copies have streams of their own, which know nothing of the main one unless an event says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from strata.base.errors import DoesNotFit, StrataError, need
from strata.base.progress import COMPILING, report
from strata.gpu.compile import compile_source
from strata.gpu.launch import Launch, Source

ALIGN = 256
PAGE_BYTES = 2 << 20
"""What the driver rounds an allocation up to. A session has dozens of buffers, so the rests are used too."""
DEFAULT_SHARED_BYTES = 48 << 10
MAIN, COPY_STREAMS = 0, (1, 2)
"""Numbers of streams. Pieces of a long copy take turns on the copy streams, so kernels of one run beside the other."""


class Device(Protocol):
    """Memory and launches. Addresses are ints, multiples of 256."""

    name: str
    can_read_host: bool
    """Kernels reach registered host memory at its own address."""
    registers_read_only: bool
    """Shared read-only mappings of files can be registered."""

    def current(self) -> AbstractContextManager[Any]:
        """Make this device the calling thread's own while the context lasts."""

    def alloc(self, n_bytes: int) -> int:
        """Zeroed device memory that lives until close."""

    def host(self, n_bytes: int) -> np.ndarray:
        """uint8 host memory that kernels read and write at the array's own address."""

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous array to the device; on return it may be changed."""

    def download(self, address: int, array: np.ndarray) -> None:
        """Copy into a contiguous array, after everything queued before."""

    def clear(self, address: int, n_bytes: int) -> None:
        """Zero bytes on the device, in order with what was queued before."""

    def run(self, launches: Sequence[Launch], stream: int = MAIN) -> None:
        """Queue launches one by one."""

    def copy_in(self, address: int, source: int, n_bytes: int, stream: int = MAIN) -> None:
        """Queue a copy from host memory of `host` or `register`, which must stay as it is until the copy is done."""

    def record(self, stream: int = MAIN) -> Any:
        """An event: everything queued on the stream up to now."""

    def done(self, event: Any) -> bool:
        """Whether an event has come to pass; does not wait."""

    def wait(self, event: Any) -> None:
        """The host waits for an event."""

    def after(self, stream: int, event: Any) -> None:
        """What is queued on the stream from now on waits for an event."""

    def register(self, address: int, n_bytes: int, read_only: bool = False) -> None:
        """Pin whole pages of host memory, so that copies run at link speed and kernels can read them.

        read_only is for shared read-only mappings, and only for them; a private read-only mapping must never come here.
        DoesNotFit if the system refuses.
        """

    def unregister(self, address: int) -> None:
        """Undo `register`; nothing that reads the memory may be queued any more."""

    def is_registered(self, address: int, n_bytes: int) -> bool:
        """Whether bytes lie in memory that was registered as one."""

    def prepare(self, launches: Sequence[Launch]) -> None:
        """Compile and load the kernels of launches that will be run later."""

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


LEAST_CAPABILITY = (7, 5)


def cuda_problem(index: int, capability: tuple[int, int] | None) -> StrataError | None:
    """Why this process cannot compute on CUDA device `index`, or None. Makes no context on it."""
    if capability is not None and capability < LEAST_CAPABILITY:
        return StrataError(
            f"CUDA device {index} is too old",
            found="compute capability {}.{}".format(*capability),
            needed="{}.{} or newer".format(*LEAST_CAPABILITY),
            advice='Load with device="cpu".',
        )
    try:
        cp = import_cupy()
    except StrataError as error:
        return error
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        return StrataError("CuPy finds no CUDA device", found=str(error), advice="`strata doctor` shows the driver.")
    if index >= count:
        return StrataError(f"CuPy finds no CUDA device {index}", found=f"{count} devices")
    return None


def take_rest(rests: list[tuple[int, int]], n_bytes: int) -> int:
    """The address of n_bytes in the smallest rest that has them, which shrinks; 0 if none has."""
    fitting = [(size, i) for i, (_, size) in enumerate(rests) if size >= n_bytes]
    if not fitting:
        return 0
    _, i = min(fitting)
    address, size = rests.pop(i)
    if size > n_bytes:
        rests.append((address + n_bytes, size - n_bytes))
    return address


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
            raise StrataError(
                f"CUDA device {index} cannot be used",
                found=str(error),
                needed="a device and a driver that the installed CuPy supports",
                advice="`strata doctor` shows devices and driver.",
            ) from error
        self.arch = 10 * major + minor
        properties = self._runtime.getDeviceProperties(index)
        name = properties["name"]
        self.name = name.decode() if isinstance(name, bytes) else str(name)
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.limit_bytes, self.taken_bytes = limit_bytes, 0
        self._copy_streams = [cp.cuda.Stream(non_blocking=True) for _ in COPY_STREAMS]
        self.can_read_host = self._has("HostRegisterSupported") and self._has("CanUseHostPointerForRegisteredMem")
        self.registers_read_only = self._has("HostRegisterReadOnlySupported")
        self._registered: dict[int, int] = {}
        self._rests: list[tuple[int, int]] = []
        """(address, bytes) left of pages."""
        self._functions: dict[tuple[Source, str], Any] = {}
        self._side_streams: list[Any] = []
        self._kept: list[Any] = []

    def _has(self, attribute: str) -> bool:
        number = getattr(self._runtime, "cudaDevAttr" + attribute)
        return bool(self._runtime.deviceGetAttribute(number, self._device.id))

    def current(self) -> AbstractContextManager[Any]:
        return self._device

    # ---- memory

    def alloc(self, n_bytes: int) -> int:
        n_bytes = -(-max(n_bytes, 1) // ALIGN) * ALIGN
        within = self.limit_bytes is None or n_bytes <= self.limit_bytes - self.taken_bytes
        address = (within and take_rest(self._rests, n_bytes)) or self._new_pages(n_bytes)
        self.clear(address, n_bytes)
        self.taken_bytes += n_bytes
        return address

    def _new_pages(self, n_bytes: int) -> int:
        """Memory of the driver, which gives whole pages; what is left of them is noted for later."""
        free = self._runtime.memGetInfo()[0]
        room = free if self.limit_bytes is None else min(free, self.limit_bytes - self.taken_bytes)
        if n_bytes > room:
            raise DoesNotFit("the device has too little memory left", found=f"{room} bytes", needed=f"{n_bytes} bytes")
        whole = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            memory = self._cupy.cuda.Memory(whole)
        except (self._runtime.CUDARuntimeError, MemoryError) as error:
            found = f"{free} bytes, in pieces: {error}"
            raise DoesNotFit("the device refuses memory", found=found, needed=f"{n_bytes} bytes") from error
        self._kept.append(memory)
        self._rests.append((int(memory.ptr) + n_bytes, whole - n_bytes))
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

    def clear(self, address: int, n_bytes: int) -> None:
        if n_bytes:
            self._runtime.memsetAsync(address, 0, n_bytes, self.stream.ptr)

    # ---- copies beside the main stream

    def _stream(self, number: int) -> Any:
        return self.stream if number == MAIN else self._copy_streams[number - 1]

    def copy_in(self, address: int, source: int, n_bytes: int, stream: int = MAIN) -> None:
        if n_bytes:
            self._runtime.memcpyAsync(address, source, n_bytes, 1, self._stream(stream).ptr)

    def record(self, stream: int = MAIN) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self._stream(stream))
        return event

    def done(self, event: Any) -> bool:
        return bool(event.done)

    def wait(self, event: Any) -> None:
        event.synchronize()

    def after(self, stream: int, event: Any) -> None:
        self._stream(stream).wait_event(event)

    # ---- memory of the host

    def register(self, address: int, n_bytes: int, read_only: bool = False) -> None:
        need(self.can_read_host and (self.registers_read_only or not read_only), "this device registers such memory",
             found=f"{self.name}, read_only={read_only}")  # fmt: skip
        try:
            self._runtime.hostRegister(address, n_bytes, 8 if read_only else 0)
        except self._runtime.CUDARuntimeError as error:
            raise DoesNotFit(
                "the system does not pin this memory for the device",
                found=str(error),
                needed=f"{n_bytes} bytes",
                advice="Let the device use less host memory, or raise the limit of locked memory.",
            ) from error
        self._registered[address] = n_bytes

    def unregister(self, address: int) -> None:
        del self._registered[address]
        self._runtime.hostUnregister(address)

    def is_registered(self, address: int, n_bytes: int) -> bool:
        return any(at <= address and address + n_bytes <= at + n for at, n in self._registered.items())

    # ---- launches

    def _function(self, launch: Launch) -> Any:
        key = (launch.source, launch.kernel)
        if key not in self._functions:
            report(COMPILING, len({source for source, _ in self._functions}), 0, launch.source.path.name)
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

    def run(self, launches: Sequence[Launch], stream: int = MAIN) -> None:
        for function, launch in self._prepare(launches):
            function(launch.grid, launch.block, launch.args, launch.shared_bytes, self._stream(stream))

    def prepare(self, launches: Sequence[Launch]) -> None:
        self._prepare(launches)

    def graph(self, launches: Sequence[Launch]) -> Callable[[], None]:
        prepared = self._prepare(launches)  # loading a module is not allowed while a stream is captured
        most = max((launch.branch for launch in launches), default=0)
        while len(self._side_streams) < most:
            self._side_streams.append(self._cupy.cuda.Stream(non_blocking=True))
        self.stream.synchronize()
        with self.stream:
            self.stream.begin_capture()
            try:
                self._queue(prepared)
            finally:
                graph = self.stream.end_capture()
            graph.upload(self.stream)
        self._kept.append(graph)
        return lambda: graph.launch(self.stream)

    def _queue(self, prepared: list[tuple[Any, Launch]]) -> None:
        """Queue launches while a graph is captured: branches of a fork on streams of their own."""
        fork, waiting, start = 0, set(), None
        for function, launch in prepared:
            if launch.fork != fork:
                self._join(waiting)
                fork, start = launch.fork, None
                if fork:
                    start = self._cupy.cuda.Event(disable_timing=True)
                    start.record(self.stream)
                    self._kept.append(start)
            stream = self.stream
            if launch.branch:
                stream = self._side_streams[launch.branch - 1]
                if launch.branch not in waiting:
                    stream.wait_event(start)
                    waiting.add(launch.branch)
            function(launch.grid, launch.block, launch.args, launch.shared_bytes, stream)
        self._join(waiting)

    def _join(self, branches: set[int]) -> None:
        """The main stream waits for side streams."""
        for branch in sorted(branches):
            end = self._cupy.cuda.Event(disable_timing=True)
            end.record(self._side_streams[branch - 1])
            self.stream.wait_event(end)
            self._kept.append(end)
        branches.clear()

    def synchronize(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        """Free everything. The device's memory is in use until queued work has ended."""
        for stream in (self.stream, *self._copy_streams):
            stream.synchronize()
        for address in list(self._registered):
            self.unregister(address)
        self._functions.clear()
        self._rests.clear()
        self._kept.clear()
        self.taken_bytes = 0


def required_device(what: str, index: int = 0) -> CupyDevice:
    """A CUDA device; StrataError saying that `what` needs one, and how to get what is missing."""
    try:
        return CupyDevice(index)
    except StrataError as error:
        raise StrataError(
            f"{what} needs a GPU",
            found=str(error),
            needed="an NVIDIA GPU, its driver, CuPy and NVRTC",
            advice="pip install 'strata[cuda12]' or 'strata[cuda13]', after the CUDA version of the driver.",
        ) from error
