"""strata bench gpu --compare, --check-early and --by-table: what is captured, that a difference is seen, the commands.

Kernels run on the CPU through the shim, or on a GPU with STRATA_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from strata import gpu_speed
from strata.base.errors import BadArgument
from strata.cli import app
from strata.cli.bench import gpu_windows
from strata.cli.bench.gpu_windows import CHOICES, LEVELS, PLACES, chosen, lowered_with
from strata.gpu import device, early_launch, hc_ops
from strata.gpu.backend import GpuBackend
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.gpu.shared_model import path
from tests.test_gpu_speed import LEAST

__all__ = ["path"]
pytestmark = needs_compiler
ARGUMENTS = ("--rows", "1,2", "--context", "256", "--position", "8")


@pytest.fixture
def run(monkeypatch, path):
    monkeypatch.setattr(gpu_speed, "DEFAULT_EFFORT", LEAST)
    monkeypatch.setattr(gpu_windows, "ROUNDS", 1)
    if not ON_DEVICE:
        monkeypatch.setattr(device, "CupyDevice", lambda index: HostDevice())
    return lambda *words: CliRunner().invoke(app, ["bench", "gpu", "--model", str(path), *ARGUMENTS, *words])


def test_names_of_choices():
    assert chosen("all") == CHOICES and list(chosen("off")) == ["as it is", "early: off", "all off"]
    assert list(chosen("branches, norms al")) == ["as it is", "norms alone", "products in branches",
                                                  "early: joins and norms alone"]  # fmt: skip
    assert all(list(chosen(name)) == list(dict.fromkeys(["as it is", name])) and "," not in name for name in CHOICES)
    for text in ("nothing", "off,nothing", "all,off", "", ","):
        with pytest.raises(BadArgument, match="names no choice"):
            chosen(text)
    assert list(LEVELS.values()) == list(range(early_launch.JOINS + 1)), "off first: the others are compared with it"
    assert {place for values in CHOICES.values() for place in values} == set(PLACES)
    for name, values in CHOICES.items():
        same = all(getattr(*PLACES[place]) == value for place, value in values.items())
        assert same == (not values) or "early" in values, f"{name} is not what is served already"


def test_constants_come_back():
    before = hc_ops.NORM_DOWN_ROWS
    with pytest.raises(KeyError), lowered_with({"norm": 7}):
        assert before != hc_ops.NORM_DOWN_ROWS == 7
        raise KeyError
    assert before == hc_ops.NORM_DOWN_ROWS


def test_choices_are_timed(run):
    """Products that are one launch are several in branches; the rest is the same window."""
    done = run("--compare", "branches", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert "windows" not in found and found["load_s"] >= 0
    cells = {(c["name"], c["rows"]): c for c in found["choices"]}
    assert set(cells) == {(n, T) for n in ("as it is", "products in branches") for T in (1, 2)}
    assert all(c["us"] > 0 for c in cells.values())
    for T in (1, 2):
        assert cells["products in branches", T]["nodes"] > cells["as it is", T]["nodes"]
    text = run("--rows", "1", "--compare", "all off")
    assert text.exit_code == 0 and [line.split("  ")[0] for line in text.stdout.splitlines()[1:]] == [
        "us, nodes of a window", "as it is", "all off"]  # fmt: skip


def test_bits_are_compared(run, monkeypatch):
    monkeypatch.setattr(gpu_windows, "LEVELS", {"early: off": 0, "early: behind joins too": 4})
    done = run("--check-early", "2", "--json")
    assert done.exit_code == 0, done.output
    assert [(k["name"], k["rows"], k["windows"], k["differ"]) for k in json.loads(done.stdout)["early"]] == [
        (name, T, 2, []) for name in ("early: off", "early: behind joins too") for T in (1, 2)
    ]
    windows, real = [], GpuBackend.window

    def wrong(backend, state, tokens, previous):
        """The eighth window, the last of two rows with early starts, reads another token."""
        windows.append(len(tokens))
        real(backend, state, tokens if len(windows) < 8 else tokens[::-1].copy(), previous)

    monkeypatch.setattr(GpuBackend, "window", wrong)
    bad = run("--check-early", "2")
    assert windows == [1, 1, 2, 2, 1, 1, 2, 2]
    assert bad.exit_code == 1 and "1 windows differ" in bad.stderr
    assert bad.stdout.splitlines()[-1] == "early: behind joins too    2 rows: 1 of 2 windows differ [1]"
    assert not early_launch.REFUSAL_IS_ERROR and early_launch.START_EARLY == early_launch.JOINS


def test_experts_by_table(run):
    done = run("--by-table", "--rows", "1", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["by_table"] is True and found["windows"][0]["us"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare", "nothing"], "names no choice"),
        (["--compare", "all", "--check-early", "2"], "exclude each other"),
        (["--compare", "all", "--card", "RTX 4090"], "does nothing with --compare"),
        (["--check-early", "0"], "--check-early is out of range"),
        (["--check-early", "1000"], "does not fit the context"),
    ],
)
def test_refusals(run, words, message):
    done = run(*words)
    assert done.exit_code == 2 and message in done.stderr, done.output
