"""Exit statuses: one for a GPU that is not there, whatever asks for it, and one for Ctrl-C from the first moment."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.base import install
from strata.base.errors import BadArgument, FileError, NoDevice
from strata.cli import FAILED, INTERRUPTED, USAGE, app, verbs
from strata.gpu import presence
from strata.planner.machine import Machine
from strata.required_device import required_device
from tests.test_cli import ROOT, START_S, environment

OF_A_GPU = {
    "run": ("def", "--device", "cuda:0"),
    "run --check": ("def", "--device", "cuda:0", "--check"),
    "run --vram-gib": ("def", "--vram-gib", "4"),
    "chat": ("--device", "cuda"),
    "score": (str(ROOT / "README.md"), "--device", "cuda:0"),
    "plan": ("FILE", "--device", "cuda:0"),
    "plan --slots": ("FILE", "--slots", "8"),
    "calibrate": ("FILE", "--device", "cuda"),
    "bench decode": ("--device", "cuda:0"),
    "bench draft": ("--device", "cuda:0"),
    "bench draft --layers": ("--layers", "2", "--device", "cuda"),
    "bench experts": (),
    "bench experts --device": ("--device", "auto", "--experts", "mapped"),
    "bench gpu": (),
    "bench prefill": ("--device", "cuda"),
    "bench prefill --made": ("--made", "Q4_K/IQ4_NL"),
}
"""Commands (an option behind them only tells them apart) and arguments that ask for a GPU."""


@pytest.fixture
def no_gpu(monkeypatch, tiny_path):
    """A machine without a GPU, and without CuPy."""
    here = Machine.here
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *a, **k: replace(here(*a, **k), gpus=())))
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setenv("STRATA_MODEL", str(tiny_path))


@pytest.mark.parametrize("name", OF_A_GPU)
def test_a_gpu_that_is_not_there_has_one_status(no_gpu, tiny_path, name):
    verb = name.partition(" --")[0].split()
    given = [str(tiny_path) if word == "FILE" else word for word in OF_A_GPU[name]]
    done = CliRunner().invoke(app, [*verb, *given])
    assert done.exit_code == FAILED and done.stdout == "", done.output
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"strata {' '.join(verb)}: ") and "; found " in said and "; needed " in said
    assert "needs a GPU" in said or "is not there" in said


def test_a_load_on_the_cpu_with_options_of_a_gpu_is_wrong_usage(no_gpu):
    for words in (("run", "def", "--device", "cpu", "--slots", "8"), ("bench", "experts", "--device", "cpu")):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == USAGE and "needs a GPU" in done.stderr, done.output


def test_what_lacks_for_a_gpu_is_of_one_kind(monkeypatch):
    assert not issubclass(NoDevice, BadArgument | FileError)
    assert isinstance(presence.cuda_problem(0, (6, 1)), NoDevice)
    monkeypatch.setitem(sys.modules, "cupy", None)
    problem = presence.cuda_problem(0, (9, 0))
    assert isinstance(problem, NoDevice) and "CuPy" in problem.needed and "pip install" in problem.advice
    here = Machine.here
    card = Machine.describe(gpu="RTX 4090").gpus
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *a, **k: replace(here(*a, **k), gpus=card)))
    with pytest.raises(NoDevice, match="a test needs a GPU: the GPU backend needs CuPy"):
        required_device("a test")


@pytest.mark.parametrize("words", [("bench", "gpu"), ("bench", "gpu-kernels", "nodes"), ("bench", "experts"),
                                   ("bench", "prefill", "--made", "Q4_K/IQ4_NL"),
                                   ("run", "def", "--device", "cuda:0", "--check"),
                                   ("run", "def", "--device", "cuda:0")])  # fmt: skip
def test_without_a_driver_all_say_so_and_none_advises_cupy(no_gpu, monkeypatch, words):
    here, why = Machine.here, "no NVIDIA driver library found"
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *a, **k: replace(here(*a, **k), gpu_problem=why)))
    done = CliRunner().invoke(app, words)
    told = "found GPUs: 0; needed "
    assert done.exit_code == FAILED and told in done.stderr and "pip" not in done.stderr, done.output
    assert done.stderr.endswith("No NVIDIA driver library found: `strata doctor` shows devices and driver.\n")


def test_advice_names_the_packages_of_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {name: extras[name] for name in install.CUPY} == {name: [p] for name, p in install.CUPY.items()}
    assert extras["bench"] == [install.LLAMA]
    assert "pip install 'cupy-cuda12x[ctk]>=14,<15' or " in install.INSTALL_CUPY


def test_a_missing_llama_is_a_failure_and_not_wrong_usage(tiny_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    done = CliRunner().invoke(app, ["bench", "versus", "--model", str(tiny_path)])
    assert done.exit_code == FAILED and "pip install 'xllamacpp==" in done.stderr


@pytest.mark.parametrize(("words", "told", "other"), [
    (("--card", "nonsense"), "cards.json. Its bandwidth estimates", "vram"),
    (("--n-experts", "0"), "--n-experts is out of range", "experts is out of range; found '"),
    (("--dense", "nonsense"), "needed one of F32, ", "I8"),
])  # fmt: skip
def test_advice_of_bench_gpu_fits_it(words, told, other):
    done = CliRunner().invoke(app, ["bench", "gpu", *words])
    assert done.exit_code == USAGE and told in done.stderr and other not in done.stderr, done.output


def test_the_statuses_are_written_down():
    (line,) = [row for row in (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n") if "Exit status" in row]
    assert all(text in line for text in ("0 done", "1 refused", "a GPU that is not there", "2 wrong usage", "130 "))


# ---- Ctrl-C while the command still imports its modules

STUB = """
import os, signal, sys
try:
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(100))
except KeyboardInterrupt:  # as code that catches everything while it is imported
    pass
sys.path.remove(os.path.dirname(__file__))
del sys.modules["typer"]
import typer
"""
"""A module that presses Ctrl-C while it is imported, swallows what comes of it, and steps aside."""


@pytest.mark.parametrize("module", ["strata", "strata.cli"])
@pytest.mark.parametrize("heard", [True, False])
def test_ctrl_c_at_the_start_is_quiet(tmp_path: Path, module, heard):
    (tmp_path / "typer.py").write_text(STUB)
    paths = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    ignore = None if heard else lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    done = subprocess.run([sys.executable, "-m", module, "--version"], env=paths, cwd=ROOT, capture_output=True,
                          text=True, timeout=START_S, preexec_fn=ignore)  # fmt: skip
    said = "" if heard else "strata "
    assert (done.returncode, done.stdout[:7], done.stderr) == (INTERRUPTED if heard else 0, said, "")


def test_ctrl_c_between_start_and_verb_is_quiet():
    code = "import signal; from strata.cli import main, verbs; " \
           "verbs.app = lambda: signal.raise_signal(signal.SIGINT); main()"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True,
                          timeout=START_S)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")


def test_little_is_imported_before_ctrl_c_is_heard():
    code = "import sys; before = set(sys.modules); import strata.cli; print(sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True,
                          timeout=START_S)  # fmt: skip
    modules = done.stdout.replace("'", "").strip("[]\n").split(", ")
    assert [m for m in modules if m != "__future__"] == ["strata", "strata.base", "strata.base.errors", "strata.cli"]


@pytest.mark.parametrize("words", [["plan", "none.gguf"], ["-v", "plan", "none.gguf"]])
def test_what_the_import_of_a_verb_reports_is_told_as_the_rest(monkeypatch, words):
    log, imported = logging.getLogger("strata"), verbs._verb
    before = (log.level, list(log.handlers))
    monkeypatch.setattr(verbs, "_verb", lambda name: log.warning("odd %s", name) or imported(name))
    done = CliRunner().invoke(app, words)
    assert done.exit_code == FAILED and done.stderr.splitlines()[0] == "strata: odd plan"
    assert (log.level, list(log.handlers)) == before


@pytest.mark.parametrize("verb", ["experts", "synth", "draft --layers 2 --device cpu"])
def test_a_number_of_experts_is_refused_by_the_option_as_typed(verb):
    done = CliRunner().invoke(app, ["bench", *verb.split(), "--n-experts", "0"])
    assert done.exit_code == USAGE and "--n-experts is out of range; found 0; needed 10 to 4,096" in done.stderr
