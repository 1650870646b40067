"""The sampling chain against plain numpy, draws against distributions, ranges."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher

from strata.base.errors import BadArgument
from strata.base.window import CANDIDATES, HeadRequest
from strata.cpu import head_rows
from strata.cpu.head_rows import log_sum_exp, summarise
from strata.runtime import chain, rng
from strata.runtime.rng import DRAFT, uniform
from strata.runtime.sampling import (
    Candidates,
    SamplingParams,
    distribution,
    row_distribution,
    sample,
    warm_up,
)

# ---- chain -------------------------------------------------------------------------------------------------------

CHI_999 = {1: 10.828, 5: 20.515, 63: 103.442}
"""99.9 % points of chi-square by degrees of freedom."""


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def naive_chain(row, p):
    """Plain float64: (ids in order, probabilities); `near` tells that a filter's edge is too close to call."""
    ids = np.argsort(-row, kind="stable")
    ids = ids[row[ids] > -np.inf]
    if p.top_k:
        ids = ids[: p.top_k]
    x = row[ids].astype(np.float64)
    x -= x[0]
    near = False
    probs = np.exp(x) / np.exp(x).sum()
    kept = len(ids)
    if p.top_p < 1:
        mass = np.cumsum(probs)
        kept = min(kept, int(np.searchsorted(mass, p.top_p)) + 1)
        near |= bool((np.abs(mass - p.top_p) < 1e-12).any())
    if p.min_p > 0:
        near |= bool((np.abs(probs / probs[0] - p.min_p) < 1e-12).any()) and p.min_p < 1
        kept = min(kept, int((probs >= p.min_p * probs[0]).sum()))
    weights = np.exp(x[:kept] / p.temperature)
    return ids[:kept], weights / weights.sum(), near


@st.composite
def rows_and_params(draw):
    V = draw(st.sampled_from([64, 65, 200, 1500]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["normal", "wide", "flat", "ties", "equal"]))
    width = {"normal": 2.0, "wide": 12.0, "flat": 0.05, "ties": 2.0, "equal": 0.0}[kind]
    row = rng.normal(0, width, V).astype(np.float32)
    if kind == "ties":
        row = np.rint(row)
    bias = {}
    if draw(st.integers(0, 3)) == 0:
        banned = rng.choice(V, draw(st.sampled_from([1, V // 2, V - 3])), replace=False)
        bias = {int(i): -math.inf for i in banned}
    return row + np.float32(draw(st.sampled_from([0.0, 25.0, -300.0]))), SamplingParams(
        temperature=draw(st.sampled_from([0.05, 0.7, 1.0, 3.0])),
        top_k=draw(st.sampled_from([None, 0, 1, 5, 63, 64, 65, 100, 1499, 10**6])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.95, 0.99999, 1 - 2**-53])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-9, 0.02, 0.5, 1.0])),
        logit_bias=bias,
        seed=draw(st.integers(0, 2**64 - 1)),
    )


def modified(row, p):
    out = row.copy()
    for token, bias in p.logit_bias.items():
        out[token] += np.float32(bias)
    return out


@settings(deadline=None, max_examples=300)
@given(rows_and_params())
def test_chain_against_numpy(case):
    row, p = case
    ids, probs, near = naive_chain(modified(row, p), p)
    assume(not near)
    got_ids, got_probs = distribution(row, p)
    assert got_probs.dtype == np.float64 and (got_ids == ids).all()
    assert np.abs(got_probs - probs).max() < 1e-11 and abs(got_probs.sum() - 1) < 1e-12


@settings(deadline=None, max_examples=300)
@given(rows_and_params(), st.integers(0, 10**6))
def test_candidates_and_full_row_agree(case, position):
    """The short way, the long way and a plain walk over the distribution give the same token."""
    row, p = case
    p.validate(row.size)
    request = replace(p.head_request([], [0]), full=True)
    rows = summarise(row[None], request)
    token = sample(rows, 0, p, position, request).token
    ids, probs = distribution(row, p)
    other_ids, other_probs = row_distribution(rows, 0, p, request)
    assert (ids == other_ids).all() and (probs == other_probs).all()
    blind = replace(rows, mod_ids=rows.mod_ids[:, :1], mod_logits=rows.mod_logits[:, :1])
    if p.top_k != 1:  # a list of one candidate decides almost nothing: the full row must
        assert sample(blind, 0, p, position, request).token == token
        assert (row_distribution(blind, 0, p, request)[1] == probs).all()
    by_id = np.argsort(ids)
    edges = np.cumsum(probs[by_id])
    u = uniform(p.seed, position)
    if np.abs(edges - u).min() > 1e-9:
        assert token == ids[by_id][np.searchsorted(edges, u, side="right")]


@pytest.mark.parametrize("p", [{"top_k": 64, "top_p": 0.9}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 8}])
def test_candidates_suffice_without_the_full_row(p):
    row = np.random.default_rng(3).normal(0, 6, 1000).astype(np.float32)
    p = SamplingParams(temperature=0.8, seed=1, **p)
    order = np.argsort(-row, kind="stable")[:CANDIDATES]
    short = Candidates(order.astype(np.int32), row[order], log_sum_exp(row))
    for got, wanted in zip(distribution(short, p), distribution(row, p), strict=True):
        assert (got == wanted).all()


def test_too_few_candidates_are_refused():
    row = np.zeros(1000, np.float32)
    order = np.arange(CANDIDATES, dtype=np.int32)
    short = Candidates(order, row[order], log_sum_exp(row))
    for p in ({}, {"top_p": 0.9}, {"top_k": 65}, {"min_p": 0.9}):
        with pytest.raises(BadArgument, match="too few"):
            distribution(short, SamplingParams(temperature=1.0, **p))
        params = SamplingParams(temperature=1.0, seed=1, **p)
        assert params.head_request([], [0]).full
        with pytest.raises(BadArgument, match="full row"):
            sample(summarise(row[None], HeadRequest(greedy=False)), 0, params, 0)
    with pytest.raises(BadArgument, match="no candidates"):
        sample(summarise(row[None], HeadRequest()), 0, SamplingParams(temperature=1.0, seed=1), 0)
    with pytest.raises(BadArgument, match=r"needs a seed.*seeded"):
        sample(summarise(row[None], HeadRequest(greedy=False)), 0, SamplingParams(temperature=1.0, top_k=1), 0)


@pytest.mark.parametrize("k", [None, 65, 4000, 40, 1])
def test_large_vocabulary(k):
    """No hidden cap: the kept list is what numpy keeps of 248,320 tokens."""
    row = np.random.default_rng(5).normal(0, 1.5, 248_320).astype(np.float32)
    p = SamplingParams(temperature=0.9, top_k=k, top_p=0.95, min_p=0.001, seed=4)
    ids, probs, near = naive_chain(row, p)
    got_ids, got_probs = distribution(row, p)
    assert not near and (got_ids == ids).all() and np.abs(got_probs - probs).max() < 1e-11
    if k is None:
        assert len(ids) > 10_000


def test_chi_square_of_draws():
    row = np.log(np.array([0.3, 0.25, 0.2, 0.1, 0.1, 0.05] + [1e-12] * 94)).astype(np.float32)
    p = SamplingParams(temperature=1.0, top_p=0.9999, seed=77)
    ids, probs = distribution(row, p)
    assert list(ids) == [0, 1, 2, 3, 4, 5]
    rows = summarise(row[None], p.head_request([], [0]))
    draws = [sample(rows, 0, p, position).token for position in range(60_000)]
    assert chi_square(np.bincount(draws, minlength=6), probs) < CHI_999[5]
    hot = SamplingParams(temperature=1.05, top_p=0.9999)  # a slightly wrong temperature is seen
    assert chi_square(np.bincount(draws, minlength=6), distribution(row, hot)[1]) > CHI_999[5]


def test_whole_row_draws_follow_the_row():
    row = np.log(np.random.default_rng(0).dirichlet(np.ones(3000))).astype(np.float32)
    p = SamplingParams(temperature=1.0, seed=5)
    rows = summarise(row[None], p.head_request([], [0]))
    draws = np.array([sample(rows, 0, p, position).token for position in range(30_000)])
    ids, probs = distribution(row, p)
    assert len(ids) == 3000
    of_group = np.bincount(ids % 64, probs, 64)
    assert chi_square(np.bincount(draws % 64, minlength=64), of_group) < CHI_999[63]


def test_seed_position_and_stream_decide_alone():
    logits = np.random.default_rng(1).normal(0, 1, (4, 4096)).astype(np.float32)
    p = SamplingParams(temperature=1.0, top_p=0.9, seed=11)
    window = summarise(logits, p.head_request([], [0, 1, 2, 3]))
    tokens = [sample(window, j, p, 100 + j).token for j in range(4)]
    for j in range(4):
        alone = summarise(logits[j : j + 1], p.head_request([], [j]))
        assert sample(alone, 0, p, 100 + j).token == tokens[j]
    same = [sample(window, 0, p, i).token for i in range(20)]
    assert same == [sample(window, 0, p, i).token for i in range(20)]
    assert same != [sample(window, 0, replace(p, seed=12), i).token for i in range(20)]
    assert same != [sample(window, 0, p, i, stream=DRAFT).token for i in range(20)]
    assert len(set(same)) > 5
    assert SamplingParams(seed=0).seeded().seed == 0
    seeds = {SamplingParams().seeded().seed for _ in range(4)}
    assert len(seeds) == 4 and all(0 <= s < 2**64 for s in seeds)


@pytest.mark.parametrize("u, token", [(0.0, 1), (1 - 2**-53, 2)])
def test_edges_of_the_uniform(u, token):
    """Tokens without weight are never drawn, not even at the ends."""
    row = np.array([-900, 1, 0, -900], np.float32)
    order = np.array([1, 2, 0, 3], np.int32)
    assert chain.draw_candidates(order, row[order], 4, 1.0, u) == token
    assert chain.draw_kept(np.arange(4, dtype=np.int32), row, 1.0, 1.0, u) == token
    assert chain.draw_row(row, 1.0, 1.0, u) == token


def test_warm_up_compiles_everything():
    warm_up()
    kernels = {k.__name__: k for m in (chain, head_rows, rng) for k in vars(m).values() if isinstance(k, Dispatcher)}
    used = ["_argmax_rows", "_top_rows", "_modified_rows", "_modify_row", "_sum_row", "candidates_kept", "row_kept",
            "draw_candidates", "draw_kept", "draw_row", "weights", "_uniform"]  # fmt: skip
    before = {name: len(kernels[name].signatures) for name in used}
    assert min(before.values()) >= 1
    logits = np.random.default_rng(0).normal(0, 0.1, (2, 3000)).astype(np.float32)
    for wish in ({}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 200, "min_p": 0.1}, {"presence_penalty": 0.5}):
        p = SamplingParams(temperature=0.7, seed=2**64 - 1, **wish)
        request = p.head_request([1], [2, 3])
        rows = summarise(logits, request)
        sample(rows, 1, p, 2**40, request)
        row_distribution(rows, 1, p, request)
    assert before == {name: len(kernels[name].signatures) for name in used}


# ---- penalties, greedy, log-probabilities ------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from([1, 2, 7, 64, 4096]), st.sampled_from([None, 0.8]),
       st.sampled_from([None, 20, 300]), st.integers(0, 90))  # fmt: skip
def test_window_rows_equal_one_token_decoding(seed, T, last_n, temperature, top_k, n_history):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1, (T, 500)).astype(np.float32)
    history, rows = list(rng.integers(0, 12, n_history)), list(rng.integers(0, 12, T))
    p = SamplingParams(temperature=temperature, top_k=top_k, top_p=0.97, repetition_penalty=1.4, presence_penalty=0.3,
                       frequency_penalty=0.2, penalty_last_n=last_n, logit_bias={3: 2.0, 5: -math.inf}, seed=seed,
                       logprobs=True, top_logprobs=3)  # fmt: skip
    request = p.head_request(history, rows)
    window = summarise(logits, request)
    for j in range(T):
        one = p.head_request(history + rows[:j], rows[j : j + 1])
        alone = summarise(logits[j : j + 1], one)
        assert (alone.mod_ids[0] == window.mod_ids[j]).all() and (alone.mod_logits[0] == window.mod_logits[j]).all()
        assert sample(alone, 0, p, j, one) == sample(window, j, p, j, request)
        ids, probs = row_distribution(window, j, p, request)
        counted = (history + rows[: j + 1])[-last_n:]
        by_counts = distribution(logits[j], p, {int(t): counted.count(t) for t in set(counted)})
        assert (by_counts[0] == ids).all() and (by_counts[1] == probs).all()
        assert 5 not in ids


def test_greedy_and_penalties():
    logits = np.zeros((1, 64), np.float32)
    logits[0, 9], logits[0, 4] = 3.0, 2.9
    for temperature in (None, 0, -0.0):
        p = SamplingParams(temperature=temperature)
        assert p.greedy and sample(summarise(logits, p.head_request([9], [9])), 0, p, 0) == (9, None, None)
        p = replace(p, frequency_penalty=0.1)
        request = p.head_request([9], [9])
        assert sample(summarise(logits, request), 0, p, 0, request).token == 4
        p = replace(p, penalty_last_n=0)
        assert not p.modified and sample(summarise(logits, p.head_request([9], [9])), 0, p, 0).token == 9
    p = SamplingParams(logit_bias={9: -0.5})
    assert sample(summarise(logits, p.head_request([], [0])), 0, p, 0).token == 4
    assert list(distribution(logits[0], p)[0]) == [4]


@pytest.mark.parametrize("p", [{}, {"temperature": 1.5, "top_k": 64}, {"temperature": 3.0},
                               {"temperature": 2.0, "top_k": 8, "logit_bias": {77: 50.0}},
                               {"presence_penalty": 1.0, "logit_bias": {77: 50.0}}])  # fmt: skip
def test_log_probabilities_are_of_the_unmodified_logits(p):
    row = np.random.default_rng(8).normal(0, 2, 400).astype(np.float32)
    exact = row.astype(np.float64) - math.log(math.fsum(np.exp(row.astype(np.float64))))
    order = np.argsort(-row, kind="stable")
    p = SamplingParams(logprobs=True, top_logprobs=20, seed=3, **p)
    p.validate(400)
    request = p.head_request([1, 2], [3])
    rows = summarise(row[None], request)
    for position in range(40):
        token, logprob, top = sample(rows, 0, p, position, request)
        assert abs(logprob - exact[token]) < 1e-12
        assert [i for i, _ in top] == list(order[:20])
        assert max(abs(l - exact[i]) for i, l in top) < 1e-12
    assert sample(rows, 0, replace(p, top_logprobs=0), 0, request).top == []


# ---- ranges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1}, {"temperature": -1e-9}, {"temperature": -math.inf},
        {"temperature": 101}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": "1"},
        {"temperature": True}, {"top_k": -1}, {"top_k": 2.0}, {"top_k": True}, {"top_p": 0.0}, {"top_p": 1.01},
        {"top_p": math.nan}, {"top_p": None}, {"min_p": -0.1}, {"min_p": 1.1}, {"repetition_penalty": 0.0},
        {"repetition_penalty": 101}, {"presence_penalty": math.inf}, {"frequency_penalty": -101},
        {"penalty_last_n": -1}, {"penalty_last_n": 4097}, {"penalty_last_n": None}, {"seed": -1},
        {"seed": 2**64}, {"seed": 1.0}, {"logprobs": 1}, {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1}, {"top_logprobs": 1}, {"logit_bias": {100: 1.0}},
        {"logit_bias": {-1: 1.0}}, {"logit_bias": {"a": 1.0}}, {"logit_bias": {1: 100.5}},
        {"logit_bias": {1: math.inf}}, {"logit_bias": {1: math.nan}}, {"logit_bias": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_ranges_are_refused(wrong):
    with pytest.raises(BadArgument) as caught:
        SamplingParams(**wrong).validate(100)
    assert caught.value.found is not None and caught.value.needed is not None
    assert list(wrong)[-1] in caught.value.message


def test_edges_of_ranges_are_taken():
    for p in ({}, {"temperature": 0}, {"temperature": 100}, {"top_k": 10**9},
              {"top_p": 1e-300}, {"min_p": 1}, {"repetition_penalty": 0.01}, {"penalty_last_n": 4096},
              {"penalty_last_n": 0}, {"seed": 0}, {"seed": 2**64 - 1}, {"logprobs": True, "top_logprobs": 20},
              {"logit_bias": {0: -math.inf, 99: -100}}, {"top_k": np.int64(4), "top_p": np.float32(0.5)}):  # fmt: skip
        SamplingParams(**p).validate(100)


def test_numbers_of_other_libraries_become_pythons_own():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(4), top_p=np.float64(0.5), min_p=np.float16(0.25),
        repetition_penalty=np.int8(1), presence_penalty=np.float32(-2), frequency_penalty=np.array(3.0),
        penalty_last_n=np.uint8(9), seed=np.uint64(2**64 - 1), logprobs=True, top_logprobs=np.int16(2),
        logit_bias={np.int32(7): np.float32(-math.inf), 8: np.int64(3), 9: np.float64(0.5)},
    )  # fmt: skip
    params.validate(100)
    plain = SamplingParams(0.5, 4, 0.5, 0.25, 1.0, -2.0, 3.0, 9, {7: -math.inf, 8: 3.0, 9: 0.5}, 2**64 - 1, True, 2)
    assert params == plain and repr(params) == repr(plain)


@pytest.mark.parametrize("wrong", [{"seed": np.float32(1)}, {"top_k": np.bool_(True)}, {"top_p": np.float32("nan")},
                                   {"min_p": np.ones(2)}, {"logit_bias": {1: np.zeros(2)}}], ids=str)  # fmt: skip
def test_what_is_no_number_of_its_kind_is_still_refused(wrong):
    with pytest.raises(BadArgument, match=next(iter(wrong))):
        SamplingParams(**wrong).validate(100)
