"""strata bench cpu-kernels: GB/s of every product kernel and of whole layers of experts, beside reading memory."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version as version_of
from typing import Annotated, Any

import typer

import strata
from strata.base.errors import need
from strata.cli import flags
from strata.cli.output import Bar
from strata.cpu.cores import core_facts, usable_cores
from strata.cpu.pool import Pool
from strata.cpu.tiers import available_tiers, best_tier
from strata.kernel_speed import COLUMNS, KernelBench, Rates, cold_bytes, reading, wall_seconds
from strata.layer_speed import LayerBench
from strata.pack.formats import FORMATS, by_name
from strata.planner.machine import Machine

ALL_TYPES = tuple(f.name for f in FORMATS.values() if f.activation != "none")
MOST_ROWS = 8
PASSES = 4
"""Passes over all sets in one timing of several threads: tens of milliseconds."""

SPIN_US, PAUSE_S = 200.0, 0.001
"""Two pools take turns: the workers of the one sleep before the other is timed."""


def command(
    ctx: typer.Context,
    types: Annotated[str, typer.Option(help="Formats, comma-separated; default: all.")] = "",
    rows: Annotated[str, typer.Option(help="Activation rows, 1 to 8, comma-separated; 5 to 8 run as 4 and the rest.")]
    = "1,2,3,4,8",
    threads: Annotated[str, typer.Option(help="Threads; with --layer several, comma-separated; default: all cores.")]
    = "",
    tier: Annotated[int | None, typer.Option(help="512, 256 or 0; default: the fastest.")] = None,
    mb: Annotated[int | None, typer.Option(help="MB of weights; default: 4 x the last cache, at least 160.")] = None,
    columns: Annotated[int, typer.Option(help="Values of a matrix row.")] = COLUMNS,
    repeat: Annotated[int, typer.Option("--repeat", "-r", help="Repeats; medians are reported.")] = 5,
    layer: Annotated[bool, typer.Option("--layer", help="Whole layers of ten experts instead of kernels.")] = False,
    experts: Annotated[str, typer.Option(help="With --layer: GATE_UP/DOWN types, comma-separated.")] = "Q4_K/IQ4_NL",
    json_: flags.Json = False,
) -> None:
    """Check each kernel against the arithmetic, then time it: weights from memory (cold) and from cache (hot).

    One core is timed by its CPU time, several by the wall clock, so other programs' work does not count for one core
    but does for several. The share is that of the rate at which the same cores read memory in the same seconds.
    """
    flags.refuse_idle(ctx, *((("types", "columns"), "with --layer") if layer else (("experts",), "without --layer")))
    tier = best_tier() if tier is None else tier
    need(tier in available_tiers(), "this machine does not run the tier", found=tier, needed=f"{available_tiers()}")
    need(32 <= columns <= 1 << 16, "--columns is out of range", found=columns, needed="32 to 65536")
    need(repeat >= 1, "--repeat is too small", found=repeat, needed=">= 1")
    need(mb is None or 8 <= mb <= 1 << 16, "--mb is out of range", found=mb, needed="8 to 65536")
    n_bytes = cold_bytes() if mb is None else mb << 20
    counts = _numbers("--threads", threads, 1024) or [usable_cores(core_facts())]
    report: dict[str, Any] = {
        "command": " ".join(["strata", *sys.argv[1:]]),
        "machine": _machine(),
        "versions": _versions(),
        "tier": tier,
        "cold_mb": n_bytes >> 20,
        "repeats": repeat,
    }
    if layer:
        report["layers"] = [_layer(t, _rows(rows), counts, tier, n_bytes, repeat) for t in experts.split(",")]
    else:
        need(len(counts) == 1, "--threads takes one number without --layer", found=threads, needed="one number")
        report["threads"] = counts[0]
        names = [t.strip() for t in types.split(",") if t.strip()] or list(ALL_TYPES)
        for name in names:
            block = by_name(name).block_values
            need(by_name(name).activation != "none", f"{name} matrices have no products")
            need(columns % block == 0, f"--columns does not fit {name}", found=columns, needed=f"a multiple of {block}")
        report["columns"] = columns
        report["kernels"] = _kernels(names, _rows(rows), counts[0], tier, n_bytes, repeat, columns)
    typer.echo(json.dumps(report, indent=2) if json_ else "\n".join(_text(report)))


def _numbers(what: str, text: str, most: int) -> list[int]:
    """Ascending numbers from 1 to `most`."""
    words = [w.strip() for w in text.split(",") if w.strip()]
    good = all(w.isdecimal() and 1 <= int(w) <= most for w in words)
    need(good, f"{what} cannot be read", found=repr(text), needed=f"numbers from 1 to {most}, as 1,4")
    return sorted({int(w) for w in words})


def _rows(text: str) -> list[int]:
    return _numbers("--rows", text, MOST_ROWS) or [1]


# ---- measuring


def _kernels(names: list[str], rows: list[int], threads: int, tier: int, n_bytes: int, repeat: int,
             columns: int) -> list[dict]:  # fmt: skip
    found: list[dict] = []
    with KernelBench(tier, threads, n_bytes, columns) as bench, Bar("measuring", "formats") as bar:
        for i, name in enumerate(names):
            bar.update(i, len(names))
            found += [_figures(r) for r in bench.measure(by_name(name), rows, repeat)]
    return found


def _figures(r: Rates) -> dict[str, Any]:
    """Medians and spread in GB/s; shares are medians of each repeat's own."""
    shares = [cold / stream for cold, stream in zip(r.cold, r.stream, strict=True)]
    shares_all = [rate / stream for rate, stream in zip(r.all_threads, r.stream_all, strict=True)]
    return {
        "type": r.format_name,
        "rows": r.R,
        "cold_gbps": _spread(r.cold),
        "hot_gbps": _spread(r.hot),
        "stream_gbps": _spread(r.stream),
        "cold_share": round(statistics.median(shares), 3),
        "all_threads_gbps": _spread(r.all_threads),
        "all_threads_stream_gbps": _spread(r.stream_all),
        "all_threads_share": round(statistics.median(shares_all), 3),
    }


def _layer(types: str, rows: list[int], counts: list[int], tier: int, n_bytes: int, repeat: int) -> dict[str, Any]:
    """One pair of types: op against kernels on one core; then threads against the rate at which all cores read."""
    cores = usable_cores(core_facts())
    with LayerBench(types.strip(), tier, n_bytes) as bench:
        one_core = []
        for R in rows:
            times = bench.one_core(R, repeat)
            ratios = [a / b for a, b in zip(times.layer_us, times.kernels_us, strict=True)]
            one_core.append({
                "rows": R, "layer_mb": round(times.n_bytes / 1e6, 2), "layer_us": _spread(times.layer_us),
                "kernels_us": _spread(times.kernels_us), "layer_over_kernels": round(statistics.median(ratios), 3),
            })  # fmt: skip
        threaded = [_threaded(bench, R, n, cores, repeat) for R in rows for n in counts]
        return {"experts": types.strip(), "sets": len(bench.sets), "one_core": one_core, "threads": threaded}


def _threaded(bench: LayerBench, R: int, threads: int, cores: int, repeat: int) -> dict[str, Any]:
    names = [f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
    shared = sum(bench.tensors.info(n.replace("exps", "shexp")).n_bytes for n in names)
    n_bytes = sum(bench.tensors.info(n).n_bytes for n in names) + shared * len(bench.sets)
    (area,) = bench.tensors.gguf.keeper()
    rates, streams = [], []
    with Pool(threads, spin_us=SPIN_US) as pool, Pool(cores, spin_us=SPIN_US) as everyone:
        layer, read = bench.layer(R, pool), reading(area)
        for i in range(-1, repeat):
            time.sleep(PAUSE_S)
            seconds = layer.wall_seconds(PASSES)
            time.sleep(PAUSE_S)
            stream = PASSES * read.n_bytes / sum(wall_seconds(read, everyone) for _ in range(PASSES)) / 1e9
            if i >= 0:
                rates.append(PASSES * n_bytes / seconds / 1e9)
                streams.append(stream)
    shares = [rate / stream for rate, stream in zip(rates, streams, strict=True)]
    return {
        "rows": R, "threads": threads, "gbps": _spread(rates), "read_threads": cores, "read_gbps": _spread(streams),
        "share": round(statistics.median(shares), 3), "share_least": round(min(shares), 3),
    }  # fmt: skip


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {name: round(f(values), 2) for name, f in (("median", statistics.median), ("min", min), ("max", max))}


def _machine() -> dict[str, Any]:
    here = asdict(Machine.here(measure=False))
    return {name: here[name] for name in ("cpu_name", "physical_cores", "logical_cores", "usable_cores")}


def _versions() -> dict[str, str]:
    names = ("numpy", "numba", "llvmlite")
    return {"strata": strata.__version__, "python": platform.python_version(), **{n: version_of(n) for n in names}}


# ---- text


def _text(report: dict[str, Any]) -> list[str]:
    machine = report["machine"]
    lines = [
        f"command    {report['command']}",
        f"machine    {machine['cpu_name']}, {machine['physical_cores']} cores ({machine['usable_cores']} usable)",
        f"versions   {', '.join(f'{name} {v}' for name, v in report['versions'].items())}",
        f"tier       {report['tier']}, {report['cold_mb']} MB of weights, medians of {report['repeats']}",
    ]
    if "kernels" in report:
        head = f"{report['threads']} thread{'s' * (report['threads'] > 1)}"
        columns = f"{'type':<9}{'rows':>4}{'cold':>8}{'hot':>8}{'read':>8}{'share':>8}  | {head}{'read':>8}{'share':>8}"
        lines += ["", "GB/s of weights; share: of the rate of reading memory in the same run", columns]
        for k in report["kernels"]:
            mid = {name: k[f"{name}_gbps"]["median"] for name in ("cold", "hot", "stream", "all_threads",
                                                                  "all_threads_stream")}  # fmt: skip
            lines.append(
                f"{k['type']:<9}{k['rows']:>4}{mid['cold']:>8.1f}{mid['hot']:>8.1f}{mid['stream']:>8.1f}"
                f"{k['cold_share']:>8.2f}  | {mid['all_threads']:>{len(head)}.1f}{mid['all_threads_stream']:>8.1f}"
                f"{k['all_threads_share']:>8.2f}"
            )
    for layer in report.get("layers", ()):
        lines += ["", f"layer of ten experts and the shared one, {layer['experts']}, {layer['sets']} sets in turn"]
        for o in layer["one_core"]:
            lines.append(
                f"  {o['rows']} rows, one core: {o['layer_us']['median']:.0f} us, its kernels alone "
                f"{o['kernels_us']['median']:.0f} us: {o['layer_over_kernels']:.3f} x ({o['layer_mb']} MB)"
            )
        for t in layer["threads"]:
            lines.append(
                f"  {t['rows']} rows, {t['threads']} threads: {t['gbps']['median']:.1f} GB/s, "
                f"{t['share']:.2f} of the {t['read_gbps']['median']:.1f} GB/s that {t['read_threads']} cores read "
                f"(least {t['share_least']:.2f})"
            )
    return lines
