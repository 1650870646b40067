"""The choice of the best blocks alone, from scores of any kind, and scores at the full width of the indexer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument
from strata.base.program import NOT_FINITE
from strata.gpu import qsa_select as gpu
from tests.canonical.call import LAYER, Slot, assert_same, check_guards, plain, room
from tests.canonical.qsa_select import block_scores
from tests.gpu.run_on_cpu import ErrorWord, address, needs_compiler, run_all

pytestmark = needs_compiler


def chosen(scores: np.ndarray, pos: int, block: int, budget: int, reverse: bool = False) -> np.ndarray:
    """scores (T, most) of rows from `pos` on -> blocks (T, budget)."""
    T, most = scores.shape
    out = room(T, budget, dtype="int32")
    where = np.array([pos], np.int64)
    run_all(gpu.select(address(scores), address(where), address(out), T, block, budget, most), reverse=reverse)
    check_guards(out)
    return out


def check(scores: np.ndarray, pos: int, block: int, budget: int, reverse: bool = False) -> None:
    """Scores of blocks that a row does not see are set to something that must not be looked at."""
    scores = np.ascontiguousarray(scores, np.float32)
    for t, row in enumerate(scores):
        row[(pos + t + 1) // block :] = np.nan if t % 2 else 3e38
    out = chosen(scores, pos, block, budget, reverse)
    for t, row in enumerate(scores):
        n = (pos + t + 1) // block
        wanted = np.sort(np.argsort(-row[:n], kind="stable")[:budget]).astype(np.int32)
        assert_same(out[t, : len(wanted)], wanted, f"row {t} of {n} blocks")
        assert (out[t, len(wanted) :].view(np.uint32) == 0x5A5A5A5A).all()


def drawn(kind: str, rng: np.random.Generator, T: int, n: int) -> np.ndarray:
    x = abs(rng.standard_normal((T, n)))
    if kind == "positive parts":
        x = np.maximum(rng.standard_normal((T, 4, n)), 0).sum(1)
    elif kind == "equal":
        x[:] = 1.5
    elif kind == "zeros":
        x[:] = 0
    elif kind == "few values":
        x = np.floor(3 * x)
    elif kind == "one value often":
        x[rng.random((T, n)) < 0.7] = 1.0
    elif kind == "ties at the edge":
        x = np.where(rng.random((T, n)) < 0.004, x + 4, np.where(rng.random((T, n)) < 0.05, 3.0, x * 0.5))
    elif kind == "in one place":
        x[:, n // 3 : n // 3 + 700] += 50
    elif kind == "ascending":
        x = np.arange(T * n, dtype=np.float64).reshape(T, n)
    elif kind == "wide":
        x = np.exp(np.clip(20 * rng.standard_normal((T, n)), -80, 80))
    elif kind == "an outlier":
        x[:, n // 2] = 1e38
    elif kind == "neighbours":
        x = (0x3F800000 + rng.integers(0, 200, (T, n))).astype(np.uint32).view(np.float32)
    return x.astype(np.float32)


KINDS = ("positive parts", "equal", "zeros", "few values", "one value often", "ties at the edge", "in one place",
         "ascending", "wide", "an outlier", "neighbours")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_choice_of_512_among_32768(kind):
    rng = np.random.default_rng(len(kind))
    check(drawn(kind, rng, 2, 32768), 131_068, 4, 512, reverse=len(kind) % 2 == 0)


@pytest.mark.parametrize("kind", ["positive parts", "in one place", "ties at the edge", "one value often"])
def test_choice_among_65536(kind):
    check(drawn(kind, np.random.default_rng(7), 1, 65536), 262_143, 4, 512)


def test_choice_among_more_than_two_chunks_of_a_warp():
    check(drawn("positive parts", np.random.default_rng(8), 1, 80_004), 80_001, 1, 512)
    check(drawn("few values", np.random.default_rng(8), 1, 80_004), 80_001, 1, 512)


@pytest.mark.parametrize("pos", [0, 1, 4, 249, 259, 512, 513, 514, 2046, 2059, 4095, 4097, 8191])
@pytest.mark.parametrize("kind", ["positive parts", "few values"])
def test_few_blocks(pos, kind):
    """Rows on both sides of the budget, and of what is listed without a bound; the context is much longer."""
    check(drawn(kind, np.random.default_rng(pos), 3, 8196), pos, 1, 512)


@pytest.mark.parametrize("budget", [1, 2, 31, 1023, 1024])
@pytest.mark.parametrize("n", [1500, 4098, 9000])
def test_budgets(budget, n):
    rng = np.random.default_rng(budget)
    check(drawn("positive parts", rng, 1, n // 4 * 4 + 4), n - 1, 1, budget)
    check(drawn("one value often", rng, 1, n // 4 * 4 + 4), n - 1, 1, budget)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 1024), st.integers(1, 6000), st.sampled_from(KINDS))
def test_any_choice(seed, budget, n, kind):
    if kind == "in one place":
        n += 2100
    check(drawn(kind, np.random.default_rng(seed), 1, -(-n // 4) * 4), n - 1, 1, budget, reverse=bool(seed % 2))


def test_scores_that_are_not_finite_leave_valid_blocks():
    scores = drawn("positive parts", np.random.default_rng(1), 1, 8192)
    for bad in (np.nan, -np.nan, np.inf):
        scores[0, ::3] = bad
        out = chosen(scores, 8191, 1, 512)[0]
        assert (np.diff(out) > 0).all() and out[0] >= 0 and out[-1] < 8192


def test_what_the_selection_cannot_count_is_refused():
    for budget, most in ((1025, 4096), (512, 4097), (512, gpu.MOST_BLOCKS + 4)):
        with pytest.raises(BadArgument):
            gpu.select(256, 256, 256, 1, 4, budget, most)


# ---- scores of 4 heads of 128 values


def scored(q: np.ndarray, keys: np.ndarray, pos: int, block: int, budget: int, most: int, wide: bool = True):
    """(scores (T, most), where nothing was written NaN, and the error word)."""
    T, heads, dim = q.shape
    scores, error, position = room(T, most), ErrorWord(), np.array([pos], np.int64)
    scores[:] = np.nan
    out, slot = room(T, budget, dtype="int32"), Slot(keys)
    launches = gpu.qsa_select(
        address(q), address(slot), address(position), address(out), address(scores), T, heads, dim, block, budget,
        most * block, error.address, np.uint64(LAYER + 1) << np.uint64(32), wide=wide,
    )  # fmt: skip
    run_all(launches[:1], reverse=T % 2 == 0)
    check_guards(scores)
    return np.array(scores), error


@pytest.mark.parametrize("T", [1, 2, 4, 8])
@pytest.mark.parametrize("n", [9, 15, 16, 64, 65, 140])
def test_scores_at_full_width(T, n):
    rng = np.random.default_rng(n)
    q, keys = plain(rng, T, 4, 128), plain(rng, n + 2, 128)
    keys[3], keys[5] = 0, -abs(keys[5])
    budget, pos = 8, 4 * n - 3
    scores, error = scored(q, keys, pos, 4, budget, 256)
    assert error.reported is None
    for t in range(T):
        seen = (pos + t + 1) // 4
        if (pos + T) // 4 > budget:
            assert_same(scores[t, :seen], block_scores(q[t], keys[:seen]))
        assert np.isnan(scores[t, seen:]).all()
    assert_same(scores, scored(q, keys, pos, 4, budget, 256, wide=False)[0])


def test_no_scores_where_all_blocks_are_taken():
    rng = np.random.default_rng(4)
    scores, error = scored(plain(rng, 2, 4, 128), plain(rng, 30, 128), 100, 4, 40, 64)
    assert np.isnan(scores).all() and error.reported is None


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("head", [0, 1, 2, 3])
def test_bad_scores_are_reported_with_their_row(bad, head):
    rng = np.random.default_rng(5)
    q, keys = abs(plain(rng, 3, 4, 128)), abs(plain(rng, 40, 128))
    q[1, head, 77] = bad
    scores, error = scored(q, keys, 140, 4, 8, 64)
    assert error.reported == (NOT_FINITE, LAYER, 1)
    assert not np.isfinite(scores[1, :35]).any() and np.isfinite(scores[[0, 2], :35]).all()
