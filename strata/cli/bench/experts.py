"""strata bench experts: windows whose experts are shared between GPU, link and CPU, beside the bound of their parts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.base.errors import BadArgument, NoDevice, need
from strata.base.geometry import WINDOW_ROWS
from strata.cli import flags
from strata.cli.bench.gpu import DISTINCT_PIECES, FileToMeasure, model_path
from strata.cli.bench.numbers import count
from strata.cli.locate import find_model
from strata.cli.output import Bar

if TYPE_CHECKING:
    from strata.capped_experts import CappedSpeed
    from strata.experts_speed import ExpertsSpeed
    from strata.planner.machine import Machine
    from strata.planner.options import PlanOptions

OF_A_MADE_MODEL = ("layers", "types", "n_experts", "vocabulary")
"""Parameters that a file has no use for."""


def command(
    ctx: typer.Context,
    model: FileToMeasure = None,
    layers: Annotated[int, typer.Option(help="Layers of the made model; the real one has 48.")] = 12,
    types: Annotated[str, typer.Option("--types", help="Types of its routed experts: GATE_UP/DOWN.")] = "Q4_K/IQ4_NL",
    n_experts: Annotated[int, typer.Option("--n-experts", help="Its routed experts a layer.")] = 512,
    vocabulary: Annotated[int, typer.Option(help="Tokens of its vocabulary.")] = 32_768,
    rows: Annotated[int, typer.Option(help="Rows of the windows.")] = 1,
    windows: Annotated[int, typer.Option(help="Windows of each setting.")] = 48,
    shares: Annotated[
        str | None, typer.Option(help="Shares of the link; default: 0,0.25,0.5,0.75, with --fraction one.")
    ] = None,
    experts: Annotated[str, typer.Option(help="Where RAM holds experts: pinned or mapped.")] = "pinned",
    threads: flags.Threads = None,
    device: flags.Device = None,
    context: Annotated[int, typer.Option(help="Cells of the session.")] = 2048,
    fraction: Annotated[
        float | None,
        typer.Option(help="Instead: decode with slots for this part of the experts; a card of 12 GB has 0.18 in Q2_0."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="With --fraction: tokens of a run.")] = 1000,
    share: Annotated[
        float | None, typer.Option("--pcie-share", help="With --fraction: share of the link; default: by cost.")
    ] = None,
    busy: Annotated[
        bool, typer.Option("--busy-python", help="With --fraction: also beside a Python thread that computes.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of weights and routing.")] = 1,
    json_: flags.Json = False,
) -> None:
    """Measure windows with no experts in VRAM and with half of them, for some shares of the link.

    Routing is uniform and replayed. bound: the serial part, plus the longest branch at the costs that branches have
    when they run alone, or what memory takes for both that read it, plus the joins; parts: the same without memory, and
    what share of the window that is. Branches are sums over layers.

    With --fraction few experts have slots and routing is skewed: with favourites that never change, and with some that
    do. Rates, hits and what a simulated cache hits on the same routing are printed, then what the process does idle.
    With --shares too, the second routing alone, by share: windows by how far they are behind copies, and rates of RAM.
    """
    from strata import capped_experts, experts_speed
    from strata.planner.machine import Machine
    from strata.planner.options import PlanOptions
    from strata.synth import MOST_EXPERTS, ROUTED, SynthSpec

    if fraction is None:
        flags.refuse_idle(ctx, ("tokens", "share", "busy"), "without --fraction")
    else:
        flags.refuse_idle(ctx, ("rows", "windows", "experts"), "with --fraction")
        if shares is not None:
            flags.refuse_idle(ctx, ("share", "busy"), "with --shares")
    if model is not None:
        flags.refuse_idle(ctx, OF_A_MADE_MODEL, "with --model")
    wanted = None if shares is None and fraction is not None else _shares(shares)
    need(experts in ("pinned", "mapped"), "--experts is unknown", found=repr(experts), needed="pinned or mapped")
    need(fraction is None or 0 < fraction < 1, "--fraction is out of range", found=fraction, needed="above 0, below 1")
    count("--rows", rows, 1, WINDOW_ROWS)
    count("--windows", windows, 2)
    count("--tokens", tokens, 2)
    count("--n-experts", n_experts, ROUTED, MOST_EXPERTS)
    spec = SynthSpec.of_types(types, layers=layers, experts=n_experts, vocabulary=vocabulary, seed=seed,
                              distinct_pieces=DISTINCT_PIECES)  # fmt: skip
    # Before a model is made, which takes minutes.
    if model is not None:
        model = find_model(model)
    else:
        spec.need_replayable()
    _need_card(Machine.here(), PlanOptions(device=device or "cuda", experts=experts, threads=threads, context=context,
                                           pcie_share=share))  # fmt: skip
    usual = {"threads": threads, "context": context, "device": device or "cuda", "seed": seed}
    with model_path(model, spec, None) as path, Bar("measuring", "settings") as bar:
        if fraction is not None and wanted is not None:
            from strata.cli.bench import link_shares

            found = link_shares.measure(path, fraction, wanted, tokens=tokens, learnt=tokens, on_progress=bar.update,
                                        so_far=None if json_ else _Told(link_shares.lines), **usual)  # fmt: skip
        elif fraction is not None:
            found = capped_experts.measure(path, fraction, tokens=tokens, learnt=tokens, share=share, busy=busy,
                                           on_progress=bar.update, so_far=None if json_ else _Told(capped_lines),
                                           **usual)  # fmt: skip
        else:
            found = experts_speed.measure(path, rows=rows, windows=windows, shares=wanted, experts=experts,
                                          on_progress=bar.update, **usual)  # fmt: skip
        report: dict[str, Any] = {"command": " ".join(["strata", *sys.argv[1:]]), "model": str(path)}
    report |= {"spec": None if model is not None else asdict(spec), **found.record()}
    if json_:
        typer.echo(json.dumps(report, indent=2))
    elif fraction is None:
        typer.echo("\n".join(lines(found)))


def _need_card(machine: Machine, o: PlanOptions) -> None:
    """Refuse the CPU and cards that are not there: windows without a GPU share nothing."""
    from strata.planner.memory import choose_device

    what = "a measurement of experts that a GPU and the CPU share needs a GPU"
    need(o.device != "cpu", what, found="--device cpu", needed="cuda or cuda:N")
    try:
        choose_device(machine, replace(o, device="cuda") if o.device == "auto" else o)
    except NoDevice as error:  # which knows what the CPU could do, and that is nothing here
        cards = [f"cuda:{gpu.index}" for gpu in machine.gpus]
        raise NoDevice(what, found=error.found, needed=" or ".join(cards) or "one", advice=error.advice) from None


class _Told:
    """Prints what a measurement with few slots has found as it comes."""

    def __init__(self, lines_of: Callable[[Any], list[str]]) -> None:
        self._lines_of, self._n = lines_of, 0

    def __call__(self, found: Any) -> None:
        text = self._lines_of(found)
        for line in text[self._n :]:
            typer.echo(line)
        sys.stdout.flush()
        self._n = len(text)


def _shares(text: str | None) -> list[float]:
    text = "0,0.25,0.5,0.75" if text is None else text
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
        f"RAM        these threads read {s.memory.threads_gbps:.0f} GB/s, the link {s.memory.link_gbps:.0f}, at once "
        f"{s.memory.threads_beside_gbps:.0f} and {s.memory.link_beside_gbps:.0f}",
        "",
        f"{'':<12}{'share':>6}{'window us':>11}{'serial':>8}{'hits':>8}{'link':>8}{'CPU':>8}{'join':>7}"
        f"{'parts':>8}{'of it':>7}{'bound':>8}{'beyond':>8}  experts: hit, link, CPU; GB/s of link, CPU; waited for",
    ]
    for r in s.runs:
        waited = ", ".join(f"{name} {count}" for name, count in r.waited_for.items() if count)
        out.append(
            f"{r.name:<12}{r.share:>6.2f}{r.window_us:>11.0f}{r.serial_us:>8.0f}{r.hits_us:>8.0f}{r.link_us:>8.0f}"
            f"{r.cpu_us:>8.0f}{r.join_us:>7.0f}{r.parts_us:>8.0f}{100 * r.of_parts:>6.0f}%"
            f"{r.bound_us:>8.0f}{100 * r.beyond_bound:>7.1f}%  "
            f"{r.hit_entries:.0f}, {r.link_experts:.0f}, {r.cpu_experts:.0f}; {r.link_gbps:.1f}, {r.cpu_gbps:.1f}; "
            f"{waited}"
        )
    return out


PARTS = ("post", *(f"wait for {branch}" for branch in ("hits", "link", "cpu")), "join")


def capped_lines(s: CappedSpeed) -> list[str]:
    """The report of --fraction for people. Of a measurement that goes on, the first lines of what it will be."""
    out = [
        f"device     {s.device}, {s.threads} CPU threads, share of the link {s.share:.2f}",
        f"model      {s.layers} layers of {s.experts} experts of {s.expert_bytes / 1e6:.2f} MB, {s.slots} slots "
        f"({100 * s.slots / (s.layers * s.experts):.1f} %), {s.tokens} tokens a run",
        "",
        f"{'routing':<9}{'slots':<8}{'tokens/s':>9}{'hits':>8}{'without':>9}{'copies':>8}{'window us':>11}{'serial':>8}"
        + "".join(f"{name.removeprefix('wait for '):>7}" for name in PARTS)
        + f"{'other':>8}{'beside':>8}",
    ]
    for r in s.runs:
        parts = "".join(f"{r.parts_us[name]:>7.0f}" for name in PARTS)
        out.append(
            f"{r.routing:<9}{r.policy:<8}{r.tokens_per_s:>9.1f}{100 * r.hit_rate:>7.1f}%{100 * r.without:>8.1f}%"
            f"{r.copies_per_window:>8.2f}{r.window_us:>11.0f}{r.parts_us['serial']:>8.0f}{parts}{r.other_us:>8.0f}"
            f"{r.beside_us:>8.0f}"
        )
    out += _busy_lines(s)
    if s.simulated:
        out += ["", "simulated on the same routing: hit rate (experts copied a window)"]
    for sim in s.simulated:
        found = ", ".join(f"{p.policy} {100 * p.hit_rate:.1f} % ({p.copies_per_window:.1f})" for p in sim.policies)
        out.append(f"{sim.routing:<9}{found}")
    if s.idle_cpu is not None:
        gpu = "not told" if s.idle_gpu is None else f"{s.idle_gpu} %"
        out.append(f"idle, a second after the last token: {s.idle_cpu:.2f} % of a CPU, GPU {gpu}")
    return out


def _busy_lines(s: CappedSpeed) -> list[str]:
    """What a busy Python thread costs."""
    if not s.busy:
        return []
    alone, *beside = s.busy
    out = ["", f"beside a Python thread that computes; alone {alone.tokens_per_s:.1f} tokens/s, {alone.tokens} tokens"]
    for b in beside:
        more_us = 1e6 / b.tokens_per_s - 1e6 / alone.tokens_per_s
        slower = 100 * (alone.tokens_per_s / b.tokens_per_s - 1)
        out.append(f"switch interval {b.interval_s * 1e3:g} ms: {slower:.0f} % slower, {more_us:+.0f} us a token, "
                   f"{b.tokens} tokens")  # fmt: skip
    return out
