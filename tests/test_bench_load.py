"""strata bench load: every load is a load of its own that is closed, and what is told of it."""

from __future__ import annotations

import gc
import json
from pathlib import Path

from typer.testing import CliRunner

from strata.cli import app
from strata.model import Model


def bench(*words: str):
    return CliRunner().invoke(app, ["bench", "load", *words])


def test_loads(tiny_path: Path, monkeypatch):
    closed, real, enabled = [], Model.close, []

    def close(model):
        closed.append(id(model))
        enabled.append(gc.isenabled())
        real(model)

    monkeypatch.setattr(Model, "close", close)
    options = ["--model", str(tiny_path), "--context", "256", "--threads", "1", "--device", "cpu", "-r", "2"]
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        done = bench(*options, "--no-collector", "--json")
        assert gc.isenabled(), "as it was before"
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert len(found["loads"]) == 2 == len(enabled) and not any(enabled) and found["collector"] is False
        for one in found["loads"]:
            assert one["load_s"] > 0 and one["first_token_s"] > 0 and one["close_s"] > 0 and one["cpu_s"] > 0
            assert one["open_mib"] > 50 and one["closed_mib"] > 50 and one["threads"] >= 1
        first = found["loads"][0]
        assert found["start_to_first_token_s"] >= first["load_s"] + first["first_token_s"] - 0.05
        text = bench(*options).stdout.splitlines()
        assert any(enabled) and len(text) == 4 + 2 + 1 and text[-1].startswith("after the first:")
    finally:
        if not was_enabled:
            gc.disable()


def test_no_loads_are_refused():
    done = bench("-r", "0")
    assert done.exit_code == 2 and "--repeat is out of range" in done.stderr
