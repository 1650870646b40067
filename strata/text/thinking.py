"""Reasoning and answer told apart while the text streams.

One reasoning block, at the start: it is open already when the prompt ended with an open `<think>`, or the text opens it
before anything but white space. It ends at the first `</think>`; what follows is answer, verbatim, so an answer may
mention the tags. Line ends that touch a tag belong to the template's form, not to the text, and are removed.
"""

from __future__ import annotations

from typing import Literal

from strata.text.stop import held_suffix

OPEN, CLOSE = "<think>", "</think>"

Piece = tuple[Literal["reasoning", "content"], str]


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends inside an open reasoning block, so that the model's text starts there."""
    return prompt.rstrip().endswith(OPEN)


class ThinkingSplitter:
    """Push text pieces, get ("reasoning", text) and ("content", text) pieces; any split gives the same two texts.

    started_in_think  the prompt ended with an open <think> (see `opens_thinking`)
    """

    def __init__(self, started_in_think: bool):
        self._started = started_in_think
        self._state = "begin"  # then "opened" -> "reasoning" -> "closed" -> "content", or straight to "content"
        self._held = ""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends inside the reasoning block."""
        return self._state in ("opened", "reasoning") or (self._state == "begin" and self._started)

    def push(self, text: str) -> list[Piece]:
        """The pieces that are decided now; none is empty."""
        self._held += text
        pieces: list[Piece] = []
        if self._state == "begin":
            self._begin()
        if self._state == "opened":
            self._skip_line_ends("reasoning")
        if self._state == "reasoning":
            self._reasoning(pieces)
        if self._state == "closed":
            self._skip_line_ends("content")
        if self._state == "content":
            self._emit(pieces, "content", len(self._held))
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back at the end of the text; no line end beside a tag that did not come is lost."""
        pieces: list[Piece] = []
        if self._state == "begin" and self._started:
            self._held = self._held.lstrip("\n")
        self._emit(pieces, "reasoning" if self.thinking else "content", len(self._held))
        return pieces

    def _begin(self) -> None:
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._held = start[len(OPEN) :]
            self._state = "opened"
        elif not OPEN.startswith(start):
            self._state = "opened" if self._started else "content"

    def _skip_line_ends(self, then: str) -> None:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = then

    def _reasoning(self, pieces: list[Piece]) -> None:
        end = self._held.find(CLOSE)
        closed = end >= 0
        if not closed:
            end = len(self._held) - held_suffix(self._held, (CLOSE,))
        # Line ends wait: they go if the closing tag follows.
        n_line_ends = end - len(self._held[:end].rstrip("\n"))
        self._emit(pieces, "reasoning", end - n_line_ends)
        if closed:
            self._held = self._held[n_line_ends + len(CLOSE) :]
            self._state = "closed"

    def _emit(self, pieces: list[Piece], kind: Literal["reasoning", "content"], length: int) -> None:
        if length:
            pieces.append((kind, self._held[:length]))
            self._held = self._held[length:]


def split_thinking(text: str, started_in_think: bool) -> tuple[str, str]:
    """(reasoning, content) of a whole answer."""
    splitter = ThinkingSplitter(started_in_think)
    pieces = splitter.push(text) + splitter.finish()
    reasoning, content = ("".join(t for kind, t in pieces if kind == wanted) for wanted in ("reasoning", "content"))
    return reasoning, content
