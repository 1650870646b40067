"""strata bench: the parts add up, and what is timed is the loop that answers run."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import strata
from strata.cli import app
from strata.cpu.pool import Pool
from strata.measure import KINDS, PROMPT_TOKENS, Clock, DraftingSpeed, Speed, job_overhead_us
from strata.runtime import generate
from tests.drafters import Told

pytestmark = pytest.mark.usefixtures("kernels_kept")
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
    drafting = found["drafting"]
    assert drafting["drafters"] == ["mtp", "lookup"] and len(drafting["window_ms"]) == 8
    assert list(drafting["texts"]) == list(KINDS)
    for of_text in drafting["texts"].values():
        without, with_ = (of_text[f"{name}_tokens_per_s"]["median"] for name in ("without", "with"))
        assert of_text["ratio"] == pytest.approx(with_ / without, rel=2e-3), "that of the rates that are reported"
        assert of_text["pair_ratio"]["min"] <= of_text["pair_ratio"]["median"] and of_text["pair_cpu_ratio"]["min"] > 0
        assert 1 <= of_text["committed_per_window"] <= 8
        assert all(0 <= e["accepted"] <= e["offered"] for e in of_text["by_source"].values())
    said = RUNNER.invoke(app, [*arguments, "--ops"]).stdout
    parts = ("kernels", "join", "Python", "text", "linear", "experts", *KINDS)
    assert all(f"\n  {part} " in said for part in parts)
    for kind in KINDS:
        without, with_, ratio = map(float, re.search(rf"\n  {kind} +([\d.]+) +([\d.]+) +([\d.]+) ", said).groups())
        assert ratio == pytest.approx(with_ / without, rel=0.01)


def test_report_without_drafting(tiny_path: Path, monkeypatch):
    runs, decode = [], Speed.decode

    def noted(self, n_tokens, profile):
        runs.append((n_tokens, profile))
        return decode(self, n_tokens, profile)

    monkeypatch.setattr(Speed, "decode", noted)
    arguments = ["--model", str(tiny_path), "-n", "4", "--prefill-tokens", "16", "-r", "1", "--draft", "off"]
    done = RUNNER.invoke(app, ["bench", "decode", *arguments, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["drafting"] is None
    # Both kinds of run have warmed up before the first that counts.
    assert {profile for _, profile in runs[: runs.index((4, False))]} == {False, True}
    assert "unpredictable" not in RUNNER.invoke(app, ["bench", "decode", *arguments]).stdout


# ---- drafting


@pytest.fixture(scope="module")
def drafted(tiny_path: Path, mtp_path: Path):
    with strata.load(tiny_path, context=256, threads=1, draft=mtp_path) as loaded:
        tokens = loaded.tokenize(TEXT, special=False)
        yield DraftingSpeed(loaded, {"code": tokens, "prose": tokens[300:]})


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_is_two_equal_answers(drafted, kind):
    pair = drafted.pair(kind, 3, 24)
    held = drafted.plain.tokens.tolist()
    assert drafted.drafted.tokens.tolist() == held and len(held) == PROMPT_TOKENS + 24
    assert min(*pair.per_s, *pair.per_cpu_s, *pair.speedup) > 0
    assert pair.speedup[0] == pytest.approx(pair.per_s[1] / pair.per_s[0])
    assert pair.drafts["windows"] * pair.drafts["committed_per_window"] == pytest.approx(25)
    assert drafted.plain.speculator is None and drafted.plain.mtp is None


def test_prompts_of_a_pair(drafted):
    n = len(drafted.texts["code"])
    assert [len(drafted.prompt(kind, 50)) for kind in KINDS] == [PROMPT_TOKENS] * 3
    for kind in KINDS:
        one, other = drafted.prompt(kind, 1), drafted.prompt(kind, 2)
        assert one.tolist() == drafted.prompt(kind, 1).tolist() != other.tolist()
    assert drafted.prompt("code", 1).tolist() == drafted.texts["code"][PROMPT_TOKENS : 2 * PROMPT_TOKENS].tolist()
    assert drafted.prompt("code", n // PROMPT_TOKENS)[: n % PROMPT_TOKENS].tolist() == (
        drafted.texts["code"][n - n % PROMPT_TOKENS :].tolist()
    )


def test_an_answer_that_drafting_changes_is_an_error(drafted, monkeypatch):
    monkeypatch.setattr(generate, "accept_window", lambda mode, drafts, draw, *_: [*drafts, draw(len(drafts))])
    drafted.drafted.speculator.policy, before = Told(lambda: 5), drafted.drafted.speculator.policy
    try:
        with pytest.raises(strata.StrataError, match="drafting changed an answer"):
            drafted.pair("unpredictable", 4, 24)
    finally:
        drafted.drafted.speculator.policy = before


def test_a_context_that_is_too_small(tiny_path: Path):
    done = RUNNER.invoke(app, ["bench", "decode", "--model", str(tiny_path), "--context", "64"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--context is too small for this bench; found 64" in done.stderr
