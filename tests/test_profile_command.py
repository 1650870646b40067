"""strata profile and strata calibrate on the bundled model, and the routing they read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import strata
from strata import profiling
from strata.base.errors import BadArgument, StrataError
from strata.cli import app, profile
from strata.pack.profile import read_profile
from strata.planner.machine import Machine
from strata.planner.of_load import plan_file
from strata.runtime.simulate import POLICIES, count_windows, cut_windows, trace_windows
from strata.runtime.swaps import ranking

TEXT = "def add(a, b):\n    return a + b\n\n\nclass Tree:\n    def walk(self):\n        yield self\n" * 8


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    paths = [folder / "code.txt", folder / "prose.txt"]
    paths[0].write_text(TEXT)
    paths[1].write_text("The house stood on a hill. Nobody had lived there for years, and nobody would. " * 8)
    return paths


@pytest.fixture(scope="module")
def routed(tiny_path, texts) -> list[np.ndarray]:
    """(n, L, K) of each text, read by windows of one model."""
    with strata.load(tiny_path, context=512, device="cpu", prefill="windows") as model:
        return [profiling.route_text(model, model.tokenize(p.read_text(), False)) for p in texts]


def test_routing_is_the_same_by_chunks_and_by_windows(tiny_path, texts, routed):
    with strata.load(tiny_path, context=512, device="cpu") as model:
        ids = model.tokenize(TEXT, False)
        seen = []
        whole = profiling.route_text(model, ids, lambda *at: seen.append(at))
        assert whole.shape == (len(ids), 8, 4) and (whole == routed[0]).all()
        assert seen[-1] == (len(ids), len(ids)) and [at for at, _ in seen] == sorted(at for at, _ in seen)
        again = profiling.route_text(model, ids)
        assert (again == whole).all(), "every text begins from an empty state"
        with pytest.raises(BadArgument, match="text is empty"):
            profiling.route_text(model, [])
    with strata.load(tiny_path, context=72, device="cpu") as model:
        parts = profiling.route_text(model, ids)
    assert (parts[:64] == whole[:64]).all() and len(parts) == len(whole), "a longer text is read in parts"


def test_only_the_cpu_tells_its_routing(tiny_path, monkeypatch):
    with strata.load(tiny_path, context=64, device="cpu") as model:
        monkeypatch.setattr(model, "stats", lambda: {"backend": "cuda"})
        with pytest.raises(StrataError, match="CPU backend"):
            profiling.route_text(model, [1, 2])


def test_profile_trace_and_simulation(tiny_path, texts, routed, tmp_path):
    out, trace = tmp_path / "p.strp", tmp_path / "t.trace"
    done = call("profile", tiny_path, *texts, "-o", out, "--trace", trace, "--simulate", "--rows", 2, "--context", 512)
    assert done.exit_code == 0, done.output
    windows = [w for ids in routed for w in cut_windows(ids, 2)]
    counts = count_windows(windows, 8, 32)
    assert counts.sum() == sum(ids.size for ids in routed)
    got = read_profile(out, 8, 32)
    assert (got.ranked == ranking(counts)).all() and len(got.ranked) == 8 * 32
    stored = trace_windows(trace, 8, 32)
    assert len(stored) == len(windows) and all((a.ids == b.ids).all() for a, b in zip(stored, windows, strict=True))
    for word in (*POLICIES, f"{sum(map(len, routed))} tokens", str(out), str(trace), "held-out windows"):
        assert word in done.stdout
    again = call("profile", tiny_path, "--from-trace", trace, "--simulate", "--slots", 64, "--slots", 0, "--json")
    assert again.exit_code == 0, again.output
    report = json.loads(again.stdout)
    sizes = {size["slots"]: size["policies"] for size in report["simulation"]["sizes"]}
    assert set(sizes) == {64, 0} and report["simulation"]["held_out_windows"] == round(len(windows) / 2)
    assert all(p["hit_rate"] == 0 for p in sizes[0].values())
    assert 0 < sizes[64]["static"]["hit_rate"] < sizes[64]["oracle"]["hit_rate"] < 1
    held = profiling.simulate_sizes(windows, [1] * 8, 32, [64])[0]
    assert {r.policy: r.hit_rate for r in held.replays} == {n: p["hit_rate"] for n, p in sizes[64].items()}
    assert plan_file(tiny_path, profile=out).device == "cpu", "the planner reads it"


def test_profile_refuses(tiny_path, texts, tmp_path):
    for words, needle, status in (
        ((texts[0],), "nothing to do", 2),
        (("-o", tmp_path / "p"), "one of TEXT... and --from-trace", 2),
        ((texts[0], "--from-trace", tmp_path / "t", "--simulate"), "found both", 2),
        (("--from-trace", tmp_path / "none", "--simulate"), "cannot read", 1),
        (("--from-trace", tmp_path / "none", "--trace", tmp_path / "t"), "--trace writes", 2),
        ((texts[0], "--simulate", "--rows", 9), "--rows", 2),
        ((tmp_path / "none.txt", "--simulate"), "cannot read", 1),
        ((tiny_path, "--simulate"), "is not UTF-8 text", 1),
    ):
        done = call("profile", tiny_path, *words)
        assert done.exit_code == status and needle in done.stderr, (words, done.stderr)
    assert list(tmp_path.iterdir()) == []
    windows = cut_windows(np.zeros((1, 8, 4), np.int32))
    with pytest.raises(BadArgument, match="too few windows"):
        profiling.simulate_sizes(windows, [1] * 8, 32)
    with pytest.raises(BadArgument, match="slots are out of range"):
        profiling.simulate_sizes(windows * 4, [1] * 8, 32, [257])
    with pytest.raises(BadArgument, match="held-out share"):
        profiling.simulate_sizes(windows * 4, [1] * 8, 32, held_out=1.0)


def test_calibrate_remembers_and_forgets(tiny_path, tmp_path, monkeypatch):
    from strata import calibration
    from strata.calibration import Calibration, ExpertTimes, Trial
    from strata.planner.remembered import Settings, remembered

    monkeypatch.setenv("STRATA_CACHE", str(tmp_path))

    def measured(path, *, machine, windows, turns, device, say):
        assert (windows, turns, device) == (3, 4, "cpu") and machine.ram_gbps_measured
        trials = [Trial(Settings(threads=1), 2.0, 1.5, 0.02), Trial(Settings(threads=2), 1.5, 1.49, 0.02),
                  Trial(Settings(threads=3), 1.5, 1.2, 0.3)]  # fmt: skip
        return Calibration(str(path), "cpu", ExpertTimes(2, 8.0, 20.0), 50.0, None, None, trials, Settings(threads=1),
                           ["a note"])  # fmt: skip

    monkeypatch.setattr(calibration, "calibrate", measured)
    words = ("calibrate", tiny_path.parent, "--windows", 3, "--turns", 4, "--device", "cpu")
    done = call(*words)
    assert done.exit_code == 0, done.output
    for text in ("8.0 us for one row", "threads=1   1.500 ms a window, against 2.000: +25.0 %, turns within 2.0 %, k",
                 "+0.7 %, turns within 2.0 %, not kept\n", "30.0 %, not kept: the turns differ by more", "a note",
                 "settings    threads=1", str(tmp_path / "calibration.json"),
                 "only where it is given, as --threads 1"):  # fmt: skip
        assert text in done.stdout
    machine = Machine.here(tiny_path)
    assert remembered(machine, tiny_path) == Settings(threads=1)
    report = json.loads(call(*words, "--json").stdout)
    assert report["settings"] == {"threads": 1, "pcie_num": None} and report["trials"][0]["kept"] is True
    assert "forgotten" in call("calibrate", tiny_path, "--forget").stdout
    assert remembered(machine, tiny_path) is None
    assert json.loads(call("calibrate", tiny_path, "--forget", "--json").stdout)["forgotten"] is False
    assert "nothing is kept" not in done.stdout
    done = call("calibrate", tiny_path, "--turns", 2)
    assert done.exit_code == 2 and "--turns" in done.stderr


def test_calibrate_says_that_nothing_is_kept(tiny_path, tmp_path, monkeypatch):
    from strata import calibration
    from strata.calibration import Calibration, ExpertTimes, Trial
    from strata.planner.remembered import Settings

    monkeypatch.setenv("STRATA_CACHE", str(tmp_path))
    trials = [Trial(Settings(threads=1), 2.0, 1.5, 0.4)]
    found = Calibration("m", "cpu", ExpertTimes(2, 8.0, 20.0), 50.0, None, None, trials, Settings())
    monkeypatch.setattr(calibration, "calibrate", lambda path, **options: found)
    done = call("calibrate", tiny_path)
    assert "loads choose as they did" in done.stdout
    assert "nothing is kept" in done.stdout and "settings    as planned" in done.stdout


def test_calibrate_has_one_rule_of_what_is_kept(tiny_path, tmp_path, monkeypatch):
    """The command's words follow the numbers that decide."""
    from strata import calibration
    from strata.calibration import Calibration, ExpertTimes, Trial
    from strata.cli import calibrate
    from strata.planner.remembered import Settings

    told = " ".join(call("calibrate", "--help").stdout.split())
    assert f"by {100 * calibration.LEAST_GAIN:g} % or more" in told and f"{calibration.LEAST_TURNS} or more" in told
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path))
    trials = [Trial(Settings(threads=1), 2.0, 1.5, 0.4)]
    found = Calibration("m", "cpu", ExpertTimes(2, 8.0, 20.0), 50.0, None, None, trials, Settings())
    monkeypatch.setattr(calibration, "calibrate", lambda path, **options: found)
    assert "not kept: the turns differ by more" in call("calibrate", tiny_path).stdout
    monkeypatch.setattr(calibrate, "LEAST_GAIN", 0.5)
    monkeypatch.setattr(calibrate, "LEAST_TURNS", 5)
    said = call("calibrate", tiny_path).stdout
    assert "faster by 50 %" in said and "turns differ by more" not in said
    assert "needed >= 5" in call("calibrate", tiny_path, "--turns", 4).stderr


def test_calibrate_refuses_a_device_that_is_not_there(tiny_path, monkeypatch):
    here = Machine.here
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *a, **k: replace(here(*a, **k), gpus=())))
    for device, text, status in (("cuda", "is not there", 1), ("cuda:1", "is not there", 1),
                                 ("gpu", "unknown device", 2)):  # fmt: skip
        done = call("calibrate", tiny_path, "--device", device)
        assert done.exit_code == status and text in done.stderr


@pytest.mark.parametrize("flag", ["--out", "--trace"])
def test_a_place_that_cannot_be_written_is_told_before_texts_are_read(tiny_path, tmp_path, monkeypatch, flag):
    monkeypatch.setattr(profile, "_read_texts", lambda *_: pytest.fail("texts were read"))
    text = tmp_path / "a.txt"
    text.write_text("def f(x):", encoding="utf-8")
    for place in (tmp_path, tmp_path / "none" / "p.strp", "/"):
        done = call("profile", tiny_path, text, flag, place)
        assert done.exit_code == 1 and "cannot write" in done.stderr, done.output
