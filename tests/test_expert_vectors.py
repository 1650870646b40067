"""Vector code of the combine's terms against numpy, bit by bit, whole vectors and rests."""

from __future__ import annotations

import numpy as np
import pytest

from strata.base.arithmetic import combine_terms
from strata.base.compiled import cached_njit
from strata.cpu.expert_vectors import add_terms
from tests.canonical.call import assert_same, plain, room


@cached_njit
def add(total, y, n, w, s):
    return add_terms(total, y, n, w, s)


@pytest.mark.parametrize("n", [1, 16, 170, 2560])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -(2.0**24)])
def test_terms(n, bad):
    rng = np.random.default_rng(n)
    # From far below the unit to close to the limit, with exact halves of a unit among them.
    y = (plain(rng, n) * 2.0 ** rng.integers(-60, 20, n)).astype(np.float32)
    y[:: 5] = rng.integers(-99, 99, y[::5].size) * np.float32(2.0**-33)
    w, s = np.float32(0.75), np.float32(1.5)
    if bad is None:
        w = s = np.float32(1)
    for at in {0, n // 2, n - 1}:
        here = y.copy()
        if bad is not None:
            here[at] = bad
        total = rng.integers(-(2**40), 2**40, n)
        found = room(n, dtype="int64")
        found[:] = total
        fine = add(found.ctypes.data, here.ctypes.data, n, w, s)
        with np.errstate(all="ignore"):
            terms, overflow = combine_terms(w, here * s)
        assert fine == (not overflow) == (bad is None)
        assert_same(found, total + terms)
