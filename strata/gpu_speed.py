"""How fast a GPU runs windows and their ops, beside the bytes that they cannot do without.

Routing is replayed: random weights would send all tokens to the same experts, and what experts a window asks for
decides what it reads. Ops are timed in graphs of all their layers, repeated, so that the host's part of a launch does
not count; windows are the graphs that are served, but for one more node beside the first, which makes logits of the
table's experts. Routers choose from these.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from strata.arch import architecture_of
from strata.base.errors import need
from strata.base.geometry import CELL_ROWS, WINDOW_ROWS
from strata.base.program import Op, Program
from strata.gpu.backend import GpuBackend
from strata.gpu.device import Device
from strata.gpu.launch import Launch
from strata.gpu.lower import Lowering
from strata.gpu.ops import LOWERING, linear, router
from strata.gpu.slots import ExpertSlots
from strata.gpu.speed import copy_blocks, replay_logits
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.required_device import required_device

ROWS = (1, 2, 4, 8)
TOKENS = (17, 4, 99, 256, 31, 500, 7, 12)
"""Of every window; embeddings differ, so rows do."""
CACHE_BYTES = 64 << 20
"""Weights of an op's layers that are fewer may stay in a large L2 while the op is timed alone."""


@dataclass(frozen=True)
class Effort:
    """How much is measured: nodes of a timed graph, times it is launched, bytes of the copy, windows replayed."""

    nodes: int = 400
    rounds: int = 7
    copy_bytes: int = 512 << 20
    windows: int = 32


DEFAULT_EFFORT = Effort()


@dataclass(frozen=True)
class OpSpeed:
    """An op of a window, means over its layers. us and nodes a launch of it; n_bytes of weights and state that it must
    touch; cached: all its layers' bytes fit into a large L2, so that `us` may be less than in a window."""

    name: str
    layers: int
    nodes: float
    us: float
    n_bytes: float
    gbps: float
    copy_share: float
    cached: bool


@dataclass(frozen=True)
class WindowSpeed:
    """A window of `rows` rows. us on the device; wall_us of the call, with the host's part; n_bytes the least it must
    touch; distinct experts a layer; card_us: what another card takes for these bytes and nodes. head_..: the same of
    the logits of all rows with their argmax, which are no part of the window."""

    rows: int
    us: float
    wall_us: float
    nodes: int
    n_bytes: float
    gbps: float
    copy_share: float
    distinct: float
    card_us: float
    head_us: float
    head_nodes: int
    head_bytes: float
    head_card_us: float
    ops: tuple[OpSpeed, ...]


@dataclass(frozen=True)
class GpuSpeed:
    """copy_gbps: read and written, of a copy on the device; node_us: a graph's node that does next to nothing."""

    device: str
    layers: int
    position: int
    copy_gbps: float
    node_us: float
    weight_bytes: int
    windows: tuple[WindowSpeed, ...]

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@contextlib.contextmanager
def open_backend(
    path: str | Path, context: int, kv: str, device: Device | None = None, by_table: bool = False
) -> Iterator[GpuBackend]:
    """A model's GPU backend with all its experts on the device (None: the first one); it is closed at the end.

    by_table: kernels find experts through a table of slots, as where VRAM holds a part, and not at fixed places
    """
    device = device or required_device("a measurement of a GPU's speed")
    with GgufFile(path) as gguf, contextlib.closing(device):  # also if there is no backend to close it
        arch = architecture_of(gguf)
        g = arch.read_geometry(gguf)
        arch.check_contract(gguf, g)
        programs = arch.build_programs(g, -(-context // CELL_ROWS) * CELL_ROWS, kv)
        experts = expert_layout(gguf, g.L)
        slots = ExpertSlots(experts, by_table=True) if by_table else None
        order = [(layer, e) for layer in range(g.L) for e in range(g.E)] if by_table else None
        backend = GpuBackend(Tensors(gguf), g, experts, programs, device, slots=slots, fill_order=order)
        try:
            yield backend
        finally:
            backend.close()


# ---- routing


@contextlib.contextmanager
def replayed(
    backend: GpuBackend, table: np.ndarray, rows: Sequence[int] = ROWS, by_position: bool = False
) -> Iterator[Callable[[], None]]:
    """Within the block, windows of these rows take their experts from table (n, L, K) int32, one row a token.

    Gives a call that goes back to the table's first row. by_position: a window begins with the table's row of its
    position, whatever ran before; the model must have attention layers.
    """
    g, device = backend.geometry, backend.device
    need(table.ndim == 3 and table.shape[1:] == (g.L, g.K), "a table of replayed experts", found=table.shape,
         needed=f"(n, {g.L}, {g.K})")  # fmt: skip
    at = backend.memory.address("pos") if by_position else device.alloc(8)  # every window brings its position
    ids, logits, arrived = (device.alloc(4 * n) for n in (table.size, g.L * max(rows) * g.E, 1))
    device.upload(ids, np.ascontiguousarray(table, np.int32))

    def logits_of(c: Lowering, op: Op) -> int:
        return logits + 4 * op.layer * c.T * g.E

    def embed(c: Lowering, op: Op) -> None:
        c.branch()
        LOWERING["embed"](c, op)
        c.branch()
        c.add(replay_logits(ids, at, len(table), g.L, c.T, g.K, g.E, logits, arrived, moves=not by_position))
        c.join()

    def rewind() -> None:
        device.upload(at, np.zeros(1, np.uint64))

    programs = [backend.programs.windows[T] for T in rows]
    before = backend._graphs, backend._other_forms, backend.table
    choosing = {"linear": partial(linear, logits_of=logits_of), "router": partial(router, logits_of=logits_of)}
    backend._graphs, backend._other_forms = dict(before[0]), {}
    backend.table = LOWERING | choosing | {"embed": embed}
    try:
        for p in programs:
            backend._graphs[id(p)] = backend._capture(p)
        rewind()
        yield rewind
    finally:
        backend._graphs, backend._other_forms, backend.table = before


def distinct_experts(table: np.ndarray, rows: int, windows: int) -> float:
    """Mean over layers and over the first windows of `rows` rows: experts of table (n, L, K) that a window asks for."""
    counts = []
    for w in range(windows):
        part = table[np.arange(w * rows, (w + 1) * rows) % len(table)]
        counts += [len(np.unique(part[:, layer])) for layer in range(table.shape[1])]
    return float(np.mean(counts))


# ---- bytes


def op_bytes(backend: GpuBackend, program: Program, op: Op, position: int, distinct: float) -> float:
    """Bytes of weights and session state that an op of a window at `position` must read or write; activations and the
    file's padding are left out."""
    T, k, tensors = program.T, op.consts, backend.weights.tensors
    if op.kind == "experts":
        names = [op.buffers[f"shared_{part}_w"] for part in ("gate", "up", "down")]
        shared = sum(_tensor_bytes(tensors, n) for n in names)
        return shared + distinct * backend.weights.experts.layers[op.layer].blob_bytes
    if op.kind == "embed":
        return T * tensors.info(op.buffers["w"]).row_bytes
    total = 0.0
    for port, name in op.buffers.items():
        b = program.buffers.get(name)
        if b is None:
            total += _tensor_bytes(tensors, name) if op.kind == "linear" else 4 * prod(tensors.info(name).shape)
        elif b.role == "cells":
            cells = {"qsa_append": T, "qsa_index": T / k.get("block", 1), "qsa_select": 0, "qsa_attend": 0}[op.kind]
            if op.kind == "qsa_select":
                cells = (position + T) // k["block"]
            elif op.kind == "qsa_attend":
                most = k["budget"] * k["block"] if "blocks" in op.buffers else position + T
                cells = min(position + T, most)
            total += cells * b.n_bytes / b.shape[0]
        elif b.role == "recurrent":
            total += T * b.n_bytes / b.shape[0] if port == "raw" else b.n_bytes
    return total


def _tensor_bytes(tensors: Tensors, name: str) -> int:
    info = tensors.info(name)
    rows = prod(info.shape[:-1])
    return rows * info.format.row_bytes(info.shape[-1])


def op_name(op: Op) -> str:
    """The op's kind; products by the names of their tensors."""
    if op.kind != "linear":
        return op.kind
    names = [op.buffers[f"w{i}"].removesuffix(".weight") for i in range(op.consts["n"])]
    return " ".join(n.split(".", 2)[2] if n.startswith("blk.") else n for n in names)


# ---- time


def repeated(launches: Sequence[Launch], n: int) -> list[Launch]:
    """Launches n times over, with forks of their own each time."""
    forks = max((one.fork for one in launches), default=0)
    return [replace(one, fork=one.fork + i * forks) if one.fork else one for i in range(n) for one in launches]


def timed_us(device: Device, launches: Sequence[Launch], effort: Effort) -> float:
    """Median us of launches on the device, in a graph that repeats them."""
    repeats = max(1, effort.nodes // len(launches))
    graph = device.graph(repeated(launches, repeats))
    return queued_us(device, graph, 2, effort.rounds) / repeats


def queued_us(device: Device, launch: Callable[[], None], n: int, rounds: int) -> float:
    """Median over rounds of us a launch, n queued in a row."""
    launch()
    device.synchronize()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(n):
            launch()
        device.synchronize()
        times.append((time.perf_counter() - began) * 1e6 / n)
    return statistics.median(times)


def copy_rate(device: Device, n_bytes: int, rounds: int) -> float:
    """GB/s of a copy on the device, bytes read and bytes written both counted."""
    launches = copy_blocks(device.alloc(n_bytes), device.alloc(n_bytes), n_bytes)
    return 2 * n_bytes / timed_us(device, launches, Effort(nodes=8, rounds=rounds)) / 1e3


def node_time(device: Device, effort: Effort) -> float:
    """us of a node of a graph that waits for the one before and copies 16 bytes."""
    return timed_us(device, copy_blocks(device.alloc(16), device.alloc(16), 16), effort)


def measure(
    backend: GpuBackend,
    table: np.ndarray,
    *,
    position: int,
    card_gbps: float,
    rows: Sequence[int] = ROWS,
    effort: Effort | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> GpuSpeed:
    """Measure windows of these rows, and their ops, of a session that has read `position` tokens.

    table        (n, L, K) int32, the experts of n tokens
    card_gbps    memory bandwidth of the card that `card_us` is for
    on_progress  called with windows measured and windows in all
    """
    effort = effort or DEFAULT_EFFORT
    need(all(1 <= T <= WINDOW_ROWS for T in rows), "rows of a window", found=tuple(rows), needed=f"1 .. {WINDOW_ROWS}")
    need(0 <= position <= backend.context - WINDOW_ROWS, "position is outside the context", found=position,
         needed=f"0 .. {backend.context - WINDOW_ROWS}")  # fmt: skip
    device = backend.device
    copy_gbps, node_us = copy_rate(device, effort.copy_bytes, effort.rounds), node_time(device, effort)
    state = backend.new_state()
    state.rows = position  # what the cells hold does not change how long they take
    found = []
    with replayed(backend, table, rows) as rewind:
        for done, T in enumerate(rows):
            us, wall_us = window_us(backend, state, T, rewind, effort)
            program, distinct = backend.programs.windows[T], distinct_experts(table, T, effort.windows)
            n_bytes = sum(op_bytes(backend, program, op, position, distinct) for op in program.ops)
            nodes = len(backend._graphs[id(program)].lowering.launches) + 2
            head = backend.programs.heads[T]
            head_graph = backend._graphs[id(head)]
            head_bytes = sum(op_bytes(backend, head, op, position, 0) for op in head.ops)
            head_nodes = len(head_graph.lowering.launches) + 2
            found.append(
                WindowSpeed(
                    rows=T, us=us, wall_us=wall_us, nodes=nodes, n_bytes=n_bytes, gbps=n_bytes / us / 1e3,
                    copy_share=n_bytes / us / 1e3 / copy_gbps, distinct=distinct,
                    card_us=n_bytes / card_gbps / 1e3 + nodes * node_us,
                    head_us=queued_us(device, head_graph.launch, effort.windows, effort.rounds),
                    head_nodes=head_nodes, head_bytes=head_bytes,
                    head_card_us=head_bytes / card_gbps / 1e3 + head_nodes * node_us,
                    ops=_ops(backend, program, table, position, copy_gbps, effort),
                )
            )  # fmt: skip
            if on_progress is not None:
                on_progress(done + 1, len(rows))
    weight_bytes = backend.weights.n_bytes
    return GpuSpeed(device.name, backend.geometry.L, position, copy_gbps, node_us, weight_bytes, tuple(found))


def window_us(
    backend: GpuBackend, state: Any, T: int, rewind: Callable[[], None], effort: Effort
) -> tuple[float, float]:
    """(us on the device, us of the call) of a window with replayed routing."""
    tokens = np.array([t % backend.geometry.V for t in TOKENS[:T]], np.int32)
    walls = []
    for _ in range(effort.rounds + 1):
        began = time.perf_counter()
        backend.window(state, tokens, (1, 2))
        walls.append((time.perf_counter() - began) * 1e6)
    rewind()
    graph = backend._graphs[id(backend.programs.windows[T])]
    us = queued_us(backend.device, graph.launch, effort.windows, effort.rounds)
    backend._check(graph.lowering, backend._error_word, state.rows)
    return us, statistics.median(walls[1:])


def _ops(
    backend: GpuBackend, program: Program, table: np.ndarray, position: int, copy_gbps: float, effort: Effort
) -> tuple[OpSpeed, ...]:
    """Every op of a window alone, all its layers in one graph, slowest in sum first. The router is the real one."""
    T, lowering = program.T, Lowering(program, backend.memory, backend.weights, backend.context).run(LOWERING)
    ids = np.ascontiguousarray(table[np.arange(T) % len(table), 0], np.int32)
    distinct = float(len(np.unique(ids)))
    groups: dict[str, list[tuple[list[Launch], float]]] = {}
    carried = 0.0  # bytes of an op without launches, which its follower does; a router done before it has none
    for index, op in enumerate(program.ops):
        launches = lowering.launches_of(index)
        n_bytes = carried + op_bytes(backend, program, op, position, distinct)
        if not launches:
            carried = n_bytes
            continue
        groups.setdefault(op_name(op), []).append((launches, n_bytes))
        carried = 0.0
    found = []
    for name, members in groups.items():
        backend.device.upload(backend.memory.address("moe.ids"), ids)
        backend.device.upload(backend.memory.address("moe.weights"), np.full(ids.shape, 1 / ids.shape[1], np.float32))
        launches = [one for part, _ in members for one in part]
        n, total = len(members), sum(n_bytes for _, n_bytes in members)
        us = timed_us(backend.device, launches, effort) / n
        gbps = total / n / us / 1e3
        found.append(
            OpSpeed(
                name=name, layers=n, nodes=len(launches) / n, us=us, n_bytes=total / n, gbps=gbps,
                copy_share=gbps / copy_gbps, cached=total < CACHE_BYTES,
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda op: -op.us * op.layers))
