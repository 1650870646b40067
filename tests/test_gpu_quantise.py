"""Activation quantiser on the GPU's code, run on the CPU: the bits of the definition."""

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.program import NOT_FINITE
from strata.gpu.activations import quantise, squeeze
from strata.gpu.error_word import where
from tests.canonical import hyper_connection as reference
from tests.canonical.call import LAYER, assert_same, guarded, plain, spiked
from tests.gpu.run_on_cpu import ActivationArea, ErrorWord, address, needs_compiler, run_all

pytestmark = needs_compiler


def quantised(x: np.ndarray, group: int, squeeze_by: int = 0, reverse: bool = False):
    area, error = ActivationArea(*x.shape, group), ErrorWord()
    run_all(quantise(address(x), area.places, error.address, where(1, LAYER), squeeze_by=squeeze_by), reverse=reverse)
    return area.codes, area.scales, area.sums, error.reported


def check(x: np.ndarray, group: int, reverse: bool = False) -> None:
    codes, scales, sums, reported = quantised(x, group, reverse=reverse)
    wanted_codes, wanted_scales, bad = arithmetic.quantise(x, group)
    assert_same(codes, wanted_codes, "codes")
    assert_same(scales, wanted_scales, "scales")
    assert_same(sums, wanted_codes.astype(np.int32).reshape(len(x), -1, 16).sum(-1, dtype=np.int32), "sums")
    assert (reported is not None) == bad


@pytest.mark.parametrize(("group", "K"), [(32, 32), (32, 640), (256, 256), (256, 2560)])
@pytest.mark.parametrize(("T", "reverse"), [(1, False), (5, True)])
def test_same_bits(group, K, T, reverse):
    rng = np.random.default_rng(K + T)
    check(plain(rng, T, K), group, reverse)
    check(spiked(rng, T, K), group)


@pytest.mark.parametrize("group", [32, 256])
def test_edges_of_the_range(group):
    x = np.zeros((7, 512), np.float32)
    x[1] = -0.0
    x[2] = np.float32(2.0**-111)
    x[3] = np.float32(2.0**-110)
    x[4] = np.finfo(np.float32).max
    x[5] = np.tile(np.array([127, 0.5, 1.5, -2.5, 126.5, -126.5, 3.5, 1e-40], np.float32), 64)
    x[6] = np.ldexp(np.float32(1), -149)
    check(x, group)


@pytest.mark.parametrize("group", [32, 256])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_bad_value_zeroes_its_group_only(group, bad):
    x = plain(np.random.default_rng(2), 3, 512)
    x[2, 300] = bad
    check(x, group)
    assert quantised(x, group)[3] == (NOT_FINITE, LAYER, 2)


@pytest.mark.parametrize(("T", "n"), [(1, 320), (3, 32)])
def test_squeeze_then_quantise(T, n):
    x = plain(np.random.default_rng(n), T, n) * np.float32(20)
    x[0, :4] = [0, -0.0, 1e-40, -400]
    wanted = reference.squeeze(x, 4)
    apart, error = guarded(x), ErrorWord()
    run_all(squeeze(address(apart), T, n, 4, error.address, where(0, LAYER)))
    assert_same(apart, wanted)
    assert error.reported is None
    together = guarded(x)
    codes, scales, _, _ = quantised(together, 32, squeeze_by=4)
    assert_same(together, wanted)
    assert_same(codes, arithmetic.quantise(wanted, 32)[0])
    assert_same(scales, arithmetic.quantise(wanted, 32)[1])


def test_squeeze_reports():
    x, error = plain(np.random.default_rng(4), 3, 32), ErrorWord()
    x[1, 5] = np.inf
    run_all(squeeze(address(x), 3, 32, 4, error.address, where(0, LAYER)))
    assert error.reported == (NOT_FINITE, LAYER, 1)  # silu of +Inf is Inf
