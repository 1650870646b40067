"""STRATA_CACHE where it names no folder that can be written, and what is told of kernels that were not kept."""

from __future__ import annotations

import errno
import importlib.util
import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.base import compiled
from strata.base.errors import FileError
from strata.base.progress import COMPILING, UPLOADING, LoadProgress
from strata.cli import FAILED, app, output
from strata.gpu import compile as gpu_compile
from strata.planner import remembered

SOURCE = """
from strata.base.compiled import chunk

@chunk
def job(desc, at, n):
    pass
"""


@pytest.fixture()
def made(tmp_path: Path, monkeypatch):
    """A new compiled function in a file of its own."""
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    compiled._warn_not_used.cache_clear()
    (tmp_path / "source").mkdir()

    def make(name: str) -> compiled.CFunction:
        path = tmp_path / "source" / f"{name}.py"
        path.write_text(SOURCE)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.job

    return make


def test_kernels_that_were_not_kept_are_counted(made, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "cache"))
    before = compiled.compiled_anew()
    assert made("one").address and compiled.compiled_anew() == before + 1
    again = made("one")
    assert again.address and again.from_cache and compiled.compiled_anew() == before + 1
    assert list((tmp_path / "cache" / "numba").rglob("*.nbi")) and caplog.text == ""


def test_a_cache_that_is_no_folder_is_told_once(made, tmp_path, monkeypatch, caplog):
    place = tmp_path / "file"
    place.touch()
    monkeypatch.setenv("STRATA_CACHE", str(place))
    with caplog.at_level(logging.WARNING, "strata"):
        assert made("one").address and made("two").address
    (told,) = [r.getMessage() for r in caplog.records]
    assert told.startswith(f"STRATA_CACHE names a place that cannot keep compiled kernels; found '{place}': ")
    assert "needed a folder that can be written" in told and told.endswith("STRATA_CACHE, or name another folder.")
    assert list((tmp_path / "source" / "__pycache__").glob("*.nbi")), "they are kept in the usual place"


def test_a_cache_that_may_not_be_written_is_told(made, tmp_path, monkeypatch, caplog):
    asked = tmp_path / "cache"
    monkeypatch.setattr("numba.config.CACHE_DIR", str(asked))
    ensure = compiled._Locator.ensure_cache_path

    def refused(self):
        if self.get_cache_path().startswith(str(asked)):
            raise PermissionError(errno.EACCES, "Permission denied", str(asked))
        ensure(self)

    monkeypatch.setattr(compiled._Locator, "ensure_cache_path", refused)
    with caplog.at_level(logging.WARNING, "strata"):
        assert made("one").address
    told = f"NUMBA_CACHE_DIR names a place that cannot keep compiled kernels; found '{asked}': Permission denied"
    assert told in caplog.text


def test_settings_are_refused_before_anything_is_measured(tiny_path, tmp_path, monkeypatch):
    place = tmp_path / "file"
    place.touch()
    monkeypatch.setattr("strata.calibration.calibrate", lambda *a, **k: pytest.fail("it was measured"))
    for name in (place, place / "below"):
        monkeypatch.setenv("STRATA_CACHE", str(name))
        done = CliRunner().invoke(app, ["calibrate", str(tiny_path)])
        assert (done.exit_code, done.stdout) == (FAILED, ""), done.output
        assert f"strata calibrate: settings cannot be kept; found '{name}': " in done.stderr
        assert "; needed a folder that can be written. Set STRATA_CACHE to one." in done.stderr
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(FileError, match="it cannot be written"):
        remembered.require_place()


def test_settings_below_a_file_are_none(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("STRATA_CACHE", str(tmp_path / "file"))
    assert remembered._entries() == [] and caplog.text == ""


# ---- lines of a load that nobody watches


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture()
def lines(monkeypatch, capsys):
    """(a LoadLines, its clock, a function that says kernels were compiled, one that gives what was told since)."""
    clock, anew = Clock(), [5]
    monkeypatch.setattr(output, "_compiled_anew", lambda: anew[0])
    return (output.LoadLines("loading m", clock), clock, lambda: anew.__setitem__(0, anew[0] + 1),
            lambda: capsys.readouterr().err.splitlines())  # fmt: skip


def test_a_load_whose_kernels_are_kept_says_nothing(lines):
    one, clock, _, told = lines
    for clock.now in range(0, 100, 3):
        one.update(LoadProgress(COMPILING, 1, 9, "linear"))
    assert told() == []


def test_a_load_that_compiles_says_so_at_once_and_then_now_and_then(lines):
    one, clock, compiles, told = lines
    one.update(LoadProgress(COMPILING, 0, 9, "embed"))
    assert told() == []
    compiles()
    clock.now = 2.0
    one.update(LoadProgress(COMPILING, 1, 9, "linear"))
    assert told() == ["strata: loading m: compiling kernels, which are kept for the next time"]
    for clock.now in (3.0, 11.9):
        one.update(LoadProgress(COMPILING, 2, 9, "rows"))
    assert told() == []
    clock.now = 12.0
    one.update(LoadProgress(COMPILING, 3, 9, "router"))
    one.update(LoadProgress(COMPILING, 4, 9, "experts"))
    assert told() == ["strata: loading m: compiling router, 3 of 9"]


def test_a_long_load_on_a_gpu_says_how_far_it_is(lines):
    one, clock, _, told = lines
    for clock.now in (0.0, 9.0):
        one.update(LoadProgress(COMPILING, 3, 0, "gemv.cu"))
    assert told() == []
    clock.now = 10.0
    one.update(LoadProgress(COMPILING, 4, 0, "gemv.cu"))
    clock.now = 25.0
    one.update(LoadProgress(UPLOADING, 1 << 20, 3 << 20, "x"))
    assert told() == ["strata: loading m: compiling gemv.cu", "strata: loading m: uploading, 1 of 3 MiB"]


def test_a_command_tells_a_pipe_of_compiling(tiny_path, monkeypatch):
    counted = iter(range(1000))
    monkeypatch.setattr(output, "_compiled_anew", lambda: next(counted))
    done = CliRunner().invoke(app, ["run", "ab", "-n", "1", "--model", str(tiny_path), "--threads", "1"])
    told = f"strata: loading {tiny_path.name}: compiling kernels, which are kept for the next time"
    assert done.exit_code == 0 and done.stderr.splitlines()[0] == told


def test_kernels_of_a_gpu_that_are_not_kept_are_told_once_a_process(tmp_path, capsys):
    (tmp_path / "file").touch()
    gpu_compile._say_not_kept.cache_clear()
    for name in ("a", "b"):
        gpu_compile._write(tmp_path / "file" / name, gpu_compile.Binary(b"", {}, ""))
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("strata: kernels are not kept on disk in ") and "STRATA_CACHE" in told
