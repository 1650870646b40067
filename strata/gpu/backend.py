"""The GPU backend: every program as one graph over fixed memory, with the same interface as the CPU backend.

A window is one graph: small inputs come in with its first node, the error word goes out with its last. Commits are
queued without waiting: what they read from the host is not written again before the next window has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strata.base.errors import NotFinite, StrataError
from strata.base.geometry import WINDOW_ROWS, Geometry
from strata.base.program import ERROR_TEXT, NGRAM_FAILED, NGRAM_TIMEOUT, Allocation, Op, Program, ProgramSet
from strata.base.window import HeadRequest, HeadRows
from strata.gpu.device import Device
from strata.gpu.error_word import decode
from strata.gpu.head import Head
from strata.gpu.lower import Lowering
from strata.gpu.mailbox import copy_values
from strata.gpu.memory import MADE_UP, Memory
from strata.gpu.ops import LOWERING
from strata.gpu.rope import rotary_table
from strata.gpu.state import DeviceState
from strata.gpu.weights import Weights
from strata.pack.experts import ExpertLayout
from strata.pack.ngram import NgramTable
from strata.pack.tensors import Tensors

HOST_BUFFERS = ("ngram.ticket", "ngram.staged")
"""Memory of the host that kernels read in place."""


@dataclass
class _Graph:
    """A program's launches and, once captured, the call that queues them."""

    lowering: Lowering
    launch: Callable[[], None]


def lowered_programs(programs: ProgramSet) -> list[Program]:
    """Programs that become graphs: a prefill chunk is read as windows here, whose bits are the same."""
    return [p for p in programs.all() if p is not programs.prefill]


def measure(
    programs: ProgramSet, geometry: Geometry, tensors: Tensors, experts: ExpertLayout
) -> tuple[Memory, Weights]:
    """Memory and weights that the programs ask for, without a device; both still measuring."""
    memory = Memory(lowered_programs(programs), [programs.prefill.buffers["streams"]])
    weights = Weights(tensors, experts)
    context = programs.prefill.buffers["rope"].shape[0]
    memory.add_table(
        "rope", weights.array("rope", "tables", rotary_table(context, geometry.rotary_dims, geometry.rope_base))
    )
    memory.add_table("mtp.one", weights.array("mtp.one", "tables", np.ones((WINDOW_ROWS, geometry.C), np.float32)))
    for name in HOST_BUFFERS:
        memory.add_table(name, MADE_UP)
    for program in lowered_programs(programs):
        for fuse in (True, False):
            Lowering(program, memory, weights, context, fuse=fuse).run(LOWERING)
    Head.measure(memory, geometry.V, context)
    return memory, weights


class GpuBackend:
    """Runs windows, prefill chunks, heads and commits of one model on one device.

    One window at a time: the caller (the model) holds the lock. States are independent; `window` binds the one it gets.
    """

    name = "gpu"

    def __init__(
        self,
        tensors: Tensors,
        geometry: Geometry,
        experts: ExpertLayout,
        programs: ProgramSet,
        device: Device,
        *,
        ngram_cache_rows: int = 65536,
    ):
        self.geometry, self.programs, self.device = geometry, programs, device
        self.context = programs.prefill.buffers["rope"].shape[0]
        self.ngram = NgramTable(tensors.gguf, geometry.ngram, ngram_cache_rows) if geometry.ngram else None
        self.memory, self.weights = measure(programs, geometry, tensors, experts)
        self.memory.allocate(device)
        self.weights.allocate(device)
        self.weights.upload(device)
        for name in ("rope", "mtp.one"):
            self.memory.add_table(name, self.weights.place_of(name, "tables"))
        self._make_host_memory()
        self._recurrent_bytes = sum(-(-b.n_bytes // 64) * 64 for b in programs.states if b.role == "recurrent")
        self._before = device.alloc(self._recurrent_bytes)
        rows, width = self.memory.buffer("streams").shape
        self._row_bytes, self._stream_width = 4 * width, width
        self._chunk = device.alloc(4 * rows * width)
        self.head_rows = Head(self.memory, device, geometry.V, self.context, self._host_out)
        self._graphs = {id(p): self._capture(p) for p in lowered_programs(programs)}
        self._unfused: dict[int, Lowering] = {}
        self._bound: DeviceState | None = None
        self._ran: _Graph | None = None

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

    def _lower(self, program: Program, fuse: bool) -> Lowering:
        return Lowering(program, self.memory, self.weights, self.context, fuse=fuse).run(LOWERING)

    def _capture(self, program: Program) -> _Graph:
        lowering = self._lower(program, fuse=True)
        out = (self.memory.address("outbox"), self._host_out.ctypes.data, 8)
        if program.name == "head":
            lowering.launches += self.head_rows.argmax_launches(program.T)
            out = (*out[:2], self.memory.outbox_bytes)
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
        self._bind(state)
        self._in["tokens"][:T] = tokens
        if "pos" in self._in:
            self._in["pos"][0] = state.rows
        if self.ngram is not None:
            self._ticket[0] += 1
            ids = self.ngram.row_ids(self._in["tokens"][:T], *previous)
            self.ngram.collect(self.ngram.issue(ids), self._staged[:T])
            self._ticket[1] = self._ticket[0]

    def _run(self, program: Program) -> Lowering:
        """Run a program's graph and wait for it."""
        graph = self._graphs[id(program)]
        graph.launch()
        self.device.synchronize()
        return graph.lowering

    def _check(self, lowering: Lowering, word: int, position: int) -> None:
        """Raise for an error word that is set."""
        found = decode(word)
        if found is None:
            return
        op = lowering.program.ops[found.op]
        where = f"layer {found.layer}" if found.layer >= 0 else "outside the layers"
        message = (
            f"window at position {position} stopped: {ERROR_TEXT.get(found.code, found.code)} in op {op.kind}, {where}"
        )
        if found.code in (NGRAM_TIMEOUT, NGRAM_FAILED):
            raise StrataError(message, found=f"{found.detail} ms" if found.detail else None, advice="Check the disk.")
        raise NotFinite(
            message, found=f"row or expert {found.detail}", advice="The weights or the file may be damaged."
        )

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
        self._run_ops(program, state, after_op)

    def _run_ops(self, program: Program, state: DeviceState, after_op: Callable[[Op], None]) -> None:
        lowering = self._unfused.get(id(program)) or self._lower(program, fuse=False)
        self._unfused[id(program)] = lowering
        first, *_, last = lowering.graph_launches(
            self._host_in.ctypes.data, (self.memory.address("outbox"), self._host_out.ctypes.data, 8)
        )
        self.device.run([first])
        for index, op in enumerate(program.ops):
            self.device.run([*lowering.launches_of(index), last])
            self.device.synchronize()
            self._check(lowering, self._error_word, state.rows)
            after_op(op)

    def read(self, name: str) -> np.ndarray:
        """A copy of an io or scratch buffer, with the shape that the largest program needs."""
        b = self.memory.buffer(name)
        out = np.empty(b.shape, b.dtype)
        self.device.download(self.memory.address(name), out)
        return out

    def commit(self, state: DeviceState, n_keep: int) -> None:
        """Advance `state` by the first n_keep rows of the window that was run last, on the same state."""
        self._bind(state)
        if n_keep:
            self._in["n_keep"][0] = n_keep
            self._graphs[id(self.programs.commit)].launch()
            state.rows += n_keep

    def prefill(self, state: DeviceState, tokens: np.ndarray, previous: tuple[int, int]) -> None:
        """Read one whole cell of rows at a cell border and advance, as windows; on an error the state is as before."""
        self._bind(state)
        start, values = state.rows, self._recurrent_bytes // 4
        self.device.run(copy_values(state.recurrent.address, self._before, values))
        streams = self.memory.address("streams")
        try:
            for first in range(0, len(tokens), WINDOW_ROWS):
                part = tokens[first : first + WINDOW_ROWS]
                self.window(state, part, previous)
                self.device.run(
                    copy_values(streams, self._chunk + first * self._row_bytes, len(part) * self._stream_width)
                )
                self.commit(state, len(part))
                previous = (int(part[-1]), int(part[-2]) if len(part) > 1 else previous[0])
        except BaseException:
            self.device.run(copy_values(self._before, state.recurrent.address, values))
            state.rows = start
            raise
        self.device.run(copy_values(self._chunk, streams, len(tokens) * self._stream_width))

    def head(self, first_row: int, T: int, request: HeadRequest) -> HeadRows:
        """Logits of T <= 8 rows of the last window or chunk, from row `first_row` on, summarised as asked."""
        self._in["head_row"][0] = first_row
        lowering = self._run(self.programs.heads[T])
        self._check(lowering, self._error_word, 0 if self._bound is None else self._bound.rows)
        return self.head_rows.summarise(T, request)

    # ---- draft layer

    @property
    def streams(self) -> DeviceRows:
        """(rows, C*D) float32: streams before the final mixer that the last window or chunk left; slices are copies."""
        b = self.memory.buffer("streams")
        return DeviceRows(self.device, self.memory.address("streams"), b.shape)

    def _feed_draft(self, state: DeviceState, x: np.ndarray, tokens: np.ndarray, position: int) -> None:
        self._bind(state)
        self.device.upload(self.memory.address("mtp.x"), np.ascontiguousarray(x, np.float32))
        self._in["mtp.tokens"][: len(tokens)] = tokens
        self._in["mtp.pos"][0] = position

    def draft_append(self, state: DeviceState, x: np.ndarray, tokens: np.ndarray, position: int) -> None:
        """Store the draft layer's K and V of T <= 8 cells from `position` on.

        x (T, C*D) float32: streams of the cells' rows; tokens (T,) int32: the tokens after them.
        """
        self._feed_draft(state, x, tokens, position)
        lowering = self._run(self.programs.draft.appends[len(tokens)])
        self._check(lowering, self._error_word, position)

    def draft_step(
        self, state: DeviceState, x: np.ndarray, token: int, position: int, first: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run one cell through the draft layer, attending cells from `first` on.

        Returns (logits (V,), streams (C*D,)) as host arrays.
        """
        self._in["mtp.first"][0] = first
        self._feed_draft(state, x[None], np.array([token], np.int32), position)
        lowering = self._run(self.programs.draft.step)
        self._check(lowering, self._error_word, position)
        return self.read("mtp.logits")[0], DeviceRows(
            self.device, self.memory.address("mtp.streams"), self.memory.buffer("mtp.streams").shape
        )[:1][0]

    # ---- facts

    def launch_counts(self) -> dict[str, int]:
        """Nodes of every graph, by program and rows."""
        out = {}
        for program in lowered_programs(self.programs):
            out[f"{program.name} T={program.T}"] = len(self._graphs[id(program)].lowering.launches) + 2
        return out

    def allocations(self, sessions: list[DeviceState]) -> list[Allocation]:
        """What this backend holds on the device, by line."""
        kinds = self.weights.bytes_by_kind()
        lines = [(kind, n, "uploaded once") for kind, n in kinds.items()]
        lines += [
            ("KV cache", sum(s.n_bytes("cells") for s in sessions), f"{len(sessions)} sessions"),
            ("recurrent state", (len(sessions) + 1) * self._recurrent_bytes, "sessions and one chunk's way back"),
            ("window scratch", self.memory.n_bytes, "activations of the widest program, logits"),
            ("chunk streams", self.memory.buffer("streams").n_bytes, "rows of a whole cell"),
        ]
        return [Allocation(line, "vram", n, reason) for line, n, reason in lines]

    def close(self) -> None:
        self.device.close()


class DeviceRows:
    """Rows of a float32 buffer on the device; a slice of rows is a copy on the host."""

    def __init__(self, device: Device, address: int, shape: tuple[int, ...]):
        self._device, self._address, self.shape = device, address, shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1
        out = np.empty((max(0, stop - start), self.shape[1]), np.float32)
        self._device.download(self._address + 4 * start * self.shape[1], out)
        return out
