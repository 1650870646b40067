"""Head summaries on the GPU's code, run on the CPU: the bits of the host's summaries."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.window import HeadRequest
from strata.cpu.head_rows import summarise
from strata.gpu import head_rows as gpu
from tests.canonical.call import assert_same, check_guards, plain, room
from tests.gpu.run_on_cpu import address, needs_compiler, run_all

pytestmark = needs_compiler


def largest(logits: np.ndarray, n: int, bans: bool = False, reverse: bool = False):
    T, V = logits.shape
    tops, ids, values = room(T, gpu.runs_of(V), dtype="uint32"), room(T, 64, dtype="int32"), room(T, 64)
    status = room(T, dtype="int32")
    run_all(gpu.top(address(logits), address(tops), address(ids), address(values), address(status), T, V, n, bans=bans),
            reverse=reverse)  # fmt: skip
    for out in (tops, ids, values, status):
        check_guards(out)
    return ids[:, :n], values, status


def sums_of(logits: np.ndarray, values: np.ndarray) -> np.ndarray:
    T, V = logits.shape
    lanes, sums = room(gpu.lane_bytes(T) // 8, dtype="float64"), room(T, dtype="float64")
    run_all(gpu.log_sum_exp(address(logits), address(values), address(lanes), address(sums), T, V), reverse=V % 2 == 1)
    check_guards(lanes)
    check_guards(sums)
    return sums


def ordered(row: np.ndarray, n: int) -> np.ndarray:
    return np.lexsort((np.arange(row.size), -row.astype(np.float64)))[:n].astype(np.int32)


@pytest.mark.parametrize("V", [64, 65, 100, 4096, 5001])
@pytest.mark.parametrize("n", [1, 20, 64])
def test_largest(V, n):
    logits = plain(np.random.default_rng(V), 3, V) * np.float32(5)
    ids, values, status = largest(logits, n, reverse=V == 5001)
    assert (status == -1).all()
    for t, row in enumerate(logits):
        assert_same(ids[t], ordered(row, n))
        assert_same(values[t, :n], row[ids[t]])


@pytest.mark.parametrize("n", [1, 20])
def test_more_runs_than_threads_keep(n):
    """4,219 runs, of which one, some or all reach the bound."""
    logits = plain(np.random.default_rng(n), 3, 270_000)
    logits[1], logits[2] = np.round(logits[1]), 0
    ids, values, status = largest(logits, n)
    assert (status == -1).all()
    for t, row in enumerate(logits):
        assert_same(ids[t], ordered(row, n))
        assert_same(values[t, :n], row[ids[t]])


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(0, 3), st.sampled_from([64, 300, 4200]), st.sampled_from([1, 7, 64]))
def test_ties_go_to_the_lowest_id(seed, levels, V, n):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-levels, levels + 1, (2, V)).astype(np.float32)
    logits = np.where((logits == 0) & (rng.integers(0, 2, logits.shape) == 0), np.float32(-0.0), logits)
    ids, _, _ = largest(logits, n)
    for t, row in enumerate(logits):
        assert_same(ids[t], ordered(row, n))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_the_first_bad_logit_is_named(bad):
    logits = plain(np.random.default_rng(2), 3, 700)
    logits[1, [650, 333, 699]] = bad
    status = largest(logits, 20)[2]
    assert status.tolist() == [-1, 333, -1]
    assert largest(logits, 20, bans=True)[2].tolist() == ([-1] * 3 if bad == -np.inf else [-1, 333, -1])


@pytest.mark.parametrize("V", [64, 257, 5000, 70_001])
@pytest.mark.parametrize("spread", [0.0, 3.0, 400.0])
def test_log_sum_exp(V, spread):
    logits = plain(np.random.default_rng(V), 2, V) * np.float32(spread)
    _, values, _ = largest(logits, 20)
    wanted = summarise(logits, HeadRequest(summary=True))
    assert_same(sums_of(logits, values), wanted.logsumexp)


REQUESTS = [
    dict(repetition=1.3),
    dict(presence=0.5, frequency=0.25),
    dict(repetition=0.7, presence=-0.1, frequency=0.1, last_n=7),
    dict(bias={3: 5.0, 70: -np.inf, 0: 1e-9, 250: -2.5}),
    dict(repetition=1.1, last_n=3, bias={5: 0.3}),
]


@pytest.mark.parametrize("options", REQUESTS)
@pytest.mark.parametrize("n_history", [0, 5, 3000])
def test_penalties_and_bias(options, n_history):
    rng = np.random.default_rng(n_history)
    T, V = 3, 300
    logits, history = plain(rng, T, V) * np.float32(4), rng.integers(0, V, n_history).astype(np.int32)
    history[: n_history // 2] %= 9
    rows = rng.integers(0, 12, T).astype(np.int32)
    request = HeadRequest(greedy=False, summary=True, history=history, rows=rows, **options)
    wanted = summarise(logits, request)
    bias = request.bias
    ids, amounts = np.array(list(bias), np.int32), np.array(list(bias.values()), np.float64)
    penalties = (request.repetition, request.presence, request.frequency) != (1.0, 0.0, 0.0)
    out, counts = room(T, V), np.zeros((T, V), np.int32)
    run_all(gpu.modify(address(logits), address(out), address(counts), address(history), n_history if penalties else -1,
                       address(rows), request.last_n, request.repetition, request.presence, request.frequency,
                       address(ids), address(amounts), len(bias), T, V))  # fmt: skip
    check_guards(out)
    assert not counts.any()
    found, values, status = largest(np.array(out), 64, bans=True)
    assert (status == -1).all()
    assert_same(found, wanted.mod_ids)
    assert_same(values, wanted.mod_logits)
    assert_same(sums_of(np.array(out), values), wanted.mod_logsumexp)
