"""From a program to a walk list: buffers become addresses, ops become steps.

`Memory` gives every buffer of all programs one place, as large as the largest program needs. `Lowering` goes through
one program's ops and lets each kind (`strata.cpu.ops`) add its steps. A row that several matrices multiply is quantised
once per activation layout, right before its first use. The same walk with `Memory.measuring` adds no steps and only
finds out how much private scratch the ops ask for, so a plan can price them without a file's data. """

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np

from strata.base.compiled import CFunction, chunk, step
from strata.base.program import NOT_FINITE, Buffer, Op, Program
from strata.base.progress import COMPILING, Countable
from strata.cpu.error_word import report
from strata.cpu.gemv.table import ActivationLayout
from strata.cpu.machine_code import call6, i64_view, ld64
from strata.cpu.pool import dispatch
from strata.cpu.walker import WalkList
from strata.cpu.weights import Weights

ALIGN = 64
SERIAL_VALUES = 8192
"""Rows with fewer values in all are quantised by one thread: about 3 us."""


def aligned_bytes(n: int) -> np.ndarray:
    """(n,) uint8 of zeros whose address is a multiple of 64."""
    raw = np.zeros(n + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + n]


class Memory:
    """Places of io, scratch and table buffers, shared by all programs of a backend; allocated once.

    State buffers are not here: a program finds a session's buffers through the slot table, one address per name.
    """

    def __init__(self, programs: Iterable[Program], tables: dict[str, np.ndarray]):
        self.tables = tables
        self.shared: dict[str, Buffer] = {}
        self.states: dict[str, Buffer] = {}
        for program in programs:
            for b in program.buffers.values():
                if b.role in ("io", "scratch"):
                    if b.name not in self.shared or b.n_bytes > self.shared[b.name].n_bytes:
                        self.shared[b.name] = b
                elif b.role != "table":
                    self.states[b.name] = b
        self.slots = {name: i for i, name in enumerate(self.states)}
        self.slot_table = np.zeros(max(len(self.states), 1), np.int64)
        self.measuring = True
        self.compiling = Countable(0)
        self.private_bytes: dict[str, int] = {}
        self.private: dict[str, np.ndarray] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def allocate(self) -> None:
        """End measuring: allocate everything that was asked for."""
        self.measuring = False
        for name, b in self.shared.items():
            self.arrays[name] = aligned_bytes(b.n_bytes).view(b.dtype).reshape(b.shape)
        for name, n in self.private_bytes.items():
            self.private[name] = aligned_bytes(n)

    def begin(self, what: str, name: str) -> bool:
        """Report a kind of op, or a format, that is compiled or tested; True the first time."""
        return self.compiling.begin(what, name)

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name] if name in self.arrays else self.tables[name]

    def address(self, name: str) -> int:
        return 0 if self.measuring else self.array(name).ctypes.data

    def slot(self, name: str) -> int:
        """Address of the word that holds the address of a state buffer."""
        return self.slot_table.ctypes.data + 8 * self.slots[name]

    def scratch(self, name: str, n_bytes: int) -> int:
        """Address of private scratch. Ops that use one name share the place: they never run at the same time."""
        if self.measuring:
            self.private_bytes[name] = max(self.private_bytes.get(name, 0), n_bytes)
            return 0
        return self.private[name].ctypes.data

    @property
    def n_bytes(self) -> int:
        """Bytes of io, scratch and private buffers together."""
        return sum(b.n_bytes for b in self.shared.values()) + sum(self.private_bytes.values())


class Lowering:
    """Turns one program into a walk list; see the module text. `steps_of_op` maps each step to its op."""

    def __init__(self, program: Program, memory: Memory, weights: Weights, pool: int, threads: int, error: int):
        self.program, self.memory, self.weights = program, memory, weights
        self.pool, self.threads, self.error = pool, threads, error
        self.T = program.T
        self.walk = WalkList(error)
        self.op_of_step: list[int] = []
        self._records: dict[tuple[str, str], int] = {}
        self._op_index = 0

    def run(self) -> WalkList:
        from strata.cpu.ops import LOWERING

        for index, op in enumerate(self.program.ops):
            self._op_index = index
            if self.memory.measuring:
                LOWERING[op.kind](self, op)
            else:
                first = self.memory.begin(COMPILING, op.kind)
                LOWERING[op.kind](self, op)
                if first:
                    self.walk.compile()
            for port, name in op.buffers.items():
                if port == "x" and op.kind in ("linear", "experts"):
                    continue  # products only read their input, so its records stay good
                for key in [k for k in self._records if k[0] == name]:
                    del self._records[key]
        return self.walk

    def run_op(self, index: int) -> int:
        """Run only the steps of op number `index`; returns the failing step or -1. For checks, not for speed."""
        first = bisect.bisect_left(self.op_of_step, index)
        last = bisect.bisect_right(self.op_of_step, index)
        failed = self.walk.run_range(first, last - first)
        return failed if failed < 0 else failed + first

    # ---- what ops ask for

    def at(self, op: Op, port: str) -> int:
        """Address of a buffer, 0 if the op has no such port."""
        return self.memory.address(op.buffers[port]) if port in op.buffers else 0

    def slot(self, op: Op, port: str) -> int:
        """Address of a state buffer's slot, 0 if the op has no such port."""
        return self.memory.slot(op.buffers[port]) if port in op.buffers else 0

    def vector(self, op: Op, port: str, transposed: bool = False) -> int:
        """Address of a small tensor widened to float32, optionally transposed; 0 if the op has no such port."""
        if self.memory.measuring or port not in op.buffers:
            return 0
        return self.weights.vector(op.buffers[port], transposed).ctypes.data

    def step(self, function: CFunction, *record: int | np.ndarray) -> None:
        if not self.memory.measuring:
            self.walk.add(function, *record)
            self.op_of_step.append(self._op_index)

    def parallel(self, n_chunks: int, function: CFunction, *record: int | np.ndarray) -> None:
        """A step that hands n_chunks chunks to the pool."""
        if not self.memory.measuring:
            pool = self.pool if n_chunks > 1 else 0
            self.step(parallel, pool, n_chunks, function.address, *record)

    def records(
        self, buffer: str, K: int, layout: ActivationLayout, layer: int, rows: int | None = None
    ) -> tuple[int, int]:
        """(address, bytes a row) of a float32 buffer's rows of K values in an activation layout.

        Adds the quantiser if this is the first use; rows: how many there are, T by default.
        """
        rows = self.T if rows is None else rows
        n_bytes = layout.record_bytes(K)
        if layout.group == 0:
            return self.memory.address(buffer), n_bytes
        key = (buffer, layout.name)
        if key not in self._records:
            area = self.memory.scratch(f"records.{buffer}.{layout.name}", rows * n_bytes)
            self._records[key] = area
            if not self.memory.measuring:
                x = self.memory.address(buffer)
                if rows == 1 or rows * K <= SERIAL_VALUES:
                    record = (layout.quantise_address, x, K, rows, K * 4, area, self.error, layer, NOT_FINITE)
                    self.step(quantise, *record)
                else:
                    record = (layout.quantise_address, x, K, K * 4, area, n_bytes, self.error, layer, NOT_FINITE)
                    self.parallel(rows, quantise_row, *record)
        return self._records[key], n_bytes


@step
def parallel(a):
    """Hand chunks to the pool. Record: pool, chunks, function, then the function's own record."""
    dispatch(ld64(a), ld64(a + 8), ld64(a + 16), a + 24)


@step
def quantise(a):
    """Activation records of all rows. Record: quantiser, x, K, T, bytes a row of x, records, error, layer, code."""
    p = i64_view(a, 9)
    bad = np.zeros(1, np.int64)
    call6(p[0], p[1], p[2], p[3], p[4], p[5], bad.ctypes.data)
    if bad[0] != 0:
        report(p[6], p[8], p[7], 0)


@chunk
def quantise_row(a, t, T):
    """One row. Record: quantiser, x, K, bytes a row of x, records, bytes of a record, error, layer, code."""
    p = i64_view(a, 9)
    bad = np.zeros(1, np.int64)
    call6(p[0], p[1] + t * p[3], p[2], 1, p[3], p[4] + t * p[5], bad.ctypes.data)
    if bad[0] != 0:
        report(p[6], p[8], p[7], t)
