"""strata bench load: loads and closes a model again and again: seconds, the first token, and what memory is left."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import psutil
import typer

from strata.cli import flags
from strata.cli.bench.numbers import count
from strata.cli.output import Bar

PROMPT = "def fibonacci(n):"


@dataclass(frozen=True)
class Load:
    """One load: seconds of it, of the first token behind it, and of closing; CPU seconds of all threads of this process
    up to there; MiB of the process while the model was open, and after it was closed; its threads then."""

    load_s: float
    first_token_s: float
    close_s: float
    cpu_s: float
    open_mib: float
    closed_mib: float
    threads: int


@flags.takes(load=flags.LOAD_AND_DRAFT)
def command(
    model: flags.Model = None,
    repeat: Annotated[int, typer.Option("--repeat", "-r", help="Loads.")] = 5,
    collector: Annotated[
        bool, typer.Option("--collector/--no-collector", help="Whether Python's garbage collector runs meanwhile.")
    ] = True,
    *,
    load: flags.Options,
    json_: flags.Json = False,
) -> None:
    """Load a model, make one token, close it, and that again: times, and resident memory of the process.

    The first line of figures has the time from the start of this process to its first token; with STRATA_CACHE set to
    an empty folder that includes compiling all kernels. Memory that stays after closes grows with loads that leave
    something behind; the first few also leave what the process keeps for good.
    """
    count("--repeat", repeat, 1)
    process, loads, started_s = psutil.Process(), [], 0.0
    was_enabled = gc.isenabled()
    if not collector:
        gc.disable()
    try:
        with Bar("loading", "loads") as bar:
            for i in range(repeat):
                bar.update(i, repeat)
                loads.append(_load(model, process, load))
                if not i:
                    opened_s = loads[0].close_s  # the first token was there before it was closed
                    started_s = time.time() - process.create_time() - opened_s
    finally:
        if was_enabled:
            gc.enable()
    report: dict[str, Any] = {
        "command": " ".join(["strata", *sys.argv[1:]]),
        "collector": collector,
        "start_to_first_token_s": round(started_s, 2),
        "loads": [asdict(one) for one in loads],
    }
    typer.echo(json.dumps(report, indent=2) if json_ else "\n".join(_text(report, loads)))


def _load(given: Any, process: psutil.Process, options: flags.Options) -> Load:
    began, spent = time.perf_counter(), process.cpu_times()
    with flags.loaded(given, **options) as loaded:
        ready = time.perf_counter()
        loaded.generate(PROMPT, max_tokens=1, ignore_eos=True)
        answered, now = time.perf_counter(), process.cpu_times()
        open_mib = process.memory_info().rss / (1 << 20)
    closed = time.perf_counter()
    del loaded
    cpu_s = now.user + now.system - spent.user - spent.system
    closed_mib = process.memory_info().rss / (1 << 20)
    return Load(ready - began, answered - ready, closed - answered, cpu_s, open_mib, closed_mib, process.num_threads())


def _text(report: dict[str, Any], loads: list[Load]) -> list[str]:
    lines = [
        f"command    {report['command']}",
        f"process    {report['start_to_first_token_s']:.2f} s from its start to the first token",
        "",
        " load     load s  first token s   close s    CPU s   MiB open   closed  threads",
    ]
    for i, one in enumerate(loads, start=1):
        lines.append(f"{i:>5}{one.load_s:>11.2f}{one.first_token_s:>15.3f}{one.close_s:>10.3f}{one.cpu_s:>9.2f}"
                     f"{one.open_mib:>11.0f}{one.closed_mib:>9.0f}{one.threads:>9}")  # fmt: skip
    if len(loads) > 1:
        more = loads[-1].closed_mib - loads[0].closed_mib
        later = statistics.median(one.load_s for one in loads[1:])
        lines.append(f"after the first: {later:.2f} s a load, {more:+.0f} MiB in all")
    return lines
