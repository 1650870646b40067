"""How many threads the pool should have: facts about cores, affinity and CPU limits, and the pure rule over them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from strata.base.errors import need

MOST_THREADS = 1024
"""Most threads of a pool, the caller included."""


@dataclass(frozen=True)
class CoreFacts:
    """What the operating system says about this process.

    allowed_cpus    logical CPUs of the affinity mask, any numbers
    core_of         logical CPU -> any hashable name of its physical core; empty when the system does not say
    physical_cores  physical cores of the machine, or None when unknown
    limit_cpus      CPUs' worth of time that cgroups allow (may be fractional), or None
    """

    allowed_cpus: tuple[int, ...]
    core_of: dict[int, tuple[int, int]]
    physical_cores: int | None
    limit_cpus: float | None


def usable_cores(facts: CoreFacts) -> int:
    """Physical cores this process may keep busy, at least 1.

    SMT siblings count once: two threads of a dot product on one core share its ports and gain nothing. Where the system
    does not say which CPUs are siblings, the machine's count of physical cores bounds the answer, and where that is
    unknown too (some virtual machines), every logical CPU counts as a core. A fractional CPU limit is rounded down,
    since a spinning thread above the limit gets all of them throttled.
    """
    allowed = len(facts.allowed_cpus)
    if facts.core_of and all(cpu in facts.core_of for cpu in facts.allowed_cpus):
        cores = len({facts.core_of[cpu] for cpu in facts.allowed_cpus})
    else:
        cores = min(allowed, facts.physical_cores or allowed)
    if facts.limit_cpus is not None:
        cores = min(cores, int(facts.limit_cpus))
    return max(cores, 1)


def default_threads(facts: CoreFacts, reserve_cores: int = 1) -> int:
    """Threads of the pool, the caller included: usable cores minus the reserve, at least 1.

    reserve_cores  1 beside a GPU (its service thread spins while a window is in flight), 0 for the CPU backend alone
    """
    need(reserve_cores in (0, 1), "reserve_cores is out of range", found=reserve_cores, needed="0 or 1")
    return max(usable_cores(facts) - reserve_cores, 1)


def core_facts() -> CoreFacts:
    """The facts of this process, now."""
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    membership = _text(Path("/proc/self/cgroup")) or ""
    return CoreFacts(
        allowed, _topology(allowed), psutil.cpu_count(logical=False), cgroup_limit(Path("/sys/fs/cgroup"), membership)
    )


def one_cpu_per_core(facts: CoreFacts) -> list[int]:
    """Logical CPUs to pin to: the first allowed one of every physical core, ascending."""
    first: dict[object, int] = {}
    for cpu in sorted(facts.allowed_cpus):
        first.setdefault(facts.core_of.get(cpu, cpu), cpu)
    return sorted(first.values())


def cgroup_limit(mount: Path, membership: str) -> float | None:
    """CPUs' worth of time allowed by cgroup v2 (`cpu.max`) or v1 (`cpu.cfs_quota_us`), or None.

    mount       folder of the cgroup file system
    membership  text of /proc/self/cgroup
    The tightest limit on the way up to the root holds. Inside a container the path may lie above what is mounted; then
    the mount itself is the container's group.
    """
    limits = []
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for folder in _upwards(mount, path):
                quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")
                limits.append(_ratio(quota, period))
        elif "cpu" in controllers.split(","):
            for name in dict.fromkeys(("cpu", controllers, "cpu,cpuacct", "cpuacct,cpu")):
                for folder in _upwards(mount / name, path):
                    quota, period = (_text(folder / f"cpu.cfs_{kind}_us") or "" for kind in ("quota", "period"))
                    limits.append(_ratio(quota, period))
    return min((limit for limit in limits if limit is not None), default=None)


def _upwards(mount: Path, path: str) -> list[Path]:
    """Folders of a group and all its parents down to the mount itself."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _ratio(quota: str, period: str) -> float | None:
    try:
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except ValueError:  # "max", or no such file
        return None


def _topology(cpus: tuple[int, ...]) -> dict[int, tuple[int, int]]:
    """CPU -> (package, core); empty when the system does not say for every one."""
    cores = {}
    for cpu in cpus:
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        package, core = _text(folder / "physical_package_id"), _text(folder / "core_id")
        if package is None or core is None:
            return {}
        cores[cpu] = (int(package), int(core))
    return cores


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
