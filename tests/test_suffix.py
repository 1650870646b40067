"""Suffix lookup against a search written plainly, going back, forgetting, and its speed."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument
from strata.spec.suffix import NOTHING, Proposal, SuffixLookup


def naive(history, k, min_match=3, max_candidates=16, max_extend=32):
    n = len(history)
    ends = [e for e in range(n - 2, 1, -1) if history[e - 2 : e + 1] == history[n - 3 :]][:max_candidates]
    best, best_length = None, 0
    for end in ends:  # latest first, so that ties stay with the latest
        length = 0
        while length < max_extend and length <= end and history[end - length] == history[n - 1 - length]:
            length += 1
        if length > best_length:
            best, best_length = end, length
    if best is None or best_length < min_match or k <= 0:
        return NOTHING
    return Proposal(tuple(history[best + 1 : best + 1 + k]), best_length)


TEXTS = st.lists(st.integers(0, 3), max_size=120) | st.lists(st.integers(0, 1), max_size=120)


@settings(deadline=None, max_examples=300)
@given(TEXTS, st.integers(0, 8), st.sampled_from([{}, {"min_match": 5}, {"max_candidates": 1}, {"max_extend": 4}]),
       st.integers(1, 9))  # fmt: skip
def test_equals_a_plain_search(text, k, limits, piece):
    lookup = SuffixLookup(**limits)
    for start in range(0, len(text), piece):
        lookup.extend(text[start : start + piece])
        assert len(lookup) == min(start + piece, len(text))
        assert lookup.propose(k) == naive(text[: start + piece], k, **limits)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 60)), max_size=12))
def test_going_back_leaves_no_trace(steps):
    lookup, history = SuffixLookup(), []
    for tokens, back in steps:
        lookup.extend(tokens)
        history += tokens
        n = max(0, len(history) - back)
        lookup.truncate(n)
        history = history[:n]
        assert len(lookup) == n and lookup.propose(7) == naive(history, 7)
        fresh = SuffixLookup()
        fresh.extend(history)
        size = max(fresh._tokens.size, lookup._tokens.size)
        for one in (fresh, lookup):
            one._room(size, one._tokens[: one._n].copy())
        assert (fresh._table == lookup._table).all()


def test_index_after_going_back_is_the_index_of_the_prefix():
    """The table itself, not only what it answers: undone in place, rebuilt, and never grown are the same."""
    text = np.random.default_rng(0).integers(0, 40, 900).astype(np.int32)
    for kept in (880, 500, 100, 3, 2, 0):
        lookup, fresh = SuffixLookup(), SuffixLookup()
        lookup.extend(text)
        lookup.truncate(kept)
        fresh.extend(text[:kept])
        assert (lookup._table == fresh._table).all() and (lookup._before[:kept] == fresh._before[:kept]).all()


def test_after_takes_drafts_as_the_last_tokens():
    text = [1, 2, 3, 4, 5, 6, 7, 9, 9, 2, 3]
    lookup = SuffixLookup()
    lookup.extend(text)
    assert lookup.propose(7) == NOTHING
    assert lookup.propose(3, after=[4]) == Proposal((5, 6, 7), 3)
    assert lookup.propose(3, after=[4, 5]) == naive([*text, 4, 5], 3) == Proposal((6, 7, 9), 4)
    assert len(lookup) == len(text) and lookup.propose(7) == NOTHING


def test_nothing_behind_the_known_history():
    lookup = SuffixLookup()
    lookup.extend([7] * 20)
    assert lookup.propose(7) == Proposal((7,), 19)
    lookup.clear()
    assert len(lookup) == 0 and lookup.propose(7) == NOTHING


def test_ties_go_to_the_latest_and_length_wins():
    lookup = SuffixLookup()
    lookup.extend([1, 2, 3, 10, 1, 2, 3, 11, 5, 1, 2, 3])
    assert lookup.propose(1) == Proposal((11,), 3)
    lookup.clear()
    lookup.extend([9, 1, 2, 3, 10, 1, 2, 3, 11, 9, 1, 2, 3])
    assert lookup.propose(1) == Proposal((10,), 4)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), max_size=50), max_size=10), st.integers(16, 40), st.integers(0, 30))
def test_memory_is_bounded_and_positions_stay(pieces, limit, back):
    lookup, history = SuffixLookup(max_tokens=limit), []
    for piece in pieces:
        lookup.extend(piece)
        history += piece
        assert len(lookup) == len(history) and lookup._n <= limit and lookup.n_bytes <= 24 * limit
        held = history[len(history) - lookup._n :]
        assert len(held) >= min(len(history), limit // 2)
        assert lookup.propose(7) == naive(held, 7)
    n = max(0, len(history) - back)
    lookup.truncate(n)
    held = history[lookup._first : n]
    assert len(lookup) == n and lookup.propose(7) == naive(held, 7)
    lookup.extend([1, 1, 2, 1, 1, 2])
    held = [*history[:n], 1, 1, 2, 1, 1, 2][lookup._first :]
    assert lookup.propose(3) == naive(held, 3)


@pytest.mark.parametrize("wrong", [[-1], [1 << 31], [1.5], [[1]], ["a"], np.array([1 << 40])], ids=str)
def test_wrong_tokens_are_refused_and_change_nothing(wrong):
    for limit in (16, 1 << 18):
        lookup = SuffixLookup(max_tokens=limit)
        lookup.extend([1, 2, 3, 4, 1, 2, 3, 1, 2, 3, 5, 1, 2, 3, 0, 1][: limit - 1])
        before = lookup.propose(4), len(lookup)
        with pytest.raises(BadArgument):
            lookup.extend(wrong)
        with pytest.raises(BadArgument):
            lookup.extend(np.concatenate([np.arange(30), [-5]]))
        assert (lookup.propose(4), len(lookup)) == before
    with pytest.raises(BadArgument):
        lookup.truncate(len(lookup) + 1)


def test_arguments_are_checked():
    for wrong in ({"min_match": 2}, {"max_extend": 2}, {"max_candidates": 0}, {"max_tokens": 1}):
        with pytest.raises(BadArgument):
            SuffixLookup(**wrong)


def test_array_kinds_agree():
    text = np.random.default_rng(1).integers(0, 5, 300)
    answers = []
    for kind in (np.int32, np.int64, np.uint16, list):
        lookup = SuffixLookup()
        lookup.extend(text.tolist() if kind is list else text.astype(kind))
        answers.append(lookup.propose(7))
    assert len(set(answers)) == 1 and answers[0].tokens


def test_speed():
    """Thread time, best of several: a long history builds in under 100 ms, a round takes under 10 us."""
    text = np.random.default_rng(2).zipf(1.3, 262_144).astype(np.int64) % 50_000
    lookup = SuffixLookup()
    lookup.extend(text[:100])
    lookup.propose(7)
    build = []
    for _ in range(3):
        lookup = SuffixLookup()
        start = time.thread_time()
        lookup.extend(text)
        build.append(time.thread_time() - start)
    assert min(build) < 0.1
    rounds = []
    lookup.truncate(260_000)
    for at in range(260_000, 261_000):
        start = time.thread_time()
        lookup.extend(text[at : at + 1])
        lookup.propose(7)
        rounds.append(time.thread_time() - start)
    print(f"build {min(build) * 1e3:.1f} ms, round {np.median(rounds) * 1e6:.1f} us")
    assert np.median(rounds) < 10e-6
