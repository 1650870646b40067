"""Drafters and policies for tests, and sessions that draft as told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import strata
from strata.base.geometry import WINDOW_ROWS
from strata.runtime.session import SessionState
from strata.runtime.speculation import Speculator
from strata.session import Session
from strata.spec.drafter import DrafterGuard
from strata.spec.mtp import MtpDrafter
from strata.spec.policy import MAX_DRAFTS, Choice, Outcome, RoundFacts

# ---- drafters


class Oracle:
    """Knows the text to come. Each draft is right with probability `right`, and a random token otherwise.

    text     prompt and answer
    lengths  () -> how many drafts to propose this time; None: as many as asked for
    """

    def __init__(
        self,
        text: Sequence[int],
        right: float = 1.0,
        vocab: int = 4096,
        lengths: Callable[[], int] | None = None,
        seed: int = 0,
    ):
        self.text, self.right, self.vocab, self.lengths = list(map(int, text)), right, vocab, lengths
        self.rng = np.random.default_rng(seed)
        self.calls = 0

    def propose(self, tokens: np.ndarray, k: int) -> list[int]:
        self.calls += 1
        if self.lengths is not None:
            k = min(k, self.lengths())
        coming = self.text[len(tokens) : len(tokens) + k]
        return [t if self.rng.random() < self.right else int(self.rng.integers(self.vocab)) for t in coming]


class PlantedError(Oracle):
    """Right but for one token of each proposal, at 0, 1, 2, ... in turn."""

    def propose(self, tokens: np.ndarray, k: int) -> list[int]:
        drafts = super().propose(tokens, k)
        if drafts:
            drafts[self.calls % len(drafts)] ^= 1
        return drafts


class RandomTokens:
    """Random tokens, 0..7 of them, with random probabilities now and then."""

    def __init__(self, vocab: int = 4096, seed: int = 0):
        self.vocab, self.rng = vocab, np.random.default_rng(seed)

    def propose(self, tokens: np.ndarray, k: int) -> Any:
        n = min(k, int(self.rng.integers(0, MAX_DRAFTS + 1)))
        drafts = self.rng.integers(0, self.vocab, n)
        return (drafts, self.rng.random(n)) if self.rng.random() < 0.5 else drafts


class Misbehaves:
    """As another drafter, until call number `good`; from then on `act(tokens, k)` answers."""

    def __init__(self, drafter: Any, act: Callable[[np.ndarray, int], Any], good: int = 2):
        self.drafter, self.act, self.good, self.calls = drafter, act, good, 0

    def propose(self, tokens: np.ndarray, k: int) -> Any:
        self.calls += 1
        return self.drafter.propose(tokens, k) if self.calls <= self.good else self.act(tokens, k)


# ---- policies


class Told:
    """A policy that asks for what `lengths` says, whatever it costs: no clock decides what a test covers.

    lengths  () -> drafts wanted this round; lookup: share of the rounds that take looked-up tokens if there are any;
             chain: whether looked-up tokens follow the drafts
    """

    probe_ms = total_ms = draft_ms = asking_ms = 0.0
    probing = False

    def __init__(self, lengths: Callable[[], int] = lambda: MAX_DRAFTS, lookup: float = 0.0, chain: bool = False,
                 seed: int = 0):  # fmt: skip
        self.lengths, self.lookup, self.chain = lengths, lookup, chain
        self.rng = np.random.default_rng(seed)
        self.outcomes: list[Outcome] = []

    def window_ms(self, T: int) -> float:
        return 1e6 * T  # beside such windows it costs nothing to be asked every round

    def choose(self, facts: RoundFacts) -> Choice:
        self._room, self._n = facts.room, min(self.lengths(), facts.room)
        if facts.lookup_tokens and (not facts.drafter or self.rng.random() < self.lookup):
            return Choice(0, min(self._n, facts.lookup_tokens), "told")
        return Choice(self._n if facts.drafter else 0, 0, "told")

    def continue_drafting(self, probabilities: Sequence[float | None]) -> bool:
        return True

    def settle(self, probabilities: Sequence[float | None], lookup_tokens: int = 0, match_length: int = 0) -> Choice:
        made = len(probabilities)
        return Choice(made, min(lookup_tokens, self._room - made) if self.chain else 0, "told")

    def observe(self, outcome: Outcome) -> None:
        assert outcome.ms > 0 and 1 <= outcome.rows <= WINDOW_ROWS
        self.outcomes.append(outcome)

    def rested(self, rounds: int, ms: float) -> None:
        raise AssertionError("rounds were skipped under a policy that is to be asked")


def random_lengths(seed: int = 0) -> Callable[[], int]:
    """0..7, each as often."""
    rng = np.random.default_rng(seed)
    return lambda: int(rng.integers(0, MAX_DRAFTS + 1))


# ---- sessions


def drafting_session(model: strata.Model, policy: Any, drafter: Any = None, draft_layer: bool = True,
                     checkpoints: int = 4) -> Session:  # fmt: skip
    """A session beside those of the model that drafts with the draft layer and lookup, with lookup alone, or with a
    user's drafter. policy=None: no drafts."""
    mtp = None
    if draft_layer and model.draft_layer is not None:
        mtp = MtpDrafter(model._backend.draft)
    state = SessionState(model._backend, model.context, checkpoints, mtp)
    if policy is not None:
        guard = None if drafter is None else DrafterGuard(drafter, model.geometry.V)
        state.speculator = Speculator(state, policy, guard)
    return Session(model, state, lambda: None)


@dataclass
class Acceptance:
    """Accepted drafts of rounds that drafted three tokens each: rounds, and how many accepted the first, two, three."""

    rounds: int = 0
    reached: tuple[int, int, int] = (0, 0, 0)

    @property
    def mean(self) -> float:
        return sum(self.reached) / self.rounds

    @property
    def by_position(self) -> list[float]:
        """Acceptance of draft 1, 2, 3, given the ones before."""
        before = (self.rounds, *self.reached)
        return [after / n for after, n in zip(self.reached, before, strict=False)]


def acceptance(model: strata.Model, prompts: Sequence[np.ndarray], n_tokens: int = 64) -> Acceptance:
    """Greedy decoding of n_tokens after each prompt, three drafts of the draft layer a round."""
    found = Acceptance()
    for prompt in prompts:
        policy = Told(lambda: 3)
        session = drafting_session(model, policy, checkpoints=0)
        session.generate(prompt, max_tokens=n_tokens + WINDOW_ROWS, ignore_eos=True)
        made = 0
        for outcome in policy.outcomes:
            if made >= n_tokens:
                break
            (draft,) = (d for d in outcome.drafts if d.source == "mtp")
            assert len(draft.tokens) == 3
            agreed, _ = draft.agreement(outcome.committed)
            found.rounds += 1
            found.reached = tuple(n + (agreed > i) for i, n in enumerate(found.reached))
            made += len(outcome.committed)
    return found


def held_out(val: dict[str, np.ndarray], n: dict[str, int], length: int = 160, n_tokens: int = 64) -> list[np.ndarray]:
    """n[kind] prompts from the beginning of each held-out stream, with room for an answer between them."""
    step = length + n_tokens + 1
    return [val[kind][step * i :][:length].astype(np.int32) for kind, many in n.items() for i in range(many)]


def equal_answers(drafted: strata.Result, plain: strata.Result) -> None:
    """Everything that a caller can see of an answer, but for clocks and what drafting did."""
    assert drafted.tokens == plain.tokens
    assert drafted.text == plain.text
    assert drafted.logprobs == plain.logprobs
    assert (drafted.finish_reason, drafted.stopped_on) == (plain.finish_reason, plain.stopped_on)
    assert (drafted.usage, drafted.seed) == (plain.usage, plain.seed)
    assert plain.drafts is None


class Digests:
    """Hashes of a session's state by the rows it holds."""

    def __init__(self) -> None:
        self.at: dict[int, str] = {}

    def follow(self, session: Session, prompt: Any, **options: Any) -> strata.Result:
        """Answer and hash the state after every commit; a position seen before must have the same hash."""
        with session.stream(prompt, **options) as stream:
            for _ in stream:
                state = session._state.state
                digest = state.digest()
                assert self.at.setdefault(state.rows, digest) == digest, f"after {state.rows} rows"
        return stream.result
