"""Weights to block formats: Q8_0 against `gguf.quants`, Q2_0 against its rule written out."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import BadArgument, ModelError
from strata.pack.formats import by_name
from strata.pack.quantise_weights import WEIGHT_FORMATS, quantise_weights

f32 = np.float32


def weights(seed: int, rows: int, columns: int) -> np.ndarray:
    """Rows of many magnitudes, with zeros, constant blocks and halves."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-12, 6, (rows, 1)))
    x[rng.random(x.shape) < 0.05] = 0
    blocks = x.reshape(-1, 32)
    blocks[rng.random(len(blocks)) < 0.05] = 0
    blocks[rng.random(len(blocks)) < 0.05] = -0.75
    grid = rng.random(len(blocks)) < 0.2
    blocks[grid] = rng.integers(-254, 255, (int(grid.sum()), 32)) / 2
    blocks[grid, 0] = 127
    return x.astype(f32)


def naive_q2_0(block: np.ndarray) -> tuple[np.float16, list[int]]:
    """Scale and codes 0..3 of 64 values, one step after the other."""

    def code(t: np.float32) -> np.float32:
        return min(max(np.rint(t), f32(-1)), f32(2))

    amax = max(abs(v) for v in block)
    best, best_error = f32(0), None
    for i in range(17 if amax else 0):
        scale = amax * (f32(16 + i) / f32(32))
        error = f32(0)
        for v in block:
            e = v - scale * code(v * (f32(1) / scale))
            error = error + e * e
        if best_error is None or error < best_error:
            best, best_error = scale, error
    stored = np.float16(best)
    return stored, [1 if stored == 0 else int(code(v / f32(stored))) + 1 for v in block]


@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 9), blocks=st.integers(1, 5))
def test_q8_0_is_gguf_s(seed, rows, blocks):
    x = weights(seed, rows, 32 * blocks)
    wanted = quants.quantize(x, GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(quantise_weights(x, "Q8_0"), wanted)


def test_q8_0_rounds_halves_away_from_zero_and_just_below_down():
    below = np.nextafter(f32(0.5), f32(0))
    x = np.zeros((1, 32), f32)
    x[0, :6] = 127, 0.5, -0.5, below, -below, 2.5
    codes = quantise_weights(x, "Q8_0")[0, 2:].view(np.int8)
    assert codes[:6].tolist() == [127, 1, -1, 0, 0, 3]


@given(seed=st.integers(0, 1 << 30))
def test_q2_0_is_its_rule(seed):
    x = weights(seed, 3, 64)
    raw = quantise_weights(x, "Q2_0")
    for row, block in zip(raw, x, strict=True):
        scale, codes = naive_q2_0(block)
        assert row[:2].view(np.float16)[0] == scale
        assert [(int(row[2 + j // 4]) >> (2 * (j % 4))) & 3 for j in range(64)] == codes


def test_q2_0_keeps_what_it_can_store():
    rng = np.random.default_rng(1)
    values = (rng.integers(-1, 3, (40, 128)) * f32(0.375)).astype(f32)
    values[:, ::64] = 0.75
    np.testing.assert_array_equal(by_name("Q2_0").dequantise(quantise_weights(values, "Q2_0")), values)


def test_q2_0_errs_less_than_fixed_scales():
    x = np.random.default_rng(2).standard_normal((200, 64)).astype(f32)
    error = ((by_name("Q2_0").dequantise(quantise_weights(x, "Q2_0")) - x) ** 2).sum()
    amax = np.abs(x).max(1, keepdims=True)
    for share in (0.5, 0.75, 1.0):
        scale = amax * f32(share)
        assert error < ((np.clip(np.rint(x / scale), -1, 2) * scale - x) ** 2).sum()


@pytest.mark.parametrize("format_name", ["Q8_0", "Q2_0"])
@pytest.mark.parametrize("size", [0, 1e-45, 1e-38, 1e-30, 1e-7])
def test_blocks_too_small_for_float16_are_zero(format_name, size):
    raw = quantise_weights(np.full((1, 64), size, f32), format_name)
    found = by_name(format_name).dequantise(raw)
    assert np.isfinite(found).all() and np.abs(found - f32(size)).max() <= max(size, 1e-7)


@given(seed=st.integers(0, 1 << 30))
def test_bf16_is_gguf_s_and_keeps_bf16(seed):
    x = weights(seed, 4, 48)
    raw = quantise_weights(x, "BF16")
    np.testing.assert_array_equal(raw, quants.quantize(x, GGMLQuantizationType.BF16).view(np.uint8).reshape(4, -1))
    np.testing.assert_array_equal(quantise_weights(by_name("BF16").dequantise(raw), "BF16"), raw)


def test_f32_is_itself_and_axes_become_rows():
    x = weights(0, 6, 64).reshape(2, 3, 64)
    np.testing.assert_array_equal(quantise_weights(x, "F32").view(f32).reshape(x.shape), x)
    assert quantise_weights(x, "Q8_0").shape == (6, 68)
    assert quantise_weights(x.transpose(1, 0, 2), "F32").shape == (6, 256)


@pytest.mark.parametrize("format_name", WEIGHT_FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(format_name, bad):
    x = np.zeros((2, 64), f32)
    x[1, 5] = bad
    with pytest.raises(ModelError, match=r"^here holds a non-finite value; found index 69"):
        quantise_weights(x, format_name, "here")


@pytest.mark.parametrize(("format_name", "size"), [("Q8_0", 1e7), ("Q2_0", 3e5), ("BF16", 3.4e38)])
def test_values_too_large_are_refused(format_name, size):
    with pytest.raises(ModelError, match=f"^here has values too large for {format_name}"):
        quantise_weights(np.full((1, 64), size, f32), format_name, "here")


def test_other_formats_and_rows_are_refused():
    with pytest.raises(BadArgument, match="found Q4_K; needed Q8_0, Q2_0, BF16, F32"):
        quantise_weights(np.zeros((1, 256), f32), "Q4_K")
    with pytest.raises(ModelError, match="a row of 48 values cannot be stored as Q8_0"):
        quantise_weights(np.zeros((1, 48), f32), "Q8_0")
