"""The generate loop: read the prompt, then one window per round until a stop.

Each call of `Generation.round` does one bounded piece of work (read the prompt, or one window) under the caller's lock,
so a consumer that stops asking cancels between windows, and `cancel()` from another thread also between the pieces of a
prompt. The last token of an answer is never read into the state; it is the first row of whatever comes next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from strata.base.errors import BadArgument, StrataError
from strata.base.geometry import WINDOW_ROWS
from strata.base.window import HeadRequest, HeadRows
from strata.runtime.reading import Piece, check_room
from strata.runtime.rng import ACCEPT, RESIDUAL, uniform
from strata.runtime.sampling import Draw, SamplingParams, draw_of, row_distribution, sample
from strata.runtime.session import SessionState
from strata.runtime.speculation import NOTHING, Proposed, Speculator, Tally
from strata.spec.accept import accept_window

Stop = Callable[[Sequence[int]], int]
"""stop(new tokens) -> how many of them are kept; fewer than given, or a later query of its state, ends the loop."""


class Step(NamedTuple):
    """One token of an answer; source: who drafted it ("mtp", "lookup", "chain", "user"), or None."""

    draw: Draw
    source: str | None = None


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
    speculator   drafts for the windows, or None
    acceptance   of sampled drafts: "exact" (the same text as without drafts) or "rejection" (the same distribution)
    """

    session: SessionState
    prompt: np.ndarray
    params: SamplingParams
    max_tokens: int | None = None
    stop: Stop | None = None
    stopped: Callable[[], bool] | None = None
    turn_starts: Sequence[int] = ()
    windows_only: bool = False
    speculator: Speculator | None = None
    acceptance: str = "exact"
    counts: Counts = field(default_factory=Counts)
    tally: Tally = field(default_factory=Tally)
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

    def read_prompt(
        self,
        on_progress: Callable[[int, int], None] | None = None,
        turn: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        """Reuse what the session holds and read the prompt up to its last token.

        turn() holds the backend for a piece of it; without one the caller does.
        """
        began = time.perf_counter()
        with turn():
            self.counts.reused_tokens = self.session.rewind(self.prompt)
        total = len(self.prompt) - 1

        def tell(piece: Piece) -> None:
            if on_progress is not None:
                on_progress(piece.start + piece.n, total)

        self.session.read(
            self.prompt[:-1],
            turn_starts=self.turn_starts,
            windows_only=self.windows_only,
            behind=tell,
            check=self._check,
            turn=turn,
        )
        if self.speculator is not None:
            with turn():
                self.speculator.begin(self.prompt)
        self.counts.prompt_s += time.perf_counter() - began
        self._started = True

    def round(self) -> list[Step]:
        """Run one window and commit what is kept of it; returns the tokens kept. The caller holds the model's lock."""
        if self.done:
            return []
        self._check()
        if not self._started:
            self.read_prompt()
        began = time.perf_counter()
        session, speculator = self.session, self.speculator
        resting = speculator is None or speculator.rest > 0
        proposed = NOTHING if resting else speculator.propose(self._pending, self.left - 1)
        rows = np.array([self._pending, *proposed.tokens], np.int32)
        drafted_s = proposed.draft_ms / 1e3
        position = session.rows
        request = self.params.head_request(session.tokens, rows)
        session.window(rows)
        heads = session.backend.head(0, len(rows), request)
        draws = self._accept(heads, request, position, proposed)
        tokens = [d.token for d in draws]
        kept = len(draws) if self.stop is None else self.stop(tokens)
        session.commit(rows, kept)
        self._pending = tokens[kept - 1]
        self.left -= kept
        self.counts.windows += 1
        self.counts.output_tokens += kept
        if self.stopped is not None and self.stopped():
            self.finish_reason = "stop"
        elif self.left <= 0:
            self.finish_reason = "length"
        seconds = time.perf_counter() - began
        self.counts.decode_s += seconds
        if speculator is not None:
            if resting:
                speculator.rested(seconds, self.tally)
            else:
                speculator.observe(proposed, (seconds - drafted_s) * 1e3, tokens[:kept], self.tally)
            if self.done:
                speculator.end(np.append(session.tokens, np.int32(self._pending)))
        sources = [*proposed.sources[: len(draws) - 1], None]
        return [Step(d, s) for d, s in zip(draws[:kept], sources, strict=False)]

    def _accept(self, heads: HeadRows, request: HeadRequest, position: int, proposed: Proposed) -> list[Draw]:
        """The draws that the window commits: accepted drafts and one more."""
        params, draws = self.params, {}

        def draw(t: int) -> int:
            draws[t] = sample(heads, t, params, position + t, request)
            return draws[t].token

        if not proposed.tokens:
            draw(0)
            return [draws[0]]
        mode = "greedy" if params.greedy else self.acceptance
        tokens = accept_window(
            mode,
            proposed.tokens,
            draw,
            lambda t: row_distribution(heads, t, params, request),
            lambda t: tuple(uniform(params.seed, position + t, stream) for stream in (ACCEPT, RESIDUAL)),
            proposed.distributions,
        )
        return [
            draws[t] if t in draws and draws[t].token == token else draw_of(heads, t, token, params)
            for t, token in enumerate(tokens)
        ]

    def __iter__(self) -> Iterator[Step]:
        while not self.done:
            yield from self.round()


def score(
    session: SessionState,
    tokens: np.ndarray,
    windows_only: bool,
    sink: Callable[[int, np.ndarray], None],
    turn: Callable[[], AbstractContextManager] = nullcontext,
) -> None:
    """Read tokens from an empty state and hand every row's logits to `sink(first position, (n, V) float32 view)`.

    turn() holds the backend for a piece of them; without one the caller does.
    """
    with turn():
        session.clear()
    request = HeadRequest(full=True)

    def after(piece: Piece) -> None:
        for row in range(0, piece.n, WINDOW_ROWS):
            n = min(WINDOW_ROWS, piece.n - row)
            sink(piece.start + row, session.backend.head(row, n, request).full)

    session.read(tokens, windows_only=windows_only, after=after, turn=turn)
