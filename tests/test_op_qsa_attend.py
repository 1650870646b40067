"""Attention over selected cells: tiles, selections, KV formats, head groups against numpy, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from strata.base.program import NOT_FINITE
from strata.cpu.qsa_attend import qsa_attend
from tests.canonical import kv_cells
from tests.canonical import qsa_attend as reference
from tests.canonical.call import ERROR, LAYER, Call, Slot, assert_accurate, assert_same, plain, room, spiked
from tests.reference.qsa import attend


@dataclass
class Case:
    """Rows pos .. pos + T over a filled cache. blocks (T, budget) int32, or None for dense attention."""

    q: np.ndarray
    q_gate: np.ndarray
    k: np.ndarray
    v: np.ndarray
    pos: int
    int8: bool
    block: int = 0
    budget: int = 0
    blocks: np.ndarray | None = None
    splits: int = 1
    first: int | None = None

    @staticmethod
    def make(rng, T, H, Hkv, dh, pos, *, int8=False, block=0, budget=0, splits=1, draw=spiked) -> Case:
        context = pos + T
        q_gate = plain(rng, T, H, 2, dh)
        k, v = draw(rng, context, Hkv, dh), draw(rng, context, Hkv, dh)
        k, v = np.clip(k, -50, 50), np.clip(v, -50, 50)
        blocks = None
        if block:
            blocks = np.full((T, budget), -(1 << 30), np.int32)  # a place that is not chosen must not be looked at
            for t in range(T):
                n = (pos + t + 1) // block
                chosen = np.sort(rng.permutation(n)[: min(n, budget)])
                blocks[t, : len(chosen)] = chosen
        return Case(plain(rng, T, H, dh), q_gate, k, v, pos, int8, block, budget, blocks, splits)

    def stored(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        return kv_cells.store_int8(x) if self.int8 else (kv_cells.store_f16(x)[0], None)

    def read(self, x: np.ndarray) -> np.ndarray:
        cells, scales = self.stored(x)
        return cells.astype(np.float32) if scales is None else kv_cells.load_int8(cells, scales)

    def run(self, order: str = "up") -> tuple[np.ndarray, Call]:
        T, H, dh = self.q.shape
        Hkv = self.k.shape[1]
        y, slots, scale = room(T, H, dh), [], np.float32(1) / np.sqrt(np.float32(dh))
        for cells, scales in (self.stored(self.k), self.stored(self.v)):
            slots += [Slot(cells), None if scales is None else Slot(scales)]
        call = Call(qsa_attend, self.q, self.q_gate, y, np.array([self.pos], np.int64), *slots, self.blocks, H, Hkv, dh,
                    self.block, self.budget, scale, ERROR, LAYER, self.splits,
                    None if self.first is None else np.array([self.first], np.int64))  # fmt: skip
        n = T * Hkv * self.splits
        return y, call.run(n, order=range(n) if order == "up" else reversed(range(n)))

    def cells(self, t: int) -> np.ndarray:
        n = self.pos + t + 1
        chosen = None if self.blocks is None else self.blocks[t, : min(self.budget, n // self.block)]
        return reference.visible_cells(n, self.block, self.budget, chosen, self.first or 0)

    def wanted(self) -> np.ndarray:
        T, H, dh = self.q.shape
        k, v, group = self.read(self.k), self.read(self.v), H // self.k.shape[1]
        y = np.empty((T, H, dh), np.float32)
        for t in range(T):
            seen_k, seen_v = k[self.cells(t)], v[self.cells(t)]
            for kv in range(k.shape[1]):
                h = slice(kv * group, (kv + 1) * group)
                y[t, h] = reference.attend(self.q[t, h], self.q_gate[t, h, 1], seen_k[:, kv], seen_v[:, kv])
        return y

    def row(self, t: int) -> Case:
        """Row t as a window of its own."""
        cut = {"q": self.q[t : t + 1].copy(), "q_gate": self.q_gate[t : t + 1].copy(), "pos": self.pos + t}
        return replace(self, **cut, blocks=None if self.blocks is None else self.blocks[t : t + 1].copy())

    def check(self) -> np.ndarray:
        y, call = self.run()
        assert call.reported is None
        assert_same(y, self.wanted())
        return y


@pytest.mark.parametrize("entries", [1, 2, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("int8", [False, True])
def test_tiles(entries, int8):
    Case.make(np.random.default_rng(entries), 1, 4, 2, 64, entries - 1, int8=int8).check()


@pytest.mark.parametrize(("H", "Hkv"), [(1, 1), (4, 2), (6, 2), (12, 1), (24, 2), (3, 3)])
@pytest.mark.parametrize("splits", [1, 3])
def test_head_groups_and_their_splits(H, Hkv, splits):
    case = Case.make(np.random.default_rng(H), 3, H, Hkv, 32, 70)
    if H // Hkv >= splits:
        case.splits = splits
    assert_same(case.run("down")[0], case.check())


@pytest.mark.parametrize("dh", [32, 48, 64, 128, 256])
@pytest.mark.parametrize("int8", [False, True])
def test_head_sizes(dh, int8):
    if int8 and dh % 64:
        dh = 192
    Case.make(np.random.default_rng(dh), 1, 3, 1, dh, 99, int8=int8).check()


@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("T", [1, 3, 8])
@pytest.mark.parametrize("budget", [1, 8, 17])
def test_selected_blocks_and_the_tail(block, T, budget):
    """Fewer complete blocks than the budget, exactly as many, and more."""
    rng = np.random.default_rng(block * T)
    for pos in (0, budget * block - 2, 20 * block + 1):
        case = Case.make(rng, T, 2, 1, 64, max(pos, 0), block=block, budget=budget, int8=bool(budget % 2))
        case.check()


def test_a_block_list_of_several_tiles():
    case = Case.make(np.random.default_rng(1), 2, 2, 1, 64, 500, block=4, budget=40)
    assert [len(case.cells(t)) for t in range(2)] == [161, 162]
    case.check()


def test_all_blocks_selected_is_dense_attention():
    case = Case.make(np.random.default_rng(2), 3, 4, 2, 64, 130, block=4, budget=64)
    assert_same(case.check(), replace(case, block=0, budget=0, blocks=None).check())


@pytest.mark.parametrize("budget", [1, 63, 64, 100, 129, 500])
def test_dense_attention_over_the_last_cells(budget):
    case = Case.make(np.random.default_rng(8), 3, 2, 1, 64, 127)
    case.budget = budget
    assert len(case.cells(2)) == min(budget, 130) and case.cells(2)[-1] == 129
    case.check()


@pytest.mark.parametrize("first", [0, 1, 30, 66, 127, 128, 129, 200])
@pytest.mark.parametrize("budget", [0, 64])
def test_dense_attention_from_a_first_cell_on(first, budget):
    """Cells before the first one may hold anything; a row always sees its own."""
    case = Case.make(np.random.default_rng(9), 3, 2, 1, 64, 127)
    case.budget, case.first = budget, first
    case.k[: min(first, 127)] = np.nan
    case.check()


@pytest.mark.parametrize("block", [0, 4])
def test_rows_do_not_see_each_other(block):
    case = Case.make(np.random.default_rng(3), 8, 4, 2, 64, 120, block=block, budget=9 if block else 0)
    y, _ = case.run()
    for t in range(8):
        assert_same(case.row(t).run()[0][0], y[t], f"row {t} alone")


def test_later_cells_are_not_looked_at():
    case = Case.make(np.random.default_rng(4), 1, 2, 1, 64, 69)
    wanted = case.check()
    case.k, case.v = (np.concatenate([x, np.full_like(x, np.nan)]) for x in (case.k, case.v))
    y, call = case.run()
    assert call.reported is None
    assert_same(y, wanted)


def test_far_apart_scores_across_tiles():
    """A later tile with a far larger maximum takes all, and one with a far smaller maximum changes nothing."""
    case = Case.make(np.random.default_rng(5), 1, 1, 1, 32, 199, draw=plain)
    case.k[70] = 50 * np.sign(case.q[0, 0])
    y = case.check()
    gate = 1 / (1 + np.exp(-case.q_gate[0, 0, 1].astype(np.float64)))
    assert np.allclose(y[0, 0], case.read(case.v)[70, 0] * gate, rtol=1e-4)


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_are_reported_with_their_row(where, bad):
    case = Case.make(np.random.default_rng(6), 3, 4, 2, 64, 66, draw=plain)
    if where == "q":
        case.q[1, 3, 63] = bad
    else:
        getattr(case, where)[67, 1, 7] = bad  # the cell of row 1: row 2 sees it too
    assert case.run()[1].reported == (NOT_FINITE, LAYER, 1)


def test_a_gate_saturates_but_one_that_is_not_finite_is_reported():
    case = Case.make(np.random.default_rng(6), 3, 4, 2, 64, 66, draw=plain)
    case.q_gate[1, 3, 1, :2] = 1000, -1000
    assert np.isfinite(case.check()).all()
    for bad in (np.inf, -np.inf, np.nan):
        case.q_gate[1, 3, 1, 63] = bad
        assert case.run()[1].reported == (NOT_FINITE, LAYER, 1)


@pytest.mark.parametrize("int8", [False, True])
def test_accuracy(int8):
    """Against float64 over the same cells: the KV format's own rounding is not counted here, but printed."""
    case = Case.make(np.random.default_rng(7), 2, 12, 2, 256, 700, int8=int8, draw=plain)
    y, _ = case.run()
    parts = [case.q.astype(np.float64), case.q_gate[:, :, 1].astype(np.float64)]
    k, v = case.read(case.k).astype(np.float64), case.read(case.v).astype(np.float64)
    rows = [attend(parts[0][t], parts[1][t], k[: 701 + t], v[: 701 + t]) for t in range(2)]
    assert_accurate(y.reshape(2, -1), np.stack(rows), 5e-7, "attention")
    k, v = case.k.astype(np.float64), case.v.astype(np.float64)
    rows = [attend(parts[0][t], parts[1][t], k[: 701 + t], v[: 701 + t]) for t in range(2)]
    assert_accurate(y.reshape(2, -1), np.stack(rows), 2e-2 if int8 else 1e-3, f"with {'int8' if int8 else 'f16'} cells")
