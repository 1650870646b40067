"""A second process that compiles what a load needs last, while the load compiles what it needs first.

Numba compiles one function at a time in a process, whatever the number of threads. Both find in the disk cache what the
other has finished. Where no second process can help, the load compiles everything itself, as it would without one.

    python -m strata.runtime.compile_ahead [cpu]      what the second process runs
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from strata.base.compiled import CFunction, is_kept
from strata.cpu.cores import core_facts, usable_cores
from strata.cpu.qsa_attend import qsa_attend
from strata.runtime import chain, sampling

MODULES = ("gated_delta", "qsa_attend", "qsa_select", "qsa_append", "ngram_mix")
"""Modules of strata.cpu with the ops that come last in a program, last first."""

WAIT_S = 120.0
"""Longest wait for the second process once the load has nothing else to compile."""


@contextlib.contextmanager
def second_process(cpu: bool) -> Iterator[Callable[[], None]]:
    """Let a second process compile while the block runs, and end it. cpu: the ops of the CPU too.

    Gives a function that waits until the process has finished. None is started where there is one CPU, no interpreter
    to start, no folder to share, or nothing to compile.
    """
    process = _start(cpu)

    def finish() -> None:
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_S)

    try:
        yield finish
    finally:
        if process is not None:
            process.kill()
            process.wait()


def _start(cpu: bool) -> subprocess.Popen | None:
    known = [chain.draw_row.py_func, *([qsa_attend.py_func] if cpu else [])]
    if all(is_kept(function) is not False for function in known) or usable_cores(core_facts()) < 2:
        return None
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").name.startswith("python"):
        return None
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", __name__, *(["cpu"] if cpu else [])]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, **quiet)
    except OSError:
        return None


def compile_all(cpu: bool) -> None:
    """What the second process does."""
    sampling.warm_up()
    for name in MODULES if cpu else ():
        module = importlib.import_module(f"strata.cpu.{name}")
        for function in reversed(list(vars(module).values())):
            if isinstance(function, CFunction) and function.__module__ == module.__name__:
                function.address  # noqa: B018  # its first use compiles


if __name__ == "__main__":
    compile_all("cpu" in sys.argv[1:])
