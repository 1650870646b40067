"""strata bench prefill: what it reports, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import strata
from strata import chunk_speed
from strata.cli import app
from strata.cli.bench.made_chunks import text
from strata.measure import Speed
from strata.planner import chunks
from tests.gpu.loaded import lend_gpu
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.test_gpu_lending import assert_own_buffers

RUNNER = CliRunner()


def test_report(tiny_path):
    args = ["bench", "prefill", "-m", str(tiny_path), "--tokens", "40,300", "-r", "1", "--ops", "--json"]
    done = RUNNER.invoke(app, [*args, "--device", "cpu", "--threads", "1"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["backend"], report["chunk_rows"], report["context"]) == ("cpu", 256, 512)
    assert [p["tokens"] for p in report["prompts"]] == [40, 300]
    for p in report["prompts"]:
        assert p["floor_ms"] is None and p["times_decode"] > 0
        assert p["ms"] == pytest.approx(1e3 * p["tokens"] / p["tokens_per_s"]["median"], rel=0.01)
    assert {"linear", "experts", "gdn_heads", "qsa_attend"} <= report["ops_ms"].keys()
    assert list(report["ops_ms"].values()) == sorted(report["ops_ms"].values(), reverse=True)


@needs_compiler
def test_a_gpu_adds_shares_and_floors(tiny_path, monkeypatch):
    """The columns of a made model, for the whole cells of prompts; experts without a slot cross the link."""
    lend_gpu(monkeypatch)
    monkeypatch.setattr(chunks, "KEPT_SLOTS", 0)
    if not ON_DEVICE:
        monkeypatch.setattr(chunk_speed, "RATE_BLOCKS", 2)
        monkeypatch.setattr(chunk_speed, "RATE_ROUNDS", 1)
    with strata.load(tiny_path, context=512, threads=1, device="cuda", slots=40) as model:
        assert_own_buffers(model)
        bench, backend = Speed(model, "a text of some words"), model._backend
        assert bench.prompt_parts([40], 1) is None, "no cell is full"
        parts = bench.prompt_parts([40, 300], 1)
        assert parts.layers == backend.geometry.L and parts.link_gbps > 0 and parts.tensor_tops > 0
        (found,) = parts.chunks
        assert (found.rows, found.where) == (256, "loaded") and found.copy_ms > 0
        missing = sum(backend.slots.experts.blob_bytes(l) * (32 - n) for l, n in enumerate(backend.slots.counts))
        assert 0.9 * missing < found.copy_bytes < 1.1 * missing
        assert found.link_floor_ms == pytest.approx(found.copy_bytes / parts.link_gbps / 1e6)
        assert found.operations == chunk_speed.operations(backend, 256) and found.tensor_floor_ms > 0
        assert 0 < found.gpu_ms and found.gpu_ms + found.wait_ms <= 1.05 * found.ms
        assert bench.state.rows == bench.state.state.rows == 0
    lines = text(parts)
    assert "link" in lines[0] and any(line.startswith("loaded      256") for line in lines)
    assert "link" not in text(replace(parts, link_gbps=0.0))[0]


def test_text_and_windows(tiny_path):
    args = ["bench", "prefill", "-m", str(tiny_path), "--tokens", "20", "-r", "1", "--prefill", "windows"]
    done = RUNNER.invoke(app, [*args, "--device", "cpu", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert "none: by windows" in done.stdout and "times decode" in done.stdout and "op of" not in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tokens", "12,x"], "--tokens cannot be read"),
        (["--tokens", "0"], "--tokens cannot be read"),
        (["--tokens", "200", "--ops"], "--ops needs a prompt that fills a chunk"),
        (["--repeat", "0"], "--repeat is out of range"),
        (["--tokens", "4096", "--context", "4096"], "--context is too small"),
    ],
)
def test_what_is_refused(tiny_path, args, message):
    done = RUNNER.invoke(app, ["bench", "prefill", "-m", str(tiny_path), *args])
    assert done.exit_code != 0 and message in done.output
