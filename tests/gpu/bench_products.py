"""Checks and times quantised products on a CUDA device: python -m tests.gpu.bench_products [FORMAT ..]

First every format is compared with numpy, bit by bit, through the relayout kernel, dense and as experts. Then graphs of
many launches over different weights (nothing stays in L2) are timed: us a launch, GB/s of weights, percent of the rate
of a device-to-device copy in the same run (bytes read and written).
"""

from __future__ import annotations

import sys

import numpy as np

from strata.base import arithmetic
from strata.gpu.activations import Activations, quantise
from strata.gpu.device import CupyDevice
from strata.gpu.experts_ends import swiglu
from strata.gpu.gemv import SPLIT, Entries, Hidden, Place, brings_column, gemv, product, relayout, relayout_bytes
from strata.gpu.gemv.huge import HUGE, HUGE_ROWS
from strata.gpu.launch import Launch, Source, i32, launch, pointer
from strata.gpu.relayout_kernel import bit_map, relayout_launches
from strata.pack.formats import FORMATS, BlockFormat, by_name
from strata.pack.lanes import gemv as exact
from tests.block_data import random_activations, random_rows
from tests.canonical.call import assert_same

WHERE = np.uint64(0)
FREE = Source("../../tests/gpu/free_order.cu", tuple(f"free_order<{R}, {C}>" for R in (1, 2, 4) for C in (1, 2, 4)))
"""4-bit products whose sums have no fixed order: what the hardware gives."""
DENSE = ((1280, 2560), (2560, 6144), (10240, 2560), (16384, 2560), (2560, 10240), (248320, 2560))
TIMED = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ3_XXS", "IQ2_S", "Q2_0", "MXFP4")
EXPERTS = (("Q4_K", "IQ4_NL"), ("Q8_0", "Q8_0"), ("IQ3_XXS", "Q2_0"), ("MXFP4", "MXFP4"))
WIDTH, D, CHOICES, N_EXPERTS = 640, 2560, 10, 256
SPAN_BYTES = 400 << 20
"""Weights that one graph reads: several times the L2 of any card."""


class Bench:
    def __init__(self) -> None:
        self.device = CupyDevice()
        self.cp = self.device._cupy
        self.error = self.device.alloc(8)
        self.device.upload(self.error, np.array([2**64 - 1], np.uint64))
        self.copy_gbps = self._copy_rate()
        print(f"{self.device.name}: copy {self.copy_gbps:.0f} GB/s read and written")

    def place(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        at = self.device.alloc(array.nbytes)
        self.device.upload(at, array)
        return at

    def get(self, at: int, *shape: int) -> np.ndarray:
        out = np.empty(shape, np.float32)
        self.device.download(at, out)
        return out

    def copies(self, data: np.ndarray, n: int) -> tuple[int, int]:
        """(address, stride) of n copies of an array."""
        stride = -(-data.nbytes // 256) * 256
        at, runtime = self.device.alloc(n * stride), self.cp.cuda.runtime
        self.device.upload(at, data)
        for i in range(1, n):
            runtime.memcpyAsync(at + i * stride, at, data.nbytes, 3, self.device.stream.ptr)
        self.device.synchronize()
        return at, stride

    def us(self, run, n: int, rounds: int = 9) -> float:
        """Median us of one of the n things that run() queues."""
        cp, stream, times = self.cp, self.device.stream, []
        for _ in range(rounds):
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record(stream)
            run()
            stop.record(stream)
            stop.synchronize()
            times.append(1e3 * cp.cuda.get_elapsed_time(start, stop) / n)
        return float(np.median(times[2:]))

    def graph_us(self, launches: list[Launch]) -> float:
        return self.us(self.device.graph(launches), len(launches))

    def _copy_rate(self) -> float:
        n, runtime = 1 << 30, self.cp.cuda.runtime
        a = self.device.alloc(2 * n)
        return 2 * n / self.us(lambda: runtime.memcpyAsync(a + n, a, n, 3, self.device.stream.ptr), 1) / 1e3

    def activations(self, x: np.ndarray, group: int) -> Activations:
        """Rows quantised on the device."""
        a = Activations.at(self.device.alloc(Activations.n_bytes(*x.shape, group)), *x.shape, group)
        self.device.run(quantise(self.place(x), a, self.error, WHERE))
        return a

    def show(self, what: str, us: float, n_bytes: int) -> None:
        gbps = n_bytes / us / 1e3
        print(f"  {what:<44} {us:8.2f} us {gbps:7.0f} GB/s {100 * gbps / self.copy_gbps:5.0f} %")


def forms(name: str, T: int, rows: int, K: int) -> list[str]:
    """The forms of a product that are worth a look."""
    form = ["product", *["split"] * (name in SPLIT), *["spread"] * (name in SPLIT and T == 1 and brings_column(K))]
    return form + ["huge"] * (name in HUGE and rows > 8192)


def wanted(format: BlockFormat, raw: np.ndarray, x: np.ndarray) -> np.ndarray:
    codes, scales, _ = arithmetic.quantise(x, format.group)
    return np.stack([exact(format, raw, c, s) for c, s in zip(codes, scales, strict=True)])


def check_dense(b: Bench, format: BlockFormat) -> int:
    """Values compared."""
    n = 0
    for K in (256, 2560, 768) if format.group == 256 else (640, 2560, 704):
        for mode in ("plain", "mid", "tiny", "edge", "wild"):
            raw, x = random_rows(format, 203, K, mode, seed=K), random_activations(8, K, mode, seed=K + 1)
            bits, weights = b.place(bit_map(format, K)), b.device.alloc(relayout_bytes(format, 203, K))
            b.device.run(relayout_launches(format, b.place(raw), weights, 203, K, bits))
            relaid = np.empty(relayout_bytes(format, 203, K), np.uint8)
            b.device.download(weights, relaid)
            np.testing.assert_array_equal(relaid, relayout(format, raw))
            expected = wanted(format, raw, x)
            for T in (1, 2, 3, 4, 8):
                y = b.device.alloc(4 * T * 203)
                a = b.activations(x[:T], format.group)
                for form in forms(format.name, T, HUGE_ROWS, K):
                    b.device.run(gemv(format, weights, 203, a, y, form=form))
                    assert_same(b.get(y, T, 203), expected[:T], f"{format.name} {mode} K {K} T {T} {form}")
                    n += T * 203
    return n


def check_experts(b: Bench, format: BlockFormat, down: BlockFormat) -> int:
    E, F, K, T, n = 6, 64, 512, 5, 0
    raw = [[random_rows(f, rows, k, "plain", seed=10 * p + e) for e in range(E)]
           for p, (f, rows, k) in enumerate(((format, F, K), (format, F, K), (down, K, F)))]  # fmt: skip
    table = np.array(
        [[b.place(relayout(f, raw[p][e])) for p, f in enumerate((format, format, down))] for e in range(E)], np.uint64
    )
    at, x = b.place(table), random_activations(T, K, "plain", seed=5)
    ids = np.stack([np.random.default_rng(t).permutation(E)[:3] for t in range(T)]).astype(np.int32)
    for rows in (1, 2, T):
        own = np.ascontiguousarray(ids[:rows])
        entries = Entries(b.place(own), own.size, rows)
        h = Activations.at(b.device.alloc(Activations.n_bytes(own.size, F, 32)), own.size, F, 32)
        hidden, y = Hidden(Place(table=at, part=1), h, b.error, WHERE), b.device.alloc(4 * own.size * K)
        b.device.run(
            product(format, Place(table=at), F, b.activations(x[:rows], format.group), entries=entries, hidden=hidden)
        )
        b.device.run(product(down, Place(table=at, part=2), K, h, y, entries=entries))
        found = b.get(y, own.size, K)
        for i, e in enumerate(own.reshape(-1)):
            row = x[i // 3 : i // 3 + 1]
            hidden_row = arithmetic.swiglu(wanted(format, raw[0][e], row), wanted(format, raw[1][e], row))
            assert_same(found[i], wanted(down, raw[2][e], hidden_row)[0], f"{format.name} {down.name} entry {i}")
            n += K
    return n


def time_dense(b: Bench, name: str) -> None:
    format = by_name(name)
    for rows, K in DENSE:
        size = relayout_bytes(format, rows, K)
        n = max(3, min(60, SPAN_BYTES // size))
        at, stride = b.copies(np.resize(relayout(format, random_rows(format, min(rows, 1280), K)), size), n)
        for T in (1, 2, 4, 8):
            x, y = b.activations(random_activations(T, K), format.group), b.device.alloc(4 * T * rows)
            for form in forms(name, T, rows, K):
                one = [gemv(format, at + i * stride, rows, x, y, form=form) for i in range(n)]
                what = f"{name} [{rows} x {K}] T {T} {form}"
                b.show(what, b.graph_us([launch for launches in one for launch in launches]), size)


def time_free(b: Bench, rows: int, K: int, T: int, ids: list[int], at: int, kind: str) -> None:
    """CHOICES experts of (rows, K) in 4 bits, numbered by `ids`, by the kernel without an order in its best shape."""
    y, size = b.device.alloc(4 * T * CHOICES * rows), N_EXPERTS * rows * K // 2
    best, shape = 1e9, ""
    for R in (1, 2, 4):
        for warps in (2, 4, 8):
            grid, places = (-(-rows // (R * warps)), CHOICES), [pointer(p) for p in (at, at + size)]
            x = [pointer(at), pointer(at + (1 << 20)), pointer(y), i32(rows), i32(K // 32)]
            us = b.graph_us(
                [launch(FREE, f"free_order<{R}, {T}>", grid, 32 * warps, *places, pointer(i), *x) for i in ids]
            )
            if us < best:
                best, shape = us, f"{R} rows a warp, {warps} warps"
    b.show(f"free order, {kind}, T {T}", best, CHOICES * rows * K // 32 * 18)
    print(f"    {shape}")


def time_experts(b: Bench, gate_name: str, down_name: str) -> None:
    gate, down = by_name(gate_name), by_name(down_name)
    up_size, down_size = relayout_bytes(gate, WIDTH, D), relayout_bytes(down, D, WIDTH)
    ups, up_stride = b.copies(relayout(gate, random_rows(gate, WIDTH, D)), 2 * N_EXPERTS)
    downs, down_stride = b.copies(relayout(down, random_rows(down, D, WIDTH)), N_EXPERTS)
    rng, launches = np.random.default_rng(0), 40
    for T in (1, 2, 4, 8):
        for same in (True, False) if T > 1 else (True,):
            x, entries = b.activations(random_activations(T, D), gate.group), T * CHOICES
            h = Activations.at(b.device.alloc(Activations.n_bytes(entries, WIDTH, 32)), entries, WIDTH, 32)
            sides, y = b.device.alloc(8 * entries * WIDTH), b.device.alloc(4 * entries * D)
            places = Place(ups, 2 * up_stride), Place(ups + up_stride, 2 * up_stride), Place(downs, down_stride)
            first, last, apart, different, numbers = [], [], [], 0, []
            for _ in range(launches):
                ids = np.stack([rng.permutation(N_EXPERTS)[:CHOICES] for _ in range(T)]).astype(np.int32)
                ids = np.ascontiguousarray(np.broadcast_to(ids[:1], ids.shape)) if same else ids
                different += len(np.unique(ids))
                numbers.append(b.place(ids))
                e = Entries(numbers[-1], entries, T)
                first += product(gate, places[0], WIDTH, x, entries=e, hidden=Hidden(places[1], h, b.error, WHERE))
                apart += product(gate, places[0], WIDTH, x, sides, entries=e)
                last += product(down, places[2], D, h, y, entries=e)
            activation = swiglu(sides, sides + 4 * entries * WIDTH, entries, WIDTH, h, b.error, WHERE)
            n = different / launches
            what = f"T {T}, {n:.0f} experts"
            b.show(f"gate+up+SwiGLU {gate_name}, {what}", b.graph_us(first), int(n * 2 * up_size))
            b.show(f"gate alone {gate_name}, {what}", b.graph_us(apart), int(n * up_size))
            b.show(f"down {down_name}, {what}", b.graph_us(last), int(n * down_size))
            if gate_name == "Q4_K" and T <= 4 and (same or T == 1):
                time_free(b, 2 * WIDTH, D, T, numbers, ups, "gate+up")
                time_free(b, D, WIDTH, T, numbers, ups, "down")
            print(f"  {'SwiGLU alone':<44} {b.graph_us(activation * launches):8.2f} us")


def main(names: list[str]) -> None:
    b = Bench()
    checked = sum(check_dense(b, f) for f in FORMATS.values() if f.group and (not names or f.name in names))
    checked += sum(check_experts(b, by_name(g), by_name(d)) for g, d in EXPERTS)
    print(f"{checked} values equal to numpy, every bit")
    for name in names or TIMED:
        time_dense(b, name)
    for gate, down in EXPERTS:
        if not names or {gate, down} & set(names):
            time_experts(b, gate, down)


if __name__ == "__main__":
    main(sys.argv[1:])
