"""Block formats: sizes, lookup, and dequantisers against `gguf.quants`."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from strata.base.errors import BadArgument, ModelError
from strata.pack.formats import FORMATS, by_name, format_of
from strata.pack.grids import CODEBOOK, E4M3_HALF, E8M0_HALF, GRID, SIGNS
from strata.pack.lanes import read_weights
from tests.block_data import random_rows

KNOWN = [f for f in FORMATS.values() if f.name != "Q2_0"]
QUANTISED = [f for f in FORMATS.values() if f.group]


def ids(format):
    return format.name


def test_every_format_of_the_files_is_there():
    assert sorted(FORMATS) == [0, 1, 2, 3, 6, 7, 8, *range(10, 15), *range(16, 25), 29, 30, 39, 40, 42]
    assert all(FORMATS[f.ggml_id] is f and by_name(f.name) is f and f.lane_rule for f in FORMATS.values())


@pytest.mark.parametrize("format", KNOWN, ids=ids)
def test_sizes_match_gguf(format):
    kind = GGMLQuantizationType(format.ggml_id)
    assert kind.name == format.name
    assert GGML_QUANT_SIZES[kind] == (format.block_values, format.block_bytes)


@pytest.mark.parametrize("format", [f for f in KNOWN if f.name != "I8"], ids=ids)
@pytest.mark.parametrize("mode", ["plain", "mid"])
def test_dequantise_matches_gguf(format, mode):
    raw = random_rows(format, 6, 768, mode)
    expected = quants.dequantize(raw, GGMLQuantizationType(format.ggml_id))
    got = format.dequantise(raw.reshape(2, 3, -1))
    assert got.dtype == np.float32 and got.shape == (2, 3, 768)
    np.testing.assert_array_equal(got.reshape(6, 768), expected)


def test_dequantise_q2_0_by_hand():
    raw = np.zeros((1, 18), np.uint8)
    raw[0, :2] = np.array([0.5], np.float16).view(np.uint8)
    raw[0, 2] = 0b11_10_01_00
    raw[0, 17] = 0b00_00_00_11
    values = by_name("Q2_0").dequantise(raw)[0]
    np.testing.assert_array_equal(values[:4], [-0.5, 0, 0.5, 1])
    np.testing.assert_array_equal(values[4:60], -0.5)
    np.testing.assert_array_equal(values[60:], [1, -0.5, -0.5, -0.5])


def test_dequantise_i8_and_empty():
    np.testing.assert_array_equal(by_name("I8").dequantise(np.array([[1, 255]], np.uint8)), [[1, -1]])
    assert by_name("Q4_K").dequantise(np.zeros((0, 288), np.uint8)).shape == (0, 512)


@pytest.mark.parametrize("format", QUANTISED, ids=ids)
@pytest.mark.parametrize("mode", ["plain", "edge", "mid"])
def test_integers_times_scales_are_the_values(format, mode):
    """In float64 the readers of `pack.lanes` give the dequantised value, up to the rounding of the latter."""
    raw = random_rows(format, 4, 1024, mode, seed=3)
    w = read_weights(format, raw)
    n, nb, values = w.integers.shape

    def spread(x):
        return np.repeat(x, values // x.shape[-1], -1).astype(np.float64)

    exact = w.integers * spread(w.scale)
    if w.sub_scales is not None:
        exact = exact * spread(w.sub_scales)
    size = np.abs(exact)
    if w.minima is not None:
        low = spread(w.minima) * w.min_scale[..., None]
        exact, size = exact - low, size + np.abs(low)
    elif w.min_scale is not None:
        exact, size = exact + w.min_scale[..., None], size + np.abs(w.min_scale[..., None])
    got = format.dequantise(raw).reshape(n, nb, values)
    assert (np.abs(got - exact) <= 2.0**-22 * size + 2.0**-149).all()


def test_row_bytes():
    assert by_name("Q4_K").row_bytes(2560) == 1440
    assert by_name("Q2_0").row_bytes(640) == 180
    with pytest.raises(ModelError) as error:
        by_name("Q4_K").row_bytes(640)
    assert "640" in str(error.value) and "256" in str(error.value)


def test_refusals_name_what_they_met():
    with pytest.raises(ModelError, match=r"36.*blk\.3\.ffn"):
        format_of(36, "blk.3.ffn_up.weight")
    with pytest.raises(BadArgument, match="Q9_Z"):
        by_name("Q9_Z")
    with pytest.raises(BadArgument, match="144"):
        by_name("Q4_K").dequantise(np.zeros((2, 143), np.uint8))
    with pytest.raises(BadArgument, match="int8"):
        by_name("Q4_K").dequantise(np.zeros((2, 144), np.int8))


def test_codebooks():
    assert {n: g.shape for n, g in GRID.items()} == {
        "IQ2_XXS": (256, 8), "IQ2_XS": (512, 8), "IQ2_S": (1024, 8), "IQ3_XXS": (256, 4), "IQ3_S": (512, 4),
        "IQ1_S": (2048, 8), "IQ1_M": (2048, 8),
    }  # fmt: skip
    assert all(GRID[n].min() > 0 for n in GRID if not n.startswith("IQ1"))
    assert set(np.unique(GRID["IQ1_S"])) == {-1, 0, 1}
    assert list(CODEBOOK["IQ4_NL"][[0, 8, 15]]) == [-127, 1, 113]
    counts = [bin(s).count("1") for s in SIGNS]
    assert len(SIGNS) == 128 and all(c % 2 == 0 for c in counts) and np.array_equal(SIGNS & 127, np.arange(128))
    np.testing.assert_array_equal(E8M0_HALF, np.ldexp(1.0, np.arange(256) - 128).astype(np.float32))
    np.testing.assert_array_equal(E4M3_HALF, quants.NVFP4.ue4m3_to_fp32(np.arange(256, dtype=np.uint8)))
