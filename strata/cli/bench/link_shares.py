"""strata bench experts --fraction with --shares: decoding with few slots, by the share of the link.

For every share, slots that stay and slots that follow, on the same moving routing: tokens/s, hits, what a window waits
for, and the median window of each place after an adaptation that copied (0: the window in which copies begin, 1: the
next, ...). Before it, the share that the load chose, timed again a few times, and what threads and link read from RAM.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from strata.base.errors import need
from strata.capped_experts import TOPIC_TOKENS, CappedRun, Decoder, Token, fill, sizes, slots_of
from strata.experts_speed import orchestrator_of
from strata.memory_speed import MemoryRates, memory_rates
from strata.model import load
from strata.replay import skewed_ids
from strata.runtime.simulate import change_topics, count_windows, cut_windows
from strata.runtime.swaps import SwapRules

CHOSEN_AGAIN = 5
"""Times that the load's choice of a share is repeated."""
PLACES = 4
"""Places after an adaptation that are told apart; the last one holds all later windows."""


@dataclass(frozen=True)
class Place:
    """Windows that are the n-th behind an adaptation that copied: medians, us; copies begun in one, mean."""

    place: int
    windows: int
    window_us: float
    beside_us: float
    copies: float


@dataclass(frozen=True)
class ShareRun:
    """A share of the link with slots that stay (static) or follow (ours)."""

    share: float
    run: CappedRun
    median_us: float
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Chosen:
    """A share as the load chooses it: ms that it took, and what an expert costs the CPU, us; GB/s of the link, and of
    memory to both."""

    share: float
    ms: float
    cpu_us: float
    link_gbps: float
    memory_gbps: float


@dataclass(frozen=True)
class SharesSpeed:
    """slots in all; chosen: none if the share was given; memory: what threads and link read."""

    device: str
    threads: int
    layers: int
    experts: int
    slots: int
    expert_bytes: float
    tokens: int
    load_share: float
    memory: MemoryRates | None = None
    chosen: tuple[Chosen, ...] = ()
    runs: tuple[ShareRun, ...] = ()

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def places_of(tokens: Sequence[Token]) -> tuple[Place, ...]:
    """Windows by their distance from the last adaptation that copied; the first token only tells where sums begin."""
    found: dict[int, list[tuple[float, float, int]]] = {}
    since = None
    for before, now in pairwise(tokens):
        copies = now.copies - before.copies
        since = 0 if copies else None if since is None else since + 1
        if since is not None:
            row = now.window_us, now.beside_us - before.beside_us, copies
            found.setdefault(min(since, PLACES), []).append(row)
    return tuple(
        Place(place, len(rows), statistics.median(r[0] for r in rows), statistics.median(r[1] for r in rows),
              statistics.mean(r[2] for r in rows))
        for place, rows in sorted(found.items())
    )  # fmt: skip


def measure(
    path: str | Path,
    fraction: float,
    shares: Sequence[float],
    *,
    tokens: int = 400,
    learnt: int = 600,
    threads: int | None = None,
    context: int = 2048,
    device: str = "cuda",
    seed: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
    so_far: Callable[[SharesSpeed], None] | None = None,
) -> SharesSpeed:
    """Decode `tokens` replayed tokens with slots for a fraction of each layer's experts, with every share and with the
    one that the load chooses.

    learnt  tokens before them that make the profile      so_far  gets what is measured, whenever there is more of it
    """
    need(0 < fraction < 1, "the fraction of the experts is out of range", found=fraction, needed="above 0, below 1")
    need(tokens >= 2 and learnt >= 1, "tokens to replay are too few", found=(tokens, learnt), needed=">= 2 and >= 1")
    L, E, K = sizes(path)
    options = {"context": context, "threads": threads, "prefill": "windows", "checkpoints": 0, "experts": "pinned",
               "device": device}  # fmt: skip
    with load(path, slots=slots_of(fraction, E) * L, **options) as model:
        o = orchestrator_of(model)
        tried = (o.hybrid.share, *shares)
        found = SharesSpeed(o.device.name, o.pool.threads, L, E, sum(o.slots.counts), o.layout.total_bytes / (L * E),
                            tokens, o.hybrid.share)  # fmt: skip
        done = 0

        def add(**more: Any) -> None:
            nonlocal found, done
            found, done = replace(found, **more), done + 1
            if on_progress is not None:
                on_progress(done, 2 + 2 * len(tried))
            if so_far is not None:
                so_far(found)

        chosen = []
        for _ in range(CHOSEN_AGAIN if o.costs else 0):
            with model.turn():
                began = time.perf_counter()
                o.choose_share(model._backend.weights)
                ms = 1e3 * (time.perf_counter() - began)
            chosen.append(Chosen(o.hybrid.share, ms, o.costs.cpu_us[0], o.costs.link_gbps, o.costs.memory_gbps))
        add(chosen=tuple(chosen))
        add(memory=memory_rates(o.device, o.pool.threads))
        ids = change_topics(skewed_ids(learnt + tokens, L, E, K, seed), E, TOPIC_TOKENS, seed=seed)
        counts, decoder = count_windows(cut_windows(ids[:learnt]), L, E), Decoder(model)
        for share in tried:
            for policy, rules in (("static", SwapRules(most=0)), ("ours", None)):
                fill(o, counts, rules)
                with model.turn():
                    o.hybrid.set_share(share)
                decoder.run(ids[:learnt], min(8, learnt))  # to warm up
                each: list[Token] = []
                run = decoder.run(ids[learnt:], tokens, "moving", policy, each=each)
                median_us = statistics.median(t.window_us for t in each)
                places = places_of(each) if policy == "ours" else ()
                add(runs=(*found.runs, ShareRun(share, run, median_us, places)))
    return found


def lines(s: SharesSpeed) -> list[str]:
    """The report for people. Of a measurement that goes on, the first lines of what it will be."""
    out = [
        f"device     {s.device}, {s.threads} CPU threads, share of the link that the load chose {s.load_share:.3f}",
        f"model      {s.layers} layers of {s.experts} experts of {s.expert_bytes / 1e6:.2f} MB, {s.slots} slots "
        f"({100 * s.slots / (s.layers * s.experts):.1f} %), {s.tokens} tokens a run",
    ]
    for c in s.chosen:
        out.append(f"again      {c.share:.3f} in {c.ms:.1f} ms; CPU {c.cpu_us:.2f} us an expert, link {c.link_gbps:.1f}"
                   f" GB/s, memory to both {c.memory_gbps:.1f}")  # fmt: skip
    if s.memory is not None:
        m = s.memory
        out += [f"RAM        threads {m.threads_gbps:.1f} GB/s, link {m.link_gbps:.1f}, at once "
                f"{m.threads_beside_gbps:.1f} + {m.link_beside_gbps:.1f} = {m.both_gbps:.1f}", ""]  # fmt: skip
    for r in s.runs:
        parts = ", ".join(f"{name} {us:.0f}" for name, us in r.run.parts_us.items())
        out.append(f"share {r.share:.3f} {r.run.policy:<7}{r.run.tokens_per_s:>7.1f} tokens/s, hits "
                   f"{100 * r.run.hit_rate:.1f} %, window {r.run.window_us:.0f} us (median {r.median_us:.0f}): {parts};"
                   f" beside {r.run.beside_us:.0f}, copies {r.run.copies_per_window:.2f}")  # fmt: skip
        for p in r.places:
            more = " and later" if p.place == PLACES else ""
            out.append(f"    {p.place}{more} after copies: window {p.window_us:.0f} us, beside {p.beside_us:.0f}, "
                       f"{p.copies:.1f} copies, {p.windows} windows")  # fmt: skip
    return out
