"""Products: the numpy lane rules against float64, and the portable kernels against numpy by bits."""

import subprocess
import sys

import numpy as np
import pytest
from numba import njit

from strata.base import arithmetic as A
from strata.base.errors import BadArgument
from strata.base.program import NOT_FINITE
from strata.cpu.gemv import table
from strata.cpu.gemv.activations import quantise_p32, quantise_p256, swiglu_rows
from strata.cpu.machine_code import FLUSH_BITS, float_control, set_float_control
from strata.pack.formats import FORMATS, by_name
from strata.pack.lanes import gemv
from tests.block_data import MODES, bits, random_activations, random_rows

QUANTISED = [f for f in FORMATS.values() if f.group]
FLOAT = [f for f in FORMATS.values() if f.activation == "float"]
ROWS = 11


def ids(format):
    return format.name


def widths(format):
    if format.group == 256:
        return (256, 768, 2560)
    return (64, 128, 640, 704, 2560) if format.block_values > 32 else (32, 64, 128, 640, 704, 2560)


def aligned(n_bytes):
    """Zeros on a 64-byte boundary, with a guard of 0xa5 behind them."""
    whole = np.full(n_bytes + 128, 0xA5, np.uint8)
    start = -whole.ctypes.data % 64
    whole[start : start + n_bytes] = 0
    return whole[start : start + n_bytes]


def records_of(format, x):
    """The records that the portable tier's quantiser writes for x (R, K), and its error word."""
    layout = table.layout_of(format, table.PORTABLE)
    R, K = x.shape
    if not layout.quantise_address:
        return np.ascontiguousarray(x).view(np.uint8).reshape(-1), 0
    records, error = aligned(R * layout.record_bytes(K)), np.zeros(1, np.int64)
    {"p32": quantise_p32, "p256": quantise_p256}[layout.name](
        x.ctypes.data, K, R, x.strides[0], records.ctypes.data, error.ctypes.data
    )
    return records, int(error[0])


def run(format, raw, records, R, K):
    out = np.full((R, len(raw) + 1), 7, np.float32)
    function = table.kernel_function(format, R, table.PORTABLE)
    function(raw.ctypes.data, raw.strides[0], len(raw), records.ctypes.data, K, out.ctypes.data, out.strides[0])
    assert (out[:, -1] == 7).all()
    return out[:, :-1]


@pytest.mark.parametrize("format", QUANTISED, ids=ids)
def test_lane_rule_is_the_product(format):
    """The rule against float64 on the dequantised matrix and row."""
    K = 2560
    raw = random_rows(format, 48, K, "plain", seed=7)
    x = random_activations(1, K, "plain", seed=8)[0]
    codes, scales, _ = A.quantise(x, format.group)
    row = codes.reshape(-1, format.group) * scales[:, None].astype(np.float64)
    exact = format.dequantise(raw).astype(np.float64) @ row.ravel()
    error = np.abs(gemv(format, raw, codes, scales) - exact).max() / np.sqrt((exact**2).mean())
    assert error < 1e-6, f"{error:.2e} of the output RMS"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("format", QUANTISED, ids=ids)
def test_portable_equals_numpy(format, mode):
    for k, K in enumerate(widths(format)):
        raw = random_rows(format, ROWS, K, mode, seed=10 + k)
        x = random_activations(4, K, mode, seed=20 + k)
        records, error = records_of(format, x)
        assert error == 0
        codes, scales, _ = A.quantise(x, format.group)
        expected = np.stack([gemv(format, raw, c, s) for c, s in zip(codes, scales, strict=True)])
        for R in range(1, 5):
            np.testing.assert_array_equal(bits(run(format, raw, records, R, K)), bits(expected[:R]), f"K={K} R={R}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("format", FLOAT, ids=ids)
def test_portable_equals_numpy_float(format, mode):
    for K in (32, 96, 128, 640, 2560):
        raw = random_rows(format, ROWS, K, mode, seed=K)
        x = random_activations(4, K, mode, seed=K + 1)
        weights = format.dequantise(raw)
        expected = np.stack([A.dot_float(weights, row) for row in x])
        for R in range(1, 5):
            np.testing.assert_array_equal(bits(run(format, raw, records_of(format, x)[0], R, K)), bits(expected[:R]))


@njit
def _flush(on):
    before = float_control()
    set_float_control(before | FLUSH_BITS if on else before & ~FLUSH_BITS)


@pytest.mark.parametrize("name", ["Q8_0", "Q2_0", "Q4_K", "IQ2_S", "IQ3_XXS"])
def test_the_modes_reach_what_they_are_for(name):
    """Subnormal numbers decide most results in tiny; wild overflows. Otherwise the comparisons would prove less."""
    format, K = by_name(name), 2560
    raw, x = random_rows(format, 64, K, "tiny", seed=1), random_activations(1, K, "tiny", seed=2)
    records, _ = records_of(format, x)
    exact = run(format, raw, records, 1, K)
    _flush(True)
    try:
        flushed = run(format, raw, records, 1, K)
    finally:
        _flush(False)
    assert (bits(exact) != bits(flushed)).mean() > 0.5
    raw, x = random_rows(format, 64, K, "wild", seed=1), random_activations(1, K, "wild", seed=2)
    assert not np.isfinite(run(format, raw, records_of(format, x)[0], 1, K)).all()


def test_rows_of_a_wider_matrix():
    """w_stride and x_stride larger than a row."""
    format, K = by_name("IQ4_NL"), 640
    raw = random_rows(format, 6, 2 * K)
    x = random_activations(2, 2 * K)
    half = raw[:, : format.row_bytes(K)]
    records, _ = records_of(format, x[:, :K])
    codes, scales, _ = A.quantise(x[:, :K], 32)
    expected = [gemv(format, np.ascontiguousarray(half), c, s) for c, s in zip(codes, scales, strict=True)]
    np.testing.assert_array_equal(bits(run(format, half, records, 2, K)), bits(np.stack(expected)))


@pytest.mark.parametrize("name, group", [("Q8_0", 32), ("Q4_K", 256)])
@pytest.mark.parametrize("mode", MODES)
def test_quantiser_records(name, group, mode):
    for K in (256, 2560) if group == 256 else (32, 640, 704):
        x = random_activations(3, K, mode, seed=K)
        records, error = records_of(by_name(name), x)
        layout = table.layout_of(by_name(name), table.PORTABLE)
        codes, scales, _ = A.quantise(x, group)
        padded, part = -(-K // 256) * 256, 32 if group == 32 else 16
        rows = records.reshape(3, layout.record_bytes(K))
        sums_end = padded + 4 * (padded // part)
        assert error == 0 and records.ctypes.data % 64 == 0 and rows.shape[1] % 64 == 0
        np.testing.assert_array_equal(rows[:, :K].view(np.int8), codes)
        sums = codes.reshape(3, -1, part).astype(np.int32).sum(-1)
        np.testing.assert_array_equal(rows[:, padded : padded + 4 * (K // part)].view(np.int32), sums)
        np.testing.assert_array_equal(
            rows[:, sums_end : sums_end + 4 * (K // group)].view(np.uint32), scales.view(np.uint32)
        )
        assert not rows[:, K:padded].any() and not rows[:, sums_end + 4 * (K // group) :].any()
        guard = np.lib.stride_tricks.as_strided(records[-1:], (2,))[1]
        assert guard == 0xA5, "the quantiser wrote behind its records"


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_quantiser_reports_non_finite(name, value):
    x = np.ones((2, 512), np.float32)
    x[1, 300] = value
    records, error = records_of(by_name(name), x)
    assert error == NOT_FINITE
    codes, _, bad = A.quantise(x, by_name(name).group)
    rows = records.reshape(2, -1)
    assert bad and (rows[:, :512].view(np.int8) == codes).all()


def test_quantiser_keeps_an_earlier_error():
    x, error = np.full((1, 256), np.nan, np.float32), np.array([9], np.int64)
    records = aligned(table.layout_of(by_name("Q4_K"), table.PORTABLE).record_bytes(256))
    quantise_p256(x.ctypes.data, 256, 1, x.strides[0], records.ctypes.data, error.ctypes.data)
    assert error[0] == 9


def test_swiglu_rows():
    rng = np.random.default_rng(4)
    g, u = rng.standard_normal((2, 1003)).astype(np.float32) * 20
    g[:6] = [np.nan, np.inf, -np.inf, 0, -0.0, -100]
    u[:2] = 1
    out = np.full(1004, 7, np.float32)
    swiglu_rows(g.ctypes.data, u.ctypes.data, out.ctypes.data, 1003)
    np.testing.assert_array_equal(bits(out[:-1]), bits(A.swiglu(g, u)))
    assert out[-1] == 7
    expected = A.swiglu(g, u)
    swiglu_rows(g.ctypes.data, u.ctypes.data, g.ctypes.data, 1003)
    np.testing.assert_array_equal(bits(g), bits(expected))


_GUARDED = """
import ctypes, mmap
import numpy as np
from strata.cpu.gemv import table
from strata.pack.formats import FORMATS
from tests.block_data import random_rows
from tests.test_gemv import run, widths

libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE
for format in FORMATS.values():
    if format.activation == "none":
        continue
    for K in (96, 2560) if format.activation == "float" else widths(format)[:3]:
        n_bytes = 3 * format.row_bytes(K)
        pages = -(-n_bytes // page)
        memory = mmap.mmap(-1, (pages + 1) * page)
        space = np.frombuffer(memory, np.uint8)
        assert libc.mprotect(ctypes.c_void_p(space.ctypes.data + pages * page), ctypes.c_size_t(page), 0) == 0
        raw = space[pages * page - n_bytes : pages * page].reshape(3, -1)
        raw[:] = random_rows(format, 3, K)
        records = np.zeros(table.layout_of(format, table.PORTABLE).record_bytes(K), np.uint8)
        run(format, raw, records, 1, K)
print("no read behind the matrix")
"""


def test_kernels_never_read_past_the_matrix():
    """The last byte of every matrix is the last byte of a page before one that may not be read."""
    done = subprocess.run([sys.executable, "-c", _GUARDED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "no read behind" in done.stdout, done.stderr[-2000:]


def test_refusals():
    with pytest.raises(BadArgument, match="1 to 4"):
        table.kernel(by_name("Q8_0"), 5)
    with pytest.raises(BadArgument, match="I8"):
        table.kernel(by_name("I8"), 1)
    with pytest.raises(BadArgument, match="tier"):
        table.kernel(by_name("Q8_0"), 1, tier=128)
    with pytest.raises(BadArgument, match="I8"):
        table.layout_of(by_name("I8"))
    with pytest.raises(BadArgument, match="F32"):
        gemv(by_name("F32"), np.zeros((1, 4), np.uint8), np.zeros(1, np.int8), np.zeros(1, np.float32))
    with pytest.raises(BadArgument, match="scales"):
        gemv(by_name("Q8_0"), np.zeros((1, 34), np.uint8), np.zeros(32, np.int8), np.zeros(2, np.float32))


def test_kernels_are_shared_and_aligned():
    format = by_name("Q4_K")
    assert table.kernel(format, 1) == table.kernel(format, 1) != table.kernel(format, 2)
    layouts = {table.layout_of(by_name(name), table.PORTABLE) for name in ("Q4_K", "IQ3_S")}
    assert len(layouts) == 1
    assert table.layout_of(by_name("BF16")).record_bytes(640) == 2560
    assert table.layout_of(by_name("BF16")).quantise_address == 0
