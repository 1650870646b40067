"""The records between launchers and whoever runs them: a graph on the device, or g++ code on the CPU in tests.

A launcher checks shapes and returns `Launch` records; it touches no device. Arguments are numpy scalars, so their sizes
are known: addresses np.uint64, counts np.int32 or np.int64, numbers np.float32.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np

from strata.base.errors import BadArgument, need

FOLDER = Path(__file__).resolve().parent

RINGS_FROM = 80
"""First architecture whose kernels have the rings of `Launch.ring_bytes`."""

OWN_SHARED_BYTES = 1024
"""Shared memory that the driver takes for each block."""

CLUSTERS_FROM = 90
"""First architecture whose blocks form clusters."""


@dataclass(frozen=True)
class Source:
    """A .cu file and the kernels it is compiled for.

    file       path below strata/gpu
    instances  name expressions as the compiler takes them: "router", "gemv<4, 1>"
    """

    file: str
    instances: tuple[str, ...]

    @property
    def path(self) -> Path:
        return FOLDER / self.file


@dataclass(frozen=True)
class Launch:
    """One kernel launch. grid and block count blocks and threads; shared_bytes is dynamic shared memory.

    ring_bytes    bytes at the end of it that only code for sm_80 and later uses; Turing has no room for them
    fork, branch  launches side by side in a list with the same fork (not 0) may run at the same time if their branches
                  differ; those of one branch keep their order, and what follows the fork waits for all of them
    aside         runs when what is in front of it in its branch has ended; nothing waits for it
    gathers       but this: a launch outside of forks that waits for all launches aside
    ahead         such launches run one behind the other, beside all others, from where the first of them stands
    meets         a launch outside of forks that waits for all launches ahead
    cluster       blocks of a cluster, as the kernel has it (cluster.cuh), or 1; from sm_90 on (CLUSTERS_FROM)
    staying       unless 0: at most so many blocks for each processor are made, and no more than its shared memory has
                  room for, by a shorter y axis of the grid; they share out what the whole grid would do
    """

    source: Source
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[np.generic, ...]
    shared_bytes: int = 0
    fork: int = 0
    branch: int = 0
    aside: bool = False
    gathers: bool = False
    ahead: bool = False
    meets: bool = False
    ring_bytes: int = 0
    cluster: int = 1
    staying: int = 0

    def __post_init__(self) -> None:
        need(self.kernel in self.source.instances, f"{self.source.file} has no instance {self.kernel}",
             needed="one of " + ", ".join(self.source.instances))  # fmt: skip
        need(len(self.grid) == 3 and min(self.grid) > 0, f"grid of {self.kernel}", found=self.grid, needed="3 x >= 1")
        threads = prod(self.block)
        need(0 < threads <= 1024, f"threads of a block of {self.kernel}", found=threads, needed="1..1024")
        for i, a in enumerate(self.args):
            if type(a) not in (np.uint64, np.int32, np.int64, np.float32, np.float64):
                raise BadArgument(f"argument {i} of {self.kernel}", found=type(a).__name__, needed="a numpy scalar")


def made_for(one: Launch, arch: int, processors: int, shared_bytes: int) -> Launch:
    """The launch as a device of architecture sm_`arch` makes it; shared_bytes: shared memory of each processor."""
    if one.ring_bytes and arch < RINGS_FROM:
        one = replace(one, shared_bytes=one.shared_bytes - one.ring_bytes, ring_bytes=0)
    if one.staying:
        x, y, z = one.grid
        room = max(min(one.staying, shared_bytes // (one.shared_bytes + OWN_SHARED_BYTES)), 1)
        one = replace(one, grid=(x, min(y, max(room * processors // (x * z), 1)), z))
    return one


def launch(
    source: Source,
    kernel: str,
    grid: int | tuple[int, ...],
    threads: int,
    *args: np.generic,
    shared_bytes: int = 0,
) -> Launch:
    """A Launch with one-dimensional blocks; missing grid axes are 1."""
    g = (grid,) if isinstance(grid, int) else tuple(grid)
    return Launch(source, kernel, (*g, *(1,) * (3 - len(g))), (threads, 1, 1), args, shared_bytes)


def pointer(address: int) -> np.uint64:
    """An address as a kernel argument; 0 is the null pointer."""
    return np.uint64(address)


i32, i64, f32 = np.int32, np.int64, np.float32


def all_sources() -> tuple[Source, ...]:
    """Every `Source` that a module of this package defines, by file."""
    found: dict[str, Source] = {}
    package = __name__.rpartition(".")[0]
    for info in pkgutil.walk_packages([str(FOLDER)], package + "."):
        spec = info.module_finder.find_spec(info.name)
        if "Source(" not in Path(spec.origin).read_text(encoding="utf-8"):
            continue  # the backend itself: importing it would cost time and defines none
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, Source):
                need(found.setdefault(value.file, value) == value, f"two lists of instances for {value.file}")
    return tuple(found[name] for name in sorted(found))
