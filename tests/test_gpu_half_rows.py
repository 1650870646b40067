"""Dense products of Q4_K and Q5_K on tensor cores in float16, run on the CPU, against the lane rules."""

from dataclasses import replace

import numpy as np
import pytest

from strata.gpu.gemv import Place, choices, gemv, half, product, relayout
from strata.gpu.gemv.half import half_rows
from strata.gpu.launch import Source, made_for
from strata.pack.formats import by_name
from tests.block_data import MODES, random_activations, random_rows
from tests.canonical.call import assert_same, check_guards, room
from tests.column_cases import check_numbers_of_columns, largest_columns
from tests.gpu.run_on_cpu import ON_DEVICE, address, needs_compiler, run, run_all
from tests.test_gpu_gemv import aligned, area_of, wanted

pytestmark = needs_compiler
LONGEST = {"Q4_K": choices.HALF_MOST, "Q5_K": choices.HALF_Q5_MOST}
"""Values of the longest rows by format."""
FORMATS = tuple(LONGEST)


def check(name, raw, x, expected=None, *, spare=3, reverse=False, races=False):
    format, T, (rows, K) = by_name(name), len(x), (len(raw), x.shape[1])
    weights, area, y = aligned(relayout(format, raw)), area_of(x, format.group), room(T, rows + spare)
    launch = half_rows(format, address(weights), rows, area.places, address(y), rows + spare)
    if races:
        run(launch, races=True)
    else:
        run_all([launch], reverse=reverse)
    check_guards(y)
    assert (y[:, rows:].view(np.uint8) == 0x5A).all(), "written between the rows"
    assert_same(y[:, :rows], wanted(format, raw, x) if expected is None else expected, f"{name}, {rows} x {K}, T {T}")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mode", MODES)
def test_same_bits(mode, name):
    """One to eight columns; tiles that are full, and rows that end anywhere in a row block, a warp or a pair."""
    check_numbers_of_columns(check, name, mode, ((256, 16), (768, 77), (1024, 39), (2560, 13)), 1)


@pytest.mark.parametrize("name", FORMATS)
def test_largest_integers(name):
    """Every code, scale and minimum as large as it can be, and every activation too: float16 and the sums hold them."""
    format, K = by_name(name), 512
    raw = np.full((16, K // 256, format.block_bytes), 255, np.uint8)
    raw[..., :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)
    check(name, raw.reshape(16, -1), largest_columns(K))


@pytest.mark.parametrize("name", FORMATS)
def test_longest_rows(name):
    K = LONGEST[name]
    raw, x = random_rows(by_name(name), 5, K, "mid", seed=7), random_activations(4, K, "mid", seed=8)
    check(name, raw, x)
    check(name, raw, x[:3], reverse=True)


@pytest.mark.parametrize("name", FORMATS)
def test_shared_memory(name):
    """The longest rows fit everywhere: 64 KiB of Turing, with half of the rings, and 99 KiB of others."""
    area = area_of(np.zeros((4, LONGEST[name]), np.float32), by_name(name).group)
    one = half_rows(by_name(name), 64, 2048, area.places, 64, 2048)
    assert one.shared_bytes <= 99 << 10 and one.shared_bytes - one.ring_bytes <= 64 << 10


@pytest.mark.skipif(ON_DEVICE, reason="a kernel as older cards have it")
@pytest.mark.parametrize("name", FORMATS)
def test_two_stages_as_turing_has_them(name, tmp_path):
    """Rows of fewer chunks than that and of more, in half of the rings' memory."""
    text = tmp_path / "half_rows.cu"
    text.write_text('#define HALF_STAGES 2\n#include "gemv/half_rows.cu"\n')
    format = by_name(name)
    for K in (256, 512, 1280, LONGEST[name]):
        raw, x = random_rows(format, 21, K, "mid", seed=K), random_activations(4, K, "mid", seed=K + 1)
        weights, area, y = aligned(relayout(format, raw)), area_of(x, format.group), room(4, 21)
        one = half_rows(format, address(weights), 21, area.places, address(y), 21)
        source, shared_bytes = Source(str(text), one.source.instances), one.shared_bytes - one.ring_bytes
        run(replace(one, source=source, shared_bytes=shared_bytes), races=True)
        check_guards(y)
        assert_same(y, wanted(format, raw, x), f"K {K}")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 4, 5, 8, 9, 31, 33, 65])
def test_rows_of_any_number(rows, name):
    raw, x = random_rows(by_name(name), rows, 512, "plain", seed=rows), random_activations(4, 512, "plain", seed=rows)
    check(name, raw, x, spare=0)


@pytest.mark.parametrize("T", [3, 4, 7])
@pytest.mark.parametrize("K", [256, 1280])
@pytest.mark.parametrize("name", FORMATS)
def test_blocks_that_stay(name, K, T, monkeypatch):
    """A block takes tile after tile, fewer chunks each than are on their way and more; the last one ends anywhere."""
    monkeypatch.setattr(half, "STAYING_ROWS", 1)
    for rows in (64, 321):
        raw, x = random_rows(by_name(name), rows, K, "plain", seed=rows), random_activations(T, K, "mid", seed=rows)
        check(name, raw, x, reverse=T == 4)


@pytest.mark.parametrize(("processors", "four", "eight"), [(1, 2, 1), (132, 264, 132), (4096, 1100, 1100)])
def test_blocks_that_a_device_makes(processors, four, eight):
    """As many as have room, shared with the groups of columns, and no more than there are tiles."""
    for T, blocks in ((4, four), (8, eight)):
        x = area_of(np.zeros((T, 256), np.float32), 256).places
        one = half_rows(by_name("Q4_K"), 64, 70400, x, 64, 70400)
        assert one.grid == (T // 4, 1100, 1)
        assert made_for(one, 90, processors, 228 << 10).grid == (T // 4, blocks, 1)
        assert made_for(replace(one, staying=0), 90, 1, 228 << 10).grid == one.grid


@pytest.mark.parametrize(("arch", "shared_kib", "blocks"), [(75, 64, 24), (80, 164, 48), (86, 100, 24), (90, 228, 48)])
def test_blocks_that_stay_have_room(arch, shared_kib, blocks):
    """24 processors of one architecture or another, rows of 2,560 values."""
    x = area_of(np.zeros((4, 2560), np.float32), 256).places
    one = made_for(half_rows(by_name("Q4_K"), 64, 70400, x, 64, 70400), arch, 24, shared_kib << 10)
    assert one.grid == (1, blocks, 1)


@pytest.mark.skipif(ON_DEVICE, reason="the device does not tell races")
@pytest.mark.parametrize("name", FORMATS)
def test_threads_do_not_race(name, monkeypatch):
    raw, x = random_rows(by_name(name), 300, 512, "plain", seed=1), random_activations(4, 512, "plain", seed=2)
    with monkeypatch.context() as one:
        one.setattr(half, "STAYING_ROWS", 1)
        check(name, raw, x, races=True)
    for rows, K, T in ((77, 768, 7), (19, 256, 4)):
        raw, x = random_rows(by_name(name), rows, K, "plain", seed=rows), random_activations(T, K, "plain", seed=K)
        check(name, raw, x, races=True)


def kernel(rows: int, T: int, K: int = 2560, name: str = "Q4_K") -> str:
    format = by_name(name)
    (launch,) = gemv(format, 64, rows, area_of(np.zeros((T, K), np.float32), format.group).places, 64)
    return launch.kernel.partition("<")[0]


@pytest.mark.parametrize("name", FORMATS)
def test_which_products(monkeypatch, name):
    """Several columns of a matrix that fills the device, heads among them. Others are for other kernels: few rows, long
    rows, other formats."""
    assert [kernel(4096, T, name=name) for T in (1, 2, 3, 4, 8)] == ["spread", "split", *["half_rows"] * 3]
    assert [kernel(248320, T, name=name) for T in (1, 2, 3, 8)] == ["huge", "huge", "half_rows", "half_rows"]
    assert [kernel(rows, 4, name=name) for rows in (512, 8192)] == ["split", "half_rows"]
    assert kernel(2560, 4, 3840, name) == "half_rows" != kernel(2560, 4, 4096, name)
    assert [kernel(8192, 4, K, name) for K in (LONGEST[name], LONGEST[name] + 256)] == ["half_rows", "product"]
    assert kernel(8192, 4, name="Q6_K") == "product"
    format = by_name(name)
    area = area_of(np.zeros((4, 256), np.float32), format.group)
    for rows, stays in ((8192, "false"), (65536, "true")):
        (one,) = product(format, Place(64), rows, area.places, 64)
        assert (one.kernel, one.grid, one.block[0]) == (f"half_rows<{name}, {stays}>", (1, rows // 64, 1), 256)
    monkeypatch.setattr(choices, "HALF_FROM", 99)
    assert [kernel(rows, 4, name=name) for rows in (2560, 8192, 248320)] == ["split", "product", "huge"]
