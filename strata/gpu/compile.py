"""From .cu to cubin with NVRTC, for any architecture and without a GPU; run time and CI use the same function.

    python -m strata.gpu.compile --all          every kernel for every architecture; fails on spills
    python -m strata.gpu.compile --arch 90      the same for one architecture

A cubin is kept on disk under a hash of everything it depends on: the text with all its includes, kernels, architecture,
options and the version of NVRTC. CuPy's own compiler asks for a device; its low-level binding, used here, does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path

from strata.base.errors import StrataError
from strata.base.install import INSTALL_CUPY
from strata.gpu.launch import FOLDER, Source, all_sources

ARCHS = (75, 80, 86, 89, 90, 120)
"""Architectures that CI compiles for: Turing, Ampere (two), Ada, Hopper, Blackwell."""

OPTIONS = ("-std=c++17", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true", "--ptxas-options=-v")
"""No contraction, no flush to zero. Operations whose rounding matters are explicit PTX besides (exact.cuh)."""

CPU_LIMIT_S = 360
"""Most CPU seconds that compiling everything may take: 3 minutes on two idle cores. Counted so that other load on the
machine does not decide."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """What ptxas reports for one kernel, by lowered name."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Binary:
    """One compiled source: cubin bytes, name expression -> symbol in it, ptxas log."""

    cubin: bytes
    lowered: dict[str, str]
    log: str

    @property
    def usage(self) -> dict[str, Usage]:
        """Name expression -> Usage."""
        by_symbol = _read_log(self.log)
        return {name: by_symbol[symbol] for name, symbol in self.lowered.items()}


def headers_of(path: Path) -> dict[str, str]:
    """Name as included -> text of every header below strata/gpu that a file includes, directly or not.

    Names in quotes are paths from strata/gpu, whoever includes them.
    """
    found: dict[str, str] = {}
    waiting = _INCLUDE.findall(path.read_text(encoding="utf-8"))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = (FOLDER / name).read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


def cache_folder() -> Path:
    """Where cubins are kept: STRATA_CACHE/cubin, else ~/.cache/strata/cubin."""
    base = os.environ.get("STRATA_CACHE")
    return (Path(base) if base else Path.home() / ".cache" / "strata") / "cubin"


@cache
def _nvrtc():
    """CuPy's binding of NVRTC; StrataError with the packages to install where it is missing."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise StrataError(
            "CUDA kernels cannot be compiled here",
            found=f"{type(error).__name__}: {error}",
            needed="CuPy and NVRTC",
            advice=INSTALL_CUPY,
        ) from error
    return nvrtc


@cache
def nvrtc_version() -> tuple[int, int]:
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def _key(text: str, headers: dict[str, str], source: Source, arch: int, options: tuple[str, ...]) -> str:
    parts = [text, headers, source.instances, arch, options, nvrtc_version()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def compile_source(source: Source, arch: int, *, use_cache: bool = True, options: tuple[str, ...] = OPTIONS) -> Binary:
    """Compile all instances of a source for sm_`arch`, or take them from the disk cache.

    StrataError with the compiler's log if it does not compile. Needs NVRTC (through CuPy), no GPU.
    """
    text, headers = source.path.read_text(encoding="utf-8"), headers_of(source.path)
    place = cache_folder() / _key(text, headers, source, arch, options)
    if use_cache:
        kept = _read(place)
        if kept is not None:
            return kept
    binary = _compile(source, text, headers, arch, options)
    if use_cache:
        _write(place, binary)
    return binary


def _compile(source: Source, text: str, headers: dict[str, str], arch: int, options: tuple[str, ...]) -> Binary:
    nvrtc = _nvrtc()
    texts, names = (tuple(s.encode() for s in side) for side in (headers.values(), headers))
    program = nvrtc.createProgram(text, source.file, texts, names)
    try:
        for name in source.instances:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, (f"-arch=sm_{arch}", *options))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise StrataError(f"{source.file} does not compile for sm_{arch}", found=log or str(error),
                              needed=f"an NVRTC that compiles for sm_{arch}",
                              advice="Install CuPy for the driver's CUDA version, or report this.") from error
        lowered = {name: _text(nvrtc.getLoweredName(program, name)) for name in source.instances}
        return Binary(nvrtc.getCUBIN(program), lowered, nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _read(place: Path) -> Binary | None:
    """A kept binary. Its description is written last, so a cubin without one does not count."""
    try:
        note = json.loads(place.with_suffix(".json").read_text(encoding="utf-8"))
        cubin = place.with_suffix(".cubin").read_bytes()
    except (OSError, ValueError):
        return None
    if hashlib.sha256(cubin).hexdigest() != note["sha256"]:
        return None
    return Binary(cubin, note["lowered"], note["log"])


def _write(place: Path, binary: Binary) -> None:
    """Keep a binary; a folder that cannot be written only costs the next start its time."""
    note = {"sha256": hashlib.sha256(binary.cubin).hexdigest(), "lowered": binary.lowered, "log": binary.log}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for suffix, data in ((".cubin", binary.cubin), (".json", json.dumps(note).encode())):
            part = place.with_suffix(f"{suffix}.{os.getpid()}")
            part.write_bytes(data)
            os.replace(part, place.with_suffix(suffix))
    except OSError as error:
        _say_not_kept(str(place.parent), error.strerror or str(error))


@cache
def _say_not_kept(folder: str, why: str) -> None:
    """Once a process, however many sources there are."""
    advice = "set STRATA_CACHE to a folder with room"
    print(f"strata: kernels are not kept on disk in {folder}: {why}; {advice}", file=sys.stderr)


_ENTRY = re.compile(r"Compiling entry function '([^']+)'(.*?)(?=Compiling entry function|\Z)", re.DOTALL)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _read_log(log: str) -> dict[str, Usage]:
    return {
        symbol: Usage(
            registers=_number(r"Used (\d+) registers", text),
            spill_bytes=_number(r"(\d+) bytes spill stores", text) + _number(r"(\d+) bytes spill loads", text),
            stack_bytes=_number(r"(\d+) bytes stack frame", text),
            shared_bytes=_number(r"(\d+) bytes smem", text),
        )
        for symbol, text in _ENTRY.findall(log)
    }


# ---- the check that CI runs


Job = tuple[Source, int, bool]
"""A source, the architecture, and whether the disk cache is used."""

Checked = tuple[str, int, float, dict[str, Usage]]
"""File, architecture, seconds, and what its kernels use."""


def _check(job: Job) -> Checked:
    source, arch, use_cache = job
    start = time.monotonic()
    binary = compile_source(source, arch, use_cache=use_cache)
    return source.file, arch, time.monotonic() - start, binary.usage


def _check_alone(job: Job) -> Checked:
    """A job in a process of its own; StrataError naming it if the process dies."""
    source, arch, _ = job
    try:
        with ProcessPoolExecutor(1) as pool:
            return pool.submit(_check, job).result()
    except BrokenProcessPool as error:
        raise StrataError(
            f"the compiler died on {source.file} for sm_{arch}",
            found="a process that ended without a result",
            needed="a cubin, or the compiler's complaint",
            advice="A crash of NVRTC, or too little memory (then the system's log says so): change the source until it "
            "compiles, or run with fewer --processes.",
        ) from error


def _check_jobs(jobs: Sequence[Job], processes: int) -> Iterator[Checked]:
    """Results in the order of the jobs, which run in parallel. When a process dies, the pool does not say on what: jobs
    that have no result by then run again, each alone, and one that dies there too is named by a StrataError."""
    futures: list[Future[Checked]] = []
    broken = False
    with ProcessPoolExecutor(processes) as pool:
        try:
            with suppress(BrokenProcessPool):  # while jobs are still handed over
                for job in jobs:
                    futures.append(pool.submit(_check, job))
            for job, future in zip_longest(jobs, futures):
                found = None
                with suppress(BrokenProcessPool):
                    found = future.result() if future is not None else None
                if found is None:
                    if not broken:
                        print("a process died: what has no result yet is compiled again, one at a time", flush=True)
                    broken, found = True, _check_alone(job)
                yield found
        finally:
            for future in futures:
                future.cancel()


def _work(source: Source) -> int:
    """What compiling a source costs, for ordering alone: its text once an instance."""
    texts = [source.path.read_text(encoding="utf-8"), *headers_of(source.path).values()]
    return len(source.instances) * sum(map(len, texts))


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def check_all(archs: tuple[int, ...], processes: int, verbose: bool, use_cache: bool = False) -> int:
    """Compile every source for every architecture in parallel, the longest first; prints a line each, and where more
    than CPU_LIMIT_S were used, that. Returns the number of such complaints: kernels that spill, and the time.
    StrataError for a source that does not compile, or on which the compiler dies."""
    sources = sorted(all_sources(), key=_work, reverse=True)
    jobs = [(source, arch, use_cache) for source in sources for arch in archs]
    spilling, kernels, start, used_s = 0, 0, time.monotonic(), _children_cpu_s()
    for file, arch, seconds, usage in _check_jobs(jobs, processes):
        most = max(u.registers for u in usage.values())
        print(f"sm_{arch:<4} {file:<28} {len(usage):>4} kernels, at most {most:>3} registers, {seconds:.1f} s")
        kernels += len(usage)
        for name, u in usage.items():
            # A stack frame without spills is an array indexed at run time: as slow, and as avoidable.
            bad = u.spill_bytes > 0 or u.stack_bytes > 0
            spilling += bad
            if bad or verbose:
                note = f"{u.spill_bytes} bytes spilled, {u.stack_bytes} bytes of stack" if bad else "no spills"
                print(f"    {name:<40} {u.registers:>3} registers, {u.shared_bytes} bytes shared, {note}")
    used_s, wall_s = _children_cpu_s() - used_s, time.monotonic() - start
    print(f"{kernels} kernels of {len(jobs)} cubins in {wall_s:.1f} s, {used_s:.0f} s of CPU time, {spilling} spill")
    slow = used_s > CPU_LIMIT_S
    if slow:
        print(f"that is more than {CPU_LIMIT_S} s of CPU time: drop instances, or share what sources have in common")
    return spilling + slow


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m strata.gpu.compile", description="Compile every CUDA kernel.")
    parser.add_argument("--all", action="store_true", help="for " + ", ".join(f"sm_{a}" for a in ARCHS))
    parser.add_argument("--arch", type=int, action="append", default=[], help="for sm_ARCH; may be repeated")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true", help="registers of every kernel")
    parser.add_argument("--cache", action="store_true", help="take from and fill the disk cache")
    options = parser.parse_args(arguments)
    archs = ARCHS if options.all else tuple(options.arch)
    if not archs:
        parser.error("--all or --arch")
    try:
        return 1 if check_all(archs, options.processes, options.verbose, options.cache) else 0
    except StrataError as error:
        print(f"strata.gpu.compile: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
