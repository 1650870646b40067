"""The CPU backend: every program as a walk list over one worker pool. It is also the exact oracle of other backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np

from strata.base.errors import NotFinite
from strata.base.geometry import CELL_ROWS, WINDOW_ROWS, Geometry
from strata.base.program import (
    ERROR_TEXT,
    ERROR_WORDS,
    NGRAM_FAILED,
    NGRAM_TIMEOUT,
    Allocation,
    Op,
    Program,
    ProgramSet,
)
from strata.base.progress import COMPILING, Countable
from strata.base.rotary import rotary_table
from strata.base.state import State
from strata.base.window import HeadRequest, HeadRows
from strata.cpu.draft import CpuDraft
from strata.cpu.head_rows import summarise
from strata.cpu.lower import Lowering, Memory
from strata.cpu.pool import Pool
from strata.cpu.weights import Weights
from strata.pack.experts import ExpertLayout
from strata.pack.ngram import NgramTable
from strata.pack.tensors import Tensors


class CpuBackend:
    """Runs windows, prefill chunks, heads and commits of one model on the CPU.

    One window at a time: the caller (the model) holds the lock. States are independent; `window` binds the one it gets.
    """

    name = "cpu"
    chunk_rows = CELL_ROWS
    """Rows that one call of `prefill` reads."""

    def __init__(
        self,
        tensors: Tensors,
        geometry: Geometry,
        experts: ExpertLayout,
        programs: ProgramSet,
        *,
        threads: int | None = None,
        pin: bool = False,
        ngram_cache_rows: int = 65536,
        ngram: str = "mapped",
        draft_ids: np.ndarray | None = None,
    ):
        self.geometry, self.programs = geometry, programs
        context = programs.prefill.buffers["rope"].shape[0]
        table = rotary_table(context, geometry.rotary_dims, geometry.rope_base)
        ones = np.ones((WINDOW_ROWS, geometry.C), np.float32)
        self.memory = Memory(programs.all(), {"rope": table, "mtp.one": ones})
        self.weights = Weights(tensors, experts, progress=self.memory.begin)
        self.pool = Pool(threads, pin=pin, reserve_cores=0)
        self.threads = self.pool.threads
        self._error = np.zeros(ERROR_WORDS, np.int64)
        self.ngram: NgramTable | None = None
        try:
            if geometry.ngram:
                self.ngram = NgramTable(tensors.gguf, geometry.ngram, ngram_cache_rows, mode=ngram)
            for program in programs.all():
                self._lower(program)
            self.memory.allocate()
            kinds = {op.kind for program in programs.all() for op in program.ops}
            self.memory.compiling = Countable(len(kinds) + len(self.weights.formats))
            lowered = {id(p): self._lower(p) for p in programs.all()}
            for lowering in lowered.values():
                lowering.walk.freeze()  # nothing compiles after load
            self.memory.compiling.end(COMPILING)
        except BaseException:
            self.close()
            raise
        self._windows = {T: lowered[id(p)] for T, p in programs.windows.items()}
        self._heads = {T: lowered[id(p)] for T, p in programs.heads.items()}
        self._commit, self._prefill = lowered[id(programs.commit)], lowered[id(programs.prefill)]
        self.draft: CpuDraft | None = None
        if programs.draft:
            self.draft = CpuDraft(programs.draft, self.memory, lambda p: lowered[id(p)], self._bind,
                                  lambda lowering, state: self._run(lowering, state), draft_ids)  # fmt: skip
        self._bound: State | None = None
        self._before_prefill = np.zeros(
            State([b for b in programs.states if b.role == "recurrent"]).recurrent.size, np.uint8
        )
        self._io()

    def _lower(self, program: Program) -> Lowering:
        lowering = Lowering(
            program, self.memory, self.weights, self.pool.address, self.threads, self._error.ctypes.data
        )
        lowering.run()
        return lowering

    def _io(self) -> None:
        a = self.memory.arrays
        self._tokens, self._pos, self._n_keep = a["tokens"], a.get("pos"), a["n_keep"]
        self._head_row = a["head_row"]
        self._logits = a["logits"]
        self._ngram_rows, self._ticket = a.get("ngram.rows"), a.get("ngram.ticket")

    # ---- states

    def new_state(self) -> State:
        state = State(self.programs.states)
        state.slot_addresses = state.addresses(self.memory.slots)
        return state

    def _bind(self, state: State) -> None:
        if self._bound is not state:
            self.memory.slot_table[: len(state.slot_addresses)] = state.slot_addresses
            self._bound = state

    def current(self) -> nullcontext:
        """Around all work; other backends have something to do there."""
        return nullcontext()

    # ---- work

    def _feed(self, state: State, tokens: np.ndarray, previous: tuple[int, int]) -> None:
        T = len(tokens)
        self._bind(state)
        self._tokens[:T] = tokens
        if self._pos is not None:
            self._pos[0] = state.rows
        if self.ngram is not None:
            self._ticket[0] += 1
            ids = self.ngram.row_ids(self._tokens[:T], *previous)
            self.ngram.deliver(ids, self._ngram_rows[:T], self._ticket)

    def _run(self, lowering: Lowering, state: State) -> None:
        self._check(lowering, lowering.walk.run(), state)

    def _check(self, lowering: Lowering, failed: int, state: State) -> None:
        """Raise for the step that stopped a walk; -1 is none."""
        if failed >= 0:
            code, _, layer, detail = (int(w) for w in self._error)
            op = lowering.program.ops[lowering.op_of_step[failed]]
            where = f"layer {layer}" if layer >= 0 else "outside the layers"
            message = f"window at position {state.rows} stopped: {ERROR_TEXT.get(code, code)} in op {op.kind}, {where}"
            if code in (NGRAM_TIMEOUT, NGRAM_FAILED):
                raise self.ngram.failed(message, detail)
            raise NotFinite(
                message,
                found=f"row or expert {detail}",
                needed="finite numbers",
                advice="The weights or the file may be damaged.",
            )

    def window(
        self,
        state: State,
        tokens: np.ndarray,
        previous: tuple[int, int],
        after_op: Callable[[Op], None] | None = None,
    ) -> None:
        """Run T = len(tokens) <= 8 rows at position state.rows; nothing is committed.

        tokens (T,) int32; previous: the tokens one and two places before the window, -1 where there is none. after_op
        is for checks: it is called with each op when its steps have run, and may look at `memory`. Raises NotFinite
        naming op and layer; the state is then as before.
        """
        self._feed(state, tokens, previous)
        lowering = self._windows[len(tokens)]
        if after_op is None:
            self._run(lowering, state)
            return
        for index, op in enumerate(lowering.program.ops):
            self._check(lowering, lowering.run_op(index), state)
            after_op(op)

    def commit(self, state: State, n_keep: int) -> None:
        """Advance `state` by the first n_keep rows of the window that was run last, on the same state.

        With a draft layer, the rows' streams are kept for it.
        """
        self._bind(state)
        if n_keep:
            self._n_keep[0] = n_keep
            self._run(self._commit, state)
            if self.draft:
                self.draft.keep(state, 0, n_keep, state.rows)
            state.rows += n_keep

    def prefill(
        self, state: State, tokens: np.ndarray, previous: tuple[int, int], following: np.ndarray | None = None
    ) -> None:
        """Read one whole cell of rows at a cell border and advance; on an error the state is as before.

        following: tokens of the cell after it; of no use here.
        """
        self._feed(state, tokens, previous)
        self._before_prefill[:] = state.recurrent
        try:
            self._run(self._prefill, state)
        except BaseException:
            state.recurrent[:] = self._before_prefill
            raise
        state.rows += len(tokens)

    def prefill_ops(self, state: State, tokens: np.ndarray, previous: tuple[int, int]) -> dict[str, float]:
        """Read a cell as `prefill` does, timed: milliseconds by kind of op."""
        self.profile(True)
        try:
            self.prefill(state, tokens, previous)
            return {kind: ns / 1e6 for kind, ns in self.op_times().items() if ns}
        finally:
            self.profile(False)

    def head(self, first_row: int, T: int, request: HeadRequest) -> HeadRows:
        """Logits of T <= 8 rows of the last window or chunk, from row `first_row` on, summarised as asked."""
        self._head_row[0] = first_row
        self._run(self._heads[T], self._bound)
        try:
            return summarise(self._logits[:T], request)
        except NotFinite as error:
            where = f"window at position {self._bound.rows} stopped in op linear of the head, outside the layers"
            error.message = f"{where}: {error.message}"
            raise

    @property
    def streams(self) -> np.ndarray:
        """(rows, C*D) float32 view: streams before the final mixer that the last window or chunk left."""
        return self.memory.arrays["streams"]

    # ---- facts

    def allocations(self, states: Sequence[State]) -> list[Allocation]:
        """What this backend holds for `states`, all of its sessions, under the plan's line names."""
        m, w = self.memory, self.weights
        buffers = [(b, s.arrays[name].nbytes) for s in states for name, b in s.buffers.items() if b.role == "cells"]

        def cells(draft: bool, keys: bool) -> int:
            kinds = ((b.name.startswith("mtp."), b.name.endswith("block_keys"), n) for b, n in buffers)
            return sum(n for is_draft, is_keys, n in kinds if (is_draft, is_keys) == (draft, keys))

        logits = m.arrays["logits"].nbytes
        scratch = sum(a.nbytes for a in (*m.arrays.values(), *m.private.values())) - logits
        tables = sum(t.nbytes for t in m.tables.values())
        lines = [
            ("weights (mapped)", w.tensors.gguf.total_bytes, "used in place from the file's mapping"),
            ("KV cache", cells(False, False), f"{len(states)} sessions"),
            ("pooled keys", cells(False, True), f"{len(states)} sessions"),
            (
                "recurrent state",
                sum(s.recurrent.nbytes for s in states) + self._before_prefill.nbytes,
                f"{len(states)} sessions and one chunk's way back",
            ),
            ("tables", tables + w.vector_bytes + w.place_bytes, "rotary, vectors, places of experts"),
            *self._draft_lines(cells(True, False)),
            ("n-gram cache", self.ngram.cache_bytes if self.ngram else 0, "rows already read"),
            ("window scratch", scratch, "activations of the widest program"),
            ("logits", logits, "8 rows"),
        ]
        return [Allocation(line, "ram", n, reason) for line, n, reason in lines if n]

    def _draft_lines(self, kv_bytes: int) -> list[tuple[str, int, str]]:
        """The draft layer's own memory and pages; what lies in the model's file is counted with the model."""
        tensors = self.weights.tensors
        head = tensors.held.get("mtp.output.weight")
        head_bytes = 0 if head is None or head.mapped else head.n_bytes
        model = [(base.ctypes.data, base.ctypes.data + base.nbytes) for base in tensors.gguf.keeper()]

        def in_model(address: int) -> bool:
            return any(start <= address < end for start, end in model)

        mapped = [t for t in tensors.held.values() if t.mapped]
        own_pages = sum(t.n_bytes for t in mapped if not in_model(t.data.ctypes.data))
        return [
            ("draft layer", tensors.held_bytes - head_bytes, "converted or regrouped"),
            ("draft layer (mapped)", own_pages, "used in place from its own files"),
            ("draft KV cache", kv_bytes, "one attention layer"),
            ("draft head", head_bytes, "rows of the head that drafts are scored on"),
        ]

    def profile(self, on: bool = True) -> None:
        """Start or stop timing every step; see `op_times`."""
        for lowering in self._lowered():
            lowering.walk.profile(on)

    def _lowered(self) -> list[Lowering]:
        draft = self.draft.lowerings if self.draft else []
        return [*self._windows.values(), *self._heads.values(), self._commit, self._prefill, *draft]

    def op_times(self) -> dict[str, int]:
        """ns spent per kind of op since `profile()`."""
        total: dict[str, int] = {}
        for lowering in self._lowered():
            for index, ns in zip(lowering.op_of_step, lowering.walk.step_ns, strict=True):
                kind = lowering.program.ops[index].kind
                total[kind] = total.get(kind, 0) + int(ns)
        return total

    def close(self) -> None:
        if self.ngram is not None:
            self.ngram.close()
        self.pool.close()
