"""Experts in windows of several rows, on the GPU's code run on the CPU: gate and up together, every entry by itself."""

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.program import NOT_FINITE
from strata.gpu import gemv as module
from strata.gpu.gemv import Entries, Hidden, choices, product
from strata.gpu.gemv.gate_up import SOURCE
from strata.gpu.launch import launch
from strata.pack.lanes import gemv as exact
from tests.block_data import MODES
from tests.canonical.call import assert_same, plain
from tests.gpu.run_on_cpu import ActivationArea, ErrorWord, address, needs_compiler, run_all
from tests.test_gpu_experts import HERE, WHERE, Layer, draw
from tests.test_gpu_gemv import area_of

pytestmark = needs_compiler
NAMES = ("Q4_K", "Q4_K", "IQ4_NL")


@pytest.fixture(autouse=True)
def together(monkeypatch):
    monkeypatch.setattr(choices, "ALONE_ROWS", ())


def hidden_row(layer: Layer, x: np.ndarray, expert: int) -> np.ndarray:
    """(F,) of one expert and one row before they are quantised."""
    codes, scales, _ = arithmetic.quantise(x, 256)
    g, u = (exact(layer.formats[p], layer.raw[p][expert], codes, scales) for p in range(2))
    if layer.scaled:
        g, u = g * layer.factors[0, expert], u * layer.factors[1, expert]
    return arithmetic.swiglu(g, u)


def check(layer, x, ids, decisions=None, jobs=None, served=None, reverse=False, finite=True):
    """Hidden rows of entries that are `served` (None: all); others are left as they are. Or, not finite, reported."""
    T, n = len(x), ids.size
    h, error, area = ActivationArea(n, layer.F, 32), ErrorWord(), area_of(x, 256)
    entries = Entries(address(ids), n, T, 0 if decisions is None else address(decisions), 1 << HERE)
    if jobs is not None:
        entries = Entries(address(ids), n, T, jobs=address(jobs), most_jobs=len(jobs) - 1)
    to = Hidden(layer.place(1), h.places, error.address, WHERE, address(layer.factors) if layer.scaled else 0, layer.E)
    launches = product(layer.formats[0], layer.place(0), layer.F, area.places, entries=entries, hidden=to)
    assert [one.source for one in launches] == [SOURCE]
    before = [part.copy() for part in (h.codes, h.scales, h.sums)]
    run_all(launches, reverse=reverse)
    if not finite:
        assert error.reported[0] == NOT_FINITE
        return
    assert error.reported is None
    for i, expert in enumerate(ids.reshape(-1)):
        codes, scales, _ = arithmetic.quantise(hidden_row(layer, x[i * T // n], expert), 32)
        wanted = (codes, scales, codes.reshape(-1, 16).sum(-1, dtype=np.int32))
        for part, value, old in zip((h.codes, h.scales, h.sums), wanted, before, strict=True):
            assert_same(part[i], value if served is None or served[i] else old[i], f"entry {i}")


@pytest.mark.parametrize("T", [2, 3, 4, 8])
def test_experts(T):
    """Wanted by one row, by some and by more than four, at fixed places and by a table, with factors and without."""
    layer = Layer(NAMES, E=7, D=512, F=96, scaled=T == 4, by_table=T == 8)
    check(layer, plain(np.random.default_rng(T), T, layer.D), draw(T, 4, layer.E, T), reverse=T == 4)


@pytest.mark.parametrize("D", [256, 768, 1024, 2560])
def test_rows_of_any_length(D):
    """Rows of fewer chunks than are under way, and of more."""
    layer, x = Layer(NAMES, E=3, D=D, F=64), plain(np.random.default_rng(D), 3, D)
    check(layer, x, np.array([[0, 1], [2, 1], [1, 0]], np.int32))


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode):
    layer = Layer(NAMES, E=4, D=512, F=64, mode=mode)
    x, ids = plain(np.random.default_rng(1), 4, 512), np.array([[0, 1], [0, 2], [0, 1], [0, 3]], np.int32)
    check(layer, x, ids)


@pytest.mark.parametrize("ids", [[[0], [1]], [[0], [0]]], ids=["by one row", "by both"])
def test_what_is_not_finite_is_reported(ids):
    layer, x = Layer(NAMES, E=2, D=512, F=64), plain(np.random.default_rng(1), 2, 512) * np.float32(1e37)
    with np.errstate(all="ignore"):
        assert not np.isfinite(hidden_row(layer, x[0], 0)).all()
    check(layer, x, np.array(ids, np.int32), finite=False)


def test_all_rows_want_the_same():
    """Eight entries an expert: two jobs each."""
    check(Layer(NAMES, E=3, D=256, F=64), plain(np.random.default_rng(0), 8, 256), np.tile(np.int32([0, 2]), (8, 1)))


def test_more_entries_than_threads():
    x, ids = plain(np.random.default_rng(3), 8, 256), draw(8, 40, 60)
    check(Layer(NAMES, E=60, D=256, F=32), x, ids)


@pytest.mark.parametrize("seed", range(4))
def test_entries_decided_elsewhere(seed):
    """They are left as they are; all of them, some, none."""
    layer, rng = Layer(NAMES, E=5, D=256, F=64), np.random.default_rng(seed)
    ids, decisions = draw(4, 3, 5, seed), (rng.random((4, 3)) < seed / 3).astype(np.uint8)
    check(layer, plain(rng, 4, 256), ids, decisions, served=(decisions == HERE).reshape(-1))


def test_jobs():
    """First entry of an expert and entries to pass over; what stands behind their number is no job."""
    layer, x = Layer(NAMES, E=4, D=256, F=64), plain(np.random.default_rng(9), 6, 256)
    ids = np.array([[0, 1], [1, 2], [1, 3], [1, 0], [1, 2], [1, 3]], np.int32)
    first = {int(e): int(np.flatnonzero(ids.reshape(-1) == e)[0]) for e in (0, 1, 2)}
    jobs = np.array([4, first[0], first[1], first[1] | 4 << 16, first[2], 77, 99], np.int32)
    check(layer, x, ids, jobs=jobs, served=(ids != 3).reshape(-1))
    check(layer, x, ids, jobs=np.zeros(7, np.int32), served=np.zeros(12, bool))


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize("T", [2, 5, 8])
def test_every_entry_by_itself(T, decided, monkeypatch):
    """Windows whose entries share no blocks, whatever they want: the kernels of one row, zeros where others compute."""
    layer = Layer(NAMES, E=5, D=256, F=640, by_table=T == 5)
    x, ids = plain(np.random.default_rng(T), T, layer.D), draw(T, 3, layer.E, T)
    decisions = np.random.default_rng(1).integers(0, 2, (T, 3)).astype(np.uint8) if decided else None
    kernels = []
    monkeypatch.setattr(module, "launch", lambda source, kernel, *more, **named: kernels.append(kernel) or
                        launch(source, kernel, *more, **named))  # fmt: skip
    monkeypatch.setattr(choices, "ALONE_ROWS", (T,))
    out, reported = layer.outputs(x, ids, decisions)
    assert reported is None and kernels == ["product<Q4_K, 1>", "short_rows<IQ4_NL, 640, 1>"]
    wanted = layer.wanted(x, ids).reshape(3 * T, -1)
    if decided:
        wanted[decisions.reshape(-1) != HERE] = 0
    assert_same(out, wanted)


def test_jobs_are_taken_as_they_are(monkeypatch):
    """An expert's entries stand in one job: nothing is left to the entries."""
    monkeypatch.setattr(choices, "ALONE_ROWS", (6,))
    test_jobs()
