"""strata bench prefill of a made model: what is measured, that experts really move, and the command as a whole."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from strata.base.errors import BadArgument, StrataError
from strata.chunk_speed import measure_chunks, open_chunks, operations
from strata.cli import app
from strata.cli.bench.made_chunks import text
from strata.gpu import expert_stream
from strata.gpu.gemm.rate import tensor_rate
from strata.replay import uniform_ids
from tests.gpu.run_on_cpu import ON_DEVICE, address, needs_compiler, run_all
from tests.test_gpu_backend import new_device

ROWS, LAYERS = 256, 1


@needs_compiler
def test_operands_of_the_rate_are_used():
    out = np.zeros(2, np.int32)
    sums = []
    for rounds in (1, 2):
        run_all(tensor_rate(2, rounds, address(out)))
        sums.append(out.copy())
    assert sums[0][0] == sums[0][1] != 0 and sums[0][0] != sums[1][0]


@needs_compiler
def test_a_chunk_with_experts_in_either_place(tiny_path, monkeypatch):
    """The same chunk from slots and over the link; all experts go over it, and times and floors belong together."""
    monkeypatch.setattr(expert_stream, "STAGE_BYTES", 9 * 41 * 1024)
    done = []
    with open_chunks(tiny_path, 512, "f16", ROWS, ("resident", "ram"), new_device(), layers=LAYERS) as backend:
        g = backend.geometry
        ids = uniform_ids(ROWS, g.L, g.E, g.K)
        found = measure_chunks(backend, ids, rows=[ROWS], repeats=1, rate_rounds=1,
                               on_progress=lambda *p: done.append(p))  # fmt: skip
        ops = operations(backend, ROWS)
        with pytest.raises(BadArgument, match="experts on the device"):
            measure_chunks(backend, ids, rows=[ROWS], repeats=1, rate_rounds=1)  # they are in memory now
        for wrong in ({"rows": [2 * ROWS]}, {"rows": [ROWS], "places": ("ram", "resident")}):
            with pytest.raises(BadArgument):
                measure_chunks(backend, ids, **wrong)
        experts = sum(layer.blob_bytes for layer in backend.slots.experts.layers) * g.E
        assert not any(backend.slots.resident(l).any() for l in range(g.L))
    resident, ram = found.chunks
    assert done == [(1, 2), (2, 2)] and found.layers == LAYERS and found.link_gbps > 0 and found.tensor_tops > 0
    assert (resident.where, resident.copy_bytes, resident.wait_ms, resident.copy_ms) == ("resident", 0, 0, 0)
    assert ram.where == "ram" and ram.copy_bytes >= experts and ram.copy_ms > 0
    assert ram.link_floor_ms == pytest.approx(ram.copy_bytes / found.link_gbps / 1e6)
    for c in found.chunks:
        assert c.operations == ops > 0 and c.tensor_floor_ms > 0 and c.gpu_ms > 0
        assert c.least_ms <= c.ms <= c.most_ms and c.tokens_per_s == pytest.approx(1e3 * ROWS / c.ms)
        assert c.host_ms <= c.ms and c.floor_share > 0
    assert json.loads(json.dumps(found.record()))["chunks"][1]["where"] == "ram"
    lines = text(found)
    rows = [line.split()[:2] for line in lines if line.startswith(("resident", "ram"))]
    assert rows == [["resident", "256"], ["ram", "256"]]


@needs_compiler
def test_experts_in_memory_that_is_not_pinned(tiny_path, monkeypatch):
    """All come through pinned pieces, none by a copy of its own; ops are those of the program."""
    monkeypatch.setattr(expert_stream, "STAGE_BYTES", 9 * 41 * 1024)
    with open_chunks(tiny_path, 512, "f16", ROWS, ("pageable",), new_device(), layers=LAYERS) as backend:
        g = backend.geometry
        ids = uniform_ids(ROWS, g.L, g.E, g.K)
        found = measure_chunks(backend, ids, rows=[ROWS], places=("pageable",), repeats=1, rate_rounds=1, ops=True)
        experts = sum(layer.blob_bytes for layer in backend.slots.experts.layers) * g.E
        kinds = {op.kind for op in backend.programs.chunk.ops}
    (one,) = found.chunks
    assert one.where == "pageable" and one.copy_bytes >= experts and one.copy_ms == 0 < one.ms
    assert set(found.ops_ms) == {"pageable"} and set(found.ops_ms["pageable"]) == kinds
    assert all(ms > 0 for ms in found.ops_ms["pageable"].values())
    lines = text(found)
    assert any(line.startswith("pageable") for line in lines) and any(line.startswith("  experts ") for line in lines)
    with (
        pytest.raises(BadArgument, match="places of experts"),
        open_chunks(tiny_path, 512, "f16", ROWS, ("ram", "pageable"), new_device()),
    ):
        pass


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--made", "Q4_K"], "types of the experts cannot be read"),
        (["--made", "Q4_K/IQ4_NL", "--chunks", "300"], "--chunks cannot be read"),
        (["--made", "Q4_K/IQ4_NL", "--chunks", "16384"], "--chunks cannot be read"),
        (["--made", "Q4_K/IQ4_NL", "--where", "disk"], "--where is unknown"),
        (["--made", "Q4_K/IQ4_NL", "-r", "0"], "--repeat is out of range"),
        (["--made", "Q4_K/IQ4_NL", "-m", "x.gguf"], "--model does nothing with --made"),
    ],
)
def test_what_the_command_refuses(args, message):
    done = CliRunner().invoke(app, ["bench", "prefill", *args])
    assert done.exit_code != 0 and message in done.output


@pytest.mark.skipif(ON_DEVICE, reason="describes a machine without a GPU")
def test_a_made_model_needs_a_gpu():
    done = CliRunner().invoke(app, ["bench", "prefill", "--made", "Q4_K/IQ4_NL", "--layers", "1"])
    assert done.exit_code != 0 and isinstance(done.exception, StrataError | SystemExit) and "GPU" in done.output
