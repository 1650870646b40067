"""Kernels and quantisers of the super-block formats in the tiers 512 and 256: the bits of the portable tier."""

import subprocess
import sys

import numpy as np
import pytest

from strata.base import arithmetic as A
from strata.base.program import NOT_FINITE
from strata.cpu.gemv import records256, table
from strata.cpu.gemv.super_kernels import SUPER_FORMATS, arrangement_of
from strata.pack.formats import by_name
from strata.pack.lanes import gemv
from tests.block_data import MODES, bits, random_activations, random_rows
from tests.simd_cases import SIMD_TIERS, call_address, product, records_of

ROWS = 277
WIDTHS = (256, 768, 2560)
"""With R = 1..4, the modes and two tiers 83,100 outputs a format; test_bits_of_long_rows has 19,320 more."""

pytestmark = pytest.mark.skipif(not SIMD_TIERS, reason="this machine has no AVX2")
tiers = pytest.mark.parametrize("tier", SIMD_TIERS)
formats = pytest.mark.parametrize("name", SUPER_FORMATS)


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


def test_formats_and_tiers_are_complete():
    super_blocks = {n for n in table._PORTABLE_KERNELS if by_name(n).group == 256}
    assert set(SUPER_FORMATS) == super_blocks and len(SUPER_FORMATS) == 13
    for tier in SIMD_TIERS:
        for name in SUPER_FORMATS:
            function = table.kernel_function(by_name(name), 1, tier)
            assert function.__qualname__ == f"super_{name}_1_{tier}", "another tier's kernel"
            assert table.layout_of(by_name(name), tier).name == arrangement_of(name, tier).name


@tiers
@pytest.mark.parametrize("mode", MODES)
@formats
def test_bits(name, mode, tier):
    format = by_name(name)
    for k, K in enumerate(WIDTHS):
        raw, x, wanted = compare_with_portable(format, tier, mode, K, ROWS, seed=100 * k + 7)
        codes, scales, _ = A.quantise(x[:1], 256)
        np.testing.assert_array_equal(wanted[0, :5], bits(gemv(format, raw[:5], codes[0], scales[0])))


@tiers
@formats
def test_bits_of_long_rows(name, tier):
    """More blocks than any kernel prepares at a time."""
    for K, n_rows in ((8192, 161), (8448, 161), (10240, 161)):
        for mode in ("mid", "edge"):
            compare_with_portable(by_name(name), tier, mode, K, n_rows, seed=K)


@pytest.mark.soak
@tiers
@formats
def test_bits_of_a_million_outputs(name, tier):
    for seed in range(5):
        for mode in MODES:
            for K in (256, 512, 768, 1024, 2560, 4096):
                compare_with_portable(by_name(name), tier, mode, K, 999, seed=7000 + seed)


@tiers
@formats
def test_every_byte_matters_as_in_the_portable_tier(name, tier):
    """Blocks with each of their bytes changed alone: fields that overlap or go unread would show. Several blocks, since
    a sub-scale may be 0."""
    format, flips = by_name(name), (0x01, 0x30, 0xC8)
    blocks = random_rows(format, 4, 256, "plain", seed=11)
    raw = np.tile(blocks[:, None, None], (1, format.block_bytes, len(flips), 1))
    for at in range(format.block_bytes):
        for k, flip in enumerate(flips):
            raw[:, at, k, at] ^= flip
    x = random_activations(1, 256, "plain", seed=12)
    before, records = (records_of(format, x, t)[0] for t in (table.PORTABLE, tier))
    found = bits(product(format, raw.reshape(-1, format.block_bytes), records, 256, tier))
    wanted = bits(product(format, raw.reshape(-1, format.block_bytes), before, 256, table.PORTABLE))
    np.testing.assert_array_equal(found, wanted)
    plain = bits(product(format, blocks, records, 256, tier))
    changed = found.reshape(raw.shape[:3]) != plain.reshape(-1, 1, 1)
    assert changed.any((0, 2)).all()


@tiers
@formats
def test_largest_integers(name, tier):
    """All codes at their limits and every activation 127 or -127, in all combinations of sign."""
    format = by_name(name)
    fills = [0x00, 0xFF, 0x7F, 0x80, 0x88, 0x77, 0x08, 0xF0, 0x0F, 0x20, 0x1F, 0x3F, 0xC0, 0xE0]
    raw = np.empty((len(fills) ** 2, 1, format.block_bytes), np.uint8)
    raw[..., ::2] = np.repeat(fills, len(fills))[:, None, None]
    raw[..., 1::2] = np.tile(fills, len(fills))[:, None, None]
    scales = random_rows(format, len(raw), 256, "plain", seed=1).reshape(raw.shape)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0,)):
        if name != "IQ1_M":
            raw[..., at : at + 2] = scales[..., at : at + 2]
    raw = raw.reshape(len(raw), -1)
    x = np.ones((4, 256), np.float32)
    x[1], x[2, ::2] = -1, -1
    x[3] = np.where(np.random.default_rng(2).random(256) < 0.5, -1, 1)
    wanted = bits(product(format, raw, records_of(format, x, table.PORTABLE)[0], 256, table.PORTABLE))
    np.testing.assert_array_equal(bits(product(format, raw, records_of(format, x, tier)[0], 256, tier)), wanted)


@tiers
@formats
def test_rows_of_a_wider_matrix(name, tier):
    """Any number of rows, bytes between them, and a record at any address."""
    format, K = by_name(name), 768
    raw = random_rows(format, 6, 2 * K, seed=3)[:, : format.row_bytes(K)]
    x = random_activations(4, 2 * K, seed=4)[:, :K]
    wanted = bits(product(format, raw, records_of(format, x, table.PORTABLE)[0], K, table.PORTABLE))
    records, _ = records_of(format, x, tier, offset=4)
    for n in range(6):
        np.testing.assert_array_equal(bits(product(format, raw[:n], records, K, tier)), wanted[:, :n])


# ---- records


def _expected(arrangement, x):
    """uint8 (R, record_bytes): the record as its description says."""
    codes, scales, _ = A.quantise(x, 256)
    R, K = codes.shape
    n = K // 256
    steps = codes.reshape(R, n, 256)
    record = np.zeros((R, n, arrangement.step_bytes), np.uint8)
    record[..., :256] = steps[..., arrangement.order].view(np.uint8)

    def put(at, values):
        data = np.ascontiguousarray(values).view(np.uint8).reshape(R, n, -1)
        record[..., at : at + data.shape[-1]] = data

    put(arrangement.scale_at, scales.reshape(R, n, 1))
    wide = steps.astype(np.int32)
    fours = wide[..., arrangement.order].reshape(R, n, 4, 16, 4).sum(-1)
    pairs = np.stack([fours[..., ::2, :], fours[..., 1::2, :]], -1).astype(np.int16)
    if arrangement is records256.K4:
        put(256, wide.reshape(R, n, 8, 32).sum(-1).astype(np.int16))
    elif arrangement is records256.K2:
        put(256, wide.reshape(R, n, 16, 16).sum(-1).astype(np.int16))
        put(320, pairs)
        put(448, -124 * fours.sum(2, dtype=np.int32))
    elif arrangement is records256.K6:
        put(256, pairs)
        put(448, -32 * pairs)
    elif arrangement is records256.XS:
        put(256, -128 * fours.reshape(R, n, 2, 2, 16).sum(3, dtype=np.int32))
    else:
        put(256, -64 * wide.reshape(R, n, 16, 16).sum(-1, dtype=np.int32))
    return record.reshape(R, -1)


def _layouts(tier):
    return {arrangement_of(name, tier).name: by_name(name) for name in SUPER_FORMATS}


@tiers
@pytest.mark.parametrize("mode", MODES)
def test_records(mode, tier):
    """All bytes of all records; those of a row depend on nothing but the row."""
    for name, format in _layouts(tier).items():
        for K in WIDTHS:
            x = random_activations(3, K, mode, seed=K)
            records, error = records_of(format, x, tier)
            assert error == 0 and records.shape[1] % 64 == 0
            np.testing.assert_array_equal(records, _expected(records256.ARRANGEMENTS[name], x), name)
            np.testing.assert_array_equal(records_of(format, x[2:], tier)[0][0], records[2])


def test_orders_are_permutations():
    for arrangement in records256.ARRANGEMENTS.values():
        np.testing.assert_array_equal(np.sort(arrangement.order), np.arange(256))
    for tier in SIMD_TIERS:
        assert len(_layouts(tier)) == 5


@tiers
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_quantiser_reports_non_finite(value, tier):
    for format in _layouts(tier).values():
        for at in (0, 255, 256, 767):
            x = np.ones((2, 768), np.float32)
            x[1, at] = value
            records, error = records_of(format, x, tier)
            assert error == NOT_FINITE, format.name
            x[1, at // 256 * 256 : at // 256 * 256 + 256] = 0
            np.testing.assert_array_equal(records, records_of(format, x, tier)[0], "its group is not 0")


@tiers
def test_quantiser_keeps_an_earlier_error(tier):
    for format in _layouts(tier).values():
        layout = table.layout_of(format, tier)
        x, error = np.full((1, 256), np.nan, np.float32), np.array([9], np.int64)
        records = np.zeros(layout.record_bytes(256), np.uint8)
        call_address(layout.quantise_address, x.ctypes.data, 256, 1, 1024, records.ctypes.data, error.ctypes.data)
        assert error[0] == 9


_GUARDED = """
import ctypes, mmap
import numpy as np
from strata.cpu.gemv.super_kernels import SUPER_FORMATS
from strata.pack.formats import by_name
from tests.block_data import random_activations, random_rows
from tests.simd_cases import SIMD_TIERS, product, records_of

libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE

def between_guards(array, at_start):
    "A copy that begins or ends with a page, beside pages that may not be read."
    data = np.ascontiguousarray(array)
    pages = -(-data.nbytes // page)
    space = np.frombuffer(mmap.mmap(-1, (pages + 2) * page), np.uint8)
    for guard in (0, pages + 1):
        assert libc.mprotect(ctypes.c_void_p(space.ctypes.data + guard * page), ctypes.c_size_t(page), 0) == 0
    first = page if at_start else (pages + 1) * page - data.nbytes
    copy = space[first : first + data.nbytes].view(data.dtype).reshape(data.shape)
    copy[...] = data
    return copy

for tier in SIMD_TIERS:
    for name in SUPER_FORMATS:
        format = by_name(name)
        for K in (256, 768, 2560):
            for at_start in (False, True):
                raw = between_guards(random_rows(format, 3, K), at_start)
                x = between_guards(random_activations(2, K), at_start)
                records, _ = records_of(format, x, tier)
                for R in (1, 2):
                    product(format, raw, between_guards(records[:R], at_start), K, tier)
print("no read beside")
"""


def test_no_read_beside_matrix_rows_or_activations():
    done = subprocess.run([sys.executable, "-c", _GUARDED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "no read beside" in done.stdout, done.stderr[-2000:]
