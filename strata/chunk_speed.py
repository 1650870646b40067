"""How fast a GPU reads chunks of a prompt, with experts in its memory or in the host's, beside what cannot be beaten.

Routing is replayed: random weights would send all tokens to the same experts. Two floors are worked out from rates
measured in the same run: bytes of experts over that of the link, operations over that of tensor cores.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from strata.arch import architecture_of
from strata.base.doorbell import Mailbox
from strata.base.errors import need
from strata.base.geometry import CELL_ROWS
from strata.base.program import Op
from strata.gpu.backend import GpuBackend
from strata.gpu.chunk_lower import ChunkLowering
from strata.gpu.device import COPY_STREAMS, Device
from strata.gpu.expert_store import ExpertStore
from strata.gpu.expert_stream import COPY, ExpertStream
from strata.gpu.gemm.rate import BLOCK_OPERATIONS, tensor_rate
from strata.gpu.hybrid import Hybrid
from strata.gpu.prefill import Chunks
from strata.gpu.prefill_ops import CHUNK_LOWERING
from strata.gpu.slots import ExpertSlots
from strata.gpu.speed import copy_blocks
from strata.gpu.state import DeviceState
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.required_device import required_device

PLACES = ("resident", "ram", "pageable")
"""Where all experts are: in the device's memory, in pinned memory of the host, or in memory that is not pinned."""
NOT_FIRST = (1, 2)
RATE_BLOCKS, RATE_ROUNDS = 1056, 2000
"""Of the tensor cores' measurement; eight blocks for each of 132 processors."""
LINK_COPIES = 12
MOST_PINNED = 16 << 20
"""Bytes of the link's measurement where experts are not pinned."""


@dataclass(frozen=True)
class ChunkSpeed:
    """Chunks of `rows` rows with experts at `where`, or all chunks of a prompt with so many and experts as they were
    loaded; times in milliseconds, medians of repeats.

    ms        of a chunk by the clock, the next chunk's n-gram rows aside; from least_ms to most_ms
    host_ms   of it, until the host had queued everything
    gpu_ms    the main stream between start and end without wait_ms, in which it waits for experts
    copy_ms   the link is busy with experts, for copy_bytes
    link_floor_ms, tensor_floor_ms   no chunk is faster than either
    """

    rows: int
    where: str
    ms: float
    least_ms: float
    most_ms: float
    tokens_per_s: float
    host_ms: float
    gpu_ms: float
    wait_ms: float
    copy_ms: float
    copy_bytes: int
    operations: float
    link_floor_ms: float
    tensor_floor_ms: float

    @property
    def floor_share(self) -> float:
        """Of the time, what the larger floor takes."""
        return max(self.link_floor_ms, self.tensor_floor_ms) / self.ms

    def share(self, ms: float) -> float:
        """Percent of the time."""
        return 100 * ms / self.ms


@dataclass(frozen=True)
class PrefillSpeed:
    """link_gbps: copies of pinned memory, 0 if none was measured. tensor_tops: int8 operations of tensor cores, 10^12 a
    second. ops_ms: by place, ms by kind of op of the largest chunk, one op after the other; only if asked for."""

    device: str
    layers: int
    position: int
    link_gbps: float
    tensor_tops: float
    chunks: tuple[ChunkSpeed, ...]
    ops_ms: dict[str, dict[str, float]] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


class NoService:
    """In the place of the CPU's service where no window is run: chunks ask it for nothing."""

    def __init__(self, mailbox: Mailbox, address: int, memory: object):
        self.memory = memory

    def begin_window(self) -> None: ...

    def end_window(self) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def open_chunks(
    path: str | Path, context: int, kv: str, most_rows: int, places: Sequence[str], device: Device | None = None,
    layers: int | None = None,
) -> Iterator[GpuBackend]:  # fmt: skip
    """A model's GPU backend that reads chunks of up to most_rows rows, its experts in the host's memory, pinned unless
    they are to be "pageable", and, for "resident", in the device's too; it is closed at the end. layers: the first ones
    alone."""
    need(not {"ram", "pageable"} <= set(places), "places of experts", found=tuple(places), needed="pinned ones or not")
    device = device or required_device("a measurement of a GPU's speed")
    with GgufFile(path) as gguf, contextlib.closing(device):  # also if there is no backend to close it
        arch = architecture_of(gguf)
        g = arch.read_geometry(gguf)
        arch.check_contract(gguf, g)
        if layers is not None:
            ngram = g.ngram if g.ngram and g.ngram.layer < layers else None
            g = replace(g, L=layers, kinds=g.kinds[:layers], ngram=ngram)
        programs = arch.build_programs(g, -(-context // CELL_ROWS) * CELL_ROWS, kv, chunk_rows=most_rows)
        experts = expert_layout(gguf, g.L)
        slots = ExpertSlots(experts, [experts.E if "resident" in places else 0] * g.L, by_table=True)
        pinned = "mapped" if device.registers_read_only else "pinned"
        store = ExpertStore(experts, gguf, device, "file" if "pageable" in places else pinned)
        order = [(layer, e) for layer in range(g.L) for e in range(experts.E)]
        hybrid = None if "resident" in places else Hybrid(device, experts, g.K, NoService)
        backend = GpuBackend(Tensors(gguf), g, experts, programs, device, slots=slots, hybrid=hybrid, store=store,
                             fill_order=order)  # fmt: skip
        try:
            yield backend
        finally:
            backend.close()


# ---- rates and floors


def link_rate(backend: GpuBackend, stream: ExpertStream) -> float:
    """GB/s of copies of pinned memory into the ring, as large as a place or a tensor; of experts if they lie there."""
    device, store, p = backend.device, backend.store, backend.slots.experts.layers[0].projections[0]
    source, n_bytes = int(store.addresses[0, 0, 0]), min(stream.stage_bytes, backend.slots.experts.E * p.n_bytes)
    if not device.is_registered(source, n_bytes):
        n_bytes = min(n_bytes, MOST_PINNED)
        pinned = device.host(n_bytes)
        source = pinned.ctypes.data
    device.synchronize()
    for _ in range(2):  # once to warm up
        begin = device.record(COPY, timed=True)
        for _ in range(LINK_COPIES):
            device.copy_in(stream.base, source, n_bytes, COPY)
        end = device.record(COPY, timed=True)
        device.wait(end)
    return LINK_COPIES * n_bytes / device.elapsed_ms(begin, end) / 1e6


def measured_tops(device: Device, blocks: int = RATE_BLOCKS, rounds: int = RATE_ROUNDS, at: int = 0) -> float:
    """10^12 int8 operations a second of tensor cores. at: 4 * blocks bytes of the device that may be written; 0: new
    ones."""
    launches = tensor_rate(blocks, rounds, at or device.alloc(4 * blocks))
    device.run(launches)
    begin = device.record(timed=True)
    device.run(launches)
    end = device.record(timed=True)
    device.wait(end)
    return blocks * rounds * BLOCK_OPERATIONS / device.elapsed_ms(begin, end) / 1e9


def operations(backend: GpuBackend, rows: int) -> float:
    """Multiplications and additions of a chunk's products with matrices; attention and the delta rule are left out."""
    tensors, total = backend.weights.tensors, 0.0
    for op in backend.programs.chunk.ops:
        k = op.consts
        if op.kind == "linear":
            total += sum(k["rows"] * prod(tensors.info(op.buffers[f"w{i}"]).shape) for i in range(k["n"]))
        elif op.kind == "experts":
            total += 3 * k["D"] * (k["K"] * k["F"] + k["shared_width"])
    return 2.0 * rows * total


# ---- chunks


@contextlib.contextmanager
def _replayed(backend: GpuBackend, chunks: Chunks, ids: np.ndarray, stream: ExpertStream | None) -> Iterator[None]:
    """Within the block, row t of every chunk asks for experts ids[t], (rows, L, K) int32, whatever the router says;
    experts come by `stream`, or from their slots."""
    device, g = backend.device, backend.geometry
    need(ids.shape[1:] == (g.L, g.K), "replayed experts", found=ids.shape, needed=f"(rows, {g.L}, {g.K})")
    of_layer = 4 * len(ids) * g.K
    table = device.alloc(g.L * of_layer)
    device.upload(table, np.ascontiguousarray(ids.transpose(1, 0, 2), np.int32))

    def router(c: ChunkLowering, op: Op) -> None:
        CHUNK_LOWERING["router"](c, op)
        c.add(copy_blocks(table + op.layer * of_layer, c.at(op, "ids"), 4 * c.T * g.K))

    before = chunks.table, chunks.stream, chunks._queues
    chunks.table, chunks.stream, chunks._queues = CHUNK_LOWERING | {"router": router}, stream, {}
    try:
        yield
    finally:
        chunks.table, chunks.stream, chunks._queues = before


class _Watch:
    """Timed events of the stages of one chunk."""

    def __init__(self, device: Device):
        self._device, self.events = device, {}

    def __call__(self, point: str, number: int) -> None:
        stream = COPY if point in ("copies", "copied") else 0
        self.events[point, number] = self._device.record(stream, timed=True)

    def total_ms(self, first: str, second: str) -> float:
        pairs = [(event, self.events[second, n]) for (point, n), event in self.events.items() if point == first]
        return sum(self._device.elapsed_ms(*pair) for pair in pairs)


@dataclass(frozen=True)
class _Run:
    ms: float
    host_ms: float
    gpu_ms: float
    wait_ms: float
    copy_ms: float
    copy_bytes: int

    @classmethod
    def sum(cls, runs: Sequence[_Run]) -> _Run:
        return cls(*(sum(getattr(r, f.name) for r in runs) for f in fields(cls)))


def _run(
    backend: GpuBackend, chunks: Chunks, tokens: np.ndarray, position: int, previous: tuple[int, int] = NOT_FIRST
) -> _Run:
    """A chunk of the bound state whose n-gram rows are known, as between the chunks of a long prompt."""
    device, watch = backend.device, _Watch(backend.device)
    if chunks.ngram_rows is not None:
        chunks.ngram_rows.ahead(tokens, previous)
    if chunks.stream is not None:
        chunks.stream.watch = watch
    try:
        device.synchronize()
        began, begin = time.perf_counter(), device.record(timed=True)
        lowering = chunks.queue(tokens, previous, position)
        queued, end = time.perf_counter(), device.record(timed=True)
        device.synchronize()
        ms = 1e3 * (time.perf_counter() - began)
        for stream in COPY_STREAMS:
            device.wait(device.record(stream))
    finally:
        if chunks.stream is not None:
            chunks.stream.watch = None
    backend._check(lowering, backend._error_word, position)
    wait_ms = watch.total_ms("waits", "arrived")
    gpu_ms = device.elapsed_ms(begin, end) - wait_ms
    n_bytes = chunks.stream.coming_bytes if chunks.stream is not None else 0
    return _Run(ms, 1e3 * (queued - began), gpu_ms, wait_ms, watch.total_ms("copies", "copied"), n_bytes)


def measure_chunks(
    backend: GpuBackend,
    ids: np.ndarray,
    *,
    rows: Sequence[int],
    places: Sequence[str] = PLACES[:2],
    position: int = 0,
    repeats: int = 5,
    rate_rounds: int = RATE_ROUNDS,
    ops: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> PrefillSpeed:
    """Measure chunks of these rows, of a session that has read `position` tokens.

    ids          (most rows, L, K) int32, the experts of a chunk's tokens
    places       of PLACES; "resident" first: its experts leave the slots for the others
    ops          also time each kind of op of the largest chunk
    on_progress  called with kinds of chunks measured and in all
    BadArgument for rows or places that the backend does not have.
    """
    chunks, g, device = backend._chunks, backend.geometry, backend.device
    need(chunks is not None and chunks.stream is not None, "chunks to measure", found="none that stream",
         needed="a backend of open_chunks")  # fmt: skip
    need(tuple(p for p in PLACES if p in places) == tuple(places), "places of experts", found=tuple(places),
         needed=" then ".join(PLACES))  # fmt: skip
    need(repeats >= 1 and max(rows) <= min(chunks.most_rows, len(ids)), "rows of a chunk", found=tuple(rows),
         needed=f"at most {min(chunks.most_rows, len(ids))}")  # fmt: skip
    stream, found, slots, ops_ms = chunks.stream, [], backend.slots, {}
    link_gbps, tensor_tops = link_rate(backend, stream), measured_tops(device, rounds=rate_rounds)
    state = backend.new_state()
    backend._bind(state)
    tokens = np.random.default_rng(1).integers(0, g.V, max(rows)).astype(np.int32)
    for where in places:
        if where != "resident":
            for layer in range(g.L):
                for e in np.flatnonzero(slots.resident(layer)).tolist():
                    slots.evict(layer, e)
        need(where != "resident" or all(slots.resident(l).all() for l in range(g.L)), "experts on the device",
             found="a part of them", needed="all")  # fmt: skip
        with _replayed(backend, chunks, ids, stream if where != "resident" else None):
            for T in rows:
                runs = [_run(backend, chunks, tokens[:T], position) for _ in range(1 + repeats)][1:]
                found.append(_speed(runs, T, where, operations(backend, T), link_gbps, tensor_tops))
                if on_progress is not None:
                    on_progress(len(found), len(places) * len(rows))
            if ops:
                chunks.run_timed(tokens, NOT_FIRST, position)  # once to warm up
                ops_ms[where] = chunks.run_timed(tokens, NOT_FIRST, position)
    return PrefillSpeed(device.name, g.L, position, link_gbps, tensor_tops, tuple(found), ops_ms)


def prompt_rates(backend: GpuBackend) -> tuple[float, float]:
    """(GB/s of the link, or 0 where no experts cross it; 10^12 int8 operations a second of tensor cores) of a loaded
    backend that reads chunks, measured in their memory."""
    chunks = backend._chunks
    if chunks.borrow is not None:
        chunks.borrow()
    link_gbps = link_rate(backend, chunks.stream) if chunks.stream is not None else 0.0
    return link_gbps, measured_tops(backend.device, RATE_BLOCKS, RATE_ROUNDS, chunks.arena.base)


def measure_prompt(
    backend: GpuBackend, state: DeviceState, tokens: np.ndarray, repeats: int, rates: tuple[float, float]
) -> ChunkSpeed:
    """Where the time of a prompt's whole cells goes, read as chunks into a state that is empty before and after.

    rates  of `prompt_rates`      BadArgument for tokens that fill no cell
    """
    cells, most = len(tokens) // CELL_ROWS * CELL_ROWS, backend._chunks.most_rows
    need(cells > 0 and repeats >= 1, "tokens of a prompt", found=len(tokens), needed=f">= {CELL_ROWS}")
    tokens, runs = np.asarray(tokens[:cells], np.int32), []
    for _ in range(repeats):
        state.clear()
        backend._bind(state)
        parts = []
        for first in range(0, cells, most):
            previous = (int(tokens[first - 1]), int(tokens[first - 2])) if first else (-1, -1)
            parts.append(_run(backend, backend._chunks, tokens[first : first + most], first, previous))
        runs.append(_Run.sum(parts))
    state.clear()
    return _speed(runs, cells, "loaded", operations(backend, cells), *rates)


def _speed(runs: list[_Run], T: int, where: str, ops: float, link_gbps: float, tensor_tops: float) -> ChunkSpeed:
    names = ("ms", "host_ms", "gpu_ms", "wait_ms", "copy_ms")
    ms, host_ms, gpu_ms, wait_ms, copy_ms = (statistics.median(getattr(r, name) for r in runs) for name in names)
    n_bytes = runs[-1].copy_bytes
    return ChunkSpeed(
        rows=T, where=where, ms=ms, least_ms=min(r.ms for r in runs), most_ms=max(r.ms for r in runs),
        tokens_per_s=1e3 * T / ms, host_ms=host_ms, gpu_ms=gpu_ms, wait_ms=wait_ms, copy_ms=copy_ms,
        copy_bytes=n_bytes, operations=ops, link_floor_ms=n_bytes / link_gbps / 1e6 if n_bytes else 0.0,
        tensor_floor_ms=ops / tensor_tops / 1e9,
    )  # fmt: skip
