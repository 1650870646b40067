"""strata bench gpu: windows and ops on the first CUDA device, beside the bytes they need and the rate of a copy."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.base.errors import StrataError, need
from strata.base.geometry import CONTEXT_RESERVE, LEAST_CONTEXT, WINDOW_ROWS
from strata.cli import flags
from strata.cli.bench.numbers import count, numbers
from strata.cli.output import Bar, working
from strata.cpu.cores import MOST_THREADS

if TYPE_CHECKING:
    import numpy as np

    from strata.gpu.backend import GpuBackend
    from strata.gpu.device import Device
    from strata.gpu_speed import GpuSpeed, WindowSpeed
    from strata.synth import SynthSpec

ROUTINGS = ("replay", "uniform", "same")
REPLAYED_TOKENS = 1024
DISTINCT_PIECES = 8
"""Of every tensor of experts of a made model: 64 MiB drawn, then repeated, so that a model is ready in seconds."""

OF_A_MADE_MODEL = ("layers", "experts", "n_experts", "dense", "vocabulary", "threads")
"""Parameters that a file has no use for."""


FileToMeasure = Annotated[
    Path | None,
    typer.Option(
        "--model", "-m", parser=flags.path_of, metavar="PATH",
        help="GGUF file to measure; without it a model is made in memory.",
    ),
]  # fmt: skip


def command(
    ctx: typer.Context,
    model: FileToMeasure = None,
    layers: Annotated[int, typer.Option(help="Layers of the made model; the real one has 48.")] = 12,
    experts: Annotated[str, typer.Option(help="Types of its routed experts: GATE_UP/DOWN.")] = "Q4_K/IQ4_NL",
    n_experts: Annotated[int, typer.Option("--n-experts", help="Its routed experts a layer.")] = 512,
    dense: Annotated[
        str, typer.Option(help="Type of its layers' dense matrices; default: the mix of the Q2_0 release.")
    ] = "",
    vocabulary: Annotated[int, typer.Option(help="Tokens of its vocabulary.")] = 248_320,
    threads: Annotated[int | None, typer.Option(help="Threads that make it; default: one per core.")] = None,
    routing: Annotated[
        str,
        typer.Option(
            help="Experts asked for: replay (skewed, local), uniform, or same (eight tokens in a row want the same)."
        ),
    ] = "replay",
    rows: Annotated[str, typer.Option(help="Rows of the windows.")] = "1,2,4,8",
    position: Annotated[int, typer.Option(help="Tokens that the session has read.")] = 1024,
    context: Annotated[int, typer.Option(help="Cells of the session.")] = 4096,
    kv: Annotated[str, typer.Option(help="f16 or int8.")] = "f16",
    card: Annotated[str, typer.Option(help="Card whose time is estimated from bytes and nodes.")] = "RTX 5070",
    by_table: Annotated[
        bool, typer.Option("--by-table", help="Kernels find experts by a table, as where VRAM holds a part of them.")
    ] = False,
    compare: Annotated[
        str | None, typer.Option(help="Instead: windows under choices of the lowering; all, or parts of their names.")
    ] = None,
    check_early: Annotated[
        int | None, typer.Option(help="Instead: compare bits of so many windows with and without early starts.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and routing.")] = 1,
    json_: flags.Json = False,
) -> None:
    """Measure windows and their ops on the GPU, with all experts in its memory.

    Routing is replayed on the device, since random weights would send all tokens to the same experts. bytes: the least
    that a window or an op must touch, weights and session state. Percentages are of a copy on the same device in the
    same run, which reads and writes. An op's time is measured in a graph of all its layers; where those fit into the
    L2 (marked *), a window takes longer. card: bytes over its bandwidth, plus nodes at this device's time of a node.

    --compare times the same windows with kernels put together or started in other ways. --check-early reads windows one
    after the other at every level of early starts and fails if a bit of their streams differs.
    """
    from strata.cli.locate import find_model
    from strata.planner.cards import card_by_name
    from strata.planner.options import MOST_OF_ANY
    from strata.required_device import required_device
    from strata.synth import MOST_EXPERTS, ROUTED, SynthSpec

    if model is not None:
        flags.refuse_idle(ctx, OF_A_MADE_MODEL, "with --model")
    for other, given in (("--compare", compare), ("--check-early", check_early)):
        if given is not None:
            flags.refuse_idle(ctx, ("card",), f"with {other}")
    need(compare is None or check_early is None, "--compare and --check-early exclude each other", found="both",
         needed="one")  # fmt: skip
    count("--check-early", check_early, 1)
    choices = None if compare is None else _choices(compare)
    need(routing in ROUTINGS, "no such routing", found=repr(routing), needed=", ".join(ROUTINGS))
    need(kv in ("f16", "int8"), "kv is unknown", found=repr(kv), needed="f16 or int8")
    count("--threads", threads, 1, MOST_THREADS)
    count("--context", context, LEAST_CONTEXT, MOST_OF_ANY)
    wanted = numbers("--rows", rows, WINDOW_ROWS)
    most = context - CONTEXT_RESERVE
    need(0 <= position <= most, "--position is outside the context", found=position, needed=f"0 to {most}")
    read = position + (check_early or 0) * max(wanted)
    need(read <= most, "--check-early does not fit the context", found=f"{read} tokens", needed=f"at most {most}",
         advice="Give --context.")  # fmt: skip
    other = card_by_name(card, "Its bandwidth estimates times of another card: give --card the nearest to yours.")
    count("--n-experts", n_experts, ROUTED, MOST_EXPERTS)
    spec = SynthSpec.of_types(experts, layers=layers, experts=n_experts, vocabulary=vocabulary, seed=seed,
                              distinct_pieces=DISTINCT_PIECES, dense=dense)  # fmt: skip
    if model is not None:
        model = find_model(model)
    elif routing != "uniform":
        spec.need_replayable()
    report: dict[str, Any] = {"command": " ".join(["strata", *sys.argv[1:]]), "card": asdict(other)}
    device = required_device("a measurement of a GPU's speed")  # before a model is made, which takes minutes
    with model_path(model, spec, threads) as path:
        report |= {"model": str(path), "spec": None if model is not None else asdict(spec)}
        with _opened(device, path, context, kv, by_table, routing, seed) as (backend, table, facts):
            report |= facts
            if choices is not None:
                report["choices"] = _compare(backend, table, wanted, position, choices, json_)
            elif check_early is not None:
                report["early"] = _check_early(backend, table, wanted, position, check_early, seed, json_)
            else:
                report |= _measure(backend, table, wanted, position, other.bandwidth_gbps, None if json_ else facts)
    if json_:
        typer.echo(json.dumps(report, indent=2))
    elif "windows" in report:
        typer.echo("\n".join(_card_lines(report)))
    differ = sum(len(k["differ"]) for k in report.get("early", ()))
    if differ:
        raise StrataError("early starts change what windows compute", found=f"{differ} windows differ", needed="none",
                          advice="Please report this.")  # fmt: skip


@contextlib.contextmanager
def model_path(model: Path | None, spec: SynthSpec, threads: int | None) -> Iterator[Path]:
    """The file to measure: the given one, or a model made in memory while the block runs."""
    from strata.synth import memory_model

    if model is not None:
        yield model
        return
    with Bar("making the model", "bytes") as bar, memory_model(spec, bar.update, threads) as path:
        yield path


@contextlib.contextmanager
def _opened(
    device: Device, path: Path, context: int, kv: str, by_table: bool, routing: str, seed: int
) -> Iterator[tuple[GpuBackend, np.ndarray, dict[str, Any]]]:
    """The loaded backend, the table of replayed experts, and what is reported of both."""
    from strata.gpu_speed import open_backend
    from strata.replay import routing_facts, same_ids, skewed_ids, uniform_ids

    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        with working("loading"):
            backend = stack.enter_context(open_backend(path, context, kv, device, by_table))
        load_s, g = time.perf_counter() - began, backend.geometry
        make = {"replay": skewed_ids, "uniform": uniform_ids, "same": same_ids}[routing]
        table = make(REPLAYED_TOKENS, g.L, g.E, g.K, seed)
        facts = {"kind": routing, **asdict(routing_facts(table, g.E))}
        yield backend, table, {"load_s": round(load_s, 2), "by_table": by_table, "routing": facts}


def _measure(
    backend: GpuBackend, table: np.ndarray, rows: list[int], position: int, card_gbps: float,
    shown: dict[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    from strata.gpu_speed import measure
    from strata.replay import routing_facts

    with Bar("measuring", "windows") as bar:
        speed = measure(backend, table, position=position, card_gbps=card_gbps, rows=rows, on_progress=bar.update)
    if shown is not None:
        facts = f"{shown['routing']['kind']}: {routing_facts(table, backend.geometry.E)}"
        places = "places of a table" if shown["by_table"] else "fixed places"
        typer.echo("\n".join([*_head(speed, shown["load_s"], facts, places), *_windows(speed)]))
    return speed.record()


def _choices(text: str) -> dict[str, dict[str, int]]:
    from strata.cli.bench.gpu_windows import chosen

    return chosen(text)


def _compare(
    backend: GpuBackend, table: np.ndarray, rows: list[int], position: int, choices: dict[str, dict[str, int]],
    quiet: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    from strata.cli.bench.gpu_windows import choice_lines, compare

    with Bar("measuring", "choices") as bar:
        found = compare(backend, table, rows, position, choices, on_progress=bar.update)
    if not quiet:
        typer.echo("\n".join([backend.device.name, *choice_lines(found)]))
    return [asdict(c) for c in found]


def _check_early(
    backend: GpuBackend, table: np.ndarray, rows: list[int], position: int, windows: int, seed: int, quiet: bool
) -> list[dict[str, Any]]:
    from strata.cli.bench.gpu_windows import check_early, kept_lines

    with Bar("comparing", "levels") as bar:
        found = check_early(backend, table, rows, position, windows, seed, bar.update)
    if not quiet:
        typer.echo("\n".join([backend.device.name, *kept_lines(found)]))
    return [asdict(k) for k in found]


# ---- text


def _head(s: GpuSpeed, load_s: float, routing: str, places: str) -> list[str]:
    return [
        f"device     {s.device}: copies at {s.copy_gbps:.0f} GB/s (read and written), {s.node_us:.2f} us a node",
        f"model      {s.layers} layers, {s.weight_bytes / 1e9:.2f} GB on the device, loaded in {load_s:.1f} s, "
        f"experts at {places}",
        f"routing    {routing}",
        f"position   {s.position}",
    ]


def _windows(s: GpuSpeed) -> list[str]:
    lines = []
    for w in s.windows:
        lines += ["", *_window(w), f"  {'us':>9} {'x':>3} {'nodes':>5} {'MB':>9} {'GB/s':>6} {'copy':>6}  op"]
        for op in w.ops:
            lines.append(
                f"  {op.us:>9.2f} {op.layers:>3} {op.nodes:>5.1f} {op.n_bytes / 1e6:>9.3f} {op.gbps:>6.0f} "
                f"{100 * op.copy_share:>5.1f}%{'*' if op.cached else ' '} {op.name}"
            )
    return lines


def _window(w: WindowSpeed) -> list[str]:
    alone = sum(op.us * op.layers for op in w.ops)
    return [
        f"window of {w.rows} row{'s' if w.rows > 1 else ''}: {w.us:.1f} us ({w.wall_us:.1f} us with the host's part), "
        f"{w.nodes} nodes, {w.distinct:.1f} distinct experts a layer",
        f"  {w.n_bytes / 1e6:.1f} MB at least, {w.gbps:.0f} GB/s, {100 * w.copy_share:.1f} % of the copy; "
        f"its ops one after the other {alone:.1f} us",
        f"  head {w.head_us:.1f} us, {w.head_nodes} nodes, {w.head_bytes / 1e6:.1f} MB at least",
    ]


def _card_lines(report: dict[str, Any]) -> list[str]:
    card = report["card"]
    gb = report["weight_bytes"] / 1e9
    fits = "which fits" if report["weight_bytes"] < card["vram_bytes"] else "which does not fit"
    about = f"{card['bandwidth_gbps']:.0f} GB/s, {card['vram_bytes'] / 1e9:.1f} GB; {gb:.2f} GB of weights, {fits}"
    lines = ["", f"{card['name']}  {about}", f"  bytes over bandwidth, and {report['node_us']:.2f} us a node:"]
    for w in report["windows"]:
        lines.append(f"  window of {w['rows']}: {w['card_us']:.0f} us, head {w['head_card_us']:.0f} us")
    return lines
