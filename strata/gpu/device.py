"""The device as the backend sees it: memory by address, launches, graphs. `CupyDevice` is the real one.

Windows and whatever belongs to them go through the main stream, so what is queued there runs in order; `synchronize`
waits for all of it. Bulk copies have streams of their own, which know nothing of the main one unless an event says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import numpy as np

from strata.base.errors import DoesNotFit, NoDevice, StrataError, need
from strata.base.progress import COMPILING, report
from strata.gpu.capture import Capture
from strata.gpu.compile import compile_source
from strata.gpu.driver_calls import DriverCalls, told
from strata.gpu.early_launch import EarlyLaunches
from strata.gpu.launch import CLUSTERS_FROM, Launch, Source, made_for
from strata.gpu.presence import import_cupy

ALIGN = 256
PAGE_BYTES = 2 << 20
"""What the driver rounds an allocation up to. A session has dozens of buffers, so the rests are used too."""
SURE_SHARED_BYTES = 32 << 10
"""Dynamic shared memory that needs no leave of the driver: 48 KiB less what kernels have of their own."""
LOAD_LESS = "Close what else uses the device, or load with a smaller context, fewer sessions or fewer slots."
PIN_LESS = "Let the device use less host memory, or raise the limit of locked memory."
HELD_WAIT_S = 0.0003
"""How long a wait for the device keeps the interpreter's lock: as long as a head takes. See driver_calls."""
MAIN, COPY_STREAMS = 0, (1, 2)
"""Numbers of streams. Pieces of a long copy take turns on the copy streams, so kernels of one run beside the other."""


class Device(Protocol):
    """Memory and launches. Addresses are ints, multiples of 256. Calls raise StrataError if the device fails."""

    name: str
    can_read_host: bool
    """Kernels reach registered host memory at its own address."""
    registers_read_only: bool
    """Shared read-only mappings of files can be registered."""
    clusters: bool
    """Blocks can form clusters (cluster.cuh)."""

    def current(self) -> AbstractContextManager[Any]:
        """Make this device the calling thread's own while the context lasts."""

    def alloc(self, n_bytes: int) -> int:
        """Zeroed device memory that lives until close."""

    def host(self, n_bytes: int) -> np.ndarray:
        """uint8 host memory that kernels read and write at the array's own address. The system gets it back when the
        device was closed and no view of the array is left."""

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy a contiguous array to the device; on return it may be changed."""

    def download(self, address: int, array: np.ndarray) -> None:
        """Copy into a contiguous array, after everything queued before."""

    def clear(self, address: int, n_bytes: int) -> None:
        """Zero bytes on the device, in order with what was queued before."""

    def run(self, launches: Sequence[Launch], stream: int = MAIN) -> None:
        """Queue launches one by one."""

    def copy_in(self, address: int, source: int, n_bytes: int, stream: int = MAIN) -> None:
        """Queue a copy from host memory of `host` or `register`, which must stay as it is until the copy is done, or
        from another place on the device."""

    def record(self, stream: int = MAIN, timed: bool = False) -> Any:
        """An event: everything queued on the stream up to now. timed: `elapsed_ms` takes it."""

    def elapsed_ms(self, first: Any, second: Any) -> float:
        """Milliseconds of the device between two timed events that have come to pass."""

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
            self.stream = cp.cuda.Stream(non_blocking=True)
            self._copy_streams = [cp.cuda.Stream(non_blocking=True) for _ in COPY_STREAMS]
        except self._runtime.CUDARuntimeError as error:
            raise NoDevice(
                f"CUDA device {index} cannot be used",
                found=str(error),
                needed="a device with memory for CUDA's own, and a driver that the installed CuPy supports",
                advice="`strata doctor` shows devices and driver.",
            ) from error
        self.arch = 10 * major + minor
        self.clusters = self.arch >= CLUSTERS_FROM
        properties = self._runtime.getDeviceProperties(index)
        name, self.processors = properties["name"], int(properties["multiProcessorCount"])
        self.processor_shared_bytes = int(properties["sharedMemPerMultiprocessor"])
        self.name = name.decode() if isinstance(name, bytes) else str(name)
        self.limit_bytes, self.taken_bytes = limit_bytes, 0
        self.can_read_host = self._has("HostRegisterSupported") and self._has("CanUseHostPointerForRegisteredMem")
        self.registers_read_only = self._has("HostRegisterReadOnlySupported")
        self._registered: dict[int, int] = {}
        self._rests: list[tuple[int, int]] = []
        """(address, bytes) left of pages."""
        self._functions: dict[tuple[Source, str], Any] = {}
        self._shared_bytes: dict[int, int] = {}  # by function: most dynamic shared memory of a launch so far
        self._capture = Capture(cp, self.stream)
        self._calls = DriverCalls()
        self.early = EarlyLaunches(self.arch, self._runtime.driverGetVersion())
        self._kept: list[Any] = []

    def _has(self, attribute: str) -> bool:
        number = getattr(self._runtime, "cudaDevAttr" + attribute)
        return bool(self._runtime.deviceGetAttribute(number, self._device.id))

    @contextmanager
    def current(self) -> Iterator[None]:
        self._enter()
        try:
            self._calls.use()  # CuPy leaves a thread without a context until its first call
            yield
        except BaseException:
            with suppress(StrataError):  # what went wrong first is what counts
                self._leave()
            raise
        self._leave()

    @told
    def _enter(self) -> None:
        self._device.__enter__()

    @told
    def _leave(self) -> None:
        self._device.__exit__(None, None, None)

    # ---- memory

    @told
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
            raise DoesNotFit("the device has too little memory left", found=f"{room:,} bytes",
                             needed=f"{n_bytes:,} bytes", advice=LOAD_LESS)  # fmt: skip
        whole = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            memory = self._cupy.cuda.Memory(whole)
        except (self._runtime.CUDARuntimeError, MemoryError) as error:
            raise DoesNotFit("the device refuses memory", found=f"{free:,} bytes, in pieces: {error}",
                             needed=f"{n_bytes:,} bytes", advice=LOAD_LESS) from error  # fmt: skip
        self._kept.append(memory)
        self._rests.append((int(memory.ptr) + n_bytes, whole - n_bytes))
        return int(memory.ptr)

    def host(self, n_bytes: int) -> np.ndarray:
        # Not from CuPy's pool, which keeps for the life of the process what was ever taken from it.
        try:
            memory = self._cupy.cuda.PinnedMemory(n_bytes, self._runtime.hostAllocPortable)
        except self._runtime.CUDARuntimeError as error:
            raise self._not_pinned(n_bytes, error) from error
        array = np.frombuffer(self._cupy.cuda.PinnedMemoryPointer(memory, 0), np.uint8, n_bytes)
        self._kept.append(memory)
        array[:] = 0
        return array

    @told
    def upload(self, address: int, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        if array.nbytes:
            # From pageable memory the call returns when the data is staged; the stream keeps the order.
            self._runtime.memcpyAsync(address, array.ctypes.data, array.nbytes, 1, self.stream.ptr)
            self.stream.synchronize()

    @told
    def download(self, address: int, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        if array.nbytes:
            self._runtime.memcpyAsync(array.ctypes.data, address, array.nbytes, 2, self.stream.ptr)
        self.stream.synchronize()

    @told
    def clear(self, address: int, n_bytes: int) -> None:
        if n_bytes:
            self._runtime.memsetAsync(address, 0, n_bytes, self.stream.ptr)

    # ---- copies beside the main stream

    def _stream(self, number: int) -> Any:
        return self.stream if number == MAIN else self._copy_streams[number - 1]

    def copy_in(self, address: int, source: int, n_bytes: int, stream: int = MAIN) -> None:
        if n_bytes:
            self._calls.copy(address, source, n_bytes, self._stream(stream).ptr)

    @told
    def record(self, stream: int = MAIN, timed: bool = False) -> Any:
        event = self._cupy.cuda.Event(disable_timing=not timed)
        self._calls.record(event.ptr, self._stream(stream).ptr)
        return event

    @told
    def elapsed_ms(self, first: Any, second: Any) -> float:
        return float(self._cupy.cuda.get_elapsed_time(first, second))

    def done(self, event: Any) -> bool:
        return self._calls.event_passed(event.ptr)

    @told
    def wait(self, event: Any) -> None:
        if not self._calls.event_passed(event.ptr):  # most have, and CuPy's call gives the interpreter's lock away
            event.synchronize()

    def after(self, stream: int, event: Any) -> None:
        self._calls.after(self._stream(stream).ptr, event.ptr)

    # ---- memory of the host

    def register(self, address: int, n_bytes: int, read_only: bool = False) -> None:
        need(self.can_read_host and (self.registers_read_only or not read_only), "this device registers such memory",
             found=f"{self.name}, read_only={read_only}", needed="a device that does")  # fmt: skip
        try:
            self._runtime.hostRegister(address, n_bytes, 8 if read_only else 0)
        except self._runtime.CUDARuntimeError as error:
            raise self._not_pinned(n_bytes, error) from error
        self._registered[address] = n_bytes

    @staticmethod
    def _not_pinned(n_bytes: int, error: Exception) -> DoesNotFit:
        return DoesNotFit("the system does not pin this memory for the device", found=str(error),
                          needed=f"{n_bytes:,} bytes", advice=PIN_LESS)  # fmt: skip

    @told
    def unregister(self, address: int) -> None:
        del self._registered[address]
        self._runtime.hostUnregister(address)

    def is_registered(self, address: int, n_bytes: int) -> bool:
        for at, n in self._registered.items():  # noqa: SIM110  a generator is slow, and swaps ask a dozen times an expert
            if at <= address and address + n_bytes <= at + n:
                return True
        return False

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
            launch = made_for(launch, self.arch, self.processors, self.processor_shared_bytes)
            if launch.shared_bytes > self._shared_bytes.get(function.ptr, SURE_SHARED_BYTES):
                attribute = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                self._cupy.cuda.driver.funcSetAttribute(function.ptr, attribute, launch.shared_bytes)
                self._shared_bytes[function.ptr] = launch.shared_bytes
            prepared.append((function, launch))
        return prepared

    @told
    def run(self, launches: Sequence[Launch], stream: int = MAIN) -> None:
        for function, one in self._prepare(launches):
            at = self._stream(stream).ptr
            self._calls.launch(function.ptr, one.grid, one.block, one.args, one.shared_bytes, at)

    @told
    def prepare(self, launches: Sequence[Launch]) -> None:
        self._prepare(launches)

    @told
    def graph(self, launches: Sequence[Launch]) -> Callable[[], None]:
        prepared = self._prepare(launches)  # loading a module is not allowed while a stream is captured
        self._capture.open_streams(launches)
        self.stream.synchronize()
        graph = self.early.captured(self._captured, prepared, self._runtime.CUDARuntimeError)
        self._kept.append(graph)
        return self._calls.graph(graph.graphExec, self.stream.ptr)

    def _captured(self, prepared: list[tuple[Any, Launch]]) -> Any:
        with self.stream:
            self.stream.begin_capture()
            try:
                self._capture.queue(prepared)
            except BaseException:
                with suppress(self._runtime.CUDARuntimeError):  # what went wrong first is what counts
                    self.stream.end_capture()
                raise
            graph = self.stream.end_capture()
            graph.upload(self.stream)
        return graph

    @told
    def synchronize(self) -> None:
        until = time.perf_counter() + HELD_WAIT_S
        while time.perf_counter() < until:
            if self._calls.stream_done(self.stream.ptr):
                return
        self.stream.synchronize()

    @told
    def close(self) -> None:
        """Free everything but host memory that arrays of `host` still show; what queued work uses, once it ended."""
        try:
            for stream in (self.stream, *self._copy_streams):
                stream.synchronize()
            for address in list(self._registered):
                self.unregister(address)
        finally:
            self._functions.clear()
            self._shared_bytes.clear()
            self._rests.clear()
            self._kept.clear()
            self._capture.close()
            self.taken_bytes = 0
