"""Texts from files and stdin that cannot be used: the same status from every command, and where the fault lies."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.base.errors import FileError
from strata.cli import FAILED, USAGE, app, texts
from strata.text.tokenizer import LONGEST_SPACE_RUN

pytestmark = pytest.mark.usefixtures("kernels_kept")

BINARY = "ä\n".encode() + b"ab\xff\xfe\x00"
RUN = ("run", "-", "-n", "2", "--context", "256", "--threads", "1")


def call(*words: object, stdin: bytes = b""):
    done = CliRunner().invoke(app, [str(word) for word in words], input=stdin)
    assert not isinstance(done.exception, Exception), done.exception
    return done


@pytest.fixture()
def commands(tmp_path: Path, tiny_path: Path, monkeypatch):
    """Every way to give a command a text's content: (words, stdin) by name."""
    monkeypatch.setenv("STRATA_MODEL", str(tiny_path))
    file, out = tmp_path / "text", tmp_path / "out.strp"

    def given(content: bytes) -> dict[str, tuple[tuple[object, ...], bytes]]:
        file.write_bytes(content)
        return {
            "run": (RUN, content),
            "score": (("score", file, "--context", 256, "--threads", 1), b""),
            "score -": (("score", "-", "--context", 256, "--threads", 1), content),
            "profile": (("profile", tiny_path, file, "-o", out, "--context", 256, "--threads", 1), b""),
            "profile -": (("profile", tiny_path, "-", "-o", out, "--context", 256, "--threads", 1), content),
        }

    return given


@pytest.mark.parametrize(("content", "told"), [
    (b"", "is empty; found 0 "), (BINARY, "is not UTF-8 text; found byte 0xff at offset 5; needed UTF-8"),
    (b" " * (LONGEST_SPACE_RUN + 1), "has too long a run of white space; found more than"),
], ids=["empty", "binary", "blank"])  # fmt: skip
def test_what_a_text_holds_is_no_wrong_usage(commands, tmp_path, content, told):
    for name, (words, stdin) in commands(content).items():
        done = call(*words, stdin=stdin)
        assert (done.exit_code, done.stdout) == (FAILED, ""), (name, done.output)
        where = texts.STDIN if "-" in words else f"'{tmp_path / 'text'}'"
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"strata {words[0]}: {where} ") and told in line and "; needed " in line


def test_an_argument_that_is_no_text_is_wrong_usage(commands):
    for prompt in ("", "a\udcff"):
        words = [prompt if word == "-" else word for word in RUN]
        assert call(*words).exit_code == USAGE


def test_a_text_of_one_token_cannot_be_scored(commands):
    words, stdin = commands(b"a")["score -"]
    done = call(*words, stdin=stdin)
    assert done.exit_code == FAILED and "standard input is too short; found 1 token; needed >= 2" in done.stderr


def test_traces_without_routing_are_no_wrong_usage(tiny_path, tmp_path):
    (tmp_path / "trace").touch()
    done = call("profile", tiny_path, "--from-trace", tmp_path / "trace", "-o", tmp_path / "out")
    assert done.exit_code == FAILED and "; needed " in done.stderr, done.output


# ---- chat


CHAT = ("chat", "-n", "2", "--no-think", "--context", "256", "--threads", "1")


def test_a_line_of_a_pipe_that_is_no_text_ends_the_talk(tiny_path, monkeypatch):
    monkeypatch.setenv("STRATA_MODEL", str(tiny_path))
    done = call(*CHAT, stdin="Hi\n\näb".encode() + b"\xffc\nnever\n")
    assert done.exit_code == FAILED and done.stdout.count("\n") >= 1
    assert done.stderr == ("strata chat: line 3 of standard input is not UTF-8 text; found byte 0xff at offset 3; "
                           "needed UTF-8\n")  # fmt: skip


def test_a_typed_line_that_is_no_text_is_told_and_the_talk_goes_on(monkeypatch, capsys):
    from strata.cli import chat

    talk = chat.Conversation(None, None, None, {})
    answered = []
    monkeypatch.setattr(talk, "watched", True)
    monkeypatch.setattr(talk, "_answer", lambda line: answered.append(line))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\nt\xffwo\nthree\n"), encoding="utf-8"))
    monkeypatch.setattr("builtins.input", lambda prompt: (sys.stdin.readline() or raised(EOFError())).rstrip("\n"))
    talk.talk()
    assert answered == ["one", "three"]
    told = "strata chat: the line is not UTF-8 text; found byte 0xff at offset 1; needed UTF-8\n"
    assert capsys.readouterr().err == told


def raised(error: Exception) -> None:
    raise error


def test_a_typed_text_of_another_encoding(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xe4\r\n\xff"), encoding="latin-1"))
    assert texts.typed_text() == "ä\nÿ"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xe4"), encoding="ascii"))
    with pytest.raises(FileError, match="standard input is not ASCII text; found byte 0xe4 at offset 1"):
        texts.typed_text()


def test_a_library_that_is_not_there_is_no_wrong_usage(tmp_path):
    done = call("bench", "cpu-kernels", "--ggml", tmp_path / "none.so", "--types", "Q4_0", "--rows", "1")
    assert done.exit_code == FAILED and "none.so" in done.stderr and "; needed a shared object" in done.stderr


def test_an_answer_that_reasoning_left_no_tokens_is_told(tiny_path):
    words = [w for w in CHAT if w != "--no-think"]
    done = CliRunner().invoke(app, [*words, "--think", "--model", str(tiny_path)], input="hello\n")
    assert done.exit_code == 0 and "no answer: reasoning took all tokens; --max-tokens" in done.stderr, done.output
