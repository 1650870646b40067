"""Rotary positions: the table, and the rotation of a head."""

import math

import numpy as np
import pytest

from strata.base.compiled import step
from strata.base.rotary import rotary_table
from strata.cpu.machine_code import f32_view, i64_view
from strata.cpu.rotary import rotate
from tests.canonical import rotary as reference
from tests.canonical.call import Call, assert_accurate, assert_same, guarded, plain, spiked


@step
def rotate_row(a):
    """Record: x, n, table row, rotary."""
    p = i64_view(a, 4)
    rotate(f32_view(p[0], p[1]), f32_view(p[2], p[3]), p[3])


@pytest.mark.parametrize("dims", [2, 16, 64])
def test_table_holds_rounded_cosines_and_sines(dims):
    base, context = 1e7, 300
    table = rotary_table(context, dims, base)
    assert table.shape == (context, dims) and table.dtype == np.float32 and table.flags.c_contiguous
    for p in (0, 1, 7, 255, 299):
        for i in range(dims // 2):
            angle = p * base ** (-2.0 * i / dims)
            assert table[p, i] == pytest.approx(math.cos(angle), abs=6e-8)
            assert table[p, dims // 2 + i] == pytest.approx(math.sin(angle), abs=6e-8)
    assert (table[0, : dims // 2] == 1).all() and (table[0, dims // 2 :] == 0).all()


@pytest.mark.parametrize(("n", "rotary"), [(32, 32), (64, 16), (128, 64), (256, 64), (48, 6), (64, 2)])
def test_same_bits_and_the_rest_passes(n, rotary):
    rng = np.random.default_rng(n + rotary)
    table = rotary_table(1000, rotary, 1e6)
    for p in (0, 1, 999):
        x = spiked(rng, n)
        turned = guarded(x)
        Call(rotate_row, turned, n, np.ascontiguousarray(table[p]), rotary).run()
        assert_same(turned, reference.rotate(x, table[p]), f"position {p}")
        assert_same(turned[rotary:], x[rotary:], "unrotated")
        if p == 0:
            assert (turned == x).all()


def test_accuracy_far_out_in_a_long_context():
    rng = np.random.default_rng(5)
    table = rotary_table(262144, 64, 1e7)
    x = plain(rng, 256)
    turned = guarded(x)
    Call(rotate_row, turned, 256, np.ascontiguousarray(table[262143]), 64).run()
    angle = 262143 * 1e7 ** (-2.0 * np.arange(32) / 64)
    low, high = x[:32].astype(np.float64), x[32:64].astype(np.float64)
    exact = np.concatenate([low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)])
    assert_accurate(turned[:64], exact, 1e-7, "rotation at 262,143")
