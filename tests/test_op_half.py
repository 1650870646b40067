"""float32 to float16 and back, in integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata.base.compiled import step
from strata.cpu.half import f16_bits, f16_value
from strata.cpu.machine_code import f32_view, i64_view, u16_view
from tests.canonical.call import Call, assert_same, bits, room


@step
def narrow(a):
    """Record: float32 in, float16 out, count."""
    p = i64_view(a, 3)
    x, out = f32_view(p[0], p[2]), u16_view(p[1], p[2])
    for i in range(p[2]):
        out[i] = f16_bits(x[i])


@step
def widen(a):
    """Record: float16 in, float32 out, count."""
    p = i64_view(a, 3)
    x, out = u16_view(p[0], p[2]), f32_view(p[1], p[2])
    for i in range(p[2]):
        out[i] = f16_value(x[i])


def narrowed(x: np.ndarray) -> np.ndarray:
    out = room(x.size, dtype="float16")
    Call(narrow, np.ascontiguousarray(x), out, x.size).run()
    return out


def numpy_narrowed(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(np.float16)


def test_every_float16_widens_exactly_and_comes_back():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide = room(halves.size)
    Call(widen, halves, wide, halves.size).run()
    assert_same(wide, halves.astype(np.float32), "widened")
    assert_same(narrowed(wide), halves, "narrowed")


def test_every_rounding_boundary():
    """Rounding is monotonic, so right results on both sides of every midpoint mean right results everywhere."""
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)
    halves[-1] = 65536.0  # where the next float16 would be
    middle = ((halves[:-1] + halves[1:]) / 2).astype(np.float32)
    assert (middle.astype(np.float64) == (halves[:-1] + halves[1:]) / 2).all()
    near = np.concatenate([np.nextafter(middle, np.float32(-1)), middle, np.nextafter(middle, np.float32(np.inf))])
    for x in (near, -near):
        assert_same(narrowed(x), numpy_narrowed(x), "boundaries")


def test_special_values():
    x = np.array([0.0, -0.0, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, 65519.996, 65520.0], np.float32)
    assert_same(narrowed(x), numpy_narrowed(x))
    nans = np.array([0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(narrowed(nans)).all()


@given(st.integers(0, 2**32 - 1))
def test_random_bits(seed):
    x = np.random.default_rng(seed).integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    assert (bits(narrowed(x)) == bits(numpy_narrowed(x))).all()
