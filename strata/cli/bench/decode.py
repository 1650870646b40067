"""strata bench decode: tokens/s of decode and prefill, and where a token's time goes."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from dataclasses import asdict
from importlib.metadata import version as version_of
from importlib.resources import files
from typing import Annotated, Any

import typer

import strata
from strata.base.errors import need
from strata.base.geometry import CELL_ROWS, CONTEXT_RESERVE
from strata.cli import flags
from strata.cli.bench.numbers import count, spread
from strata.cli.experts_text import expert_lines
from strata.cli.output import Bar, working
from strata.measure import KINDS, PROMPT_TOKENS, DraftingSpeed, Pair, Sample, Speed
from strata.planner.machine import Machine

WARM_UP_TOKENS = 32


@flags.takes(load=flags.LOAD_AND_DRAFT | {"draft": (flags.Draft, "auto")})
def command(
    model: flags.Model = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens decoded in a repeat.")] = 256,
    prefill_tokens: Annotated[int, typer.Option(help="Prompt tokens read in a repeat.")] = 1024,
    repeat: Annotated[int, typer.Option("--repeat", "-r", help="Repeats; medians and spread are reported.")] = 5,
    ops: Annotated[bool, typer.Option("--ops", help="Add the time of each kind of op.")] = False,
    *,
    load: flags.Options,
    json_: flags.Json = False,
) -> None:
    """Measure greedy decode (without drafts) and prefill of a stored text, and split a token's time. Then decode code,
    prose and unpredictable text without and with drafts, windows taking turns.

    kernels: compiled ops. join: handing jobs to threads and collecting them, as jobs a token times the measured
    overhead of a job of equal chunks; waiting for a thread that has more to do counts as kernels. text: tokens to
    characters, stop strings. Python: everything else, in the backend's entry points and in the generate loop.
    On a GPU the device's time is that of the backend's entry points; `strata bench gpu` looks into it.
    Drafting: tokens/s are medians of the repeats, and ratio is the one over the other. pairs: in a repeat the answer is
    decoded without and with drafts side by side, and this is the median of their ratios, with the smallest and the
    largest; it leaves out what changes between repeats. CPU: the same by CPU seconds of all threads, which says more
    where other programs use the machine.
    """
    count("--tokens", tokens, 2)
    count("--prefill-tokens", prefill_tokens, 2)
    count("--repeat", repeat, 1)
    cells = max(PROMPT_TOKENS + tokens, prefill_tokens) + CONTEXT_RESERVE + 1
    context = load["context"] if load["context"] is not None else -(-cells // CELL_ROWS) * CELL_ROWS
    need(context >= cells, "--context is too small for this bench", found=context, needed=f">= {cells}")
    load_average = os.getloadavg()[0]
    with flags.loaded(model, **load | {"context": context}) as loaded:
        text = _stored("prompt.txt")
        bench = Speed(loaded, text)
        with working("warming up"):
            for profile_ops in (False, True):  # the clocks of steps are compiled on their first run
                bench.decode(WARM_UP_TOKENS, profile=profile_ops)
            bench.prefill(min(prefill_tokens, 2 * CELL_ROWS))
        with Bar("measuring", "repeats") as bar:
            plain, split, reading = [], [], []
            for i in range(repeat):
                bar.update(i, repeat)
                plain.append(bench.decode(tokens, profile=False))
                split.append(bench.decode(tokens, profile=True))
                reading.append(bench.prefill(prefill_tokens))
        drafting = None if loaded.policy is None else _drafting(loaded, tokens, repeat)
        report = {
            "command": " ".join(["strata", *sys.argv[1:]]),
            "model": str(loaded.stats()["file"]),
            "backend": loaded.stats()["backend"],
            "threads": loaded.stats()["threads"],
            "kv": loaded.kv,
            "context": loaded.context,
            "load_s": round(loaded.load_seconds, 2),
            "machine": _machine() | {"load_average_before": round(load_average, 2)},
            "versions": _versions(),
            "decode": {
                "tokens": tokens,
                "repeats": repeat,
                "tokens_per_s": spread([1e6 / s.wall_us for s in plain]),
                "cpu_threads_busy": round(statistics.median(s.busy for s in plain), 2),
                "us_per_token": _split(split),
                "shared_us_per_token": _shared(split),
                "profiled_tokens_per_s": spread([1e6 / s.wall_us for s in split]),
                "jobs_per_token": round(statistics.median(s.jobs for s in split), 1),
                "job_overhead_us": round(bench.overhead_us, 3),
            },
            "prefill": {"tokens": prefill_tokens, "mode": load["prefill"], "tokens_per_s": spread(reading)},
            "ops_us_per_token": _ops(split),
            "experts": loaded.stats()["experts"],
            "drafting": drafting,
        }
    typer.echo(json.dumps(report, indent=2) if json_ else "\n".join(_text(report, ops)))


def _stored(name: str) -> str:
    return files("strata.cli.bench").joinpath(name).read_text(encoding="utf-8")


def _drafting(model: Any, tokens: int, repeat: int) -> dict[str, Any]:
    """Speed without and with drafts, by kind of text. The first answer of each kind only teaches the policy."""
    names = {"code": "prompt.txt", "prose": "prose.txt"}
    bench = DraftingSpeed(model, {kind: model.tokenize(_stored(name), special=False) for kind, name in names.items()})
    pairs: dict[str, list[Pair]] = {kind: [] for kind in KINDS}
    with Bar("drafting", "answers") as bar:
        for number in range(repeat + 1):
            for place, kind in enumerate(KINDS):
                bar.update(number * len(KINDS) + place, (repeat + 1) * len(KINDS))
                pairs[kind].append(bench.pair(kind, number, tokens))
    facts = model.stats()["drafting"]
    known = {name: facts[name] for name in ("drafters", "window_ms", "one_draft_ms", "asking_ms", "probe_share")}
    return known | {"texts": {kind: _pairs(found[1:]) for kind, found in pairs.items()}}


# ---- report


def _pairs(pairs: list[Pair]) -> dict[str, Any]:
    windows = sum(p.drafts["windows"] for p in pairs)
    committed = sum(p.drafts["committed_per_window"] * p.drafts["windows"] for p in pairs)
    sources: dict[str, dict[str, int]] = {}
    for pair in pairs:
        for source, places in pair.drafts["by_source"].items():
            entry = sources.setdefault(source, {"offered": 0, "accepted": 0})
            for key in entry:
                entry[key] += sum(places[key])
    return {
        "without_tokens_per_s": spread([p.per_s[0] for p in pairs]),
        "with_tokens_per_s": spread([p.per_s[1] for p in pairs]),
        "ratio": round(_median_rate(pairs, 1) / _median_rate(pairs, 0), 3),
        "pair_ratio": spread([p.speedup[0] for p in pairs], 3),
        "pair_cpu_ratio": spread([p.speedup[1] for p in pairs], 3),
        "committed_per_window": round(committed / windows, 2),
        "draft_ms_per_window": round(sum(p.drafts["draft_ms"] for p in pairs) / windows, 3),
        "by_source": {s: e | {"rate": round(e["accepted"] / e["offered"], 3)} for s, e in sources.items()},
    }


def _median_rate(pairs: list[Pair], which: int) -> float:
    return statistics.median(p.per_s[which] for p in pairs)


def _split(samples: list[Sample]) -> dict[str, float]:
    """The split of the repeat whose wall time is the median, so that the parts add up."""
    middle = sorted(samples, key=lambda s: s.wall_us)[len(samples) // 2]
    return {name: round(us, 2) for name, us in middle.parts().items()}


def _shared(samples: list[Sample]) -> dict[str, float] | None:
    """The same where experts are shared with the CPU."""
    middle = sorted(samples, key=lambda s: s.wall_us)[len(samples) // 2]
    return {name: round(us, 2) for name, us in middle.shared_parts().items()} if middle.experts else None


def _ops(samples: list[Sample]) -> dict[str, float]:
    medians = {kind: statistics.median(s.ops[kind] for s in samples) for kind in samples[0].ops}
    return {kind: round(us, 2) for kind, us in sorted(medians.items(), key=lambda item: -item[1]) if us > 0}


def _machine() -> dict[str, Any]:
    here = asdict(Machine.here(measure=False))
    return {name: here[name] for name in ("cpu_name", "physical_cores", "logical_cores", "usable_cores")}


def _versions() -> dict[str, str]:
    names = ("numpy", "numba", "llvmlite")
    return {"strata": strata.__version__, "python": platform.python_version(), **{n: version_of(n) for n in names}}


def _text(report: dict[str, Any], ops: bool) -> list[str]:
    machine, decode, reading = report["machine"], report["decode"], report["prefill"]
    parts = decode["us_per_token"]
    versions = ", ".join(f"{name} {v}" for name, v in report["versions"].items())
    lines = [
        f"command    {report['command']}",
        f"model      {report['model']}",
        f"machine    {machine['cpu_name']}, {machine['physical_cores']} cores ({machine['usable_cores']} usable), "
        f"load average {machine['load_average_before']} before",
        f"backend    {report['backend']}, {report['threads']} threads, kv {report['kv']}, context {report['context']}",
        f"versions   {versions}",
        "",
        f"decode     {_rate(decode['tokens_per_s'])}, {decode['repeats']} x {decode['tokens']} tokens, "
        f"{decode['cpu_threads_busy']} CPUs busy",
        f"prefill    {_rate(reading['tokens_per_s'])}, {decode['repeats']} x {reading['tokens']} tokens "
        f"({reading['mode']})",
        "",
        f"one token  {parts['wall']:.0f} us while profiled ({_rate(decode['profiled_tokens_per_s'])})",
    ]
    jobs = f"{decode['jobs_per_token']:.0f} jobs of {decode['job_overhead_us']:.2f} us"
    python = parts["python_backend"] + parts["python_loop"]
    on_device = " with the device's time" if report["backend"] == "gpu" else ""
    inside = f"backend entry {parts['python_backend']:.0f} us{on_device}, loop {parts['python_loop']:.0f} us"
    for name, us, detail in (("kernels", parts["kernels"], ""), ("join", parts["join"], jobs),
                             ("Python", python, inside), ("text", parts["text"], "")):  # fmt: skip
        lines.append(f"  {name:<9}{us:>9.1f} us  {100 * us / parts['wall']:>5.1f} %  {detail}".rstrip())
    if decode["shared_us_per_token"] is not None:
        lines += ["", *_shared_text(decode["shared_us_per_token"]), "", *expert_lines(report["experts"])]
    if report["drafting"] is not None:
        lines += ["", *_drafting_text(report["drafting"])]
    if ops:
        lines += ["", "op (join included)"]
        lines += [f"  {kind:<18}{us:>9.1f} us" for kind, us in report["ops_us_per_token"].items()]
    return lines


def _shared_text(parts: dict[str, float]) -> list[str]:
    lines = ["experts shared with the CPU; parts of a token"]
    lines += [f"  {name:<22}{us:>10.1f} us  {100 * us / parts['wall']:>5.1f} %" for name, us in parts.items()]
    return lines


def _drafting_text(drafting: dict[str, Any]) -> list[str]:
    probes = f"probes {100 * drafting['probe_share']:.1f} % of the time"
    lines = [f"drafting   {' and '.join(drafting['drafters'])}; {probes}"]
    lines.append("           tokens/s without     with  ratio  pairs (from, to)       CPU    a window  drafts accepted")
    for kind, found in drafting["texts"].items():
        rates = ", ".join(f"{s} {e['accepted']} of {e['offered']}" for s, e in found["by_source"].items()) or "none"
        without, with_ = found["without_tokens_per_s"]["median"], found["with_tokens_per_s"]["median"]
        pairs, cpu = found["pair_ratio"], found["pair_cpu_ratio"]["median"]
        lines.append(f"  {kind:<15}{without:>10.1f}{with_:>9.1f}{found['ratio']:>7.3f}  {pairs['median']:.3f} "
                     f"({pairs['min']:.3f}, {pairs['max']:.3f})  {cpu:>6.3f}{found['committed_per_window']:>10.2f}  "
                     f"{rates}")  # fmt: skip
    return lines


def _rate(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1f} tokens/s (from {spread['min']:.1f} to {spread['max']:.1f})"
