"""Gated DeltaNet on the GPU's code: the tests of the CPU ops."""

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.program import NOT_FINITE
from strata.cpu.gated_delta import gdn_commit, gdn_conv, gdn_heads, history_commit
from strata.gpu import gated_delta as gpu
from strata.gpu.error_word import where
from tests import test_op_gated_delta as ops
from tests.canonical import gated_delta as reference
from tests.canonical.call import LAYER, Slot, assert_same, check_guards, guarded, plain, room, spiked
from tests.canonical.gated_delta import Sizes
from tests.gpu.as_cpu_op import gpu_call
from tests.gpu.run_on_cpu import ActivationArea, ErrorWord, address, needs_compiler, run_all
from tests.test_op_gated_delta import (  # noqa: F401
    test_a_decay_that_is_no_number_does_not_hide_behind_a_small_state,
    test_a_rejected_window_leaves_no_trace,
    test_a_window_is_its_rows_one_by_one,
    test_convolution,
    test_convolution_of_a_window_is_that_of_single_rows,
    test_convolution_reports_non_finite_rows,
    test_delta_rule,
    test_delta_rule_reports_non_finite_values,
    test_extreme_gates,
    test_history_keeps_the_last_rows,
)

pytestmark = needs_compiler


def _conv(w, error, at, n):
    qkv, conv, weights, history, T, channels, taps, advance = w[:8]
    return gpu.gdn_conv(qkv, conv, weights, history, T, channels, taps, bool(advance), error, at)


def _heads(w, error, at, Hv):
    T, Hk, dk, dv, channels, advance, eps = w[9:16]
    return gpu.gdn_heads(*w[:9], T, Hk, Hv, dk, dv, channels, bool(advance), eps, error, at)


ADAPTERS = {
    gdn_conv: _conv,
    gdn_heads: _heads,
    gdn_commit: lambda w, error, at, Hv: gpu.gdn_commit(*w[:5], w[5], Hv, *w[6:9]),
    history_commit: lambda w, error, at, n: gpu.history_commit(*w),
}


@pytest.fixture(autouse=True)
def on_gpu_code(monkeypatch):
    monkeypatch.setattr(ops, "Call", gpu_call(ADAPTERS))


SPLIT = [Sizes(1, 2, 128, 128, 4), Sizes(2, 6, 128, 128, 4)]
"""Heads of the sizes that `gdn_split` is for."""
WINDOWS = [(s, T) for s in ops.SIZES for T in (1, 3)] + [(SPLIT[0], T) for T in range(1, 9)] + [(SPLIT[1], 4)]
OP = 7
"""Number of the op gdn_heads in these tests; the convolution is the one before."""


class Whole:
    """Convolution and delta rule of a window by `gdn_window`, with its inputs and outputs."""

    def __init__(self, w: ops.Window, qkv: np.ndarray, history: np.ndarray, taps: np.ndarray):
        s, T = w.s, len(qkv)
        self.w, self.read, self.error = w, (qkv, taps, history), ErrorWord()
        self.past, self.state = Slot(guarded(history)), Slot(guarded(w.state))
        self.conv, self.decay, self.beta = room(T, s.channels), guarded(w.alpha), guarded(w.beta)
        self.y = room(T, s.Hv, s.dv)
        self.areas = [ActivationArea(T, s.Hv * s.dv, group) for group in gpu.quantises(T, s.Hv, s.dv)]
        self.arrived = guarded(np.zeros(gpu.arrived_bytes(s.Hv, s.dv) // 4, np.int32))
        inputs = (address(qkv), address(taps), address(self.past), s.taps)
        rule = (self.conv, self.decay, self.beta, w.z, w.a, w.dt, w.norm, self.state, self.y)
        sizes = (T, s.Hk, s.Hv, s.dk, s.dv, s.channels, ops.EPS, self.error.address, where(OP, LAYER))
        quantised = [area.places for area in self.areas]
        self.launches = gpu.gdn_window(*inputs, *map(address, rule), *sizes, quantised, address(self.arrived))

    def run(self) -> "Whole":
        run_all(self.launches, reverse=len(self.y) > 1)
        return self

    def check(self) -> None:
        """Everything is as by numpy, and nothing else was written; w.mixed holds outputs of the convolution."""
        y, _, g = self.w.reference()
        assert not self.arrived.any(), "counters are as they were"
        for area in self.areas:
            codes, scales, _ = arithmetic.quantise(self.y.reshape(len(y), -1), area.group)
            assert_same(area.codes, codes)
            assert_same(area.scales, scales)
            assert_same(area.sums, codes.astype(np.int32).reshape(len(y), -1, 16).sum(-1, dtype=np.int32))
        for found, wanted, what in (
            (self.conv, self.w.mixed, "conv"),
            (self.decay, g.decay, "decay"),
            (self.beta, g.beta, "beta"),
            (self.y, y, "y"),
            (self.past.array, self.read[2], "history"),
            (self.state.array, self.w.state, "state"),
        ):
            check_guards(found)
            assert_same(found, wanted, what)


def _whole(s: Sizes, T: int, draw=spiked, change=lambda w, qkv: None) -> Whole:
    """A window of drawn values, which `change` may change."""
    rng = np.random.default_rng(T)
    w = ops.Window.make(rng, s, T, draw)
    qkv, history, taps = draw(rng, T, s.channels), draw(rng, s.taps - 1, s.channels), plain(rng, s.taps, s.channels)
    change(w, qkv)
    with np.errstate(all="ignore"):
        w.mixed = reference.conv(history, qkv, taps)
    return Whole(w, qkv, history, taps)


@pytest.mark.parametrize("s, T", WINDOWS, ids=lambda x: x if isinstance(x, int) else f"Hv{x.Hv}-dk{x.dk}-taps{x.taps}")
def test_convolution_and_delta_rule_in_one(s, T):
    whole = _whole(s, T).run()
    assert whole.error.reported is None
    whole.check()


def test_which_kernels_a_window_takes(monkeypatch):
    def kernels(s, T=4):
        return [one.kernel for one in _whole(s, T, plain).launches]

    assert kernels(SPLIT[0]) == ["gdn_split"] and kernels(ops.SIZES[1]) == ["gdn_window<16>"]
    apart = ["gdn_conv", "gdn_heads<32>", "quantise<1>"]
    assert kernels(ops.SIZES[3]) == apart, "five taps, and heads that make no pairs"
    monkeypatch.setattr(gpu, "SPLIT_WINDOW", 2)
    assert kernels(SPLIT[0], 2) == ["gdn_split"] and kernels(SPLIT[0], 3) == [*apart, "quantise<8>"]


def test_a_window_of_values_with_rare_quotients():
    """Zeros of both signs and values that are far too small or too large for the usual steps of a division."""
    rare = np.array([0, -0.0, 1e-42, -1e-30, 1e-19, 3e-19, 87.5, -87.5, -41, 41, 1e18, 2e18, -1e30], np.float32)

    def change(w, qkv):
        for x in (qkv, w.z):
            some = np.random.default_rng(1).random(x.shape) < 0.3
            x[some] = np.resize(rare, some.sum())
        qkv[:, ::5] = 0

    whole = _whole(SPLIT[0], 4, plain, change).run()
    whole.check()


@pytest.mark.parametrize("place, op", [("qkv q", OP - 1), ("qkv v", OP - 1), ("alpha", OP), ("beta", OP), ("z", OP)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_window_reports_what_is_not_finite(place, op, value):
    """With the row, and as the error of the op that made it: the convolution's outputs first."""
    s = SPLIT[1]

    def change(w, qkv):
        where = {"qkv q": qkv[2, 130:131], "qkv v": qkv[2, -1:], "alpha": w.alpha[2, 3:4], "beta": w.beta[2, 5:6],
                 "z": w.z[2, 4, 77:78]}  # fmt: skip
        where[place][:] = value

    whole = _whole(s, 3, plain, change).run()
    assert whole.error.reported == (NOT_FINITE, LAYER, 2)
    assert whole.error.word[0] >> np.uint64(48) == op
