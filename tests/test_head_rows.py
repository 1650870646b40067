"""Head rows against plain numpy: argmax, log-sum-exp, largest logits, penalties and bias per row."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from strata.base.errors import BadArgument, NotFinite
from strata.base.window import CANDIDATES, SUMMARY_TOP, HeadRequest
from strata.cpu.exp64 import exp64, log64
from strata.cpu.head_rows import log_sum_exp, modified_row, summarise

SIZES = [64, 65, 127, 128, 255, 257, 1000, 4096, 5003]


def order_of(row):
    """Ids by descending logit, equal ones by id."""
    return np.argsort(-row, kind="stable")


def naive_modified(row, tokens, request):
    """Penalties and bias in the stated order of roundings."""
    out = row.copy()
    ids, counts = np.unique(np.asarray(tokens, np.int64), return_counts=True)
    for token, count in zip(ids, counts, strict=True):
        logit = float(row[token])
        logit = logit / request.repetition if logit > 0 else logit * request.repetition
        out[token] = np.float32(logit - request.presence - request.frequency * count)
    for token, bias in request.bias.items():
        out[token] = np.float32(float(out[token]) + bias)
    return out


def logits_of(rng, T, V, kind):
    if kind == "ties":
        return rng.integers(-3, 4, (T, V)).astype(np.float32)
    if kind == "peak":
        return (rng.normal(0, 1, (T, V)) + 30 * (rng.random((T, V)) < 5 / V)).astype(np.float32)
    return rng.normal(0, 4, (T, V)).astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "ties", "peak"])
@pytest.mark.parametrize("V", SIZES)
def test_unmodified_rows(V, kind):
    logits = logits_of(np.random.default_rng(V), 3, V, kind)
    rows = summarise(logits, HeadRequest(greedy=False, summary=True, full=True))
    assert rows.argmax.dtype == np.int32 and rows.mod_ids.shape == (3, CANDIDATES) and rows.full is logits
    for j, row in enumerate(logits):
        order = order_of(row)
        assert rows.argmax[j] == order[0]
        assert (rows.top_ids[j] == order[:SUMMARY_TOP]).all() and (rows.top_logits[j] == row[order[:SUMMARY_TOP]]).all()
        assert (rows.mod_ids[j] == order[:CANDIDATES]).all() and (rows.mod_logits[j] == row[order[:CANDIDATES]]).all()
        exact = math.log(math.fsum(np.exp(row.astype(np.float64) - float(row.max())))) + float(row.max())
        assert abs(rows.logsumexp[j] - exact) < 2e-15 * max(1, abs(exact))
        assert rows.logsumexp[j] == rows.mod_logsumexp[j] == log_sum_exp(row)


def test_fields_follow_the_request():
    logits = logits_of(np.random.default_rng(0), 2, 256, "normal")
    greedy = summarise(logits, HeadRequest())
    assert greedy.logsumexp is greedy.top_ids is greedy.mod_ids is greedy.full is None
    summary = summarise(logits, HeadRequest(summary=True))
    assert summary.logsumexp is not None and summary.top_ids.shape == (2, 20) and summary.mod_ids is None
    short = summarise(logits, HeadRequest(greedy=False))
    assert short.mod_ids is not None and short.mod_logsumexp is None and short.top_ids is None and short.full is None
    biased = summarise(logits, HeadRequest(bias={3: 1.0}))
    assert biased.mod_ids is not None and biased.top_ids is None
    assert summarise(logits, HeadRequest(full=True)).full is logits


def test_signed_zeros_tie():
    logits = np.full((1, 300), -1, np.float32)
    logits[0, 7], logits[0, 9], logits[0, 200] = -0.0, 0.0, -0.0
    rows = summarise(logits, HeadRequest(greedy=False))
    assert rows.argmax[0] == 7 and list(rows.mod_ids[0, :4]) == [7, 9, 200, 0]


@pytest.mark.parametrize("V", [64, 300, 1000])
def test_largest_in_any_place(V):
    for place in range(V):
        logits = np.zeros((1, V), np.float32)
        logits[0, place] = 1
        rows = summarise(logits, HeadRequest(greedy=False))
        assert rows.argmax[0] == place and rows.mod_ids[0, 0] == place
        assert list(rows.mod_ids[0, 1:]) == [i for i in range(V) if i != place][: CANDIDATES - 1]


@pytest.mark.parametrize("direction", [1, -1])
def test_sorted_rows(direction):
    logits = np.ascontiguousarray(np.arange(5000, dtype=np.float32)[None, ::direction])
    assert (summarise(logits, HeadRequest(greedy=False)).mod_ids[0] == order_of(logits[0])[:CANDIDATES]).all()


@pytest.mark.parametrize("request_", [HeadRequest(), HeadRequest(summary=True), HeadRequest(bias={0: 1.0})])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 255, 299])
def test_not_finite_is_named(request_, value, place):
    logits = np.zeros((2, 300), np.float32)
    logits[1, place] = value
    with pytest.raises(NotFinite, match=f"row 1 .* at id {place} "):
        summarise(logits, request_)


def test_wrong_forms_are_refused():
    for bad in (np.zeros((1, 64)), np.zeros(64, np.float32), np.zeros((64, 2), np.float32).T):
        with pytest.raises(BadArgument, match="wrong form"):
            summarise(bad, HeadRequest())
    with pytest.raises(BadArgument, match="smaller than the list"):
        summarise(np.zeros((1, 63), np.float32), HeadRequest(greedy=False))
    logits = np.zeros((2, 64), np.float32)
    for token in (-1, 64):
        with pytest.raises(BadArgument, match=f"found {token}; needed 0..63"):
            summarise(logits, HeadRequest(presence=1.0, history=np.array([token]), rows=np.array([1, 2])))
        with pytest.raises(BadArgument, match=f"found {token}; needed 0..63"):
            summarise(logits, HeadRequest(bias={token: 1.0}))
    with pytest.raises(BadArgument, match="found 1 tokens; needed 2 tokens"):
        summarise(logits, HeadRequest(presence=1.0, rows=np.array([1])))
    with pytest.raises(NotFinite, match="no token left"):
        summarise(logits, HeadRequest(bias=dict.fromkeys(range(64), -math.inf)))


@st.composite
def penalised(draw):
    T, V = draw(st.integers(1, 8)), draw(st.sampled_from([64, 130, 700]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = logits_of(rng, T, V, draw(st.sampled_from(["normal", "ties"])))
    near = draw(st.sampled_from([4, V]))  # few different tokens: many repeats
    history = rng.integers(0, near, draw(st.integers(0, 40))).astype(np.int32)
    bias = {int(i): float(rng.normal(0, 4)) for i in rng.integers(0, V, draw(st.integers(0, 4)))}
    if bias and draw(st.booleans()):
        bias[next(iter(bias))] = -math.inf
    request = HeadRequest(
        greedy=draw(st.booleans()), summary=draw(st.booleans()), full=draw(st.booleans()),
        repetition=draw(st.sampled_from([1.0, 1.3, 0.7])), presence=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency=draw(st.sampled_from([0.0, 0.25])), history=history, rows=rng.integers(0, near, T).astype(np.int32),
        bias=bias, last_n=draw(st.sampled_from([0, 1, 3, 20])),
    )  # fmt: skip
    return logits, request


@settings(deadline=None, max_examples=150)
@given(penalised())
def test_penalties_per_row(case):
    logits, request = case
    before = logits.copy()
    rows = summarise(logits, request)
    assert (logits == before).all()
    for j, row in enumerate(logits):
        tokens = np.concatenate([request.history, request.rows[: j + 1]])
        wanted = naive_modified(row, tokens[-request.last_n :] if request.last_n else tokens, request)
        if not request.modified:
            wanted = row
        assert (modified_row(row, request, j, len(logits)) == wanted).all()
        assert rows.argmax[j] == order_of(row)[0]  # of the unmodified logits
        if rows.mod_ids is not None:
            assert (rows.mod_ids[j] == order_of(wanted)[:CANDIDATES]).all()
            assert (rows.mod_logits[j] == wanted[rows.mod_ids[j]]).all()
        if rows.mod_logsumexp is not None:
            assert rows.mod_logsumexp[j] == log_sum_exp(wanted)
        if request.summary:
            assert rows.logsumexp[j] == log_sum_exp(row) and (rows.top_ids[j] == order_of(row)[:SUMMARY_TOP]).all()


@njit(error_model="numpy")
def _exp(x):
    return exp64(x)


def test_exp_and_log():
    x = np.concatenate([-np.geomspace(1e-18, 708, 20000), np.linspace(0, 1, 999)])
    mine = np.array([_exp(v) for v in x])
    assert np.max(np.abs(mine / np.exp(x.astype(np.longdouble)) - 1)) < 3e-16
    assert _exp(0.0) == 1.0 and _exp(-708.5) == 0.0 and _exp(-math.inf) == 0.0
    y = np.concatenate([np.geomspace(1e-300, 1e300, 20000), np.linspace(0.5, 2, 9999)])
    exact = np.log(y.astype(np.longdouble))
    mine = np.array([log64(v) for v in y])
    assert np.max(np.abs(mine - exact) / np.maximum(1, np.abs(exact))) < 3e-16
    assert log64(1.0) == 0.0 and log64(0.0) == -math.inf
