"""The load-time self-test passes for every kernel and refuses a wrong one by name."""

from __future__ import annotations

import time

import numpy as np
import pytest

from strata.base.errors import SelfTestFailed
from strata.cpu import self_test
from strata.cpu.gemv import floats, portable, table
from strata.pack.formats import FORMATS, by_name

PRODUCTS = [f.name for f in FORMATS.values() if f.activation != "none"]


@pytest.mark.parametrize("tier", table.TIERS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_kernel_passes(name, tier):
    self_test.check_format(by_name(name), tier)


def test_rows_reach_subnormal_products():
    """Row 1 must exercise what flush-to-zero would break. NVFP4's byte scales do not reach so low."""
    x_scale = 2.0**-108 / 127
    for name in PRODUCTS:
        format = by_name(name)
        values = format.dequantise(self_test.random_blocks(format, np.random.default_rng(format.ggml_id)))
        assert np.isfinite(values).all(), name
        tiny = np.abs(values[1])
        assert 0 < float(tiny[tiny > 0].min()) * x_scale < (2.0**-126 if name != "NVFP4" else 2.0**-118), name


def test_a_wrong_kernel_is_named(monkeypatch):
    """Q4_0 blocks through the IQ4_NL kernel: same layout, another codebook."""
    wrong = by_name("IQ4_NL")
    monkeypatch.setattr(self_test, "kernel", lambda format, R, tier=None: table.kernel(wrong, R, tier))
    with pytest.raises(SelfTestFailed, match="Q4_0 kernel for 1 rows"):
        self_test.check_format(by_name("Q4_0"), 0)


def test_it_is_fast(tiny_path):
    """All formats of the bundled model and more, well below the second a load may spend."""
    for name in PRODUCTS:
        self_test.check_format(by_name(name), 0)
    began = time.thread_time()
    for name in PRODUCTS:
        self_test.check_format(by_name(name), 0)
    assert time.thread_time() - began < 1.0


def test_factories_name_their_functions():
    """Compiled code finds helpers by name: two functions of one factory under one name take each other's place when
    both come from disk (seen: products with another format's unpacker)."""
    names = {}
    for module in (portable, floats):
        for variable, value in vars(module).items():
            if variable.startswith("_rows_"):
                names.setdefault(value.py_func.__qualname__, []).append(variable)
    assert len(names) >= 25 and all(len(v) == 1 for v in names.values()), names
    owners = {}
    for n in PRODUCTS:
        for R in (1, 4):
            for tier in table.TIERS:
                kernel = table.kernel_function(by_name(n), R, tier)
                owners.setdefault((kernel.__module__, kernel.py_func.__qualname__), set()).add((n, R))
    assert all(len(o) == 1 for o in owners.values()), owners
