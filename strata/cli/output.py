"""What a terminal sees and a pipe does not: colour, progress, notes. Answers are plain text either way."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from strata.base.progress import UPLOADING, LoadProgress

DIM, PLAIN = "\x1b[2m", "\x1b[0m"

_PICTURES = {c: 0x2400 + c for c in range(0x20) if c not in (0x09, 0x0A)}
_PICTURES |= dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def has_colour(stream: TextIO) -> bool:
    """Whether styles may be written: a terminal that can, and no NO_COLOR."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO) -> str:
    return f"{DIM}{text}{PLAIN}" if text and has_colour(stream) else text


def printable(text: str) -> str:
    """Control characters made visible, so that an answer cannot steer the terminal; line ends and tabs stay."""
    return text.translate(_PICTURES)


def write(text: str, dimmed: bool = False) -> None:
    """A piece of an answer to stdout, at once; exactly as it is unless stdout is a terminal."""
    if is_terminal(sys.stdout):
        text = printable(text)
    sys.stdout.write(dim(text, sys.stdout) if dimmed else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A remark on stderr for somebody who watches; nothing when stderr is no terminal."""
    if is_terminal(sys.stderr):
        print(dim(text, sys.stderr), file=sys.stderr, flush=True)


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None] | None]:
    """A spinner with a line of text on stderr while the block runs, and a function that changes the text; nothing, and
    None, when stderr is no terminal."""
    if not is_terminal(sys.stderr):
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(text, refresh_per_second=8) as status:
        yield status.update


class LoadLines:
    """What a load does in lines on stderr, for who reads them in a file or a pipe: the first when a kernel is compiled
    that was not kept, or when a load on a GPU takes longer than EVERY_S, then one each EVERY_S. Nothing else."""

    EVERY_S = 10.0

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic):
        self._text, self._clock, self._before = text, clock, _compiled_anew()
        self._due, self._begun = clock() + self.EVERY_S, False

    def update(self, p: LoadProgress) -> None:
        on_gpu = p.what == UPLOADING or p.total == 0  # sources of a GPU are not counted beforehand
        compiles = _compiled_anew() > self._before
        if compiles and not self._begun:
            self._say("compiling kernels, which are kept for the next time")
        elif (compiles or on_gpu) and self._clock() >= self._due:
            self._say(progress_text(p))

    def _say(self, text: str) -> None:
        self._begun, self._due = True, self._clock() + self.EVERY_S
        with contextlib.suppress(OSError):  # nobody can be told then
            print(f"strata: {self._text}: {text}", file=sys.stderr, flush=True)


def _compiled_anew() -> int:
    from strata.base.compiled import compiled_anew  # here, because Numba takes a second: wrong usage is told at once

    return compiled_anew()


def progress_text(p: LoadProgress) -> str:
    """A report in words, as "compiling linear, 3 of 21"."""
    if p.what == UPLOADING:
        return f"{p.what}, {p.done >> 20:,} of {p.total >> 20:,} MiB"
    return " ".join(filter(None, (p.what, p.name))) + (f", {p.done} of {p.total}" if p.total > 1 else "")


class Bar:
    """A progress bar on stderr from the first `update` until done reaches the total; nothing when stderr is no
    terminal. Use it as a context manager, so that it also goes away when the work ends early."""

    def __init__(self, text: str, unit: str):
        self._text, self._unit = text, unit
        self._bar: Any = None
        self._over = not is_terminal(sys.stderr)

    def update(self, done: int, total: int) -> None:
        if self._over:
            return
        if self._bar is None:
            self._start()
        self._bar.update(self._task, completed=done, total=total)
        if done >= total:
            self.close()

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
                   TextColumn(self._unit), TimeRemainingColumn())  # fmt: skip
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._text)
        self._bar.start()

    def close(self) -> None:
        self._over = True
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Interrupt:
    """Whether Ctrl-C was pressed within `first_interrupt`."""

    hit = False


@contextlib.contextmanager
def first_interrupt(stop: Callable[[], None]) -> Iterator[Interrupt]:
    """Within the block the first Ctrl-C calls `stop`, which ends the work at its next border; a second one raises
    KeyboardInterrupt."""
    state = Interrupt()

    def on_signal(number: int, frame: object) -> None:
        if state.hit:
            raise KeyboardInterrupt
        state.hit = True
        stop()

    with _handler(on_signal):
        yield state


@contextlib.contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Within the block Ctrl-C raises KeyboardInterrupt, and objects that it leaves half made say nothing when they go:
    the compiler's do otherwise."""

    def on_signal(number: int, frame: object) -> None:
        sys.unraisablehook = lambda unraisable: None
        raise KeyboardInterrupt

    with _handler(on_signal):
        yield


@contextlib.contextmanager
def _handler(on_signal: Callable[[int, Any], None]) -> Iterator[None]:
    """SIGINT goes to on_signal within the block, unless it is ignored or this thread does not get signals."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
