"""Lists with Q3_K and IQ4_XS on int8 tensor cores, run on the CPU, against the lane rules."""

import numpy as np
import pytest

from strata.gpu.gemv import relayout
from strata.gpu.gemv.mixed import BYTE_MOST, BYTE_STAGES, Part, mixed
from strata.gpu.launch import Launch
from strata.pack.formats import by_name
from tests.block_data import MODES, random_activations, random_rows
from tests.canonical.call import assert_same, check_guards, room
from tests.column_cases import check_numbers_of_columns, largest_columns
from tests.gpu.run_on_cpu import ON_DEVICE, address, needs_compiler, run, run_all
from tests.test_gpu_float_gemv import aligned as aligned_floats
from tests.test_gpu_gemv import aligned, area_of, wanted

pytestmark = needs_compiler
FORMATS = tuple(BYTE_STAGES)


def check(name, raw, x, expected=None, *, reverse=False, races=False) -> Launch:
    format, T, (rows, K) = by_name(name), len(x), (len(raw), x.shape[1])
    x = aligned_floats(x)
    weights, area, y = aligned(relayout(format, raw)), area_of(x, format.group), room(T, rows)
    (launch,) = mixed(address(x), T, K, {format.group: area.places}, [Part(format, address(weights), rows, address(y))])
    assert launch.shared_bytes > 0
    if races:
        run(launch, races=True)
    else:
        run_all([launch], reverse=reverse)
    check_guards(y)
    assert_same(y, wanted(format, raw, x) if expected is None else expected, f"{name}, {rows} x {K}, T {T}")
    return launch


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mode", MODES)
def test_same_bits(mode, name):
    """Two to eight columns; tiles that are full, and rows that end anywhere in a row block, a warp or a pair."""
    check_numbers_of_columns(check, name, mode, ((512, 16), (1536, 77), (1024, 39), (2560, 13)), 2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("fill", [0, 255])
def test_largest_integers(name, fill):
    """Every code and scale at an end of its range, and every activation too: bytes and floats hold them."""
    format, K = by_name(name), 512
    raw = np.full((16, K // 256, format.block_bytes), fill, np.uint8)
    at = format.block_bytes - 2 if name == "Q3_K" else 0
    raw[..., at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
    check(name, raw.reshape(16, -1), largest_columns(K))


@pytest.mark.parametrize("name", FORMATS)
def test_longest_rows(name):
    raw = random_rows(by_name(name), 5, BYTE_MOST, "mid", seed=7)
    x = random_activations(4, BYTE_MOST, "mid", seed=8)
    launch = check(name, raw, x)
    check(name, raw, x[:3], reverse=True)
    assert launch.shared_bytes <= 99 << 10 and launch.shared_bytes - launch.ring_bytes <= 64 << 10


@pytest.mark.skipif(ON_DEVICE, reason="the device does not tell races")
@pytest.mark.parametrize("name", FORMATS)
def test_threads_do_not_race(name):
    raw = random_rows(by_name(name), 40, 1536, "mid", seed=1)
    check(name, raw, random_activations(7, 1536, "mid", seed=2), races=True)
