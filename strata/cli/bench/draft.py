"""strata bench draft: what drafting gains at given acceptances, with a drafter that knows the answer."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.base.errors import BadArgument, need
from strata.base.geometry import CELL_ROWS, CONTEXT_RESERVE
from strata.cli import flags
from strata.cli.bench.numbers import count
from strata.cli.output import Bar

if TYPE_CHECKING:
    from strata.draft_speed import Gain
    from strata.synth import SynthSpec

REPLAYED_TOKENS = 1024
BUDGET_S = 40.0
"""For all answers, where their lengths are not given."""

DISTINCT_PIECES = 8
"""Of every tensor of experts of a made model: 64 MiB drawn, then repeated, so that a model is ready in seconds."""


def command(
    ctx: typer.Context,
    model: flags.Model = None,
    layers: Annotated[
        int, typer.Option(help="Make a model of random weights with so many layers in memory; 0: measure --model.")
    ] = 0,
    experts: Annotated[str, typer.Option(help="Types of its routed experts: GATE_UP/DOWN.")] = "Q4_K/IQ4_NL",
    n_experts: Annotated[int, typer.Option("--n-experts", help="Its routed experts a layer.")] = 512,
    vocabulary: Annotated[int, typer.Option(help="Tokens of its vocabulary.")] = 248_320,
    acceptance: Annotated[str, typer.Option(help="Probabilities that a draft is right.")] = "0.5,0.7,0.9",
    tokens: Annotated[
        int | None, typer.Option("--tokens", "-n", help="Tokens decoded in an answer; default: up to 256, see below.")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option("--repeat", "-r", help="Pairs of answers; medians are reported; default: 3, or 1.")
    ] = None,
    threads: flags.Threads = None,
    device: flags.Device = None,
    vram_gib: flags.VramGib = None,
    kv: flags.Kv = "auto",
    seed: Annotated[int, typer.Option(help="Of prompt, drafts, and a made model's weights and routing.")] = 1,
    json_: flags.Json = False,
) -> None:
    """Decode the same answer without and with drafts, at acceptances of your choice.

    The drafter knows the answer of a first run and spoils its tokens with the given probability; it costs next to
    nothing. How many drafts a window holds is the policy's choice, as it is when you use the library. A made model has
    the real widths and takes its experts from a table by position, neighbours sharing 35 % of them, since random
    weights would send all tokens to the same ones.

    Without --tokens and --repeat they are chosen after a look at the model's speed, so that all answers together take
    about 40 seconds, and printed. Longer: -n 256 -r 5.
    """
    from strata.synth import MOST_EXPERTS, MOST_LAYERS, MOST_SEED, ROUTED, SynthSpec

    wanted = _acceptances(acceptance)
    count("--layers", layers, 0, MOST_LAYERS)
    count("--seed", seed, 0, MOST_SEED)
    need(layers == 0 or model is None, "a made model and a file", found="--layers and --model", needed="one of them")
    count("--tokens", tokens, 8)
    count("--repeat", repeat, 1)
    if not layers:
        flags.refuse_idle(ctx, ("experts", "n_experts", "vocabulary"), "without --layers")
    spec = None
    if layers:
        from strata.planner.machine import Machine
        from strata.planner.memory import choose_device
        from strata.planner.options import PlanOptions

        # Before a model is made, which takes minutes.
        choose_device(Machine.here(), PlanOptions(device=device or "auto", vram_gib=vram_gib, kv=kv, threads=threads))
        count("--n-experts", n_experts, ROUTED, MOST_EXPERTS)
        spec = SynthSpec.of_types(experts, layers=layers, experts=n_experts, vocabulary=vocabulary, seed=seed,
                                  distinct_pieces=DISTINCT_PIECES)  # fmt: skip
        spec.need_replayable()
    report: dict[str, Any] = {"command": " ".join(["strata", *sys.argv[1:]])}
    with _path(model, spec) as path:
        options = {"threads": threads, "device": device, "vram_gib": vram_gib, "kv": kv}
        report |= _measure(path, spec, wanted, tokens, repeat, seed, options, json_)
    if json_:
        typer.echo(json.dumps(report, indent=2))


def _acceptances(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        raise BadArgument("--acceptance cannot be read", found=repr(text), needed="numbers, as 0.5,0.7,0.9") from None
    need(all(0 <= a <= 1 for a in found), "an acceptance is no probability", found=text, needed="0 to 1")
    return found


@contextlib.contextmanager
def _path(model: Path | None, spec: SynthSpec | None) -> Iterator[Path | None]:
    from strata.synth import memory_model

    if spec is None:
        yield model
        return
    with Bar("making the model", "bytes") as bar, memory_model(spec, bar.update) as path:
        yield path


def _measure(
    path: Path | None, spec: SynthSpec | None, acceptances: list[float], tokens: int | None, repeat: int | None,
    seed: int, options: dict[str, Any], quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    from strata.draft_speed import (
        MOST_TOKENS,
        PROMPT_TOKENS,
        DraftGain,
        answers_of,
        lengths_for,
        pace_of,
        replayed_by_position,
    )
    from strata.replay import routing_facts, skewed_ids

    def say(text: str) -> None:
        if not quiet:
            typer.echo(text)

    context = -(-(PROMPT_TOKENS + (tokens or MOST_TOKENS) + CONTEXT_RESERVE + 1) // CELL_ROWS) * CELL_ROWS
    with flags.loaded(path, context=context, checkpoints=0, **options) as model:
        g, stats = model.geometry, model.stats()
        table = skewed_ids(REPLAYED_TOKENS, g.L, g.E, g.K, seed) if spec is not None else None
        routing = "the model's own" if table is None else f"replayed: {routing_facts(table, g.E)}"
        where = {"backend": stats["backend"], "device": stats["device"], "threads": stats["threads"]}
        say(f"model      {stats['file'] if spec is None else spec.name}, {g.L} layers")
        say(f"backend    {where['backend']} ({where['device']}), {where['threads']} threads")
        say(f"routing    {routing}")
        gains = []
        with replayed_by_position(model, table):
            chosen = lengths_for(pace_of(model, seed), BUDGET_S, len(acceptances), tokens, repeat)
            say(f"answers    {answers_of(len(acceptances), chosen.repeats)} of {chosen.tokens} tokens, about "
                f"{chosen.seconds:.0f} s")  # fmt: skip
            say("")
            say("acceptance   tokens/s without     with    ratio   a window  drafts accepted   "
                "window of 2, 4, 8 rows over one")  # fmt: skip
            bench = DraftGain(model, chosen.tokens, seed)
            for one in acceptances:
                gains.append(bench.measure(one, chosen.repeats))
                say(_line(gains[-1]))
    made = None if spec is None else asdict(spec)
    lengths = {"tokens": chosen.tokens, "repeats": chosen.repeats}
    found = {"spec": made, "routing": routing, "gains": [_record(x) for x in gains]}
    return lengths | where | {"model": str(stats["file"])} | found


def _record(gain: Gain) -> dict[str, Any]:
    return asdict(gain) | {"ratio": round(gain.ratio, 4)}


def _line(gain: Gain) -> str:
    from numpy import median

    one = gain.window_ms[0]
    costs = ", ".join(f"{gain.window_ms[T - 1] / one:.2f}" if gain.window_ms[T - 1] else "-" for T in (2, 4, 8))
    accepted = f"{gain.accepted} of {gain.offered}"
    return (f"{gain.acceptance:<12.2f}{median(gain.without):>17.1f}{median(gain.with_):>9.1f}{gain.ratio:>9.3f}"
            f"{gain.committed:>11.2f}  {accepted:<18}{costs}")  # fmt: skip
