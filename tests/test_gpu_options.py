"""Options of a load on a GPU: which device, what does not fit, what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from typer.testing import CliRunner

import strata
from strata import loading
from strata.base.errors import BadArgument, DoesNotFit, NoDevice, StrataError
from strata.cli import app
from strata.gpu.presence import cuda_problem
from strata.planner import needs
from strata.planner.cuda_context import context_bytes
from strata.planner.machine import Machine
from tests.gpu.loaded import lend_gpu
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler

shimmed = pytest.mark.skipif(ON_DEVICE, reason="describes a machine that is not here")


@shimmed
@needs_compiler
def test_auto_takes_a_gpu_and_vram_gib_caps_it(tiny_path, monkeypatch):
    opened = lend_gpu(monkeypatch)
    with strata.load(tiny_path, context=256, vram_gib=2, device="auto") as model:
        assert model.plan.device == "cuda:0" and model.plan.total_bytes("vram") <= 2 << 30
        (device,) = opened
        driver = context_bytes(128) + needs.MODULE_BYTES
        assert device.limit_bytes <= (2 << 30) - driver
        assert strata.plan(tiny_path, context=256, vram_gib=2, machine=Machine.describe(gpu="RTX 4090")).fits


@shimmed
def test_a_card_without_room_is_refused_with_numbers_or_auto_takes_the_cpu(tiny_path, monkeypatch, caplog):
    opened = lend_gpu(monkeypatch)
    loading._warn_once.cache_clear()
    for device in ("cuda", "cuda:0"):
        with pytest.raises(DoesNotFit) as refused:
            strata.load(tiny_path, context=256, device=device, vram_gib=0.4)
        text = str(refused.value)
        assert "does not fit" in text and "MiB free" in text and "MiB needed" in text
        assert 'device="cpu"' in refused.value.advice and "slots" not in refused.value.advice
        with pytest.raises(DoesNotFit, match="does not fit") as every:
            strata.load(tiny_path, context=256, device=device, vram_gib=0.4, slots="all")
        assert "MiB free" in every.value.found and 'device="cpu"' in every.value.advice
    with pytest.raises(DoesNotFit, match="MiB needed, 410 MiB free"):  # what was asked for does not become the CPU
        strata.load(tiny_path, context=256, device="auto", vram_gib=0.4)
    opened = lend_gpu(monkeypatch, vram_gib=0.5)
    with caplog.at_level(logging.WARNING, "strata"):
        for _ in range(2):
            with strata.load(tiny_path, context=256, threads=1, device="auto") as model:
                assert model.plan.device == "cpu"
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("described GPU is here, but this load computes on the CPU") and "MiB" in said
    assert opened == []


@shimmed
def test_without_cupy_auto_says_so_once_and_an_explicit_device_raises(tiny_path, monkeypatch, caplog):
    lend_gpu(monkeypatch)
    loading._warn_once.cache_clear()
    lacking = StrataError("the GPU backend needs CuPy", found="no module", advice="pip install 'strata[cuda12]'")
    monkeypatch.setattr(loading, "device_problem", lambda gpu: lacking)
    with caplog.at_level(logging.WARNING, "strata"):
        for _ in range(2):
            strata.load(tiny_path, context=256, threads=1, device="auto").close()
    (said,) = [r.getMessage() for r in caplog.records]
    assert "RTX 4090" in said and "CuPy" in said and "pip install" in said
    with pytest.raises(StrataError, match="needs CuPy"):
        strata.load(tiny_path, context=256, device="cuda:0")


@shimmed
def test_a_plain_machine_says_nothing(tiny_path, monkeypatch, caplog):
    lend_gpu(monkeypatch)
    here = loading.Machine.here
    monkeypatch.setattr(loading.Machine, "here", classmethod(lambda cls, *a, **k: replace(here(*a, **k), gpus=())))
    load = partial(strata.load, tiny_path, context=256, threads=1)
    with caplog.at_level(logging.WARNING, "strata"), load(device="auto") as model:
        assert model.plan.device == "cpu" and caplog.records == []
    for device in ("cuda", "cuda:1"):
        with pytest.raises(NoDevice, match="is not there") as refused:
            strata.load(tiny_path, context=256, device=device)
        assert refused.value.found == "GPUs: 0"
    for asked in ({"vram_gib": 4}, {"slots": 8}, {"experts": "pinned"}):
        with pytest.raises(NoDevice, match="needs a GPU"):
            strata.load(tiny_path, context=256, device="auto", **asked)
        with pytest.raises(BadArgument, match="needs a GPU"):
            strata.load(tiny_path, context=256, device="cpu", **asked)


@shimmed
def test_more_slots_than_experts_is_said(tiny_path, monkeypatch):
    lend_gpu(monkeypatch)
    with strata.load(tiny_path, context=256, device="cuda", slots=10**6) as model:
        assert any("more would stay empty" in note for note in model.plan.notes)


@shimmed
@pytest.mark.parametrize("asked", [{"slots": 8}, {"slots": "all"}, {"pcie_share": 0.5}, {"experts": "pinned"}])
def test_what_needs_a_gpu_is_not_forgotten_on_the_way_to_the_cpu(tiny_path, monkeypatch, asked):
    lend_gpu(monkeypatch)
    with pytest.raises(DoesNotFit):
        strata.load(tiny_path, context=256, device="auto", vram_gib=0.01, **asked)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:\u00b2", "CPU", 0, None])
def test_unknown_devices_are_refused(tiny_path, device):
    for call in (strata.load, strata.plan):
        with pytest.raises(BadArgument, match="unknown device"):
            call(tiny_path, device=device)
    with pytest.raises(BadArgument, match="vram_gib"):
        strata.load(tiny_path, vram_gib=-1)


def test_numbers_of_numpy_are_numbers(tiny_path):
    for number in (np.float32(0.5), np.float64(0.5), np.int64(1), Fraction(1, 2)):
        options = loading.LoadOptions(vram_gib=number, pcie_share=number)
        options.validate()
        assert type(options.vram_gib) is float and options.pcie_share == float(number)
    for number in (np.float32("nan"), np.inf, -0.5, True, np.True_, "0.5"):
        with pytest.raises(BadArgument, match="pcie_share"):
            loading.LoadOptions(pcie_share=number).validate()
    with pytest.raises(BadArgument, match="profile is empty"):
        strata.load(tiny_path, profile="")


def test_an_old_card_is_a_problem():
    problem = cuda_problem(0, (6, 1))
    assert "too old" in str(problem) and problem.found == "compute capability 6.1"


@needs_compiler
def test_a_load_that_fails_frees_the_device(tiny_path, monkeypatch):
    opened = lend_gpu(monkeypatch)
    if ON_DEVICE:
        pytest.skip("needs a device that reports")
    monkeypatch.setattr(loading, "GpuBackend", lambda *a, **k: (_ for _ in ()).throw(DoesNotFit("no")))
    with pytest.raises(DoesNotFit):
        strata.load(tiny_path, context=256, device="cuda")
    (device,) = opened
    assert device._kept == []


@shimmed
def test_commands_take_a_device(tiny_path, monkeypatch):
    lend_gpu(monkeypatch)
    runner, model = CliRunner(), ["--model", str(tiny_path), "--context", "256"]
    refused = runner.invoke(app, ["run", "x = ", *model, "--device", "cuda", "--vram-gib", "0.4"])
    assert refused.exit_code == 1 and "does not fit" in refused.output
    unknown = runner.invoke(app, ["run", "x = ", *model, "--device", "tpu"])
    assert unknown.exit_code != 0 and "unknown device; found 'tpu'" in unknown.output
    done = runner.invoke(app, ["run", "x = ", *model, "--device", "cpu", "--threads", "1", "-n", "2"])
    assert done.exit_code == 0 and done.stdout
    for verb in (["run"], ["chat"], ["score"], ["bench", "decode"]):
        helped = runner.invoke(app, [*verb, "--help"]).output
        assert "--device" in helped and "--vram-gib" in helped
