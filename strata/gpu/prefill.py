"""Prefill chunks on the device: whole cells of 256 rows, up to thousands at once, with wide kernels.

A chunk is a list of launches, made once for every number of rows. The ops before the n-gram block run while the host
looks the chunk's n-gram rows up. Arithmetic is that of wide kernels: it does not depend on how cells are put together.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.base.geometry import CELL_ROWS
from strata.base.program import Allocation, Program
from strata.gpu.chunk_lower import ChunkLowering
from strata.gpu.chunk_memory import ChunkMemory
from strata.gpu.chunk_plan import staging_bytes
from strata.gpu.device import Device
from strata.gpu.expert_stream import ExpertStream
from strata.gpu.launch import Launch
from strata.gpu.mailbox import inbox, outbox
from strata.gpu.prefill_ops import CHUNK_LOWERING
from strata.gpu.qsa_wide import POSITION_ROWS
from strata.gpu.weights import Weights
from strata.pack.ngram import NgramTable


@dataclass(frozen=True)
class _Queue:
    """Launches of a chunk. marks: (launch, stage of experts that must be there first), -1 for the n-gram rows. `head`
    clears the error word, `tail` brings it to the host."""

    lowering: ChunkLowering
    head: list[Launch]
    tail: list[Launch]
    marks: list[tuple[int, int]]


class Chunks:
    """Runs prefill chunks of one program. The backend binds the state, keeps the way back and checks the error word.

    most_rows  rows of the largest chunk        stream  brings experts that have no slot, or None
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
    ):
        self.program, self.arena, self.weights, self.device = program, arena, weights, device
        self.most_rows, self.context, self._ngram, self.stream = program.T, context, ngram, stream
        self._host_out = host_out
        arena.lie_at(device.alloc(arena.n_bytes))
        self._queues: dict[int, _Queue] = {}
        self._staged = None
        if ngram is not None:
            staged = device.host(staging_bytes(program)).view(np.float32)
            self._staged = staged.reshape(self.most_rows, -1)
        device.prepare(self.queue_of(self.most_rows).lowering.launches)  # nothing compiles after load

    def allocations(self, stream_bytes: int) -> list[Allocation]:
        """What chunks hold, by lines of a plan; stream_bytes: what their streams take beyond those of windows."""
        reason = f"chunks of up to {self.most_rows:,} rows"
        ring = self.stream.n_bytes if self.stream is not None else 0
        lines = [Allocation("prefill buffers", "vram", self.arena.n_bytes + ring + stream_bytes, reason)]
        if self._staged is not None:
            lines.append(Allocation("prefill staging", "ram", self._staged.nbytes, "pinned: n-gram rows of a chunk"))
        return lines

    def queue_of(self, T: int) -> _Queue:
        """Launches of a chunk of T rows."""
        if T not in self._queues:
            low = ChunkLowering(self.program, self.arena, self.weights, self.context, T, self.stream)
            low.run(CHUNK_LOWERING)
            marks = [(index, i) for i, (index, _) in enumerate(low.stages)]
            wait = next((i for i, op in enumerate(self.program.ops) if op.kind == "ngram_wait"), None)
            if wait is not None:
                marks.append((next(i for i, op in enumerate(low.op_of_launch) if op >= wait), -1))
            head = inbox(self._host_out.ctypes.data, self.arena.error, 0, self.arena.error)
            tail = outbox(self.arena.error, self._host_out.ctypes.data, 8)
            self._queues[T] = _Queue(low, head, tail, sorted(marks))
        return self._queues[T]

    def run(self, tokens: np.ndarray, previous: tuple[int, int], position: int) -> ChunkLowering:
        """Read tokens (T,) int32, whole cells from `position` on, into the bound state, and wait.

        Recurrent state advances; streams are left in `streams`, an error in the error word.
        """
        queue = self._feed(tokens, position)
        self._run(queue, tokens, previous, 0, len(queue.lowering.launches))
        self.device.run(queue.tail)
        self.device.synchronize()
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
        for index, mark in queue.marks:
            if not first <= index < end:
                continue
            self.device.run(launches[first:index])
            first = index
            if mark < 0:
                self._look_up(tokens, previous)
            else:
                self.stream.arrive(mark)
        self.device.run(launches[first:end])

    def _feed(self, tokens: np.ndarray, position: int) -> _Queue:
        """The launches of a chunk, whose tokens and positions are now on the device."""
        T = len(tokens)
        need(0 < T <= self.most_rows and T % CELL_ROWS == 0 and position % CELL_ROWS == 0, "rows of a prefill chunk",
             found=f"{T} at {position}", needed=f"whole cells of {CELL_ROWS}, up to {self.most_rows} rows")  # fmt: skip
        need(position + T <= self.context, "a prefill chunk ends beyond the context", found=position + T,
             needed=f"at most {self.context}")  # fmt: skip
        queue, upload, at = self.queue_of(T), self.device.upload, self.arena.address
        if self.stream is not None:
            self.stream.begin([stage for _, stage in queue.lowering.stages])
        upload(at("tokens"), np.ascontiguousarray(tokens, np.int32))
        upload(at("pos"), np.arange(position, position + T, POSITION_ROWS, dtype=np.int64))
        upload(at("rows"), np.array([T], np.int64))
        self.device.run(queue.head)
        return queue

    def _look_up(self, tokens: np.ndarray, previous: tuple[int, int]) -> None:
        """The chunk's n-gram rows, from the table to the device."""
        ids = self._ngram.row_ids(np.ascontiguousarray(tokens, np.int32), *previous)
        staged = self._staged[: len(tokens)]
        self._ngram.collect(self._ngram.issue(ids), staged)
        self.device.upload(self.arena.address("ngram.rows"), staged)
