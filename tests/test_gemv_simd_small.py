"""Kernels and quantisers of the 32- and 64-value formats in the tiers 512 and 256: the bits of the portable tier."""

import subprocess
import sys

import numpy as np
import pytest

from strata.base import arithmetic as A
from strata.base.program import NOT_FINITE
from strata.cpu.gemv import small512, table
from strata.cpu.gemv.records import RECORDS, SCALE_BYTES, records_for
from strata.pack.formats import by_name
from strata.pack.lanes import gemv
from tests.block_data import MODES, bits, random_activations, random_rows
from tests.simd_cases import SIMD_TIERS, call_address, product, records_of

FORMATS = small512.FORMATS
ROWS = 163
"""Odd, and enough for 1e5 compared outputs a format."""

pytestmark = pytest.mark.skipif(not SIMD_TIERS, reason="this machine has no AVX2")
tiers = pytest.mark.parametrize("tier", SIMD_TIERS)


def widths(format):
    few = (64, 128, 640, 704, 2560)
    return few if format.block_values > 32 else (32, 96, *few)


def compare_with_portable(format, tier, mode, K, n_rows, seed):
    raw = random_rows(format, n_rows, K, mode, seed=seed)
    x = random_activations(4, K, mode, seed=seed + 1)
    wanted = bits(product(format, raw, records_of(format, x, table.PORTABLE)[0], K, table.PORTABLE))
    records, error = records_of(format, x, tier)
    assert error == 0
    for R in range(1, 5):
        found = bits(product(format, raw, records[:R], K, tier))
        np.testing.assert_array_equal(found, wanted[:R], f"{mode} K={K} R={R}")
    return raw, x, wanted


@tiers
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_bits(name, mode, tier):
    format = by_name(name)
    for k, K in enumerate(widths(format)):
        raw, x, wanted = compare_with_portable(format, tier, mode, K, ROWS, seed=100 * k + 7)
        codes, scales, _ = A.quantise(x[:1], 32)
        np.testing.assert_array_equal(wanted[0, :5], bits(gemv(format, raw[:5], codes[0], scales[0])))


@pytest.mark.soak
@tiers
@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_a_million_outputs(name, tier):
    format = by_name(name)
    for seed in range(4):
        for mode in MODES:
            for K in (*widths(format), 960, 4096, 10240):
                compare_with_portable(format, tier, mode, K, 999, seed=5000 + seed)


@tiers
@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_wider_matrix(name, tier):
    """Any number of rows, bytes between them, and a record at any address."""
    format, K = by_name(name), 704
    raw = random_rows(format, 6, 2 * K, seed=3)[:, : format.row_bytes(K)]
    x = random_activations(4, 2 * K, seed=4)[:, :K]
    wanted = bits(product(format, raw, records_of(format, x, table.PORTABLE)[0], K, table.PORTABLE))
    records, _ = records_of(format, x, tier, offset=4)
    for n in range(6):
        np.testing.assert_array_equal(bits(product(format, raw[:n], records, K, tier)), wanted[:, :n])


@tiers
@pytest.mark.parametrize("name", FORMATS)
def test_records_can_be_moved(name, tier):
    """A row's record does not depend on the other rows, nor on where it lies."""
    format, K = by_name(name), 640
    x = random_activations(4, K, "mid", seed=9)
    together, _ = records_of(format, x, tier)
    for r in range(4):
        np.testing.assert_array_equal(records_of(format, x[r : r + 1], tier)[0][0], together[r])
    assert together.shape[1] == table.layout_of(format, tier).record_bytes(K) and together.shape[1] % 64 == 0


@tiers
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted({records_for(f, t).name for f in FORMATS for t in SIMD_TIERS}))
def test_records(name, mode, tier):
    """Codes, scales, corrections and padding, taken apart."""
    layout = RECORDS[name]
    format = next((by_name(f) for f in FORMATS if records_for(f, tier) is layout), None)
    if format is None:
        pytest.skip("another tier's layout")
    for K in (64, 640, 704, 2560):
        x = random_activations(3, K, mode, seed=K)
        records, error = records_of(format, x, tier)
        assert error == 0
        steps = records.reshape(3, -1, layout.step_bytes)
        n = steps.shape[1]
        codes, scales, _ = A.quantise(x, 32)
        padded = np.zeros((3, n * layout.values), np.int8)
        padded[:, :K] = codes
        ordered = padded.reshape(3, n, layout.values)[..., list(layout.order)]
        flip = np.uint8(128 if layout.flip else 0)
        np.testing.assert_array_equal(steps[..., : layout.values] ^ flip, ordered.view(np.uint8))
        groups = np.zeros((3, n * layout.values // 32), np.float32)
        groups[:, : K // 32] = scales
        groups = groups.reshape(3, n, -1)
        at = layout.values + SCALE_BYTES
        found = np.ascontiguousarray(steps[..., layout.values : at]).view(np.uint32)
        np.testing.assert_array_equal(found, groups[..., list(layout.groups)].view(np.uint32))
        extra = np.ascontiguousarray(steps[..., at:])
        if layout.bias:
            sums = ordered.astype(np.int32).reshape(3, n, -1, 16, 4).sum((2, 4))
            np.testing.assert_array_equal(extra.view(np.int32), -layout.bias * sums)
        elif layout.blocks:
            sums = padded.astype(np.int32).reshape(3, n, 4, 32).sum(-1)
            np.testing.assert_array_equal(extra.view(np.float32)[..., :4], sums)
            np.testing.assert_array_equal(extra.view(np.uint32)[..., 4:8], groups.view(np.uint32))
            assert not extra[..., 32:].any()


@tiers
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_quantiser_reports_non_finite(value, tier):
    for name in FORMATS:
        for at in (0, 630, 639):  # in a whole step and in a short one
            x = np.ones((2, 640), np.float32)
            x[1, at] = value
            records, error = records_of(by_name(name), x, tier)
            assert error == NOT_FINITE, name
            x[1, at // 32 * 32 : at // 32 * 32 + 32] = 0
            np.testing.assert_array_equal(records, records_of(by_name(name), x, tier)[0], "its group is not 0")


@tiers
def test_quantiser_keeps_an_earlier_error(tier):
    layout = table.layout_of(by_name("Q4_0"), tier)
    x, error = np.full((1, 128), np.nan, np.float32), np.array([9], np.int64)
    records = np.zeros(layout.record_bytes(128), np.uint8)
    call_address(layout.quantise_address, x.ctypes.data, 128, 1, 512, records.ctypes.data, error.ctypes.data)
    assert error[0] == 9


@tiers
def test_layouts_are_shared(tier):
    shared = {table.layout_of(by_name(name), tier) for name in ("Q5_0", "MXFP4")}
    assert len(shared) == 1
    assert table.layout_of(by_name("Q4_1"), tier) is table.layout_of(by_name("Q5_1"), tier)


_GUARDED = """
import ctypes, mmap
import numpy as np
from strata.cpu.gemv import float_simd, small512, table
from strata.pack.formats import by_name
from tests.block_data import random_activations, random_rows
from tests.simd_cases import SIMD_TIERS, product, records_of

libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE

def at_the_end(array):
    "A copy whose last byte is the last of a page, with no readable page behind."
    data = np.ascontiguousarray(array)
    pages = -(-data.nbytes // page)
    space = np.frombuffer(mmap.mmap(-1, (pages + 1) * page), np.uint8)
    assert libc.mprotect(ctypes.c_void_p(space.ctypes.data + pages * page), ctypes.c_size_t(page), 0) == 0
    copy = space[pages * page - data.nbytes : pages * page].view(data.dtype).reshape(data.shape)
    copy[...] = data
    return copy

for tier in SIMD_TIERS:
    for name in small512.FORMATS:
        format = by_name(name)
        for K in (64, 128, 192, 640, 704) + ((32, 96, 160) if format.block_values == 32 else ()):
            raw = at_the_end(random_rows(format, 3, K))
            records, _ = records_of(format, at_the_end(random_activations(2, K)), tier)
            product(format, raw, at_the_end(records), K, tier)
            product(format, raw, at_the_end(records[:1]), K, tier)
    for name in float_simd.FORMATS:
        format = by_name(name)
        for K in (1, 3, 7, 8, 9, 15, 17, 31, 32, 33, 96, 100, 255, 257, 320, 2561, 5121):
            raw = at_the_end(np.ones((3, format.row_bytes(K)), np.uint8))
            for R in (1, 3):
                x = at_the_end(np.ones((R, K), np.float32))
                product(format, raw, x.view(np.uint8), K, tier)
print("no read behind")
"""


def test_no_read_behind_matrix_rows_or_activations():
    done = subprocess.run([sys.executable, "-c", _GUARDED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "no read behind" in done.stdout, done.stderr[-2000:]
