"""How fast windows are when experts are shared between GPU, link and CPU, beside the bound that their parts set.

Routing is replayed, since random weights would send all tokens to the same experts; nothing is committed, so nothing
is swapped meanwhile. The parts are measured alone: windows whose experts are all hits, windows that the CPU serves
alone, and windows whose experts all come over the link. What a window then should take is

    serial + sum over layers of max(hits, link, CPU, RAM) + joins

where RAM is what reading the experts of link and CPU takes at the rate of memory, which both share: the most that
threads and link read, alone or at once. What a window takes beyond that is lost to running them side by side, and to
the fixed part of a request, which the parts alone spread over more experts. The same without RAM is told too: where it
takes more from memory than there is, no window comes near it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strata.base.errors import StrataError, need
from strata.base.geometry import WINDOW_ROWS
from strata.gpu_speed import TOKENS, replayed
from strata.memory_speed import MemoryRates, memory_rates
from strata.model import Model, load
from strata.replay import uniform_ids
from strata.runtime.expert_stats import ExpertStats
from strata.runtime.orchestrator import Orchestrator, TieredBackend

SHARES = (0.0, 0.25, 0.5, 0.75)
REPLAYED_TOKENS = 1024
WARM_UP = 4


@dataclass(frozen=True)
class Run:
    """Windows of one setting; per window, means over them, times in us, but wall_us, which is the median of the calls.

    serial_us   outside of the layers' parts that are shared: from the launch to the end, without them
    shared_us   from the decisions to the combines; hits_us, link_us, cpu_us: branches, sums over layers; join_us: what
                follows the branch that ended last
    bound_us, parts_us  what the window should take, with what memory allows and without
    """

    name: str
    slots: int
    share: float
    rows: int
    wall_us: float
    window_us: float
    serial_us: float
    shared_us: float
    hits_us: float
    link_us: float
    cpu_us: float
    join_us: float
    hit_entries: float
    link_experts: float
    cpu_experts: float
    link_gbps: float
    cpu_gbps: float
    waited_for: dict[str, int]
    bound_us: float = 0.0
    parts_us: float = 0.0

    @property
    def of_parts(self) -> float:
        """The bound without RAM as a share of the window; 0 if there is none."""
        return self.parts_us / self.window_us

    @property
    def beyond_bound(self) -> float:
        """Share of the window that the bound does not explain."""
        return 1 - self.bound_us / self.window_us if self.bound_us else 0.0


@dataclass(frozen=True)
class ExpertsSpeed:
    """runs: parts alone first. threads: of the CPU. layers; expert_bytes: mean. memory: what these threads and the link
    read."""

    device: str
    threads: int
    layers: int
    expert_bytes: float
    memory: MemoryRates
    load_s: tuple[float, ...]
    runs: tuple[Run, ...]

    def record(self) -> dict[str, Any]:
        """As plain data."""
        found = asdict(self)
        for written, run in zip(found["runs"], self.runs, strict=True):
            written |= {"beyond_bound": run.beyond_bound, "of_parts": run.of_parts}
        return found


def measure(
    path: str | Path,
    *,
    rows: int = 1,
    windows: int = 48,
    shares: Sequence[float] = SHARES,
    threads: int | None = None,
    context: int = 2048,
    experts: str = "pinned",
    device: str = "cuda",
    seed: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> ExpertsSpeed:
    """Measure a model with no experts in VRAM, and with half of each layer's.

    shares       of the link, tried with either
    experts      where RAM holds them: "pinned", or "mapped", which locks the file's pages
    on_progress  called with settings measured and settings in all
    """
    need(1 <= rows <= WINDOW_ROWS, "rows of a window", found=rows, needed=f"1 .. {WINDOW_ROWS}")
    need(windows >= 2 and all(0 <= s <= 1 for s in shares), "windows or shares", found=(windows, tuple(shares)),
         needed=">= 2 and 0..1")  # fmt: skip
    total, done, load_s = 2 * len(shares) + 2, 0, []
    options = {"context": context, "threads": threads, "prefill": "windows", "checkpoints": 0, "experts": experts,
               "device": device, "pcie_share": 0.5}  # fmt: skip
    runs: list[Run] = []

    def step() -> None:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, total)

    alone = _Alone()
    with load(path, slots=0, **options) as model:
        load_s.append(model.load_seconds)
        g, o = model.geometry, orchestrator_of(model)
        half = g.E // 2
        need(half >= g.K, "too few experts to hold half of them", found=g.E, needed=f">= {2 * g.K}")
        each, memory = o.layout.total_bytes / (g.L * g.E), memory_rates(o.device, o.pool.threads)
        facts = (o.device.name, o.pool.threads, g.L, each, memory)
        alone.ram = each / memory.most_gbps / 1e3
        table = uniform_ids(REPLAYED_TOKENS, g.L, g.E, g.K, seed)
        for share in (*shares, 1.0):
            runs.append(_run(model, table, "no slots", 0, share, rows, windows))
            alone.learn(runs[-1])
            step()
    with load(path, slots=half * g.L, **options) as model:
        load_s.append(model.load_seconds)
        resident = uniform_ids(REPLAYED_TOKENS, g.L, half, g.K, seed)
        runs.append(_run(model, resident, "hits alone", half * g.L, 0.0, rows, windows))
        alone.learn(runs[-1])
        step()
        for share in shares:
            runs.append(_run(model, table, "half", half * g.L, share, rows, windows))
            step()
    bounded = tuple(_with_bound(run, alone) for run in runs)
    return ExpertsSpeed(*facts, tuple(load_s), bounded)


def orchestrator_of(model: Model) -> Orchestrator:
    """What shares a model's experts; StrataError if nothing does."""
    backend = model._backend
    if not isinstance(backend, TieredBackend):
        raise StrataError("this model's experts are not shared", found=model.plan.device, needed="a GPU")
    return backend.orchestrator


def _run(model: Model, table: np.ndarray, name: str, slots: int, share: float, rows: int, windows: int) -> Run:
    backend, g, o = model._backend, model.geometry, orchestrator_of(model)
    tokens = np.array([t % g.V for t in TOKENS[:rows]], np.int32)
    walls = []
    with model.session() as session, model.turn():
        o.hybrid.set_share(share)
        state = session._state.state
        with replayed(backend, table, (rows,)):
            for _ in range(WARM_UP):
                backend.window(state, tokens, (1, 2))
            before = o.stats.copy()
            for _ in range(windows):
                began = time.perf_counter()
                backend.window(state, tokens, (1, 2))
                walls.append((time.perf_counter() - began) * 1e6)
    spent = o.stats.copy()
    spent -= before
    return _summary(spent, name, slots, share, rows, statistics.median(walls), o)


def _summary(s: ExpertStats, name: str, slots: int, share: float, rows: int, wall_us: float, o: Orchestrator) -> Run:
    r, parts = s.record(), s.layer_us()
    us, n = r["us_per_window"], s.windows
    per_window = {part: count / n for part, count in r["experts"].items()}
    return Run(
        name=name, slots=slots, share=share, rows=rows, wall_us=wall_us, window_us=r["window_us"],
        serial_us=r["window_us"] - us["join"], shared_us=us["join"], hits_us=us["hits"], link_us=us["link"],
        cpu_us=us["cpu"], join_us=parts["join"], hit_entries=r["entries"]["hits"] / n,
        link_experts=per_window["link"], cpu_experts=per_window["cpu"],
        link_gbps=r["link_bytes"] / n / us["link"] / 1e3 if us["link"] and per_window["link"] else 0.0,
        cpu_gbps=r["cpu_bytes"] / n / us["cpu"] / 1e3 if us["cpu"] and per_window["cpu"] else 0.0,
        waited_for=r["waited_for"],
    )  # fmt: skip


class _Alone:
    """What parts take that run alone: us an expert of CPU, link and hits, and of memory for the first two; us of the
    serial part, and of a join."""

    def __init__(self) -> None:
        self.ram = self.cpu = self.link = self.hits = self.serial = self.join = 0.0

    def learn(self, r: Run) -> None:
        if r.name == "no slots" and r.share == 0:
            self.cpu, self.join = r.cpu_us / max(r.cpu_experts, 1), r.join_us
        elif r.name == "no slots" and r.share == 1 and r.link_experts:
            self.link = r.link_us / r.link_experts
        elif r.name == "hits alone":
            self.hits, self.serial = r.hits_us / max(r.hit_entries, 1), r.serial_us


def _with_bound(r: Run, alone: _Alone) -> Run:
    """Every layer counts as the mean one: uniform routing makes them alike."""
    longest = max(r.hit_entries * alone.hits, r.link_experts * alone.link, r.cpu_experts * alone.cpu)
    ram, rest = (r.link_experts + r.cpu_experts) * alone.ram, alone.serial + alone.join
    return Run(**asdict(r) | {"bound_us": rest + max(longest, ram), "parts_us": rest + longest})
