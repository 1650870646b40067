"""SwiGLU and the exact combine on the GPU's code, run on the CPU: bits of the definition."""

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.program import COMBINE_OVERFLOW, NOT_FINITE
from strata.gpu.error_word import where
from strata.gpu.experts_ends import combine, swiglu
from tests.canonical import experts as reference
from tests.canonical.call import LAYER, assert_same, check_guards, plain, room, spiked
from tests.gpu.run_on_cpu import ActivationArea, ErrorWord, address, needs_compiler, run_all

pytestmark = needs_compiler


def activated(g, u, group, ids=None, scales=None, reverse=False):
    rows, F = g.shape
    error = ErrorWord()
    options = {} if ids is None else {"ids": address(ids)}
    if scales is not None:
        options |= {"g_scales": address(scales[0]), "u_scales": address(scales[1])}
    if group == 0:
        h = room(rows, F)
        run_all(
            swiglu(address(g), address(u), rows, F, address(h), error.address, where(0, LAYER), **options),
            reverse=reverse,
        )
        check_guards(h)
        return h, error
    area = ActivationArea(rows, F, group)
    run_all(
        swiglu(address(g), address(u), rows, F, area.places, error.address, where(0, LAYER), **options), reverse=reverse
    )
    return (area.codes, area.scales), error


@pytest.mark.parametrize(("group", "F"), [(0, 100), (32, 32), (32, 640), (256, 256), (256, 512)])
@pytest.mark.parametrize("scaled", [False, True])
def test_swiglu(group, F, scaled):
    rng = np.random.default_rng(F)
    g, u = spiked(rng, 5, F) * np.float32(9), spiked(rng, 5, F)
    g[0, :5] = [0, -0.0, 120, -120, 88]
    ids = np.array([2, 0, 2, 1, 3], np.int32)
    scales = rng.uniform(0.5, 2, (2, 4)).astype(np.float32) if scaled else None
    factors = scales[:, ids][:, :, None] if scaled else np.ones((2, 5, 1), np.float32)
    wanted = arithmetic.swiglu(g * factors[0], u * factors[1])
    found, error = activated(g, u, group, ids, scales, reverse=scaled)
    assert error.reported is None
    if group == 0:
        assert_same(found, wanted)
    else:
        codes, steps, _ = arithmetic.quantise(wanted, group)
        assert_same(found[0], codes)
        assert_same(found[1], steps)


def test_swiglu_names_the_expert_whose_value_is_not_finite():
    g, u, ids = (
        plain(np.random.default_rng(1), 4, 64),
        plain(np.random.default_rng(2), 4, 64),
        np.arange(4, dtype=np.int32) + 7,
    )
    g[2, 40] = np.nan
    assert activated(g, u, 32, ids)[1].reported == (NOT_FINITE, LAYER, 9)


def combined(outputs, ids, weights, shared, gate, reverse=False, **more):
    T, K, D = outputs.shape
    y, error = room(T, D), ErrorWord()
    run_all(
        combine(
            address(outputs),
            address(ids),
            address(weights),
            address(shared),
            address(gate),
            address(y),
            T,
            K,
            D,
            error.address,
            where(0, LAYER),
            **{k: address(v) for k, v in more.items()},
        ),
        reverse=reverse,
    )
    check_guards(y)
    return y, error


def case(T, K, D, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(K + 3)[:K] for _ in range(T)]).astype(np.int32)
    weights = rng.uniform(0, 1, (T, K)).astype(np.float32)
    return spiked(rng, T, K, D), ids, weights, spiked(rng, T, D), plain(rng, T)


@pytest.mark.parametrize(("T", "K", "D"), [(1, 1, 64), (3, 10, 300), (2, 4, 256)])
@pytest.mark.parametrize("scaled", [False, True])
def test_combine(T, K, D, scaled):
    outputs, ids, weights, shared, gate = case(T, K, D)
    scales = np.random.default_rng(1).uniform(0.5, 2, K + 3).astype(np.float32)
    y, error = combined(
        outputs, ids, weights, shared, gate, reverse=scaled, **({"down_scales": scales} if scaled else {})
    )
    assert error.reported is None
    for t in range(T):
        own = scales[ids[t]] if scaled else np.ones(K, np.float32)
        assert_same(y[t], reference.combine(weights[t], outputs[t], own, gate[t], shared[t])[0])


def test_terms_from_elsewhere_give_the_same_bits():
    outputs, ids, weights, shared, gate = case(3, 6, 200)
    whole, _ = combined(outputs, ids, weights, shared, gate)
    mine = (np.random.default_rng(5).integers(0, 2, (3, 6))).astype(np.uint8)
    terms = arithmetic.combine_terms(weights[..., None], outputs)[0]
    extra = np.ascontiguousarray(np.where(mine[..., None] == 0, terms, 0).sum(1))
    left = np.where(mine[..., None] == 0, np.float32(np.nan), outputs)  # what is not ours must not be looked at
    y, error = combined(np.ascontiguousarray(left), ids, weights, shared, gate, mine=mine, extra=extra)
    assert error.reported is None
    assert_same(y, whole)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0**25])
@pytest.mark.parametrize("which", ["routed", "shared"])
def test_a_term_beyond_the_limit_counts_as_zero(bad, which):
    outputs, ids, weights, shared, gate = case(3, 2, 64)
    weights[:] = 1
    gate[:] = 50
    (outputs[1, 1] if which == "routed" else shared[1])[63] = bad
    y, error = combined(outputs, ids, weights, shared, gate)
    assert error.reported == (COMBINE_OVERFLOW, LAYER, 1) and np.isfinite(y).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gate_that_is_not_finite(bad):
    outputs, ids, weights, shared, gate = case(3, 2, 64)
    gate[2] = bad
    assert combined(outputs, ids, weights, shared, gate)[1].reported == (COMBINE_OVERFLOW, LAYER, 2)
