"""The GPU backend: every program as one graph over fixed memory, with the same interface as the CPU backend.

A window is one graph: small inputs come in with its first node, the error word goes out with its last. Commits are
queued without waiting: what they read from the host is not written again before the next window has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import numpy as np

from strata.base.errors import NotFinite, need
from strata.base.geometry import CELL_ROWS, WINDOW_ROWS, Geometry
from strata.base.program import (
    ERROR_TEXT,
    EXPERTS_FAILED,
    EXPERTS_TIMEOUT,
    NGRAM_FAILED,
    NGRAM_TIMEOUT,
    Allocation,
    Op,
    Program,
    ProgramSet,
)
from strata.base.window import HeadRequest, HeadRows
from strata.gpu.chunk_plan import arena_of, stream_of
from strata.gpu.device import Device
from strata.gpu.device_rows import DeviceRows
from strata.gpu.draft import GpuDraft, Host
from strata.gpu.error_word import decode
from strata.gpu.expert_store import ExpertStore
from strata.gpu.head import Head
from strata.gpu.held import held, let_go
from strata.gpu.hybrid import Hybrid
from strata.gpu.lower import Lowering
from strata.gpu.mailbox import copy_values
from strata.gpu.measure import lowered_programs, measure, of_draft
from strata.gpu.op_by_op import OpByOp
from strata.gpu.ops import LOWERING
from strata.gpu.prefill import Chunks
from strata.gpu.prefill_draft import DraftChunks
from strata.gpu.prefill_windows import read_by_windows
from strata.gpu.slots import ExpertSlots
from strata.gpu.state import DeviceState
from strata.gpu.upload import Uploader
from strata.pack.experts import ExpertLayout
from strata.pack.ngram import NgramTable
from strata.pack.tensors import Tensors


@dataclass
class _Graph:
    """A program's launches and, once captured, the call that queues them."""

    lowering: Lowering
    launch: Callable[[], None]


class GpuBackend:
    """Runs windows, prefill chunks, heads and commits of one model on one device.

    One window at a time: the caller (the model) holds the lock. States are independent; `window` binds the one it gets.
    """

    name = "gpu"
    threads = 1
    pool = None
    """No CPU workers of its own: the thread that calls waits for the device."""

    def __init__(
        self,
        tensors: Tensors,
        geometry: Geometry,
        experts: ExpertLayout,
        programs: ProgramSet,
        device: Device,
        *,
        ngram_cache_rows: int = 65536,
        ngram: str = "mapped",
        hybrid: Hybrid | None = None,
        slots: ExpertSlots | None = None,
        store: ExpertStore | None = None,
        fill_order: Iterable[tuple[int, int]] | None = None,
        draft_ids: np.ndarray | None = None,
        lends: bool = False,
    ):
        self.geometry, self.programs, self.device, self.hybrid = geometry, programs, device, hybrid
        self.table = LOWERING
        self._other_forms: dict[int, _Graph] = {}
        self.context = programs.prefill.buffers["rope"].shape[0]
        table = (tensors.gguf, geometry.ngram, ngram_cache_rows)
        self.ngram = NgramTable(*table, mode=ngram) if geometry.ngram else None
        self.memory, self.weights = measure(programs, geometry, tensors, experts, hybrid and hybrid.split, slots)
        stream = stream_of(self.weights.slots) if programs.chunk else None
        arena = programs.chunk and arena_of(programs.chunk, self.memory, self.weights, self.context, stream)
        if arena and lends:
            self.weights.slots.join_tail(arena.n_bytes + stream.ring_bytes)
        self.memory.allocate(device)
        self.uploader = Uploader(device)
        self.store = ExpertStore(experts, tensors.gguf, device) if store is None else store
        self.slots = self.weights.slots
        self.store.check_file()
        self.weights.allocate(device, self.uploader, self.store)
        self.weights.upload(self.uploader, fill_order)
        self.weights.release()
        for name in ("rope", "mtp.one"):
            self.memory.add_table(name, self.weights.place_of(name, "tables"))
        self._make_host_memory()
        self._recurrent_bytes = sum(-(-b.n_bytes // 64) * 64 for b in programs.states if b.role == "recurrent")
        self._before = device.alloc(self._recurrent_bytes)
        self._chunk = 0 if programs.chunk else device.alloc(self.memory.buffer("streams").n_bytes)
        self.head_rows = Head(self.memory, device, geometry.V, self.context, self._host_out)
        self.draft: GpuDraft | None = None
        if programs.draft:
            host = Host(self._host_in, self._in, self._host_out, self._lower, self._bind, self._check)
            self.draft = GpuDraft(programs.draft, self.memory, device, host, draft_ids)
        self._graphs = {id(p): self._capture(p) for p in lowered_programs(programs) if not of_draft(p, programs)}
        if stream is not None:
            tail = self.slots.tail_address
            stream.allocate(device, self.uploader, self.store, tail and tail + arena.n_bytes)
        self._chunks = arena and Chunks(
            programs.chunk, arena, self.weights, device, self.ngram, self._host_out, self.context, stream,
            self.slots.tail_address,
        )  # fmt: skip
        if arena and self.draft and programs.draft.chunk:
            self.draft.wide = DraftChunks(programs.draft.chunk, self._chunks, self.memory.address("streams"))
        self.op_by_op = OpByOp(self)
        self._bound: DeviceState | None = None
        self._ran: _Graph | None = None
        self._closed = False

    # ---- building

    def _make_host_memory(self) -> None:
        m = self.memory
        self._host_in = self.device.host(m.inbox_bytes)
        self._host_out = self.device.host(m.outbox_bytes)
        self._in = {name: m.view(self._host_in, name) for name in m.inbox}
        if self.ngram is not None:
            width = m.buffer("ngram.rows").shape[1]
            self._ticket = self.device.host(16).view(np.int64)
            self._staged = self.device.host(4 * WINDOW_ROWS * width).view(np.float32).reshape(WINDOW_ROWS, width)
            m.add_table("ngram.ticket", self._ticket.ctypes.data)
            m.add_table("ngram.staged", self._staged.ctypes.data)

    def _lower(self, program: Program, fuse: bool = True) -> Lowering:
        split = self.hybrid and (self.hybrid.form if fuse else self.hybrid.split)
        return Lowering(program, self.memory, self.weights, self.context, fuse=fuse, split=split).run(self.table)

    def _capture(self, program: Program) -> _Graph:
        lowering = self._lower(program, fuse=True)
        out = (self.memory.address("outbox"), self._host_out.ctypes.data, 8)
        if program.name == "head":
            lowering.launches += self.head_rows.argmax_launches(program.T)
            out = (*out[:2], self.memory.outbox_bytes)
        if self.hybrid and program.name == "trunk":
            lowering.launches += self.hybrid.launches(program.T)
        if self.draft and program is self.programs.commit:
            lowering.launches += self.draft.keep_launches()
        return _Graph(lowering, self.device.graph(lowering.graph_launches(self._host_in.ctypes.data, out)))

    # ---- states

    def new_state(self) -> DeviceState:
        return DeviceState(self.device, self.programs.states)

    def _bind(self, state: DeviceState) -> None:
        if self._bound is not state:
            self.device.upload(self.memory.address("slots"), state.addresses(self.memory.slots))
            self._bound = state

    # ---- work

    def _feed(self, state: DeviceState, tokens: np.ndarray, previous: tuple[int, int]) -> None:
        T = len(tokens)
        self.slots.publish()
        self._bind(state)
        self._in["tokens"][:T] = tokens
        if "pos" in self._in:
            self._in["pos"][0] = state.rows
        if self.ngram is not None:
            self._ticket[0] += 1
            ids = self.ngram.row_ids(self._in["tokens"][:T], *previous)
            self.ngram.deliver(ids, self._staged[:T], self._ticket)

    def _run(self, program: Program) -> Lowering:
        """Run a program's graph and wait for it."""
        graph = self._graph(program)
        with self._served(program):
            graph.launch()
            try:
                if program.name == "trunk":
                    self.meanwhile()
            finally:
                self.device.synchronize()
        if self.draft:
            self.draft.waited()
        return graph.lowering

    def meanwhile(self) -> None:
        """The host's work while a window runs; what it queues on the main stream comes behind the window."""

    def _graph(self, program: Program) -> _Graph:
        """A program's graph; of a window whose experts are shared, that of the present form."""
        key, graph = id(program), self._graphs[id(program)]
        if self.hybrid and program.name == "trunk" and graph.lowering.split is not self.hybrid.form:
            self._other_forms[key], self._graphs[key] = graph, self._other_forms.get(key) or self._capture(program)
        return self._graphs[key]

    def _served(self, program: Program) -> AbstractContextManager[None]:
        """While a window runs the CPU's experts are awake."""
        return self.hybrid.window() if self.hybrid and program.name == "trunk" else nullcontext()

    def _check(self, lowering: Lowering, word: int, position: int) -> None:
        """Raise for an error word that is set."""
        found = decode(word)
        if found is None:
            return
        if found.code in (EXPERTS_TIMEOUT, EXPERTS_FAILED):
            raise self.hybrid.failure(found, position)
        op = lowering.program.ops[found.op]
        where = f"layer {found.layer}" if found.layer >= 0 else "outside the layers"
        message = (
            f"window at position {position} stopped: {ERROR_TEXT.get(found.code, found.code)} in op {op.kind}, {where}"
        )
        if found.code in (NGRAM_TIMEOUT, NGRAM_FAILED):
            raise self.ngram.failed(message, found.detail)
        raise NotFinite(message, found=f"row or expert {found.detail}", needed="finite numbers",
                        advice="The weights or the file may be damaged.")  # fmt: skip

    @property
    def _error_word(self) -> int:
        return int(self._host_out[:8].view(np.uint64)[0])

    def window(
        self,
        state: DeviceState,
        tokens: np.ndarray,
        previous: tuple[int, int],
        after_op: Callable[[Op], None] | None = None,
    ) -> None:
        """Run T = len(tokens) <= 8 rows at position state.rows; nothing is committed.

        tokens (T,) int32; previous: the tokens one and two places before the window, -1 where there is none. after_op
        is for checks: ops then run one by one, and it may `read` buffers. Raises NotFinite naming op and layer; the
        state is then as before.
        """
        self._feed(state, tokens, previous)
        program = self.programs.windows[len(tokens)]
        if after_op is None:
            lowering = self._run(program)
            self._check(lowering, self._error_word, state.rows)
            return
        self.op_by_op.run(program, state.rows, after_op)

    def recorded(
        self, state: DeviceState, tokens: np.ndarray, previous: tuple[int, int],
        names_of: Callable[[int], Sequence[str]],
    ) -> Iterator[tuple[Op, dict[str, np.ndarray]]]:  # fmt: skip
        """As `window`, for checks: every op with its buffers behind it; see `OpByOp.recorded`."""
        self._feed(state, tokens, previous)
        return self.op_by_op.recorded(self.programs.windows[len(tokens)], state.rows, names_of)

    def read(self, name: str) -> np.ndarray:
        """A copy of an io or scratch buffer, with the shape that the largest program needs."""
        b = self.memory.buffer(name)
        out = np.empty(b.shape, b.dtype)
        self.device.download(self.memory.address(name), out)
        return out

    def commit(self, state: DeviceState, n_keep: int) -> None:
        """Advance `state` by the first n_keep rows of the window that was run last, on the same state.

        With a draft layer, the rows' streams are kept for it.
        """
        self._bind(state)
        if n_keep:
            self._in["n_keep"][0] = n_keep
            if self.draft:
                self.draft.committed(state.rows, n_keep)
            self._graphs[id(self.programs.commit)].launch()
            state.rows += n_keep

    def prefill(
        self, state: DeviceState, tokens: np.ndarray, previous: tuple[int, int], following: np.ndarray | None = None
    ) -> None:
        """Read whole cells of rows at a cell border and advance; on an error the state is as before.

        Without a chunk program one cell is read, as windows; with one, up to `chunk_rows` rows. following: tokens of
        the chunk that will be read next, whose n-gram rows are looked up while the device computes this one.
        """
        self._bind(state)
        start, values = state.rows, self._recurrent_bytes // 4
        self.device.run(copy_values(state.recurrent.address, self._before, values))
        if self.draft:
            self.draft.keeping = False
        try:
            if self._chunks is None:
                read_by_windows(self, state, tokens, previous, self._chunk)
            else:
                lowering = self._chunks.run(tokens, previous, start, following)
                self._check(lowering, self._error_word, start)
                state.rows += len(tokens)
        except BaseException:
            self.device.run(copy_values(self._before, state.recurrent.address, values))
            state.rows = start
            raise
        finally:
            if self.draft:
                self.draft.keeping = True

    def prefill_ops(self, state: DeviceState, tokens: np.ndarray, previous: tuple[int, int]) -> dict[str, float]:
        """Read a chunk as `prefill` does, op by op: milliseconds by kind of op, launching and waiting included."""
        need(self._chunks is not None, "no chunks to time", found='prefill="windows"', needed='prefill="auto"')
        self._bind(state)
        times = self._chunks.run_timed(tokens, previous, state.rows)
        state.rows += len(tokens)
        return times

    @property
    def reads_chunks(self) -> bool:
        """Whether prompts are read by a chunk program; by windows if not."""
        return self._chunks is not None

    @property
    def chunk_rows(self) -> int:
        """Most rows that one call of `prefill` reads."""
        return self._chunks.most_rows if self._chunks is not None else self.programs.prefill.T

    def head(self, first_row: int, T: int, request: HeadRequest) -> HeadRows:
        """Logits of T <= 8 rows of the last window or chunk, from row `first_row` on, summarised as asked."""
        self._in["head_row"][0] = first_row
        lowering = self._run(self.programs.heads[T])
        self._check(lowering, self._error_word, 0 if self._bound is None else self._bound.rows)
        return self.head_rows.summarise(T, request)

    @property
    def streams(self) -> DeviceRows:
        """(rows, C*D) float32: streams before the final mixer that the last window or chunk left; slices are copies."""
        b = self.memory.buffer("streams")
        return DeviceRows(self.device, self.memory.address("streams"), b.shape)

    # ---- facts

    def launch_counts(self) -> dict[str, int]:
        """Nodes of every graph, by program and rows."""
        out = {}
        for program in lowered_programs(self.programs):
            if id(program) in self._graphs:
                out[f"{program.name} T={program.T}"] = len(self._graphs[id(program)].lowering.launches) + 2
        return out | (self.draft.launch_counts() if self.draft else {})

    @property
    def recurrent_bytes(self) -> int:
        """Of the copy that a failed chunk goes back to."""
        return self._recurrent_bytes

    @property
    def cell_stream_bytes(self) -> int:
        """What a cell's streams take besides the buffer that programs share. With chunks this is negative: the buffer
        holds a whole chunk's, and what goes beyond two cells is priced with the chunk."""
        shared = self.memory.buffer("streams").n_bytes
        return shared if self._chunks is None else 2 * shared // self.chunk_rows * CELL_ROWS - shared

    @property
    def host_bytes(self) -> int:
        """Host memory that belongs to windows: inbox, outbox, n-gram rows, full logits."""
        staged = self._staged.nbytes + self._ticket.nbytes if self.ngram is not None else 0
        return self._host_in.nbytes + self._host_out.nbytes + staged + self.head_rows.host_bytes

    def allocations(self, sessions: list[DeviceState]) -> list[Allocation]:
        """What this backend holds for `sessions`, all of its states, under the plan's line names."""
        lines = held(self, sessions)
        if self._chunks is not None:
            lines += self._chunks.allocations(-self.cell_stream_bytes)
        return lines + (self.hybrid.allocations() if self.hybrid else [])

    def current(self) -> AbstractContextManager[object]:
        """Makes the device the calling thread's own; around all work, as any thread may do it."""
        return self.device.current()

    def close(self) -> None:
        """Free everything on the device; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self.ngram is not None:
            self.ngram.close()  # before the memory it fills is gone
        with ExitStack() as last:
            for part in (self.device, self.store, self.uploader):  # the last one first, also if the device has failed
                last.callback(part.close)
            with self.device.current(), last.pop_all():
                if self.hybrid:
                    self.hybrid.close()
                self._graphs.clear()  # they hold memory of the device
                self.device.synchronize()
        let_go(self)
