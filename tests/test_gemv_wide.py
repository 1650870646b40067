"""Kernels for any number of activation rows: the bits of the kernels for a few, for any shape of the matrix."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import SelfTestFailed
from strata.cpu import self_test
from strata.cpu.gemv import float_wide, q8_wide, table, wide_kernels
from strata.pack.formats import FORMATS, BlockFormat, by_name
from tests.block_data import MODES, bits, random_activations, random_rows
from tests.simd_cases import SIMD_TIERS, product, records_of

CASES = [(name, tier) for tier in SIMD_TIERS for name in float_wide.FORMATS]
CASES += [(name, tier) for tier in SIMD_TIERS if tier == q8_wide.TIER for name in ("Q8_0", *wide_kernels.WIDES)]
ROWS = (5, 16, 33)
QUANTISED = ("Q8_0", *wide_kernels.WIDES)

pytestmark = pytest.mark.skipif(not SIMD_TIERS, reason="this machine has no AVX2")
cases = pytest.mark.parametrize(("name", "tier"), CASES)


def wide_product(format: BlockFormat, raw: np.ndarray, records: np.ndarray, K: int, tier: int) -> np.ndarray:
    """float32 (T, n): raw (n, row_bytes) times records (T, record_bytes)."""
    T, n = len(records), len(raw)
    out = np.full((T + 1, n + 1), 7, np.float32)
    function = table.wide_kernel(format, tier).function
    function(raw.ctypes.data, raw.strides[0], n, records.ctypes.data, K, T, out.ctypes.data, out.strides[0])
    assert (out[:, -1] == 7).all() and (out[-1] == 7).all(), "written behind the last row"
    return out[:-1, :-1]


def compare(format: BlockFormat, tier: int, raw: np.ndarray, x: np.ndarray) -> None:
    K = x.shape[1]
    records = records_of(format, x, tier)[0]
    wanted = np.concatenate([product(format, raw, records[t : t + 4], K, tier) for t in range(0, len(x), 4)])
    found = wide_product(format, raw, records, K, tier)
    np.testing.assert_array_equal(bits(found), bits(wanted), f"{format.name} tier={tier} K={K} T={len(x)}")


@cases
@pytest.mark.parametrize("mode", MODES)
def test_bits(name, tier, mode):
    """Whole tiles and parts of one; steps of records that end early; groups of activation rows, and what is left."""
    format = by_name(name)
    for K in (32, 64, 320, 2560) if format.activation == "float" else (format.block_values, 5 * format.block_values):
        raw = random_rows(format, 37, K, mode, seed=K)
        for T in ROWS if format.activation == "float" else (1, 3, 5, 8):
            compare(format, tier, raw, random_activations(T, K, mode, seed=K + T))


@cases
def test_bits_of_a_chunk(name, tier):
    format = by_name(name)
    for K, n in ((32, 64), (320, 20), (2560, 3)) if format.block_values <= 32 else ((256, 20), (2560, 3)):
        compare(format, tier, random_rows(format, n, K, seed=K), random_activations(256, K, seed=K))


@pytest.mark.parametrize(("name", "tier"), [c for c in CASES if c[0] in float_wide.FORMATS])
@settings(max_examples=25, deadline=None)
@given(
    K=st.integers(float_wide.LEAST_VALUES, 1400),
    n_rows=st.integers(1, 40),
    T=st.integers(1, 20),
    gap=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_bits_of_any_shape(name, tier, K, n_rows, T, gap, seed):
    """Any K, any number of rows, values between the rows."""
    format = by_name(name)
    wide = random_rows(format, n_rows, K + gap, seed=seed)
    compare(format, tier, wide[:, : format.row_bytes(K)], random_activations(T, K, seed=seed))


@pytest.mark.skipif(q8_wide.TIER not in SIMD_TIERS, reason="this machine has no AVX-512")
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(QUANTISED), st.integers(1, 20), st.integers(1, 40), st.integers(1, 20), st.integers(0, 2**31))
def test_bits_of_any_number_of_blocks(name, n_blocks, n_rows, T, seed):
    format = by_name(name)
    K = format.block_values * n_blocks
    compare(format, q8_wide.TIER, random_rows(format, n_rows, K, seed=seed), random_activations(T, K, seed=seed))


@pytest.mark.skipif(q8_wide.TIER not in SIMD_TIERS, reason="this machine has no AVX-512")
@pytest.mark.parametrize("name", wide_kernels.WIDES)
def test_longest_rows(name):
    """The tile is as large as it gets; rows may lie apart."""
    format, K = by_name(name), wide_kernels.MOST_VALUES
    apart = np.zeros((18, format.row_bytes(K) + 3), np.uint8)
    apart[:, :-3] = random_rows(format, 18, K, seed=1)
    compare(format, q8_wide.TIER, apart[:, :-3], random_activations(6, K, seed=2))


@pytest.mark.skipif(q8_wide.TIER not in SIMD_TIERS, reason="this machine has no AVX-512")
def test_every_quantised_format_has_a_kernel():
    quantised = {f.name for f in FORMATS.values() if f.activation in ("q8x32", "q8x256")}
    assert quantised == set(QUANTISED)


def test_what_a_table_offers():
    tier = SIMD_TIERS[-1]
    for name in float_wide.FORMATS:
        entries = table.kernel_table(by_name(name), tier)
        assert entries.shape == (8,) and entries[:5].all() and entries[5] == float_wide.LEAST_VALUES
        assert entries[7] == table.MANY_ROWS
        assert table.kernel_table(by_name(name), table.PORTABLE)[4] == 0
    wide = table.kernel_table(by_name("Q4_K"), tier)
    assert (wide[4] != 0) == (tier == wide_kernels.TIER)
    assert list(wide[5:]) == ([256, wide_kernels.MOST_VALUES, 5] if tier == wide_kernels.TIER else [0, 0, 0])


@pytest.mark.parametrize("tier", SIMD_TIERS)
def test_a_wrong_kernel_is_named(tier, monkeypatch):
    """BF16 values through the kernel of F16: as many bytes, other numbers."""
    name, wrong = "BF16", by_name("F16")
    monkeypatch.setattr(self_test, "wide_kernel", lambda format, tier=None: table.wide_kernel(wrong, tier))
    with pytest.raises(SelfTestFailed, match=f"the {name} kernel for any number of rows"):
        self_test.check_format(by_name(name), tier)
