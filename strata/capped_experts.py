"""How fast tokens come when VRAM holds a small part of the experts, as on a card of 12 GB, and what its cache hits.

Routing is replayed twice: favourites that never change, and favourites that change every few hundred tokens. The first
part of either makes the profile that fills the slots; the rest is decoded, window by window with head and commit, with
slots that stay as they are and with slots that follow. The same routing goes through the policies of the simulator,
whose oracle knows what comes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from strata.base.errors import need
from strata.base.window import HeadRequest
from strata.experts_speed import orchestrator_of
from strata.gpu_speed import replayed
from strata.model import Model, load
from strata.planner.nvml import busy_percent
from strata.replay import skewed_ids
from strata.runtime.orchestrator import Orchestrator
from strata.runtime.session import SessionState
from strata.runtime.simulate import Replay, change_topics, count_windows, cut_windows, simulate
from strata.runtime.swaps import SwapRules, counted_profile

TOPIC_TOKENS = 200
SIMULATED = ("static", "lru", "ours", "oracle")
IDLE_S, WATCHED_S = 1.0, 2.0
BUSY_TOKENS, BUSY_S = 200, 5.0
"""Of each run beside a busy thread: most tokens, and seconds after which it ends."""
INTERVALS = (0.005, 0.0005, 0.0002)
"""Switch intervals tried beside a busy thread, in s: the interpreter's own, then as docs/embedding.md advises."""


@dataclass(frozen=True)
class CappedRun:
    """`tokens` decoded with one kind of routing. hit_rate of routed entries, without the link's share in `without`;
    parts_us: of a window, see `ExpertStats.layer_us`, and `serial`: the rest of it; other_us: head, commit, Python;
    beside_us: what the host does for swaps while a window runs."""

    routing: str
    policy: str
    tokens: int
    tokens_per_s: float
    hit_rate: float
    without: float
    copies_per_window: float
    window_us: float
    other_us: float
    beside_us: float
    parts_us: dict[str, float]


class Token(NamedTuple):
    """A token's window; beside_us and copies: sums since the load, see `CappedRun`."""

    window_us: float
    beside_us: float
    copies: int


@dataclass(frozen=True)
class Simulated:
    """Policies of the simulator on one kind of routing."""

    routing: str
    policies: tuple[Replay, ...]


@dataclass(frozen=True)
class BusyRun:
    """`tokens` beside a Python thread that computes; interval_s: the interpreter's switch interval, 0: alone."""

    interval_s: float
    tokens: int
    tokens_per_s: float


@dataclass(frozen=True)
class CappedSpeed:
    """experts a layer, slots in all. idle: CPU and GPU per cent from a second after the last token on, GPU None where
    nothing tells, CPU None before it is measured."""

    device: str
    threads: int
    layers: int
    experts: int
    slots: int
    expert_bytes: float
    share: float
    tokens: int
    runs: tuple[CappedRun, ...] = ()
    simulated: tuple[Simulated, ...] = ()
    busy: tuple[BusyRun, ...] = ()
    idle_cpu: float | None = None
    idle_gpu: int | None = None

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def measure(
    path: str | Path,
    fraction: float,
    *,
    tokens: int = 1000,
    learnt: int = 1000,
    share: float | None = None,
    threads: int | None = None,
    context: int = 2048,
    device: str = "cuda",
    seed: int = 1,
    busy: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    so_far: Callable[[CappedSpeed], None] | None = None,
) -> CappedSpeed:
    """Decode `tokens` replayed tokens with slots for a fraction of each layer's experts.

    learnt  tokens before them that make the profile      share  of the link; None: as a load chooses it
    busy    also beside a Python thread that computes
    so_far  gets what is measured, whenever there is more of it
    """
    need(0 < fraction < 1, "the fraction of the experts is out of range", found=fraction, needed="above 0, below 1")
    need(tokens >= 2 and learnt >= 1, "tokens to replay are too few", found=(tokens, learnt), needed=">= 2 and >= 1")
    options = {"context": context, "threads": threads, "prefill": "windows", "checkpoints": 0, "experts": "pinned",
               "device": device, "pcie_share": share}  # fmt: skip
    steps, step = 7 + (len(INTERVALS) + 1) * busy, iter(range(1, 100))
    L, E, K = sizes(path)
    with load(path, slots=slots_of(fraction, E) * L, **options) as model:
        o = orchestrator_of(model)
        found = CappedSpeed(
            o.device.name, o.pool.threads, L, E, sum(o.slots.counts), o.layout.total_bytes / (L * E), o.hybrid.share,
            tokens,
        )  # fmt: skip

        def add(**more: Any) -> None:
            nonlocal found
            found = replace(found, **more)
            if on_progress is not None:
                on_progress(next(step), steps)
            if so_far is not None:
                so_far(found)

        add()
        steady = skewed_ids(learnt + tokens, L, E, K, seed)
        routings = {"steady": steady, "moving": change_topics(steady, E, TOPIC_TOKENS, seed=seed)}
        learnt_counts = {name: count_windows(cut_windows(ids[:learnt]), L, E) for name, ids in routings.items()}
        decoder = Decoder(model)
        for name, ids in routings.items():
            for policy, rules in (("static", SwapRules(most=0)), ("ours", None)):
                fill(o, learnt_counts[name], rules)
                add(runs=(*found.runs, decoder.run(ids[learnt:], tokens, name, policy)))
        if busy:
            table = routings["moving"][learnt:]
            alone = decoder.run(table, min(BUSY_TOKENS, tokens), limit_s=BUSY_S)
            add(busy=(BusyRun(0.0, alone.tokens, alone.tokens_per_s),))
            for interval_s in INTERVALS:
                with _computing(interval_s):
                    run = decoder.run(table, alone.tokens, limit_s=BUSY_S)
                add(busy=(*found.busy, BusyRun(interval_s, run.tokens, run.tokens_per_s)))
        idle_cpu, idle_gpu = _idle(int(model.plan.device.partition(":")[2] or 0))
        for name, ids in routings.items():
            policies = simulate(cut_windows(ids[learnt:]), learnt_counts[name], o.slots.counts, SIMULATED)
            add(simulated=(*found.simulated, Simulated(name, tuple(policies))))
        add(idle_cpu=idle_cpu, idle_gpu=idle_gpu)
    return found


def sizes(path: str | Path) -> tuple[int, int, int]:
    """Layers, experts, experts a row."""
    from strata.arch import architecture_of
    from strata.pack.gguf_file import GgufFile

    with GgufFile(path) as gguf:
        g = architecture_of(gguf).read_geometry(gguf)
    return g.L, g.E, g.K


def slots_of(fraction: float, E: int) -> int:
    """Slots of a layer for this part of its experts. BadArgument unless some experts have one, and some have none."""
    n = round(fraction * E)
    need(0 < n < E, "the fraction of the experts leaves no choice", found=f"{n} of {E}", needed=f"1 to {E - 1}")
    return n


def fill(o: Orchestrator, counts: np.ndarray, rules: SwapRules | None) -> None:
    """Empty the slots and fill them anew by counts; from now on they follow the rules (None: the usual ones)."""
    o.tiers.settle()
    for layer, expert in np.argwhere(o.tiers.resident).tolist():
        o.slots.evict(layer, expert)
    o.slots.publish()
    o.setup = replace(o.setup, profile=counted_profile(counts), rules=rules)
    o.begin()


class Decoder:
    """Decodes tokens of a model whose experts come from a table."""

    def __init__(self, model: Model):
        self._model = model
        with model.turn():
            self._session = SessionState(model._backend, model.context, checkpoints=0)

    def run(
        self, table: np.ndarray, tokens: int, routing: str = "", policy: str = "", limit_s: float = float("inf"),
        each: list[Token] | None = None,
    ) -> CappedRun:  # fmt: skip
        """Decode up to `tokens` with the experts of table (n, L, K), but end after `limit_s`. each: gets all tokens."""
        model, o, backend = self._model, orchestrator_of(self._model), self._model._backend
        token, session = np.full(1, 17, np.int32), self._session
        with model.turn(), replayed(backend, table, (1,)):
            session.clear()
            before, copies, beside_us = o.stats.copy(), o.tiers.stats()["copies"], o.beside_us
            n, took_us, began = 0, 0.0, time.perf_counter()
            while n < tokens and took_us < limit_s * 1e6:
                if session.rows + 1 > model.context:
                    session.clear()
                session.window(token)
                backend.head(0, 1, HeadRequest())
                session.commit(token, 1)
                n, took_us = n + 1, (time.perf_counter() - began) * 1e6
                if each is not None:
                    each.append(Token(o.last_window_us, o.beside_us, o.tiers.stats()["copies"]))
            spent = o.stats.copy()
            spent -= before
        parts, (hit_rate, without) = spent.layer_us(), spent.hit_rates()
        window_us = spent.window_us / n
        parts["serial"] = window_us - sum(parts.values())
        copies = o.tiers.stats()["copies"] - copies
        return CappedRun(routing, policy, n, 1e6 * n / took_us, hit_rate, without, copies / n, window_us,
                         took_us / n - window_us, (o.beside_us - beside_us) / n, parts)  # fmt: skip


@contextlib.contextmanager
def _computing(interval_s: float) -> Iterator[None]:
    """A Python thread computes, with this switch interval."""
    stop, before = threading.Event(), sys.getswitchinterval()

    def compute() -> None:
        n = 0
        while not stop.is_set():
            n = (n * 3 + 1) % 1000003

    thread = threading.Thread(target=compute, name="busy", daemon=True)
    sys.setswitchinterval(interval_s)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)


def _idle(gpu: int) -> tuple[float, int | None]:
    """Per cent of a CPU, and of GPU number `gpu`, that this process takes from a second after its last window on."""
    time.sleep(IDLE_S)
    began, spent = time.perf_counter(), time.process_time()
    time.sleep(WATCHED_S)
    cpu = 100 * (time.process_time() - spent) / (time.perf_counter() - began)
    return cpu, busy_percent(gpu)
