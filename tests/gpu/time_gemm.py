"""Times wide products on a CUDA device: python -m tests.gpu.time_gemm [T]

TFLOP/s of quantised and float matrices at the shapes of the model, with the expansion and without it, next to
cupy.matmul in float16; then the experts of one layer, 512 of them with 10 choices a row, step by step. Weights are
random bytes, small enough for finite scales.
"""

from __future__ import annotations

import sys

import numpy as np

from strata.gpu.activations import Activations, quantise
from strata.gpu.device import CupyDevice
from strata.gpu.experts_ends import combine, swiglu
from strata.gpu.gemm import (
    FloatRows,
    Order,
    Rows,
    expand,
    float_gemm,
    float_scratch_bytes,
    gemm,
    group_of,
    grouped,
    grouped_packed,
    prepare,
    scratch_bytes,
    sort_entries,
    split_rows,
    takes_packed,
)
from strata.gpu.gemm.quantised import TILE_ROWS, TILE_WEIGHTS, multiply
from strata.gpu.gemv import Place
from strata.gpu.launch import Launch
from strata.gpu.relayout import relayout_bytes
from strata.pack.formats import BlockFormat, by_name

D, F, E, K = 2560, 640, 512, 10
WHERE = np.uint64(0)
DENSE = (("Q4_K", 10240, 2560), ("Q5_K", 2560, 6144), ("Q6_K", 6144, 2560), ("Q8_0", 10240, 2560),
         ("IQ4_XS", 6144, 2560), ("Q2_K", 10240, 2560), ("IQ3_XXS", 10240, 2560), ("Q4_K", 512, 2560))  # fmt: skip
FLOATS = (("BF16", 320, 10240), ("BF16", 10240, 320), ("BF16", 512, 2560), ("BF16", 96, 2560), ("F32", 512, 2560))
EXPERTS = (("Q4_K", "IQ4_NL"), ("Q8_0", "Q8_0"), ("Q2_0", "Q2_0"), ("IQ3_XXS", "Q4_0"))
BATCHES = (32, 128, 512)


class Timer:
    def __init__(self) -> None:
        self.device = CupyDevice()
        self.cp = self.device._cupy
        self.rng = np.random.default_rng(1)
        self.error = self.device.alloc(8)
        self.device.upload(self.error, np.array([2**64 - 1], np.uint64))
        self.scratch, self.scratch_room = 0, 0

    def random_bytes(self, n: int) -> int:
        at, piece = self.device.alloc(n), self.rng.integers(0, 32, min(n, 1 << 24), dtype=np.uint8)
        for start in range(0, n, piece.size):
            self.device.upload(at + start, piece[: n - start])
        return at

    def floats(self, *shape: int) -> int:
        at = self.device.alloc(4 * int(np.prod(shape)))
        self.device.upload(at, self.rng.standard_normal(shape, dtype=np.float32))
        return at

    def room(self, n: int) -> int:
        """Scratch of at least n bytes, the same for all."""
        if n > self.scratch_room:
            self.scratch, self.scratch_room = self.device.alloc(n), n
        return self.scratch

    def us(self, launches: list[Launch], rounds: int = 9) -> float:
        """Median us of a graph of the launches."""
        graph, times = self.device.graph(launches), []
        for _ in range(rounds):
            start, stop = self.cp.cuda.Event(), self.cp.cuda.Event()
            start.record(self.device.stream)
            graph()
            stop.record(self.device.stream)
            stop.synchronize()
            times.append(1e3 * self.cp.cuda.get_elapsed_time(start, stop))
        return float(np.median(times[2:]))

    def rows(self, T: int, k: int, format: BlockFormat) -> tuple[Rows, list[Launch]]:
        x = Activations.at(self.device.alloc(Activations.n_bytes(T, k, format.group)), T, k, format.group)
        group = group_of(format)
        rows = Rows.at(self.device.alloc(Rows.n_bytes(T, k, group)), x, group)
        return rows, [*quantise(self.floats(T, k), x, self.error, WHERE), *prepare(rows)]

    def matmul_us(self, T: int, n: int, k: int) -> float:
        cp, times = self.cp, []
        with self.device.stream:
            a, b = cp.ones((T, k), cp.float16), cp.ones((n, k), cp.float16)
            out = cp.empty((T, n), cp.float16)
            for _ in range(9):
                start, stop = cp.cuda.Event(), cp.cuda.Event()
                start.record()
                cp.matmul(a, b.T, out=out)
                stop.record()
                stop.synchronize()
                times.append(1e3 * cp.cuda.get_elapsed_time(start, stop))
        return float(np.median(times[2:]))


def tflops(T: int, n: int, k: int, us: float) -> str:
    return f"{us:8.1f} us {2e-6 * T * n * k / us:6.1f} TFLOP/s"


def dense(t: Timer, T: int) -> None:
    for name, n, k in DENSE:
        format = by_name(name)
        weights, y, scratch = (
            t.random_bytes(relayout_bytes(format, n, k)),
            t.device.alloc(4 * T * n),
            t.room(scratch_bytes(format, n, k)),
        )
        rows, before = t.rows(T, k, format)
        t.device.run(before)
        print(f"{name} [{T} x {n} x {k}]: cupy.matmul float16 {tflops(T, n, k, t.matmul_us(T, n, k))}")
        print(f"    gemm                 {tflops(T, n, k, t.us(gemm(format, weights, n, rows, y, scratch)))}")
        print(f"    quantise, prepare    {t.us(before):8.1f} us")
        print(f"    expand               {t.us(expand(format, Place(weights), n, k, scratch)):8.1f} us")
        for tile, tile_rows in TILE_ROWS.items():
            grid = (-(-T // tile_rows), -(-n // TILE_WEIGHTS), 1)
            us = t.us(multiply(format, n, rows, y, n, scratch, tile, grid))
            print(f"    {tile:<7} tiles        {tflops(T, n, k, us)}")


def floats(t: Timer, T: int) -> None:
    for name, n, k in FLOATS:
        x, y = t.floats(T, k), t.device.alloc(4 * T * n)
        weights = t.floats(n, k)
        rows = FloatRows.at(t.device.alloc(FloatRows.n_bytes(T, k)), T, k)
        t.device.run(split_rows(x, rows))
        us = t.us(float_gemm(name, weights, n, rows, y, t.room(max(float_scratch_bytes(name, n, k), 256))))
        print(f"{name} [{T} x {n} x {k}] {tflops(T, n, k, us)}, split {t.us(split_rows(x, rows)):.1f} us")


def layer(t: Timer, T: int, gate: str, down: str) -> None:
    f, d, n = by_name(gate), by_name(down), T * K
    sizes = [-(-relayout_bytes(*s) // 256) * 256 for s in ((f, F, D), (f, F, D), (d, D, F))]
    places = [Place(t.random_bytes(E * s), s) for s in sizes]
    ids = np.stack([t.rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    ids_at, weights, gates = t.device.alloc(ids.nbytes), t.floats(T, K), t.floats(T)
    t.device.upload(ids_at, ids)
    order = Order.at(t.device.alloc(Order.n_bytes(n, E)), n, E)
    rows, before = t.rows(T, D, f)
    h = Activations.at(t.device.alloc(Activations.n_bytes(n, F, d.group)), n, F, d.group)
    h_rows = Rows.at(t.device.alloc(Rows.n_bytes(n, F, group_of(d))), h, group_of(d))
    g, u, out, y = (t.device.alloc(4 * m) for m in (n * F, n * F, n * D, T * D))
    for batch in BATCHES:
        scratch = t.room(max(scratch_bytes(f, F, D, batch), scratch_bytes(d, D, F, batch)))

        def product(format, place, n_rows, x, to, batch=batch, scratch=scratch) -> list[Launch]:
            return [one for first in range(0, E, batch)
                    for one in grouped(format, place, n_rows, x, to, scratch, order, first, batch)]  # fmt: skip

        steps = {
            "quantise, prepare": before,
            "sort": sort_entries(ids_at, order),
            "gate, up": product(f, places[0], F, rows, g) + product(f, places[1], F, rows, u),
            "swiglu, prepare": swiglu(g, u, n, F, h, t.error, WHERE) + prepare(h_rows),
            "down": product(d, places[2], D, h_rows, out),
            "combine": combine(out, ids_at, weights, out, gates, y, T, K, D, t.error, WHERE),
        }
        t.device.run([one for part in steps.values() for one in part])
        total = t.us([one for part in steps.values() for one in part])
        flops = 2e-6 * n * 3 * F * D / total
        print(f"experts {gate}/{down}, {T} rows, batches of {batch}: {total:.0f} us, {flops:.1f} TFLOP/s, scratch "
              f"{scratch_bytes(f, F, D, batch) >> 20} MiB")  # fmt: skip
        print("    " + ", ".join(f"{name} {t.us(part):.0f}" for name, part in steps.items()))
        packed = []
        for part, format, n_rows, x, to in ((0, f, F, rows, g), (1, f, F, rows, u), (2, d, D, h_rows, out)):
            if takes_packed(format, x.x.K):
                some = []
                for first in range(0, E, batch):
                    some += grouped_packed(format, places[part], n_rows, x, to, order, first, batch)
                packed.append(f"{('gate', 'up', 'down')[part]} {t.us(some):.0f}")
        if packed:
            print("    packed matrices: " + ", ".join(packed))
        only = [one for one in steps["gate, up"] if "expand" not in one.kernel]
        print(f"    gate, up without expansion {t.us(only):.0f}")


def main() -> None:
    T = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    t = Timer()
    print(t.device.name)
    dense(t, T)
    floats(t, T)
    for gate, down in EXPERTS:
        layer(t, T, gate, down)


if __name__ == "__main__":
    main()
