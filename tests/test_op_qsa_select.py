"""Block scores and the exact choice of the best blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.compiled import step
from strata.base.program import NOT_FINITE
from strata.cpu.machine_code import f32_view, i32_view, i64_view
from strata.cpu.qsa_select import qsa_select, score_blocks, take_best
from tests.canonical import qsa_select as reference
from tests.canonical.call import ERROR, LAYER, Call, Slot, assert_accurate, assert_same, guarded, plain, room, spiked


@step
def score(a):
    """Record: q, keys, scores, heads, dim, n."""
    p = i64_view(a, 6)
    score_blocks(p[0], p[1], f32_view(p[2], p[5]), p[3], p[4], p[5])


@step
def take(a):
    """Record: scores, n, k, out."""
    p = i64_view(a, 4)
    take_best(f32_view(p[0], p[1]), p[1], p[2], i32_view(p[3], p[2]))


def select(q: np.ndarray, keys: np.ndarray, pos: int, block: int, budget: int) -> tuple[np.ndarray, Call]:
    """q (T, heads, dim), keys (blocks, dim) -> blocks (T, budget)."""
    T, heads, dim = q.shape
    out = room(T, budget, dtype="int32")
    call = Call(qsa_select, np.ascontiguousarray(q), Slot(keys), np.array([pos], np.int64), out, heads, dim, block,
                budget, ERROR, LAYER)  # fmt: skip
    return out, call.run(T, order=reversed(range(T)))


def check(q, keys, pos, block, budget) -> np.ndarray:
    out, call = select(q, keys, pos, block, budget)
    assert call.reported is None
    for t in range(len(q)):
        n = (pos + t + 1) // block
        wanted = reference.best(reference.block_scores(q[t], keys[:n]), budget)
        assert_same(out[t, : len(wanted)], wanted, f"blocks of row {t}")
        assert (out[t, len(wanted) :].view(np.uint32) == 0x5A5A5A5A).all()
    return out


@pytest.mark.parametrize("heads", [1, 3, 4])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 128])
def test_scores(heads, dim):
    rng = np.random.default_rng(heads * dim)
    q, keys = spiked(rng, heads, dim), spiked(rng, 37, dim)
    keys[5] = 0
    keys[6] = -abs(keys[6])
    scores = room(37)
    Call(score, q, keys, scores, heads, dim, 37).run()
    assert_same(scores, reference.block_scores(q, keys))
    assert scores[5] == 0 and not np.signbit(scores).any()


@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("T", [1, 3, 8])
@pytest.mark.parametrize("budget", [1, 5, 16, 29, 30, 31, 100])
def test_select(block, T, budget):
    """Rows that see 28 to 31 blocks, on both sides of the budget."""
    rng = np.random.default_rng(budget + T)
    keys = plain(rng, 40, 32)
    for pos in (30 * block - 1, 30 * block - 2, 28 * block):
        out = check(plain(rng, T, 2, 32), keys, pos, block, budget)
        n = (pos + 1) // block
        if n <= budget:
            assert out[0, :n].tolist() == list(range(n))


def test_no_complete_block_yet():
    out, call = select(np.full((1, 1, 32), np.nan, np.float32), plain(np.random.default_rng(1), 4, 32), 2, 4, 3)
    assert call.reported is None and (out.view(np.uint32) == 0x5A5A5A5A).all()


def test_rows_do_not_see_each_other():
    rng = np.random.default_rng(2)
    q, keys = plain(rng, 8, 2, 64), plain(rng, 60, 64)
    whole, _ = select(q, keys, 200, 4, 7)
    for t in range(8):
        assert_same(select(q[t : t + 1], keys, 200 + t, 4, 7)[0][0], whole[t])


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-45, 3e38])
def test_equal_scores_go_to_the_lowest_blocks(value):
    keys = np.zeros((50, 32), np.float32)
    keys[:, 0] = value
    out = check(np.eye(1, 32, dtype=np.float32)[None], keys, 50 * 4 - 1, 4, 9)
    assert out[0].tolist() == list(range(9))
    out = check(-np.eye(1, 32, dtype=np.float32)[None], keys, 50 * 4 - 1, 4, 9)  # all negative: all zero
    assert out[0].tolist() == list(range(9))


@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 60), st.integers(0, 5))
def test_choice_is_the_exact_best_with_ties(seed, k, more, levels):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels + 1, k + more).astype(np.float32)
    if seed % 2:
        scores = abs(spiked(rng, k + more)) * (rng.integers(0, 3, k + more) > 0)
        scores[rng.integers(0, k + more, 3)] = scores[0]
    out = guarded(np.full(k, -1, np.int32))
    Call(take, np.ascontiguousarray(scores, np.float32), k + more, k, out).run()
    assert_same(out, reference.best(scores, k))


@given(st.integers(0, 2**32 - 1))
def test_neighbouring_scores_are_told_apart(seed):
    """Scores that differ in their last bits only, in any byte of the radix search."""
    rng = np.random.default_rng(seed)
    start = int(rng.integers(0, 0x7F000000))
    scores = (start + rng.integers(0, 300, 64)).astype(np.uint32).view(np.float32)
    out = guarded(np.full(10, -1, np.int32))
    Call(take, scores, 64, 10, out).run()
    assert_same(out, reference.best(scores, 10))


@pytest.mark.parametrize("where", ["query", "key"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_scores_are_reported(where, bad):
    rng = np.random.default_rng(3)
    q, keys = abs(plain(rng, 3, 2, 32)), abs(plain(rng, 20, 32))
    if where == "query":
        q[1, 1, 31] = bad
    else:
        keys[19, 0] = bad  # complete for rows 1 and 2; the last runs first here
    assert select(q, keys, 78, 4, 5)[1].reported == (NOT_FINITE, LAYER, 2 if where == "key" else 1)


def test_accuracy_of_scores():
    rng = np.random.default_rng(4)
    q, keys, scores = plain(rng, 4, 128), plain(rng, 500, 128), room(500)
    Call(score, q, keys, scores, 4, 128, 500).run()
    exact = np.maximum(q.astype(np.float64) @ keys.T.astype(np.float64), 0).sum(0)
    assert_accurate(scores, exact, 2e-7, "block scores")
