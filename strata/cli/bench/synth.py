"""strata bench synth: a model of random weights with the real geometry, written to a folder or measured in memory."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from strata.base.errors import need
from strata.base.geometry import CELL_ROWS, CONTEXT_RESERVE
from strata.cli import flags
from strata.cli.bench.numbers import MOST, count, spread
from strata.cli.output import Bar
from strata.cpu.cores import MOST_THREADS

if TYPE_CHECKING:
    from strata.model import Model
    from strata.synth import SynthSpec

ARCHITECTURES = ("qwen4exp",)
ROUTINGS = ("replayed", "uniform", "own")
REPLAYED_TOKENS = 1024
WARM_UP_TOKENS = 8


def command(
    ctx: typer.Context,
    arch: Annotated[str, typer.Option(help="Architecture: qwen4exp.")] = "qwen4exp",
    layers: Annotated[int, typer.Option(help="Layers; the real model has 48.")] = 2,
    experts: Annotated[str, typer.Option(help="Types of the routed experts: GATE_UP/DOWN.")] = "Q4_K/IQ4_NL",
    n_experts: Annotated[int, typer.Option("--n-experts", help="Routed experts a layer.")] = 512,
    vocabulary: Annotated[int, typer.Option(help="Tokens of the vocabulary.")] = 248_320,
    out: Annotated[
        Path | None,
        typer.Option(parser=flags.path_of, metavar="PATH", help="Folder for the file; without it, it stays in memory."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens decoded in a repeat; 0: only write.")] = 64,
    prefill_tokens: Annotated[int, typer.Option(help="Prompt tokens read in a repeat; 0: none.")] = 512,
    repeat: Annotated[int, typer.Option("--repeat", "-r", help="Repeats; medians and spread are reported.")] = 3,
    routing: Annotated[str, typer.Option(help="replayed (skewed, local), uniform, or own: what the weights choose.")]
    = "replayed",
    threads: flags.Threads = None,
    seed: Annotated[int, typer.Option(help="Of weights and routing.")] = 1,
    json_: flags.Json = False,
) -> None:
    """Make a model of random weights and measure decode and prefill on it.

    Widths, vocabulary and the dense types are those of the Q2_0 release; the n-gram table is small. What experts the
    tokens ask for decides what is read from memory, so that is printed before any rate.
    """
    from strata.synth import MOST_EXPERTS, ROUTED, SynthSpec

    need(arch in ARCHITECTURES, "no such architecture", found=repr(arch), needed=", ".join(ARCHITECTURES))
    need(routing in ROUTINGS, "no such routing", found=repr(routing), needed=", ".join(ROUTINGS))
    need(tokens == 0 or 2 <= tokens <= MOST, "--tokens is out of range", found=tokens, needed=f"0, or 2 to {MOST:,}")
    need(out is not None or tokens > 0, "nothing to do", found="--tokens 0 without --out", needed="--out or tokens")
    if tokens == 0:
        flags.refuse_idle(ctx, ("prefill_tokens", "repeat", "routing", "threads"), "with --tokens 0")
    count("--repeat", repeat, 1)
    count("--prefill-tokens", prefill_tokens, 0)
    count("--threads", threads, 1, MOST_THREADS)
    count("--n-experts", n_experts, ROUTED, MOST_EXPERTS)
    spec = SynthSpec.of_types(experts, layers=layers, experts=n_experts, vocabulary=vocabulary, seed=seed)
    if tokens and routing == "replayed":
        spec.need_replayable()
    report: dict[str, Any] = {"command": " ".join(["strata", *sys.argv[1:]]), "spec": asdict(spec)}
    with _made(spec, out) as path:
        report["model"] = str(path)
        if out is not None and not json_:
            typer.echo(f"model      {path}")
        if tokens:
            report |= _measure(path, spec, tokens, prefill_tokens, repeat, routing, threads, json_)
    if json_:
        typer.echo(json.dumps(report, indent=2))


@contextlib.contextmanager
def _made(spec: SynthSpec, out: Path | None) -> Iterator[Path]:
    from strata.synth import memory_model, write_model

    with Bar("making the model", "bytes") as bar:
        if out is not None:
            path = write_model(out, spec, bar.update)
            yield path
            return
        with memory_model(spec, bar.update) as path:
            yield path


def _measure(
    path: Path, spec: SynthSpec, tokens: int, prefill_tokens: int, repeat: int, routing_name: str, threads: int | None,
    quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    from strata.measure import PROMPT_TOKENS, Speed
    from strata.replay import routing, routing_facts

    def say(text: str) -> None:
        if not quiet:
            typer.echo(text)

    cells = max(PROMPT_TOKENS + tokens, prefill_tokens) + CONTEXT_RESERVE + 1
    context = -(-cells // CELL_ROWS) * CELL_ROWS
    with flags.loaded(path, context=context, threads=threads) as model:
        text = files("strata.cli.bench").joinpath("prompt.txt").read_text(encoding="utf-8")
        bench = Speed(model, text)
        replayed = _replayed(model, routing_name, spec.seed)
        with routing(model._backend, replayed) as log:
            bench.decode(WARM_UP_TOKENS, profile=False)
            log.runs.clear()
            bench.decode(tokens, profile=False)
            decoded = np.concatenate([run for run in log.runs if len(run) == 1])
            facts = routing_facts(decoded, model.geometry.E)
            say(f"routing    {routing_name}: {facts}")
            found: dict[str, Any] = {"routing": {"kind": routing_name, **asdict(facts)}}
            rates = [1e6 / bench.decode(tokens, profile=False).wall_us for _ in range(repeat)]
            found["decode_tokens_per_s"] = spread(rates)
            say(f"decode     {_rate(found['decode_tokens_per_s'])}, {repeat} x {tokens} tokens")
            if prefill_tokens:
                log.runs.clear()
                bench.prefill(prefill_tokens)
                facts = routing_facts(log.ids, model.geometry.E)
                say(f"routing    of the prompt: {facts}")
                found["prefill_routing"] = asdict(facts)
                found["prefill_tokens_per_s"] = spread([bench.prefill(prefill_tokens) for _ in range(repeat)])
                times = found["prefill_tokens_per_s"]["median"] / found["decode_tokens_per_s"]["median"]
                found["times_decode"] = round(times, 2)
                say(f"prefill    {_rate(found['prefill_tokens_per_s'])}, {repeat} x {prefill_tokens} tokens, "
                    f"{times:.2f} times decode")  # fmt: skip
        stats = model.stats()
        found |= {"threads": stats["threads"], "backend": stats["backend"], "load_s": round(model.load_seconds, 2)}
        say(f"backend    {stats['backend']}, {stats['threads']} threads")
    return found


def _replayed(model: Model, routing_name: str, seed: int) -> np.ndarray | None:
    from strata.replay import skewed_ids, uniform_ids

    g = model.geometry
    make = {"replayed": skewed_ids, "uniform": uniform_ids}.get(routing_name)
    return None if make is None else make(REPLAYED_TOKENS, g.L, g.E, g.K, seed)


def _rate(rates: dict[str, float]) -> str:
    return f"{rates['median']:.1f} tokens/s (from {rates['min']:.1f} to {rates['max']:.1f})"
