"""K and V cells: float16, and int8 with a float16 scale per 64 values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.compiled import step
from strata.cpu.kv_cells import load_head, store_head
from strata.cpu.machine_code import f32_view, i64_view
from tests.canonical import kv_cells as reference
from tests.canonical.call import Call, assert_same, room, spiked

CELLS = 3


@step
def store(a):
    """Record: cells, scales or 0, head number, x, n, flag."""
    p = i64_view(a, 6)
    i64_view(p[5], 1)[0] = store_head(p[0], p[1], p[2], f32_view(p[3], p[4]), p[4])


@step
def load(a):
    """Record: cells, scales or 0, head number, out, n."""
    p = i64_view(a, 5)
    load_head(p[0], p[1], p[2], f32_view(p[3], p[4]), p[4])


class Cells:
    """Three heads of n values in one format."""

    def __init__(self, n: int, int8: bool):
        self.n = n
        self.cells = room(CELLS, n, dtype="int8" if int8 else "float16")
        self.scales = room(CELLS, n // 64, dtype="float16") if int8 else None

    def store(self, at: int, x: np.ndarray) -> bool:
        fine = np.full(1, 7, np.int64)
        Call(store, self.cells, self.scales, at, np.ascontiguousarray(x), self.n, fine).run()
        return bool(fine[0])

    def load(self, at: int) -> np.ndarray:
        out = room(self.n)
        Call(load, self.cells, self.scales, at, out, self.n).run()
        return out

    def untouched(self, at: int) -> bool:
        parts = [self.cells[at]] + ([] if self.scales is None else [self.scales[at]])
        return all((np.ascontiguousarray(p).view(np.uint8) == 0x5A).all() for p in parts)


@pytest.mark.parametrize("n", [32, 64, 100, 128, 256])
def test_float16_cells(n):
    rng = np.random.default_rng(n)
    cells, x = Cells(n, int8=False), spiked(rng, n)
    assert cells.store(1, x)
    wanted, fine = reference.store_f16(x)
    assert fine
    assert_same(cells.cells[1], wanted)
    assert_same(cells.load(1), wanted.astype(np.float32))
    assert cells.untouched(0) and cells.untouched(2)


@pytest.mark.parametrize("n", [64, 128, 256])
@pytest.mark.parametrize("power", [-40, -24, -12, 0, 8])
def test_int8_cells(n, power):
    rng = np.random.default_rng(n + power)
    cells, x = Cells(n, int8=True), spiked(rng, n) * np.float32(2.0**power)
    x = np.clip(x, -60000, 60000)
    assert reference.fits_int8(x) and cells.store(1, x)
    codes, scales = reference.store_int8(x)
    assert_same(cells.cells[1], codes)
    assert_same(cells.scales[1], scales)
    assert_same(cells.load(1), reference.load_int8(codes, scales))
    assert cells.untouched(0) and cells.untouched(2)


@given(st.integers(0, 2**32 - 1), st.integers(-30, 14))
def test_int8_error_is_at_most_half_a_step(seed, power):
    rng = np.random.default_rng(seed)
    cells, x = Cells(64, int8=True), (rng.uniform(-1, 1, 64) * 2.0**power).astype(np.float32)
    assert cells.store(0, x)
    codes, scales = reference.store_int8(x)
    assert_same(cells.cells[0], codes[None][0])
    assert_same(cells.scales[0], scales)
    back = cells.load(0)
    assert_same(back, reference.load_int8(codes, scales))
    # half a step, rounding of the scale (relative 2^-11 of 127 steps, or 2^-25 flat below 2^-14), and of the value
    step = float(scales[0])
    bound = step / 2 + 127 * max(step * 2.0**-11, 2.0**-25) + abs(x).max() * 2.0**-11 + 2.0**-25
    assert (abs(back.astype(np.float64) - x) <= bound).all()


def test_int8_of_zeros_halves_and_tiny_groups():
    x = np.zeros(256, np.float32)
    x[64:128] = np.arange(64) + 0.5  # exact halves of a step of 1
    x[127] = 127.0
    x[128:192] = 2.0**-60  # the scale vanishes in float16
    x[192:] = -1.0
    cells = Cells(256, int8=True)
    assert cells.store(2, x)
    codes, scales = reference.store_int8(x)
    assert_same(cells.cells[2], codes)
    assert_same(cells.scales[2], scales)
    assert (codes[:64] == 0).all() and scales[0] == 0 and (codes[128:192] == 0).all() and (codes[192:] == -127).all()
    assert scales[1] == 1 and codes[64:70].tolist() == [0, 2, 2, 4, 4, 6]
    assert (cells.load(2)[:64] == 0).all()


def test_int8_codes_stay_within_127_where_the_scale_was_rounded_down():
    """Below 2^-14 float16 has few digits: values far beyond 127 steps of the rounded scale are clamped."""
    x = (np.linspace(-1, 1, 64) * 127 * 1.4 * 2.0**-24).astype(np.float32)
    cells = Cells(64, int8=True)
    assert cells.store(1, x)
    codes, scales = reference.store_int8(x)
    assert scales[0] == 2.0**-24 and codes.min() == -127 and codes.max() == 127 and (codes == -127).sum() > 5
    assert_same(cells.cells[1], codes)
    assert_same(cells.load(1), reference.load_int8(codes, scales))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("at", [0, 70, 127])
def test_values_that_do_not_fit_are_told(int8, bad, at):
    x = np.ones(128, np.float32)
    x[at] = bad
    assert not Cells(128, int8).store(0, x)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("top", [65408.0, 65504.0, 65519.0, 65520.0, 65536.0, 1e5, 127 * 65504.0])
def test_what_is_stored_without_complaint_reads_back_finite(int8, top):
    x = np.full(64, 1.0, np.float32)
    x[3] = top
    cells = Cells(64, int8)
    fits = reference.fits_int8(x) if int8 else reference.store_f16(x)[1]
    assert cells.store(0, x) == fits
    if fits:
        assert np.isfinite(cells.load(0)).all()
    assert fits == (top <= 65408.0 or (not int8 and top < 65520.0))
