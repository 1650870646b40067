"""strata bench float-ops: the float ops of a window on one core, against what memory and arithmetic allow."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from strata.base.compiled import CFunction
from strata.base.errors import need
from strata.cli import flags
from strata.cli.bench.float_cases import Builder, Case, cases
from strata.cli.bench.numbers import count
from strata.cpu.cores import MOST_THREADS
from strata.cpu.float_bits import HAS_FMA
from strata.cpu.machine_code import i64_view
from strata.cpu.pool import Pool
from strata.cpu.simd import Simd, f32, kernel_intrinsic, vector
from strata.planner.probes import ram_read_gbps

CACHED_FLOATS = 40960
"""Values of each of three arrays: 160 KB, as much as four rows of residual streams."""

MOST_REPEATS = 400


def command(
    rows: Annotated[list[int] | None, typer.Option("--rows", help="Rows of the window; default: 1, 4 and 8.")] = None,
    only: Annotated[str, typer.Option(help="Only ops whose name holds this.")] = "",
    seconds: Annotated[float, typer.Option(help="Time for each op.")] = 0.4,
    threads: Annotated[int, typer.Option(help="Above 1: wall time, the chunks shared.")] = 1,
    json_: flags.Json = False,
) -> None:
    """Time every float op at the geometry of the released model with random data.

    floor: the longest of the bytes from memory at the streaming rate, the bytes from the cache at its rate, and the
    multiply-adds (or instructions like them) at their rate; the rates are measured in the same run, on one core.
    """
    count("--threads", threads, 1, MOST_THREADS)
    need(0 < seconds <= 600, "--seconds is out of range", found=seconds, needed="above 0, at most 600")
    need(all(1 <= T <= 8 for T in rows or ()), "--rows is out of range", found=rows, needed="1 to 8")
    rates = Rates.here()
    measured = []
    with Pool(threads) as pool:
        for T in rows or (1, 4, 8):
            for case in cases(Builder(pool.address, threads), T, only):
                us = _median_us(case, seconds, time.thread_time if threads == 1 else time.perf_counter)
                floor = rates.floor_us(case)
                measured.append({"op": case.name, "T": T, "us": round(us, 3), "floor_us": round(floor, 3),
                                 "of_floor": round(floor / us, 3)})  # fmt: skip
    need(bool(measured), "--only names no op", found=repr(only), needed="a part of an op's name")
    report = {"threads": threads, "load_average": round(os.getloadavg()[0], 2), **rates.record(), "ops": measured}
    typer.echo(json.dumps(report, indent=2) if json_ else "\n".join(_text(report)))


def _median_us(case: Case, seconds: float, clock: Callable[[], float]) -> float:
    case.walk.run()
    times: list[float] = []
    ends = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < ends and len(times) < MOST_REPEATS):
        began = clock()
        need(case.walk.run() < 0, f"{case.name} reported an error on plain data", found=case.walk.error,
             needed="no error", advice="Please report this.")  # fmt: skip
        times.append(clock() - began)
    return statistics.median(times) / case.places * 1e6


def _text(report: dict[str, Any]) -> list[str]:
    lines = [
        f"one core   {report['stream_gbps']:.1f} GB/s from memory, {report['cache_gbps']:.1f} GB/s in the cache, "
        f"{report['gsteps']:.1f} G multiply-adds/s",
        f"threads    {report['threads']}, load average {report['load_average']}",
        "",
        f"{'op':<18}{'T':>3}{'us':>11}{'floor us':>11}{'of floor':>10}",
    ]
    return lines + [f"{r['op']:<18}{r['T']:>3}{r['us']:>11.2f}{r['floor_us']:>11.2f}{r['of_floor']:>10.2f}"
                    for r in report["ops"]]  # fmt: skip


# ---- rates of this core


def _emit_steps(s: Simd) -> None:
    """(turns, out): chains of multiply-adds, enough of them to hide each other's latency."""
    places = [s.variable(vector(f32, 16)) for _ in range(12)]
    half = s.splat(f32, 16, 0.5)
    for place in places:
        s.set(place, half)
    with s.loop(s.args[0]):
        for place in places:
            x = s.get(place)
            s.set(place, s.fma(x, half, half) if HAS_FMA else s.b.fadd(s.b.fmul(x, half), half))
    out = s.pointer(s.args[1])
    for k, place in enumerate(places):
        s.store(s.get(place), out, 64 * k)


_steps = kernel_intrinsic("bench_steps", _emit_steps, 2)


def _turn(desc):
    p = i64_view(desc, 2)
    _steps(p[0], p[1])


@dataclass(frozen=True)
class Rates:
    """Rates of one core: GB/s from memory, GB/s read and written in the cache, 10^9 multiply-adds a second."""

    stream_gbps: float
    cache_gbps: float
    gsteps: float

    @staticmethod
    def here() -> Rates:
        x, w, y = (np.ones(CACHED_FLOATS, np.float32) for _ in range(3))
        turns, out = 20_000, np.zeros(192, np.float32)
        record, steps = np.array([turns, out.ctypes.data], np.int64), CFunction(_turn, 1)
        steps(record.ctypes.data)
        cache_s = _best(lambda: np.multiply(x, w, out=y))
        return Rates(ram_read_gbps(1), 3 * x.nbytes / cache_s / 1e9,
                     turns * 192 / _best(lambda: steps(record.ctypes.data)) / 1e9)  # fmt: skip

    def floor_us(self, case: Case) -> float:
        parts = ((case.stream_bytes, self.stream_gbps), (case.cache_bytes, self.cache_gbps), (case.steps, self.gsteps))
        return max(amount / rate for amount, rate in parts) / 1e3

    def record(self) -> dict[str, float]:
        return {name: round(value, 1) for name, value in vars(self).items()}


def _best(function: Callable[[], Any], turns: int = 200) -> float:
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)
