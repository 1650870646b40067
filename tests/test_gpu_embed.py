"""Token rows on the GPU's code, run on the CPU: the bits of every format's dequantiser."""

import numpy as np
import pytest

from strata.base.program import NOT_FINITE
from strata.gpu.embed import embed, tables
from strata.gpu.error_word import where
from strata.pack.formats import FORMATS, by_name
from tests.block_data import MODES, random_rows
from tests.canonical.call import LAYER, assert_same, check_guards, plain, room
from tests.gpu.run_on_cpu import ErrorWord, address, needs_compiler, run_all

pytestmark = needs_compiler
NAMES = [f.name for f in FORMATS.values() if f.name != "I8"]


def looked_up(name: str, raw: np.ndarray, D: int, tokens: list[int], C: int = 2, reverse: bool = False):
    format, T, error = by_name(name), len(tokens), ErrorWord()
    parts = tables(format)
    grid, signs = (address(p) for p in parts) if parts else (0, 0)
    y, ids = room(T, C, D), np.array(tokens, np.int32)
    run_all(embed(address(ids), address(raw), format, raw.shape[1], grid, signs, address(y), T, C, D, len(raw),
                  error.address, where(2, LAYER)), reverse=reverse)  # fmt: skip
    check_guards(y)
    return y, error.reported


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_same_bits(name, mode):
    D, tokens = 768, [5, 0, 3, 5, 1]
    raw = random_rows(by_name(name), 6, D, mode, seed=3)
    y, reported = looked_up(name, raw, D, tokens, reverse=mode == "mid")
    wanted = by_name(name).dequantise(raw[tokens]).astype(np.float32)
    assert_same(y, np.repeat(wanted[:, None], 2, axis=1), name)
    bad = ~np.isfinite(wanted).all(1)
    assert reported == ((NOT_FINITE, LAYER, int(np.argmax(bad))) if bad.any() else None)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "MXFP4", "F32"])
def test_short_rows(name):
    raw = random_rows(by_name(name), 4, 96, "plain")
    y, _ = looked_up(name, raw, 96, [3, 2], C=4)
    assert_same(y, np.repeat(by_name(name).dequantise(raw[[3, 2]]).astype(np.float32)[:, None], 4, axis=1))


@pytest.mark.parametrize("token", [-1, 4, 2**31 - 1])
def test_a_token_outside_the_table_is_reported_and_reads_nothing(token):
    raw = plain(np.random.default_rng(0), 4, 32).view(np.uint8)
    y, reported = looked_up("F32", raw, 32, [1, token])
    assert reported == (NOT_FINITE, LAYER, 1)
    assert_same(y[1, 0], raw.view(np.float32)[0])
