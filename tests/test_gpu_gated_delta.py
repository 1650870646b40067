"""Gated DeltaNet on the GPU's code: the tests of the CPU ops."""

import numpy as np
import pytest

from strata.base import arithmetic
from strata.cpu.gated_delta import gdn_commit, gdn_conv, gdn_heads, history_commit
from strata.gpu import gated_delta as gpu
from strata.gpu.error_word import where
from tests import test_op_gated_delta as ops
from tests.canonical import gated_delta as reference
from tests.canonical.call import LAYER, Slot, assert_same, check_guards, guarded, plain, room, spiked
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


@pytest.mark.parametrize("s", ops.SIZES, ids=ops.NAMES)
@pytest.mark.parametrize("T", [1, 3])
def test_convolution_and_delta_rule_in_one(s, T):
    rng = np.random.default_rng(T)
    w = ops.Window.make(rng, s, T)
    qkv, history, taps = spiked(rng, T, s.channels), spiked(rng, s.taps - 1, s.channels), plain(rng, s.taps, s.channels)
    w.mixed = reference.conv(history, qkv, taps)
    y, _, g = w.reference()
    past, state = Slot(guarded(history)), Slot(guarded(w.state))
    conv, decay, beta = room(T, s.channels), guarded(w.alpha), guarded(w.beta)
    out, error = room(T, s.Hv, s.dv), ErrorWord()
    areas = [ActivationArea(T, s.Hv * s.dv, group) for group in gpu.quantises(T, s.Hv, s.dv)]
    arrived = guarded(np.zeros(gpu.arrived_bytes(s.Hv, s.dv) // 4, np.int32))
    rest = [address(x) for x in (decay, beta, w.z, w.a, w.dt, w.norm, state, out)]
    run_all(
        gpu.gdn_window(
            address(qkv),
            address(taps),
            address(past),
            s.taps,
            address(conv),
            *rest,
            T,
            s.Hk,
            s.Hv,
            s.dk,
            s.dv,
            s.channels,
            ops.EPS,
            error.address,
            where(0, LAYER),
            [area.places for area in areas],
            address(arrived),
        ),
        reverse=T > 1,
    )
    assert error.reported is None
    assert not arrived.any(), "counters are as they were"
    for area in areas:
        codes, scales, _ = arithmetic.quantise(out.reshape(T, -1), area.group)
        assert_same(area.codes, codes)
        assert_same(area.scales, scales)
        assert_same(area.sums, codes.astype(np.int32).reshape(T, -1, 16).sum(-1, dtype=np.int32))
    for found, wanted, what in (
        (conv, w.mixed, "conv"),
        (decay, g.decay, "decay"),
        (beta, g.beta, "beta"),
        (out, y, "y"),
        (past.array, history, "history"),
        (state.array, w.state, "state"),
    ):
        check_guards(found)
        assert_same(found, wanted, what)
