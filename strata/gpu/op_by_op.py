"""The ops of a window one by one, for checks, each as launches of its own.

`run` waits behind every op, and whoever is called may read anything. `recorded` does not wait: behind every op copies
of its buffers are queued into a piece of device memory, the tape, which comes to the host as a whole. A window then
takes a few round trips instead of one for every op and every buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from strata.base.program import Op, Program
from strata.gpu.error_word import decode
from strata.gpu.launch import Launch
from strata.gpu.lower import Lowering
from strata.gpu.mailbox import copy_values
from strata.gpu.memory import aligned

if TYPE_CHECKING:
    from strata.gpu.backend import GpuBackend

TAPE_BYTES = 32 << 20
"""Of the tape, unless the buffers of one op are larger."""


class OpByOp:
    """Runs programs of a backend without fusing ops. The caller has fed the window."""

    def __init__(self, backend: GpuBackend):
        self._b = backend
        self._lowered: dict[int, Lowering] = {}
        self._tape = (0, 0)

    def _launches(self, program: Program) -> tuple[Lowering, Launch, Launch]:
        """Lowered without fusing, and the launches that bring inputs in and the error word out."""
        b = self._b
        if id(program) not in self._lowered:
            self._lowered[id(program)] = b._lower(program, fuse=False)
        lowering = self._lowered[id(program)]
        out = (b.memory.address("outbox"), b._host_out.ctypes.data, 8)
        first, *_, last = lowering.graph_launches(b._host_in.ctypes.data, out)
        return lowering, first, last

    def run(self, program: Program, position: int, after_op: Callable[[Op], None]) -> None:
        """Run a window, with a call behind every op. NotFinite as soon as an op reports it."""
        b = self._b
        lowering, first, last = self._launches(program)
        b.device.run([first])
        for index, op in enumerate(program.ops):
            with b._served(program):
                b.device.run([*lowering.launches_of(index), last])
                b.device.synchronize()
            b._check(lowering, b._error_word, position)
            after_op(op)

    def recorded(
        self, program: Program, position: int, names_of: Callable[[int], Sequence[str]]
    ) -> Iterator[tuple[Op, dict[str, np.ndarray]]]:
        """Run a window; every op with its buffers as they were behind it, by name, in the program's shapes.

        names_of(index of an op) says which buffers. NotFinite behind the op that reports it.
        """
        b = self._b
        lowering, first, last = self._launches(program)
        names = [tuple(names_of(index)) for index in range(len(program.ops))]
        sizes = [sum(aligned(program.buffers[name].n_bytes) for name in each) for each in names]
        tape, capacity = self._tape_of(max(TAPE_BYTES, *sizes))
        b.device.run([first])
        begin = 0
        while begin < len(program.ops):
            end, used = begin, 0
            queued: list[Launch] = []
            while end < len(program.ops) and (end == begin or used + sizes[end] <= capacity):
                queued += lowering.launches_of(end)
                for name in names[end]:
                    n_bytes = program.buffers[name].n_bytes
                    queued += copy_values(b.memory.address(name), tape + used, -(-n_bytes // 4))
                    used += aligned(n_bytes)
                end += 1
            with b._served(program):
                b.device.run([*queued, last])
                b.device.synchronize()
            taken = np.empty(used, np.uint8)
            b.device.download(tape, taken)
            word, at = b._error_word, 0
            stopped = decode(word)
            for index in range(begin, end):
                found = {}
                for name in names[index]:
                    of = program.buffers[name]
                    found[name] = taken[at : at + of.n_bytes].view(of.dtype).reshape(of.shape)
                    at += aligned(of.n_bytes)
                yield program.ops[index], found
                if stopped is not None and stopped.op <= index:
                    b._check(lowering, word, position)
            begin = end

    def _tape_of(self, n_bytes: int) -> tuple[int, int]:
        """(address, bytes) of the tape, which grows when it must."""
        if self._tape[1] < n_bytes:
            self._tape = self._b.device.alloc(n_bytes), n_bytes
        return self._tape
