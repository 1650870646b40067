"""Sparse attention on the GPU's code: the tests of the CPU ops."""

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.errors import BadArgument
from strata.base.program import NOT_FINITE
from strata.base.rotary import rotary_table
from strata.cpu.qsa_append import qsa_append, qsa_index
from strata.cpu.qsa_attend import qsa_attend
from strata.cpu.qsa_select import qsa_select
from strata.gpu import qsa_append as gpu_append
from strata.gpu import qsa_attend as gpu_attend
from strata.gpu import qsa_select as gpu_select
from strata.gpu.activations import Activations
from strata.gpu.error_word import where as place
from tests import test_op_qsa_append as append_ops
from tests import test_op_qsa_attend as attend_ops
from tests import test_op_qsa_select as select_ops
from tests.canonical.call import LAYER, Slot, assert_same, check_guards, guarded, plain, room
from tests.gpu.as_cpu_op import gpu_call
from tests.gpu.run_on_cpu import ActivationArea, ErrorWord, address, needs_compiler, run_all
from tests.test_op_qsa_append import (  # noqa: F401
    test_a_gate_that_is_not_finite_is_left_to_attention,
    test_a_prefill_chunk_is_longer_than_the_ring,
    test_append,
    test_append_of_a_row_alone,
    test_append_reports_what_is_not_finite_or_does_not_fit,
    test_append_without_queries,
    test_index_over_windows_of_all_sizes,
    test_index_reports_non_finite_values,
    test_pooled_keys_do_not_depend_on_how_windows_cut_them,
    test_rejected_rows_leave_no_trace,
)
from tests.test_op_qsa_attend import (  # noqa: F401
    test_a_block_list_of_several_tiles,
    test_a_gate_saturates_but_one_that_is_not_finite_is_reported,
    test_all_blocks_selected_is_dense_attention,
    test_dense_attention_from_a_first_cell_on,
    test_dense_attention_over_the_last_cells,
    test_far_apart_scores_across_tiles,
    test_head_groups_and_their_splits,
    test_head_sizes,
    test_later_cells_are_not_looked_at,
    test_non_finite_values_are_reported_with_their_row,
    test_rows_do_not_see_each_other,
    test_selected_blocks_and_the_tail,
    test_tiles,
)
from tests.test_op_qsa_select import (  # noqa: F401
    test_equal_scores_go_to_the_lowest_blocks,
    test_no_complete_block_yet,
    test_select,
)

pytestmark = needs_compiler
CONTEXT = 1024


def _append(w, error, at, T):
    cells = gpu_append.KvSlots(w[8], w[10], w[9], w[11])
    return gpu_append.qsa_append(gpu_append.Append(*w[:6], cells, *w[12:17]), w[6], w[7], T, error, at)


def _index(w, error, at, T):
    index = gpu_append.Index(*w[:6], *w[9:15])
    return gpu_append.qsa_index(index, w[6], w[7], w[8], error, at)


def _select(w, error, at, T):
    iq, keys, pos, blocks, heads, dim, block, budget = w[:8]
    scratch = np.full(T * (CONTEXT // block), np.nan, np.float32)
    _select.keep = scratch
    return gpu_select.qsa_select(
        iq, keys, pos, blocks, address(scratch), T, heads, dim, block, budget, CONTEXT, error, at
    )


QUANTISED: list[Activations] = []
"""Where attention puts its rows as activations as well."""


def _attend(w, error, at, n):
    q, q_gate, y, pos, k, k_scales, v, v_scales, blocks, H, Hkv, dh, block, budget = w[:14]
    T = n // (Hkv * w[17])
    scratch = np.full(gpu_attend.part_bytes(T, H, dh, CONTEXT, block, budget) // 4, np.nan, np.float32)
    _attend.keep = scratch
    cells = gpu_append.KvSlots(k, v, k_scales, v_scales)
    return gpu_attend.qsa_attend(q, q_gate, y, (pos,), cells, blocks, w[18], address(scratch), T, H, Hkv, dh, block,
                                 budget, CONTEXT, error, at, quantised=tuple(QUANTISED))  # fmt: skip


ADAPTERS = {
    qsa_append: _append,
    qsa_index: _index,
    qsa_select: _select,
    qsa_attend: _attend,
}


@pytest.fixture(autouse=True)
def on_gpu_code(monkeypatch):
    for module in (append_ops, attend_ops, select_ops):
        monkeypatch.setattr(module, "Call", gpu_call(ADAPTERS))


@pytest.mark.parametrize("groups", [(32,), (256,), (32, 256)])
@pytest.mark.parametrize("T", [1, 3])
def test_attention_quantises_its_rows(groups, T, monkeypatch):
    H, dh = 4, 256 if 256 in groups else 96
    case = attend_ops.Case.make(np.random.default_rng(T), T, H, 2, dh, 150)
    areas = [ActivationArea(T, H * dh, g) for g in groups]
    monkeypatch.setitem(globals(), "QUANTISED", [a.places for a in areas])
    y, _ = case.run()
    assert_same(y, case.wanted())
    for area in areas:
        codes, scales, _ = arithmetic.quantise(y.reshape(T, -1), area.group)
        assert_same(area.codes, codes)
        assert_same(area.scales, scales)
        assert_same(area.sums, codes.astype(np.int32).reshape(T, -1, 16).sum(-1, dtype=np.int32))


def test_attention_refuses_groups_across_heads():
    with pytest.raises(BadArgument, match="activations"):
        gpu_attend.qsa_attend(64, 64, 64, (64,), gpu_append.KvSlots(64, 64, 0, 0), 0, 0, 64, 1, 4, 2, 64, 0, 0, 256, 64,
                              np.uint64(0), quantised=(Activations.at(256, 1, 256, 256),))  # fmt: skip


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("T", [1, 5])
def test_append_and_index_in_one(T, int8):
    """Memory is the same as behind both kernels, and each reports under its own name."""
    H, Hkv, dh, heads, dim, block, ring_rows, rotary, pos = 4, 2, 64, 3, 32, 4, 8, 16, np.array([6], np.int64)
    table = rotary_table(CONTEXT, rotary, 1e7)

    def run(one: bool, bad: str):
        rng = np.random.default_rng(T)
        q_gate, k, v = plain(rng, T, H, 2, dh), plain(rng, T, Hkv, dh), plain(rng, T, Hkv, dh)
        iq, ik, ring = guarded(plain(rng, T, heads, dim)), plain(rng, T, dim), guarded(plain(rng, ring_rows, dim))
        norm, q = plain(rng, dh), room(T, H, dh)
        if bad:
            {"append": v, "index": ik}[bad][T - 1, ..., 3] = np.inf
        cells = [x for _ in range(2) for x in append_ops.cells_of(Hkv, dh, int8)]
        keys = room(CONTEXT // block, dim)
        slots = [None if x is None else Slot(x) for x in (*cells, keys, ring)]
        places = [0 if x is None else address(x) for x in slots]
        kv = gpu_append.KvSlots(places[0], places[2], places[1], places[3])
        a = gpu_append.Append(*map(address, (q_gate, k, v, norm, norm, q)), kv, H, Hkv, dh, rotary, 1e-6)
        indexer = *map(address, (iq, ik, norm, norm)), *places[4:]
        x = gpu_append.Index(*indexer, heads, dim, block, ring_rows, rotary, 1e-5)
        error = ErrorWord()
        at, mine, other = (address(pos), address(table), T, error.address), place(4, LAYER), place(5, LAYER)
        if one:
            run_all(gpu_append.qsa_store(a, x, *at, mine, other), reverse=T > 1)
        else:
            run_all([*gpu_append.qsa_append(a, *at, mine), *gpu_append.qsa_index(x, *at, other)])
        arrays = [y for y in (q, iq, ring, keys, *cells) if y is not None]
        for y in arrays:
            check_guards(y)
        return [np.ascontiguousarray(y).view(np.uint8).copy() for y in arrays], error.reported

    for bad in ("", "append", "index"):
        (found, reported), (wanted, expected) = run(True, bad), run(False, bad)
        assert reported == expected and (expected is None) == (not bad)
        for y, w in zip(found, wanted, strict=True):
            assert_same(y, w)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("T", "pos", "block", "budget"),
    [(1, 0, 4, 2), (1, 259, 4, 8), (1, 258, 4, 8), (2, 255, 4, 8), (3, 511, 4, 100), (4, 253, 4, 8), (5, 300, 4, 75),
     (8, 260, 4, 8), (8, 253, 4, 30), (8, 56, 1, 3), (8, 2, 1, 1), (7, 190, 3, 16), (8, 33, 4, 10), (8, 1000, 4, 16)],
)  # fmt: skip
def test_append_index_and_scores_in_one(T, pos, block, budget, int8):
    """Cells, keys and chosen blocks are the same as behind three kernels, also after the kernel has run again, and each
    part reports under its own name."""
    H, Hkv, dh, heads, dim, ring_rows, rotary = 3, 1, 256, 4, 128, 16, 64
    table, most = rotary_table(CONTEXT, rotary, 1e7), CONTEXT // block // 4 * 4

    def run(one: bool, bad: str, times: int = 1):
        rng = np.random.default_rng(T)
        q_gate, k, v = plain(rng, T, H, 2, dh), plain(rng, T, Hkv, dh), plain(rng, T, Hkv, dh)
        iq, ik, ring = guarded(plain(rng, T, heads, dim)), plain(rng, T, dim), guarded(plain(rng, ring_rows, dim))
        norm, index_norm, q = plain(rng, dh), plain(rng, dim), room(T, H, dh)
        keys = guarded(plain(rng, most, dim))
        if bad:
            {"append": v, "index": ik, "queries": iq}.get(bad, v)[T - 1, ..., 3] = np.inf if bad != "select" else 1
        if bad == "select":
            keys[0] = 3e38
        cells: list[np.ndarray | None] = []
        for _ in range(2):
            cells.append(room(CONTEXT, Hkv, dh, dtype="int8" if int8 else "float16"))
            cells.append(room(CONTEXT, Hkv, dh // 64, dtype="float16") if int8 else None)
        slots = [None if x is None else Slot(x) for x in (*cells, keys, ring)]
        places = [0 if x is None else address(x) for x in slots]
        kv = gpu_append.KvSlots(places[0], places[2], places[1], places[3])
        a = gpu_append.Append(*map(address, (q_gate, k, v, norm, norm, q)), kv, H, Hkv, dh, rotary, 1e-6)
        indexer = *map(address, (iq, ik, index_norm, index_norm)), *places[4:]
        x = gpu_append.Index(*indexer, heads, dim, block, ring_rows, rotary, 1e-5)
        error, where = ErrorWord(), np.array([pos], np.int64)
        blocks, scores = room(T, budget, dtype="int32"), room(T, most)
        at, mine, other = (address(where), address(table), T, error.address), place(4, LAYER), place(5, LAYER)
        third = place(6, LAYER)
        if one:
            to = gpu_append.Scores(address(scores), budget, most, third)
            launches = gpu_append.qsa_store(a, x, *at, mine, other, to)
            launches += gpu_select.select(address(scores), address(where), address(blocks), T, block, budget, most)
            assert len(launches) == 2
        else:
            launches = [*gpu_append.qsa_append(a, *at, mine), *gpu_append.qsa_index(x, *at, other)]
            to = (address(where), address(blocks), address(scores))
            launches += gpu_select.qsa_select(address(iq), places[4], *to, T, heads, dim, block, budget, most * block,
                                              error.address, third, wide=False)  # fmt: skip
        run_all(launches * times, reverse=one and T % 2 == 1)
        arrays = [y for y in (q, ring, keys, blocks, *cells) if y is not None]
        for y in (*arrays, iq, scores):
            check_guards(y)
        seen = [np.array(scores[t, : (pos + t + 1) // block]) for t in range(T)] if (pos + T) // block > budget else []
        return [np.ascontiguousarray(y).view(np.uint8).copy() for y in (*arrays, *seen)], error.reported

    chosen = (pos + T) // block > budget
    for bad in ("", "append", "index", "queries", *(["select"] if chosen else [])):
        (found, reported), (wanted, expected) = run(True, bad), run(False, bad)
        assert reported == expected and (expected is None) == (not bad)
        if bad:
            continue
        for y, w in zip(found, wanted, strict=True):
            assert_same(y, w)
        for y, w in zip(run(True, bad, times=2)[0], wanted, strict=True):
            assert_same(y, w)


def test_scores_beside_other_shapes_are_refused():
    cells, to = gpu_append.KvSlots(64, 64), gpu_append.Scores(64, 8, 64, np.uint64(0))
    for dh, dim, rotary, ring in ((64, 128, 64, 16), (256, 64, 64, 16), (256, 128, 32, 16), (256, 128, 64, 8)):
        a = gpu_append.Append(*[64] * 6, cells, 4, 2, dh, rotary, 1e-6)
        x = gpu_append.Index(*[64] * 6, 4, dim, 4, ring, rotary, 1e-6)
        with pytest.raises(BadArgument, match="index"):
            gpu_append.qsa_store(a, x, 64, 64, 8, 64, np.uint64(0), np.uint64(0), to)


@pytest.mark.parametrize(("where", "row"), [("query", 1), ("key", 1)])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_bad_scores_are_reported_and_blocks_stay_valid(where, row, bad):
    rng = np.random.default_rng(3)
    q, keys = abs(plain(rng, 3, 2, 32)), abs(plain(rng, 20, 32))
    if where == "query":
        q[1, 1, 31] = bad
    else:
        keys[19, 0] = bad  # complete for rows 1 and 2
    out, call = select_ops.select(q, keys, 78, 4, 5)
    assert call.reported == (NOT_FINITE, LAYER, row)
    assert ((out >= 0) & (out < 20)).all() and (np.diff(out, axis=1) > 0).all()


def test_selection_over_many_blocks_in_several_rounds():
    rng = np.random.default_rng(5)
    q, keys = plain(rng, 2, 2, 16), plain(rng, 1000, 16)
    keys[rng.integers(0, 1000, 400)] = keys[3]  # many equal scores
    select_ops.check(q, keys, 998, 1, 300)
