"""Router: K largest logits, ties, softmax, errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.program import NOT_FINITE
from strata.cpu.router import router
from tests.canonical import router as reference
from tests.canonical.call import ERROR, LAYER, Call, assert_accurate, assert_same, plain, room


def run(logits: np.ndarray, K: int, scale: float = 1.0, order=None) -> tuple[np.ndarray, np.ndarray, Call]:
    T, E = logits.shape
    ids, weights = room(T, K, dtype="int32"), room(T, K)
    call = Call(router, np.ascontiguousarray(logits), ids, weights, E, K, float(scale), ERROR, LAYER).run(T, order)
    return ids, weights, call


def check(logits: np.ndarray, K: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    ids, weights, call = run(logits, K, scale)
    assert call.reported is None
    for t, row in enumerate(logits):
        wanted_ids, wanted_weights = reference.route(row, K, scale)
        assert_same(ids[t], wanted_ids, f"ids of row {t}")
        assert_same(weights[t], wanted_weights, f"weights of row {t}")
    return ids, weights


@pytest.mark.parametrize(("E", "K"), [(1, 1), (7, 7), (8, 3), (100, 10), (512, 10), (256, 16)])
@pytest.mark.parametrize("T", [1, 3, 8])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_same_bits(E, K, T, scale):
    check(plain(np.random.default_rng(E + K + T), T, E) * np.float32(3), K, scale)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(0, 30), st.integers(0, 4))
def test_ties_go_to_the_lowest_id(seed, K, more, levels):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-levels, levels + 1, (2, K + more)).astype(np.float32)
    logits = np.where((logits == 0) & (rng.integers(0, 2, logits.shape) == 0), np.float32(-0.0), logits)
    check(logits, K)


def test_ascending_descending_and_equal_logits():
    rising = np.arange(64, dtype=np.float32)
    ids, _ = check(np.stack([rising, rising[::-1], np.zeros_like(rising)]), 5)
    assert ids.tolist() == [[63, 62, 61, 60, 59], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


def test_far_apart_logits_do_not_leave_the_range_of_exp():
    logits = np.array([[3e38, -3e38, 0, 100], [1e-45, -1e-45, 0, -0.0], [-3e38, -3e38, -3e38, -3e38]], np.float32)
    _, weights = check(logits, 4)
    assert np.isfinite(weights).all()


def test_rows_do_not_see_each_other():
    logits = plain(np.random.default_rng(3), 8, 40)
    ids, weights, _ = run(logits, 6, order=[5, 0, 7, 1, 2, 6, 4, 3])
    for t in range(8):
        one_ids, one_weights, _ = run(logits[t : t + 1], 6)
        assert_same(ids[t], one_ids[0])
        assert_same(weights[t], one_weights[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_are_reported_with_their_row(bad):
    logits = plain(np.random.default_rng(4), 3, 20)
    logits[1, 19] = bad
    assert run(logits, 4)[2].reported == (NOT_FINITE, LAYER, 1)


def test_accuracy():
    logits = plain(np.random.default_rng(6), 64, 512) * np.float32(2)
    ids, weights, _ = run(logits, 10)
    best = np.take_along_axis(logits, ids, 1).astype(np.float64)
    exact = np.exp(best) / np.exp(best).sum(1, keepdims=True)
    assert_accurate(weights, exact, 2e-7, "router weights")
