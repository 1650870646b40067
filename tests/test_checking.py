"""Checking a GPU against the CPU: equal backends pass, planted differences are named, without a GPU there is advice.

Kernels run on the CPU through the shim, or on a GPU with STRATA_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from strata import checking
from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.base.errors import BadArgument, StrataError
from strata.checking import Comparison, ulps_apart, window_sizes
from strata.cli import app
from strata.cpu.backend import CpuBackend
from strata.gpu import device
from strata.gpu.backend import GpuBackend
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler

TOKENS = np.array([11, 7, 1503, 42, 42, 9], np.int32)


def new_device():
    return device.CupyDevice() if ON_DEVICE else HostDevice()


@pytest.fixture(scope="module")
def pair(tiny_path):
    gguf = GgufFile(tiny_path)
    g = read_geometry(gguf)
    parts = (Tensors(gguf), g, expert_layout(gguf, g.L), build_programs(g, 256, "f16"))
    cpu = CpuBackend(*parts, threads=1)
    gpu = GpuBackend(*parts, new_device())
    yield cpu, gpu
    cpu.close()
    gpu.close()


class Planted:
    """A byte of a matrix on the device with another value while the block runs."""

    def __init__(self, gpu: GpuBackend, address: int, flip: int):
        self._device, self._at, self._flip = gpu.device, address, flip

    def _swap(self) -> None:
        byte = np.empty(1, np.uint8)
        self._device.download(self._at, byte)
        self._device.upload(self._at, byte ^ np.uint8(self._flip))

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()


# ---- whole checks


@needs_compiler
def test_equal_backends(pair):
    report = Comparison(*pair).run(TOKENS[:3])
    ops = [len(pair[0].programs.windows[T].ops) for T in (1, 2)]
    assert report.difference is None and report.windows == (1, 2) and report.ops == sum(ops)
    assert report.values > 200 * sum(ops)
    assert "no difference" in str(report) and pair[1].device.name in str(report)


class Counted:
    """The device with its round trips counted: each download, and each wait, is one."""

    def __init__(self, device):
        self._device, self.trips = device, 0

    def __getattr__(self, name):
        return getattr(self._device, name)

    def download(self, address, array):
        self.trips += 1
        self._device.download(address, array)

    def synchronize(self):
        self.trips += 1
        self._device.synchronize()


@needs_compiler
def test_a_window_takes_few_round_trips(pair, monkeypatch):
    """One for each buffer of each op would be hundreds; what is read of the state behind a window stays."""
    cpu, gpu = pair
    counted = Counted(gpu.device)
    monkeypatch.setattr(gpu, "device", counted)
    ops, state = len(cpu.programs.windows[1].ops), len(list(cpu.new_state().parts()))
    assert Comparison(cpu, gpu).run(TOKENS[:1]).difference is None
    assert ops > 150 and counted.trips < 12 + state


@needs_compiler
def test_a_small_tape_records_the_same(pair, monkeypatch):
    from strata.gpu import op_by_op

    cpu, gpu = pair
    monkeypatch.setattr(op_by_op, "TAPE_BYTES", 1)
    monkeypatch.setattr(gpu.op_by_op, "_tape", (0, 0))
    whole = Comparison(cpu, gpu).run(TOKENS[:1])
    assert whole.difference is None and whole.ops == len(cpu.programs.windows[1].ops)


@needs_compiler
def test_what_the_device_alone_refuses_is_placed(pair):
    """A weight that makes the device meet what is not finite: the first op with other values is named."""
    cpu, gpu = pair
    with Planted(gpu, gpu.weights.matrix("blk.3.ffn_gate_inp.weight").address + 1, 0x7F):
        found = Comparison(cpu, gpu).run(TOKENS[:1]).difference
    assert (found.op, found.layer, found.buffer) == ("linear", 3, "moe.logits")


@needs_compiler
@pytest.mark.parametrize(
    ("tensor", "flip", "op", "buffer"),
    [
        ("blk.3.ffn_gate_inp.weight", 1, "linear", "moe.logits"),  # the lowest bit of one weight
        ("blk.3.attn_q.weight", 1, "linear", "qsa.q_gate"),
        ("output_hc_down.weight", 128, "head", "logits"),
    ],
)
def test_one_changed_weight_is_named(pair, tensor, flip, op, buffer):
    cpu, gpu = pair
    with Planted(gpu, gpu.weights.matrix(tensor).address, flip):
        report = Comparison(cpu, gpu).run(TOKENS[:1])
    found = report.difference
    assert (found.op, found.buffer, found.rows, found.position) == (op, buffer, 1, 0)
    assert found.layer == (3 if op == "linear" else -1)
    assert found.device != found.cpu and found.ulps > 0
    assert f"op {op}" in str(report) and f"{buffer}[0, " in str(report) and "ulp apart" in str(report)
    if op == "linear" and buffer == "moe.logits":
        assert found.index == (0, 0), "row 0 of the matrix makes logit 0"


@needs_compiler
def test_a_difference_of_the_fused_graph_alone(pair, monkeypatch):
    """Only the run as one graph writes other streams."""
    cpu, gpu = pair
    real = gpu.window

    def window(state, tokens, previous, after_op=None):
        real(state, tokens, previous, after_op)
        if after_op is None:
            gpu.device.upload(gpu.memory.address("streams") + 8, np.array([0.5], np.float32))

    monkeypatch.setattr(gpu, "window", window)
    found = Comparison(cpu, gpu).run(TOKENS[:1]).difference
    assert (found.op, found.buffer, found.index) == ("graph of the window", "streams", (0, 2)) and found.device == 0.5


@needs_compiler
def test_a_difference_that_only_the_state_shows(pair, monkeypatch):
    cpu, gpu = pair
    layer = gpu.geometry.gdn_layers[-1]
    real = gpu.commit

    def commit(state, n_keep):
        real(state, n_keep)
        gpu.device.upload(state.addresses_of[f"gdn.{layer}.state"] + 4, np.array([3.0], np.float32))

    monkeypatch.setattr(gpu, "commit", commit)
    found = Comparison(cpu, gpu).run(TOKENS[:1]).difference
    assert (found.op, found.layer, found.buffer, found.index) == ("gdn_commit", layer, f"gdn.{layer}.state", (0, 0, 1))


# ---- parts


def test_window_sizes():
    assert window_sizes(1) == [1] and window_sizes(5) == [1, 2, 2] and window_sizes(40) == [*range(1, 9), 4]


@given(st.floats(width=32, allow_nan=False), st.integers(0, 1000))
def test_ulps_are_steps_between_numbers(x, n):
    a = b = np.float32(x)
    for _ in range(min(n, 5)):
        b = np.nextafter(b, np.float32(np.inf))
    steps = min(n, 5) if np.isfinite(b) and (a > 0 or b < 0) else None
    if steps is not None:
        assert ulps_apart(a, b) == ulps_apart(b, a) == steps


def test_ulps_of_zeros_and_nan():
    zero, least = np.float32(0), np.float32(1e-45)
    assert ulps_apart(zero, -zero) == 1 and ulps_apart(-least, least) == 3 and ulps_apart(zero, zero) == 0
    assert ulps_apart(np.float32("nan"), zero) is None


# ---- from the command line


@needs_compiler
def test_from_the_command_line(tiny_path, monkeypatch):
    if not ON_DEVICE:
        monkeypatch.setattr(device, "CupyDevice", lambda index: HostDevice())
    done = CliRunner().invoke(app, ["run", "--check", "--model", str(tiny_path), "--threads", "1", "def"])
    assert done.exit_code == 0, done.output
    assert "values compared with the CPU bit by bit" in done.stdout and "no difference" in done.stdout
    assert "until both were ready" in done.stdout


def test_a_difference_is_a_failure(tiny_path, monkeypatch):
    found = checking.Difference("linear", 2, "y", (0, 7), 0.5, 0.25, 1 << 23, 4, 6)
    report = checking.Report("a device", (1, 2, 3, 4), 100, 5000, found)
    asked = {}
    monkeypatch.setattr(checking, "check", lambda path, prompt, **options: asked.update(options) or report)
    command = ["run", "--check", "--model", str(tiny_path), "--kv", "int8", "def"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1 and "op linear, layer 2, buffer y[0, 7]: 0.5 on the device, 0.25" in done.stdout
    assert asked["kv"] == "int8"
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 1 and json.loads(done.stdout)["difference"]["index"] == [0, 7]


def test_refusals(tiny_path, monkeypatch):
    def none(index):
        raise StrataError(f"CUDA device {index} cannot be used", found="no driver")

    monkeypatch.setattr(device, "CupyDevice", none)
    monkeypatch.setattr("strata.required_device.why_no_gpu", lambda machine: None)  # a driver, but CuPy fails
    with pytest.raises(StrataError, match="needs a GPU: CUDA device 0 cannot be used") as refused:
        checking.check(tiny_path, "def")
    text = str(refused.value)
    assert text.count("found ") == text.count("needed ") == 1 and "found no driver" in text, text
    done = CliRunner().invoke(app, ["run", "--check", "--model", str(tiny_path), "def"])
    assert done.exit_code == 1 and "needs a GPU" in done.stderr
    done = CliRunner().invoke(app, ["run", "--check", "--device", "cuda:3", "--model", str(tiny_path), "def"])
    assert done.exit_code == 1 and "CUDA device 3" in done.stderr
    done = CliRunner().invoke(app, ["run", "--check", "--device", "cpu", "--model", str(tiny_path), "def"])
    assert done.exit_code == 2 and "compares a GPU with the CPU" in done.stderr
    for prompt, options, match in (
        ("", {}, "prompt is empty"),
        (["a"], {}, "neither text nor"),
        ([5000], {}, "vocabulary"),
        ([1, 2], {"context": 3}, "longer"),
        ([1], {"kv": "f32"}, "kv"),
    ):
        with pytest.raises(BadArgument, match=match):
            checking.check(tiny_path, prompt, device=HostDevice(), **options)
