"""Vector code of float sums and of float16 without an instruction for it, against numpy, bit by bit."""

import numpy as np
import pytest

from strata.base.arithmetic import dot_float, exp32, tree_sum
from strata.base.compiled import c_function
from strata.cpu.float_vectors import (
    LANES,
    dot64,
    dot128,
    dot256,
    exp,
    load,
    round_half,
    round_half_in_integers,
    trees,
    widen_half,
    widen_half_in_integers,
)
from strata.cpu.gemv.words import set_real
from strata.cpu.simd import Simd, i16, kernel_intrinsic
from tests.canonical.call import assert_same, spiked


def _emit_map(s: Simd, name: str) -> None:
    """(x, out, n): 16 values at a time."""
    x, out = s.pointer(s.args[0]), s.pointer(s.args[1])
    with s.loop(s.args[2]) as i:
        if name.startswith("widen"):
            halves = s.load(x, s.times(i, 2 * LANES), i16, LANES)
            value = widen_half(s, halves) if name == "widen" else widen_half_in_integers(s, halves)
        else:
            function = {"exp": exp, "round": round_half, "round_in_integers": round_half_in_integers}[name]
            value = function(s, load(s, x, s.times(i, 4 * LANES)))
        s.store(value, out, s.times(i, 4 * LANES))


_map = kernel_intrinsic("test_map", _emit_map, 3)


@c_function(3)
def widen_all(x, out, n):
    _map("widen", x, out, n)


@c_function(3)
def widen_all_in_integers(x, out, n):
    _map("widen_in_integers", x, out, n)


@c_function(3)
def round_all(x, out, n):
    _map("round", x, out, n)


@c_function(3)
def round_all_in_integers(x, out, n):
    _map("round_in_integers", x, out, n)


@c_function(3)
def exp_all(x, out, n):
    _map("exp", x, out, n)


def mapped(function, x: np.ndarray) -> np.ndarray:
    out = np.empty(x.size, np.float32)
    function(x.ctypes.data, out.ctypes.data, x.size // LANES)
    return out


@pytest.mark.parametrize("function", [widen_all, widen_all_in_integers], ids=lambda f: f.__name__)
def test_every_half_widens(function):
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    assert_same(mapped(function, halves), halves.astype(np.float32))


@pytest.mark.parametrize("function", [round_all, round_all_in_integers], ids=lambda f: f.__name__)
def test_rounding_to_halves(function):
    """Around every half and every midpoint between two, and any bits."""
    rng = np.random.default_rng(1)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves.view(np.uint32) + (1 << 12)).view(np.float32)
    around = np.concatenate([(x.view(np.uint32) + np.uint32(d)).view(np.float32) for x in (halves, middles)
                             for d in (0, 1, 0xFFFFFFFF)])  # fmt: skip
    subnormal = np.arange(-2048, 2048, dtype=np.float32) * np.float32(2.0**-26)
    x = np.concatenate([around, subnormal, rng.integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)])
    with np.errstate(all="ignore"):
        assert_same(mapped(function, x), x.astype(np.float16).astype(np.float32))


def test_exp():
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.uniform(-90, 90, 4096).astype(np.float32), spiked(rng, 4096),
                        np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 88, -87, 89] * 2, np.float32)])  # fmt: skip
    with np.errstate(all="ignore"):
        assert_same(mapped(exp_all, x), exp32(x))


def _emit_trees(s: Simd) -> None:
    """(x, out)"""
    x = s.pointer(s.args[0])
    s.store(trees(s, [load(s, x, 4 * LANES * k) for k in range(LANES)]), s.pointer(s.args[1]))


_trees = kernel_intrinsic("test_trees", _emit_trees, 2)


@c_function(2)
def sixteen_trees(x, out):
    _trees(x, out)


def test_trees_side_by_side():
    rows = spiked(np.random.default_rng(3), LANES, LANES)
    out = np.empty(LANES, np.float32)
    sixteen_trees(rows.ctypes.data, out.ctypes.data)
    assert_same(out, tree_sum(rows.copy()))


@c_function(4)
def dot(x, y, n, out):
    if n % 256 == 0:
        set_real(out, 0, dot256(x, y, n))
    elif n == 128:
        set_real(out, 0, dot128(x, y, n))
    else:
        set_real(out, 0, dot64(x, y, n))


@pytest.mark.parametrize("n", [64, 128, 256, 512, 2560])
def test_dot_products(n):
    rng = np.random.default_rng(n)
    for _ in range(20):
        x, y, out = spiked(rng, n), spiked(rng, n), np.empty((), np.float32)
        dot(x.ctypes.data, y.ctypes.data, n, out.ctypes.data)
        assert_same(out, np.asarray(dot_float(x, y), np.float32))
