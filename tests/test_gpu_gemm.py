"""Wide products on the GPU's code, run on the CPU: every format against its own arithmetic and against float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base import arithmetic
from strata.base.errors import BadArgument
from strata.gpu.activations import Activations
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
from strata.gpu.gemv import Place, relayout
from strata.pack.formats import FORMATS, by_name
from tests.block_data import random_activations, random_rows
from tests.canonical.call import assert_same, check_guards, guarded, room
from tests.gpu.run_on_cpu import address, needs_compiler, run_all
from tests.test_gpu_gemv import aligned, area_of

pytestmark = needs_compiler
QUANTISED = [f for f in FORMATS.values() if f.group]
every_format = pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)


def area(n_bytes: int) -> np.ndarray:
    """Garbage (NaN as float32 and bfloat16) on a 256-byte boundary."""
    whole = np.full(n_bytes + 512, 0xFF, np.uint8)
    start = 256 - whole.ctypes.data % 256
    return whole[start : start + n_bytes]


class Prepared:
    """Quantised rows of x, and what `prepare` makes of them."""

    def __init__(self, x: np.ndarray, format):
        self.x, self.area = x, area_of(x, format.group)
        self.memory = area(Rows.n_bytes(*x.shape, group_of(format)))
        self.rows = Rows.at(address(self.memory), self.area.places, group_of(format))
        self.launches = prepare(self.rows)

    @property
    def values(self) -> np.ndarray:
        """float64 values of the codes."""
        return self.area.codes * np.repeat(self.area.scales.astype(np.float64), self.area.group, -1)


def relative_rms(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)))


def check_close(y: np.ndarray, x: np.ndarray, w: np.ndarray, relative: float = 2.0**-20) -> None:
    """y = x w^T but for an error of `relative` of the sum of the terms' sizes."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    assert (np.abs(y - x @ w.T) <= relative * (np.abs(x) @ np.abs(w).T)).all()


def dense(format, raw, x, *, reverse=False, spare=0) -> np.ndarray:
    p, n = Prepared(x, format), len(raw)
    weights, scratch = aligned(relayout(format, raw)), area(scratch_bytes(format, n, x.shape[1]))
    y = room(len(x), n + spare)
    run_all([*p.launches, *gemm(format, address(weights), n, p.rows, address(y), address(scratch), n + spare)],
            reverse=reverse)  # fmt: skip
    check_guards(y)
    assert (y[:, n:].view(np.uint8) == 0x5A).all(), "written between the rows"
    check_close(y[:, :n], p.values, format.dequantise(raw))
    return y[:, :n]


def unpacked(format, raw, scratch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """codes, scales and minima (rows, groups) of an expanded matrix."""
    n, K, group = len(raw), raw.shape[1] // format.block_bytes * format.block_values, group_of(format)
    whole, padded = -(-n // 4) * 4, -(-K // 64) * 64
    side = -(-4 * whole * padded // group // 256) * 256
    at = -(-whole * padded // 256) * 256
    pairs = scratch[: whole * padded].view(np.int8).reshape(whole // 2, padded // 4, 2, 4)
    codes = pairs.transpose(0, 2, 1, 3).reshape(whole, padded)[:n]
    sides = [scratch[s : s + 4 * n * padded // group].view(np.float32).reshape(n, -1) for s in (at, at + side)
             if s < scratch.size]  # fmt: skip
    return codes, sides[0], sides[1] if len(sides) > 1 else np.zeros_like(sides[0])


def widths(format) -> tuple[int, ...]:
    if format.group == 256:
        return 256, 512, 768
    return (64, 128, 640) if format.block_values == 64 else (32, 96, 352, 640)


@every_format
def test_expansion_is_exact(format):
    """scale * code + minimum are the format's values, for rows that end anywhere in a chunk; no byte is left out."""
    group = group_of(format)
    for k, K in enumerate((*widths(format), 2560)):
        for mode in ("plain", "edge"):
            raw = random_rows(format, 9, K, mode, seed=k)
            weights, scratch = aligned(relayout(format, raw)), area(scratch_bytes(format, 9, K))
            run_all(expand(format, Place(address(weights)), 9, K, address(scratch)), reverse=mode == "edge")
            codes, scales, minima = unpacked(format, raw, scratch)
            assert (scales[:, K // group :] == 0).all() and (minima[:, K // group :] == 0).all()
            values = codes * np.repeat(scales.astype(np.float64), group, -1) + np.repeat(minima, group, -1)
            wanted = format.dequantise(raw)
            assert_same(values[:, :K].astype(np.float32), wanted + np.float32(0), f"{format.name} {mode} K {K}")


@every_format
def test_dense(format):
    K = widths(format)[-1]
    raw, x = random_rows(format, 137, K, seed=1), random_activations(67, K, seed=2)
    whole = dense(format, raw, x, spare=3)
    exact = x.astype(np.float64) @ format.dequantise(raw).astype(np.float64).T
    assert relative_rms(whole, exact) < 0.02  # the rows' own quantisation, as in windows
    assert_same(dense(format, raw[:5], x[:17], reverse=True), whole[:17, :5], "bits depend on the other rows")
    assert_same(dense(format, raw[130:], x[9:10]), whole[9:10, 130:], "bits depend on the other rows")


def test_the_arithmetic_is_the_one_described():
    """Groups in ascending order, one fma each, minima after scales: every bit, for the four kinds of formats."""
    for name in ("Q8_0", "Q5_K", "IQ2_XS", "Q2_K"):
        format = by_name(name)
        K, n = widths(format)[-1], 11
        raw, x = random_rows(format, n, K, "mid", seed=3), random_activations(9, K, "mid", seed=4)
        p, group = Prepared(x, format), group_of(format)
        weights, scratch, y = aligned(relayout(format, raw)), area(scratch_bytes(format, n, K)), room(9, n)
        run_all([*p.launches, *gemm(format, address(weights), n, p.rows, address(y), address(scratch))])
        codes, scales, minima = unpacked(format, raw, scratch)
        acc = np.zeros((9, n), np.float32)
        with np.errstate(all="ignore"):
            for i in range(K // group):
                at = slice(group * i, group * (i + 1))
                a, b = p.area.codes[:, at].astype(np.int32), codes[:, at].astype(np.int32)
                row_scale = p.area.scales[:, group * i // format.group]
                dot, c = (a @ b.T).astype(np.float32), scales[:, i] * row_scale[:, None]
                acc = arithmetic.fma32(dot, c, acc)
                if format.name in ("Q5_K", "Q2_K"):
                    sums = row_scale * a.sum(-1).astype(np.float32)
                    acc = arithmetic.fma32(np.broadcast_to(minima[:, i], acc.shape), sums[:, None], acc)
        assert_same(y, acc + np.float32(0), name)


@pytest.mark.parametrize("tile", TILE_ROWS)
@pytest.mark.parametrize("name", ["Q8_0", "Q2_K"])
def test_tiles_give_the_same_bits(name, tile):
    """Full tiles, one row and one weight more, and a single one."""
    format = by_name(name)
    K = 96 if format.group == 32 else 256
    for T, n in ((256, 129), (129, 128), (1, 1)):
        raw, x = random_rows(format, n, K, seed=n), random_activations(T, K, seed=T)
        p, weights, y = Prepared(x, format), aligned(relayout(format, raw)), room(T, n)
        scratch = area(scratch_bytes(format, n, K))
        grid = (-(-T // TILE_ROWS[tile]), -(-n // TILE_WEIGHTS), 1)
        run_all([*p.launches, *expand(format, Place(address(weights)), n, K, address(scratch)),
                 *multiply(format, n, p.rows, address(y), n, address(scratch), tile, grid)])  # fmt: skip
        check_guards(y)
        check_close(y, p.values, format.dequantise(raw))
        assert_same(dense(format, raw[-1:], x[-1:]), y[-1:, -1:], f"{name} {tile}")


class Experts:
    """E matrices (n, K) of a format: one after the other, and scattered, with addresses in part 1 of a table."""

    def __init__(self, format, E: int, n: int, K: int):
        self.format, self.n = format, n
        self.raw = [random_rows(format, n, K, seed=e) for e in range(E)]
        relaid = [relayout(format, r) for r in self.raw]
        self.stride = -(-relaid[0].size // 256) * 256
        whole = np.zeros((E, self.stride), np.uint8)
        for e, r in enumerate(relaid):
            whole[e, : r.size] = r
        self.whole, self.apart = aligned(whole.reshape(-1)), [aligned(r) for r in relaid]

    def place(self, wanted: np.ndarray, table: bool) -> Place:
        """The words of experts that nobody wants are no addresses."""
        if not table:
            return Place(address(self.whole), self.stride)
        words = np.full((len(self.raw), 3), 8, np.uint64)
        for e in np.unique(wanted):
            words[e, 1] = address(self.apart[e])
        self.table = guarded(words)
        return Place(table=address(self.table), part=1)


def run_packed(experts: Experts, x: np.ndarray, ids: np.ndarray, **how) -> np.ndarray:
    return run_grouped(experts, x, ids, packed=True, **how)


def run_grouped(
    experts: Experts,
    x: np.ndarray,
    ids: np.ndarray,
    *,
    batch: int,
    table: bool = False,
    reverse: bool = False,
    packed: bool = False,
) -> np.ndarray:
    format, n, K, E = experts.format, experts.n, x.shape[1], len(experts.raw)
    p, place = Prepared(x, format), experts.place(ids, table)
    own, y = guarded(ids.reshape(-1).astype(np.int32)), room(ids.size, n)
    sorted_area, scratch = area(Order.n_bytes(ids.size, E)), area(scratch_bytes(format, n, K, batch))
    order = Order.at(address(sorted_area), ids.size, E)
    launches = [*p.launches, *sort_entries(address(own), order)]
    for first in range(0, E, batch):
        at_once = min(batch, E - first)
        if packed:
            launches += grouped_packed(format, place, n, p.rows, address(y), order, first, at_once)
        else:
            launches += grouped(format, place, n, p.rows, address(y), address(scratch), order, first, at_once)
    run_all(launches, reverse=reverse)
    check_guards(y)
    return y


@pytest.mark.parametrize("format", [by_name(n) for n in ("Q4_K", "IQ4_NL", "Q2_0", "IQ1_M", "Q2_K", "NVFP4")],
                         ids=lambda f: f.name)  # fmt: skip
def test_grouped(format):
    """Rows of several entries; experts without an entry, with one and with most; whole and in batches."""
    E, n, T, K = 5, 72, 40, 256
    rng = np.random.default_rng(1)
    ids = np.stack([rng.permutation([0, 2, 4])[:2] for _ in range(T)])
    ids[7, 0] = 3
    x = random_activations(T, K, seed=6)
    experts = Experts(format, E, n, K)
    found = run_grouped(experts, x, ids, batch=5)
    assert_same(run_grouped(experts, x, ids, batch=2, table=True, reverse=True), found, format.name)
    for e in range(E):
        mine = np.flatnonzero(ids.reshape(-1) == e)
        if mine.size:
            assert_same(found[mine], dense(format, experts.raw[e], x[mine // 2]), f"{format.name}, expert {e}")


PACKED_CASES = [
    ("Q4_K", 256, 72, 40), ("Q4_K", 768, 9, 30), ("Q4_K", 512, 130, 12),
    *(("IQ4_NL", K, n, T) for K, n, T in ((64, 72, 40), (192, 9, 20), (256, 130, 12), (320, 8, 20), (640, 5, 15))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "K", "n", "T"), PACKED_CASES)
def test_packed_matrices_give_the_bits_of_expanded_ones(name, K, n, T):
    """Ends of rows that are no whole chunk, rows that are no whole tile, batches, tables; experts without entries."""
    format, E = by_name(name), 5
    assert takes_packed(format, K)
    rng = np.random.default_rng(K + n)
    ids = np.stack([rng.permutation([0, 2, 4])[:2] for _ in range(T)])
    ids[7, 0] = 3
    x = random_activations(T, K, seed=6)
    experts = Experts(format, E, n, K)
    found = run_grouped(experts, x, ids, batch=5)
    for batch, table, reverse in ((5, False, False), (2, True, True)):
        assert_same(run_packed(experts, x, ids, batch=batch, table=table, reverse=reverse), found, f"{name} {batch}")


def test_packed_matrices_with_more_row_tiles_than_blocks_along_them():
    format, E, T, n, K = by_name("Q4_K"), 3, 300, 12, 256
    x = random_activations(T, K, seed=1)
    experts = Experts(format, E, n, K)
    ids = np.full(T, 1)
    assert_same(run_packed(experts, x, ids, batch=3, table=True), run_grouped(experts, x, ids, batch=3, table=True))


def test_what_has_no_packed_product():
    assert not takes_packed(by_name("Q8_0"), 256) and not takes_packed(by_name("IQ4_NL"), 32)
    order, x = Order.at(256, 8, 2), Rows.at(1 << 20, Activations.at(1 << 24, 8, 32, 32), 32)
    with pytest.raises(BadArgument, match="packed matrices"):
        grouped_packed(by_name("IQ4_NL"), Place(256, 256), 8, x, 256, order)
    x = Rows.at(1 << 20, Activations.at(1 << 24, 8, 64, 32), 32)
    with pytest.raises(BadArgument, match="within 2"):
        grouped_packed(by_name("IQ4_NL"), Place(256, 256), 8, x, 256, order, 1, 2)


def test_one_expert_has_all_rows_and_rows_of_their_own():
    """More row tiles than blocks along them, and a down product: a row for every entry."""
    format, E, T, n, K = by_name("Q8_0"), 3, 300, 12, 64
    x = random_activations(T, K, seed=1)
    experts = Experts(format, E, n, K)
    y = run_grouped(experts, x, np.full(T, 1), batch=3, table=True)
    assert_same(y, dense(format, experts.raw[1], x))
    y = run_grouped(experts, x, np.arange(T) % 3, batch=1)
    for e in range(3):
        assert_same(y[e::3], dense(format, experts.raw[e], x[e::3]))


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 700), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_entries_are_sorted(n, E, reverse, seed):
    """As a stable sort; ids of nobody are left out."""
    ids = guarded(np.random.default_rng(seed).integers(-1, E + 1, n).astype(np.int32))
    memory = area(Order.n_bytes(n, E))
    order = Order.at(address(memory), n, E)
    base = address(memory)
    run_all(sort_entries(address(ids), order), reverse=reverse)

    def part(at: int, count: int) -> np.ndarray:
        return memory[at - base : at - base + 4 * count].view(np.int32)

    valid = np.flatnonzero((ids >= 0) & (ids < E))
    wanted = valid[np.argsort(ids[valid], kind="stable")]
    np.testing.assert_array_equal(part(order.offsets, E + 1), np.searchsorted(ids[wanted], np.arange(E + 1)))
    np.testing.assert_array_equal(part(order.entries, valid.size), wanted)


# ---- float matrices


def float_product(name: str, raw: np.ndarray, x: np.ndarray, *, reverse=False, spare=0) -> np.ndarray:
    T, K, n = *x.shape, len(raw)
    memory, scratch = area(FloatRows.n_bytes(T, K)), area(float_scratch_bytes(name, n, K) or 256)
    own, weights, y = aligned(x.reshape(-1).view(np.uint8)), aligned(raw.reshape(-1)), room(T, n + spare)
    rows = FloatRows.at(address(memory), T, K)
    run_all([*split_rows(address(own), rows),
             *float_gemm(name, address(weights), n, rows, address(y), address(scratch), n + spare)],
            reverse=reverse)  # fmt: skip
    check_guards(y)
    assert (y[:, n:].view(np.uint8) == 0x5A).all(), "written between the rows"
    return y[:, :n]


@pytest.mark.parametrize("name", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(("T", "n", "K"), [(1, 4, 8), (17, 48, 64), (130, 66, 104), (65, 1, 768)])
def test_float_matrices(name, T, n, K):
    raw = random_rows(by_name(name), n, K, "mid", seed=K)
    x = np.ascontiguousarray(random_activations(T, -(-K // 32) * 32, "mid", seed=T)[:, :K])
    y = float_product(name, raw, x, spare=n % 3)
    w = by_name(name).dequantise(raw)
    check_close(y, x, w, 2.0**-16)
    again = float_product(name, raw[-1:], x[-1:], reverse=True)
    assert_same(again, y[-1:, -1:], "bits depend on the other rows")


@pytest.mark.parametrize("name", ["BF16", "F32"])
def test_float_products_are_close(name):
    raw, x = random_rows(by_name(name), 24, 640, seed=1), random_activations(30, 640, seed=2)
    w = by_name(name).dequantise(raw).astype(np.float64)
    rounded_sides = 1 if name == "BF16" else 2
    assert relative_rms(float_product(name, raw, x), x.astype(np.float64) @ w.T) < 3e-6 * np.sqrt(rounded_sides)


def test_values_that_are_not_finite_stay_so():
    x = np.ones((6, 8), np.float32)
    x[0, 3], x[1, 3], x[2, 3], x[3, 3] = np.inf, -np.inf, np.nan, 3.4e38
    y = float_product("BF16", np.full((1, 8), 0x3F80, "<u2").view(np.uint8), x)
    assert y[0] == np.inf and y[1] == -np.inf and np.isnan(y[2]) and y[4] == y[5] == 8
    np.testing.assert_allclose(y[3], 3.4e38, rtol=2.0**-16)


def test_refusals():
    x = Activations.at(1 << 20, 4, 256, 32)
    rows = Rows.at(1 << 24, x, 32)
    with pytest.raises(BadArgument, match="activations of a product with Q4_K"):
        gemm(by_name("Q4_K"), 256, 4, rows, 256, 256)
    with pytest.raises(BadArgument, match="prepared rows of a product with NVFP4"):
        gemm(by_name("NVFP4"), 256, 4, rows, 256, 256)
    with pytest.raises(BadArgument, match="float_gemm"):
        gemm(by_name("F32"), 256, 4, rows, 256, 256)
    with pytest.raises(BadArgument, match="multiple of 64"):
        scratch_bytes(by_name("Q2_0"), 4, 96)
    with pytest.raises(BadArgument, match="16 or 32"):
        Rows.at(1 << 24, x, 64)
    with pytest.raises(BadArgument, match="256"):
        gemm(by_name("Q8_0"), 256, 4, rows, 256, 300)
    order = Order.at(1 << 20, 9, 4)
    with pytest.raises(BadArgument, match="multiple of 4 rows"):
        grouped(by_name("Q8_0"), Place(256, 256), 4, rows, 256, 256, order)
    with pytest.raises(BadArgument, match="within 4"):
        grouped(by_name("Q8_0"), Place(256, 256), 4, rows, 256, 256, Order.at(1 << 20, 8, 4), 2, 3)
    with pytest.raises(BadArgument, match="scratch"):
        float_gemm("F32", 256, 4, FloatRows.at(256, 4, 64), 256)
    with pytest.raises(BadArgument, match="multiple of 8"):
        FloatRows.at(256, 4, 60)
    with pytest.raises(BadArgument, match="BF16"):
        float_gemm("Q8_0", 256, 4, FloatRows.at(256, 4, 64), 256)
