"""strata bench: the parts add up, and what is timed is the loop that answers run."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import strata
from strata.cli import app
from strata.cpu.pool import Pool
from strata.measure import PROMPT_TOKENS, Clock, Speed, job_overhead_us

RUNNER = CliRunner()
TEXT = files("strata.cli.bench").joinpath("prompt.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def model(tiny_path: Path):
    with strata.load(tiny_path, context=512, threads=1) as loaded:
        yield loaded


def test_decode_is_the_model_s_own(model):
    bench = Speed(model, TEXT)
    sample = bench.decode(20, profile=False)
    expected = model.generate(bench.prompt(PROMPT_TOKENS), max_tokens=21, ignore_eos=True)
    assert bench.state.tokens[PROMPT_TOKENS:].tolist() == list(expected.tokens[:20])
    assert (sample.walk_us, sample.ops) == (0.0, {})


def test_parts_of_a_token_add_up(model):
    sample = Speed(model, TEXT).decode(20, profile=True)
    parts = sample.parts()
    wall = parts.pop("wall")
    assert sum(parts.values()) == pytest.approx(wall)
    assert min(parts.values()) >= 0
    assert wall > sample.backend_us > sample.walk_us > 0
    assert sum(sample.ops.values()) == pytest.approx(sample.walk_us)
    assert sample.ops["linear"] > 0


def test_prompt_is_repeated_where_it_is_short(model):
    bench = Speed(model, TEXT)
    n = len(bench.tokens)
    assert n > 1024
    np.testing.assert_array_equal(bench.prompt(n + 5)[n:], bench.tokens[:5])
    assert bench.prefill(300) > 0
    assert bench.state.rows == 300


def test_clock_counts_calls_that_fail():
    clock = Clock()
    with pytest.raises(ZeroDivisionError):
        clock.call(lambda: 1 // 0)
    assert clock.seconds > 0
    assert clock.call(max, 1, 2) == 2


def test_sharing_a_job_costs_something_only_with_threads():
    with Pool(1) as pool:
        assert job_overhead_us(pool) == 0.0
    with Pool(2) as pool:
        assert job_overhead_us(pool) > 0


def test_report(tiny_path: Path):
    arguments = ["bench", "decode", "--model", str(tiny_path), "-n", "8", "--prefill-tokens", "40", "-r", "3"]
    done = RUNNER.invoke(app, [*arguments, "--json"])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    found = json.loads(done.stdout)
    decode = found["decode"]
    assert decode["tokens_per_s"]["min"] <= decode["tokens_per_s"]["median"] <= decode["tokens_per_s"]["max"]
    parts = dict(decode["us_per_token"])
    wall = parts.pop("wall")
    assert sum(parts.values()) == pytest.approx(wall, abs=0.1)
    assert found["prefill"]["tokens"] == 40
    assert found["versions"]["strata"] == strata.__version__
    assert found["context"] == 256
    said = RUNNER.invoke(app, [*arguments, "--ops"]).stdout
    assert all(f"\n  {part} " in said for part in ("kernels", "join", "Python", "text", "linear", "experts"))


def test_a_context_that_is_too_small(tiny_path: Path):
    done = RUNNER.invoke(app, ["bench", "decode", "--model", str(tiny_path), "--context", "64"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--context is too small for this bench; found 64" in done.stderr
