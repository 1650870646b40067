"""strata bench gpu-kernels products: quantised products, compared with numpy bit by bit and then timed.

Compared are all formats asked for, dense in every form that a product has, and pairs of them as experts, through the
relayout kernel. Timed are graphs of many launches over different weights, so that nothing stays in L2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from strata.base import arithmetic
from strata.base.errors import StrataError
from strata.cli.bench.gpu_kernels.timer import WHERE, Timer
from strata.gpu.activations import Activations
from strata.gpu.experts_ends import swiglu
from strata.gpu.gemv import Entries, Hidden, Place, choices, gemv, product, relayout, relayout_bytes
from strata.gpu.gemv.ahead import AHEAD
from strata.gpu.gemv.choices import brings_column
from strata.gpu.gemv.huge import HUGE, HUGE_ROWS
from strata.gpu.gemv.mixed import Part, mixed
from strata.gpu.gemv.sources import SPLIT
from strata.gpu.launch import Source, i32, launch, pointer
from strata.gpu.relayout_kernel import bit_map, relayout_launches
from strata.pack.formats import FORMATS, BlockFormat, by_name
from strata.pack.lanes import gemv as exact
from strata.pack.random_blocks import random_rows

FREE = Source(
    "../cli/bench/gpu_kernels/free_order.cu", tuple(f"free_order<{R}, {C}>" for R in (1, 2, 4) for C in (1, 2, 4))
)
"""4-bit products whose sums have no fixed order: what the hardware gives."""
DENSE = ((1280, 2560), (2560, 6144), (10240, 2560), (16384, 2560), (2560, 10240), (248320, 2560))
LISTS = (
    (("BF16", 48), ("BF16", 48), ("IQ4_XS", 6144), ("IQ4_XS", 10240)),
    (("BF16", 48), ("BF16", 48), ("Q4_K", 6144), ("Q3_K", 10240)),
    (("BF16", 48), ("BF16", 48), ("Q4_K", 6144), ("Q4_K", 10240)),
    (("BF16", 128), ("BF16", 512), ("Q6_K", 512), ("Q5_K", 512), ("IQ4_XS", 12288)),
)
"""Matrices of one input in a layer of releases: of the delta rule, and of attention."""
TIMED = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ3_XXS", "IQ2_S", "Q2_0", "MXFP4")
EXPERTS = (("Q4_K", "IQ4_NL"), ("Q8_0", "Q8_0"), ("IQ3_XXS", "Q2_0"), ("MXFP4", "MXFP4"))
WIDTH, D, CHOICES, N_EXPERTS = 640, 2560, 10, 256
LAUNCHES, MOST_COPIES = 40, 60
SPAN_BYTES = 400 << 20
"""Weights that one graph reads: several times the L2 of any card."""
TILE_ROWS = 1280
"""Random rows of a dense matrix; a taller one repeats them."""
CHECKED_ROWS, STD = 203, 0.02
CHECKED_COLUMNS = {256: (256, 2560, 768), 32: (640, 2560, 704)}
"""Values of a compared row by the group of its activations."""
OFF = 99


@contextmanager
def tensor_cores_from(rows: int | None) -> Iterator[None]:
    """Products of so many columns and more go to tensor cores where a kernel for that exists; None: as windows do."""
    names = ("HALF_FROM", "HALF_SPLIT_FROM", "HALF_SPLIT_VALUES")
    before = [getattr(choices, name) for name in names]
    if rows is not None:
        for name, value in zip(names, (rows, rows, 0 if rows < OFF else before[2]), strict=True):
            setattr(choices, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(choices, name, value)


def forms(name: str, T: int, rows: int, K: int) -> list[str]:
    """The forms of a product that are worth a look."""
    form = ["product", *["split"] * (name in SPLIT), *["spread"] * (name in SPLIT and T == 1 and brings_column(K))]
    form += ["ahead"] * (T > 1 and AHEAD.get(name) == K)
    return form + ["huge"] * (name in HUGE and rows > 8192)


# ---- against numpy


def _weights(format: BlockFormat, rows: int, K: int, seed: int = 0) -> np.ndarray:
    return random_rows(format, rows, K, STD, np.random.default_rng(seed))


def _wanted(format: BlockFormat, raw: np.ndarray, x: np.ndarray) -> np.ndarray:
    codes, scales, _ = arithmetic.quantise(x, format.group)
    return np.stack([exact(format, raw, c, s) for c, s in zip(codes, scales, strict=True)])


def _same(found: np.ndarray, wanted: np.ndarray, what: str) -> int:
    """Values compared; StrataError if a bit differs."""
    differ = int((found.view(np.uint32) != wanted.astype(np.float32).view(np.uint32)).sum())
    if differ:
        raise StrataError(f"the product of {what} is wrong", found=f"{differ} of {found.size} values differ",
                          needed="numpy's bits", advice="Please report this.")  # fmt: skip
    return found.size


def check_dense(t: Timer, format: BlockFormat, rows: Sequence[int] = (1, 2, 3, 4, 8)) -> int:
    """Compare products of every form with numpy; returns the number of values."""
    n = 0
    for K in CHECKED_COLUMNS[format.group]:
        raw = _weights(format, CHECKED_ROWS, K, seed=K)
        x = np.random.default_rng(K).standard_normal((max(rows), K), np.float32)
        size = relayout_bytes(format, CHECKED_ROWS, K)
        bits, weights = t.place(bit_map(format, K)), t.device.alloc(size)
        t.device.run(relayout_launches(format, t.place(raw), weights, CHECKED_ROWS, K, bits))
        relaid = np.empty(size, np.uint8)
        t.device.download(weights, relaid)
        if not np.array_equal(relaid, relayout(format, raw)):
            raise StrataError(f"the layout of {format.name} on the device is wrong", found=f"rows of {K} values",
                              needed="numpy's bytes", advice="Please report this.")  # fmt: skip
        wanted = _wanted(format, raw, x)
        for T in rows:
            y, a = t.device.alloc(4 * T * CHECKED_ROWS), t.activations(x[:T], format.group)
            for form in forms(format.name, T, HUGE_ROWS, K):
                t.device.run(gemv(format, weights, CHECKED_ROWS, a, y, form=form))
                n += _same(t.get(y, T, CHECKED_ROWS), wanted[:T], f"{format.name}, K {K}, {T} rows, {form}")
    return n


def check_experts(t: Timer, format: BlockFormat, down: BlockFormat) -> int:
    """The same for gate, up, activation and down of experts of 64 x 512, wanted by 1, 2 and 5 rows."""
    E, F, K, T, n = 6, 64, 512, 5, 0
    shapes = ((format, F, K), (format, F, K), (down, K, F))
    raw = [[_weights(f, rows, k, seed=10 * p + e) for e in range(E)] for p, (f, rows, k) in enumerate(shapes)]
    table = [[t.place(relayout(f, raw[p][e])) for p, (f, _, _) in enumerate(shapes)] for e in range(E)]
    at, x = t.place(np.array(table, np.uint64)), np.random.default_rng(5).standard_normal((T, K), np.float32)
    ids = np.stack([np.random.default_rng(r).permutation(E)[:3] for r in range(T)]).astype(np.int32)
    for rows in (1, 2, T):
        own = ids[:rows]
        entries = Entries(t.place(own), own.size, rows, experts=E)
        a = t.activations(x[:rows], format.group)
        h = Activations.at(t.device.alloc(Activations.n_bytes(own.size, F, 32)), own.size, F, 32)
        hidden, y = Hidden(Place(table=at, part=1), h, t.error, WHERE), t.device.alloc(4 * own.size * K)
        t.device.run(product(format, Place(table=at), F, a, entries=entries, hidden=hidden))
        t.device.run(product(down, Place(table=at, part=2), K, h, y, entries=entries))
        found = t.get(y, own.size, K)
        for i, e in enumerate(own.reshape(-1)):
            row = x[i // 3 : i // 3 + 1]
            inner = arithmetic.swiglu(_wanted(format, raw[0][e], row), _wanted(format, raw[1][e], row))
            n += _same(found[i], _wanted(down, raw[2][e], inner)[0], f"experts {format.name}/{down.name}, {rows} rows")
    return n


def check(t: Timer, names: Sequence[str]) -> int:
    """Compare formats (none: all), and pairs of experts; returns the number of values. StrataError if one differs."""
    n = sum(check_dense(t, f) for f in FORMATS.values() if f.group and (not names or f.name in names))
    return n + sum(check_experts(t, by_name(g), by_name(d)) for g, d in EXPERTS if not names or {g, d} & set(names))


# ---- times


def time_dense(t: Timer, name: str, rows: Sequence[int]) -> None:
    """Dense matrices of a format, in every form."""
    format = by_name(name)
    for height, K in DENSE:
        size = relayout_bytes(format, height, K)
        n = max(3, min(MOST_COPIES, SPAN_BYTES // size))
        tile = relayout(format, _weights(format, min(height, TILE_ROWS), K))
        at, stride = t.copies(np.resize(tile, size), n)
        for T in rows:
            x = t.activations(np.random.default_rng(T).standard_normal((T, K), np.float32), format.group)
            y = t.device.alloc(4 * T * height)
            for form in forms(name, T, height, K):
                launches = [one for i in range(n) for one in gemv(format, at + i * stride, height, x, y, form=form)]
                what = f"{name} [{height} x {K}] T={T} {form}, {launches[0].kernel}"
                t.add(what, t.us(launches) / n, size)


def time_lists(t: Timer, lists: Sequence[Sequence[tuple[str, int]]], rows: Sequence[int]) -> None:
    """Matrices of one input, D values a row, as one launch."""
    for shapes in lists:
        matrices = [(by_name(name), n) for name, n in shapes]
        sizes = [relayout_bytes(f, n, D) if f.group else f.row_bytes(D) * n for f, n in matrices]
        copies = max(3, min(LAUNCHES, SPAN_BYTES // sum(sizes)))
        places = []
        for (format, n), size in zip(matrices, sizes, strict=True):
            tile = _weights(format, min(n, TILE_ROWS), D)
            places.append(t.copies(np.resize(relayout(format, tile) if format.group else tile, size), copies))
        for T in rows:
            x = np.random.default_rng(T).standard_normal((T, D), np.float32)
            at, made = t.place(x), {group: t.activations(x, group) for group in {f.group for f, _ in matrices} - {0}}
            y = [t.device.alloc(4 * T * n) for _, n in matrices]
            launches = []
            for i in range(copies):
                parts = [Part(f, first + i * stride, n, to) for (f, n), (first, stride), to
                         in zip(matrices, places, y, strict=True)]  # fmt: skip
                launches += mixed(at, T, D, made, parts)
            what = " + ".join(f"{name} {n}" for name, n in shapes)
            t.add(f"list T={T} {what}, {launches[0].kernel}", t.us(launches) / copies, sum(sizes))


def time_free(t: Timer, rows: int, K: int, T: int, ids: list[int], at: int, kind: str) -> None:
    """CHOICES experts of (rows, K) in 4 bits, numbered by `ids`, by the kernel without an order in its best shape."""
    y, size = t.device.alloc(4 * T * CHOICES * rows), N_EXPERTS * rows * K // 2
    best = (float("inf"), "")
    for R in (1, 2, 4):
        for warps in (2, 4, 8):
            grid, places = (-(-rows // (R * warps)), CHOICES), [pointer(p) for p in (at, at + size)]
            x = [pointer(at), pointer(at + (1 << 20)), pointer(y), i32(rows), i32(K // 32)]
            run = [launch(FREE, f"free_order<{R}, {T}>", grid, 32 * warps, *places, pointer(i), *x) for i in ids]
            best = min(best, (t.us(run) / len(ids), f"{R} rows a warp, {warps} warps"))
    t.add(f"{kind} T={T} in free order, {best[1]}", best[0], CHOICES * rows * K // 32 * 18)


def time_experts(t: Timer, gate_name: str, down_name: str, rows: Sequence[int]) -> None:
    """Experts of a layer: all rows want the same, then each its own."""
    gate, down = by_name(gate_name), by_name(down_name)
    up_size, down_size = relayout_bytes(gate, WIDTH, D), relayout_bytes(down, D, WIDTH)
    ups, up_stride = t.copies(relayout(gate, _weights(gate, WIDTH, D)), 2 * N_EXPERTS)
    downs, down_stride = t.copies(relayout(down, _weights(down, D, WIDTH)), N_EXPERTS)
    places = Place(ups, 2 * up_stride), Place(ups + up_stride, 2 * up_stride), Place(downs, down_stride)
    rng = np.random.default_rng(0)
    for T in rows:
        entries = T * CHOICES
        x = t.activations(rng.standard_normal((T, D), np.float32), gate.group)
        h = Activations.at(t.device.alloc(Activations.n_bytes(entries, WIDTH, 32)), entries, WIDTH, 32)
        sides, y = t.device.alloc(8 * entries * WIDTH), t.device.alloc(4 * entries * D)
        for same in (True, False) if T > 1 else (True,):
            first, last, apart, different, numbers = [], [], [], 0, []
            for _ in range(LAUNCHES):
                ids = np.stack([rng.permutation(N_EXPERTS)[:CHOICES] for _ in range(T)]).astype(np.int32)
                ids = np.broadcast_to(ids[:1], ids.shape) if same else ids
                different += len(np.unique(ids))
                numbers.append(t.place(ids))
                e = Entries(numbers[-1], entries, T, experts=N_EXPERTS)
                first += product(gate, places[0], WIDTH, x, entries=e, hidden=Hidden(places[1], h, t.error, WHERE))
                apart += product(gate, places[0], WIDTH, x, sides, entries=e)
                last += product(down, places[2], D, h, y, entries=e)
            n = different / LAUNCHES
            what = f"T={T}, {n:.1f} experts"
            for name, launches, n_bytes in (("gate+up+SwiGLU " + gate_name, first, 2 * n * up_size),
                                            ("gate alone " + gate_name, apart, n * up_size),
                                            ("down " + down_name, last, n * down_size)):  # fmt: skip
                t.add(f"{name} {what}", t.us(launches) / LAUNCHES, n_bytes)
            if gate_name == "Q4_K" and T in (1, 2, 4) and same:
                time_free(t, 2 * WIDTH, D, T, numbers, ups, "gate+up")
                time_free(t, D, WIDTH, T, numbers, ups, "down")
        activation = swiglu(sides, sides + 4 * entries * WIDTH, entries, WIDTH, h, t.error, WHERE)
        t.add(f"SwiGLU alone T={T}", t.us(activation))


def timings(names: Sequence[str], rows: Sequence[int]) -> list[Callable[[Timer], None]]:
    """What times matrices of formats (none: TIMED), and pairs of experts that have one of them: gigabytes each."""
    dense = [partial(time_dense, name=name, rows=rows) for name in names or TIMED]
    pairs = [pair for pair in EXPERTS if not names or set(pair) & set(names)]
    lists = [one for one in LISTS if not names or {name for name, _ in one} & set(names)]
    dense += [partial(time_lists, lists=lists, rows=rows)] * bool(lists)
    return [*dense, *(partial(time_experts, gate_name=gate, down_name=down, rows=rows) for gate, down in pairs)]
