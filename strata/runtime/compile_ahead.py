"""Processes that compile what a load needs last, while the load compiles what it needs first.

Numba compiles one function at a time in a process, whatever the number of threads. All find in the disk cache what
others have finished. There is one such process on two cores and up to four on more. Where none can help, the load
compiles everything itself, as it would without them.

    python -m strata.runtime.compile_ahead PART ...      what such a process runs
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from strata.base.compiled import CFunction, is_kept
from strata.cpu.cores import core_facts, usable_cores
from strata.cpu.qsa_attend import qsa_attend
from strata.runtime import chain, sampling

SAMPLING = "sampling"
MODULES = ("gated_delta", "qsa_attend", "qsa_select", "qsa_append", "ngram_mix")
"""Modules of strata.cpu with the ops that come last in a program, last first."""

EXPERTS = ("expert_jobs", "experts")
"""Where several processes help, these too. The load needs them earlier, and they take long."""

MOST_PROCESSES = 4

WAIT_S = 120.0
"""Longest wait for the others once the load has nothing else to compile."""


@contextlib.contextmanager
def second_process(cpu: bool) -> Iterator[Callable[[], None]]:
    """Let other processes compile while the block runs, and end them. cpu: the ops of the CPU too.

    Gives a function that waits until they have finished. None is started where there is one CPU, no interpreter to
    start, no folder to share, or nothing to compile.
    """
    processes = _start(cpu)

    def finish() -> None:
        until = time.monotonic() + WAIT_S
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(until - time.monotonic(), 0.0))

    try:
        yield finish
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def shares(cpu: bool, n: int) -> list[tuple[str, ...]]:
    """Parts for each of up to n processes, those that take longest dealt out first."""
    parts = [SAMPLING]
    if cpu:
        parts += [*MODULES[:2], *(EXPERTS if n > 1 else ()), *MODULES[2:]]
    return [tuple(parts[i::n]) for i in range(min(n, len(parts)))]


def _start(cpu: bool) -> list[subprocess.Popen]:
    known = [chain.draw_row.py_func, *([qsa_attend.py_func] if cpu else [])]
    n = min(usable_cores(core_facts()) - 1, MOST_PROCESSES)
    if all(is_kept(function) is not False for function in known) or n < 1:
        return []
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith("python"):
        return []
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = []
    for parts in shares(cpu, n):
        command = [sys.executable, "-m", __name__, *parts]
        with contextlib.suppress(OSError):  # it only helps
            started.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **quiet))
    return started


def compile_parts(parts: Iterable[str]) -> None:
    """What such a process does."""
    for part in parts:
        if part == SAMPLING:
            sampling.warm_up()
            continue
        module = importlib.import_module(f"strata.cpu.{part}")
        for function in reversed(list(vars(module).values())):
            if isinstance(function, CFunction) and function.__module__ == module.__name__:
                function.address  # noqa: B018  # its first use compiles


if __name__ == "__main__":
    compile_parts(sys.argv[1:])
