"""strata bench doorbell: post and wait, the fetch over the link, and whole shared layers of experts on the GPU.

Weights are random ones of one expert, at as many places as a model wants; a thread answers requests at once, or after
some us, with zeros. All figures are us a layer of a graph of all layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from strata.cli.bench.doorbell.stand import Experts, Stand
from strata.gpu import doorbell as bells
from strata.gpu.device import Device
from strata.gpu.launch import Launch
from strata.gpu.link_fetch import link_fetch
from strata.gpu.split_experts import layer_parts
from strata.gpu_speed import queued_us

BLOCKS = (32, 64, 96, 132, 264, 396, 528)
FETCHED = (1, 2, 4, 10)
ROUNDS, FETCH_ROUNDS = 30, 8
LATE_US = 120
"""Answer that makes the CPU's branch the last one."""
FORMS = ({}, {"copy_sums": False}, {"stamp_branches": False}, {"staging": 0})
PARTS = ("post", "hits", "link", "cpu", "join")


@dataclass(frozen=True)
class Bell:
    """Post and wait of T rows alone, us: nobody rings; one expert of the CPU; the same with its sums left where they
    are."""

    rows: int
    silent_us: float
    one_us: float
    one_in_place_us: float


@dataclass(frozen=True)
class Fetch:
    """`experts` a layer over the link: GB/s by blocks of the kernel."""

    experts: int
    gbps: dict[int, float]


@dataclass(frozen=True)
class LayerBell:
    """A layer of T rows: hits, experts over the link, experts of a CPU that takes answer_us. parts_us: from the start
    of post to its end, then to the end of each branch and of the join; none where no doorbell is needed."""

    rows: int
    hits: int
    link: int
    cpu: int
    answer_us: int
    form: str
    us: float
    parts_us: dict[str, float]


@dataclass(frozen=True)
class DoorbellSpeed:
    """One kind of experts on one device."""

    device: str
    layers: int
    K: int
    expert_bytes: int
    bells: tuple[Bell, ...]
    fetches: tuple[Fetch, ...]
    shared: tuple[LayerBell, ...]

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def measure(
    device: Device,
    experts: Experts,
    K: int,
    rows: Sequence[int],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> DoorbellSpeed:
    """Measure windows of these rows, whose rows all want the same K experts, at least 4."""
    stand, L = Stand(device, experts, K), experts.n_layers
    kinds = [(K, 0, 0), (K - 2, 0, 0), (K - 2, 0, 20), (K - 2, 1, 20), (K - 2, 2, 0), (K - 4, 2, 40), (0, 0, 0),
             (0, K // 2, 100), (0, K, 0)]  # fmt: skip
    steps = len(rows) * (2 + len(kinds) + len(FORMS)) + len(FETCHED)
    done = 0

    def step(found: Any) -> Any:
        nonlocal done
        done += 1
        on_progress(done, steps)
        return found

    try:
        rung = [step(Bell(T, _bells(stand, T, 0), _bells(stand, T, 1), _bells(stand, T, 1, copy=False))) for T in rows]
        fetched = [step(Fetch(n, {b: _fetch_gbps(stand, n, b) for b in BLOCKS})) for n in FETCHED if n <= K]
        shared = []
        for T in rows:
            shared.append(step(_resident(stand, T)))
            shared += [step(_layer(stand, T, *kind)) for kind in kinds]
            shared += [step(_layer(stand, T, K - 2, 0, LATE_US, **form)) for form in FORMS]
        return DoorbellSpeed(device.name, L, K, experts.blob_bytes(0), tuple(rung), tuple(fetched), tuple(shared))
    finally:
        stand.close()


def _us(stand: Stand, launches: list[Launch], error: int = 0, rounds: int = 0) -> float:
    """Median us a layer of a graph."""
    us = queued_us(stand.device, stand.device.graph(launches), 1, rounds or ROUNDS)
    if error:
        stand.check(error)
    return us / stand.experts.n_layers


def _bells(stand: Stand, T: int, cpu: int, copy: bool = True) -> float:
    """post and wait alone, `cpu` of the K experts missing."""
    low, first = stand.lowering(T, stand.hybrid.split)
    stand.hold(stand.K - cpu)
    stand.hybrid.set_share(0)
    d, m, launches = stand.hybrid.split.doorbell, low.memory, list(first)
    sums = stand.device.alloc(8 * T * stand.experts.D) if copy else 0
    for layer in range(stand.experts.n_layers):
        at = stand.hybrid.split.stamps + 8 * bells.STAMP_WORDS * layer
        launches += bells.post(d, m.address("ids"), m.address("weights"), m.address("x"), stand.table_address(layer),
                               0, 0, bells.Blob(0, 0, 0), T, layer, m.error, at)  # fmt: skip
        launches += bells.wait_reply(d, sums, T, m.error, np.uint64(0), at)
    return _us(stand, launches, m.error)


def _fetch_gbps(stand: Stand, n: int, blocks: int) -> float:
    """n experts over the link in every layer."""
    work = stand.device.alloc(4 * (bells.EXPERTS + n))
    stand.device.upload(work, np.array([0, n, 0, *range(n)], np.int32))
    launches, split = [], stand.hybrid.split
    for layer in range(stand.experts.n_layers):
        launches += link_fetch(work, split.raws(layer), split.staging, layer_parts(stand, layer), blocks)
    return n * stand.experts.blob_bytes(0) / _us(stand, launches, rounds=FETCH_ROUNDS) / 1e3


def _resident(stand: Stand, T: int) -> LayerBell:
    """A layer whose experts are all on the device at fixed places, without a doorbell."""
    low, first = stand.lowering(T, None)
    return LayerBell(T, stand.K, 0, 0, 0, "no doorbell", _us(stand, [*first, *low.launches], low.error), {})


def _layer(stand: Stand, T: int, hits: int, linked: int, answer_us: int, **form: int | bool) -> LayerBell:
    """A whole layer: `hits` of the K experts resident, `linked` over the link, the rest by the CPU."""
    low, first = stand.lowering(T, stand.split(**form))
    stand.hold(hits)
    missing = stand.K - hits
    stand.hybrid.set_share(0 if not linked else min(1.0, -(-linked * 256 // missing) / 256))
    stand.answer_after(answer_us)
    us = _us(stand, [*first, *low.launches, *stand.hybrid.launches(low.T)], low.error)
    stand.answer_after(0)
    times = stand.hybrid.telemetry()
    parts = {name: statistics.median(getattr(x, f"{name}_us") for x in times) for name in PARTS}
    last = times[-1]
    what = ", ".join(f"{name} off" for name in form)
    return LayerBell(T, last.hit_entries // T, last.link_experts, last.cpu_entries // T, answer_us, what, us, parts)


def lines(s: DoorbellSpeed) -> list[str]:
    """The report for people."""
    out = [f"device     {s.device}, {s.layers} layers, {s.K} experts of {s.expert_bytes / 1e6:.2f} MB a row", "",
           "post and wait, us a layer   nobody rings   1 expert of the CPU   its sums in place"]  # fmt: skip
    out += [f"  {b.rows} rows{b.silent_us:>31.2f}{b.one_us:>22.2f}{b.one_in_place_us:>20.2f}" for b in s.bells]
    out += ["", "over the link, GB/s by blocks" + "".join(f"{b:>8}" for b in BLOCKS)]
    for f in s.fetches:
        out.append(f"  {f.experts:>2} experts{'':<17}" + "".join(f"{rate:>8.1f}" for rate in f.gbps.values()))
    out += ["", "layers, us; parts: from the start of post to its end, then to the end of each branch",
            f"rows hits link CPU  answer{'':<18}us" + "".join(f"{p:>8}" for p in PARTS)]  # fmt: skip
    for r in s.shared:
        parts = "".join(f"{us:>8.1f}" for us in r.parts_us.values())
        out.append(f"{r.rows:>4}{r.hits:>5}{r.link:>5}{r.cpu:>4}{r.answer_us:>8} {r.form:<18}{r.us:>8.1f}{parts}")
    return out
