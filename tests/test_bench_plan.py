"""strata bench plan: what is timed, the report, what is refused. test_plan_measured.py holds it to a tolerance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import strata
from strata.cli import app
from strata.cli.bench import plan
from strata.cpu.backend import CpuBackend


def bench(*words: str):
    return CliRunner().invoke(app, ["bench", "plan", *words])


def test_a_file(tiny_path: Path):
    done = bench("--model", str(tiny_path), "-n", "5", "-r", "2", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["predicted_ms"]) == 2 and len(found["measured_ms"]) == 10 and found["spec"] is None
    assert found["ratio"] == pytest.approx(min(found["predicted_ms"]) / min(found["measured_ms"]) - 1, abs=1e-4)
    assert min(found["predicted_ms"] + found["measured_ms"]) > 0


def test_what_is_timed_is_decoding(tiny_path: Path, monkeypatch):
    """The streams of a round's last token are those that a prompt of the same tokens leaves."""
    left = []
    real = CpuBackend.commit

    def commit(backend, state, n_keep):
        left.append(np.array(backend.streams[n_keep - 1]))
        real(backend, state, n_keep)

    monkeypatch.setattr(CpuBackend, "commit", commit)
    with plan._decoder(tiny_path, False, 0) as decode:
        assert len(decode(6)) == 6
    assert len(left) == 6
    options = {"context": 512, "device": "cpu", "kv": "f16", "threads": 1, "prefill": "windows", "draft": "off"}
    with strata.load(tiny_path, **options) as model:
        tokens = np.random.default_rng(0).integers(0, model.geometry.V, 6)
        model.generate(tokens, max_tokens=1)
    assert any(np.array_equal(streams, left[5]) for streams in left[6:])


def test_a_made_model_takes_other_experts_for_every_token(monkeypatch):
    seen = []
    real = plan._decode

    def decode(backend, tokens):
        out = real(backend, tokens)
        seen.append(backend.memory.arrays["moe.ids"][:1].copy())
        return out

    monkeypatch.setattr(plan, "_decode", decode)
    words = ["--made", "Q2_0/Q2_0", "--layers", "1", "--n-experts", "20", "--vocabulary", "600", "-n", "2", "-r", "1"]
    done = bench(*words)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "predicted", "measured", "ratio"]
    assert len(seen) == 2 and not np.array_equal(*seen), "tokens 8 and 2 of their sessions"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "2"], "--layers does nothing without --made"),
        (["--made", "Q4_K/IQ4_NL", "-m", "x.gguf"], "--model does nothing with --made"),
        (["--made", "Q4_K"], "types of the experts cannot be read"),
        (["-n", "513"], "--tokens is out of range"),
        (["-r", "0"], "--repeat is out of range"),
    ],
)
def test_refusals(words, message):
    done = bench(*words)
    assert done.exit_code == 2 and message in done.stderr, done.output
