"""From a program to a list of launches: buffers become addresses, ops become kernels, neighbours are fused.

Fused, where `fuse` is on: an hc_add with the hc_norm behind it, in narrow windows both with the product behind them; a
squeeze with the float product before it; a squeeze and a mix with the quantiser of the products that read them; the
convolution with the delta rule; a router with the product of its logits. With `fuse` off every op is launches of its
own, for comparing backends op by op.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from strata.base.program import Op, Program
from strata.gpu import mailbox
from strata.gpu.activations import Activations, quantise
from strata.gpu.error_word import where
from strata.gpu.float_gemv import Branch
from strata.gpu.launch import Launch
from strata.gpu.memory import Memory
from strata.gpu.weights import Weights

if TYPE_CHECKING:
    from strata.gpu.split_experts import Split

PRODUCTS = ("linear", "experts")


class Lowering:
    """One program's launches. `op_of_launch` maps each launch to its op; see the module text."""

    def __init__(
        self,
        program: Program,
        memory: Memory,
        weights: Weights,
        context: int,
        *,
        fuse: bool = True,
        split: Split | None = None,
    ):
        self.program, self.memory, self.weights, self.split = program, memory, weights, split
        self.context, self.fuse = context, fuse
        self.T = program.T
        self.launches: list[Launch] = []
        self.op_of_launch: list[int] = []
        self.index = 0
        self._activations: dict[tuple[str, int], Activations] = {}
        self._made_here: set[tuple[str, int]] = set()
        self.added_before: Op | None = None  # an hc_add that the next hc_norm does
        self.norm_before: tuple[Op, np.uint64] | None = None  # an hc_norm that the next product does, and its `where`
        self.branch_before: Branch | None = None  # which the product behind that one stores
        self.convolution_before: Op | None = None  # a gdn_conv that the next gdn_heads does
        self.stored_index = -1  # number of a qsa_index that the qsa_append before it has done
        self.scored_index = -1  # number of a qsa_select whose scores that qsa_append has made
        self.routed_index = -1  # number of a router that the product before it has done
        self._fork, self._branch, self._held = 0, -1, False
        self._ahead = False
        self.squeezed_before = False  # the product before an hc_squeeze has done it

    def run(self, table: dict[str, Callable[[Lowering, Op], None]]) -> Lowering:
        for index, op in enumerate(self.program.ops):
            self.index = index
            self._made_here.clear()
            table[op.kind](self, op)
            for port, name in op.buffers.items():
                if port == "x" and op.kind in PRODUCTS:
                    continue  # products only read their input, so what was quantised of it stays good
                for key in [k for k in self._activations if k[0] == name and k not in self._made_here]:
                    del self._activations[key]
        return self

    # ---- what ops ask for

    @property
    def error(self) -> int:
        return self.memory.error

    def where(self, op: Op) -> np.uint64:
        return where(self.index, op.layer)

    def where_next(self) -> np.uint64:
        """For what a kernel does in place of the next op."""
        return where(self.index + 1, self.program.ops[self.index + 1].layer)

    def at(self, op: Op, port: str) -> int:
        """Address of a buffer, 0 if the op has no such port."""
        return self.memory.address(op.buffers[port]) if port in op.buffers else 0

    def slot(self, op: Op, port: str) -> int:
        """Address of a state buffer's slot, 0 if the op has no such port."""
        return self.memory.slot(op.buffers[port]) if port in op.buffers else 0

    def vector(self, op: Op, port: str, transposed: bool = False) -> int:
        """Address of a small tensor widened to float32; 0 if the op has no such port."""
        return self.weights.vector(op.buffers[port], transposed) if port in op.buffers else 0

    def scratch(self, name: str, n_bytes: int) -> int:
        return self.memory.scratch(name, n_bytes)

    def add(self, launches: list[Launch], aside: bool = False) -> None:
        """Add launches of the op; aside: nothing waits for them but a launch that `gathers`."""
        if self._ahead:
            launches = [replace(one, ahead=True) for one in launches]
        elif self._branch >= 0:
            launches = [replace(one, fork=self._fork, branch=self._branch, aside=aside) for one in launches]
        self.launches += launches
        self.op_of_launch += [self.index] * len(launches)

    def branch(self) -> None:
        """What is added from here on may run beside what the last call's branch adds, until `join`."""
        if not self.fuse or self._held or self._ahead:
            return
        if self._branch < 0:
            self._fork += 1
        self._branch += 1

    def join(self) -> None:
        """What is added from here on waits for all branches."""
        if not self._held:
            self._branch = -1

    def hold(self) -> None:
        """As `branch`, for several ops: until `release` other calls of `branch` and `join` count for nothing."""
        self.branch()
        self._held = True

    def release(self) -> bool:
        """Whether a branch was held; it goes on until the next call of `branch`."""
        held, self._held = self._held, False
        return held

    def go_ahead(self) -> None:
        """What ops add from here on runs ahead, until `meet`: they need nothing but what the host gives."""
        assert self._branch < 0, "what runs ahead is in no branch"
        self._ahead = self.fuse

    def meet(self, launches: list[Launch]) -> list[Launch]:
        """Launches of an op, the first of which waits for those ahead."""
        ahead, self._ahead = self._ahead, False
        return [replace(launches[0], meets=True), *launches[1:]] if ahead else launches

    # ---- activations

    def has_activations(self, buffer: str, groups: set[int]) -> bool:
        """Whether a buffer's rows are quantised in all these groups already."""
        return all((buffer, group) in self._activations for group in groups)

    def place_activations(self, buffer: str, K: int, group: int, rows: int) -> Activations:
        """Where activations of a buffer's rows of K values go; from now on they count as made."""
        n_bytes = Activations.n_bytes(rows, K, group)
        area = self.scratch(f"activations.{buffer}.{group}", n_bytes)
        made = Activations.at(area, rows, K, group)
        self._activations[buffer, group] = made
        self._made_here.add((buffer, group))
        return made

    def activations(self, op: Op, buffer: str, K: int, group: int, rows: int) -> Activations:
        """Activations of a buffer's rows; quantises them on first use."""
        key = (buffer, group)
        if key not in self._activations:
            assert self._branch < 0, "branches that share activations need them made before the fork"
            made = self.place_activations(buffer, K, group, rows)
            self.add(quantise(self.memory.address(buffer), made, self.error, self.where(op)))
        return self._activations[key]

    def groups_of(self, buffer: str, K: int) -> set[int]:
        """Groups in which products read a buffer before it is written again (0: as float32)."""
        groups: set[int] = set()
        for op in self.program.ops[self.index + 1 :]:
            if op.kind in PRODUCTS and op.buffers["x"] == buffer:
                if op.consts.get("rows", 1) != 1:
                    return {0}
                groups |= {self.weights.tensors.info(name).format.group for name in self.inputs_of(op)}
            elif buffer in op.buffers.values():
                break
        return groups

    def inputs_of(self, op: Op) -> list[str]:
        """Names of the matrices that multiply the op's x."""
        if op.kind == "linear":
            return [op.buffers[f"w{i}"] for i in range(op.consts["n"])]
        shared = [op.buffers["shared_gate_w"], op.buffers["shared_up_w"]]
        return [*self.weights.expert_names(op.layer)[:2], *shared]

    # ---- neighbours

    def next_op(self) -> Op | None:
        ops = self.program.ops
        return ops[self.index + 1] if self.fuse and self.index + 1 < len(ops) else None

    # ---- results

    def graph_launches(self, host_inbox: int, out_words: tuple[int, int, int]) -> list[Launch]:
        """All launches between the inbox and the outbox, those ahead first. out_words: device address, host address,
        bytes."""
        first = mailbox.inbox(host_inbox, self.memory.address("inbox"), self.memory.inbox_bytes, self.error)
        ahead, others = ([one for one in self.launches if one.ahead is which] for which in (True, False))
        return [*first, *ahead, *others, *mailbox.outbox(*out_words)]

    def launches_of(self, index: int) -> list[Launch]:
        """Launches of op number `index`, for checks."""
        first = bisect.bisect_left(self.op_of_launch, index)
        return self.launches[first : bisect.bisect_right(self.op_of_launch, index)]
