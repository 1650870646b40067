"""Quantised products on the GPU's code, run on the CPU: the bits of the lane rules, for every format."""

from dataclasses import replace

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.errors import BadArgument
from strata.gpu.activations import Activations
from strata.gpu.gemv import choices, gemv, relayout, split
from strata.gpu.gemv.ahead import AHEAD
from strata.gpu.gemv.choices import brings_column
from strata.gpu.gemv.huge import HUGE
from strata.gpu.gemv.sources import COLUMNS, SPLIT
from strata.pack.formats import FORMATS, by_name
from strata.pack.lanes import gemv as exact
from tests.block_data import MODES, random_activations, random_rows
from tests.canonical.call import assert_same, check_guards, room
from tests.gpu.run_on_cpu import ActivationArea, address, needs_compiler, run_all

pytestmark = needs_compiler
QUANTISED = [f for f in FORMATS.values() if f.group]


def aligned(data: np.ndarray) -> np.ndarray:
    """A copy on a 16-byte boundary with a guard of garbage behind it."""
    whole = np.full(data.size + 48, 0xA5, np.uint8)
    start = -whole.ctypes.data % 16
    whole[start : start + data.size] = data
    return whole[start : start + data.size]


def area_of(x: np.ndarray, group: int) -> ActivationArea:
    """Activations of x (T, K) as the quantiser makes them."""
    area = ActivationArea(*x.shape, group)
    codes, scales, bad = arithmetic.quantise(x, group)
    assert not bad
    area.codes[:], area.scales[:] = codes, scales
    area.sums[:] = codes.astype(np.int32).reshape(len(x), -1, 16).sum(-1, dtype=np.int32)
    return area


def wanted(format, raw, x):
    codes, scales, _ = arithmetic.quantise(x, format.group)
    return np.stack([exact(format, raw, c, s) for c, s in zip(codes, scales, strict=True)])


def check(format, raw, x, reverse=False, spare=0, expected=None):
    T, rows = len(x), len(raw)
    weights, area = aligned(relayout(format, raw)), area_of(x, format.group)
    expected = wanted(format, raw, x) if expected is None else expected
    spread = T == 1 and brings_column(x.shape[1])
    for form in ("product", "split", *("spread",) * spread) if format.name in SPLIT else ("product",):
        y = room(T, rows + spare)
        launches = gemv(format, address(weights), rows, area.places, address(y), rows + spare, form=form)
        run_all(launches, reverse=reverse)
        check_guards(y)
        assert (y[:, rows:].view(np.uint8) == 0x5A).all(), "written between the rows"
        assert_same(y[:, :rows], expected, f"{format.name}, K {x.shape[1]}, T {T}, {form}")


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("T", [2, 3, 4, 5, 8])
def test_whole_rows_ahead(name, T, monkeypatch):
    format, rows = by_name(name), 45
    raw, x = random_rows(format, rows, AHEAD[name], "mid", seed=T), random_activations(T, AHEAD[name], "mid", seed=9)
    weights, area, y = aligned(relayout(format, raw)), area_of(x, format.group), room(T, rows + 3)
    one = gemv(format, address(weights), rows, area.places, address(y), rows + 3, form="ahead")
    run_all(one, reverse=T == 4)
    check_guards(y)
    assert (y[:, rows:].view(np.uint8) == 0x5A).all(), "written between the rows"
    assert_same(y[:, :rows], wanted(format, raw, x))

    def tall(columns: int) -> list[str]:
        places = Activations.at(1 << 20, columns, AHEAD[name], format.group)
        return [m.kernel for m in gemv(format, 64, 10240, places, 64)]

    assert tall(T) == [m.kernel for m in one] and tall(1) == [f"product<{name}, 1>"]
    monkeypatch.setattr(choices, "AHEAD_FROM", 99)
    assert tall(T) == [f"product<{name}, 4>"]


def widths(format):
    return (256, 768, 2560) if format.group == 256 else (64, 128, 640, 704, 2560)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
def test_same_bits(format, mode):
    """13 rows: two row blocks of a warp, and a last one that is not full. T 1, 2, 3 and 5 reach every path."""
    for k, K in enumerate(widths(format)):
        raw, x = random_rows(format, 13, K, mode, seed=10 + k), random_activations(5, K, mode, seed=20 + k)
        expected = wanted(format, raw, x)
        for T in (1, 2, 3, 5) if K in (640, 704, 768) else (1, 4):
            check(format, raw, x[:T], reverse=T == 3, spare=3, expected=expected[:T])


@pytest.mark.parametrize("name", ["Q8_0", "IQ4_NL", "Q2_0", "NVFP4", "Q4_K", "IQ1_M"])
def test_many_rows_and_columns(name):
    """Blocks of several warps, row counts around them, and columns in two groups."""
    format = by_name(name)
    K = format.group * (1 if format.group == 256 else 4)
    raw, x = random_rows(format, 70, K, "mid", seed=1), random_activations(8, K, "mid", seed=2)
    expected = wanted(format, raw, x)
    for rows, T in ((1, 8), (4, 1), (8, 6), (33, 7), (45, 5), (70, 5), (70, 8)):
        check(format, raw[:rows], x[:T], expected=expected[:T, :rows], reverse=rows == 33)


@pytest.mark.parametrize("name", sorted(SPLIT))
def test_terms_of_several_rounds(name, monkeypatch):
    """Rows whose terms do not fit into shared memory at once, and ends of rounds that no warp's last chunk meets."""
    monkeypatch.setattr(split, "SPREAD_BYTES", 1)
    format = by_name(name)
    raw, x = random_rows(format, 5, 10240, "mid", seed=3), random_activations(1, 10240, "mid", seed=4)
    weights, area, y = aligned(relayout(format, raw)), area_of(x, format.group), room(1, 5)
    run_all(gemv(format, address(weights), 5, area.places, address(y), form="spread"))
    check_guards(y)
    assert_same(y, wanted(format, raw, x), name)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "IQ2_S"])
def test_a_column_that_is_too_long_for_shared_memory(name):
    format = by_name(name)
    raw, x = random_rows(format, 5, 14336, "mid", seed=3), random_activations(1, 14336, "mid", seed=4)
    assert not brings_column(14336)
    check(format, raw, x)


@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
def test_every_number_of_blocks(format):
    """Rows that end anywhere in a chunk."""
    for blocks in range(1, 10):
        K = blocks * format.block_values
        raw, x = random_rows(format, 5, K, "edge", seed=blocks), random_activations(1, K, "edge", seed=blocks)
        check(format, raw, x)


HOW = ("BY_BULK", "BY_COPIES", "BY_REGISTERS")


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", sorted(HUGE))
def test_huge(name, how):
    """By way of shared memory, as sm_90, sm_80 and sm_75 do: rows of part of a stage, and of more than a ring holds."""
    format = by_name(name)
    source = replace(HUGE[name], instances=tuple(f"huge<{name}, {M}, {h}>" for M in COLUMNS for h in HOW))
    for rows, K in ((13, format.group), (45, 5632 + 3 * format.group)):
        raw, x = random_rows(format, rows, K, "mid", seed=1), random_activations(5, K, "mid", seed=2)
        weights, expected = aligned(relayout(format, raw)), wanted(format, raw, x)
        for T in (1, 2, 5):
            area, y = area_of(x[:T], format.group), room(T, rows + 3)
            one = gemv(format, address(weights), rows, area.places, address(y), rows + 3, form="huge")[0]
            run_all([replace(one, source=source, kernel=one.kernel.replace(">", f", {how}>"))], reverse=T == 2)
            check_guards(y)
            assert (y[:, rows:].view(np.uint8) == 0x5A).all(), "written between the rows"
            assert_same(y[:, :rows], expected[:T], f"{name}, K {K}, T {T}, {how}")


@pytest.mark.parametrize(
    ("name", "T", "rows", "K", "chosen"),
    [
        ("Q4_K", 1, 2560, 6144, "spread"),
        ("Q8_0", 1, 2560, 10240, "spread"),
        ("Q8_0", 1, 6144, 2560, "spread"),
        ("Q8_0", 1, 8191, 2560, "product"),
        ("Q8_0", 1, 10240, 2560, "huge"),
        ("Q6_K", 1, 10240, 2560, "product"),
        ("Q5_K", 1, 16384, 2560, "product"),
        ("Q8_0", 1, 10240, 10240, "product"),
        ("Q8_0", 2, 10240, 2560, "product"),
        ("Q8_0", 4, 65536, 2560, "huge"),
        ("Q4_K", 1, 16384, 2560, "product"),
        ("IQ4_XS", 1, 16384, 2560, "product"),
        ("Q4_K", 1, 65536, 2560, "huge"),
        ("Q2_K", 1, 65536, 2560, "product"),
        ("Q8_0", 4, 2560, 6144, "split"),
        ("Q4_K", 4, 2560, 6144, "half_split"),
        ("Q4_K", 8, 2560, 6144, "half_split"),
    ],
)
def test_which_form_is_chosen(name, T, rows, K, chosen):
    """Rings for heads, and for one column of a large lone matrix of many bytes; else more warps for fewer rows."""
    format = by_name(name)
    (one,) = gemv(format, 64, rows, Activations.at(1 << 20, T, K, format.group), 64)
    assert one.kernel.partition("<")[0] == chosen


def test_rings_can_be_left_to_heads(monkeypatch):
    monkeypatch.setattr(choices, "RING_ROWS", 1 << 20)
    for rows, chosen in ((16384, "product"), (65536, "huge")):
        (one,) = gemv(by_name("Q8_0"), 64, rows, Activations.at(1 << 20, 1, 2560, 32), 64)
        assert one.kernel.partition("<")[0] == chosen


def test_refusals():
    with pytest.raises(BadArgument, match="spread"):
        gemv(by_name("Q8_0"), 64, 4, Activations.at(1 << 20, 1, 96, 32), 64, form="spread")
    x = Activations.at(1 << 20, 2, 256, 32)
    with pytest.raises(BadArgument, match="Q4_K"):
        gemv(by_name("Q4_K"), 64, 4, x, 64)
    with pytest.raises(BadArgument, match="F32"):
        gemv(by_name("F32"), 64, 4, x, 64)
    with pytest.raises(BadArgument, match="columns"):
        gemv(by_name("Q8_0"), 64, 4, Activations.at(1 << 20, 33, 256, 32), 64)
    with pytest.raises(BadArgument, match="multiple of 64"):
        gemv(by_name("Q2_0"), 64, 4, Activations.at(1 << 20, 1, 96, 32), 64)
