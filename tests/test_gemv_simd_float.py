"""Float matrices in the tiers 512 and 256: the bits of the 256-lane rule for rows of any length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base import arithmetic as A
from strata.cpu.gemv import float_simd, table
from strata.pack.formats import by_name
from tests.block_data import MODES, bits, random_activations, random_rows
from tests.simd_cases import SIMD_TIERS, product, records_of

FORMATS = float_simd.FORMATS
ROWS = 21

pytestmark = pytest.mark.skipif(not SIMD_TIERS, reason="this machine has no AVX2")
tiers = pytest.mark.parametrize("tier", SIMD_TIERS)


def compare_with_portable(format, tier, raw, x, R=(1, 2, 3, 4)):
    K = x.shape[1]
    wanted = bits(product(format, raw, records_of(format, x, table.PORTABLE)[0], K, table.PORTABLE))
    for r in R:
        found = bits(product(format, raw, records_of(format, x[:r], tier)[0], K, tier))
        np.testing.assert_array_equal(found, wanted[:r], f"{format.name} K={K} R={r}")
    return wanted


@tiers
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_bits(name, mode, tier):
    format = by_name(name)
    for K in (32, 64, 96, 128, 320, 640, 704, 2560, 10240):
        raw, x = random_rows(format, ROWS, K, mode, seed=K), random_activations(4, K, mode, seed=K + 1)
        wanted = compare_with_portable(format, tier, raw, x)
        np.testing.assert_array_equal(wanted[3, :4], bits(A.dot_float(format.dequantise(raw[:4]), x[3])))


@tiers
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60)
@given(st.integers(1, 5200), st.integers(0, 11), st.integers(0, 3), st.integers(0, 2**31))
def test_bits_of_any_shape(name, tier, K, n_rows, gap, seed):
    """Any K, any number of rows, values between the rows."""
    format, rng = by_name(name), np.random.default_rng(seed)
    wide = random_rows(format, n_rows, K + gap, seed=seed)
    x = rng.standard_normal((4, K)).astype(np.float32)
    compare_with_portable(format, tier, wide[:, : format.row_bytes(K)], x, R=(1, int(rng.integers(2, 5))))


@tiers
@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_long_rows_in_pairs_and_alone(name, tier):
    format = by_name(name)
    for K in (float_simd.LONG_FROM - 1, float_simd.LONG_FROM, float_simd.LONG_FROM + 301):
        raw, x = random_rows(format, 7, K, seed=K), random_activations(1, K, seed=K + 1)
        for n in (1, 2, 7):
            compare_with_portable(format, tier, raw[:n], x, R=(1,))
