"""Calibration: what experts cost on this machine, which settings that suggests, and whether they are faster.

A suggestion is kept only if windows with and without it, taking turns, show a gain that is larger than the turns
differ. Costs alone would suggest settings that other work of the machine, its clocks or its memory do not honour.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from strata.base.errors import StrataError, need
from strata.base.program import Op
from strata.base.trials import LEAST_GAIN, LEAST_TURNS
from strata.base.window import HeadRequest
from strata.model import Model, load
from strata.planner.estimate import JOIN_US
from strata.planner.facts import ModelFacts
from strata.planner.machine import Gpu, Machine
from strata.planner.memory import choose_device, facts_of
from strata.planner.options import PlanOptions
from strata.planner.remembered import Settings
from strata.planner.split import Split, SplitCosts, choose_split, cpu_line
from strata.runtime.session import SessionState

TRIMMED_FROM = 7
"""From so many turns on, the largest and the smallest gain do not count for the spread; with fewer noise would pass."""

CONTEXT = 512
WARM_UP = 2

Timer = Callable[[], float]
"""Runs some windows and returns the ms that one took."""

Say = Callable[[str], None]


# ---- costs


@dataclass(frozen=True)
class ExpertTimes:
    """us that the CPU takes for one expert of a layer, all threads together, wanted by one row and by eight."""

    threads: int
    one_us: float
    eight_us: float


def measure_experts(model: Model, windows: int = 6, seed: int = 1) -> ExpertTimes:
    """Time the experts op of a model on the CPU, over other experts in every layer and window.

    The model's own weights in their place in memory, its own threads. Medians over windows; nothing is committed.
    """
    g = model.geometry
    need(windows >= 1, "windows to measure are out of range", found=windows, needed=">= 1")
    if model.stats()["backend"] != "cpu":
        raise StrataError("experts are timed on the CPU backend", found=model.stats()["backend"], needed="cpu")
    rng = np.random.default_rng(seed)
    arrays = model._backend.memory.arrays
    per_layer = g.K + g.shared_width / g.F  # the op computes the shared expert too
    found = {}
    with model.turn():
        session = SessionState(model._backend, model.context, checkpoints=0)
        for rows in (1, 8):
            times = []
            began = 0.0

            def after(op: Op, rows: int = rows) -> None:
                nonlocal began, spent
                if op.kind == "experts":
                    spent += time.perf_counter() - began
                elif op.kind == "router":
                    arrays["moe.ids"][:rows] = rng.choice(g.E, g.K, replace=False)
                    arrays["moe.weights"][:rows] = 1 / g.K
                began = time.perf_counter()

            for window in range(-1, windows):
                spent = 0.0
                tokens = rng.integers(0, g.V, rows).astype(np.int32)
                model._backend.window(session.state, tokens, session.previous, after)
                if window >= 0:
                    times.append(spent * 1e6 / (g.L * per_layer))
            found[rows] = statistics.median(times)
    return ExpertTimes(model.stats()["threads"], found[1], found[8])


def split_costs(facts: ModelFacts, experts: ExpertTimes, gpu: Gpu, link_gbps: float, memory_gbps: float) -> SplitCosts:
    """Costs of the model's mean expert. The GPU's own time is that of reading the expert from VRAM."""
    n_bytes = facts.experts_bytes / (facts.geometry.L * facts.geometry.E)
    return SplitCosts(
        cpu_us=cpu_line(experts.one_us, experts.eight_us),
        expert_bytes=n_bytes,
        link_gbps=link_gbps,
        gpu_us=n_bytes / gpu.vram_gbps / 1e3,
        join_us=JOIN_US,
        memory_gbps=memory_gbps,
    )


# ---- comparing


@dataclass(frozen=True)
class Trial:
    """Windows with two settings, in ms, medians of turns.

    spread  by how much the gains of single turns differ, as a share of the time like `gain`
    gain    share of the time saved by the candidate; kept only if it exceeds 3 % and the spread
    """

    candidate: Settings
    base_ms: float
    candidate_ms: float
    spread: float

    @property
    def gain(self) -> float:
        return 1 - self.candidate_ms / self.base_ms

    @property
    def kept(self) -> bool:
        return self.gain >= LEAST_GAIN and self.gain > self.spread


def compare(base: Timer, candidate: Timer, turns: int) -> tuple[float, float, float]:
    """(base, candidate, spread): median ms of windows with either, and how far the turns' gains lie apart.

    Turn about: base first in one turn, the candidate first in the next, so that a machine that gets slower or faster
    meanwhile does so for both.
    """
    need(turns >= LEAST_TURNS, "turns are out of range", found=turns, needed=f">= {LEAST_TURNS}",
         advice="Fewer do not tell a gain from noise.")  # fmt: skip
    ms: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            ms[which].append((base, candidate)[which]())
    gains = sorted(1 - c / b for b, c in zip(*ms, strict=True))
    if turns >= TRIMMED_FROM:
        gains = gains[1:-1]
    return statistics.median(ms[0]), statistics.median(ms[1]), gains[-1] - gains[0]


Opener = Callable[[Settings], contextlib.AbstractContextManager[Timer]]
"""opener(settings) -> within the context, a timer of windows with those settings."""


def try_settings(candidates: Sequence[Settings], opener: Opener, turns: int) -> tuple[Settings, list[Trial]]:
    """The best of `Settings()` and the candidates, each compared with the best so far and kept as `Trial` says."""
    best, trials = Settings(), []
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(opener(best))
        for candidate in candidates:
            with contextlib.ExitStack() as own:
                timer = own.enter_context(opener(candidate))
                trials.append(Trial(candidate, *compare(base, timer, turns)))
                if trials[-1].kept:
                    stack.close()
                    best, base = candidate, timer
                    stack.push(own.pop_all())
    return best, trials


def worker_counts(default: int) -> list[int]:
    """Numbers of CPU threads to try against the default: two thirds, a half, a quarter of it."""
    tried = (round(default * 2 / 3), default // 2, default // 4)
    return [n for n in dict.fromkeys(tried) if 1 <= n < default]


class WindowTimer:
    """Decodes windows of one row over random tokens and commits them, as an answer does."""

    def __init__(self, model: Model, windows: int, seed: int = 1):
        self._model, self._windows, self._rng = model, windows, np.random.default_rng(seed)
        with model.turn():
            self._session = SessionState(model._backend, model.context, checkpoints=0)
        self._run(WARM_UP)

    def _run(self, windows: int) -> float:
        session, backend = self._session, self._model._backend
        began = time.perf_counter()
        with self._model.turn():
            for _ in range(windows):
                if session.rows + 1 >= self._model.context:
                    session.clear()
                token = self._rng.integers(0, self._model.geometry.V, 1).astype(np.int32)
                session.window(token)
                backend.head(0, 1, HeadRequest())
                session.commit(token, 1)
        return (time.perf_counter() - began) * 1e3 / windows

    def __call__(self) -> float:
        # Workers of the other setting's pool may still spin, and this one's sleep: one window is not counted.
        self._run(1)
        return self._run(self._windows)


# ---- all of it


@dataclass(frozen=True)
class Calibration:
    """What was measured, suggested and kept. link_gbps, split: None without a GPU. notes: what was not tried, and why.
    """

    file: str
    device: str
    experts: ExpertTimes
    memory_gbps: float
    link_gbps: float | None
    split: Split | None
    trials: list[Trial]
    settings: Settings
    notes: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Plain values."""
        suggested = None if self.split is None else {"pcie_num": self.split.pcie_num, "gain": self.split.gain,
                                                     "branches_us": asdict(self.split.chosen)}  # fmt: skip
        trials = [asdict(t) | {"gain": t.gain, "kept": t.kept} for t in self.trials]
        return asdict(self) | {"split": suggested, "trials": trials}


def calibrate(
    path: str | Path, *, machine: Machine | None = None, windows: int = 16, turns: int = 7, device: str = "auto",
    say: Say = lambda text: None,
) -> Calibration:  # fmt: skip
    """Measure a model file on this machine and try what that suggests. `say` gets a line before each step.

    Without a GPU, numbers of CPU threads are tried. With one that shares its experts with the CPU, the share of the
    link. turns: of each comparison, LEAST_TURNS or more. Nothing is kept on disk; see `strata.planner.remembered`.
    Raises what `strata.load` raises.
    """
    need(turns >= LEAST_TURNS and windows >= 1, "turns or windows are out of range", found=f"{turns} and {windows}",
         needed=f">= {LEAST_TURNS} and >= 1")  # fmt: skip
    machine = machine or Machine.here(path, measure=True)
    gpu = choose_device(machine, PlanOptions(device=device))
    options = {"context": CONTEXT, "checkpoints": 0}
    notes: list[str] = []
    say("timing experts on the CPU")
    with load(path, device="cpu", **options) as model:
        experts = measure_experts(model)
        facts, default, hit_rate = facts_of(model._gguf, model.geometry, None), model.stats()["threads"], 0.0
    link = split = None
    trials: list[Trial] = []
    settings, used = Settings(), "cpu"
    if gpu is not None:
        say("timing the link")
        link = _link(gpu, notes)
    if gpu is not None and link is not None:
        with load(path, device=device, **options) as model:
            used = model.plan.device
            hybrid = getattr(model._backend, "hybrid", None)
            if model.plan.estimate is not None:
                hit_rate = model.plan.estimate.hit_rate
            costs = split_costs(facts, experts, gpu, link, machine.ram_gbps)
            K = model.geometry.K
            split = choose_split(costs, K * (1 - hit_rate), 1.0, K * hit_rate)
            if hybrid is not None:
                say("comparing shares of the link")
                settings, trials = _try_shares(model, hybrid, split, windows, turns)
            elif used != "cpu":
                notes.append("VRAM holds every expert: there is no share to choose")
    if used == "cpu":
        counts = worker_counts(default)
        if not counts:
            notes.append(f"{default} thread: there is no smaller number to try")

        @contextlib.contextmanager
        def opener(chosen: Settings) -> Iterator[Timer]:
            say(f"windows with {chosen.threads or default} threads")
            with load(path, device="cpu", threads=chosen.threads, **options) as model:
                yield WindowTimer(model, windows)

        if counts:
            settings, trials = try_settings([Settings(threads=n) for n in counts], opener, turns)
    return Calibration(str(path), used, experts, machine.ram_gbps, link, split, trials, settings, notes)


def _link(gpu: Gpu, notes: list[str]) -> float | None:
    from strata.gpu.link_speed import link_gbps

    try:
        return link_gbps(gpu.index)
    except StrataError as error:
        notes.append(f"{gpu.name} is not used: {error}")
        return None


def _try_shares(model: Model, hybrid: Any, split: Split, windows: int, turns: int) -> tuple[Settings, list[Trial]]:
    """The model's share against the suggested one and half of it, between windows of one model."""
    usual = hybrid.share
    timer = WindowTimer(model, windows)

    @contextlib.contextmanager
    def opener(chosen: Settings) -> Iterator[Timer]:
        share = usual if chosen.pcie_num is None else chosen.pcie_num / 256

        def timed() -> float:
            with model.turn():
                hybrid.set_share(share)
            return timer()

        yield timed

    tried = dict.fromkeys((split.pcie_num, split.pcie_num // 2, 0))
    candidates = [Settings(pcie_num=n) for n in tried if n != round(usual * 256)]
    return try_settings(candidates, opener, turns)
