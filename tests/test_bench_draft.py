"""The gain of drafting at given acceptances: the drafter that knows the answer, and the bench around it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import strata
from strata import draft_speed
from strata.base.errors import StrataError
from strata.cli import app
from strata.draft_speed import (
    DraftGain,
    KnowsTheAnswer,
    Pace,
    answers_of,
    lengths_for,
    pace_of,
    replayed_by_position,
)
from strata.replay import skewed_ids

VOCAB = 977


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.9, 1.0])
def test_a_part_of_the_drafts_is_right(acceptance):
    text = np.random.default_rng(0).integers(0, VOCAB, 4000).astype(np.int32)
    drafter = KnowsTheAnswer(text, acceptance, VOCAB, seed=3)
    drafts = np.array([drafter.propose(text[:n], 1)[0] for n in range(len(text))])
    right = float((drafts == text).mean())
    assert abs(right - acceptance) < 0.03 and (0 < acceptance < 1 or right == acceptance)
    assert drafts.min() >= 0 and drafts.max() < VOCAB
    assert list(drafter.propose(text[:100], 7)) == drafts[100:107].tolist(), "a draft depends on its place alone"
    assert list(drafter.propose(text, 7)) == [] and len(drafter.propose(text[:-2], 7)) == 2
    again = KnowsTheAnswer(text, acceptance, VOCAB, seed=3)
    assert list(again.propose(text[:50], 100)) == list(drafter.propose(text[:50], 100))


@pytest.fixture(scope="module")
def model(tiny_path):
    with strata.load(tiny_path, context=256, threads=1, checkpoints=0) as loaded:
        yield loaded


def test_gains_are_of_equal_answers(model):
    bench = DraftGain(model, 48)
    gain = bench.measure(1.0, 2)
    assert len(gain.without) == len(gain.with_) == 2 and min(*gain.without, *gain.with_) > 0
    assert gain.accepted == gain.offered, "all drafts are right"
    windows = sum(gain.windows_by_committed)
    tokens = sum(n * count for n, count in enumerate(gain.windows_by_committed, 1))
    assert tokens == 2 * 49 and gain.committed == tokens / windows
    assert gain.ratio == np.median(gain.with_) / np.median(gain.without)
    assert bench.measure(0.0, 1).accepted == 0


def test_a_changed_answer_is_an_error(model):
    bench = DraftGain(model, 16)
    bench.drafted.window = lambda tokens: type(bench.plain).window(bench.drafted, (tokens + 1) % 4000)
    with pytest.raises(StrataError, match="changed an answer"):
        bench.measure(0.5, 1)


def test_replayed_experts_go_by_position(model):
    g = model.geometry
    table = skewed_ids(64, g.L, g.E, g.K)
    with replayed_by_position(model, table):
        gain = DraftGain(model, 24).measure(0.8, 1)
    assert gain.windows_by_committed[0] > 0


@pytest.mark.parametrize("per_s, tokens, repeats", [(1000, 256, 3), (50, 72, 3), (8, 16, 1), (0.5, 16, 1)])
def test_lengths_end_within_the_budget(per_s, tokens, repeats):
    """40 s for three acceptances: long answers of a fast model, short and few ones of a slow one."""
    pace = Pace(4 / per_s, 1 / per_s)
    chosen = lengths_for(pace, 40.0, 3)
    assert (chosen.tokens, chosen.repeats) == (tokens, repeats)
    assert chosen.seconds == pytest.approx(answers_of(3, repeats) * (tokens + 4) / per_s)
    assert chosen.seconds <= 40 or chosen.tokens == 16
    assert lengths_for(pace, 40.0, 3, tokens=100).tokens == 100 and lengths_for(pace, 40.0, 3, repeats=5).repeats == 5


def test_answers_are_counted(model, monkeypatch):
    made = []
    real = draft_speed._Answer.__init__
    monkeypatch.setattr(draft_speed._Answer, "__init__", lambda self, *a: made.append(1) or real(self, *a))
    DraftGain(model, 8).measure(0.5, 2)
    assert len(made) == answers_of(1, 2) and min(vars(pace_of(model)).values()) > 0


def test_the_command(tiny_path):
    run = CliRunner().invoke
    quick = ["bench", "draft", "-r", "1", "--threads", "1", "--device", "cpu"]
    made = run(app, [*quick, "--layers", "2", "--n-experts", "24", "--vocabulary", "700", "-n", "8",
                     "--acceptance", "0.7,1", "--json"])  # fmt: skip
    assert made.exit_code == 0, made.output
    report = json.loads(made.stdout)
    assert report["tokens"] == 8 and report["repeats"] == 1
    assert [gain["acceptance"] for gain in report["gains"]] == [0.7, 1.0] and report["spec"]["layers"] == 2
    text = run(app, [*quick, "-m", str(tiny_path), "-n", "8"])
    assert text.exit_code == 0 and text.stdout.count("of") >= 3 and "0.90" in text.stdout
    assert "answers    13 of 8 tokens, about" in text.stdout
    for wrong in (["--acceptance", "x"], ["--acceptance", "1.5"], ["--layers", "2", "-m", str(tiny_path)], ["-n", "1"]):
        assert run(app, ["bench", "draft", *wrong]).exit_code != 0
