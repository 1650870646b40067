"""strata bench cpu-kernels: GB/s of every product kernel and of whole layers of experts, beside reading memory."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from dataclasses import asdict
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer

import strata
from strata.base.errors import need
from strata.cli import flags
from strata.cli.bench.numbers import count, numbers, spread, words
from strata.cli.output import Bar
from strata.cpu.cores import MOST_THREADS, core_facts, usable_cores
from strata.cpu.pool import Pool
from strata.cpu.tiers import available_tiers, best_tier
from strata.kernel_speed import COLUMNS, HOT_ROWS, KernelBench, Rates, cold_bytes, reading, wall_seconds
from strata.layer_speed import LayerBench
from strata.pack.formats import FORMATS, by_name
from strata.planner.machine import Machine

ALL_TYPES = tuple(f.name for f in FORMATS.values() if f.activation != "none")
ROWS, MOST_ROWS = "1,2,3,4,8", 8
OF_WINDOWS = ("rows", "threads", "mb", "layer", "ggml", "prefetch")
"""Parameters that --chunk-rows has no use for."""
OF_PRODUCTS = ("types", "rows", "tier", "columns", "layer", "ggml", "prefetch", "chunk_rows")
"""Parameters that --reading has no use for."""
PASSES = 4
"""Passes over all sets in one timing of several threads: tens of milliseconds."""

SPIN_US, PAUSE_S = 200.0, 0.001
"""Two pools take turns: the workers of the one sleep before the other is timed."""


def command(
    ctx: typer.Context,
    types: Annotated[str, typer.Option(help="Formats, comma-separated; default: all.")] = "",
    rows: Annotated[
        str, typer.Option(help=f"Activation rows, 1 to 8 (5 to 8 as 4 and the rest); default: {ROWS}, of prefetches 1")
    ] = "",
    threads: Annotated[
        str, typer.Option(help="Threads; with --layer or --prefetch several, comma-separated; default: all cores.")
    ] = "",
    tier: Annotated[int | None, typer.Option(help="512, 256 or 0; default: the fastest.")] = None,
    mb: Annotated[int | None, typer.Option(help="MB of weights; default: 4 x the last cache, at least 160.")] = None,
    columns: Annotated[int, typer.Option(help="Values of a matrix row.")] = COLUMNS,
    repeat: Annotated[int, typer.Option("--repeat", "-r", help="Repeats; medians are reported.")] = 5,
    layer: Annotated[bool, typer.Option("--layer", help="Whole layers of ten experts instead of kernels.")] = False,
    experts: Annotated[str, typer.Option(help="With --layer: GATE_UP/DOWN types, comma-separated.")] = "Q4_K/IQ4_NL",
    phases: Annotated[
        bool, typer.Option("--phases", help="With --layer: parts of a layer and how busy threads are, by stamps.")
    ] = False,
    run_kb: Annotated[str, typer.Option(help="With --phases: longest runs of rows in KB, comma-separated.")] = "512",
    huge: Annotated[bool, typer.Option("--huge", help="With --phases: also from huge pages.")] = False,
    ggml: Annotated[
        Path | None,
        typer.Option(
            parser=flags.path_of, metavar="PATH", help="Beside ggml on one core: shared object with its ggml_vec_dot_*."
        ),
    ] = None,
    chunk_rows: Annotated[
        str, typer.Option(help="Products of so many rows, as 8,64: four at a time, and by the kernel for any number.")
    ] = "",
    matrix_rows: Annotated[int, typer.Option(help="With --chunk-rows: rows of the matrix.")] = HOT_ROWS,
    reading: Annotated[
        bool, typer.Option("--reading", help="Only reading memory, by the form of the loop; threads comma-separated.")
    ] = False,
    prefetch: Annotated[
        str | None, typer.Option(metavar="LEVEL:BYTES", help="Compare these prefetches with the kernels' own.")
    ] = None,
    json_: flags.Json = False,
) -> None:
    """Check each kernel against the arithmetic, then time it: weights from memory (cold) and from cache (hot).

    One core is timed by its CPU time, several by the wall clock, so other programs' work does not count for one core
    but does for several. The share is that of the rate at which the same cores read memory in the same seconds.

    --ggml compares with ggml's vec_dot instead, weights cold, in turn in the same run: every result, then the times.

    --reading times loops that only read, in huge pages: several streams, and prefetches by level and distance.

    --chunk-rows compares both forms of products of many rows, as chunks have them, bit by bit, and times them.

    --prefetch compares kernels that ask for weights otherwise, in turn in the same run: LEVEL:BYTES ahead for every
    line, LEVEL:BYTES/STEPS for one line in so many steps, several joined by +, or none. As 2:8192,2:8192+1:1024.
    """
    if layer:
        flags.refuse_idle(ctx, ("types", "columns", "ggml"), "with --layer")
    else:
        flags.refuse_idle(ctx, ("experts", "phases"), "without --layer")
    if not phases:
        flags.refuse_idle(ctx, ("run_kb", "huge"), "without --phases")
    if ggml is not None:
        flags.refuse_idle(ctx, ("threads",), "with --ggml: it is compared on one core")
    if prefetch is not None:
        flags.refuse_idle(ctx, ("ggml", "phases"), "with --prefetch")
    if reading:
        flags.refuse_idle(ctx, OF_PRODUCTS, "with --reading")
    if chunk_rows:
        flags.refuse_idle(ctx, OF_WINDOWS, "with --chunk-rows")
    else:
        flags.refuse_idle(ctx, ("matrix_rows",), "without --chunk-rows")
    rows = rows or (ROWS if prefetch is None else "1")
    tier = best_tier() if tier is None else tier
    need(tier in available_tiers(), "this machine does not run the tier", found=tier, needed=f"{available_tiers()}")
    count("--columns", columns, 32, 1 << 16)
    count("--repeat", repeat, 1)
    count("--mb", mb, 8, 1 << 16)
    pairs = words("--experts", experts)
    need(bool(pairs), "--experts names no types", found=repr(experts), needed="GATE_UP/DOWN")
    n_bytes = cold_bytes() if mb is None else mb << 20
    counts = numbers("--threads", threads, MOST_THREADS) if threads else [usable_cores(core_facts())]
    report: dict[str, Any] = {
        "command": " ".join(["strata", *sys.argv[1:]]),
        "machine": _machine(),
        "versions": _versions(),
        "tier": tier,
        "cold_mb": n_bytes >> 20,
        "repeats": repeat,
    }
    if reading:
        from strata.cli.bench.reading_forms import measure as read_forms

        with Bar("measuring", "numbers of threads") as bar:
            report["reading"] = read_forms(n_bytes, counts, repeat, bar.update)
    elif prefetch is not None:
        from strata.cli.bench.prefetches import kernels, layers

        how = (_rows(rows), counts, tier, n_bytes, prefetch, repeat)
        report["prefetches"] = layers(pairs, *how) if layer else kernels(words("--types", types), columns, *how)
    elif phases:
        runs = numbers("--run-kb", run_kb, 1 << 16)
        report["phases"] = [_phases(t, _rows(rows), counts, runs, huge, tier, n_bytes, repeat) for t in pairs]
    elif layer:
        report["layers"] = [_layer(t, _rows(rows), counts, tier, n_bytes, repeat) for t in pairs]
    else:
        need(len(counts) == 1, "--threads takes one number without --layer", found=threads, needed="one number")
        report["threads"] = counts[0] if ggml is None else 1
        quantised = [name for name in ALL_TYPES if by_name(name).group]
        names = words("--types", types) or (list(ALL_TYPES) if ggml is None else quantised)
        for name in names:
            block = by_name(name).block_values
            need(by_name(name).activation != "none", f"{name} matrices have no products", found=name,
                 needed="a type that products take")  # fmt: skip
            need(columns % block == 0, f"--columns does not fit {name}", found=columns, needed=f"a multiple of {block}")
        report["columns"] = columns
        if chunk_rows:
            from strata.cli.bench.chunk_rows import measure

            need(1 <= matrix_rows <= 1 << 20, "--matrix-rows is out of range", found=matrix_rows, needed="1 to 1048576")
            many, formats = numbers("--chunk-rows", chunk_rows, 1 << 14), [by_name(name) for name in names]
            report["threads"] = 1
            report["chunk_rows"] = measure(formats, tier, matrix_rows, columns, many, repeat)
        elif ggml is not None:
            report["beside_ggml"] = _beside_ggml(ggml, names, _rows(rows), tier, n_bytes, repeat, columns)
        else:
            report["kernels"] = _kernels(names, _rows(rows), counts[0], tier, n_bytes, repeat, columns)
    typer.echo(json.dumps(report, indent=2) if json_ else "\n".join(_text(report)))


def _rows(text: str) -> list[int]:
    return numbers("--rows", text, MOST_ROWS)


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
        "cold_gbps": spread(r.cold),
        "hot_gbps": spread(r.hot),
        "stream_gbps": spread(r.stream),
        "cold_share": round(statistics.median(shares), 3),
        "all_threads_gbps": spread(r.all_threads),
        "all_threads_stream_gbps": spread(r.stream_all),
        "all_threads_share": round(statistics.median(shares_all), 3),
    }


def _beside_ggml(path: Path, names: list[str], rows: list[int], tier: int, n_bytes: int, repeat: int,
                 columns: int) -> list[dict]:  # fmt: skip
    from strata.cli.bench.ggml import compare, open_library

    library, found = open_library(path), []
    with KernelBench(tier, 1, n_bytes, columns) as bench, Bar("measuring", "formats") as bar:
        for i, name in enumerate(names):
            bar.update(i, len(names))
            found += [compare(library, bench, by_name(name), R, repeat) for R in rows]
    return found


def _phases(types: str, rows: list[int], counts: list[int], run_kb: list[int], huge: bool, tier: int, n_bytes: int,
            repeat: int) -> dict[str, Any]:  # fmt: skip
    from strata.cli.bench.layer_phases import measure

    with LayerBench(types, tier, n_bytes) as bench:
        return {"experts": types, "runs": [measure(bench, R, n, run_kb, huge, repeat) for R in rows for n in counts]}


def _layer(types: str, rows: list[int], counts: list[int], tier: int, n_bytes: int, repeat: int) -> dict[str, Any]:
    """One pair of types: op against kernels on one core; then threads against the rate at which all cores read."""
    cores = usable_cores(core_facts())
    with LayerBench(types, tier, n_bytes) as bench:
        one_core = []
        for R in rows:
            times = bench.one_core(R, repeat)
            ratios = [a / b for a, b in zip(times.layer_us, times.kernels_us, strict=True)]
            one_core.append({
                "rows": R, "layer_mb": round(times.n_bytes / 1e6, 2), "layer_us": spread(times.layer_us),
                "kernels_us": spread(times.kernels_us), "layer_over_kernels": round(statistics.median(ratios), 3),
            })  # fmt: skip
        threaded = [_threaded(bench, R, n, cores, repeat) for R in rows for n in counts]
        return {"experts": types, "sets": len(bench.sets), "one_core": one_core, "threads": threaded}


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
        "rows": R, "threads": threads, "gbps": spread(rates), "read_threads": cores, "read_gbps": spread(streams),
        "share": round(statistics.median(shares), 3), "share_least": round(min(shares), 3),
    }  # fmt: skip


def _machine() -> dict[str, Any]:
    here = asdict(Machine.here(measure=False))
    return {name: here[name] for name in ("cpu_name", "physical_cores", "logical_cores", "usable_cores")}


def _versions() -> dict[str, str]:
    names = ("numpy", "numba", "llvmlite")
    return {"strata": strata.__version__, "python": platform.python_version(), **{n: version_of(n) for n in names}}


# ---- text


def _text(report: dict[str, Any]) -> list[str]:
    machine = report["machine"]
    weights = "" if "chunk_rows" in report else f"{report['cold_mb']} MB of weights, "
    lines = [
        f"command    {report['command']}",
        f"machine    {machine['cpu_name']}, {machine['physical_cores']} cores ({machine['usable_cores']} usable)",
        f"versions   {', '.join(f'{name} {v}' for name, v in report['versions'].items())}",
        f"tier       {report['tier']}, {weights}medians of {report['repeats']}",
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
    if "prefetches" in report:
        from strata.cli.bench.prefetches import lines_of

        lines += lines_of(report["prefetches"])
    if "reading" in report:
        from strata.cli.bench.reading_forms import lines as reading_lines

        lines += ["", *reading_lines(report["reading"])]
    if "chunk_rows" in report:
        from strata.cli.bench.chunk_rows import line as chunk_line

        lines += ["", "ns an output on one core"]
        lines += [chunk_line(one) for one in report["chunk_rows"]]
    if "beside_ggml" in report:
        from strata.cli.bench.ggml import line

        lines += ["", "GB/s of weights from memory; times: of ggml's rate, median of each repeat's own"]
        lines += [line(k) for k in report["beside_ggml"]]
    for phases in report.get("phases", ()):
        from strata.cli.bench.layer_phases import lines as phase_lines

        lines += ["", f"layer of ten experts and the shared one, {phases['experts']}"]
        lines += [text for run in phases["runs"] for text in phase_lines(run)]
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
