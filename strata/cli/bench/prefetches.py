"""The part of strata bench cpu-kernels that compares prefetches: which are measured, and how they are reported."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from strata.base.errors import need
from strata.cli.output import Bar
from strata.cpu.gemv.prefetch import Prefetch, prefetch_of
from strata.cpu.gemv.rows import MOST_ROWS
from strata.cpu.tiers import PORTABLE
from strata.kernel_speed import KernelBench
from strata.layer_speed import LayerBench
from strata.pack.formats import FORMATS, by_name
from strata.prefetch_speed import AGAIN, OWN, Turns, time_kernels, time_layers
from strata.synth import SynthSpec


def _wanted(text: str, rows: Sequence[int], tier: int, types: Iterable[str]) -> list[Prefetch]:
    """The prefetches of --prefetch, each once. BadArgument if kernels of these rows, tier or types take none."""
    need(tier != PORTABLE, "--prefetch does nothing in tier 0", found=f"tier {tier}", needed="tier 512 or 256")
    need(max(rows) <= MOST_ROWS, "--rows is out of range with --prefetch", found=max(rows), needed=f"1 to {MOST_ROWS}")
    others = [name for name in types if not by_name(name).group]
    need(not others, "--prefetch is for quantised matrices", found=", ".join(others), needed="quantised types")
    return list(dict.fromkeys(prefetch_of(word.strip()) for word in text.split(",")))


def kernels(names: list[str], columns: int, rows: list[int], counts: list[int], tier: int, n_bytes: int, text: str,
            rounds: int) -> list[dict[str, Any]]:  # fmt: skip
    """Kernels of these formats, or all quantised ones, as `prefetch_speed.time_kernels`. text: of --prefetch."""
    names = names or [f.name for f in FORMATS.values() if f.group]
    wanted = _wanted(text, rows, tier, names)
    for name in names:
        block = by_name(name).block_values
        need(columns % block == 0, f"--columns does not fit {name}", found=columns, needed=f"a multiple of {block}")
    found: list[Turns] = []
    with KernelBench(tier, 1, n_bytes, columns) as bench, Bar("measuring", "formats") as bar:
        for i, name in enumerate(names):
            bar.update(i, len(names))
            for R in rows:
                found += time_kernels(bench, by_name(name), R, counts, wanted, rounds)
    return [_record(turns) for turns in found]


def layers(types: list[str], rows: list[int], counts: list[int], tier: int, n_bytes: int, text: str,
           rounds: int) -> list[dict[str, Any]]:  # fmt: skip
    """Whole layers of these types, as `prefetch_speed.time_layers`. text: of --prefetch."""
    specs = [SynthSpec.of_types(name) for name in types]
    wanted = _wanted(text, rows, tier, [kind for spec in specs for kind in (spec.gate_up, spec.down)])
    found: list[Turns] = []
    with Bar("measuring", "layers") as bar:
        for i, name in enumerate(types):
            bar.update(i, len(types))
            with LayerBench(name, tier, n_bytes) as bench:
                for R in rows:
                    found += time_layers(bench, R, counts, wanted, rounds)
    return [_record(turns) for turns in found]


def _record(turns: Turns) -> dict[str, Any]:
    choices = {}
    for name, rates in turns.gbps.items():
        ratio = {k: round(v, 3) for k, v in asdict(turns.ratio(name)).items()}
        choices[name] = {"gbps": round(statistics.median(rates), 2), "ratio": ratio, "verdict": turns.verdict(name)}
    return {"what": turns.what, "rows": turns.R, "threads": turns.threads, "prefetches": choices}


def lines_of(found: Sequence[dict[str, Any]]) -> list[str]:
    """A table for each number of threads, what was measured by prefetches; below, what holds for all of it."""
    lines = ["", "GB/s of weights, and over that of the kernels' own prefetches: median (middle half of the rounds);",
             f"+ and -: beyond the middle half of {AGAIN!r}"]  # fmt: skip
    by_threads: dict[int, list[dict]] = defaultdict(list)
    for one in found:
        by_threads[one["threads"]].append(one)
    for threads, rows in sorted(by_threads.items()):
        lines += ["", f"{threads} thread{'s' * (threads > 1)}"]
        for one in rows:
            own = one["prefetches"][OWN]["gbps"]
            lines.append(f"  {one['what']}, {one['rows']} row{'s' * (one['rows'] > 1)}: {own:.1f} GB/s")
            for name, choice in one["prefetches"].items():
                if name != OWN:
                    lines.append(f"    {name:<18}{_ratio(choice)}")
        lines += ["  all of them: least and middle of the medians, how many are better and worse"]
        for name in rows[0]["prefetches"]:
            if name != OWN:
                lines.append(f"    {name:<18}{_summary([one['prefetches'][name] for one in rows])}")
    return lines


def _ratio(choice: dict[str, Any]) -> str:
    r, mark = choice["ratio"], {"better": " +", "worse": " -"}.get(choice["verdict"], "")
    return f"{choice['gbps']:>7.1f}{r['median']:>7.3f} ({r['low']:.3f} to {r['high']:.3f}){mark}"


def _summary(choices: Sequence[dict[str, Any]]) -> str:
    medians = [c["ratio"]["median"] for c in choices]
    better, worse = (sum(c["verdict"] == verdict for c in choices) for verdict in ("better", "worse"))
    return f"{min(medians):>7.3f}{statistics.median(medians):>7.3f}   {better} better, {worse} worse of {len(choices)}"
