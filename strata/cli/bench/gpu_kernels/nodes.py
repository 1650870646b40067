"""strata bench gpu-kernels nodes: what a node of a graph costs, plain and starting early.

Two kernels of its own in a captured chain; with forks one node of eight runs beside the main branch. A chain whose
result depends on its order shows that early starts keep it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from strata.base.errors import StrataError
from strata.cli.bench.gpu_kernels.timer import Timer
from strata.gpu import early_launch
from strata.gpu.device import CupyDevice
from strata.gpu.launch import Launch, Source, i32, launch, pointer

SOURCE = Source("../cli/bench/gpu_kernels/nodes.cu", ("empty_node", "ordered_node"))
BLOCKS = (1, 74, 132, 320, 1072)
NODES, FORK_EVERY, ORDERED_VALUES = 400, 8, 1 << 19


@contextmanager
def starting_early(early: bool) -> Iterator[None]:
    """Graphs made within start their kernels early, in all places or in none; a driver that refuses is an error."""
    before = early_launch.START_EARLY, early_launch.REFUSAL_IS_ERROR
    early_launch.START_EARLY = early_launch.JOINS if early else early_launch.OFF
    early_launch.REFUSAL_IS_ERROR = early
    try:
        yield
    finally:
        early_launch.START_EARLY, early_launch.REFUSAL_IS_ERROR = before


def chain(blocks: int, at: int, nodes: int, fork_every: int = 0) -> list[Launch]:
    """Launches of the empty kernel one behind the other; with fork_every one of so many is two side by side."""
    one, out = launch(SOURCE, "empty_node", blocks, 128, pointer(at)), []
    for i in range(nodes):
        if fork_every and i % fork_every == fork_every - 1:
            out += [_branch(one, i + 1, branch) for branch in (0, 1)]
        else:
            out.append(one)
    return out


def _branch(one: Launch, fork: int, branch: int) -> Launch:
    return Launch(one.source, one.kernel, one.grid, one.block, one.args, fork=fork, branch=branch)


def ordered(at: int, values: int, numbers: Sequence[int]) -> list[Launch]:
    """p[i] = 3 p[values - 1 - i] + number, for every number."""
    return [launch(SOURCE, "ordered_node", -(-values // 512), 256, pointer(at), i32(k), i32(values)) for k in numbers]


def _expected(values: int, numbers: Sequence[int]) -> np.ndarray:
    p = np.arange(values, dtype=np.int32)
    for number in numbers:
        p = (3 * p[::-1] + np.int32(number)).astype(np.int32)
    return p


def refusal(t: Timer) -> str | None:
    """Why this device starts no kernels early, or None."""
    if not isinstance(t.device, CupyDevice):
        return None
    return early_launch.problem(t.device.arch, t.device._runtime.driverGetVersion())


def measure(t: Timer, blocks: Sequence[int] = BLOCKS) -> None:
    """us a node by blocks of its kernel. StrataError if a chain does not keep its order, or the driver refuses."""
    at = t.device.alloc(4 * ORDERED_VALUES)
    forms = {"plain": False} if refusal(t) else {"plain": False, "early": True}
    for fork_every in (0, FORK_EVERY):
        for n in blocks:
            for form, early in forms.items():
                with starting_early(early):
                    launches = chain(n, at, NODES, fork_every)
                    us = t.us(launches) / NODES
                shape = f", a fork every {fork_every}" if fork_every else ""
                t.add(f"{n} blocks{shape}, {form}", us)
    numbers = [7 * i % 1000 for i in range(NODES)]
    for form, early in forms.items():
        t.device.upload(at, np.arange(ORDERED_VALUES, dtype=np.int32))
        with starting_early(early):
            launches = ordered(at, ORDERED_VALUES, numbers)
            t.device.graph(launches)()
        found = np.empty(ORDERED_VALUES, np.int32)
        t.device.download(at, found)
        if not np.array_equal(found, _expected(ORDERED_VALUES, numbers)):
            raise StrataError(f"a chain of kernels that start {form} does not keep its order", found="other values",
                              needed="the values of plain starts", advice="Please report this.")  # fmt: skip
        with starting_early(early):
            t.add(f"a chain that needs its order, {form}", t.us(launches) / NODES)
