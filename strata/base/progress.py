"""How far a load has come, told to whoever loads.

What loads does not know who listens: `report` goes to the listener of the calling thread, or nowhere.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPILING, SELF_TEST, UPLOADING = "compiling", "self-test", "uploading"


@dataclass(frozen=True)
class LoadProgress:
    """One report.

    what   "compiling" and "self-test" (kernels), or "uploading" (bytes)
    done   of `total`; a total of 0 is not known
    name   of the kernel or place that is worked on now
    """

    what: str
    done: int
    total: int
    name: str = ""


_here = threading.local()


@contextlib.contextmanager
def listening(listener: Callable[[LoadProgress], None] | None) -> Iterator[None]:
    """Within the block, reports of this thread go to `listener`. What it raises ends the load."""
    previous = getattr(_here, "listener", None)
    _here.listener = listener
    try:
        yield
    finally:
        _here.listener = previous


def report(what: str, done: int, total: int, name: str = "") -> None:
    """Tell this thread's listener, if there is one."""
    listener = getattr(_here, "listener", None)
    if listener is not None:
        listener(LoadProgress(what, done, total, name))


class Countable:
    """Things to do whose number is known: each is reported when it begins, once."""

    def __init__(self, total: int):
        self.total = total
        self._begun: set[str] = set()
        self._told: set[tuple[str, str]] = set()

    def begin(self, what: str, name: str) -> bool:
        """Report that `name` is worked on; True the first time, and nothing after that."""
        if (what, name) in self._told:
            return False
        self._told.add((what, name))
        done = len(self._begun - {name})
        self._begun.add(name)
        report(what, done, self.total, name)
        return True

    def end(self, what: str) -> None:
        report(what, self.total, self.total)
