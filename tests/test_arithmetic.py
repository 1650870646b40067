"""Canonical arithmetic: the numpy definition against exact mathematics, and compiled code against numpy by bits."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from strata.base import arithmetic as A
from strata.base.errors import BadArgument
from strata.cpu import float_bits
from strata.cpu.gemv.vectors import Vectors
from tests.block_data import bits

f32 = np.float32


def nearest32(value: Fraction) -> float:
    """A rational rounded to float32, ties to even."""
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    whole, rest = divmod(size, unit)
    if rest * 2 > unit or (rest * 2 == unit and whole % 2):
        whole += 1
    rounded = whole * unit
    return (-1 if value < 0 else 1) * (float(rounded) if rounded < Fraction(2) ** 128 else float("inf"))


def patterns(n: int, seed: int = 0) -> np.ndarray:
    """float32 of random bits: every magnitude, subnormals, Inf and NaN, and some plain values."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2**32, n, dtype=np.uint32).view(f32).copy()
    x[: n // 2] = rng.uniform(-100, 100, n // 2)
    x[:8] = [0, -0.0, np.inf, -np.inf, np.nan, 88, -87, 1e-45]
    return x


def hard_triples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random bits, products near ties, and sums that cancel."""
    rng = np.random.default_rng(5)
    a, b, c = (rng.integers(0, 2**32, 3000, dtype=np.uint32).view(f32) for _ in range(3))
    keep = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    near, other = ((1 + rng.integers(0, 64, 1500) * 2.0**-23).astype(f32) for _ in range(2))
    third = np.where(rng.random(1500) < 0.5, -(near * other), np.ldexp(f32(1), rng.integers(-60, 30, 1500))).astype(f32)
    return tuple(np.concatenate(p) for p in ((a[keep], near), (b[keep], other), (c[keep], third)))


def test_fma32_is_exact():
    a, b, c = hard_triples()
    got = A.fma32(a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        assert r == nearest32(Fraction(x) * Fraction(y) + Fraction(z)), (x, y, z)


@settings(max_examples=300, deadline=None)
@given(*[st.floats(width=32, allow_nan=False, allow_infinity=False)] * 3)
def test_fma32_property(x, y, z):
    assert float(A.fma32(x, y, z)) == nearest32(Fraction(x) * Fraction(y) + Fraction(z))


@intrinsic
def _vector_fma_in_double(typingctx, x, y, z):
    """Lane 1 of the vector fma for machines without the instruction."""

    def generate(context, builder, signature, arguments):
        kind = ir.VectorType(ir.FloatType(), 4)
        one = ir.Constant(ir.IntType(32), 1)
        vectors = [builder.insert_element(ir.Constant(kind, [0.0] * 4), a, one) for a in arguments]
        return builder.extract_element(Vectors(builder)._fma_in_double(*vectors), one)

    return types.float32(*[types.float32] * 3), generate


@njit
def _all_fma(a, b, c, out):
    for i in range(a.size):
        out[0, i] = float_bits.fma32(a[i], b[i], c[i])
        out[1, i] = float_bits.fma_soft(a[i], b[i], c[i])
        out[2, i] = _vector_fma_in_double(a[i], b[i], c[i])


def test_compiled_fma_equals_numpy():
    a, b, c = (np.concatenate([x, patterns(4000, s)]) for s, x in enumerate(hard_triples()))
    out = np.zeros((3, len(a)), f32)
    _all_fma(a, b, c, out)
    np.testing.assert_array_equal(bits(out), np.broadcast_to(bits(A.fma32(a, b, c)), out.shape))


@njit
def _functions(x, e, out):
    for i in range(x.size):
        out[0, i] = float_bits.exp32(x[i])
        out[1, i] = float_bits.log1p32(e[i])
        out[2, i] = float_bits.sigmoid32(x[i])
        out[3, i] = float_bits.softplus32(x[i])
        out[4, i] = float_bits.silu32(x[i])
        out[5, i] = float_bits.sqrt32(x[i])
        out[6, i] = float_bits.rint32(x[i])


def test_compiled_functions_equal_numpy():
    x = patterns(200_000)
    e = np.random.default_rng(1).random(x.size, f32)
    out = np.zeros((7, x.size), f32)
    _functions(x, e, out)
    with np.errstate(all="ignore"):
        expected = [A.exp32(x), A.log1p32(e), A.sigmoid32(x), A.softplus32(x), A.silu32(x), np.sqrt(x), np.rint(x)]
    for got, want in zip(out, expected, strict=True):
        np.testing.assert_array_equal(bits(got), bits(want))


@njit
def _halves(half, brain):
    for i in range(65536):
        half[i] = float_bits.half_f32(np.int32(i))
        brain[i] = float_bits.bf16_f32(np.int32(i))


def test_all_16_bit_floats():
    half, brain = np.zeros(65536, f32), np.zeros(65536, f32)
    _halves(half, brain)
    codes = np.arange(65536, dtype=np.uint16)
    np.testing.assert_array_equal(bits(half), bits(codes.view(np.float16).astype(f32)))
    np.testing.assert_array_equal(brain.view(np.uint32), codes.astype(np.uint32) << 16)


def relative_error(got, want):
    return np.abs(got.astype(np.float64) / want - 1).max()


def test_error_of_the_functions():
    t = np.linspace(-87, 88, 400_001).astype(f32)
    d = t.astype(np.float64)
    e = np.concatenate([np.linspace(1e-6, 1, 200_001), 10.0 ** np.linspace(-38, 0, 100_000)]).astype(f32)
    assert relative_error(A.exp32(t), np.exp(d)) < 8.8e-8
    assert relative_error(A.log1p32(e), np.log1p(e.astype(np.float64))) < 1.2e-7
    assert relative_error(A.softplus32(t), np.logaddexp(0, d)) < 1.5e-7
    assert relative_error(A.sigmoid32(t), 1 / (1 + np.exp(-d))) < 1.7e-7
    away = t != 0
    assert relative_error(A.silu32(t[away]), d[away] / (1 + np.exp(-d[away]))) < 2e-7


def test_functions_at_the_ends():
    np.testing.assert_array_equal(A.sigmoid32([0, np.inf]), [0.5, 1])
    np.testing.assert_array_equal(A.softplus32([np.inf, 1e30]), [np.inf, f32(1e30)])
    assert np.isnan(A.sigmoid32(np.nan)) and np.isnan(A.softplus32(np.nan)) and np.isnan(A.silu32(np.nan))
    assert 0 < A.sigmoid32(-np.inf) < 1e-38
    assert A.exp32(np.nan) == A.exp32(88) == A.exp32(1e9) and A.exp32(-1e9) == A.exp32(-87)


def test_lanes_and_trees():
    assert [A.lanes_of(k) for k in (1, 2, 3, 48, 255, 256, 2560)] == [1, 2, 2, 32, 128, 256, 256]
    v = np.array([1e8, 1, -1e8, 1], f32)
    assert A.tree_sum(v) == (v[0] + v[2]) + (v[1] + v[3]) == 2
    with pytest.raises(BadArgument):
        A.tree_sum(np.zeros(3))
    with pytest.raises(BadArgument):
        A.lanes_of(0)


@pytest.mark.parametrize("K", [1, 7, 48, 256, 300, 2560])
def test_dot_float_order(K):
    """Against the rule written out one value at a time."""
    rng = np.random.default_rng(K)
    w, x = rng.standard_normal((3, K)).astype(f32), rng.standard_normal(K).astype(f32)
    lanes = A.lanes_of(K)
    acc = np.zeros((3, lanes), f32)
    for i in range(K):
        acc[:, i % lanes] = A.fma32(w[:, i], x[i], acc[:, i % lanes])
    np.testing.assert_array_equal(bits(A.dot_float(w, x)), bits(A.tree_sum(acc) + f32(0)))
    assert np.abs(A.dot_float(w, x) - w.astype(np.float64) @ x).max() < 1e-5 * np.sqrt(K)


def test_no_negative_zero_leaves_a_dot():
    assert not np.signbit(A.dot_float([-0.0, -0.0], [1.0, 1.0]))


def test_rms_norm():
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((3, 640)).astype(f32) * 30, rng.standard_normal(640).astype(f32)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(A.rms_norm(x, w, 1e-6), exact * w, rtol=3e-7)
    np.testing.assert_allclose(A.rms_norm(x, None, 1e-6), exact, rtol=3e-7)
    np.testing.assert_array_equal(A.rms_norm(x[1], w, 1e-6), A.rms_norm(x, w, 1e-6)[1])


def test_quantise_edges():
    x = np.zeros((7, 32), f32)
    x[1] = -0.0
    x[2] = A.from_bits(A.TINY_BITS - 1)
    x[3] = A.from_bits(A.TINY_BITS)
    x[4, :3] = [127, 0.5, 1.5]  # exactly half-way codes
    x[5, :2] = [3e38, -3e38]
    x[6, :2] = [-254, 127]
    codes, scales, bad = A.quantise(x, 32)
    assert not bad and codes.dtype == np.int8 and scales.shape == (7, 1)
    assert not codes[:3].any() and not scales[:3].any()
    assert (codes[3] == 127).all() and scales[3, 0] == f32(2.0**-110) / f32(127)
    assert list(codes[4, :3]) == [127, 0, 2] and scales[4, 0] == 1
    assert list(codes[5, :2]) == [127, -127]
    assert codes[6, 0] == -127 and scales[6, 0] == 2
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        y = np.ones((1, 64), f32)
        y[0, 40] = value
        codes, scales, bad = A.quantise(y, 32)
        assert bad and (codes[0, :32] == 127).all() and not codes[0, 32:].any() and scales[0, 1] == 0
    with pytest.raises(BadArgument):
        A.quantise(np.zeros(48), 32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
def test_quantise_property(values):
    x = np.array(values, f32)
    codes, scales, bad = A.quantise(x, 32)
    assert not bad and abs(int(codes.min())) <= 127
    if scales[0]:
        assert np.abs(codes).max() == 127
        assert (np.abs(codes * np.float64(scales[0]) - x) <= 0.5001 * np.float64(scales[0])).all()


def test_combine():
    w, y = f32(0.375), np.array([1, -3.25, 1e-12, 2.0**24], f32)
    terms, overflow = A.combine_terms(w, y)
    assert not overflow and terms[0] == 3 << 29 and terms.dtype == np.int64
    np.testing.assert_array_equal(A.combine_back(terms[:2]), w * y[:2])
    for value in (np.nan, np.inf, -np.inf, f32(2.0**24), -f32(2.0**24)):
        terms, overflow = A.combine_terms(f32(1), np.array([1, value], f32))
        assert overflow and list(terms) == [1 << 32, 0]
    largest = int(A.combine_terms(f32(1), np.nextafter(f32(2.0**24), f32(0)))[0])
    assert A.COMBINE_TERMS * largest < 2**63
    assert A.combine_back(np.int64(2**32 + 2**8 + 1)) == 1 + f32(2.0**-23)  # one rounding: through float64 it is a tie


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-(2**56), 2**56), min_size=2, max_size=20), st.randoms())
def test_combine_order_is_free(terms, random):
    shuffled = terms[:]
    random.shuffle(shuffled)
    back = A.combine_back(np.array(terms, np.int64).sum())
    assert back == A.combine_back(np.array(shuffled, np.int64).sum()) == nearest32(Fraction(sum(terms), 2**32))
