"""Prefill chunks on the device: whole cells of 256 rows, up to thousands at once, with wide kernels.

A chunk is a list of launches, made once for every number of rows. The ops before the n-gram block run while the host
looks the chunk's n-gram rows up. Arithmetic is that of wide kernels: it does not depend on how cells are put together.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strata.base.errors import StrataError, need
from strata.base.geometry import CELL_ROWS
from strata.base.program import Allocation, Op, Program
from strata.gpu.chunk_lower import ChunkLowering
from strata.gpu.chunk_memory import ChunkMemory
from strata.gpu.chunk_plan import staging_bytes
from strata.gpu.device import Device
from strata.gpu.expert_stream import ExpertStream, Stage
from strata.gpu.launch import Launch
from strata.gpu.mailbox import inbox, outbox
from strata.gpu.prefill_ops import CHUNK_LOWERING
from strata.gpu.qsa_wide import POSITION_ROWS
from strata.gpu.weights import Weights
from strata.pack.ngram import NgramTable

LEAVE, ARRIVE, NGRAM_ROWS = range(3)
"""What a mark asks for: a stage of experts is no longer needed, one is needed, the n-gram rows are."""


@dataclass(frozen=True)
class _Queue:
    """Launches of a chunk. marks: (launch, what the host does before it, stage of experts), sorted. `head` clears the
    error word, `tail` brings it to the host."""

    lowering: ChunkLowering
    head: list[Launch]
    tail: list[Launch]
    stages: list[Stage]
    marks: list[tuple[int, int, int]]


class ChunkRows:
    """N-gram rows of a chunk in pinned memory, and those of the chunk behind it, made while the device is busy."""

    def __init__(self, table: NgramTable, staging: np.ndarray):
        self._table, self._staging = table, staging
        self._made: tuple[bytes, tuple[int, int]] | None = None
        self._place = 0

    def _make(self, tokens: np.ndarray, previous: tuple[int, int], place: int) -> np.ndarray:
        out = self._staging[place, : len(tokens)]
        self._table.collect(self._table.issue(self._table.row_ids(tokens, *previous)), out)
        return out

    def of(self, tokens: np.ndarray, previous: tuple[int, int]) -> np.ndarray:
        """(T, width) float32, valid until the next call."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        if self._made == (tokens.tobytes(), previous):
            return self._staging[self._place, : len(tokens)]
        self._made = None
        return self._make(tokens, previous, self._place)

    def ahead(self, tokens: np.ndarray, previous: tuple[int, int]) -> None:
        """Make the rows that `of` will be asked for next. A failure is left for it to meet again."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        self._made, self._place = None, 1 - self._place
        with contextlib.suppress(StrataError):
            self._make(tokens, previous, self._place)
            self._made = (tokens.tobytes(), previous)


class Chunks:
    """Runs prefill chunks of one program. The backend binds the state, keeps the way back and checks the error word.

    most_rows  rows of the largest chunk        stream  brings experts that have no slot, or None
    at         address of memory for the arena that is somebody else's; 0: of its own
    borrow     called before a chunk: from then on this memory is free, until a window is run
    """

    def __init__(
        self,
        program: Program,
        arena: ChunkMemory,
        weights: Weights,
        device: Device,
        ngram: NgramTable | None,
        host_out: np.ndarray,
        context: int,
        stream: ExpertStream | None = None,
        at: int = 0,
    ):
        self.borrow: Callable[[], None] | None = None
        self._lent = at != 0
        self.program, self.arena, self.weights, self.device = program, arena, weights, device
        self.most_rows, self.context, self.stream = program.T, context, stream
        self.host_out, self.table = host_out, CHUNK_LOWERING
        arena.lie_at(at or device.alloc(arena.n_bytes))
        self._queues: dict[int, _Queue] = {}
        self.ngram_rows = None
        if ngram is not None:
            staging = device.host(staging_bytes(program)).view(np.float32)
            self.ngram_rows = ChunkRows(ngram, staging.reshape(2, self.most_rows, -1))
        device.prepare(self.queue_of(self.most_rows).lowering.launches)  # nothing compiles after load

    def lower_with(self, experts: Callable[[ChunkLowering, Op], None]) -> None:
        """Lower experts ops by this function from now on."""
        self.table = self.table | {"experts": experts}
        self._queues.clear()
        self.device.prepare(self.queue_of(self.most_rows).lowering.launches)

    def allocations(self, stream_bytes: int) -> list[Allocation]:
        """What chunks hold, by lines of a plan; stream_bytes: what their streams take beyond those of windows."""
        reason = f"chunks of up to {self.most_rows:,} rows"
        n_bytes = stream_bytes + (self.stream.list_bytes if self.stream is not None else 0)
        if self._lent:
            n_bytes = max(0, n_bytes)
        else:
            n_bytes += self.arena.n_bytes + (self.stream.ring_bytes if self.stream is not None else 0)
        lines = [Allocation("prefill buffers", "vram", n_bytes, reason)]
        if self.ngram_rows is not None:
            n_bytes = staging_bytes(self.program)
            lines.append(Allocation("prefill staging", "ram", n_bytes, "pinned: n-gram rows of two chunks"))
        return lines

    def queue_of(self, T: int) -> _Queue:
        """Launches of a chunk of T rows."""
        if T not in self._queues:
            low = ChunkLowering(self.program, self.arena, self.weights, self.context, T, self.stream)
            low.run(self.table)
            marks = [(index, ARRIVE, i) for i, (index, _) in enumerate(low.stages)]
            marks += [(index, LEAVE, i) for i, index in enumerate(low.ends)]
            wait = next((i for i, op in enumerate(self.program.ops) if op.kind == "ngram_wait"), None)
            if wait is not None:
                marks.append((next(i for i, op in enumerate(low.op_of_launch) if op >= wait), NGRAM_ROWS, 0))
            head = inbox(self.host_out.ctypes.data, self.arena.error, 0, self.arena.error)
            tail = outbox(self.arena.error, self.host_out.ctypes.data, 8)
            self._queues[T] = _Queue(low, head, tail, [stage for _, stage in low.stages], sorted(marks))
        return self._queues[T]

    def run(
        self, tokens: np.ndarray, previous: tuple[int, int], position: int, following: np.ndarray | None = None
    ) -> ChunkLowering:
        """Read tokens (T,) int32, whole cells from `position` on, into the bound state, and wait.

        Recurrent state advances; streams are left in `streams`, an error in the error word. following: tokens of the
        next chunk, whose n-gram rows are looked up meanwhile.
        """
        lowering = self.queue(tokens, previous, position)
        if self.ngram_rows is not None and following is not None and len(following) <= self.most_rows:
            self.ngram_rows.ahead(following, (int(tokens[-1]), int(tokens[-2])))
        self.device.synchronize()
        return lowering

    def queue(self, tokens: np.ndarray, previous: tuple[int, int], position: int) -> ChunkLowering:
        """Queue what `run` does, without waiting for its end."""
        queue = self._feed(tokens, position)
        self._run(queue, tokens, previous, 0, len(queue.lowering.launches))
        self.device.run(queue.tail)
        return queue.lowering

    def run_timed(self, tokens: np.ndarray, previous: tuple[int, int], position: int) -> dict[str, float]:
        """Read like `run`, one op after the other: milliseconds by kind of op, the host's part included."""
        queue, total = self._feed(tokens, position), {}
        ends = np.searchsorted(queue.lowering.op_of_launch, np.arange(len(self.program.ops)), side="right").tolist()
        first = 0
        for op, end in zip(self.program.ops, ends, strict=True):
            self.device.synchronize()
            began = time.perf_counter()
            self._run(queue, tokens, previous, first, end)
            self.device.synchronize()
            total[op.kind] = total.get(op.kind, 0.0) + 1e3 * (time.perf_counter() - began)
            first = end
        return total

    def _run(self, queue: _Queue, tokens: np.ndarray, previous: tuple[int, int], first: int, end: int) -> None:
        """Queue launches first .. end - 1, and do the host's part at the marks before each of them."""
        launches = queue.lowering.launches
        for index, what, stage in queue.marks:
            if not first <= index < end:
                continue
            self.device.run(launches[first:index])
            first = index
            if what == NGRAM_ROWS:
                self.device.upload(self.arena.address("ngram.rows"), self.ngram_rows.of(tokens, previous))
            elif what == ARRIVE:
                self.stream.arrive(stage)
            else:
                self.stream.leave(stage)
        self.device.run(launches[first:end])

    def _feed(self, tokens: np.ndarray, position: int) -> _Queue:
        """The launches of a chunk, whose tokens and positions are now on the device."""
        T = len(tokens)
        need(0 < T <= self.most_rows and T % CELL_ROWS == 0 and position % CELL_ROWS == 0, "rows of a prefill chunk",
             found=f"{T} at {position}", needed=f"whole cells of {CELL_ROWS}, up to {self.most_rows} rows")  # fmt: skip
        need(position + T <= self.context, "a prefill chunk ends beyond the context", found=position + T,
             needed=f"at most {self.context}")  # fmt: skip
        queue, upload, at = self.queue_of(T), self.device.upload, self.arena.address
        if self.borrow is not None:
            self.borrow()
        if self.stream is not None:
            self.stream.begin(queue.stages)
        upload(at("tokens"), np.ascontiguousarray(tokens, np.int32))
        upload(at("pos"), np.arange(position, position + T, POSITION_ROWS, dtype=np.int64))
        upload(at("rows"), np.array([T], np.int64))
        self.device.run(queue.head)
        return queue

