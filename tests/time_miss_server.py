"""Times the service of the CPU's experts: python -m tests.time_miss_server [--threads N] [--types A/B] [--busy]

A stand-in for the device, a thread of its own, posts and waits. First the shortest request, one entry of the bundled
model; then layers of full geometry, 1 to 10 experts a request, beside their products alone on the same threads (no
grouping, no activation, no sums). --busy: windows of 200 requests while another Python thread computes. --pin: service
and stand-in on CPUs of their own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time

import numpy as np

from strata.base.compiled import cached_njit
from strata.base.doorbell import CPU, HIT, Mailbox
from strata.cpu.cores import core_facts, default_threads
from strata.cpu.miss_jobs import MissJobs, answer
from strata.cpu.miss_server import MissServer
from strata.cpu.pool import Pool
from strata.cpu.tiers import best_tier
from strata.kernel_speed import Job, Product, activation_records, core_seconds, kernels_of, multiplying, wall_seconds
from strata.layer_speed import LayerBench
from tests.conftest import TINY
from tests.doorbell_device import Device, Model, Request


def one_by_one(device: Device, n: int) -> str:
    times = sorted(device.ask(1, seed=i).mean_us for i in range(n))
    return f"median {times[n // 2]:.2f} us, least {times[0]:.2f}, p99 {times[n * 99 // 100]:.1f}"


def shortest(threads: int, pin: bool) -> None:
    model = Model(TINY / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf", 8, 4)
    request = model.request(np.random.default_rng(1), T=1, layer=3, misses=1.0)
    device = Device(Mailbox(8, model.K, model.D))
    for n in (0, 1, 4):
        with Pool(threads) as pool, MissServer(model.weights, device.mailbox, device.address, pool) as server:
            decisions = np.full((1, 4), HIT, np.uint8)
            decisions[0, :n] = CPU
            device.prepare([Request(3, decisions, request.ids, request.weights, request.x, request.sums)])
            if pin:
                os.sched_setaffinity(server._service[0].native_id, {1})
                os.sched_setaffinity(threading.get_native_id(), {0})
            server.begin_window()
            device.ask(200)
            print(f"bundled model, {n} entries, {threads} threads: {one_by_one(device, 3000)}")
            server.end_window()
        device.words[:] = 0
        device.number = 0


def layers(types: str, threads: int, mb: int, repeat: int) -> None:
    with LayerBench(types, best_tier(), mb << 20) as bench, Pool(threads) as pool:
        weights, E = bench.weights, bench.spec.experts
        device = Device(Mailbox(8, 10, 2560))
        x = np.random.default_rng(2).standard_normal((1, 2560)).astype(np.float32)
        with MissServer(weights, device.mailbox, device.address, pool) as server:
            for n in (1, 2, 3, 5, 10):
                decisions = np.full((1, 10), HIT, np.uint8)
                decisions[0, :n] = CPU
                w = np.full((1, 10), 0.1, np.float32)
                zeros = np.zeros((1, 2560), np.int64)
                sets = bench.sets
                asked = [Request(0, decisions, ids[None], w, x, zeros) for ids in sets]
                jobs = [products(bench, ids[:n]) for ids in sets]
                requests, alone = [], []
                for i in range(-1, repeat):
                    server.begin_window()
                    for request in asked:
                        device.prepare([request])
                        us = device.ask(1).mean_us
                        if i >= 0:
                            requests.append(us)
                    server.end_window()
                    for job in jobs:
                        us = 1e6 * wall_seconds(job, pool)
                        if i >= 0:
                            alone.append(us)
                n_bytes = n * weights.experts.blob_bytes(0)
                took, kernels = statistics.median(requests), statistics.median(alone)
                rate = n_bytes / took / 1e3
                print(f"{types}, {n} of {E} experts, {threads} threads: {took:.0f} us = {rate:.1f} GB/s; "
                      f"products alone {kernels:.0f} us = {kernels / took:.2f} of it")  # fmt: skip


@cached_njit
def answer_here(jobs):
    return answer(jobs)


def one_core(types: str, mb: int, repeat: int) -> None:
    """CPU time of requests beside that of their products alone, on the calling thread."""
    with LayerBench(types, best_tier(), mb << 20) as bench, Pool(1) as pool:
        device = Device(Mailbox(8, 10, 2560))
        jobs = MissJobs(bench.weights, device.mailbox, device.address, pool)
        rng = np.random.default_rng(2)
        for T, n in ((1, 1), (1, 3), (1, 10), (4, 10)):
            decisions = np.full((T, 10), HIT, np.uint8)
            decisions[:, :n] = CPU
            x, w = rng.standard_normal((T, 2560)).astype(np.float32), np.full((T, 10), 0.1, np.float32)
            ratios, took = [], []
            for i in range(-1, repeat):
                took_s = 0.0
                for ids in bench.sets:
                    sums = np.zeros((T, 2560), np.int64)
                    Request(0, decisions, np.tile(ids, (T, 1)), w, x, sums).write(device.mailbox, device.area)
                    began = time.thread_time()
                    status = answer_here(jobs.address)
                    took_s += time.thread_time() - began
                    assert status == 0
                alone_s = sum(core_seconds(products(bench, ids[:n], T), pool) for ids in bench.sets)
                if i >= 0:
                    ratios.append(alone_s / took_s)
                    took.append(1e6 * took_s / len(bench.sets))
            print(f"{types}, {T} rows, {n} experts, one core: {statistics.median(took):.0f} us, products alone "
                  f"{statistics.median(ratios):.3f} of it")  # fmt: skip


def products(bench: LayerBench, experts: np.ndarray, R: int = 1) -> Job:
    made, chosen = {}, []
    out = np.zeros((R, 2560), np.float32)
    for parts in ((0, 1), (2,)):
        for e in experts:
            for part in parts:
                info = bench.tensors.info(f"blk.0.ffn_{('gate', 'up', 'down')[part]}_exps.weight")
                rows, K = info.shape[-2:]
                if part not in made:
                    made[part] = kernels_of(info.format, bench.tier), activation_records(info.format, K, R, bench.tier)
                kernels, records = made[part]
                address = int(bench.weights.expert_table(0)[e, part])
                chosen.append(Product(address, info.row_bytes, rows, K, kernels, records, out))
    return multiplying(chosen, R)


def beside_python(threads: int) -> None:
    """Windows as Python sees them, alone and beside a thread that never leaves the interpreter."""
    model = Model(TINY / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf", 8, 4)
    rng = np.random.default_rng(1)
    device = Device(Mailbox(8, model.K, model.D))
    device.prepare([model.request(rng, T=4, misses=0.5) for _ in range(16)])
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            sum(range(1000))

    with Pool(threads) as pool, MissServer(model.weights, device.mailbox, device.address, pool) as server:

        def windows(n: int = 60) -> str:
            took, inside = [], []
            for i in range(n):
                began = time.perf_counter()
                server.begin_window()
                time.sleep(0)  # as a launch: gives the interpreter's lock away and takes it back
                told = device.ask(200, seed=i)  # as the wait for a device
                server.end_window()
                took.append(1e3 * (time.perf_counter() - began))
                inside.append(told.mean_us * 200 / 1e3)
            return f"window {statistics.median(took):.2f} ms, requests {statistics.median(inside):.2f} ms"

        windows(10)
        print(f"alone: {windows()}")
        busy = threading.Thread(target=compute, daemon=True)
        busy.start()
        before = sys.getswitchinterval()
        for interval in (before, 1e-3, 2e-4, 5e-5):
            sys.setswitchinterval(interval)
            print(f"beside a busy thread, switch interval {interval:g} s: {windows()}")
        sys.setswitchinterval(before)
        done.set()
        busy.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=default_threads(core_facts(), 1))
    parser.add_argument("--mb", type=int, default=160)
    parser.add_argument("--types", default="Q4_K/IQ4_NL")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--pin", action="store_true")
    o = parser.parse_args()
    if o.busy:
        beside_python(o.threads)
        return
    shortest(o.threads, o.pin)
    for types in o.types.split(","):
        one_core(types, o.mb, o.repeat)
        layers(types, o.threads, o.mb, o.repeat)


if __name__ == "__main__":
    main()
