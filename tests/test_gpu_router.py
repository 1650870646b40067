"""Router on the GPU's code, run on the CPU: the bits of the CPU op."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.program import NOT_FINITE
from strata.gpu.error_word import where
from strata.gpu.router import router
from tests.canonical import router as reference
from tests.canonical.call import LAYER, assert_same, check_guards, plain, room
from tests.gpu.run_on_cpu import ErrorWord, address, needs_compiler, run_all

pytestmark = needs_compiler


def launched(logits: np.ndarray, K: int, scale: float = 1.0, reverse: bool = False):
    T, E = logits.shape
    logits, ids, weights, error = np.ascontiguousarray(logits), room(T, K, dtype="int32"), room(T, K), ErrorWord()
    run_all(router(address(logits), address(ids), address(weights), T, E, K, scale, error.address, where(3, LAYER)),
            reverse=reverse)  # fmt: skip
    check_guards(ids)
    check_guards(weights)
    return ids, weights, error.reported


@pytest.mark.parametrize(("E", "K"), [(1, 1), (7, 7), (32, 4), (100, 10), (512, 10), (256, 16)])
@pytest.mark.parametrize(("T", "scale", "reverse"), [(1, 1.0, False), (3, 2.5, True)])
def test_same_bits(E, K, T, scale, reverse):
    logits = plain(np.random.default_rng(E + K + T), T, E) * np.float32(3)
    ids, weights, reported = launched(logits, K, scale, reverse)
    assert reported is None
    for t, row in enumerate(logits):
        wanted_ids, wanted_weights = reference.route(row, K, scale)
        assert_same(ids[t], wanted_ids, f"ids of row {t}")
        assert_same(weights[t], wanted_weights, f"weights of row {t}")


def test_ties_zeros_and_far_apart_logits():
    rng = np.random.default_rng(0)
    logits = rng.integers(-2, 3, (12, 300)).astype(np.float32)
    logits = np.where((logits == 0) & (rng.integers(0, 2, logits.shape) == 0), np.float32(-0.0), logits)
    logits[0, :4] = [3e38, -3e38, 1e-45, -1e-45]
    logits[1] = -3e38
    ids, weights, _ = launched(logits, 9)
    for t, row in enumerate(logits):
        wanted_ids, wanted_weights = reference.route(row, 9, 1)
        assert_same(ids[t], wanted_ids)
        assert_same(weights[t], wanted_weights)


def check(logits: np.ndarray, K: int, reverse: bool = False) -> None:
    ids, weights, reported = launched(logits, K, reverse=reverse)
    assert reported is None
    for t, row in enumerate(logits):
        wanted_ids, wanted_weights = reference.route(row, K, 1)
        assert_same(ids[t], wanted_ids, f"ids of row {t}")
        assert_same(weights[t], wanted_weights, f"weights of row {t}")


@pytest.mark.parametrize("K", [1, 10, 31, 32, 33, 100, 128])
def test_as_many_as_the_warp_has_lanes_and_more(K):
    check(plain(np.random.default_rng(K), 2, 512), K, reverse=K % 2 == 0)


@pytest.mark.parametrize("equal", [9, 10, 31, 32, 33, 34, 40, 512])
def test_equal_logits_that_just_fit_on_the_list_and_just_do_not(equal):
    """The K-th largest is shared by `equal` experts, which all reach the bound."""
    logits = -abs(plain(np.random.default_rng(equal), 2, 512)) - np.float32(1)
    for t, row in enumerate(logits):
        row[np.random.default_rng(t).permutation(512)[:equal]] = 0.5
    check(logits, 10)


@pytest.mark.parametrize("lanes", [1, 2, 3, 9])
def test_the_best_in_a_few_lanes(lanes):
    """A lane has four neighbours of every 128: the bound is then low, and the list long."""
    rng = np.random.default_rng(lanes)
    logits = plain(rng, 2, 512)
    logits.reshape(2, 4, 32, 4)[:, :, :lanes] += 100
    check(logits, 10)
    check(np.ascontiguousarray(logits[:, ::-1]), 16, reverse=True)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 700), st.integers(1, 40), st.integers(1, 60))
def test_any_logits(seed, E, K, values):
    rng = np.random.default_rng(seed)
    check(rng.choice(plain(rng, values), (1, E)).astype(np.float32), min(E, K), reverse=bool(seed % 2))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_bad_logit_is_reported_and_ids_stay_valid(bad):
    for E, at in ((40, 39), (39, 0), (512, 300)):
        logits = plain(np.random.default_rng(1), 3, E)
        logits[1, at] = bad
        ids, _, reported = launched(logits, 8)
        assert reported == (NOT_FINITE, LAYER, 1)
        assert ((ids >= 0) & (ids < E)).all() and len(set(ids[1].tolist())) == 8


def test_all_bad_logits():
    ids, _, reported = launched(np.full((1, 20), np.nan, np.float32), 5)
    assert reported == (NOT_FINITE, LAYER, 0)
    assert ((ids >= 0) & (ids < 20)).all() and len(set(ids[0].tolist())) == 5  # which ones is not defined
