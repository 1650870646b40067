"""The command line on terminals and in pipes: colour, control characters, Ctrl-C, whole processes."""

from __future__ import annotations

import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import strata
from strata.cli import output
from tests.test_cli import PROMPT, START_S, call, environment, start

pytestmark = pytest.mark.usefixtures("kernels_kept")


@pytest.fixture()
def small(tiny_path: Path) -> tuple[str, ...]:
    return ("--model", str(tiny_path), "--context", "512", "--threads", "1")


# ---- output


def test_control_characters_of_an_answer_are_made_visible():
    assert output.printable("a\x1b[31mb\tc\n\r\x07\x9b") == "a\u241b[31mb\tc\n\u240d\u2407\ufffd"
    assert output.printable("für 漢字 🙂") == "für 漢字 🙂"


class Terminal:
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_no_color_and_dumb_terminals(monkeypatch):
    for variable in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(variable, raising=False)
    assert output.dim("x", Terminal()) == "\x1b[2mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "")
    assert output.has_colour(Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert output.dim("x", Terminal()) == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not output.has_colour(Terminal())


def test_the_first_interrupt_asks_and_the_second_insists():
    stops = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), output.first_interrupt(lambda: stops.append(1)) as interrupt:
        assert not interrupt.hit
        signal.raise_signal(signal.SIGINT)
        assert interrupt.hit
        assert stops == [1]
        signal.raise_signal(signal.SIGINT)
    assert stops == [1]
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_while_loading_leaves_no_noise(monkeypatch, capsys):
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)

    class HalfMade:
        def __del__(self) -> None:
            raise AttributeError("half made")

    with pytest.raises(KeyboardInterrupt), output.quiet_interrupt():
        signal.raise_signal(signal.SIGINT)
    HalfMade()
    assert capsys.readouterr().err == ""


def test_what_the_library_reports(small):
    log = logging.getLogger("strata")
    before = (list(log.handlers), log.level)
    done = call("--verbose", "run", PROMPT, "-n", "1", *small)
    assert re.fullmatch(r"strata: loaded \S+ in [0-9.]+ s\n", done.stderr)
    assert (log.handlers, log.level) == before


# ---- whole processes


def test_piped_output_is_the_answer_alone(tiny_path: Path, small):
    with strata.load(tiny_path, context=512, threads=1) as model:
        expected = model.generate(PROMPT, max_tokens=24).text.encode()
    process = start("run", PROMPT, "-n", "24", *small, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    answer, messages = process.communicate(timeout=START_S)
    assert (process.returncode, answer, messages) == (0, expected, b"")


def test_an_interrupted_answer_ends_cleanly(tiny_path: Path):
    process = start(
        "run", PROMPT, "--ignore-eos", "--model", str(tiny_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    first = process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    rest, messages = process.communicate(timeout=START_S)
    assert (process.returncode, messages) == (130, b"")
    assert len(first + rest) >= 10


def test_a_reader_that_leaves_ends_the_answer(tiny_path: Path):
    process = start(
        "run", PROMPT, "--ignore-eos", "--model", str(tiny_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(10)
    process.stdout.close()
    messages = process.stderr.read()
    assert (process.wait(timeout=START_S), messages) == (141, b"")


def on_terminal(*arguments: str, env: dict[str, str], act) -> tuple[int, str]:
    """Run with a terminal as stdin, stdout and stderr; act(text so far) returns keys to press, once each."""
    ours, theirs = pty.openpty()
    process = start(*arguments, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                    preexec_fn=_take_terminal)  # fmt: skip
    os.close(theirs)
    seen, limit = "", time.monotonic() + START_S
    while time.monotonic() < limit:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the last process left the terminal
                break
            if not data:
                break
            seen += data.decode(errors="replace")
            keys = act(seen)
            if keys:
                os.write(ours, keys)
    os.close(ours)
    return process.wait(timeout=30), seen


def _take_terminal() -> None:
    """Make stdin this process's controlling terminal, so that Ctrl-C reaches it."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_ctrl_c_on_a_terminal_leaves_it_intact(tiny_path: Path):
    pressed = []

    def act(seen: str) -> bytes:
        if "return" in seen and not pressed:
            pressed.append(1)
            return b"\x03"
        return b""

    arguments = ("run", PROMPT, "--ignore-eos", "--model", str(tiny_path))
    status, seen = on_terminal(*arguments, env=environment(NO_COLOR="1"), act=act)
    assert status == 130
    assert pressed
    assert "Traceback" not in seen
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") >= 1, "the spinner hides the cursor and shows it again"
    assert not re.search(r"\x1b\[(2|[0-9;]*[349][0-7])m", seen), "NO_COLOR"
    assert re.search(r"\[6 prompt tokens .*cancelled\]\r\n$", seen), seen[-200:]


def test_chat_on_a_terminal(tiny_path: Path):
    keys = {"> ": b"hello\r", "stop]": b"/quit\r", "length]": b"/quit\r"}

    def act(seen: str) -> bytes:
        for mark in list(keys):
            if mark in seen:
                if mark != "> ":
                    keys.clear()
                    return b"/quit\r"
                return keys.pop(mark)
        return b""

    arguments = ("chat", "-n", "24", "--model", str(tiny_path), "--context", "512")
    status, seen = on_terminal(*arguments, env=environment(), act=act)
    assert status == 0, seen
    assert "\x1b[2m" in seen, "reasoning is dim"
    assert "Traceback" not in seen
