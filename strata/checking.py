"""A GPU against the CPU, op by op: the windows of a prompt on both backends, every value compared bit by bit.

Ops run one by one on the device, each as launches of its own. All buffers that an op names are compared as they were
behind it, so the first difference tells which op made it, and from inputs that were still the same. Each window then
runs again the way it is served, as one graph, and the states after its commit are compared too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from strata.arch import architecture_of
from strata.base.errors import need
from strata.base.geometry import CELL_ROWS, CONTEXT_RESERVE, WINDOW_ROWS
from strata.base.program import Op, Program
from strata.base.progress import LoadProgress, listening
from strata.base.state import State
from strata.base.window import HeadRequest
from strata.cpu.backend import CpuBackend
from strata.gpu.backend import GpuBackend
from strata.gpu.device import Device
from strata.gpu.state import DeviceState
from strata.options import token_ids
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.required_device import required_device
from strata.runtime.compile_ahead import second_process
from strata.text.tokenizer import Tokenizer

UNCOMPARED = ("ngram.ticket",)
"""Counters of how often a backend has run, which no value depends on."""


@dataclass(frozen=True)
class Difference:
    """The first value that differs. op, layer and buffer name its place; index is that of the value in the buffer.

    device, cpu  the values        ulps  float32 numbers from one to the other; None for integers and NaN
    rows, position  the window: its rows, and the position of its first one
    """

    op: str
    layer: int
    buffer: str
    index: tuple[int, ...]
    device: float | int
    cpu: float | int
    ulps: int | None
    rows: int
    position: int

    def __str__(self) -> str:
        where = f"layer {self.layer}" if self.layer >= 0 else "outside the layers"
        apart = "" if self.ulps is None else f", {self.ulps} ulp apart"
        return (f"first difference: op {self.op}, {where}, buffer {self.buffer}{list(self.index)}: {self.device!r} on "
                f"the device, {self.cpu!r} on the CPU{apart}; window of {self.rows} rows at position "
                f"{self.position}")  # fmt: skip


@dataclass(frozen=True)
class Report:
    """Of a check: the device's name, window sizes in order, ops run, values compared, and the difference or None.

    load_seconds: until both backends were ready, compiling included; check_seconds: the windows
    """

    device: str
    windows: tuple[int, ...]
    ops: int
    values: int
    difference: Difference | None
    load_seconds: float = 0.0
    check_seconds: float = 0.0

    def __str__(self) -> str:
        text = (f"{self.device}: {sum(self.windows)} tokens in {len(self.windows)} windows, {self.ops} ops, "
                f"{self.values} values compared with the CPU bit by bit\n"
                f"{self.load_seconds:.1f} s until both were ready, {self.check_seconds:.1f} s of windows")  # fmt: skip
        return f"{text}\n{self.difference or 'no difference'}"

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def window_sizes(n_tokens: int) -> list[int]:
    """Rows of the windows that a prompt is read in: 1, 2, .. 8, and 8 from there on, so that all sizes have run."""
    sizes: list[int] = []
    while (left := n_tokens - sum(sizes)) > 0:
        sizes.append(min(len(sizes) + 1, WINDOW_ROWS, left))
    return sizes


def ulps_apart(a: np.float32, b: np.float32) -> int | None:
    """How many float32 steps lie between two numbers; 0 and -0 are one apart. None if one is NaN."""
    if np.isnan(a) or np.isnan(b):
        return None
    bits = [int(np.float32(v).view(np.int32)) for v in (a, b)]
    place_a, place_b = (n if n >= 0 else -(1 << 31) - n - 1 for n in bits)
    return abs(place_a - place_b)


class _Differs(Exception):
    def __init__(self, difference: Difference):
        self.difference = difference


class Comparison:
    """Two backends on the same programs, and what was compared so far."""

    def __init__(self, cpu: CpuBackend, gpu: GpuBackend):
        self.cpu, self.gpu = cpu, gpu
        self.ops = self.values = 0
        self.windows: list[int] = []
        self._place = (0, 0)

    def run(self, tokens: np.ndarray, on_progress: Callable[[int, int], None] | None = None) -> Report:
        """Read int32 tokens (n,) on new sessions of both, up to the first difference. on_progress(done, n) in tokens.

        What the CPU refuses (NotFinite) is raised; what the device alone refuses is a difference.
        """
        states = self.cpu.new_state(), self.gpu.new_state()
        difference, began = None, time.perf_counter()
        try:
            for rows in window_sizes(len(tokens)):
                self._window(*states, tokens, rows)
                if on_progress is not None:
                    on_progress(states[0].rows, len(tokens))
        except _Differs as found:
            difference = found.difference
        return Report(self.gpu.device.name, tuple(self.windows), self.ops, self.values, difference,
                      check_seconds=time.perf_counter() - began)  # fmt: skip

    def _window(self, cpu_state: State, state: DeviceState, tokens: np.ndarray, rows: int) -> None:
        first = cpu_state.rows
        self._place = rows, first
        self.windows.append(rows)
        part = tokens[first : first + rows]
        previous = tuple(int(tokens[first - i]) if first >= i else -1 for i in (1, 2))
        program = self.cpu.programs.windows[rows]
        wanted = self._ops_on_cpu(cpu_state, program, part, previous)
        recorded = self.gpu.recorded(state, part, previous, lambda index: tuple(wanted[index]))
        for (op, found), values in zip(recorded, wanted, strict=True):
            for name, on_cpu in values.items():
                self._same(found[name], on_cpu, op.kind, op.layer, name)
            self.ops += 1
        self._as_served(state, program, part, previous)
        for backend, session in ((self.cpu, cpu_state), (self.gpu, state)):
            backend.commit(session, rows)
        self._states(cpu_state, state)

    def _ops_on_cpu(
        self, state: State, program: Program, tokens: np.ndarray, previous: tuple[int, int]
    ) -> list[dict[str, np.ndarray]]:
        """For every op, its buffers by name as they are behind it. What an op leaves alone is kept once."""
        latest: dict[str, np.ndarray] = {}
        out: list[dict[str, np.ndarray]] = []

        def keep(op: Op) -> None:
            behind = {}
            for name in dict.fromkeys(op.buffers.values()):
                if name not in self.cpu.memory.arrays or name in UNCOMPARED:
                    continue  # a tensor, a table or a session's buffer
                b = program.buffers[name]
                now = self.cpu.memory.arrays[name].reshape(-1)[: b.n_bytes // np.dtype(b.dtype).itemsize]
                if name not in latest or now.tobytes() != latest[name].tobytes():
                    latest[name] = now.reshape(b.shape).copy()
                behind[name] = latest[name]
            out.append(behind)

        self.cpu.window(state, tokens, previous, after_op=keep)
        return out

    def _as_served(self, state: DeviceState, program: Program, tokens: np.ndarray, previous: tuple[int, int]) -> None:
        """The window as one graph, with its head: streams and logits."""
        rows, last = len(tokens), program.ops[-1]
        self.gpu.window(state, tokens, previous)
        streams = np.array(self.cpu.streams[:rows])
        self._same(np.array(self.gpu.streams[:rows]), streams, "graph of the window", last.layer, "streams")
        logits = [backend.head(0, rows, HeadRequest(full=True)).full for backend in (self.gpu, self.cpu)]
        self._same(np.array(logits[0]), np.array(logits[1]), "head", -1, "logits")

    def _states(self, cpu_state: State, state: DeviceState) -> None:
        for (name, found), (_, wanted) in zip(state.export().parts(), cpu_state.parts(), strict=True):
            op, layer = self._writer(name)
            self._same(found, wanted, op, layer, name)

    def _writer(self, name: str) -> tuple[str, int]:
        """(kind, layer) of the op that writes a session's buffer."""
        programs = self.cpu.programs
        ops = (*programs.commit.ops, *programs.windows[self._place[0]].ops)
        return next((op.kind, op.layer) for op in ops if name in op.buffers.values())

    def _same(self, found: np.ndarray, wanted: np.ndarray, op: str, layer: int, name: str) -> None:
        self.values += wanted.size
        bits = f"u{wanted.dtype.itemsize}"
        differ = np.ascontiguousarray(found).view(bits) != np.ascontiguousarray(wanted).view(bits)
        if differ.any():
            index = tuple(int(i) for i in np.unravel_index(int(np.argmax(differ)), differ.shape))
            a, b = found[index], wanted[index]
            ulps = ulps_apart(a, b) if wanted.dtype == np.float32 else None
            raise _Differs(Difference(op, layer, name, index, a.item(), b.item(), ulps, *self._place))


def check(
    path: str | Path,
    prompt: str | Sequence[int] | np.ndarray,
    *,
    context: int | None = None,
    kv: str = "f16",
    threads: int | None = None,
    index: int = 0,
    device: Device | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    loading: Callable[[LoadProgress], None] | None = None,
) -> Report:
    """Compare a GPU with the CPU on the windows of a prompt, a text or tokens.

    context      cells of the sessions; None: what the prompt takes
    kv           "f16" or "int8"
    threads      CPU threads of the CPU backend; None: one per physical core
    index        number of the CUDA device
    device       where to run instead. It is closed at the end
    on_progress  called with (tokens checked, tokens) behind every window
    loading      called with `strata.LoadProgress` records while kernels are compiled and weights uploaded

    Returns a Report whose `difference` is None if every value had the same bits. Raises StrataError without a GPU,
    DoesNotFit where weights and state do not fit into its memory, and what loading raises.
    """
    need(kv in ("f16", "int8"), "kv is unknown", found=repr(kv), needed='"f16" or "int8"')
    began = time.perf_counter()
    device = device or required_device("a check of a GPU against the CPU", index)
    try:
        with GgufFile(path) as gguf:
            arch = architecture_of(gguf)
            g = arch.read_geometry(gguf)
            arch.check_contract(gguf, g)
            text = isinstance(prompt, str)
            tokens = token_ids(Tokenizer.from_metadata(gguf.metadata).encode(prompt) if text else prompt, g.V)
            cells = len(tokens) + CONTEXT_RESERVE + 1
            need(context is None or context >= cells, "the prompt is longer than the context", found=context,
                 needed=f">= {cells}")  # fmt: skip
            programs = arch.build_programs(g, -(-(context or cells) // CELL_ROWS) * CELL_ROWS, kv)
            parts = (Tensors(gguf), g, expert_layout(gguf, g.L), programs)
            with listening(loading), second_process(cpu=True):  # both backends compile, one after the other
                gpu = GpuBackend(*parts, device)
                cpu = CpuBackend(*parts, threads=threads)
            ready = time.perf_counter()
            try:
                return replace(Comparison(cpu, gpu).run(tokens, on_progress), load_seconds=ready - began)
            finally:
                cpu.close()
    finally:
        device.close()
