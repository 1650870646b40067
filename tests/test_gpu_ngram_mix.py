"""The n-gram block on the GPU's code: the tests of the CPU op, and the wait for rows."""

import numpy as np
import pytest

from strata.base.errors import BadArgument
from strata.base.program import NGRAM_FAILED, NGRAM_TIMEOUT
from strata.cpu.gated_delta import history_commit
from strata.cpu.ngram_mix import ngram_mix
from strata.gpu import gated_delta as gpu_delta
from strata.gpu import ngram_mix as gpu
from strata.gpu.error_word import where
from tests import test_op_ngram_mix as ops
from tests.canonical.call import LAYER, assert_same, check_guards, plain, room
from tests.gpu.as_cpu_op import gpu_call
from tests.gpu.run_on_cpu import ErrorWord, address, needs_compiler, run_all
from tests.test_op_ngram_mix import (  # noqa: F401
    test_a_window_is_its_rows_one_by_one,
    test_gates_of_vanishing_and_zero_scores,
    test_history_shifts_by_the_kept_rows,
    test_non_finite_values_are_reported_with_their_row,
    test_same_bits,
)

pytestmark = needs_compiler


def _mix(w, error, at, n):
    x, key, value, norm_key, norm_query, norm_conv, conv, history, rows, T, C, D, taps, dilation, advance, eps = w[:16]
    _mix.gates, _mix.T = np.full(T * C, np.nan, np.float32), np.array([T], np.int64)
    weights = gpu.NgramWeights(norm_key, norm_query, norm_conv, conv)
    chunk = address(_mix.T) if advance else 0
    return gpu.ngram_mix(
        x, key, value, weights, history, rows, address(_mix.gates), chunk, T, C, D, taps, dilation, eps, error, at
    )


ADAPTERS = {ngram_mix: _mix, history_commit: lambda w, error, at, n: gpu_delta.history_commit(*w)}


@pytest.fixture(autouse=True)
def on_gpu_code(monkeypatch):
    monkeypatch.setattr(ops, "Call", gpu_call(ADAPTERS))


@pytest.mark.parametrize("D", [256, 700, 2560, 2600])
@pytest.mark.parametrize("T", [1, 4])
def test_widths_from_registers_and_beyond(D, T):
    """The real width is the widest whose values stay in registers; taps and dilation are the real ones."""
    case = ops.Case.make(np.random.default_rng(D + T), T, 2, D, 4, 3)
    (x, rows), (got_x, got_rows, _, call) = case.wanted(), case.run()
    assert call.reported is None
    assert_same(got_rows, rows, "rows")
    assert_same(got_x, x, "x")


def test_the_kernel_goes_by_the_width():
    def kernel(D: int) -> str:
        w = gpu.NgramWeights(0, 0, 0, 0)
        return gpu.ngram_mix(0, 0, 0, w, 0, 0, 0, 0, 1, 4, D, 4, 3, 1e-6, 0, np.uint64(0))[0].kernel

    names = [kernel(D) for D in (255, 256, 2560, 2561)]
    assert names == ["ngram_gate", "ngram_gate_near", "ngram_gate_near", "ngram_gate"]


@pytest.mark.parametrize("n", [4, 4092, 4096, 4100, 5 * 2560])
def test_rows_are_copied_by_several_blocks(n):
    ticket, staged = np.array([3, 3], np.int64), plain(np.random.default_rng(n), n)
    for reverse in (False, True):
        rows, error = room(n), ErrorWord()
        places = (address(ticket), address(staged), address(rows))
        launches = gpu.ngram_wait(*places, n, 10**9, error.address, where(0, LAYER))
        assert launches[0].grid == (-(-n // gpu.WAIT_BLOCK_VALUES), 1, 1)
        run_all(launches, reverse=reverse)
        assert error.reported is None
        check_guards(rows)
        assert_same(rows, staged)


def test_rows_in_pieces_that_are_not_whole_are_refused():
    with pytest.raises(BadArgument, match="n-gram rows"):
        gpu.ngram_wait(64, 64, 64, 10, 1, 64, np.uint64(0))
    with pytest.raises(BadArgument, match="n-gram rows"):
        gpu.ngram_wait(64, 68, 64, 8, 1, 64, np.uint64(0))


@pytest.mark.parametrize(
    ("done", "reported"),
    [(5, None), (-5, (NGRAM_FAILED, LAYER, 0)), (4, (NGRAM_TIMEOUT, LAYER, 20)), (0, (NGRAM_TIMEOUT, LAYER, 20))],
)
def test_wait_and_copy(done, reported):
    ticket, staged = np.array([5, done], np.int64), plain(np.random.default_rng(0), 3, 700)
    rows, error = room(3, 700), ErrorWord()
    run_all(
        gpu.ngram_wait(
            address(ticket), address(staged), address(rows), 2100, 20_000_000, error.address, where(0, LAYER)
        )
    )
    assert error.reported == reported
    assert_same(rows, staged if reported is None else np.zeros_like(staged))
