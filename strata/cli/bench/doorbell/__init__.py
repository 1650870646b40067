"""strata bench doorbell: what the exchange between GPU and CPU costs, on either side of it alone."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Annotated, Any

import typer

from strata.base.errors import BadArgument, need
from strata.cli import flags
from strata.cli.bench.numbers import count, numbers, words
from strata.cli.output import Bar, working

OF_THE_GPU = ("rows", "layers", "n_experts")
OF_THE_CPU = ("model", "threads", "mb", "repeat", "busy")


def command(
    ctx: typer.Context,
    cpu: Annotated[bool, typer.Option("--cpu", help="The CPU's side instead; needs no GPU.")] = False,
    types: Annotated[
        str, typer.Option(help="Types of the experts: GATE_UP/DOWN; default: IQ3_XXS/IQ4_NL, with --cpu Q4_K/IQ4_NL.")
    ] = "",
    rows: Annotated[str, typer.Option(help="Rows of the windows.")] = "1,4,8",
    layers: Annotated[int, typer.Option(help="Layers of a graph.")] = 48,
    n_experts: Annotated[int, typer.Option("--n-experts", help="Experts of a layer.")] = 512,
    model: flags.Model = None,
    threads: Annotated[int | None, typer.Option(help="With --cpu: threads; default: as a model takes.")] = None,
    mb: Annotated[int, typer.Option(help="With --cpu: MB of weights.")] = 160,
    repeat: Annotated[int, typer.Option("--repeat", "-r", help="With --cpu: repeats; medians are reported.")] = 5,
    busy: Annotated[
        bool, typer.Option("--busy-python", help="With --cpu: only windows, also beside a Python thread that computes.")
    ] = False,
    json_: flags.Json = False,
) -> None:
    """Measure the GPU's side of the exchange: post and wait alone, experts over the link, whole shared layers.

    A thread answers for the CPU, with zeros, at once or after some us; weights are random, every row of a window wants
    the same ten experts. --cpu measures the service of the CPU's experts in the same way, asked by a thread: shortest
    requests of the experts of a file, then those of a layer of the real widths beside their products alone.
    """
    if cpu:
        flags.refuse_idle(ctx, OF_THE_GPU, "with --cpu")
        report = _cpu(ctx, types or "Q4_K/IQ4_NL", model, threads, mb, repeat, busy)
    else:
        flags.refuse_idle(ctx, OF_THE_CPU, "without --cpu")
        report = _gpu(types or "IQ3_XXS/IQ4_NL", rows, layers, n_experts)
    command = " ".join(["strata", *sys.argv[1:]])
    text = report.pop("text")
    typer.echo(json.dumps({"command": command, **report}, indent=2) if json_ else "\n".join(text))


def _pair(types: str) -> tuple[str, str]:
    """Types of gate and up, and of down. BadArgument for others than two quantised formats."""
    from strata.pack.formats import by_name

    parts = types.split("/")
    if len(parts) != 2:
        raise BadArgument("types of the experts cannot be read", found=repr(types), needed="GATE_UP/DOWN")
    for name in parts:
        need(by_name(name).group > 0, f"{name} experts are not shared", found=name, needed="a quantised format")
    return parts[0], parts[1]


def _gpu(types: str, rows: str, layers: int, n_experts: int) -> dict[str, Any]:
    from strata.required_device import required_device

    wanted, (gate_up, down) = numbers("--rows", rows, 8), _pair(types)
    count("--layers", layers, 1, 256)
    count("--n-experts", n_experts, 10, 4096)
    device = required_device("a measurement of the GPU's side")
    with contextlib.closing(device):
        from strata.cli.bench.doorbell.gpu_side import lines, measure
        from strata.cli.bench.doorbell.stand import SIZES, Experts

        with working("making experts"):
            experts = Experts((gate_up, gate_up, down), layers, n_experts, SIZES.F, SIZES.D)
        with Bar("measuring", "settings") as bar:
            found = measure(device, experts, SIZES.K, wanted, bar.update)
    return {**found.record(), "text": lines(found)}


def _cpu(
    ctx: typer.Context, types: str, model: Any, threads: int | None, mb: int, repeat: int, busy: bool
) -> dict[str, Any]:
    from strata.cli.bench.doorbell.cpu_side import lines, measure
    from strata.cli.locate import find_model
    from strata.cpu.cores import MOST_THREADS, core_facts, default_threads
    from strata.cpu.tiers import best_tier

    if busy:
        flags.refuse_idle(ctx, ("types", "mb", "repeat"), "with --busy-python")
    count("--repeat", repeat, 1)
    count("--mb", mb, 8, 1 << 16)
    count("--threads", threads, 1, MOST_THREADS)
    pairs = ["/".join(_pair(one)) for one in words("--types", types)]
    path, n = find_model(model), threads or default_threads(core_facts(), 1)
    with working("measuring"):
        found = measure(path, pairs, best_tier(), n, mb << 20, repeat, busy)
    return {"model": str(path), "threads": n, **found, "text": [f"{path.name}, {n} threads", *lines(found)]}
