"""What drafting gains where acceptance is known: a drafter that knows the answer, and spoils a part of its tokens.

The answer is decoded once without drafts. The drafter then proposes its tokens, each right with a given probability, so
the policy is met by any acceptance on any model, one of random weights included. The drafter costs next to nothing, and
nothing is looked up in earlier text: what is measured is windows of several rows, acceptance, commits and the policy.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.base.errors import StrataError
from strata.runtime.generate import Generation
from strata.runtime.sampling import SamplingParams
from strata.runtime.session import SessionState
from strata.runtime.speculation import Speculator, Tally
from strata.spec.drafter import DrafterGuard
from strata.spec.policy import DraftPolicy
from strata.spec.suffix import NOTHING, Proposal

if TYPE_CHECKING:
    from strata.model import Model

PROMPT_TOKENS = 64


class KnowsTheAnswer:
    """A drafter that knows prompt and answer. Each token it drafts is right with probability `acceptance`.

    Whether it spoils the token of a position, and in what way, depends on the seed and the position only.
    """

    def __init__(self, text: np.ndarray, acceptance: float, vocab: int, seed: int = 1):
        rng = np.random.default_rng(seed)
        spoiled = rng.random(len(text)) >= acceptance
        other = (text + 1 + rng.integers(0, vocab - 1, len(text))) % vocab  # never the token itself
        self._drafts: list[int] = np.where(spoiled, other, text).tolist()

    def propose(self, tokens: np.ndarray, k: int) -> Sequence[int]:
        return self._drafts[len(tokens) : len(tokens) + k]


class _NoLookup:
    """In place of `SuffixLookup`: knows nothing."""

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def truncate(self, n: int) -> None:
        pass

    def propose(self, k: int, after: Sequence[int] = ()) -> Proposal:
        return NOTHING


@contextlib.contextmanager
def replayed_by_position(model: Model, table: np.ndarray | None) -> Iterator[None]:
    """Within the block the row at position p asks for the experts of table[p modulo n], (n, L, K) int32, drafted or
    not: then drafts cannot change what an answer's windows read. None: for those that the model chooses."""
    if table is None:
        yield
        return
    backend: Any = model._backend
    if model.plan.device == "cpu":
        from strata.replay import routing

        with routing(backend, table):
            yield
        return
    from strata.gpu_speed import replayed

    with replayed(backend, table, sorted(backend.programs.windows), by_position=True):
        yield


@dataclass(frozen=True)
class Gain:
    """Answers without and with drafts in turn, of one acceptance.

    without, with_  tokens a second of each answer
    committed       tokens a window of the drafted answers; windows_by_committed: windows of 1..8 tokens
    offered, accepted   drafts
    window_ms       of T = 1..8 rows as the policy expects them, 0 for those never run
    """

    acceptance: float
    without: tuple[float, ...]
    with_: tuple[float, ...]
    committed: float
    windows_by_committed: tuple[int, ...]
    offered: int
    accepted: int
    window_ms: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median rate with drafts over median rate without."""
        return float(np.median(self.with_) / np.median(self.without))


def _random_prompt(model: Model, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, model.geometry.V, PROMPT_TOKENS).astype(np.int32)


STRETCH_TOKENS = 16
"""Tokens that one of two answers is ahead before the other goes on: both meet the same noise, and a device seldom
changes between their sessions."""


class _Answer:
    """A greedy answer in the making. seconds and timed_tokens leave out the first window, which reads the prompt."""

    def __init__(self, model: Model, session: SessionState, prompt: np.ndarray, n_tokens: int):
        session.clear()
        self._turn = model.turn
        self._generation = Generation(session, prompt, SamplingParams().seeded(), n_tokens + 1,
                                      windows_only=model.windows_only, speculator=session.speculator)  # fmt: skip
        self.tokens: list[int] = []
        self.seconds = 0.0
        self._window()
        self._untimed = len(self.tokens)

    @property
    def done(self) -> bool:
        return self._generation.done

    @property
    def tally(self) -> Tally:
        return self._generation.tally

    @property
    def per_s(self) -> float:
        return (len(self.tokens) - self._untimed) / self.seconds

    def _window(self) -> None:
        with self._turn():
            self.tokens += [step.draw.token for step in self._generation.round()]

    def go_on(self, n_tokens: int) -> None:
        """Until there are n_tokens, or the answer is over."""
        began = time.perf_counter()
        while len(self.tokens) < n_tokens and not self.done:
            self._window()
        self.seconds += time.perf_counter() - began


PACE_TOKENS = 12
"""Of the short answer that says how fast a model is."""

LEAST_TOKENS, MOST_TOKENS, MOST_REPEATS = 16, 256, 3
"""Of lengths that are chosen."""


@dataclass(frozen=True)
class Pace:
    """Seconds that an answer takes: for reading the prompt, and for each token."""

    prompt_s: float
    token_s: float


def pace_of(model: Model, seed: int = 1) -> Pace:
    """Measured on a short answer without drafts, the second: the first one touches memory for the first time."""
    session = SessionState(model._backend, model.context, checkpoints=0)
    found = Pace(0.0, 0.0)
    for _ in range(2):
        began = time.perf_counter()
        answer = _Answer(model, session, _random_prompt(model, seed), PACE_TOKENS)
        prompt_s = time.perf_counter() - began
        answer.go_on(PACE_TOKENS + 1)
        found = Pace(prompt_s, 1 / answer.per_s)
    return found


def answers_of(acceptances: int, repeats: int) -> int:
    """Answers that a measurement decodes: one for the drafter to know, then pairs, of which the first only teaches."""
    return 1 + 2 * acceptances * (repeats + 1)


@dataclass(frozen=True)
class Lengths:
    """tokens of an answer, repeats of a pair, and the seconds that all answers take if drafting gains nothing."""

    tokens: int
    repeats: int
    seconds: float


def lengths_for(
    pace: Pace, budget_s: float, acceptances: int, tokens: int | None = None, repeats: int | None = None
) -> Lengths:
    """Lengths of a measurement. What is given stays; the rest is chosen to end within `budget_s`, if answers of
    LEAST_TOKENS can."""
    chosen = Lengths(0, 0, 0.0)
    for n in [MOST_REPEATS, 1] if repeats is None else [repeats]:
        answers = answers_of(acceptances, n)
        room = int((budget_s / answers - pace.prompt_s) / pace.token_s) // 8 * 8
        length = min(max(room, LEAST_TOKENS), MOST_TOKENS) if tokens is None else tokens
        chosen = Lengths(length, n, answers * (pace.prompt_s + length * pace.token_s))
        if chosen.seconds <= budget_s:
            break
    return chosen


class DraftGain:
    """Measures gains on one model, all sessions from the same prompt of random tokens."""

    def __init__(self, model: Model, n_tokens: int, seed: int = 1):
        self.model, self.n_tokens, self.seed = model, n_tokens, seed
        self.prompt = _random_prompt(model, seed)
        self.plain = SessionState(model._backend, model.context, checkpoints=0)
        self.drafted = SessionState(model._backend, model.context, checkpoints=0)
        first = self._answer(self.plain)
        first.go_on(n_tokens + 1)
        self._wanted = first.tokens

    def _answer(self, session: SessionState) -> _Answer:
        return _Answer(self.model, session, self.prompt, self.n_tokens)

    def _pair(self) -> tuple[_Answer, _Answer]:
        """Answers without and with drafts, whoever is behind going on."""
        plain, drafted = self._answer(self.plain), self._answer(self.drafted)
        while not (plain.done and drafted.done):
            behind, ahead = (plain, drafted) if len(plain.tokens) <= len(drafted.tokens) else (drafted, plain)
            behind.go_on(len(ahead.tokens) + STRETCH_TOKENS)
        return plain, drafted

    def measure(self, acceptance: float, repeats: int) -> Gain:
        """Decode without and with drafts, answers taking turns; the first of each only teaches the policy.

        StrataError if drafts change an answer.
        """
        text = np.concatenate([self.prompt, self._wanted])
        drafter = KnowsTheAnswer(text, acceptance, self.model.geometry.V, self.seed)
        policy = DraftPolicy()
        self.drafted.speculator = Speculator(self.drafted, policy, DrafterGuard(drafter, self.model.geometry.V))
        self.drafted.speculator.lookup = _NoLookup()
        found: list[tuple[_Answer, _Answer]] = []
        for _ in range(repeats + 1):
            pair = self._pair()
            if pair[0].tokens != pair[1].tokens:
                raise StrataError("drafting changed an answer", found=f"acceptance {acceptance}",
                                  needed="the same tokens", advice="Please report this.")  # fmt: skip
            found.append(pair)
        drafted = [pair[1] for pair in found[1:]]
        facts = [answer.tally.summary() for answer in drafted]
        windows, tokens = sum(f["windows"] for f in facts), sum(len(answer.tokens) for answer in drafted)
        return Gain(
            acceptance=acceptance,
            without=tuple(pair[0].per_s for pair in found[1:]),
            with_=tuple(answer.per_s for answer in drafted),
            committed=tokens / windows,
            windows_by_committed=tuple(int(n) for n in np.sum([f["windows_by_committed"] for f in facts], axis=0)),
            offered=sum(f["offered"] for f in facts),
            accepted=sum(f["accepted"] for f in facts),
            window_ms=tuple(policy.window_ms(T) for T in range(1, 9)),
        )
