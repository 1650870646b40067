"""strata bench gpu-kernels wide: products of chunks on tensor cores, and the experts of a layer of a chunk, by step.

Weights are random bytes, small enough for finite scales. Beside every matrix: cuBLAS in float16 on the same shape.
"""

from __future__ import annotations

import numpy as np

from strata.cli.bench.gpu_kernels.timer import WHERE, Timer
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
DENSE = (("Q4_K", 10240, 2560), ("Q5_K", 2560, 6144), ("Q6_K", 6144, 2560), ("Q8_0", 10240, 2560),
         ("IQ4_XS", 6144, 2560), ("Q2_K", 10240, 2560), ("IQ3_XXS", 10240, 2560), ("Q4_K", 512, 2560))  # fmt: skip
FLOATS = (("BF16", 320, 10240), ("BF16", 10240, 320), ("BF16", 512, 2560), ("BF16", 96, 2560), ("F32", 512, 2560))
EXPERTS = (("Q4_K", "IQ4_NL"), ("Q8_0", "Q8_0"), ("Q2_0", "Q2_0"), ("IQ3_XXS", "Q4_0"))
BATCHES = (32, 128, 512)
"""Experts whose weights are expanded together."""


class _Scratch:
    """Memory of one size after the other, kept while it is large enough."""

    def __init__(self, t: Timer):
        self._t, self._at, self._room = t, 0, 0

    def __call__(self, n: int) -> int:
        if n > self._room:
            self._at, self._room = self._t.device.alloc(n), n
        return self._at


def _rows(t: Timer, T: int, k: int, format: BlockFormat) -> tuple[Rows, list[Launch]]:
    """Rows of a product, and the launches that quantise and prepare them."""
    x = Activations.at(t.device.alloc(Activations.n_bytes(T, k, format.group)), T, k, format.group)
    group = group_of(format)
    rows = Rows.at(t.device.alloc(Rows.n_bytes(T, k, group)), x, group)
    return rows, [*quantise(t.floats(T, k), x, t.error, WHERE), *prepare(rows)]


def _cublas_us(t: Timer, T: int, n: int, k: int) -> float | None:
    """Median us of CuPy's product in float16; None where there is no CuPy device."""
    if not isinstance(t.device, CupyDevice):
        return None
    cp, times = t.device._cupy, []
    with t.device.stream:
        a, b = cp.ones((T, k), cp.float16), cp.ones((n, k), cp.float16)
        out = cp.empty((T, n), cp.float16)
        for _ in range(t.effort.rounds + 2):
            begin = t.device.record(timed=True)
            cp.matmul(a, b.T, out=out)
            end = t.device.record(timed=True)
            t.device.wait(end)
            times.append(1e3 * t.device.elapsed_ms(begin, end))
    return float(np.median(times[2:]))


def dense(t: Timer, T: int) -> None:
    """Quantised matrices: as chunks take them, their steps, and every size of tile."""
    scratch_of = _Scratch(t)
    for name, n, k in DENSE:
        format, what, flops = by_name(name), f"{name} [{n} x {k}]", 2.0 * T * n * k
        weights, y = t.codes(relayout_bytes(format, n, k)), t.device.alloc(4 * T * n)
        scratch = scratch_of(scratch_bytes(format, n, k))
        rows, before = _rows(t, T, k, format)
        t.device.run(before)
        us = _cublas_us(t, T, n, k)
        if us is not None:
            t.add(f"float16 by cuBLAS [{n} x {k}]", us, operations=flops)
        t.add(what, t.us(gemm(format, weights, n, rows, y, scratch)), operations=flops)
        t.add(f"  {what}: quantise, prepare", t.us(before))
        t.add(f"  {what}: expand", t.us(expand(format, Place(weights), n, k, scratch)))
        for tile, tile_rows in TILE_ROWS.items():
            grid = (-(-T // tile_rows), -(-n // TILE_WEIGHTS), 1)
            us = t.us(multiply(format, n, rows, y, n, scratch, tile, grid))
            t.add(f"  {what}: {tile} tiles, expanded before", us, operations=flops)


def floats(t: Timer, T: int) -> None:
    """Float matrices."""
    scratch_of = _Scratch(t)
    for name, n, k in FLOATS:
        x, y, weights = t.floats(T, k), t.device.alloc(4 * T * n), t.floats(n, k)
        rows = FloatRows.at(t.device.alloc(FloatRows.n_bytes(T, k)), T, k)
        t.device.run(split_rows(x, rows))
        scratch = scratch_of(max(float_scratch_bytes(name, n, k), 256))
        us = t.us(float_gemm(name, weights, n, rows, y, scratch))
        t.add(f"{name} [{n} x {k}]", us, operations=2.0 * T * n * k)
        t.add(f"  {name} [{n} x {k}]: split rows", t.us(split_rows(x, rows)))


def layer(t: Timer, T: int, gate: str, down: str) -> None:
    """The experts of a layer: expanded in batches of experts and, where a kernel for that exists, unpacked inside."""
    f, d, n = by_name(gate), by_name(down), T * K
    sizes = [-(-relayout_bytes(*s) // 256) * 256 for s in ((f, F, D), (f, F, D), (d, D, F))]
    places = [Place(t.codes(E * s), s) for s in sizes]
    ids = np.stack([t.rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    ids_at, weights, gates = t.place(ids), t.floats(T, K), t.floats(T)
    order = Order.at(t.device.alloc(Order.n_bytes(n, E)), n, E)
    rows, before = _rows(t, T, D, f)
    h = Activations.at(t.device.alloc(Activations.n_bytes(n, F, d.group)), n, F, d.group)
    h_rows = Rows.at(t.device.alloc(Rows.n_bytes(n, F, group_of(d))), h, group_of(d))
    g, u, out, y = (t.device.alloc(4 * m) for m in (n * F, n * F, n * D, T * D))
    products = {"gate": (f, places[0], F, rows, g), "up": (f, places[1], F, rows, u),
                "down": (d, places[2], D, h_rows, out)}  # fmt: skip
    what, flops, scratch_of = f"experts {gate}/{down}", 6.0 * n * F * D, _Scratch(t)
    for batch in (b for b in BATCHES if b <= E):
        scratch = scratch_of(max(scratch_bytes(f, F, D, batch), scratch_bytes(d, D, F, batch)))

        def expanded(*names: str, batch: int = batch, scratch: int = scratch) -> list[Launch]:
            return [one for name in names for first in range(0, E, batch)
                    for one in grouped(*products[name], scratch, order, first, batch)]  # fmt: skip

        def packed(name: str, batch: int = batch, scratch: int = scratch) -> list[Launch]:
            if not takes_packed(products[name][0], products[name][3].x.K):
                return expanded(name, batch=batch, scratch=scratch)
            return [one for first in range(0, E, batch) for one in grouped_packed(*products[name], order, first, batch)]

        rest = {
            "quantise, prepare": before,
            "sort": sort_entries(ids_at, order),
            "gate, up": expanded("gate", "up"),
            "swiglu, prepare": swiglu(g, u, n, F, h, t.error, WHERE) + prepare(h_rows),
            "down": expanded("down"),
            "combine": combine(out, ids_at, weights, out, gates, y, T, K, D, t.error, WHERE),
        }
        whole = [one for part in rest.values() for one in part]
        t.device.run(whole)
        t.add(f"{what}, expanded, {batch} at once", t.us(whole), operations=flops)
        for name, part in rest.items():
            t.add(f"  {what}: {name}", t.us(part))
        inside = {name: packed(name) for name in products}
        both = rest | {"gate, up": inside["gate"] + inside["up"], "down": inside["down"]}
        whole = [one for part in both.values() for one in part]
        t.add(f"{what}, unpacked inside, {batch} at once", t.us(whole), operations=flops)
        for name, part in inside.items():
            t.add(f"  {what}: {name}, unpacked inside", t.us(part))


def measure(t: Timer, T: int) -> None:
    """Products of T rows."""
    dense(t, T)
    floats(t, T)
    for gate, down in EXPERTS:
        layer(t, T, gate, down)
