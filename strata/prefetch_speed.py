"""The same products with other prefetches, in turns: which the processor, and how many of its threads, like best.

Every round times each choice once, in an order of its own, so all see the same minute; what counts is a choice's rate
over that of the kernels' own in the same round. The kernels' own take part twice: how far their second figure strays
from the first is what a difference must exceed to be one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from strata.base.errors import SelfTestFailed, need
from strata.cpu.gemv.prefetch import Prefetch, text_of
from strata.cpu.gemv.rows import MOST_ROWS
from strata.cpu.gemv.table import kernel_function
from strata.cpu.pool import Pool
from strata.cpu.self_test import check_format
from strata.kernel_speed import KernelBench, Product, activation_records, core_seconds, kernels_of, multiplying
from strata.kernel_speed import wall_seconds as wall_seconds_of
from strata.layer_speed import Layer, LayerBench
from strata.pack.formats import BlockFormat, by_name

OWN, AGAIN = "own", "own again"
PASSES = 3
"""Passes in a turn of several threads, of which the fastest counts: other programs only take time."""

SPIN_US = 200.0


@dataclass(frozen=True)
class Ratio:
    """Rate over that of the kernels' own: median of the rounds, and the range of their middle half."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        middle = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (middle,) * 3
        return cls(middle, low, high)


@dataclass(frozen=True)
class Turns:
    """GB/s of weights by the text of a prefetch, one figure a round; OWN and AGAIN are the kernels' own.

    what     the format, or the types of a layer       R, threads   activation rows, threads of the pool
    """

    what: str
    R: int
    threads: int
    gbps: dict[str, list[float]]

    def ratio(self, name: str) -> Ratio:
        return Ratio.of([rate / own for rate, own in zip(self.gbps[name], self.gbps[OWN], strict=True)])

    def verdict(self, name: str) -> str:
        """better or worse, if the middle half of the rounds lies beyond that of the kernels' own; else nothing."""
        found, noise = self.ratio(name), self.ratio(AGAIN)
        if found.low > max(1.0, noise.high):
            return "better"
        return "worse" if found.high < min(1.0, noise.low) else ""


def in_turns(timed: dict[str, Callable[[], float]], n_bytes: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of each, one figure a round, from what returns seconds; a first round does not count."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    rng, names = np.random.default_rng(rounds), list(timed)
    for i in range(-1, rounds):
        for name in rng.permutation(names).tolist():
            seconds = timed[name]()
            if i >= 0:
                found[name].append(n_bytes / seconds / 1e9)
    return found


def _tables(format: BlockFormat, tier: int, R: int, prefetches: Sequence[Prefetch]) -> dict[str, np.ndarray]:
    """Copies of a format's kernel table by the text of a prefetch; only the kernel for R activation rows differs."""
    need(1 <= R <= MOST_ROWS, "prefetches are compared in kernels of few rows", found=R, needed=f"1 to {MOST_ROWS}")
    own = kernels_of(format, tier)
    tables = {OWN: own.copy(), AGAIN: own.copy()}
    for prefetch in prefetches:
        table = own.copy()
        table[R - 1] = kernel_function(format, R, tier, prefetch).address
        tables[text_of(prefetch)] = table
    return tables


def _same(results: dict[str, np.ndarray], what: str) -> None:
    for name, y in results.items():
        if y.tobytes() != results[OWN].tobytes():
            raise SelfTestFailed(f"{what} with the prefetch {name} does not give the kernel's own result",
                                 found=f"{np.count_nonzero(y != results[OWN])} other values", needed="the same bits",
                                 advice="Report this machine.")  # fmt: skip


def time_kernels(bench: KernelBench, format: BlockFormat, R: int, counts: Sequence[int],
                 prefetches: Sequence[Prefetch], rounds: int) -> list[Turns]:  # fmt: skip
    """A format's kernel for R rows, 1 to 4, over the bench's area, weights from memory; one entry a number of threads.

    One thread is timed by its CPU time, several by the wall clock. SelfTestFailed if a result differs.
    """
    check_format(format, bench.tier)
    row_bytes = format.row_bytes(bench.columns)
    area = bench.fill(format)
    n = area.size // row_bytes
    records, out = activation_records(format, bench.columns, R, bench.tier), np.zeros((R, n), np.float32)
    jobs = {
        name: multiplying([Product(area.ctypes.data, row_bytes, n, bench.columns, table, records, out)], R)
        for name, table in _tables(format, bench.tier, R, prefetches).items()
    }
    results = {}
    for name, job in jobs.items():
        out[:] = 0
        job.run(bench.one_thread)
        results[name] = out.copy()
    _same(results, f"the {format.name} kernel")
    found = []
    for threads in counts:
        with Pool(threads, spin_us=SPIN_US) as pool:

            def timed(job, pool=pool):
                if pool.threads == 1:
                    return lambda: core_seconds(job, pool)
                return lambda: min(wall_seconds_of(job, pool) for _ in range(PASSES))

            turns = in_turns({name: timed(job) for name, job in jobs.items()}, jobs[OWN].n_bytes, rounds)
            found.append(Turns(format.name, R, threads, turns))
    return found


def time_layers(bench: LayerBench, R: int, counts: Sequence[int], prefetches: Sequence[Prefetch],
                rounds: int) -> list[Turns]:  # fmt: skip
    """Whole layers of R rows, 1 to 4, whose routed and shared experts all take the prefetch; else as `time_kernels`."""
    found = []
    for threads in counts:
        with Pool(threads, spin_us=SPIN_US) as pool:
            layer = bench.layer(R, pool)
            formats = [f for f in map(by_name, sorted(bench.weights.formats)) if f.activation != "float"]
            tables = [(bench.weights.kernels(f.ggml_id), _tables(f, bench.tier, R, prefetches)) for f in formats]
            names = list(tables[0][1])

            def turn(name: str, layer=layer, tables=tables, threads=threads) -> Callable[[], float]:
                def seconds() -> float:
                    for place, by_text in tables:
                        place[:] = by_text[name]
                    if threads == 1:
                        return layer.core_seconds()
                    return min(layer.wall_seconds(1) for _ in range(PASSES))

                return seconds

            try:
                timed = {name: turn(name) for name in names}
                _same({name: _result(layer, run) for name, run in timed.items()}, f"the layer {bench.types}")
                turns = in_turns(timed, bench.pass_bytes, rounds)
            finally:
                turn(OWN)()
            found.append(Turns(bench.types, R, threads, turns))
    return found


def _result(layer: Layer, run: Callable[[], float]) -> np.ndarray:
    run()
    return layer.y.copy()
