"""Machine facts: what a plan may count on, read from this machine or described for one that is not here."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from strata.base.errors import BadArgument, need
from strata.base.numbers import one_of, real_number, shown, truth_value, whole_number
from strata.cpu import tiers
from strata.cpu.cores import MOST_THREADS, core_facts, usable_cores
from strata.planner import probes
from strata.planner.cards import GIB, card_by_name, find_card, link_gbps
from strata.planner.cuda_context import has_context
from strata.planner.nvml import read_gpus

TIERS = ("portable", "avx2", "avx512")
"""CPU kernel tiers, slowest first."""

TIER_NAMES = {0: "portable", 256: "avx2", 512: "avx512"}
"""Names of the tiers in `strata.cpu.tiers`."""

DRIVER_SHARE_BYTES = 256 << 20
"""Of a described card: what driver and firmware keep, so that free is less than total."""

UNKNOWN_CARD_GBPS = 300.0
"""Memory bandwidth assumed for a card that is not in the list."""

DESCRIBED_RAM_GBPS = 50.0
"""Read rate assumed for a described machine: two channels of a desktop."""

DESCRIBED_USED_BYTES = 3 * GIB // 2
"""RAM that is taken to be in use on a described machine; half of it all on one of less than twice as much."""

DESCRIBED_CACHE_BYTES = 16 << 20

DESCRIBED_DISK = (3.0, 400_000.0)
"""GB/s and random reads a second assumed for a described machine: a middling NVMe disk."""


LEAST_REAL, MOST_REAL = 0.001, 1e9
"""Sizes in GiB and rates that describe a machine."""


@dataclass(frozen=True)
class Gpu:
    """One card. link is (PCIe generation, lanes) or None; rates in GB/s.

    multiprocessors  None where nobody tells
    has_context      this process uses it already, so that free_bytes is without the context
    """

    index: int
    name: str
    capability: tuple[int, int] | None
    total_bytes: int
    free_bytes: int
    vram_gbps: float
    link: tuple[int, int] | None
    link_gbps: float
    rates_known: bool = True
    multiprocessors: int | None = None
    has_context: bool = False

    def total_with(self, free_bytes: int) -> int:
        """VRAM in all with which so much would be free: what is in use stays so, on a small described card as well."""
        used = self.total_bytes - self.free_bytes if self.free_bytes else max(self.total_bytes, DRIVER_SHARE_BYTES)
        return max(free_bytes + used, self.total_bytes)


@dataclass(frozen=True)
class Disk:
    """The disk that holds the model. rotational None = cannot be told. Rates None = not measured."""

    path: str
    device: str | None
    rotational: bool | None
    free_bytes: int
    read_gbps: float | None = None
    random_reads_per_s: float | None = None


@dataclass(frozen=True)
class Machine:
    """What a plan is made for.

    ram_available_bytes  free and cheaply freed (page cache); control-group limits are already applied
    usable_cores         physical cores this process may keep busy: affinity and CPU quota applied
    cpu_tier             what the CPU offers; kernel_tier: what the CPU backend's kernels use of it
    ram_gbps             read rate of all usable cores together
    cache_bytes          last-level cache
    """

    name: str
    gpus: tuple[Gpu, ...]
    ram_total_bytes: int
    ram_available_bytes: int
    cgroup_limit_bytes: int | None
    physical_cores: int
    logical_cores: int
    affinity_cores: int
    quota_cores: float | None
    usable_cores: int
    numa_nodes: int
    cpu_name: str
    cpu_tier: str
    kernel_tier: str
    page_bytes: int
    disk: Disk | None
    wsl: bool
    ram_gbps: float
    cache_bytes: int
    ram_gbps_measured: bool = False
    driver: str | None = None
    gpu_problem: str | None = None
    described: bool = False

    @classmethod
    def here(cls, path: str | Path | None = None, *, measure: bool = False, tier: str | None = None) -> Machine:
        """This machine. `path` names the model, so that its disk is looked at; measure=True reads memory for 0.1 s.
        tier: of its kernels; None: as a load takes it, or BadArgument where STRATA_CPU_TIER asks for none of this
        machine's.

        Imports neither CuPy nor CUDA and takes no GPU memory. Never raises for something a machine lacks.
        """
        memory = psutil.virtual_memory()
        total, available, limit = memory.total, memory.available, None
        group = probes.cgroup_memory()
        if group is not None and group[0] < total:
            limit = group[0]
            available = min(available, group[1])
        logical = psutil.cpu_count(logical=True) or 1
        physical = psutil.cpu_count(logical=False) or logical
        cores = core_facts()
        report = read_gpus()
        machine = cls(
            name="this machine",
            gpus=tuple(
                replace(g, has_context=has_context(g.index)) for g in _visible(tuple(map(_gpu_facts, report.gpus)))
            ),
            ram_total_bytes=total,
            ram_available_bytes=available,
            cgroup_limit_bytes=limit,
            physical_cores=physical,
            logical_cores=logical,
            affinity_cores=len(cores.allowed_cpus),
            quota_cores=cores.limit_cpus,
            usable_cores=usable_cores(cores),
            numa_nodes=probes.numa_nodes(),
            cpu_name=probes.cpu_name() or "unknown CPU",
            cpu_tier=cpu_tier(),
            kernel_tier=kernel_tier() if tier is None else tier,
            page_bytes=os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096,
            disk=disk_of(path) if path is not None else None,
            wsl=probes.is_wsl(),
            ram_gbps=DESCRIBED_RAM_GBPS,
            cache_bytes=probes.last_level_cache_bytes() or DESCRIBED_CACHE_BYTES,
            driver=report.driver,
            gpu_problem=report.problem,
        )
        if measure:
            rate = probes.ram_read_gbps(machine.usable_cores)
            machine = replace(machine, ram_gbps=rate, ram_gbps_measured=True)
        return machine

    @classmethod
    def describe(
        cls,
        *,
        gpu: str | None = None,
        vram_gib: float | None = None,
        vram_free_gib: float | None = None,
        vram_gbps: float | None = None,
        link_gbps: float | None = None,
        ram_gib: float = 32.0,
        ram_available_gib: float | None = None,
        ram_gbps: float = DESCRIBED_RAM_GBPS,
        cores: int = 8,
        cpu_tier: str = "avx2",
        disk_gbps: float = DESCRIBED_DISK[0],
        disk_random_reads_per_s: float = DESCRIBED_DISK[1],
        rotational: bool = False,
        wsl: bool = False,
        name: str | None = None,
    ) -> Machine:
        """A machine that is not here. Sizes in GiB, rates in GB/s; without `gpu` and `vram_gib` it has no card.

        `gpu` is a card by name ("RTX 5070"); `vram_gib` alone is a card of middling speed. RAM available is all but
        1.5 GiB, half of less than 3 GiB, unless given. Raises BadArgument for an unknown card or tier and for sizes
        that are not positive.
        """
        vram_gib, vram_free_gib = _real("vram_gib", vram_gib), _real("vram_free_gib", vram_free_gib, zero=True)
        vram_gbps, link_gbps = _real("vram_gbps", vram_gbps), _real("link_gbps", link_gbps)
        ram_gib, ram_available_gib = _real("ram_gib", ram_gib), _real("ram_available_gib", ram_available_gib)
        ram_gbps, disk_gbps = _real("ram_gbps", ram_gbps), _real("disk_gbps", disk_gbps)
        disk_random_reads_per_s = _real("disk_random_reads_per_s", disk_random_reads_per_s)
        whole = whole_number(cores)
        need(whole is not None and 1 <= whole <= MOST_THREADS, "cores is out of range", found=shown(cores),
             needed=f"an integer in 1..{MOST_THREADS:,}")  # fmt: skip
        cores = whole
        for label, value in (("rotational", rotational), ("wsl", wsl)):
            need(truth_value(value) is not None, f"{label} is no truth value", found=shown(value),
                 needed="True or False")  # fmt: skip
        need(name is None or isinstance(name, str), "name is no text", found=shown(name), needed="a text, or None")
        need(one_of(cpu_tier, TIERS), "unknown CPU tier", found=shown(cpu_tier), needed=" or ".join(TIERS))
        gpus: tuple[Gpu, ...] = ()
        if gpu is not None or vram_gib is not None:
            gpus = (_described_gpu(gpu, vram_gib, vram_free_gib, vram_gbps, link_gbps),)
        elif vram_free_gib is not None or vram_gbps is not None or link_gbps is not None:
            raise BadArgument("vram_free_gib, vram_gbps and link_gbps describe a card", found="no card",
                              needed="gpu= or vram_gib=")  # fmt: skip
        total = int(ram_gib * GIB)
        free = int(ram_available_gib * GIB) if ram_available_gib is not None else _described_free_bytes(total)
        need(0 < free <= total, "ram_available_gib is out of range", found=ram_available_gib,
             needed=f"above 0, and at most ram_gib, {ram_gib:g}")  # fmt: skip
        card = f"{gpus[0].name}, {gpus[0].total_bytes / GIB:.4g} GiB" if gpus else "no GPU"
        return cls(
            name=name or f"{card}; {ram_gib:.4g} GiB RAM; {cores} cores",
            gpus=gpus,
            ram_total_bytes=total,
            ram_available_bytes=free,
            cgroup_limit_bytes=None,
            physical_cores=cores,
            logical_cores=2 * cores,
            affinity_cores=2 * cores,
            quota_cores=None,
            usable_cores=cores,
            numa_nodes=1,
            cpu_name="described CPU",
            cpu_tier=cpu_tier,
            kernel_tier=cpu_tier,
            page_bytes=4096,
            disk=Disk(
                "",
                None,
                rotational,
                0,
                0.15 if rotational else disk_gbps,
                120.0 if rotational else disk_random_reads_per_s,
            ),
            wsl=wsl,
            ram_gbps=ram_gbps,
            cache_bytes=DESCRIBED_CACHE_BYTES,
            described=True,
        )

    def ram_total_with(self, free_bytes: int) -> int:
        """RAM in all with which so much would be free: what is in use stays so, and what is taken to be in use on a
        described machine grows with small ones. No less than there is."""
        total, available = self.ram_total_bytes, self.ram_available_bytes
        if free_bytes <= available:
            return total
        if self.described and available == _described_free_bytes(total):
            return min(free_bytes + DESCRIBED_USED_BYTES, 2 * free_bytes)
        return total + free_bytes - available

    def with_free_ram(self, free_bytes: int) -> Machine:
        """The machine with so much free RAM, and no less in all than there is."""
        return replace(self, ram_total_bytes=self.ram_total_with(free_bytes), ram_available_bytes=free_bytes)


def _described_free_bytes(total_bytes: int) -> int:
    return max(total_bytes - DESCRIBED_USED_BYTES, total_bytes // 2)


def _real(label: str, value: object, zero: bool = False) -> float | None:
    """A size or rate that describes a machine, as a float; None for None."""
    number = real_number(value)
    good = number is not None and (LEAST_REAL <= number <= MOST_REAL or (zero and number == 0))
    need(value is None or good, f"{label} is out of range", found=shown(value),
         needed=f"a number in {LEAST_REAL:g}..{MOST_REAL:,.0f}{' or 0' if zero else ''}")  # fmt: skip
    return number


def cpu_tier() -> str:
    """The fastest kernel tier that the CPU features Numba compiles for would run."""
    return TIER_NAMES[max(tiers.available_tiers())]


def kernel_tier() -> str:
    """The tier whose kernels the CPU backend takes here."""
    from strata.cpu.gemv.table import best_tier

    return TIER_NAMES[best_tier()]


def disk_of(path: str | Path) -> Disk | None:
    """The disk under a file or folder, or None where the path does not exist."""
    place = Path(path)
    if not place.exists():
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return None
    device = probes.block_device(place)
    return Disk(str(place), device[0] if device else None, device[1] if device else None, free)


def _gpu_facts(gpu) -> Gpu:
    card = find_card(gpu.name, gpu.total_bytes)
    link = gpu.link or (card.link if card else None)
    return Gpu(
        index=gpu.index,
        name=gpu.name,
        capability=gpu.capability or (card.capability if card else None),
        total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
        vram_gbps=card.bandwidth_gbps if card else UNKNOWN_CARD_GBPS,
        link=link,
        link_gbps=link_gbps(*link) if link else link_gbps(3, 16),
        rates_known=card is not None,
        multiprocessors=gpu.multiprocessors or (card.multiprocessors if card else None),
    )


def _visible(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """Cards that CUDA_VISIBLE_DEVICES lets a program see, in its order (numbers only; names keep all)."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return gpus
    chosen = []
    for word in text.split(","):
        if not re.fullmatch("-?[0-9]+", word.strip()):
            return gpus if text.strip() else ()
        index = int(word)
        if index < 0 or index >= len(gpus):
            break
        chosen.append(replace(gpus[index], index=len(chosen)))
    return tuple(chosen)


def _described_gpu(name, vram_gib, vram_free_gib, vram_gbps, link_rate) -> Gpu:
    need(name is None or isinstance(name, str), "gpu is no card's name", found=shown(name), needed='as "RTX 5070"')
    card = card_by_name(name) if name is not None else None
    total = int(vram_gib * GIB) if vram_gib is not None else card.vram_bytes
    free = int(vram_free_gib * GIB) if vram_free_gib is not None else max(total - DRIVER_SHARE_BYTES, 0)
    need(0 <= free <= total, "vram_free_gib is out of range", found=vram_free_gib,
         needed=f"0 to {total / GIB:g}, the card's memory")  # fmt: skip
    link = card.link if card else (4, 16)
    return Gpu(
        index=0,
        name=card.name if card else "described GPU",
        capability=card.capability if card else None,
        total_bytes=total,
        free_bytes=free,
        vram_gbps=vram_gbps or (card.bandwidth_gbps if card else UNKNOWN_CARD_GBPS),
        link=link,
        link_gbps=link_rate or link_gbps(*link),
        rates_known=card is not None or vram_gbps is not None,
        multiprocessors=card.multiprocessors if card else None,
    )
