"""strata bench experts: windows whose experts are shared between GPU, link and CPU, beside the bound of their parts."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.base.errors import BadArgument, need
from strata.cli import flags
from strata.cli.bench.gpu import DISTINCT_PIECES, model_path
from strata.cli.output import Bar

if TYPE_CHECKING:
    from strata.experts_speed import ExpertsSpeed


def command(
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="GGUF file to measure; without it a model is made in memory.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of the made model; the real one has 48.")] = 12,
    types: Annotated[str, typer.Option("--types", help="Types of its routed experts: GATE_UP/DOWN.")] = "Q4_K/IQ4_NL",
    n_experts: Annotated[int, typer.Option("--n-experts", help="Its routed experts a layer.")] = 512,
    vocabulary: Annotated[int, typer.Option(help="Tokens of its vocabulary.")] = 32_768,
    rows: Annotated[int, typer.Option(help="Rows of the windows.")] = 1,
    windows: Annotated[int, typer.Option(help="Windows of each setting.")] = 48,
    shares: Annotated[str, typer.Option(help="Shares of the link to try.")] = "0,0.25,0.5,0.75",
    experts: Annotated[str, typer.Option(help="Where RAM holds experts: pinned or mapped.")] = "pinned",
    threads: flags.Threads = None,
    device: flags.Device = None,
    context: Annotated[int, typer.Option(help="Cells of the session.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of weights and routing.")] = 1,
    json_: flags.Json = False,
) -> None:
    """Measure windows with no experts in VRAM and with half of them, for some shares of the link.

    Routing is uniform and replayed. bound: the serial part, plus the longest branch at the costs that branches have
    when they run alone, plus the joins. Branches are sums over layers.
    """
    from strata.experts_speed import measure
    from strata.planner.machine import Machine
    from strata.planner.memory import choose_device
    from strata.planner.options import PlanOptions
    from strata.synth import SynthSpec

    wanted = _shares(shares)
    need(experts in ("pinned", "mapped"), "--experts is unknown", found=repr(experts), needed="pinned or mapped")
    spec = SynthSpec.of_types(types, layers=layers, experts=n_experts, vocabulary=vocabulary, seed=seed,
                              distinct_pieces=DISTINCT_PIECES)  # fmt: skip
    # Before a model is made, which takes minutes.
    choose_device(Machine.here(), PlanOptions(device=device or "cuda", experts=experts, pcie_share=0.5))
    with model_path(model, spec, None) as path, Bar("measuring", "settings") as bar:
        found = measure(path, rows=rows, windows=windows, shares=wanted, threads=threads, context=context,
                        experts=experts, device=device or "cuda", seed=seed, progress=bar.update)  # fmt: skip
        report: dict[str, Any] = {"command": " ".join(["strata", *sys.argv[1:]]), "model": str(path)}
    report |= {"spec": None if model is not None else asdict(spec), **found.record()}
    typer.echo(json.dumps(report, indent=2) if json_ else "\n".join(lines(found)))


def _shares(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        raise BadArgument("--shares cannot be read", found=repr(text), needed="numbers, as 0,0.5") from None
    need(all(0 <= s <= 1 for s in found), "--shares is out of range", found=text, needed="0 to 1")
    return sorted(set(found) | {0.0})


def lines(s: ExpertsSpeed) -> list[str]:
    """The report for people."""
    loads = " and ".join(f"{x:.1f}" for x in s.load_s)
    out = [
        f"device     {s.device}, {s.threads} CPU threads",
        f"model      {s.layers} layers, experts of {s.expert_bytes / 1e6:.2f} MB, loaded in {loads} s",
        "",
        f"{'':<12}{'share':>6}{'window us':>11}{'serial':>8}{'hits':>8}{'link':>8}{'CPU':>8}{'join':>7}"
        f"{'bound':>8}{'beyond':>8}  experts: hit, link, CPU; GB/s of link, CPU; waited for",
    ]
    for r in s.runs:
        waited = ", ".join(f"{name} {count}" for name, count in r.waited_for.items() if count)
        out.append(
            f"{r.name:<12}{r.share:>6.2f}{r.window_us:>11.0f}{r.serial_us:>8.0f}{r.hits_us:>8.0f}{r.link_us:>8.0f}"
            f"{r.cpu_us:>8.0f}{r.join_us:>7.0f}{r.bound_us:>8.0f}{100 * r.beyond_bound:>7.1f}%  "
            f"{r.hit_entries:.0f}, {r.link_experts:.0f}, {r.cpu_experts:.0f}; {r.link_gbps:.1f}, {r.cpu_gbps:.1f}; "
            f"{waited}"
        )
    return out
