"""Logits with the choice of experts on the GPU's code: the bits of the two kernels that they are apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument
from strata.base.program import NOT_FINITE
from strata.gpu import route as routes
from strata.gpu.error_word import where
from strata.gpu.float_gemv import FloatMatrix, float_gemv
from strata.gpu.route import Choice, route
from strata.gpu.router import router
from tests.canonical.call import LAYER, assert_same, check_guards, guarded, plain, room, spiked
from tests.gpu.run_on_cpu import ErrorWord, address, needs_compiler, run_all
from tests.test_gpu_float_gemv import aligned, stored

pytestmark = needs_compiler


def both(x, matrices, K: int, scale: float = 1.0, reverse: bool = False) -> list[tuple]:
    """(ids, weights, outputs, report) of the form together and of product and router, which must agree."""
    (T, D), x, E = x.shape, aligned(x), len(matrices[0])
    assert T == 1
    data = [stored(np.ascontiguousarray(m), "BF16")[0] for m in matrices]
    results = []
    for together in (True, False):
        outputs, error = [room(T, len(m)) for m in data], ErrorWord()
        ids, weights = room(T, K, dtype="int32"), room(T, K)
        products = [FloatMatrix("BF16", address(d), len(d), address(y)) for d, y in zip(data, outputs, strict=True)]
        arrived = guarded(np.zeros(1, np.uint32))
        if together:
            choice = Choice(address(outputs[0]), address(ids), address(weights), K, scale, address(arrived))
            launches = route(address(x), D, products, choice, error.address, where(3, LAYER))
        else:
            launches = float_gemv(address(x), T, D, products)
            launches += router(address(outputs[0]), address(ids), address(weights), T, E, K, scale, error.address,
                               where(3, LAYER))  # fmt: skip
        run_all(launches, reverse=reverse)
        for a in (*outputs, ids, weights, arrived):
            check_guards(a)
        assert int(arrived[0]) == 0
        results.append((ids, weights, outputs, error.reported))
    for name, (one, other) in {"ids": (0, 0), "weights": (1, 1)}.items():
        assert_same(results[0][one], results[1][other], name)
    for one, other in zip(results[0][2], results[1][2], strict=True):
        assert_same(one, other, "products")
    assert results[0][3] == results[1][3]
    return results[0]


@pytest.mark.parametrize(("D", "E", "K", "more"), [
    (2560, 16, 10, 1), (264, 30, 4, 3), (1280, 9, 9, 0), (256, 512, 33, 1), (2560, 512, 10, 1),
])  # fmt: skip
def test_widths(D, E, K, more):
    rng = np.random.default_rng(D + E)
    matrices = [plain(rng, n, D) for n in (E, more) if n]
    ids, _, _, reported = both(plain(rng, 1, D), matrices, K, scale=2.5 if more else 1.0, reverse=E == 30)
    assert reported is None and ids.shape == (1, K)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(32, 320), st.integers(1, 130), st.integers(0, 6))
def test_any_shape(seed, D8, E, more):
    rng = np.random.default_rng(seed)
    draw = spiked if seed % 3 == 0 else plain
    matrices = [draw(rng, n, 8 * D8) for n in (E, more) if n]
    both(draw(rng, 1, 8 * D8), matrices, min(E, int(rng.integers(1, 40))), reverse=bool(seed % 2))


@pytest.mark.parametrize("equal", [10, 33, 40])
def test_equal_logits(equal):
    """Equal rows of the matrix: of equal logits the lowest ids come first."""
    rng = np.random.default_rng(equal)
    x, m = abs(plain(rng, 1, 256)), -abs(plain(rng, 64, 256))
    places = np.sort(rng.permutation(64)[:equal])
    m[places] = 0.5
    ids = both(x, [m, m[:1]], 10)[0]
    assert_same(ids, places[None, :10].astype(np.int32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_is_reported(bad):
    rng = np.random.default_rng(1)
    x = plain(rng, 1, 512)
    x[0, 300] = bad
    ids, _, _, reported = both(x, [plain(rng, 40, 512), plain(rng, 1, 512)], 8)
    assert reported == (NOT_FINITE, LAYER, 0)
    assert ((ids >= 0) & (ids < 40)).all() and len(set(ids[0].tolist())) == 8


def test_the_choice_may_be_made_from_other_logits():
    """As measurements with replayed experts do it."""
    rng, T, D, E, K = np.random.default_rng(2), 1, 256, 20, 3
    x, (data, _) = aligned(plain(rng, T, D)), stored(plain(rng, E, D), "BF16")
    y, ids, weights, error = room(T, E), room(T, K, dtype="int32"), room(T, K), ErrorWord()
    arrived = guarded(np.zeros(1, np.uint32))
    other = aligned(np.tile(np.arange(E, dtype=np.float32), (T, 1)))
    choice = Choice(address(other), address(ids), address(weights), K, 1.0, address(arrived))
    run_all(route(address(x), D, [FloatMatrix("BF16", address(data), E, address(y))], choice, error.address,
                  where(3, LAYER)))  # fmt: skip
    assert_same(ids, np.array([[19, 18, 17]], np.int32))
    check_guards(y)


@pytest.mark.parametrize(("D", "formats", "E", "K"), [
    (2568, ["BF16"], 16, 4), (260, ["BF16"], 16, 4), (248, ["BF16"], 16, 4), (256, ["F32"], 16, 4),
    (256, ["BF16", "F16"], 16, 4), (256, ["BF16"] * 3, 16, 4), (256, ["BF16"], 513, 4), (256, ["BF16"], 3, 4),
    (256, ["BF16"], 512, 129),
])  # fmt: skip
def test_what_it_does_not_take(D, formats, E, K):
    assert not routes.routes(1, D, formats, E, K)
    matrices = [FloatMatrix(f, 16, E if i == 0 else 1, 16) for i, f in enumerate(formats)]
    with pytest.raises(BadArgument, match="logits with the choice of experts"):
        route(16, D, matrices, Choice(16, 16, 16, K, 1.0, 16), 16, where(3, LAYER))


def test_it_is_for_one_row_and_can_be_switched_off(monkeypatch):
    fits = (256, ["BF16", "BF16"], 16, 4)
    assert routes.routes(1, *fits) and not routes.routes(2, *fits)
    monkeypatch.setattr(routes, "ROUTED_ROWS", 0)
    assert not routes.routes(1, *fits)
