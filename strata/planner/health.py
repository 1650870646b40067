"""Doctor: what this machine has, what of it will be slow, why, and what to do. Nothing here may fail on a lean
machine."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import stat
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from strata.base.compiled import VARIABLE as VARIABLE_OF_CACHE
from strata.base.compiled import asked_folders
from strata.base.errors import BadArgument, StrataError
from strata.base.install import INSTALL_CUPY
from strata.base.numbers import shown
from strata.cpu.tiers import VARIABLE
from strata.gpu.compile import cache_folder
from strata.gpu.presence import LEAST_CAPABILITY
from strata.planner import probes
from strata.planner.machine import TIERS, Machine, cpu_tier, kernel_tier

PACKAGES = ("numpy", "numba", "llvmlite", "gguf", "tokenizers", "jinja2", "psutil", "cupy-cuda12x", "cupy-cuda13x")
OPTIONAL = ("cupy-cuda12x", "cupy-cuda13x")
NVRTC_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")

SLOW_READ_US, SLOW_RAM_GBPS, LITTLE_RAM_BYTES = 400.0, 15.0, 12 << 30


@dataclass(frozen=True)
class Advice:
    """One finding: what is slow or missing, why, and what to do."""

    what: str
    why: str
    do: str


@dataclass
class Report:
    """facts: by topic, plain values; advice: worst first; problems: probes that themselves failed."""

    facts: dict[str, object] = field(default_factory=dict)
    advice: list[Advice] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict:
        return {
            "strata_doctor": 1,
            "facts": self.facts,
            "advice": [asdict(a) for a in self.advice],
            "problems": self.problems,
        }

    def text(self) -> str:
        out = []
        for topic, value in self.facts.items():
            if isinstance(value, dict):
                out.append(topic)
                out += [f"  {key:<26}{_shown(v)}" for key, v in value.items()]
            else:
                out.append(f"{topic}: {_shown(value)}")
        out.append("")
        if not self.advice:
            what = "no slow part found" + (" in what could be looked at" if self.problems else "")
            out.append(f"Nothing stands out: {what}.")
        for a in self.advice:
            out.append(f"slow: {a.what}\n  why: {a.why}\n  do:  {a.do}")
        out += [f"probe failed: {p}" for p in self.problems]
        return "\n".join(out)


def _shown(value: object) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, list):
        return ", ".join(str(v) for v in value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def versions() -> dict[str, object]:
    """Versions of Python, strata and what it runs on; None for a package that is not installed."""
    found: dict[str, object] = {"python": platform.python_version(), "system": platform.platform()}
    for name in ("strata", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name not in OPTIONAL:
                found[name] = None
    return found


def nvrtc() -> str | None:
    """Version of the run-time compiler for CUDA, from the library itself, or None."""
    names = list(NVRTC_LIBRARIES)
    for folder in sys.path:
        names += [str(p) for p in Path(folder or ".").glob("nvidia/*/lib/libnvrtc.so.*") if "builtins" not in p.name]
    for name in names:
        try:
            library = ctypes.CDLL(name)
            major, minor = ctypes.c_int(), ctypes.c_int()
            if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0:
                return f"{major.value}.{minor.value}"
        except (OSError, AttributeError):
            continue
    return None


def examine(path: str | Path | None = None) -> Report:
    """Look at this machine and the folder of the model. Takes about a second; never raises for what is missing."""
    report = Report()

    def probe(name: str, read: Callable[[], object]) -> object:
        try:
            return read()
        except StrataError as error:
            report.problems.append(f"{name}: {error}")
        except Exception as error:  # a doctor must not die of the illness it looks for
            report.problems.append(f"{name}: {type(error).__name__}: {error}")
        return None

    place = Path(path) if path is not None else Path.cwd()
    report.facts["versions"] = probe("versions", versions)
    refused = _refused_tier(report)
    machine = probe("machine", lambda: Machine.here(place, measure=True, tier=cpu_tier() if refused else None))
    compiler = probe("NVRTC", nvrtc)
    if isinstance(machine, Machine):
        _machine_facts(report, machine, compiler)
        if refused:
            report.facts["CPU"]["kernel tier"] = f"none, as {VARIABLE} asks"
    probe("kernel caches", lambda: report.advice.extend(_cache_advice()))
    lock = probe("memory lock limit", probes.memlock_limit_bytes)
    pages = probe("huge pages", probes.huge_pages)
    report.facts["memory limits"] = {
        "lockable bytes": "no limit" if lock is None else lock,
        "transparent huge pages": pages,
    }
    times = probe("disk reads", lambda: _read_probe(place))
    report.facts["model disk"] = _disk_facts(machine, times)
    if isinstance(machine, Machine):
        probe(
            "advice",
            lambda: report.advice.extend(advise(machine, compiler, lock, pages, times, report.facts["versions"])),
        )
    return report


def _refused_tier(report: Report) -> bool:
    """Whether STRATA_CPU_TIER asks for a tier that cannot be had, which the report gets advice about."""
    try:
        kernel_tier()
    except BadArgument as error:
        why = f"{error.message}: found {error.found}, needed {error.needed}; no model is planned or loaded"
        report.advice.append(Advice("every load", why, f"unset {VARIABLE}"))
        return True
    return False


def _cache_advice() -> list[Advice]:
    """Folders that compiled kernels shall be kept in and cannot be: those that are named, else a GPU's usual one."""
    asked = [(place, name) for name, place in asked_folders() if place]
    if not os.environ.get(VARIABLE_OF_CACHE):
        asked.append((str(cache_folder()), VARIABLE_OF_CACHE))
    out = []
    for place, name in asked:
        why = _not_writable(Path(place))
        if why is not None:
            out.append(Advice("every start", f"compiled kernels cannot be kept in {shown(place)}: {why}",
                              f"make it writable, or set {name} to a folder that is"))  # fmt: skip
    return out


def _not_writable(folder: Path) -> str | None:
    """Why no file can be made below a folder, which may be still to be made; None if it can. Makes nothing."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return f"{shown(str(folder))} is no folder"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{shown(str(folder))} cannot be written"


def _read_probe(place: Path) -> tuple[str, float, float] | None:
    """(file, median us, 95th percentile us) of 4 KiB random reads in the largest file of the folder or below."""
    folder = place if place.is_dir() else place.parent
    sizes = {}
    for path in [place] if place.is_file() else (*folder.glob("*"), *folder.glob("*/*")):
        with contextlib.suppress(OSError):  # one that may not be looked at is not the one to read
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                sizes[path] = found.st_size
    for file in sorted(sizes, key=lambda path: -sizes[path])[:3]:
        times = probes.random_read_us(file)
        if times is not None:
            return file.name, *times
    return None


def _machine_facts(report: Report, m: Machine, compiler: object) -> None:
    gpus = []
    for g in m.gpus:
        compute = ".".join(map(str, g.capability)) if g.capability else "not known"
        link = f"PCIe {g.link[0]} x{g.link[1]}" if g.link else "link not known"
        mib = f"{g.total_bytes >> 20:,} MiB ({g.free_bytes >> 20:,} free)"
        gpus.append(f"{g.name}, {mib}, compute {compute}, {link}")
    report.facts["GPU"] = {"cards": gpus, "driver": m.driver, "problem": m.gpu_problem or "none", "NVRTC": compiler}
    report.facts["CPU"] = {
        "name": m.cpu_name,
        "kernel tier": m.kernel_tier,
        "tier of the CPU": m.cpu_tier,
        "physical cores": m.physical_cores,
        "logical cores": m.logical_cores,
        "usable cores": m.usable_cores,
        "CPU quota": "none" if m.quota_cores is None else m.quota_cores,
        "NUMA nodes": m.numa_nodes,
        "last-level cache bytes": m.cache_bytes,
    }
    report.facts["RAM"] = {
        "total bytes": m.ram_total_bytes,
        "available bytes": m.ram_available_bytes,
        "container limit": "none" if m.cgroup_limit_bytes is None else m.cgroup_limit_bytes,
        "read rate GB/s": m.ram_gbps,
        "page bytes": m.page_bytes,
        "WSL": m.wsl,
    }


def _disk_facts(machine: object, times: object) -> dict[str, object]:
    disk = machine.disk if isinstance(machine, Machine) else None
    file, median, slow = times if isinstance(times, tuple) else (None, None, None)
    return {
        "folder": disk.path if disk else None,
        "device": disk.device if disk else None,
        "rotational": disk.rotational if disk else None,
        "free bytes": disk.free_bytes if disk else None,
        "probed file": file,
        "4 KiB read, median us": median,
        "4 KiB read, 95 % us": slow,
    }


def advise(m: Machine, compiler: object, lock: object, pages: object, times: object, found: object) -> list[Advice]:
    """Findings from facts, worst first. Pure."""
    out = []
    if m.cpu_tier == "portable":
        out.append(
            Advice(
                "experts on the CPU",
                "the CPU offers no AVX2: the portable kernels run, 5 to 20 times slower",
                "use another machine, or check that the virtual machine passes AVX2 through",
            )
        )
    if TIERS.index(m.kernel_tier) < TIERS.index(m.cpu_tier):
        out.append(
            Advice(
                "everything on the CPU",
                f"{VARIABLE} holds the kernels to {m.kernel_tier}; the CPU runs {m.cpu_tier}",
                f"unset {VARIABLE}",
            )
        )
    if m.gpus and isinstance(found, dict) and not any(found.get(p) for p in OPTIONAL):
        out.append(
            Advice(
                "everything",
                "a GPU is here, but CuPy is not installed: the CPU backend is used",
                INSTALL_CUPY.rstrip("."),
            )
        )
    if m.gpus and compiler is None:
        out.append(
            Advice(
                "GPU start",
                "NVRTC was not found: GPU kernels cannot be compiled",
                f"{INSTALL_CUPY.rstrip('.')} (they bring NVRTC)",
            )
        )
    for g in m.gpus:
        if g.capability is not None and g.capability < LEAST_CAPABILITY:
            out.append(
                Advice(
                    f"GPU {g.name}",
                    f"compute capability {g.capability[0]}.{g.capability[1]} is below 7.5: kernels do not run on it",
                    'use device="cpu" or another card',
                )
            )
        if g.link is not None and g.link[0] * g.link[1] < 32:
            out.append(
                Advice(
                    f"reading prompts on {g.name}",
                    f"the card is linked by PCIe {g.link[0]} x{g.link[1]}, about {g.link_gbps:.0f} GB/s",
                    "move the card to the slot with 16 lanes, if there is one",
                )
            )
        if g.total_bytes - g.free_bytes > g.total_bytes // 4:
            out.append(
                Advice(
                    f"GPU {g.name}",
                    f"{(g.total_bytes - g.free_bytes) >> 20:,} MiB of VRAM are taken by others: fewer experts fit",
                    "close them before loading",
                )
            )
    if not m.gpus and m.driver is None and m.gpu_problem and "no NVIDIA driver" not in m.gpu_problem:
        out.append(Advice("GPU", m.gpu_problem, "repair the driver installation"))
    if m.ram_gbps_measured and m.ram_gbps < SLOW_RAM_GBPS:
        out.append(
            Advice(
                "decoding",
                f"memory is read at {m.ram_gbps:.0f} GB/s: each token reads gigabytes",
                "fill both memory channels; check that other programs do not load memory; give the process more cores",
            )
        )
    if m.ram_available_bytes < LITTLE_RAM_BYTES:
        where = "the container" if m.cgroup_limit_bytes is not None else "RAM"
        out.append(
            Advice(
                "large models",
                f"{m.ram_available_bytes >> 20:,} MiB of {where} are available: experts will be read from disk",
                "run `strata plan FILE` and raise the limit or choose a smaller release",
            )
        )
    if isinstance(lock, int) and m.gpus and lock < 1 << 30:
        out.append(
            Advice(
                "pinned experts",
                f"this process may lock {lock >> 10:,} KiB; some drivers count pinned memory against it",
                "ulimit -l unlimited (or memlock in limits.conf, --ulimit memlock=-1 in a container)",
            )
        )
    if m.wsl:
        out.append(
            Advice(
                "the PCIe share",
                "WSL locks about 1 GiB for a GPU: experts stay file pages",
                "run on Linux itself for full speed",
            )
        )
    if m.quota_cores is not None and m.quota_cores < m.physical_cores:
        out.append(
            Advice(
                "decoding",
                f"the container may use {m.quota_cores:g} of {m.physical_cores} cores",
                "raise the CPU quota",
            )
        )
    if m.numa_nodes > 1:
        out.append(
            Advice(
                "decoding",
                f"{m.numa_nodes} NUMA nodes: half of the reads cross the sockets",
                "numactl --interleave=all, or bind to one node",
            )
        )
    if m.disk is not None and m.disk.rotational:
        out.append(
            Advice(
                "n-gram rows and loading",
                f"{m.disk.device} is a rotating disk: 16 random reads a token take 100 ms and more",
                "move the model to an SSD",
            )
        )
    if isinstance(times, tuple) and times[1] > SLOW_READ_US:
        out.append(
            Advice(
                "n-gram rows",
                f"a random 4 KiB read takes {times[1]:,.0f} us (95 %: {times[2]:,.0f} us) in the model's folder",
                "move the model to a local NVMe disk; network folders and USB disks are slow at this",
            )
        )
    if pages == "never":
        out.append(
            Advice(
                "experts in RAM",
                "transparent huge pages are off: more address translations per expert",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            )
        )
    return out
