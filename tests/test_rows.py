"""Compiled row dequantisers against `BlockFormat.dequantise`, bit for bit."""

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.errors import ModelError
from strata.cpu.rows import row_kernel
from strata.pack.formats import FORMATS, by_name

ROOT = Path(__file__).resolve().parent.parent

NAMES = [f.name for f in FORMATS.values() if f.name != "I8"]

# Where float16 scales lie in a block: byte offsets. IQ1_M spreads its one over the top nibbles of four words.
SCALES_AT = {
    "F16": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
    "Q2_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,),
    "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ1_S": (0,),
}  # fmt: skip


def with_finite_scales(format, blocks, rng):
    """Random uint8 (n, block_bytes) with every scale a number."""
    if format.name == "F32":
        blocks[:] = rng.standard_normal(len(blocks), np.float32).view(np.uint8).reshape(-1, 4)
    elif format.name == "BF16":
        blocks[:, 1] &= 0xBF  # an exponent of less than 128
    elif format.name == "MXFP4":
        blocks[:, 0] &= 0x7F
    elif format.name == "IQ1_M":
        blocks[:, 55] &= 0xBF
    for at in SCALES_AT.get(format.name, ()):
        scales = rng.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


def compiled_row(format, raw):
    """raw uint8 (row_bytes,) -> float32 (values,), with guard values around the output."""
    values = raw.size // format.block_bytes * format.block_values
    out = np.full(values + 32, 7777, np.float32)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(row_kernel(format))
    function(raw.ctypes.data, values, out.ctypes.data + 64)
    assert (out[:16] == 7777).all() and (out[16 + values :] == 7777).all()
    return out[16 : 16 + values]


def same_bits(got, expected):
    """Equal bits, except that any NaN equals any other."""
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    assert np.array_equal(got[~nan].view(np.uint32), expected[~nan].view(np.uint32))


def block_counts(format):
    """1, 3, what makes 2560 values, and for small blocks full and short steps of 256 values."""
    return sorted({1, 3, 2560 // format.block_values, 288 // format.block_values + 1})


@pytest.mark.parametrize("name", NAMES)
def test_finite_scales(name):
    format, rng = by_name(name), np.random.default_rng(1)
    for n in block_counts(format):
        blocks = with_finite_scales(format, rng.integers(0, 256, (n, format.block_bytes), np.uint8), rng)
        expected = format.dequantise(blocks.reshape(-1))
        assert np.isfinite(expected).all()
        assert np.array_equal(compiled_row(format, blocks.reshape(-1)).view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_raw_bytes(name):
    format, rng = by_name(name), np.random.default_rng(2)
    for n in block_counts(format) * 4:
        raw = rng.integers(0, 256, n * format.block_bytes, np.uint8)
        same_bits(compiled_row(format, raw), format.dequantise(raw))


@pytest.mark.parametrize("name", NAMES)
def test_extreme_scales(name):
    """Zeros of both signs, subnormals, the largest number, infinities and NaN as scales, and every byte as a scale."""
    format, rng = by_name(name), np.random.default_rng(3)
    halves = np.array([0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0xFE00], np.uint16)
    blocks = rng.integers(0, 256, (2 * 256, format.block_bytes), np.uint8)
    # every pair of a scale and a minimum: 12 * 12 < 512
    pairs = np.resize(np.stack(np.meshgrid(halves, halves), -1).reshape(-1, 2), (len(blocks), 2))
    for at, scales in zip(SCALES_AT.get(name, ()), pairs.T, strict=False):
        blocks[:, at : at + 2] = np.ascontiguousarray(scales)[:, None].view(np.uint8)
    if name == "IQ1_M":
        for i in range(4):
            nibble = (pairs[:, 0] >> (4 * i)) & 15
            blocks[:, 49 + 2 * i] = (blocks[:, 49 + 2 * i] & 15) | (nibble << 4)
    if name in ("MXFP4", "NVFP4"):
        blocks[:, : 1 if name == "MXFP4" else 4] = np.repeat(np.arange(256, dtype=np.uint8), 2)[:, None]
    raw = blocks.reshape(-1)
    same_bits(compiled_row(format, raw), format.dequantise(raw))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_outside_the_row_is_read(name):
    """The row ends at a page that may not be touched, and another begins right after such a page."""
    format, rng = by_name(name), np.random.default_rng(4)
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    room = mmap.mmap(-1, 5 * page)
    memory = np.frombuffer(room, np.uint8)
    for guard in (0, 4):
        closed = libc.mprotect(ctypes.c_void_p(memory.ctypes.data + guard * page), ctypes.c_size_t(page), 0)
        assert closed == 0, ctypes.get_errno()
    for n in (1, 3):
        raw = rng.integers(0, 256, n * format.block_bytes, np.uint8)
        for start in (page, 4 * page - raw.size):
            row = memory[start : start + raw.size]
            row[:] = raw
            same_bits(compiled_row(format, row), format.dequantise(raw))


@given(name=st.sampled_from(NAMES), seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 12), shift=st.integers(0, 7))
def test_any_row_at_any_alignment(name, seed, blocks, shift):
    format, rng = by_name(name), np.random.default_rng(seed)
    raw = rng.integers(0, 256, shift + blocks * format.block_bytes, np.uint8)[shift:]
    same_bits(compiled_row(format, raw), format.dequantise(raw))


def test_an_empty_row_writes_nothing():
    for name in NAMES:
        assert compiled_row(by_name(name), np.zeros(0, np.uint8)).size == 0


def test_one_function_per_format():
    addresses = [row_kernel(by_name(name)) for name in NAMES]
    assert len(set(addresses)) == len(NAMES) and addresses == [row_kernel(by_name(name)) for name in NAMES]


def test_another_process_finds_the_function_on_disk(tmp_path):
    """Each format has files of its own there."""
    code = (
        "from strata.cpu.rows import row_kernel; from strata.pack.formats import by_name; "
        "row_kernel(by_name('IQ4_NL')); row_kernel(by_name('F16'))"
    )
    listings = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT,
                       env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)})  # fmt: skip
        listings.append({path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("rows.*")})
    assert listings[0] == listings[1]
    assert len(listings[0]) == 4  # an index and the code of each format
    assert {name.split("-")[0] for name in listings[0]} == {"rows.dequantise_IQ4_NL", "rows.dequantise_F16"}


def test_integers_are_refused():
    with pytest.raises(ModelError, match=r"rows of I8 cannot be looked up.*needed one of F32"):
        row_kernel(by_name("I8"))
