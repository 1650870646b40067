"""strata bench prefill: what it reports, and what it refuses."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from strata.cli import app

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


def test_text_and_windows(tiny_path):
    args = ["bench", "prefill", "-m", str(tiny_path), "--tokens", "20", "-r", "1", "--ops", "--prefill", "windows"]
    done = RUNNER.invoke(app, [*args, "--device", "cpu", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert "none: by windows" in done.stdout and "times decode" in done.stdout and "op of" not in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tokens", "12,x"], "--tokens cannot be read"),
        (["--tokens", "0"], "--tokens cannot be read"),
        (["--repeat", "0"], "--repeat is too small"),
        (["--tokens", "4096", "--context", "4096"], "--context is too small"),
    ],
)
def test_what_is_refused(tiny_path, args, message):
    done = RUNNER.invoke(app, ["bench", "prefill", "-m", str(tiny_path), *args])
    assert done.exit_code != 0 and message in done.output
