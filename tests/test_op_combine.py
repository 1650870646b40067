"""The exact sum over experts against Python's integers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.arithmetic import sigmoid32
from strata.base.compiled import chunk
from strata.base.program import COMBINE_OVERFLOW
from strata.cpu import expert_record as op
from strata.cpu.expert_jobs import combine as combine_rows
from strata.cpu.machine_code import i64_view
from tests.canonical import experts as reference
from tests.canonical.call import ERROR, LAYER, Call, assert_same, plain, room


@chunk
def combine_columns(a, k, n_chunks):
    """Piece k of the columns."""
    p = i64_view(a, op.WORDS)
    combine_rows(p, k * p[op.D_] // n_chunks, (k + 1) * p[op.D_] // n_chunks)


def combine(weights, outputs, scales, shared_gate, shared, pieces=1) -> tuple[np.ndarray, Call]:
    """One row: weights (K,), outputs (K, D), scales (K,) or None, shared_gate (), shared (D,) -> y (D,)."""
    K, D = outputs.shape
    words, y = [0] * op.WORDS, room(1, D)
    words[op.T_], words[op.K_], words[op.D_], words[op.TOTAL] = 1, K, D, room(1, D, dtype="int64")
    words[op.ENTRY_OF], words[op.IDS] = np.arange(K, dtype=np.int32), np.arange(K, dtype=np.int32)
    words[op.WEIGHTS], words[op.SHARED_GATE] = np.array(weights, np.float32), np.array([shared_gate], np.float32)
    words[op.ROUTED + op.OUT], words[op.SHARED + op.OUT] = np.ascontiguousarray(outputs), np.ascontiguousarray(shared)
    words[op.ROUTED + op.DOWN + 4] = None if scales is None else np.array(scales, np.float32)
    words[op.Y], words[op.ERROR], words[op.LAYER] = y, ERROR, LAYER
    return y[0], Call(combine_columns, *words).run(pieces, order=reversed(range(pieces)))


def nearest_f32(n: int) -> np.float32:
    """The float32 nearest to an integer below 2^100, ties to even, by integers alone."""
    size = abs(n)
    shift = max(0, size.bit_length() - 24)
    whole, rest = size >> shift, size & ((1 << shift) - 1)
    half = 1 << shift >> 1
    if shift and (rest > half or (rest == half and whole & 1)):
        whole += 1
    return np.float32(np.copysign(float(whole << shift), n))


def by_integers(weights, outputs, scales, shared_gate, shared) -> np.ndarray:
    """The rule with Python's integers: terms rounded to multiples of 2^-32, half to even; one rounding at the end."""
    rows = [(np.float32(w), y, np.float32(s)) for w, y, s in zip(weights, outputs, scales, strict=True)]
    rows.append((sigmoid32(shared_gate)[()], shared, np.float32(1)))
    total = [0] * outputs.shape[1]
    for w, y, s in rows:
        for i, value in enumerate(y):
            total[i] += round(Fraction(float(w * (value * s))) * 2**32)
    return np.array([nearest_f32(n) * np.float32(2.0**-32) for n in total], np.float32)


@given(st.integers(0, 2**32 - 1), st.integers(1, 126), st.booleans())
def test_same_as_python_integers(seed, K, scaled):
    rng = np.random.default_rng(seed)
    D = 8
    size = 2.0 ** rng.integers(-60, 23, (K, D))
    outputs = (rng.uniform(-1, 1, (K, D)) * size).astype(np.float32)
    shared = (rng.uniform(-1, 1, D) * 2.0 ** rng.integers(-60, 23, D)).astype(np.float32)
    weights = rng.uniform(0, 1, K).astype(np.float32)
    scales = rng.uniform(0.25, 2, K).astype(np.float32)
    gate = np.float32(rng.normal())
    y, call = combine(weights, outputs, scales if scaled else None, gate, shared, pieces=3)
    assert call.reported is None
    used = scales if scaled else np.ones(K, np.float32)
    assert_same(y, by_integers(weights, outputs, used, gate, shared), "integers")
    assert_same(y, reference.combine(weights, outputs, used, gate, shared)[0], "numpy")


@given(st.integers(0, 2**32 - 1))
def test_order_of_experts_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    outputs = plain(rng, 10, 32) * np.exp2(rng.integers(-30, 20, (10, 32))).astype(np.float32)
    weights, order = rng.uniform(0, 1, 10).astype(np.float32), rng.permutation(10)
    shared = plain(rng, 32)
    y, _ = combine(weights, outputs, None, 0.5, shared)
    assert_same(combine(weights[order], outputs[order], None, 0.5, shared)[0], y)


def test_the_sum_is_rounded_once():
    """2^55 + 2^31 + 1 rounds up in float32; by way of float64 it would become a tie and round down."""
    outputs = np.array([[2.0**23], [0.5], [2.0**-32]], np.float32)
    y, _ = combine([1, 1, 1], outputs, None, 0, np.zeros(1, np.float32))
    assert y[0] == 2.0**23 + 1 and np.float32(np.float64(2**55 + 2**31 + 1)) == 2.0**55
    y, _ = combine([1, 1, 1], -outputs, None, 0, np.zeros(1, np.float32))
    assert y[0] == -(2.0**23) - 1


def test_terms_round_half_to_even_and_small_ones_vanish():
    unit = 2.0**-32
    outputs = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 0.499, 1e-40 / unit, 0.501]], np.float32) * np.float32(unit)
    y, _ = combine([1], outputs, None, 0, np.zeros(8, np.float32))
    assert (y / np.float32(unit)).tolist() == [0, 2, 2, 0, -2, 0, 0, 1]
    assert not np.signbit(y[3])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**24, -(2.0**24), 3e38])
@pytest.mark.parametrize("where", ["output", "weight", "scale", "shared", "gate"])
def test_terms_beyond_the_limit_are_reported_and_left_out(bad, where):
    weights, outputs, scales = [1.0, 1.0], np.ones((2, 5), np.float32), np.ones(2, np.float32)
    gate, shared = np.float32(0), np.full(5, 2, np.float32)
    if where == "output":
        outputs[1, 3] = bad
    elif where == "weight":
        weights[1] = bad
    elif where == "scale":
        scales[1] = bad
    elif where == "shared":
        shared[3] = 2 * bad if np.isfinite(bad) and abs(bad) < 1e38 else bad
    else:
        gate = np.float32(np.nan)
    y, call = combine(weights, outputs, scales, gate, shared)
    assert call.reported == (COMBINE_OVERFLOW, LAYER, 0)
    assert_same(y, reference.combine(np.float32(weights), outputs, scales, gate, shared)[0])
    assert y[3] == 2 and np.isfinite(y).all()  # of three terms of 1, the bad one counts as 0


def test_the_largest_terms_that_fit():
    top = np.nextafter(np.float32(2**24), np.float32(0))
    outputs = np.full((126, 3), top)
    outputs[:, 1] = -top
    shared = np.array([top, -top, 0], np.float32)
    y, call = combine(np.ones(126), outputs, None, 100, shared)
    assert call.reported is None
    assert_same(y, by_integers(np.ones(126), outputs, np.ones(126), np.float32(100), shared))
    assert y[0] == np.float32(127 * float(top)) and y[1] == -y[0]
