"""The n-gram block: gates, dilated convolution, history."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from strata.base.program import NOT_FINITE
from strata.cpu.gated_delta import history_commit
from strata.cpu.ngram_mix import ngram_mix
from tests.canonical import gated_delta
from tests.canonical import ngram_mix as reference
from tests.canonical.call import ERROR, LAYER, Call, Slot, assert_accurate, assert_same, guarded, plain, room, spiked
from tests.reference import hyper_connection as exact
from tests.reference.gated_delta import causal_conv

EPS = 1e-6
# C, D, taps, dilation
SIZES = [(1, 64, 2, 1), (2, 96, 4, 3), (4, 256, 3, 2), (3, 300, 5, 2)]


@dataclass
class Case:
    x: np.ndarray
    key: np.ndarray
    value: np.ndarray
    norms: np.ndarray
    conv: np.ndarray
    history: np.ndarray
    dilation: int

    @staticmethod
    def make(rng, T, C, D, taps, dilation, draw=spiked) -> Case:
        return Case(draw(rng, T, C, D), draw(rng, T, C, D), draw(rng, T, D), plain(rng, 3, C, D),
                    draw(rng, taps, C, D), draw(rng, (taps - 1) * dilation, C, D), dilation)  # fmt: skip

    def run(self, advance: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray, Call]:
        """x, rows for commit, history afterwards, call."""
        T, C, D = self.x.shape
        x, rows, history = guarded(self.x), room(T, C, D), guarded(self.history)
        norms = [norm.copy() for norm in self.norms]
        call = Call(ngram_mix, x, self.key, self.value, *norms, self.conv, Slot(history), rows, T, C, D, len(self.conv),
                    self.dilation, int(advance), EPS, ERROR, LAYER)  # fmt: skip
        return x, rows, history, call.run()

    def wanted(self) -> tuple[np.ndarray, np.ndarray]:
        return reference.mix(self.x, self.key, self.value, self.norms, self.conv, self.history, self.dilation, EPS)

    def rows(self, first: int, last: int, history: np.ndarray) -> Case:
        cut = {name: getattr(self, name)[first:last].copy() for name in ("x", "key", "value")}
        return replace(self, **cut, history=history)


def committed(history: np.ndarray, rows: np.ndarray, n_keep: int) -> np.ndarray:
    past = guarded(history)
    width = history.shape[1] * history.shape[2]
    Call(history_commit, Slot(past), rows, np.array([n_keep], np.int64), len(history), width).run()
    return past


@pytest.mark.parametrize(("C", "D", "taps", "dilation"), SIZES)
@pytest.mark.parametrize("T", [1, 3, 8])
def test_same_bits(C, D, taps, dilation, T):
    case = Case.make(np.random.default_rng(C * T), T, C, D, taps, dilation)
    x, rows = case.wanted()
    for advance in (False, True):
        got_x, got_rows, history, call = case.run(advance)
        assert call.reported is None
        assert_same(got_rows, rows, "rows")
        assert_same(got_x, x, "x")
        after = gated_delta.shifted(case.history, rows, T) if advance else case.history
        assert_same(history, after, "history")


@pytest.mark.parametrize(("C", "D", "taps", "dilation"), SIZES)
def test_history_shifts_by_the_kept_rows(C, D, taps, dilation):
    case = Case.make(np.random.default_rng(1), 8, C, D, taps, dilation)
    _, rows, _, _ = case.run()
    for n_keep in range(9):
        assert_same(committed(case.history, rows, n_keep), gated_delta.shifted(case.history, rows, n_keep))


def test_a_window_is_its_rows_one_by_one():
    case = Case.make(np.random.default_rng(2), 8, 2, 96, 4, 3)
    whole, all_rows, _, _ = case.run()
    history = case.history
    for t in range(8):
        x, rows, _, _ = case.rows(t, t + 1, history).run()
        assert_same(x[0], whole[t], f"row {t}")
        history = committed(history, rows, 1)
        assert_same(history, committed(case.history, all_rows, t + 1), f"history after row {t}")


def test_gates_of_vanishing_and_zero_scores():
    """sign(0) = 0 gives one half; a vanishing score of either sign is held at 1e-6 before the root."""
    case = Case.make(np.random.default_rng(3), 3, 1, 64, 2, 1, plain)
    case.norms[:] = 1
    case.x[:] = 0
    case.x[:, 0, 0] = 1
    case.key[:] = 0
    case.key[:, 0, 1] = 1
    case.key[1, 0, 0], case.key[2, 0, 0] = 1e-9, -1e-9
    gates = reference.gate(case.x, case.key, case.norms[0], case.norms[1], EPS)
    assert gates[:, 0].tolist() == pytest.approx([0.5, 0.5 + 2.5e-4, 0.5 - 2.5e-4], rel=1e-5)
    assert_same(case.run()[0], case.wanted()[0])


@pytest.mark.parametrize("where", ["x", "key", "value"])
def test_non_finite_values_are_reported_with_their_row(where):
    case = Case.make(np.random.default_rng(4), 3, 2, 96, 4, 3, plain)
    getattr(case, where)[1, ..., 95] = np.nan
    assert case.run()[3].reported == (NOT_FINITE, LAYER, 1)


def test_accuracy():
    case = Case.make(np.random.default_rng(5), 8, 4, 320, 4, 3, plain)
    x, _, _, _ = case.run()
    wide = {n: getattr(case, n).astype(np.float64) for n in ("x", "key", "value", "norms", "conv", "history")}
    key = exact.rms(wide["key"], wide["norms"][0], EPS)
    query = exact.rms(wide["x"], wide["norms"][1], EPS)
    s = (key * query).sum(2) / np.sqrt(320)
    gate = exact.sigmoid(np.sign(s) * np.sqrt(np.maximum(abs(s), 1e-6)))
    gated = gate[:, :, None] * wide["value"][:, None, :]
    rows = exact.rms(gated, wide["norms"][2], EPS).reshape(8, -1)
    mixed = causal_conv(wide["history"].reshape(9, -1), rows, wide["conv"].reshape(4, -1).T, 3)
    assert_accurate(x, wide["x"] + gated + exact.silu(mixed).reshape(x.shape), 2e-7, "n-gram block")
