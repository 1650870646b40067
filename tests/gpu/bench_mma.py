"""Times products of several rows with and without tensor cores on a GPU: python -m tests.gpu.bench_mma

us a node in a captured graph over different weights: experts of a window of 2, 4 and 8 rows whose choices overlap by a
third, and dense matrices by every form.
"""

from __future__ import annotations

import sys

import numpy as np

from strata.gpu import gemv as module
from strata.gpu.activations import Activations
from strata.gpu.gemv import Entries, Hidden, Place, gemv, product, relayout, relayout_bytes
from strata.pack.formats import by_name
from strata.replay import skewed_ids
from tests.block_data import random_activations, random_rows
from tests.gpu.bench_products import CHOICES, N_EXPERTS, SPAN_BYTES, WHERE, WIDTH, Bench, D

ROWS = (2, 4, 8)
SHAPES = ((1280, 2560), (2560, 640), (2560, 6144), (10240, 2560), (16384, 2560))
OFF = 99


def choices(T: int, seed: int) -> np.ndarray:
    table = skewed_ids(16 * T, 1, N_EXPERTS, CHOICES, seed)
    return np.ascontiguousarray(np.asarray(table).reshape(-1, CHOICES)[:T].astype(np.int32))


def time_experts(b: Bench, few: bool) -> None:
    gate, down = by_name("Q4_K"), by_name("IQ4_NL")
    up_size, down_size = relayout_bytes(gate, WIDTH, D), relayout_bytes(down, D, WIDTH)
    ups, up_stride = b.copies(relayout(gate, random_rows(gate, WIDTH, D)), 2 * N_EXPERTS)
    downs, down_stride = b.copies(relayout(down, random_rows(down, D, WIDTH)), N_EXPERTS)
    places = Place(ups, 2 * up_stride), Place(ups + up_stride, 2 * up_stride), Place(downs, down_stride)
    for T in (4,) if few else ROWS:
        x, n = b.activations(random_activations(T, D), gate.group), T * CHOICES
        h = Activations.at(b.device.alloc(Activations.n_bytes(n, WIDTH, 32)), n, WIDTH, 32)
        y = b.device.alloc(4 * n * D)
        ids = [choices(T, seed) for seed in range(40)]
        at = [b.place(one) for one in ids]
        different = sum(len(np.unique(one)) for one in ids) / len(ids)
        for what, least in (("dp4a", OFF), ("tensor cores", 2)):
            module.MMA_FROM = least
            for tiles in (2,) if least == OFF else (1, 2, 4):
                module.MMA_TILES = tiles
                first, last = [], []
                for one in at:
                    e = Entries(one, n, T)
                    first += product(gate, places[0], WIDTH, x, entries=e, hidden=Hidden(places[1], h, b.error, WHERE))
                    last += product(down, places[2], D, h, y, entries=e)
                if few:
                    b.device.run(first[:2] + last[:2])
                    continue
                name = f"T {T}, {different:.1f} experts, {what}"
                if tiles <= 2:
                    b.show(f"gate+up {name}", b.graph_us(first), int(different * 2 * up_size))
                b.show(f"down {name}, {tiles} tiles", b.graph_us(last), int(different * down_size))
        module.MMA_FROM, module.MMA_TILES = 2, 2


def time_dense(b: Bench) -> None:
    for name in ("Q4_K", "IQ4_NL"):
        format = by_name(name)
        for rows, K in SHAPES:
            if K % format.block_values:
                continue
            size = relayout_bytes(format, rows, K)
            n = max(3, min(60, SPAN_BYTES // size))
            at, stride = b.copies(np.resize(relayout(format, random_rows(format, min(rows, 1280), K)), size), n)
            for T in ROWS:
                x, y = b.activations(random_activations(T, K), format.group), b.device.alloc(4 * T * rows)
                for form, least in (("product", OFF), ("split", OFF), ("product", 2), ("split", 2)):
                    module.MMA_FROM = module.MMA_SPLIT_FROM = least
                    one = [launch for i in range(n) for launch in gemv(format, at + i * stride, rows, x, y, form=form)]
                    b.show(f"{name} [{rows} x {K}] T {T} {one[0].kernel}", b.graph_us(one), size)
                module.MMA_FROM = module.MMA_SPLIT_FROM = 2


if __name__ == "__main__":
    bench = Bench()
    module.MMA_SPLIT_VALUES = 0
    time_experts(bench, "few" in sys.argv)
    if "few" not in sys.argv:
        time_dense(bench)
