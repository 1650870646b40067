"""Gated DeltaNet on the GPU's code: the tests of the CPU ops."""

import pytest

from strata.cpu.gated_delta import gdn_commit, gdn_conv, gdn_heads, history_commit
from strata.gpu import gated_delta as gpu
from tests import test_op_gated_delta as ops
from tests.gpu.as_cpu_op import gpu_call
from tests.gpu.run_on_cpu import needs_compiler
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
