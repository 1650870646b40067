"""Small readers of /proc and /sys. Every one answers None (or an empty value) where the system does not tell."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np

UNLIMITED_BYTES = 1 << 60
"""Larger limits mean no limit (version 1 control groups write a number near 2^63)."""


def read_text(path: Path | str) -> str | None:
    """Stripped text of a small file, or None."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path | str) -> int | None:
    text = read_text(path)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _group_folders(root: Path, proc: Path) -> list[Path]:
    """Memory control-group folders of this process, innermost first (version 2, else version 1)."""
    lines = (read_text(proc / "self/cgroup") or "").splitlines()
    folders: list[Path] = []
    for line in lines:
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        if parts[0] == "0" and not parts[1]:
            base, tail = root, parts[2]
        elif "memory" in parts[1].split(","):
            base, tail = root / "memory", parts[2]
        else:
            continue
        folder = base / tail.lstrip("/")
        while True:
            folders.append(folder)
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent
    return folders


def cgroup_memory(root: Path | str = "/sys/fs/cgroup", proc: Path | str = "/proc") -> tuple[int, int] | None:
    """(limit, available) bytes of the tightest memory control group, or None without a limit.

    Cached file pages of the group count as available: the kernel drops them when asked for memory.
    """
    tightest = None
    for folder in _group_folders(Path(root), Path(proc)):
        limit = read_int(folder / "memory.max")
        used = read_int(folder / "memory.current")
        if limit is None:
            limit, used = read_int(folder / "memory.limit_in_bytes"), read_int(folder / "memory.usage_in_bytes")
        if limit is None or limit >= UNLIMITED_BYTES:
            continue
        cached = 0
        for line in (read_text(folder / "memory.stat") or "").splitlines():
            key, _, value = line.partition(" ")
            if key in ("inactive_file", "active_file") and value.isdigit():
                cached += int(value)
        available = max(0, min(limit, limit - (used or 0) + cached))
        if tightest is None or available < tightest[1]:
            tightest = (limit, available)
    return tightest


def last_level_cache_bytes(sys: Path | str = "/sys") -> int | None:
    """Size of the largest cache that the first CPU sees."""
    sizes = []
    for index in range(8):
        text = read_text(Path(sys) / f"devices/system/cpu/cpu0/cache/index{index}/size")
        if text and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1))
    return max(sizes, default=None)


def block_device(path: Path | str, sys: Path | str = "/sys") -> tuple[str, bool | None] | None:
    """(name, rotational) of the disk under `path`, or None where it cannot be told (network, overlay, no /sys)."""
    try:
        device = os.stat(path).st_dev
    except OSError:
        return None
    link = Path(sys) / f"dev/block/{os.major(device)}:{os.minor(device)}"
    try:
        folder = link.resolve(strict=True)
    except OSError:
        return None
    for candidate in (folder, folder.parent):  # a partition keeps its queue in the disk's folder
        value = read_int(candidate / "queue/rotational")
        if value is not None:
            # Virtual disks say "rotational" without knowing what is below them.
            return candidate.name, None if candidate.name.startswith(("vd", "xvd")) else bool(value)
    return folder.name, None


def is_wsl(proc: Path | str = "/proc") -> bool:
    return "microsoft" in (read_text(Path(proc) / "version") or "").lower()


def cpu_name(proc: Path | str = "/proc") -> str | None:
    for line in (read_text(Path(proc) / "cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return None


def numa_nodes(sys: Path | str = "/sys") -> int:
    try:
        return max(1, sum(1 for p in (Path(sys) / "devices/system/node").iterdir() if p.name[4:].isdigit()))
    except OSError:
        return 1


def huge_pages(sys: Path | str = "/sys") -> str | None:
    """The transparent huge page mode in force: always, madvise or never."""
    text = read_text(Path(sys) / "kernel/mm/transparent_hugepage/enabled")
    if not text or "[" not in text:
        return None
    return text[text.index("[") + 1 : text.index("]")]


def memlock_limit_bytes() -> int | None:
    """Bytes this process may lock, or None for no limit or an unknown one."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    except (ImportError, OSError, ValueError):
        return None
    return None if soft == resource.RLIM_INFINITY or soft >= UNLIMITED_BYTES else soft


def ram_read_gbps(threads: int, n_bytes: int = 96 << 20) -> float:
    """GB/s that `threads` threads read from memory together: each sums its own part of a buffer beyond the caches.

    Takes about 0.1 s. Each thread's rate is taken over its own CPU time, which counts waiting for memory but not the
    turns of other programs; the best of five passes, because those only ever make it slower.
    """
    threads = max(1, threads)
    words = np.ones(n_bytes // 8, np.int64)
    parts = np.array_split(words, threads)
    rates = [0.0] * threads

    def read(i: int) -> None:
        start = time.thread_time()
        np.add.reduce(parts[i])
        rates[i] = parts[i].nbytes / max(time.thread_time() - start, 1e-9) / 1e9

    best = 0.0
    for _ in range(5):
        workers = [threading.Thread(target=read, args=(i,)) for i in range(1, threads)]
        for w in workers:
            w.start()
        read(0)
        for w in workers:
            w.join()
        best = max(best, sum(rates))
    return best


def random_read_us(path: Path | str, reads: int = 64, page: int = 4096, seed: int = 1) -> tuple[float, float] | None:
    """(median, 95th percentile) microseconds of single 4 KiB reads at random places of the file at `path`.

    Reads go around the page cache (O_DIRECT) where the file system allows, else pages are dropped first with
    posix_fadvise. None where the file is too small or cannot be read.
    """
    import mmap

    try:
        size = os.path.getsize(path)
        if size < page * 16:
            return None
        direct = getattr(os, "O_DIRECT", 0)
        try:
            handle = os.open(path, os.O_RDONLY | direct)
        except OSError:
            direct, handle = 0, os.open(path, os.O_RDONLY)
    except OSError:
        return None
    rng = np.random.default_rng(seed)
    places = rng.integers(0, size // page, reads) * page
    times = []
    buffer = mmap.mmap(-1, page)  # page aligned, as O_DIRECT demands
    try:
        if not direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        for place in places:
            start = time.perf_counter()
            os.preadv(handle, [buffer], int(place))
            times.append((time.perf_counter() - start) * 1e6)
    except (OSError, AttributeError):
        return None
    finally:
        os.close(handle)
        buffer.close()
    return float(np.median(times)), float(np.percentile(times, 95))
