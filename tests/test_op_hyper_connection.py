"""Hyper-connections: norm, squeeze, mix, strength and add against numpy, bit by bit."""

import numpy as np
import pytest

from strata.base.program import NOT_FINITE
from strata.cpu.hyper_connection import hc_add, hc_mix, hc_norm, hc_squeeze
from tests.canonical import hyper_connection as reference
from tests.canonical.call import ERROR, LAYER, Call, assert_accurate, assert_same, guarded, plain, room, spiked
from tests.reference import hyper_connection as exact

EPS = 1e-6
SIZES = [(1, 64), (2, 96), (4, 256), (3, 640), (4, 1000), (4, 40)]
ROWS = [1, 3, 8]


def norm(x: np.ndarray, w: np.ndarray, first: np.ndarray | None = None, T: int | None = None) -> tuple:
    rows, C, D = x.shape
    T = rows if T is None else T
    y = room(T, C, D)
    call = Call(hc_norm, np.ascontiguousarray(x), w, y, C, D, EPS, first, ERROR, LAYER)
    return y, call.run(T * C, order=reversed(range(T * C)))


def squeeze(x: np.ndarray, C: int) -> tuple:
    y = guarded(x)
    return y, Call(hc_squeeze, y, x.size, C, ERROR, LAYER).run()


def mix(normed, gate, inject=None, pieces=1) -> tuple:
    T, C, D = normed.shape
    u, a = room(T, D), None if inject is None else room(T, C)
    words = (np.ascontiguousarray(normed), np.ascontiguousarray(gate), u, C, D,
             None if inject is None else np.ascontiguousarray(inject), a, ERROR, LAYER, pieces)  # fmt: skip
    return u, a, Call(hc_mix, *words).run(T * pieces)


@pytest.mark.parametrize(("C", "D"), SIZES)
@pytest.mark.parametrize("T", ROWS)
def test_norm(C, D, T):
    rng = np.random.default_rng(C * D + T)
    x, w = spiked(rng, T, C, D), spiked(rng, C, D)
    y, call = norm(x, w)
    assert call.reported is None
    assert_same(y, reference.norm(x, w, EPS))
    for t in range(T):
        assert_same(norm(x[t : t + 1], w)[0][0], y[t], f"row {t} alone")


def test_norm_of_a_head_starts_at_its_row():
    rng = np.random.default_rng(1)
    x, w = plain(rng, 8, 2, 64), plain(rng, 2, 64)
    y, _ = norm(x, w, first=np.array([5], np.int64), T=3)
    assert_same(y, reference.norm(x[5:8], w, EPS))


def test_norm_of_zeros_and_of_huge_values():
    w = np.ones((1, 64), np.float32)
    y, call = norm(np.zeros((1, 1, 64), np.float32), w)
    assert call.reported is None and (y == 0).all()
    y, call = norm(np.full((1, 1, 64), 2e18, np.float32), w)
    assert call.reported is None
    assert_same(y, np.full((1, 1, 64), y[0, 0, 0]))
    assert y[0, 0, 0] == pytest.approx(1, rel=1e-6)
    # a sum of squares that overflows would silently give zeros
    assert norm(np.full((1, 1, 64), 2e19, np.float32), w)[1].reported == (NOT_FINITE, LAYER, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_norm_reports_non_finite_rows(bad):
    x = plain(np.random.default_rng(2), 3, 2, 96)
    x[2, 1, 95] = bad
    assert norm(x, np.ones((2, 96), np.float32))[1].reported == (NOT_FINITE, LAYER, 2)


@pytest.mark.parametrize("C", [2, 3, 4])
@pytest.mark.parametrize("n", [1, 320, 333])
def test_squeeze(C, n):
    x = spiked(np.random.default_rng(n), n) * np.float32(8)
    y, call = squeeze(x, C)
    assert call.reported is None
    assert_same(y, reference.squeeze(x, C))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_squeeze_reports_non_finite_values(bad):
    x = np.ones(40, np.float32)
    x[39] = bad
    assert squeeze(x, 4)[1].reported[:2] == (NOT_FINITE, LAYER)


@pytest.mark.parametrize(("C", "D"), SIZES)
@pytest.mark.parametrize("T", ROWS)
@pytest.mark.parametrize("pieces", [1, 3])
def test_mix(C, D, T, pieces):
    rng = np.random.default_rng(C * D + T)
    normed, gate, inject = spiked(rng, T, C, D), spiked(rng, T, C, D), spiked(rng, T, C)
    u, a, call = mix(normed, gate, inject, pieces)
    assert call.reported is None
    assert_same(u, reference.mix(normed, gate), "u")
    assert_same(a, reference.strength(inject), "a")
    for t in range(T):
        one = mix(normed[t : t + 1], gate[t : t + 1], inject[t : t + 1])
        assert_same(one[0][0], u[t], f"u of row {t} alone")
        assert_same(one[1][0], a[t], f"a of row {t} alone")


def test_mix_without_strength_and_with_saturated_gates():
    rng = np.random.default_rng(7)
    normed, gate = plain(rng, 2, 4, 64), np.full((2, 4, 64), 200, np.float32)
    gate[1] = -200
    u, a, call = mix(normed, gate)
    assert a is None and call.reported is None
    assert_same(u, reference.mix(normed, gate))
    assert (abs(u[1]) < 1e-35).all()


@pytest.mark.parametrize("where", ["normed", "gate", "inject"])
def test_mix_reports_non_finite_values(where):
    parts = {"normed": np.ones((3, 2, 70), np.float32), "gate": np.zeros((3, 2, 70), np.float32),
             "inject": np.ones((3, 2), np.float32)}  # fmt: skip
    parts[where][1, 1] = np.nan
    assert mix(**parts, pieces=2)[2].reported == (NOT_FINITE, LAYER, 1)


@pytest.mark.parametrize(("C", "D"), SIZES)
@pytest.mark.parametrize("T", ROWS)
def test_add(C, D, T):
    rng = np.random.default_rng(C * D + T)
    x, y, a = spiked(rng, T, C, D), spiked(rng, T, D), spiked(rng, T, C)
    out = guarded(x)
    Call(hc_add, out, y, a, C, D).run(T)
    assert_same(out, reference.add(x, y, a))


def test_accuracy():
    rng = np.random.default_rng(9)
    x, w, gate, inject = plain(rng, 8, 4, 1000), plain(rng, 4, 1000), plain(rng, 8, 4, 1000), plain(rng, 8, 4)
    y, _ = norm(x, w)
    assert_accurate(y, exact.grouped_rms(x.astype(np.float64), w.reshape(-1), EPS), 1e-7, "norm")
    u, a, _ = mix(y, gate, inject)
    assert_accurate(u, (exact.sigmoid(gate.astype(np.float64)) * y).mean(1), 2e-7, "mix")
    assert_accurate(a, 2 * exact.sigmoid(inject.astype(np.float64) / 4), 1e-7, "strength")
    low = plain(rng, 320) * np.float32(4)
    assert_accurate(squeeze(low, 4)[0], exact.silu(low.astype(np.float64) / 4), 1e-7, "squeeze")
