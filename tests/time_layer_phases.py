"""Times whole layers of experts on several threads, chunk by chunk: python -m tests.time_layer_phases [TYPES ..]

    --threads 8,12,14   --rows 1   --mb 1200   --repeat 5   --huge (also from anonymous memory with huge pages)
    --run-kb 64,512 (longest runs of rows)

Rates are shares of what the same number of threads, and all cores, read in the same minute. Phases come from stamps
around every chunk, of medians over layers: from the first chunk's start to the last one's end; `busy` is the share of
the threads' time inside chunks, `tail` the time from half of the threads having nothing left to the end.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import time
from dataclasses import dataclass

import numpy as np

from strata.base.compiled import cached_njit, chunk
from strata.cpu import expert_record as rec
from strata.cpu.cores import core_facts, usable_cores
from strata.cpu.expert_groups import plan_jobs
from strata.cpu.expert_jobs import experts_chunk
from strata.cpu.machine_code import call3, clock_ns, exact_floats, i64_view, st64
from strata.cpu.pool import Pool, dispatch
from strata.cpu.tiers import best_tier
from strata.kernel_speed import reading, wall_seconds
from strata.layer_speed import Layer, LayerBench

SPIN_US, PAUSE_S, PASSES = 200.0, 0.001, 4
MOST_CHUNKS = 4096


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


@dataclass
class Phases:
    """Medians over sets, us. up, down: from the first chunk's start to the last one's end."""

    layer: float
    group: float
    up: float
    down: float
    overlap: float
    busy: float
    """Share of threads x time inside chunks."""
    tail: float
    """From the moment that half of the threads have nothing left, to the end."""
    slowest: float
    """Longest chunk over the median one."""
    chunks: float


class Timed:
    def __init__(self, layer: Layer, record: np.ndarray, sets: np.ndarray, threads: int):
        self.layer, self.record, self.sets, self.threads = layer, record, sets, threads
        self.stamps, self.times = np.zeros((MOST_CHUNKS, 2), np.int64), np.zeros(3, np.int64)
        self.desc = np.array([record.ctypes.data, self.stamps.ctypes.data, experts_chunk.address], np.int64)

    def seconds(self) -> float:
        return self.layer.wall_seconds(PASSES) / PASSES

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
                                down[:, 1].max() - down[:, 0].min(), up[:, 1].max() - down[:, 0].min(),
                                took.sum() / (self.threads * (end - begin)), end - ends[len(ends) // 2],
                                took.max() / np.median(took), n))  # fmt: skip
        return Phases(*(statistics.median(getattr(f, name) for f in found) for name in Phases.__annotations__))


def huge_copy(bench: LayerBench) -> tuple[mmap.mmap, np.ndarray]:
    """The routed experts' matrices in anonymous memory with huge pages, and a table of them."""
    table = bench.weights.expert_table(0)
    sizes = [bench.tensors.info(f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up", "down")]
    n_bytes = [info.n_bytes // len(table) for info in sizes]
    stride = [-(-n // 4096) * 4096 for n in n_bytes]
    area = mmap.mmap(-1, len(table) * sum(stride) + (4 << 20))
    area.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(area, np.uint8)
    places, at = np.zeros_like(table), view.ctypes.data
    at = -(-at // (2 << 20)) * (2 << 20)
    for e in range(len(table)):
        for part in range(3):
            ctypes.memmove(at, int(table[e, part]), n_bytes[part])
            places[e, part] = at
            at += stride[part]
    return area, places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=["Q4_K/IQ4_NL"])
    parser.add_argument("--threads", default="8,12,14")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--mb", type=int, default=1200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--huge", action="store_true")
    parser.add_argument("--run-kb", default="512")
    o = parser.parse_args()
    cores = usable_cores(core_facts())
    for types in o.types:
        with LayerBench(types, best_tier(), o.mb << 20) as bench:
            for threads in map(int, o.threads.split(",")):
                report(bench, o, types, threads, cores)


def report(bench: LayerBench, o: argparse.Namespace, types: str, threads: int, cores: int) -> None:
    names = [f"blk.0.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
    shared = sum(bench.tensors.info(n.replace("exps", "shexp")).n_bytes for n in names)
    n_bytes = sum(bench.tensors.info(n).n_bytes for n in names) + shared * len(bench.sets)
    (area,) = bench.tensors.gguf.keeper()
    with Pool(threads, spin_us=SPIN_US) as pool, Pool(cores, spin_us=SPIN_US) as everyone:
        layer, read = bench.layer(o.rows, pool), reading(area)
        layer.pass_over()  # the records of x are there from now on
        (record,) = layer.records("experts", rec.WORDS)
        timed = Timed(layer, record, bench.sets, threads)
        table = int(record[rec.ROUTED + rec.TABLE])
        keep, places = huge_copy(bench) if o.huge else (None, None)
        own = reading(np.frombuffer(keep, np.uint8)) if o.huge else None
        variants = [(f"{kb} KB{', huge' * huge}", (int(kb), huge))
                    for kb in o.run_kb.split(",") for huge in ((False, True) if o.huge else (False,))]  # fmt: skip

        def choose(kb: int, huge: bool) -> None:
            record[rec.MOST], record[rec.ROUTED + rec.TABLE] = kb << 10, places.ctypes.data if huge else table

        rates: dict[str, list[float]] = {name: [] for name, *_ in variants}
        same, everything, own_rates = [], [], []
        for i in range(-1, o.repeat):
            time.sleep(PAUSE_S)
            s = read.n_bytes / min(wall_seconds(read, pool) for _ in range(2)) / 1e9
            time.sleep(PAUSE_S)
            a = read.n_bytes / min(wall_seconds(read, everyone) for _ in range(2)) / 1e9
            h = own.n_bytes / min(wall_seconds(own, pool) for _ in range(2)) / 1e9 if own else 0.0
            time.sleep(PAUSE_S)
            for name, choice in variants:
                choose(*choice)
                rate = n_bytes / timed.seconds() / 1e9
                if i >= 0:
                    rates[name].append(rate)
            if i >= 0:
                same.append(s)
                everything.append(a)
                own_rates.append(h)
        print(f"{types}, {o.rows} rows, {threads} threads: these read {statistics.median(same):.1f} GB/s, {cores} read "
              f"{statistics.median(everything):.1f}"
              + (f", huge pages {statistics.median(own_rates):.1f}" if o.huge else ""))  # fmt: skip
        for name, choice in variants:
            choose(*choice)
            p, rate = timed.phases(), statistics.median(rates[name])
            print(f"  {name:<20} {rate:6.1f} GB/s = {rate / statistics.median(same):.2f} of the same threads, "
                  f"{rate / statistics.median(everything):.2f} of all | us: layer {p.layer:.0f} group {p.group:.1f} "
                  f"gate/up {p.up:.0f} down {p.down:.0f} overlap {p.overlap:.0f} busy {p.busy:.3f} tail {p.tail:.1f} "
                  f"slowest chunk {p.slowest:.1f} x, {p.chunks:.0f} chunks")  # fmt: skip
        choose(512, False)


if __name__ == "__main__":
    main()
