"""strata bench cpu-kernels --layer --phases: where the time of a layer of experts goes, chunk by chunk.

Rates are shares of what the same number of threads, and all cores, read in the same minute. Phases come from stamps
around every chunk, medians over layers.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from strata.base.compiled import cached_njit, chunk
from strata.cpu import expert_record as rec
from strata.cpu.cores import core_facts, usable_cores
from strata.cpu.expert_groups import plan_jobs
from strata.cpu.expert_jobs import experts_chunk
from strata.cpu.machine_code import call3, clock_ns, exact_floats, i64_view, st64
from strata.cpu.pool import Pool, dispatch
from strata.kernel_speed import reading, wall_seconds
from strata.layer_speed import Layer, LayerBench

SPIN_US, PAUSE_S, PASSES = 200.0, 0.001, 4
MOST_CHUNKS = 4096
PARTS = ("gate", "up", "down")
HUGE_BYTES = 2 << 20


@chunk
def stamped(desc, k, n):
    """Record: the op's record, stamps (start, end) of every chunk, the chunk function."""
    d = i64_view(desc, 3)
    st64(d[1] + 16 * k, clock_ns())
    call3(d[2], d[0], k, n)
    st64(d[1] + 16 * k + 8, clock_ns())


@cached_njit
def run_layer(record, function, desc, times):
    """One layer of the record; times: begin, grouped, end."""
    exact_floats()
    p = i64_view(record, rec.WORDS)
    st64(times, clock_ns())
    n = plan_jobs(p)
    st64(times + 8, clock_ns())
    dispatch(p[rec.POOL], n, function, desc)
    st64(times + 16, clock_ns())


@dataclass(frozen=True)
class Phases:
    """Medians over sets of experts, us.

    up_us, down_us  from the first chunk's start to the last one's end      overlap_us  both at once
    busy            share of threads x time inside chunks
    tail_us         from the moment that half of the threads have nothing left, to the end
    slowest         longest chunk over the median one
    """

    layer_us: float
    group_us: float
    up_us: float
    down_us: float
    overlap_us: float
    busy: float
    tail_us: float
    slowest: float
    chunks: float


class _Timed:
    """A layer whose chunks are stamped."""

    def __init__(self, layer: Layer, record: np.ndarray, sets: np.ndarray, threads: int):
        self.layer, self.record, self.sets, self.threads = layer, record, sets, threads
        self.stamps, self.times = np.zeros((MOST_CHUNKS, 2), np.int64), np.zeros(3, np.int64)
        self.desc = np.array([record.ctypes.data, self.stamps.ctypes.data, experts_chunk.address], np.int64)

    def phases(self) -> Phases:
        found = []
        for chosen in self.sets:
            self.layer.ids[:] = chosen
            run_layer(self.record.ctypes.data, stamped.address, self.desc.ctypes.data, self.times.ctypes.data)
            n, n_down, n_up = (int(self.record[word]) for word in (rec.N_CHUNKS, rec.N_DOWN, rec.N_UP))
            first = n - n_up - n_down
            s = self.stamps[:n] / 1e3
            up, down = s[first : first + n_up], s[first + n_up :]
            begin, grouped, end = self.times / 1e3
            took = s[:, 1] - s[:, 0]
            # at the end every thread finishes its last chunk: the ends of the last `threads` chunks to finish
            ends = np.sort(s[:, 1])[-self.threads :]
            found.append(Phases(end - begin, grouped - begin, up[:, 1].max() - up[:, 0].min(),
                                down[:, 1].max() - down[:, 0].min(), max(0.0, up[:, 1].max() - down[:, 0].min()),
                                took.sum() / (self.threads * (end - begin)), end - ends[len(ends) // 2],
                                took.max() / np.median(took), n))  # fmt: skip
        return Phases(*(float(statistics.median(getattr(f, name) for f in found)) for name in Phases.__annotations__))


def _huge_copy(bench: LayerBench) -> tuple[mmap.mmap, np.ndarray]:
    """The routed experts' matrices in anonymous memory with huge pages, and a table of them."""
    table = bench.weights.expert_table(0)
    n_bytes = [bench.tensors.info(f"blk.0.ffn_{part}_exps.weight").n_bytes // len(table) for part in PARTS]
    stride = [-(-n // mmap.PAGESIZE) * mmap.PAGESIZE for n in n_bytes]
    area = mmap.mmap(-1, len(table) * sum(stride) + 2 * HUGE_BYTES)
    area.madvise(mmap.MADV_HUGEPAGE)
    places, at = np.zeros_like(table), np.frombuffer(area, np.uint8).ctypes.data
    at = -(-at // HUGE_BYTES) * HUGE_BYTES
    for e in range(len(table)):
        for part in range(3):
            ctypes.memmove(at, int(table[e, part]), n_bytes[part])
            places[e, part] = at
            at += stride[part]
    return area, places


def measure(
    bench: LayerBench, R: int, threads: int, run_kb: Sequence[int], huge: bool, repeats: int
) -> dict[str, Any]:
    """Rates and phases of R rows by the longest run of rows in KB; huge: also with experts in huge pages."""
    names = [f"blk.0.ffn_{part}_exps.weight" for part in PARTS]
    shared = sum(bench.tensors.info(n.replace("exps", "shexp")).n_bytes for n in names)
    n_bytes = sum(bench.tensors.info(n).n_bytes for n in names) + shared * len(bench.sets)
    cores, (area,) = usable_cores(core_facts()), bench.tensors.gguf.keeper()
    with Pool(threads, spin_us=SPIN_US) as pool, Pool(cores, spin_us=SPIN_US) as everyone:
        layer, read = bench.layer(R, pool), reading(area)
        layer.pass_over()  # the records of x are there from now on
        (record,) = layer.records("experts", rec.WORDS)
        timed = _Timed(layer, record, bench.sets, threads)
        before = int(record[rec.MOST]), int(record[rec.ROUTED + rec.TABLE])
        keep, places = _huge_copy(bench) if huge else (None, None)
        own = reading(np.frombuffer(keep, np.uint8)) if huge else None
        variants = [(kb, pages) for kb in run_kb for pages in ((False, True) if huge else (False,))]

        def choose(kb: int, in_huge: bool) -> None:
            record[rec.MOST] = kb << 10
            record[rec.ROUTED + rec.TABLE] = places.ctypes.data if in_huge else before[1]

        def best_gbps(job: Any, of: Pool) -> float:
            time.sleep(PAUSE_S)  # two pools take turns: the other one's workers sleep by then
            return job.n_bytes / min(wall_seconds(job, of) for _ in range(2)) / 1e9

        rates: dict[tuple[int, bool], list[float]] = {v: [] for v in variants}
        same, everything, pages = [], [], []
        for i in range(-1, repeats):
            read_gbps = best_gbps(read, pool), best_gbps(read, everyone), best_gbps(own, pool) if own else 0.0
            time.sleep(PAUSE_S)
            for variant in variants:
                choose(*variant)
                rate = PASSES * n_bytes / layer.wall_seconds(PASSES) / 1e9
                if i >= 0:
                    rates[variant].append(rate)
            if i >= 0:
                for values, gbps in zip((same, everything, pages), read_gbps, strict=True):
                    values.append(gbps)
        found = []
        for variant in variants:
            choose(*variant)
            gbps = statistics.median(rates[variant])
            found.append({
                "run_kb": variant[0], "huge": variant[1], "gbps": round(gbps, 2),
                "of_same_threads": round(gbps / statistics.median(same), 3),
                "of_all": round(gbps / statistics.median(everything), 3), **asdict(timed.phases()),
            })  # fmt: skip
        record[rec.MOST], record[rec.ROUTED + rec.TABLE] = before
    return {
        "rows": R, "threads": threads, "read_gbps": round(statistics.median(same), 2), "read_threads": cores,
        "read_all_gbps": round(statistics.median(everything), 2),
        "read_huge_gbps": round(statistics.median(pages), 2) if huge else None, "runs": found,
    }  # fmt: skip


def lines(found: dict[str, Any]) -> list[str]:
    """Of `measure`, for people."""
    pages = f", from huge pages {found['read_huge_gbps']:.1f}" if found["read_huge_gbps"] is not None else ""
    out = [f"  {found['rows']} rows, {found['threads']} threads: they read {found['read_gbps']:.1f} GB/s{pages}, "
           f"{found['read_threads']} read {found['read_all_gbps']:.1f}"]  # fmt: skip
    for r in found["runs"]:
        out += [
            f"    runs of {r['run_kb']} KB{', huge pages' * r['huge']}: {r['gbps']:.1f} GB/s = "
            f"{r['of_same_threads']:.2f} of the same threads, {r['of_all']:.2f} of all; {r['chunks']:.0f} chunks",
            f"      us: layer {r['layer_us']:.0f}, group {r['group_us']:.1f}, gate/up {r['up_us']:.0f}, down "
            f"{r['down_us']:.0f}, both {r['overlap_us']:.0f}, tail {r['tail_us']:.1f}; busy {r['busy']:.3f}, slowest "
            f"chunk {r['slowest']:.1f} x",
        ]
    return out
