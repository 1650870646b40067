"""Stop strings over streamed text, and over tokens for the generate loop.

The stop string that is complete first wins; of two that end at the same character, the one that starts earlier. This
depends on the characters alone, not on how they were split into tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from strata.base.errors import need
from strata.base.numbers import not_unicode, shown
from strata.text.detokenizer import Detokenizer
from strata.text.tokenizer import Tokenizer


def held_suffix(text: str, tags: Iterable[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `tags`."""
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:length]):
                longest = length
                break
    return longest


def stop_strings(stop: object) -> tuple[str, ...]:
    """The strings of `stop`: none for None, one, or those of a sequence. BadArgument for one that could never match."""
    several = isinstance(stop, Sequence) and not isinstance(stop, str | bytes)
    strings = () if stop is None else tuple(stop) if several else (stop,)
    for i, text in enumerate(strings):
        name = f"stop[{i}]" if several else "stop"
        need(isinstance(text, str), f"{name} is not a string", found=shown(text), needed="one string or several")
        need(text != "", f"{name} is empty", found="''", needed="at least one character",
             advice="Leave stop out instead.")  # fmt: skip
        wrong = not_unicode(text)
        need(wrong is None, f"{name} is not valid Unicode and could never match", found=wrong,
             needed="text that UTF-8 can hold")  # fmt: skip
    return strings


class StopStrings:
    """Passes text on until a stop string is complete, holding back what may begin one.

    stop     one string or several, none empty
    matched  the stop string found, or None
    """

    def __init__(self, stop: str | Sequence[str] = ()):
        self._stop = stop_strings(stop)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text to emit, stopped). Once stopped, the text before the stop string is out and nothing more follows."""
        if self.matched is not None:
            return "", True
        self._held += text
        ends = ((start + len(s), start, s) for s in self._stop if (start := self._held.find(s)) >= 0)
        first = min(ends, default=None)
        if first is not None:
            _, start, self.matched = first
            emit, self._held = self._held[:start], ""
            return emit, True
        keep = len(self._held) - held_suffix(self._held, self._stop)
        emit, self._held = self._held[:keep], self._held[keep:]
        return emit, False

    def finish(self) -> str:
        """The text held back when generation ended without a stop string."""
        text, self._held = self._held, ""
        return text


class TextStop:
    """Tokens in, text out, and how many tokens to keep: the `stop(tokens) -> n_keep` of the generate loop.

    Call it with the new tokens of each round, in order. The result counts those up to and including the token that
    completed a stop string or is a stop id; without one it is len(tokens). The text ends exactly before the stop
    string, and a stop id gives no text.

    stop          stop strings
    stop_ids      ids that end generation; None means those of the tokenizer, () means none
    skip_special  leave control tokens out of the text
    finished_by   None, "stop_id" or "stop_string"
    stopped_on    the stop string or stop id found, or None
    n_tokens      tokens kept so far
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: str | Sequence[str] = (),
        stop_ids: Iterable[int] | None = None,
        skip_special: bool = False,
    ):
        self._detokenizer = Detokenizer(tokenizer, skip_special)
        self._strings = StopStrings(stop)
        self._stop_ids = frozenset(tokenizer.stop_ids if stop_ids is None else stop_ids)
        self._ready: list[str] = []
        self.finished_by: str | None = None
        self.stopped_on: str | int | None = None
        self.n_tokens = 0

    @property
    def stopped(self) -> bool:
        return self.finished_by is not None

    def __call__(self, tokens: Iterable[int]) -> int:
        """Consume the new tokens of a round; how many of them to keep (0 when already stopped)."""
        kept = 0
        for token in tokens:
            if self.stopped:
                break
            kept += 1
            token = int(token)
            if token in self._stop_ids:
                self._emit(self._detokenizer.finish())
                # The last characters may themselves complete a stop string; then that is the reason.
                if not self.stopped:
                    self.finished_by, self.stopped_on = "stop_id", token
                    self._ready.append(self._strings.finish())
            else:
                self._emit(self._detokenizer.push(token))
        self.n_tokens += kept
        return kept

    def take(self) -> str:
        """The text that became ready since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def finish(self) -> str:
        """`take` plus what was held back; call it once after the last token, stopped or not."""
        if not self.stopped:
            self._emit(self._detokenizer.finish())
            self._ready.append(self._strings.finish())
        return self.take()

    def _emit(self, text: str) -> None:
        emit, stopped = self._strings.push(text)
        self._ready.append(emit)
        if stopped and not self.stopped:
            self.finished_by, self.stopped_on = "stop_string", self._strings.matched
