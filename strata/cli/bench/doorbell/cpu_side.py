"""strata bench doorbell --cpu: the service of the CPU's experts, asked by a thread that stands in for the device.

Shortest requests of a file's experts; requests for 1 to 10 experts of a layer of the released geometry, beside their
products alone on the same threads (no grouping, no activation, no sums); with a busy Python thread beside them, windows
of a file's requests as Python sees them.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strata.arch import architecture_of
from strata.base.doorbell import CPU, HIT, Mailbox
from strata.base.errors import StrataError
from strata.base.geometry import WINDOW_ROWS
from strata.cli.bench.doorbell.stand_in import Device, Request
from strata.cpu.miss_server import MissServer
from strata.cpu.pool import Pool
from strata.cpu.weights import Weights
from strata.kernel_speed import Job, Product, activation_records, kernels_of, multiplying, wall_seconds
from strata.layer_speed import LayerBench
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors

K, D = 10, 2560
"""Of the made layer: experts of a row, values of a row."""
SERVED = ((1, 1), (1, 2), (1, 3), (1, 5), (1, 10), (4, 10))
"""Rows and experts of requests; rows want the same ones."""
SHORTEST_REQUESTS = 3000
WINDOW_REQUESTS, WINDOWS = 200, 60
INTERVALS = (1e-3, 2e-4, 5e-5)
"""Switch intervals tried beside a busy thread, after the interpreter's own; s."""
PARTS = ("gate", "up", "down")


@dataclass(frozen=True)
class Shortest:
    """A request of one row of a file, `entries` of it the CPU's: us from the ring to the reply."""

    entries: int
    us: float
    least_us: float
    p99_us: float


@dataclass(frozen=True)
class Served:
    """A request of the made layer: us of it and of its products alone, and what share of it that is."""

    types: str
    rows: int
    experts: int
    threads: int
    us: float
    products_us: float
    products_share: float
    gbps: float


@dataclass(frozen=True)
class Busy:
    """A window of requests beside a Python thread that computes, with this switch interval (0: alone): ms as Python
    sees it, and of it ms within the requests."""

    interval_s: float
    window_ms: float
    requests_ms: float


@contextmanager
def _file(path: Path) -> Iterator[tuple[Weights, int, int, int]]:
    """(weights, E, K, D) of a file's experts."""
    with GgufFile(path) as gguf:
        g = architecture_of(gguf).read_geometry(gguf)
        weights = Weights(Tensors(gguf), expert_layout(gguf, g.L))
        try:
            yield weights, g.E, g.K, g.D
        finally:
            del weights


def _asked(device: Device, n: int, seed: int = 1) -> float:
    """Mean us of n requests; StrataError if one gets no answer."""
    told = device.ask(n, seed=seed)
    if told.replied != n or told.statuses:
        raise StrataError("the CPU's service does not answer", found=f"{told.replied} of {n} answers",
                          needed="all, without an error", advice="Please report this.")  # fmt: skip
    return told.mean_us


def _request(rng: np.random.Generator, T: int, ids: np.ndarray, here: np.ndarray, values: int) -> Request:
    """ids int32 (T, K); here bool (T, K): entries of the CPU."""
    x, weights = rng.standard_normal((T, values), np.float32), np.full(ids.shape, 1 / ids.shape[1], np.float32)
    decisions = np.where(here, CPU, HIT).astype(np.uint8)
    return Request(0, decisions, ids.astype(np.int32), weights, x, np.zeros((T, values), np.int64))


def shortest(path: Path, threads: int) -> list[Shortest]:
    """Requests for no expert, one, and all of a row."""
    rng, found = np.random.default_rng(1), []
    with _file(path) as (weights, E, k, values), Pool(threads) as pool:
        device = Device(Mailbox(WINDOW_ROWS, k, values))
        with MissServer(weights, device.mailbox, device.address, pool, keep=device.area) as server:
            for n in (0, 1, k):
                device.prepare([_request(rng, 1, rng.permutation(E)[None, :k], np.arange(k)[None] < n, values)])
                server.begin_window()
                _asked(device, WINDOW_REQUESTS)
                times = sorted(_asked(device, 1) for _ in range(SHORTEST_REQUESTS))
                server.end_window()
                found.append(Shortest(n, statistics.median(times), times[0], times[len(times) * 99 // 100]))
    return found


# ---- a layer of the released geometry


def _products(bench: LayerBench, experts: Sequence[int], R: int = 1) -> Job:
    """The products of a request, in its order."""
    made, chosen, out = {}, [], np.zeros((R, D), np.float32)
    for parts in ((0, 1), (2,)):
        for e in experts:
            for part in parts:
                info = bench.tensors.info(f"blk.0.ffn_{PARTS[part]}_exps.weight")
                rows, columns = info.shape[-2:]
                if part not in made:
                    records = activation_records(info.format, columns, R, bench.tier)
                    made[part] = kernels_of(info.format, bench.tier), records
                address = int(bench.weights.expert_table(0)[e, part])
                chosen.append(Product(address, info.row_bytes, rows, columns, *made[part], out))
    return multiplying(chosen, R)


def served(bench: LayerBench, threads: int, repeats: int) -> list[Served]:
    """Requests that threads answer together, beside their products on the same threads."""
    rng, found = np.random.default_rng(2), []
    device, types = Device(Mailbox(WINDOW_ROWS, K, D)), f"{bench.spec.gate_up}/{bench.spec.down}"
    with (
        Pool(threads) as pool,
        MissServer(bench.weights, device.mailbox, device.address, pool, keep=device.area) as server,
    ):
        for T, n in SERVED:
            here = np.broadcast_to(np.arange(K) < n, (T, K))
            asked = [_request(rng, T, np.tile(ids, (T, 1)), here, D) for ids in bench.sets]
            jobs = [_products(bench, ids[:n], T) for ids in bench.sets]
            requests, alone = [], []
            for i in range(-1, repeats):
                server.begin_window()
                for request in asked:
                    device.prepare([request])
                    us = _asked(device, 1)
                    if i >= 0:
                        requests.append(us)
                server.end_window()
                times = [1e6 * wall_seconds(job, pool) for job in jobs]
                alone += times if i >= 0 else []
            us, products_us = statistics.median(requests), statistics.median(alone)
            n_bytes = n * bench.weights.experts.blob_bytes(0)
            found.append(Served(types, T, n, threads, us, products_us, products_us / us, n_bytes / us / 1e3))
    return found


# ---- beside Python


@contextmanager
def _computing() -> Iterator[None]:
    """A thread that never leaves the interpreter."""
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(1000))

    thread, before = threading.Thread(target=compute, daemon=True), sys.getswitchinterval()
    thread.start()
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        done.set()
        thread.join()


def beside_python(path: Path, threads: int) -> list[Busy]:
    """Windows of requests of four rows, half of their entries the CPU's: alone, then beside a busy thread."""
    rng, found = np.random.default_rng(1), []
    with _file(path) as (weights, E, k, values), Pool(threads) as pool:
        device = Device(Mailbox(WINDOW_ROWS, k, values))
        few = min(E, 4 * k)
        device.prepare([
            _request(rng, 4, np.stack([rng.permutation(few)[:k] for _ in range(4)]), rng.random((4, k)) < 0.5, values)
            for _ in range(16)
        ])  # fmt: skip
        with MissServer(weights, device.mailbox, device.address, pool, keep=device.area) as server:

            def windows(interval_s: float, n: int = WINDOWS) -> Busy:
                took, inside = [], []
                for i in range(n):
                    began = time.perf_counter()
                    server.begin_window()
                    time.sleep(0)  # as a launch: gives the interpreter's lock away and takes it back
                    mean_us = _asked(device, WINDOW_REQUESTS, seed=i)  # as the wait for a device
                    server.end_window()
                    took.append(1e3 * (time.perf_counter() - began))
                    inside.append(mean_us * WINDOW_REQUESTS / 1e3)
                return Busy(interval_s, statistics.median(took), statistics.median(inside))

            windows(0.0, max(1, WINDOWS // 6))
            found.append(windows(0.0))
            with _computing():
                for interval_s in (sys.getswitchinterval(), *INTERVALS):
                    sys.setswitchinterval(interval_s)
                    found.append(windows(interval_s))
    return found


def measure(path: Path, types: Sequence[str], tier: int, threads: int, n_bytes: int, repeats: int,
            busy: bool) -> dict[str, Any]:  # fmt: skip
    """Records of all, or with `busy` of windows beside Python alone."""
    if busy:
        return {"busy": [asdict(b) for b in beside_python(path, threads)]}
    found = []
    for one in types:
        with LayerBench(one, tier, n_bytes) as bench:
            found += served(bench, threads, repeats)
    return {"shortest": [asdict(s) for s in shortest(path, threads)], "requests": [asdict(s) for s in found]}


def lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    out = [f"{s['entries']:>3} entries: {s['us']:.2f} us, least {s['least_us']:.2f}, p99 {s['p99_us']:.1f}"
           for s in report.get("shortest", ())]  # fmt: skip
    for s in report.get("requests", ()):
        out.append(
            f"{s['types']}, {s['rows']} rows, {s['experts']} experts, {s['threads']} threads: {s['us']:.0f} us = "
            f"{s['gbps']:.1f} GB/s; products alone {s['products_us']:.0f} us, {s['products_share']:.2f} of it"
        )
    for b in report.get("busy", ()):
        where = f"beside a busy thread, switch interval {b['interval_s']:g} s" if b["interval_s"] else "alone"
        out.append(f"{where}: window {b['window_ms']:.2f} ms, requests {b['requests_ms']:.2f} ms")
    return out
