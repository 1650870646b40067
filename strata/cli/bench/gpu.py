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

from strata.base.errors import BadArgument, need
from strata.base.geometry import CONTEXT_RESERVE
from strata.cli import flags
from strata.cli.output import Bar, working

if TYPE_CHECKING:
    from strata.gpu.device import Device
    from strata.gpu_speed import GpuSpeed, WindowSpeed
    from strata.synth import SynthSpec

ROUTINGS = ("replay", "uniform")
REPLAYED_TOKENS = 1024
DISTINCT_PIECES = 8
"""Of every tensor of experts of a made model: 64 MiB drawn, then repeated, so that a model is ready in seconds."""

OF_A_MADE_MODEL = ("layers", "experts", "n_experts", "vocabulary", "threads")
"""Parameters that a file has no use for."""


def command(
    ctx: typer.Context,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="GGUF file to measure; without it a model is made in memory.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of the made model; the real one has 48.")] = 12,
    experts: Annotated[str, typer.Option(help="Types of its routed experts: GATE_UP/DOWN.")] = "Q4_K/IQ4_NL",
    n_experts: Annotated[int, typer.Option("--n-experts", help="Its routed experts a layer.")] = 512,
    vocabulary: Annotated[int, typer.Option(help="Tokens of its vocabulary.")] = 248_320,
    threads: Annotated[int | None, typer.Option(help="Threads that make it; default: one per core.")] = None,
    routing: Annotated[str, typer.Option(help="Experts asked for: replay (skewed, local) or uniform.")] = "replay",
    rows: Annotated[str, typer.Option(help="Rows of the windows.")] = "1,2,4,8",
    position: Annotated[int, typer.Option(help="Tokens that the session has read.")] = 1024,
    context: Annotated[int, typer.Option(help="Cells of the session.")] = 4096,
    kv: Annotated[str, typer.Option(help="f16 or int8.")] = "f16",
    card: Annotated[str, typer.Option(help="Card whose time is estimated from bytes and nodes.")] = "RTX 5070",
    seed: Annotated[int, typer.Option(help="Of weights and routing.")] = 1,
    json_: flags.Json = False,
) -> None:
    """Measure windows and their ops on the GPU, with all experts in its memory.

    Routing is replayed on the device, since random weights would send all tokens to the same experts. bytes: the least
    that a window or an op must touch, weights and session state. Percentages are of a copy on the same device in the
    same run, which reads and writes. An op's time is measured in a graph of all its layers; where those fit into the
    L2 (marked *), a window takes longer. card: bytes over its bandwidth, plus nodes at this device's time of a node.
    """
    from strata.gpu.device import required_device
    from strata.planner.cards import card_by_name
    from strata.synth import SynthSpec

    if model is not None:
        flags.refuse_idle(ctx, OF_A_MADE_MODEL, "with --model")
    need(routing in ROUTINGS, "no such routing", found=repr(routing), needed=", ".join(ROUTINGS))
    need(kv in ("f16", "int8"), "kv is unknown", found=repr(kv), needed="f16 or int8")
    need(threads is None or threads >= 1, "--threads is too small", found=threads, needed=">= 1")
    wanted = _rows(rows)
    most = context - CONTEXT_RESERVE
    need(0 <= position <= most, "--position is outside the context", found=position, needed=f"0 to {most}")
    other = card_by_name(card)
    spec = SynthSpec.of_types(experts, layers=layers, experts=n_experts, vocabulary=vocabulary, seed=seed,
                              distinct_pieces=DISTINCT_PIECES)  # fmt: skip
    report: dict[str, Any] = {"command": " ".join(["strata", *sys.argv[1:]]), "card": asdict(other)}
    device = required_device("a measurement of a GPU's speed")  # before a model is made, which takes minutes
    with model_path(model, spec, threads) as path:
        report |= {"model": str(path), "spec": None if model is not None else asdict(spec)}
        report |= _measure(device, path, wanted, position, context, kv, routing, seed, other.bandwidth_gbps, json_)
    if json_:
        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo("\n".join(_card_lines(report)))


def _rows(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise BadArgument("--rows cannot be read", found=repr(text), needed="numbers, as 1,2,4,8") from None
    need(all(1 <= T <= 8 for T in found), "--rows has a window that does not exist", found=text, needed="1 to 8")
    return sorted(set(found))


@contextlib.contextmanager
def model_path(model: Path | None, spec: SynthSpec, threads: int | None) -> Iterator[Path]:
    """The file to measure: the given one, or a model made in memory while the block runs."""
    from strata.synth import memory_model

    if model is not None:
        yield model
        return
    with Bar("making the model", "bytes") as bar, memory_model(spec, bar.update, threads) as path:
        yield path


def _measure(
    device: Device, path: Path, rows: list[int], position: int, context: int, kv: str, routing: str, seed: int,
    card_gbps: float, quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    from strata.gpu_speed import measure, open_backend
    from strata.replay import routing_facts, skewed_ids, uniform_ids

    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        with working("loading"):
            backend = stack.enter_context(open_backend(path, context, kv, device))
        load_s, g = time.perf_counter() - began, backend.geometry
        make = skewed_ids if routing == "replay" else uniform_ids
        table = make(REPLAYED_TOKENS, g.L, g.E, g.K, seed)
        facts = routing_facts(table, g.E)
        with Bar("measuring", "windows") as bar:
            speed = measure(backend, table, position=position, card_gbps=card_gbps, rows=rows, on_progress=bar.update)
    if not quiet:
        typer.echo("\n".join([*_head(speed, load_s, f"{routing}: {facts}"), *_windows(speed)]))
    return {"load_s": round(load_s, 2), "routing": {"kind": routing, **asdict(facts)}, **speed.record()}


# ---- text


def _head(s: GpuSpeed, load_s: float, routing: str) -> list[str]:
    return [
        f"device     {s.device}: copies at {s.copy_gbps:.0f} GB/s (read and written), {s.node_us:.2f} us a node",
        f"model      {s.layers} layers, {s.weight_bytes / 1e9:.2f} GB on the device, loaded in {load_s:.1f} s",
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
