"""Products of several columns by tensor cores, on the GPU's code run on the CPU: the bits of the lane rules."""

from dataclasses import replace

import numpy as np
import pytest

from strata.gpu import gemv as module
from strata.gpu.gemv import MMA, MMA_SPLIT, MMA_UNITS, Entries, Place, gemv, product, relayout
from strata.gpu.launch import Launch, Source
from strata.pack.formats import by_name
from tests.block_data import MODES, random_activations, random_rows
from tests.canonical.call import assert_same, check_guards, plain, room
from tests.gpu.run_on_cpu import ON_DEVICE, address, needs_compiler, run_all
from tests.test_gpu_experts import Layer, draw
from tests.test_gpu_gemv import aligned, area_of, wanted

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def on_tensor_cores(monkeypatch):
    monkeypatch.setattr(module, "MMA_FROM", 2)
    monkeypatch.setattr(module, "MMA_SPLIT_FROM", 2)
    monkeypatch.setattr(module, "MMA_SPLIT_VALUES", 0)


def asked(launches: list[Launch], how: int) -> list[Launch]:
    """The same, weights on their way by registers (0, where a kernel has that) or by copies (1), as on older cards."""
    out = []
    for one in launches:
        kernel = one.kernel.removesuffix(">") + f", {how}>"
        out.append(replace(one, kernel=kernel, source=Source(one.source.file, (kernel,))))
    return out


@pytest.mark.skipif(ON_DEVICE, reason="a kernel as older cards have it")
@pytest.mark.parametrize(("name", "how", "form"), [("Q4_K", 1, "product"), ("IQ4_NL", 1, "product"),
                                                   ("Q4_K", 0, "split"), ("Q4_K", 1, "split")])  # fmt: skip
def test_other_ways_to_shared_memory(name, how, form):
    format, K, rows, T = by_name(name), 2304, 37, 4
    raw, x = random_rows(format, rows, K, "mid", seed=1), random_activations(T, K, "mid", seed=2)
    weights, area, y = aligned(relayout(format, raw)), area_of(x, format.group), room(T, rows)
    run_all(asked(gemv(format, address(weights), rows, area.places, address(y), form=form), how))
    check_guards(y)
    assert_same(y, wanted(format, raw, x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MMA_UNITS)
def test_dense(name, mode):
    """Rows that fill tiles and do not, up to eight columns, rows with and without a step behind the chunks."""
    format = by_name(name)
    for K, rows in ((256, 16), (640 if name == "IQ4_NL" else 768, 77), (2560, 13)):
        raw, x = random_rows(format, rows, K, mode, seed=K), random_activations(8, K, mode, seed=K + 1)
        weights, expected = aligned(relayout(format, raw)), wanted(format, raw, x)
        for T in (2, 3, 4, 7, 8):
            y, area = room(T, rows + 3), area_of(x[:T], format.group)
            launches = product(format, Place(address(weights)), rows, area.places, address(y), rows + 3)
            assert [one.source for one in launches] == [MMA]
            run_all(launches, reverse=T == 3)
            check_guards(y)
            assert (y[:, rows:].view(np.uint8) == 0x5A).all(), "written between the rows"
            assert_same(y[:, :rows], expected[:T], f"{name} {mode} K {K} T {T}")


@pytest.mark.parametrize("mode", MODES)
def test_few_rows(mode):
    """Warps share out the chunks: fewer than warps, one round, several."""
    format = by_name("Q4_K")
    for K, rows in ((768, 16), (2048, 21), (6912, 5)):
        raw, x = random_rows(format, rows, K, mode, seed=K), random_activations(6, K, mode, seed=K + 1)
        weights, expected = aligned(relayout(format, raw)), wanted(format, raw, x)
        for T in (2, 3, 4, 5, 6):
            y, area = room(T, rows + 3), area_of(x[:T], format.group)
            launches = gemv(format, address(weights), rows, area.places, address(y), rows + 3, form="split")
            assert [one.source for one in launches] == [MMA_SPLIT]
            run_all(launches, reverse=T == 3)
            check_guards(y)
            assert (y[:, rows:].view(np.uint8) == 0x5A).all(), "written between the rows"
            assert_same(y[:, :rows], expected[:T], f"{mode} K {K} T {T}")


def test_rows_that_do_not_fill_a_step():
    """Such a matrix is for the other kernel."""
    format = by_name("IQ4_NL")
    x = area_of(plain(np.random.default_rng(0), 2, 704), 32).places
    assert MMA not in [one.source for one in product(format, Place(64), 16, x, 64)]


@pytest.mark.parametrize("tiles", [1, 2, 3])
@pytest.mark.parametrize("T", [2, 4, 8])
def test_experts(T, tiles, monkeypatch):
    """Experts of one entry and of many, more than a job has room for; a down product of five blocks of four tiles."""
    monkeypatch.setattr(module, "MMA_TILES", tiles)
    layer = Layer(("Q4_K", "Q4_K", "IQ4_NL"), E=6, D=512, F=128, scaled=T == 4, by_table=T == 8)
    x, ids = plain(np.random.default_rng(T), T, layer.D), draw(T, 4, layer.E, T)
    out, reported = layer.outputs(x, ids, reverse=T == 4)
    assert reported is None
    assert_same(out.reshape(T, 4, -1), layer.wanted(x, ids))


def test_more_entries_than_three_warps():
    layer = Layer(("Q4_K", "Q4_K", "IQ4_NL"), E=30, D=256, F=128)
    x, ids = plain(np.random.default_rng(3), 5, layer.D), draw(5, 25, 30)
    assert_same(layer.outputs(x, ids)[0].reshape(5, 25, -1), layer.wanted(x, ids))


def test_jobs():
    """First entry of an expert and entries to pass over; entries without a job are left as they are."""
    layer = Layer(("Q4_K", "Q4_K", "IQ4_NL"), E=4, D=256, F=128)
    T = 6
    x = plain(np.random.default_rng(9), T, 128)
    ids = np.array([[0, 1], [1, 2], [1, 3], [1, 0], [1, 2], [1, 3]], np.int32)
    ids = np.array([[0, 1], [1, 2], [1, 3], [1, 0], [1, 2], [1, 3]], np.int32)
    first = {int(e): int(np.flatnonzero(ids.reshape(-1) == e)[0]) for e in (0, 1, 2)}
    jobs = np.array([4, first[0], first[1], first[1] | 4 << 16, first[2], 0, 0], np.int32)
    format = by_name("IQ4_NL")
    area = area_of(np.repeat(x, 2, 0), 32)
    y = room(2 * T, layer.D)
    before = y.copy()
    e = Entries(address(ids), 2 * T, T, jobs=address(jobs), most_jobs=6)
    run_all(product(format, layer.place(2), layer.D, area.places, address(y), entries=e))
    for i, expert in enumerate(ids.reshape(-1)):
        expected = wanted(format, layer.raw[2][expert], x[i // 2 : i // 2 + 1])[0] if expert != 3 else before[i]
        assert_same(y[i], expected, f"entry {i}")
