"""Odd values and files on the command line: refused with what was found and what is needed, and nothing is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.cli import FAILED, USAGE, app
from strata.pack.gguf_file import shard_paths

LONG = 5000 * "a"


@pytest.fixture
def place(tmp_path, tiny_path, monkeypatch):
    """A folder with a copy of the bundled model, a text, a folder of nobody's, and nothing else."""
    for shard in shard_paths(tiny_path):
        shutil.copy(shard, tmp_path)
    (tmp_path / "text.txt").write_text("some text to read, and some more\n")
    (tmp_path / "taken").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert not isinstance(done.exception, Exception), done.exception
    return done


def refused(status, told, *words):
    done = call(*words)
    assert (done.exit_code, told in done.stderr, done.stdout) == (status, True, ""), done.output
    assert len(done.stderr) < 600
    return done.stderr


@pytest.mark.parametrize("words", [
    ("doctor", ""), ("score", ""), ("calibrate", ""), ("convert-mtp", "", "x"), ("convert-mtp", "text.txt", ""),
    ("profile", "", "text.txt", "--simulate"), ("profile", ".", "", "--simulate"),
    ("profile", ".", "text.txt", "-o", ""), ("profile", ".", "text.txt", "--trace", ""),
    ("profile", ".", "--from-trace", "", "--simulate"),
], ids=" ".join)  # fmt: skip
def test_an_empty_path_is_not_the_current_folder(place, words):
    refused(USAGE, "the path is empty", *words)


@pytest.mark.parametrize(("words", "told"), [
    (("inspect", LONG), "the argument names nothing that can be read; found 'aaa"),
    (("run", "Hi", "-m", LONG), "--model names nothing that can be read; found 'aaa"),
    (("doctor", LONG), "doctor has nothing to look at; found 'aaa"),
    (("profile", ".", "text.txt", "-o", LONG), "cannot write 'aaa"),
    (("convert-mtp", "text.txt", LONG), "the output cannot be looked at; found 'aaa"),
    (("convert-mtp", LONG, "new"), "the draft layer cannot be looked at; found 'aaa"),
])  # fmt: skip
def test_a_name_that_cannot_be_is_said_shortly(place, words, told):
    assert "; needed " in refused(FAILED, told, *words)


def test_what_may_not_be_looked_at_is_said(place, monkeypatch):
    def forbidden(*_):
        raise PermissionError(13, "Permission denied", "x")

    monkeypatch.setattr(Path, "stat", forbidden)
    for words in (("plan", "x"), ("doctor", "x"), ("convert-mtp", "x", "new")):
        assert "found 'x': Permission denied; needed " in refused(FAILED, "", *words)


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(place, monkeypatch):
    def forbidden(*_):
        raise PermissionError(13, "Permission denied", ".")

    monkeypatch.setattr("os.scandir", forbidden)
    refused(FAILED, "the argument names nothing that can be read; found '.': Permission denied", "plan", ".")


def test_a_home_that_nobody_has_is_a_name_like_others(monkeypatch):
    monkeypatch.setenv("STRATA_MODEL", "~nobody-of-this-name/model.gguf")
    refused(FAILED, "STRATA_MODEL names no file; found '~nobody-of-this-name", "plan")


@pytest.mark.parametrize("words", [
    ("text.txt", "-o", "text.txt"), ("text.txt", "-o", "./text.txt", "--trace", "new"), ("text.txt", "-o", "link.txt"),
    ("text.txt", "-o", "tiny-flash-next-IQ3_XXS-00002-of-00002.gguf"), ("text.txt", "-o", "new", "--trace", "new"),
    ("--from-trace", "taken", "-o", "taken"),
], ids=" ".join)  # fmt: skip
def test_a_result_never_replaces_what_is_read(place, words):
    (place / "link.txt").symlink_to("text.txt")
    before = {p.name: p.stat().st_size for p in place.iterdir()}
    refused(USAGE, "a result would replace a file of this command; found '", "profile", ".", *words)
    assert {p.name: p.stat().st_size for p in place.iterdir()} == before


@pytest.mark.parametrize(("words", "told"), [
    (("text.txt", "-o", "new", "--slots", 4), "--slots does nothing without --simulate"),
    (("text.txt", "-o", "new", "--held-out", 0.2), "--held-out does nothing without --simulate"),
    (("text.txt", "-o", "new", "--rows", 2), "--rows does nothing without --simulate or --trace"),
    (("--from-trace", "taken", "-o", "new", "--context", 512), "--context does nothing with --from-trace"),
    (("--from-trace", "taken", "-o", "new", "--special"), "--special does nothing with --from-trace"),
    (("text.txt", "--simulate", "--held-out", "nan"), "--held-out is out of range; found nan; needed above 0, and"),
    (("text.txt", "--simulate", "--slots", 257), "--slots is out of range; found 257; needed 0 to 256"),
])  # fmt: skip
def test_a_profile_is_refused_before_texts_are_read(place, words, told, monkeypatch):
    monkeypatch.setattr("strata.cli.profile._read_texts", lambda *a: pytest.fail("texts were read"))
    refused(USAGE, told, "profile", ".", *words)


@pytest.mark.parametrize(("words", "told"), [
    (("run", "Hi", "--logit-bias", "5=1", "--logit-bias", "5=2"), "a token has two logit biases; found 1.0 and '5=2'"),
    (("run", "Hi", "--check", "--stats"), "--stats does nothing with --check"),
    (("calibrate", ".", "--forget", "--turns", 9), "--turns does nothing with --forget"),
    (("calibrate", ".", "--forget", "--device", "cpu"), "--device does nothing with --forget"),
    (("plan", ".", "--measure", "--cpu-tier", "portable"), "--cpu-tier does nothing with --measure"),
    (("plan", ".", "--draft", "mtp", "--draft-vocabulary", 4097),
     "draft_vocabulary is larger than the model's vocabulary; found 4,097; needed at most 4,096"),
    (("plan", ".", "--ram-gib", "0.0009"), "found 0.0009; needed a number in 0.001..1,000,000,000"),
    (("plan", ".", "--reserve-mib", "1e30"), "found 1e+30; needed a number in 0..1,000,000,000"),
    (("plan", ".", "--pcie-share", "1.5"), "found 1.5; needed a number in 0..1. None chooses"),
    (("score", "text.txt", "--window", 99_999, "--context", 512), "--window exceeds the context; found 99999; needed"),
], ids=lambda x: " ".join(map(str, x)) if isinstance(x, tuple) else "")  # fmt: skip
def test_what_would_be_lost_or_cannot_be_is_refused(place, words, told):
    refused(USAGE, told, *words)
