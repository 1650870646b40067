"""Hyper-connections on the GPU's code: the tests of the CPU ops, and what only the GPU fuses."""

import numpy as np
import pytest

from strata.base import arithmetic
from strata.base.program import NOT_FINITE
from strata.cpu.hyper_connection import hc_add, hc_mix, hc_norm, hc_squeeze
from strata.gpu import hyper_connection as gpu
from strata.gpu.activations import squeeze
from strata.gpu.error_word import where
from tests import test_op_hyper_connection as ops
from tests.canonical import hyper_connection as reference
from tests.canonical.call import LAYER, assert_same, guarded, plain, room
from tests.gpu.as_cpu_op import gpu_call
from tests.gpu.run_on_cpu import ActivationArea, ErrorWord, address, needs_compiler, run_all
from tests.test_op_hyper_connection import (  # noqa: F401
    test_add,
    test_mix,
    test_mix_reports_non_finite_values,
    test_mix_without_strength_and_with_saturated_gates,
    test_norm,
    test_norm_of_a_head_starts_at_its_row,
    test_norm_of_zeros_and_of_huge_values,
    test_norm_reports_non_finite_rows,
    test_squeeze,
    test_squeeze_reports_non_finite_values,
)

pytestmark = needs_compiler


def _norm(w, error, at, n):
    x, weight, y, C, D, eps, first = w[:7]
    return gpu.hc_norm(x, weight, y, n // C, C, D, eps, error, at, first=first)


def _mix(w, error, at, n):
    normed, gate, u, C, D, inject, a = w[:7]
    return gpu.hc_mix(normed, gate, u, n // w[9], C, D, error, at, inject=inject, a=a)


ADAPTERS = {
    hc_norm: _norm,
    hc_squeeze: lambda w, error, at, n: squeeze(w[0], 1, w[1], w[2], error, at),
    hc_mix: _mix,
    hc_add: lambda w, error, at, n: gpu.hc_add(w[0], w[1], w[2], n, w[3], w[4]),
}


@pytest.fixture(autouse=True)
def on_gpu_code(monkeypatch):
    monkeypatch.setattr(ops, "Call", gpu_call(ADAPTERS))


@pytest.mark.parametrize(("C", "D"), [(4, 256), (3, 96), (2, 40)])
@pytest.mark.parametrize("T", [1, 3])
def test_add_and_norm_in_one(C, D, T):
    rng = np.random.default_rng(C + D + T)
    x, y, a, w = plain(rng, T, C, D), plain(rng, T, D), plain(rng, T, C), plain(rng, C, D)
    streams, out, error = guarded(x), room(T, C, D), ErrorWord()
    run_all(gpu.hc_norm(address(streams), address(w), address(out), T, C, D, 1e-6, error.address, where(0, LAYER),
                        y=address(y), a=address(a)), reverse=T > 1)  # fmt: skip
    wanted = reference.add(x, y, a)
    assert_same(streams, wanted)
    assert_same(out, reference.norm(wanted, w, 1e-6))
    assert error.reported is None


@pytest.mark.parametrize("groups", [(32,), (256,), (32, 256)])
@pytest.mark.parametrize(("T", "C"), [(1, gpu.STREAMS), (3, gpu.STREAMS), (2, 3)])
def test_mix_quantises(T, C, groups):
    D = 512
    rng = np.random.default_rng(9)
    normed, gate = plain(rng, T, C, D), plain(rng, T, C, D)
    u, error = room(T, D), ErrorWord()
    areas = [ActivationArea(T, D, g) for g in groups]
    run_all(gpu.hc_mix(address(normed), address(gate), address(u), T, C, D, error.address, where(0, LAYER),
                       quantised=tuple(a.places for a in areas)))  # fmt: skip
    wanted = reference.mix(normed, gate)
    assert_same(u, wanted)
    for area in areas:
        codes, scales, _ = arithmetic.quantise(wanted, area.group)
        assert_same(area.codes, codes)
        assert_same(area.scales, scales)
        assert_same(area.sums, codes.astype(np.int32).reshape(T, -1, 16).sum(-1, dtype=np.int32))


@pytest.mark.parametrize("T", [1, 2, 4])
@pytest.mark.parametrize("saturated", [False, True])
def test_mix_of_four_streams(T, saturated):
    C, D = gpu.STREAMS, 288
    rng = np.random.default_rng(5)
    normed, inject = plain(rng, T, C, D), plain(rng, T, C) * np.float32(8)
    gate = rng.uniform(-130, 130, (T, C, D)).astype(np.float32)
    if saturated:
        gate[-1, 2, 40:44] = 3e38, -3e38, 1e-42, -0.0
        inject[-1, 1] = -1e38
    u, a, error = room(T, D), room(T, C), ErrorWord()
    launches = gpu.hc_mix(address(normed), address(gate), address(u), T, C, D, error.address, where(0, LAYER),
                          inject=address(inject), a=address(a))  # fmt: skip
    assert [one.kernel for one in launches] == ["hc_mix_four"]
    run_all(launches, reverse=saturated)
    assert_same(u, reference.mix(normed, gate))
    assert_same(a, reference.strength(inject))
    assert error.reported is None


@pytest.mark.parametrize(("which", "bad"), [("gate", np.inf), ("gate", np.nan), ("normed", np.inf), ("inject", np.nan)])
def test_mix_of_four_streams_reports_its_row(which, bad):
    T, C, D = 3, gpu.STREAMS, 256
    rng = np.random.default_rng(6)
    values = {"normed": plain(rng, T, C, D), "gate": plain(rng, T, C, D), "inject": plain(rng, T, C)}
    values[which][(2, 3, 17)[: values[which].ndim]] = bad
    normed, gate, inject = (address(values[n]) for n in ("normed", "gate", "inject"))
    u, a, error = room(T, D), room(T, C), ErrorWord()
    run_all(gpu.hc_mix(normed, gate, address(u), T, C, D, error.address, where(0, LAYER), inject=inject, a=address(a)))
    assert error.reported == (NOT_FINITE, LAYER, 2)
