"""The generate loop: read the prompt, then one window per round until a stop.

Each call of `Generation.round` does one bounded piece of work (read the prompt, or one window) under the caller's lock,
so a consumer that stops asking cancels between windows, and `cancel()` from another thread also between the pieces of a
prompt. The last token of an answer is never read into the state; it is the first row of whatever comes next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from strata.base.errors import BadArgument, StrataError
from strata.base.geometry import WINDOW_ROWS
from strata.base.window import HeadRequest
from strata.runtime.reading import Piece, check_room
from strata.runtime.sampling import Draw, SamplingParams, sample
from strata.runtime.session import SessionState

Stop = Callable[[Sequence[int]], int]
"""stop(new tokens) -> how many of them are kept; fewer than given, or a later query of its state, ends the loop."""


class Cancelled(StrataError):
    """The generation was cancelled; the session holds what was read until then."""


@dataclass
class Counts:
    """What a generation did. Times in seconds."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    windows: int = 0
    prompt_s: float = 0.0
    decode_s: float = 0.0

    @property
    def read_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.prompt_tokens - self.reused_tokens

    @property
    def prompt_tokens_per_s(self) -> float:
        """Reading speed: all prompt rows but the last are read before decoding starts."""
        return max(self.read_tokens - 1, 0) / self.prompt_s if self.prompt_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.output_tokens / self.decode_s if self.decode_s > 0 else 0.0


@dataclass
class Generation:
    """One answer in the making.

    session      its state; prompt (n,) int32 token ids, n >= 1
    params       seeded sampling parameters
    max_tokens   None: what the context leaves
    stop         called with each round's tokens; returns how many to keep
    stopped      asked after each round: has a stop been met?
    turn_starts  positions of the prompt where checkpoints are worth it
    """

    session: SessionState
    prompt: np.ndarray
    params: SamplingParams
    max_tokens: int | None = None
    stop: Stop | None = None
    stopped: Callable[[], bool] | None = None
    turn_starts: Sequence[int] = ()
    windows_only: bool = False
    counts: Counts = field(default_factory=Counts)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        if len(self.prompt) == 0:
            raise BadArgument("the prompt is empty", found="0 tokens", needed="at least 1")
        self.counts.prompt_tokens = len(self.prompt)
        self.left = check_room(len(self.prompt), self.max_tokens, self.session.context)
        self._pending = int(self.prompt[-1])
        self._started = False
        self._cancelled = False

    def cancel(self) -> None:
        """Stop at the next border between windows or prompt pieces; safe from any thread."""
        self._cancelled = True

    def _check(self) -> None:
        if self._cancelled:
            raise Cancelled("the generation was cancelled", found=f"{self.session.rows} tokens read")

    @property
    def started(self) -> bool:
        """Whether the prompt has been read."""
        return self._started

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def read_prompt(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Reuse what the session holds and read the prompt up to its last token."""
        began = time.perf_counter()
        self.counts.reused_tokens = self.session.rewind(self.prompt)
        total = len(self.prompt) - 1

        def tell(piece: Piece) -> None:
            if progress is not None:
                progress(piece.start + piece.n, total)

        self.session.read(
            self.prompt[:-1],
            turn_starts=self.turn_starts,
            windows_only=self.windows_only,
            after=tell,
            check=self._check,
        )
        self.counts.prompt_s += time.perf_counter() - began
        self._started = True

    def round(self) -> list[Draw]:
        """Run one window and commit it; returns the tokens kept. The caller holds the model's lock."""
        if self.done:
            return []
        self._check()
        if not self._started:
            self.read_prompt()
        began = time.perf_counter()
        session = self.session
        rows = np.array([self._pending], np.int32)
        position = session.rows
        request = self.params.head_request(session.tokens, rows)
        session.window(rows)
        heads = session.backend.head(0, 1, request)
        draws = [sample(heads, 0, self.params, position, request)]
        session.commit(rows, 1)
        self._pending = draws[-1].token
        kept = len(draws) if self.stop is None else self.stop([d.token for d in draws])
        draws = draws[:kept]
        self.left -= len(draws)
        self.counts.windows += 1
        self.counts.output_tokens += len(draws)
        if self.stopped is not None and self.stopped():
            self.finish_reason = "stop"
        elif self.left <= 0:
            self.finish_reason = "length"
        self.counts.decode_s += time.perf_counter() - began
        return draws

    def __iter__(self) -> Iterator[Draw]:
        while not self.done:
            yield from self.round()


def score(
    session: SessionState, tokens: np.ndarray, windows_only: bool, sink: Callable[[int, np.ndarray], None]
) -> None:
    """Read tokens from an empty state and hand every row's logits to `sink(first position, (n, V) float32 view)`."""
    session.clear()
    request = HeadRequest(full=True)

    def after(piece: Piece) -> None:
        for row in range(0, piece.n, WINDOW_ROWS):
            n = min(WINDOW_ROWS, piece.n - row)
            sink(piece.start + row, session.backend.head(row, n, request).full)

    session.read(tokens, windows_only=windows_only, after=after)
