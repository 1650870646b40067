"""strata bench gpu-kernels uploads: from the host's memory to the device, with and without the device's layout.

GB/s of bytes as in the file: plain copies, copies and relayout from memory that is registered and from memory that is
not, the kernel that makes the layout alone, swaps of experts through slots, and ms of registering memory.
"""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from strata.base.errors import StrataError
from strata.cli.bench.gpu_kernels.timer import Timer
from strata.gpu.device import COPY_STREAMS, Device
from strata.gpu.link_fetch import field_map
from strata.gpu.relayout import relayout, relayout_bytes
from strata.gpu.relayout_stack import relayout_stack
from strata.gpu.slots import ExpertSlots
from strata.gpu.upload import RING_BYTES, Uploader
from strata.pack.experts import ExpertLayout, LayerExperts, Projection
from strata.pack.formats import by_name
from strata.pack.gguf_header import TensorInfo

FORMATS = ("Q4_K", "IQ4_NL", "Q2_0", "IQ3_XXS", "Q8_0")
SWAPPED = (("IQ3_XXS", "IQ3_XXS", "IQ4_NL"), ("Q2_0", "Q2_0", "Q2_0"))
ROWS, K, MOST_EXPERTS, SWAP_ROUNDS = 640, 2560, 256, 7
THREADS = (1, 2, 4, 8, 16)
STACKED = 16
"""Matrices of a launch of the layout's kernel alone."""
SPARE_BYTES = 64 << 20
"""Of the target: matrices are aligned there."""


def measure(t: Timer, n_bytes: int, names: tuple[str, ...] = FORMATS) -> None:
    """All of it with n_bytes of memory of the host, whole pages."""
    source, target = anonymous(n_bytes), t.device.alloc(n_bytes + SPARE_BYTES)
    plain_copies(t, source, target)
    for name in names:
        matrices(t, name, source, target, n_bytes + SPARE_BYTES)
    for formats in SWAPPED:
        swaps(t, formats, source)
    registering(t, n_bytes)


def anonymous(n_bytes: int, touched: bool = True) -> np.ndarray:
    """Memory of the process's own; touched: its pages are there, with random bytes."""
    out = np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)
    if touched:
        block = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
        for at in range(0, n_bytes, block.size):
            out[at : at + block.size] = block[: n_bytes - at]
    return out


@contextmanager
def registered(device: Device, memory: np.ndarray, read_only: bool = False) -> Iterator[None]:
    """The device may read this memory meanwhile."""
    device.register(memory.ctypes.data, memory.size, read_only)
    try:
        yield
    finally:
        device.unregister(memory.ctypes.data)


@contextmanager
def uploader(device: Device, **options: int) -> Iterator[Uploader]:
    up = Uploader(device, **options)
    try:
        yield up
    finally:
        up.close()


def _seconds(work: Callable[[], object], rounds: int) -> float:
    """Median by the clock, after one run to warm up."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _add(t: Timer, name: str, seconds: float, n_bytes: int) -> None:
    t.add(name, 1e6 * seconds, n_bytes)


def _whole(up: Uploader, target: int, source: np.ndarray) -> None:
    up.raw(target, source)
    up.finish()


def plain_copies(t: Timer, source: np.ndarray, target: int) -> None:
    """Bytes as they are: the driver's copy, and through pinned pieces that threads fill."""
    device, rounds = t.device, t.effort.rounds

    def pageable() -> None:
        device.upload(target, source)

    def direct() -> None:
        device.copy_in(target, source.ctypes.data, source.size, COPY_STREAMS[0])
        device.wait(device.record(COPY_STREAMS[0]))

    _add(t, "plain copy, pageable", _seconds(pageable, 1), source.size)
    for threads in THREADS:
        with uploader(device, threads=threads) as up:
            _add(t, f"through pinned pieces, {threads} threads",
                 _seconds(lambda up=up: _whole(up, target, source), rounds), source.size)  # fmt: skip
    with registered(device, source):
        _add(t, "plain copy, registered", _seconds(direct, rounds), source.size)


def matrices(t: Timer, name: str, source: np.ndarray, target: int, room: int) -> None:
    """Matrices of (ROWS, K) in a format with the device's layout. StrataError if one differs from numpy's."""
    format, rounds = by_name(name), t.effort.rounds
    one, stride = ROWS * format.row_bytes(K), -(-relayout_bytes(format, ROWS, K) // 256) * 256
    n = min(source.size // one, room // stride)
    raws = source[: n * one].reshape(n, ROWS, -1)

    def load(up: Uploader, ring_bytes: int, kind: str) -> None:
        def work() -> None:
            for i, raw in enumerate(raws):
                up.matrix(format, target + i * stride, raw)
            up.finish()

        _add(t, f"{name}, {kind}, ring of {ring_bytes >> 20} MiB", _seconds(work, rounds), raws.nbytes)
        for i in {0, n // 2, n - 1}:
            found = np.empty(relayout_bytes(format, ROWS, K), np.uint8)
            t.device.download(target + i * stride, found)
            if not np.array_equal(found, relayout(format, raws[i])):
                raise StrataError(f"an uploaded {name} matrix differs from numpy's", found=f"matrix {i} of {n}",
                                  needed="the same bytes", advice="Please report this.")  # fmt: skip

    with uploader(t.device, ring_bytes=RING_BYTES) as up:
        load(up, RING_BYTES, "pageable")
    for ring_bytes in (RING_BYTES, RING_BYTES // 2):
        with registered(t.device, source), uploader(t.device, ring_bytes=ring_bytes) as up:
            load(up, ring_bytes, "registered")
    field, table = field_map(format, K)
    stacked = min(STACKED, n)
    raw, bits = t.codes(stacked * one), t.place(table)
    places = t.place(np.array([(raw + i * one, target + i * stride) for i in range(stacked)], np.uint64))
    launches = relayout_stack(format, places, stacked, ROWS, K, bits, field)
    t.add(f"{name}, the layout's kernel alone", t.us(launches) / stacked, one)


# ---- swaps


def a_layer(names: tuple[str, str, str], E: int) -> ExpertLayout:
    """One layer of experts that no file has: gate, up and down in these formats."""
    parts = []
    shapes = zip(("gate", "up", "down"), names, ((ROWS, K), (ROWS, K), (K, ROWS)), strict=True)
    for part, name, (rows, columns) in shapes:
        format = by_name(name)
        one = rows * format.row_bytes(columns)
        tensor = TensorInfo(f"blk.0.ffn_{part}_exps.weight", (E, rows, columns), format.ggml_id, 0, 0, E * one)
        parts.append(Projection(tensor, rows, columns, 0, one, one, None))
    return ExpertLayout(None, (LayerExperts(*parts),), E, ROWS, K)


class Memory:
    """Experts side by side in an array: what slots are filled from."""

    def __init__(self, experts: ExpertLayout, data: np.ndarray):
        self.experts, self.data = experts, data
        sizes = [experts.E * p.n_bytes for p in experts.layers[0].projections]
        self.starts = np.cumsum([0, *sizes])[:3].tolist()

    def pinned(self, layer: int, e: int) -> None:
        return None

    def raw(self, layer: int, e: int, part: int) -> np.ndarray:
        p = self.experts.layers[layer].projections[part]
        at = self.starts[part] + e * p.n_bytes
        return self.data[at : at + p.n_bytes].reshape(p.rows, -1)


def swaps(t: Timer, names: tuple[str, str, str], source: np.ndarray) -> None:
    """Slots for half of the experts are filled, then three quarters of them swapped: until queued, until landed."""
    E = min(MOST_EXPERTS, source.size // a_layer(names, 1).blob_bytes(0))
    experts, n = a_layer(names, E), max(1, 3 * E // 8)
    blob = experts.blob_bytes(0)
    for kind in ("pageable", "registered"):
        slots = ExpertSlots(experts, [E // 2])
        with _registered_if(t.device, source, kind == "registered"), uploader(t.device) as up:
            slots.allocate(t.device, up, Memory(experts, source))
            began = time.perf_counter()
            slots.fill()
            filled = time.perf_counter() - began
            queued, landed = [], []
            for _ in range(SWAP_ROUNDS):
                victims = np.flatnonzero(slots.resident(0))[:n].tolist()
                incoming = np.flatnonzero(~slots.resident(0))[: len(victims)].tolist()
                began = time.perf_counter()
                places = [slots.evict(0, e) for e in victims]
                slots.publish()
                for e, slot in zip(incoming, places, strict=True):
                    slots.place(0, e, slot)
                queued.append(time.perf_counter() - began)
                slots.wait_landed()
                slots.publish()
                t.device.synchronize()
                landed.append(time.perf_counter() - began)
        what = f"{names[0]}/{names[2]}, {kind}: "
        _add(t, what + f"{E // 2} slots filled", filled, E // 2 * blob)
        _add(t, what + f"{n} swaps of {blob / 1e6:.2f} MB queued", statistics.median(queued), n * blob)
        _add(t, what + f"{n} swaps landed", statistics.median(landed), n * blob)


@contextmanager
def _registered_if(device: Device, memory: np.ndarray, wanted: bool) -> Iterator[None]:
    if wanted:
        with registered(device, memory):
            yield
    else:
        yield


# ---- registering


def registering(t: Timer, n_bytes: int) -> None:
    """How long registering takes: of untouched and touched memory, and of a shared read-only file in the page cache."""
    device = t.device
    for touched in (False, True):
        memory = anonymous(n_bytes, touched)
        began = time.perf_counter()
        with registered(device, memory):
            _add(t, f"registering {'touched' if touched else 'untouched'} memory", time.perf_counter() - began, n_bytes)
    if not device.registers_read_only:
        return
    with tempfile.NamedTemporaryFile() as file:
        anonymous(n_bytes).tofile(file)
        file.flush()
        shared = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        int(shared[:: mmap.PAGESIZE].max())  # its pages are there from now on
        began = time.perf_counter()
        with registered(device, shared, read_only=True):
            _add(t, "registering a shared read-only file", time.perf_counter() - began, n_bytes)
            target = device.alloc(n_bytes)
            with uploader(device) as up:
                seconds = _seconds(lambda: _whole(up, target, shared), t.effort.rounds)
            _add(t, "plain copy, from there", seconds, n_bytes)
