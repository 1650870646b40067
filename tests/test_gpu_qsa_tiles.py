"""Tiles of attention for heads of 256 values: against numpy, and the bits of the kernel for all sizes."""

from dataclasses import replace

import numpy as np
import pytest

from strata.base.program import NOT_FINITE
from strata.gpu import qsa_attend as gpu
from strata.gpu.qsa_append import KvSlots
from tests.canonical.call import LAYER, Slot, assert_same, check_guards, plain, room
from tests.gpu.run_on_cpu import ErrorWord, address, needs_compiler, run_all
from tests.test_op_qsa_attend import Case

pytestmark = needs_compiler
CONTEXT = 1024


def attend(case: Case, *, full: bool = True, reverse: bool = False, context: int = CONTEXT):
    """(y, error word, names of kernels)."""
    T, H, dh = case.q.shape
    Hkv = case.k.shape[1]
    stored = [case.stored(x) for x in (case.k, case.v)]
    slots = [[None if a is None else Slot(a) for a in pair] for pair in stored]
    (k, k_scales), (v, v_scales) = slots
    cells = KvSlots(address(k), address(v), address(k_scales), address(v_scales))
    y, error, pos = room(T, H, dh), ErrorWord(), np.array([case.pos], np.int64)
    first = None if case.first is None else np.array([case.first], np.int64)
    parts = np.full(gpu.part_bytes(T, H, dh, context, case.block, case.budget) // 4, np.nan, np.float32)
    launches = gpu.attend_rows(
        address(case.q), address(case.q_gate), address(y), address(pos), cells, address(case.blocks), address(first),
        address(parts), T, H, Hkv, dh, case.block, case.budget, context, error.address,
        np.uint64(LAYER + 1) << np.uint64(32), full=full,
    )  # fmt: skip
    run_all(launches, reverse=reverse)
    check_guards(y)
    return np.array(y), error, [one.kernel for one in launches]


@pytest.fixture(params=[1, 256], ids=["heads together", "heads apart"])
def blocks_wanted(request, monkeypatch):
    monkeypatch.setattr(gpu, "BLOCKS_WANTED", request.param)
    return request.param


@pytest.mark.parametrize(("H", "Hkv", "together"), [(1, 1, 1), (4, 2, 2), (3, 1, 3), (5, 1, 6), (12, 2, 6), (24, 2, 12),
                                                    (26, 2, 12)])  # fmt: skip
@pytest.mark.parametrize("int8", [False, True])
def test_groups_of_heads(H, Hkv, together, int8, blocks_wanted):
    case = Case.make(np.random.default_rng(H), 2, H, Hkv, 256, 150, int8=int8)
    y, error, kernels = attend(case, reverse=int8)
    assert error.reported is None
    if blocks_wanted == 1:
        assert kernels[0] == f"qsa_tiles_256<{together}, {'true' if int8 else 'false'}>"
    assert_same(y, case.wanted())


@pytest.mark.parametrize("entries", [1, 2, 3, 5, 8, 31, 33, 62, 63, 64, 65, 66, 127, 129])
@pytest.mark.parametrize("int8", [False, True])
def test_tiles_that_are_not_full(entries, int8):
    case = Case.make(np.random.default_rng(entries), 1, 6, 2, 256, entries - 1, int8=int8)
    y, error, _ = attend(case, context=256)
    assert error.reported is None
    assert_same(y, case.wanted())


@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("int8", [False, True])
def test_chosen_blocks(block, T, int8, blocks_wanted):
    """Fewer complete blocks than the budget, and more; with and without a tail."""
    rng = np.random.default_rng(block)
    for pos in (0, 17 * block - 2, 43 * block + 1):
        case = Case.make(rng, T, 6, 2, 256, max(pos, 0), block=block, budget=17, int8=int8)
        y, error, _ = attend(case)
        assert error.reported is None
        assert_same(y, case.wanted())


def test_the_full_budget():
    """512 blocks of 4 cells and a tail of 3: 33 tiles, one more than are merged at once."""
    case = Case.make(np.random.default_rng(3), 1, 2, 1, 256, 2566, block=4, budget=512, int8=True, draw=plain)
    y, error, _ = attend(case, context=4096)
    assert error.reported is None
    assert_same(y, case.wanted())


@pytest.mark.parametrize("int8", [False, True])
def test_both_kernels_have_the_same_bits(int8):
    case = Case.make(np.random.default_rng(4), 3, 24, 2, 256, 700, block=4, budget=70, int8=int8)
    assert_same(attend(case)[0], attend(case, full=False)[0])


@pytest.mark.parametrize("budget", [63, 64, 129])
def test_the_last_cells_from_a_first_one_on(budget):
    case = Case.make(np.random.default_rng(5), 2, 4, 2, 256, 140)
    case = replace(case, budget=budget, first=30)
    case.k[:30] = np.nan
    y, error, _ = attend(case)
    assert error.reported is None
    assert_same(y, case.wanted())


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_reported_with_its_row(where, bad):
    case = Case.make(np.random.default_rng(6), 3, 4, 2, 256, 66, draw=plain)
    if where == "q":
        case.q[1, 3, 255] = bad
    else:
        getattr(case, where)[67, 1, 7] = bad
    assert attend(case)[1].reported == (NOT_FINITE, LAYER, 1)
