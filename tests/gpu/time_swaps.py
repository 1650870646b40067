"""Times decoding with few slots: python -m tests.gpu.time_swaps [TYPES [THREADS [TOKENS [SHARES]]]]

For some shares of the link, slots that stay and slots that follow, on the same moving routing: tokens/s, hits, what a
window waits for, and the median window of each place after an adaptation that copied (0: the window in which copies
begin, 1: the next, ...), with the host's time beside the window. Before it, what threads and link read from RAM.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.base.window import HeadRequest
from strata.capped_experts import TOPIC_TOKENS, _fill
from strata.cli.bench.gpu import DISTINCT_PIECES, model_path
from strata.experts_speed import orchestrator_of
from strata.gpu_speed import replayed
from strata.memory_speed import memory_rates
from strata.model import load
from strata.replay import skewed_ids
from strata.runtime.session import SessionState
from strata.runtime.simulate import change_topics, count_windows, cut_windows
from strata.runtime.swaps import SwapRules
from strata.synth import SynthSpec

FRACTION = 0.18


def decode(model: Any, session: SessionState, table: np.ndarray, tokens: int) -> list[tuple[float, float, int]]:
    """(us of the window, us of the host beside it, copies begun meanwhile) of every token."""
    o, backend, token, out = orchestrator_of(model), model._backend, np.full(1, 17, np.int32), []
    with model.turn(), replayed(backend, table, (1,)):
        session.clear()
        for _ in range(tokens):
            beside, copies = o.beside_us, o.tiers.stats()["copies"]
            session.window(token)
            backend.head(0, 1, HeadRequest())
            session.commit(token, 1)
            out.append(((o._ended - o._began) * 1e6, o.beside_us - beside, o.tiers.stats()["copies"] - copies))
    return out


def phases(rows: list[tuple[float, float, int]]) -> str:
    """Median window by its distance from the last adaptation that copied."""
    found: dict[int, list[tuple[float, float, int]]] = {}
    since = -1
    for row in rows:
        since = 0 if row[2] else since + 1 if since >= 0 else -1
        if since >= 0:
            found.setdefault(min(since, 4), []).append(row)
    return "  ".join(
        f"{k}: {statistics.median(r[0] for r in v):.0f} us, beside {statistics.median(r[1] for r in v):.0f}, "
        f"{statistics.mean(r[2] for r in v):.1f} copies (n {len(v)});"
        for k, v in sorted(found.items())
    )


def report(model: Any, n: int, shares: Sequence[float]) -> None:
    learnt = 600
    o, g = orchestrator_of(model), model.geometry
    print(f"share of this load {o.hybrid.share:.3f}, by {o.costs}")
    for _ in range(5 if o.costs else 0):
        with model.turn():
            began = time.perf_counter()
            o.choose_share(model._backend.weights)
            took_ms = 1e3 * (time.perf_counter() - began)
        print(f"again: {o.hybrid.share:.3f} in {took_ms:.1f} ms, CPU {o.costs.cpu_us[0]:.2f} us, link "
              f"{o.costs.link_gbps:.1f} GB/s, both {o.costs.memory_gbps:.1f}")  # fmt: skip
    r = memory_rates(o.device, o.pool.threads)
    print(f"RAM, GB/s: threads {r.threads_gbps:.1f}, link {r.link_gbps:.1f}, at once "
          f"{r.threads_beside_gbps:.1f} + {r.link_beside_gbps:.1f} = {r.both_gbps:.1f}")  # fmt: skip
    ids = change_topics(skewed_ids(learnt + n, g.L, g.E, g.K, 1), g.E, TOPIC_TOKENS, seed=1)
    counts = count_windows(cut_windows(ids[:learnt]), g.L, g.E)
    with model.turn():
        session = SessionState(model._backend, model.context, checkpoints=0)
    for share in (o.hybrid.share, *shares):
        for policy, rules in (("static", SwapRules(most=0)), ("ours", None)):
            _fill(o, counts, rules)
            with model.turn():
                o.hybrid.set_share(share)
            decode(model, session, ids[:learnt], 8)
            before, began = o.stats.copy(), time.perf_counter()
            rows = decode(model, session, ids[learnt:], n)
            took = time.perf_counter() - began
            spent = o.stats.copy()
            spent -= before
            parts = " ".join(f"{k} {v:.0f}" for k, v in spent.layer_us().items())
            print(f"share {share:.3f} {policy:<7} {n / took:6.1f} tokens/s  hits {spent.hit_rates()[0]:.3f}  "
                  f"window {spent.window_us / n:.0f} (median {statistics.median(r[0] for r in rows):.0f})  "
                  f"{parts}  beside {sum(r[1] for r in rows) / n:.0f}  "
                  f"copies {sum(r[2] for r in rows) / n:.2f}")  # fmt: skip
            if policy == "ours":
                print("      ", phases(rows))
            sys.stdout.flush()


def main(types: str = "Q2_0/Q2_0", threads: str = "14", tokens: str = "400", shares: str = "0,0.2,0.3,0.4,0.5") -> None:
    spec = SynthSpec.of_types(types, layers=12, experts=512, vocabulary=32_768, seed=1, distinct_pieces=DISTINCT_PIECES)
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(model_path(None, spec, None))
        model = stack.enter_context(load(path, slots=round(FRACTION * 512) * 12, context=2048, threads=int(threads),
                                         prefill="windows", checkpoints=0, experts="pinned",
                                         device="cuda"))  # fmt: skip
        report(model, int(tokens), [float(x) for x in shares.split(",")])


if __name__ == "__main__":
    main(*sys.argv[1:])
