"""strata bench gpu: what is counted, replayed routing on the device, and the command as a whole.

Kernels run on the CPU through the shim, or on a GPU with STRATA_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from strata import gpu_speed, synth
from strata.base.errors import BadArgument, StrataError
from strata.cli import app
from strata.gpu import device, route
from strata.gpu.launch import Launch
from strata.gpu.speed import SOURCE, copy_blocks, replay_logits
from strata.gpu_speed import Effort, distinct_experts, op_bytes, op_name, open_backend, repeated, replayed
from strata.planner.machine import Machine
from strata.replay import uniform_ids
from tests.canonical import router as reference
from tests.canonical.call import assert_same, check_guards, guarded, room
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, address, needs_compiler, run_all
from tests.gpu.shared_model import L, path

__all__ = ["path"]
LEAST = Effort(nodes=1, rounds=1, copy_bytes=1 << 16, windows=1)


def new_device():
    return device.CupyDevice() if ON_DEVICE else HostDevice()


@pytest.fixture(scope="module")
def backend(tiny_path):
    with open_backend(tiny_path, 256, "f16", new_device()) as made:
        yield made


# ---- kernels


@needs_compiler
@pytest.mark.parametrize(("E", "K"), [(40, 10), (512, 128), (8, 7)])
@pytest.mark.parametrize("moves", [True, False])
def test_replayed_logits(E, K, moves):
    """A router that reads them takes the experts of the table, with weights that hardly differ."""
    n, L, T = 7, 3, 4
    table = guarded(uniform_ids(n, L, E, K))
    at, logits, arrived = guarded(np.array([5], np.uint64)), room(L, T, E), guarded(np.zeros(1, np.uint32))
    run_all(replay_logits(address(table), address(at), n, L, T, K, E, address(logits), address(arrived), moves),
            reverse=moves)  # fmt: skip
    for layer in range(L):
        for t in range(T):
            ids, weights = reference.route(logits[layer, t], K, 1)
            assert_same(ids, table[(5 + t) % n, layer])
            assert weights == pytest.approx(np.full(K, 1 / K), rel=0.1)
            assert len(np.unique(logits[layer, t])) == E, "equal ones would take a router longer"
    assert int(at[0]) == (2 if moves else 5) and int(arrived[0]) == 0
    for a in (at, logits, arrived):
        check_guards(a)


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 255, 4096, 5000])
def test_copies(blocks):
    source = guarded(np.random.default_rng(blocks).integers(0, 256, 16 * blocks, dtype=np.uint8))
    target = room(16 * blocks, dtype="uint8")
    run_all(copy_blocks(address(source), address(target), 16 * blocks))
    assert_same(target, source)
    check_guards(target)


# ---- counts


def test_distinct_experts_by_hand():
    table = np.array([[[0, 1]], [[1, 2]], [[3, 1]], [[0, 1]]], np.int32)
    assert distinct_experts(table, 1, 4) == 2 and distinct_experts(table, 2, 2) == 3
    assert distinct_experts(table, 2, 4) == 3, "windows start over behind the table"


def test_repeated_launches_join_between_repeats():
    one = Launch(SOURCE, "copy_blocks", (1, 1, 1), (32, 1, 1), (), fork=0)
    forked = [dataclasses.replace(one, fork=2, branch=b) for b in range(2)]
    assert [(x.fork, x.branch) for x in repeated([*forked, one], 2)] == [(2, 0), (2, 1), (0, 0), (4, 0), (4, 1), (0, 0)]


@needs_compiler
def test_bytes_of_ops(backend):
    g, program = backend.geometry, backend.programs.windows[2]
    by_name = {(op_name(op), op.layer): op_bytes(backend, program, op, 100, 3.0) for op in program.ops}
    ops = {(op_name(op), op.layer): op for op in program.ops}
    gguf = backend.weights.tensors.gguf
    layer = g.gdn_layers[1]
    names = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")
    weights = sum(gguf.info(f"blk.{layer}.{n}.weight").n_bytes for n in names)
    assert by_name[" ".join(names), layer] == weights
    state = 4 * g.gdn_value_heads * g.gdn_key_dim * g.gdn_value_dim
    vectors = [gguf.info(f"blk.{layer}.{n}").shape for n in ("ssm_a", "ssm_dt.bias", "ssm_norm.weight")]
    assert by_name["gdn_heads", layer] == state + sum(4 * int(np.prod(shape)) for shape in vectors)
    shared = sum(gguf.info(f"blk.{layer}.ffn_{n}_shexp.weight").n_bytes for n in ("gate", "up", "down"))
    routed = sum(gguf.info(f"blk.{layer}.ffn_{n}_exps.weight").n_bytes for n in ("gate", "up", "down"))
    assert by_name["experts", layer] == shared + 3 * routed / g.E
    attend = ops["qsa_attend", g.qsa_layers[0]]
    cells = min(102, attend.consts["budget"] * attend.consts["block"])
    assert by_name["qsa_attend", g.qsa_layers[0]] == cells * 2 * g.Hkv * g.dh * 2
    total = sum(by_name.values())
    assert total < sum(t.n_bytes for t in gguf.tensors.values()) + 10 * state * g.L


# ---- replayed windows


@needs_compiler
@pytest.mark.parametrize(("T", "together"), [(1, True), (1, False), (2, False)])
def test_windows_take_the_experts_of_the_table(backend, monkeypatch, T, together):
    """Also where the product of logits chooses: both forms do what they do when they serve."""
    monkeypatch.setattr(route, "ROUTED_ROWS", int(together))
    g = backend.geometry
    table = uniform_ids(3, g.L, g.E, g.K, seed=4)
    tokens, state = np.array([5, 6], np.int32)[:T], backend.new_state()
    real = backend._graphs[id(backend.programs.windows[T])]
    with replayed(backend, table, [T]) as rewind:
        lowering = backend._graphs[id(backend.programs.windows[T])].lowering
        kernels = [one.kernel.partition("<")[0] for one in lowering.launches]
        assert (kernels.count("route"), kernels.count("router")) == ((g.L, 0) if together else (0, g.L))
        for step in range(3):
            backend.window(state, tokens, (-1, -1))
            assert_same(backend.read("moe.ids")[:T], table[(step * T + np.arange(T)) % 3, g.L - 1])
        rewind()
        backend.window(state, tokens, (-1, -1))
        assert_same(backend.read("moe.ids")[:T], table[:T, g.L - 1])
    assert backend._graphs[id(backend.programs.windows[T])] is real
    with pytest.raises(BadArgument, match="table"), replayed(backend, table[:, :1]):
        pass


# ---- the command


def command(*more: str) -> list[str]:
    return ["bench", "gpu", *more]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(gpu_speed, "DEFAULT_EFFORT", LEAST)
    if not ON_DEVICE:
        monkeypatch.setattr(device, "CupyDevice", lambda index: HostDevice())


@needs_compiler
def test_a_file_from_the_command_line(quick, path):
    words = command("--model", str(path), "--rows", "1,2", "--context", "256", "--position", "40", "--routing",
                    "uniform", "--card", "RTX 4090")  # fmt: skip
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {"command", "model", "device", "layers", "position", "copy_gbps", "node_us", "weight_bytes", "routing",
            "card", "windows", "load_s"} <= set(found)  # fmt: skip
    assert found["card"]["name"] == "RTX 4090" and found["position"] == 40
    assert [w["rows"] for w in found["windows"]] == [1, 2]
    for w in found["windows"]:
        assert set(w) == {f.name for f in dataclasses.fields(gpu_speed.WindowSpeed)}
        assert w["us"] > 0 and w["wall_us"] > 0 and w["nodes"] > 20 * found["layers"] == 20 * L
        assert w["card_us"] == pytest.approx(w["n_bytes"] / 1008e3 + w["nodes"] * found["node_us"])
        assert w["head_us"] > 0 and w["head_nodes"] >= 5 and w["head_card_us"] > w["head_bytes"] / 1008e3 > 0
        ops = {op["name"]: op for op in w["ops"]}
        known = {"experts", "router", "gdn_heads", "qsa_attend", "embed", "attn_qkv attn_gate ssm_alpha ssm_beta"}
        assert known <= set(ops)
        assert all(op["us"] > 0 and op["nodes"] > 0 for op in ops.values())
    one, two = found["windows"]
    assert two["distinct"] > one["distinct"] and two["n_bytes"] > one["n_bytes"]


@needs_compiler
def test_what_a_reader_sees(quick, path):
    words = ("--rows", "1", "--context", "256", "--position", "8")
    done = CliRunner().invoke(app, command("--model", str(path), *words))
    assert done.exit_code == 0, done.output
    for text in ("device", "routing", "window of 1 row", "distinct experts", "of the copy", "RTX 5070", "experts"):
        assert text in done.stdout, text


def test_refusals(quick, tiny_path):
    for words, text in ((("--rows", "9"), "rows"), (("--rows", "x"), "rows"), (("--routing", "own"), "routing"),
                        (("--card", "nothing"), "card"), (("--position", "300", "--context", "256"), "position"),
                        (("--layers", "0"), "layers")):  # fmt: skip
        done = CliRunner().invoke(app, command("--model", str(tiny_path), *words))
        assert done.exit_code == 2 and text in done.stderr, (words, done.output)


@pytest.mark.parametrize("which", ["gpu", "experts", "draft --layers 2 --device cuda"])
def test_without_a_gpu_no_model_is_made(monkeypatch, which):
    """A made model takes minutes and gigabytes."""

    def none(index: int) -> None:
        raise StrataError("no driver")

    def made(*_: object) -> None:
        pytest.fail("a model was made")

    here = Machine.here
    monkeypatch.setattr(device, "CupyDevice", none)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *a, **k: replace(here(*a, **k), gpus=())))
    monkeypatch.setattr(synth, "memory_model", made)
    done = CliRunner().invoke(app, ["bench", *which.split()])
    assert done.exit_code == 1 and ("needs a GPU" in done.stderr or "is not there" in done.stderr), done.output


def test_shared_experts_are_not_measured_on_the_cpu():
    done = CliRunner().invoke(app, ["bench", "experts", "--device", "cpu", "--experts", "mapped"])
    assert done.exit_code == 2 and "needs a GPU" in done.stderr
