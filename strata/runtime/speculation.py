"""Speculation of one session: asks the policy what a window should hold, and the drafters for it; keeps the tally."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from strata.base.geometry import WINDOW_ROWS
from strata.runtime.session import SessionState
from strata.spec.drafter import NO_DRAFT, Draft, DrafterGuard
from strata.spec.policy import MAX_DRAFTS, Choice, DraftPolicy, Outcome, RoundFacts
from strata.spec.suffix import SuffixLookup


@dataclass
class Tally:
    """What drafting did. offered and accepted count verified drafts by (source, position in the window from 0);
    committed counts windows by tokens committed, without the rested ones: those of one token that nobody was asked
    about; draft_ms is the drafters' time."""

    offered: Counter = field(default_factory=Counter)
    accepted: Counter = field(default_factory=Counter)
    committed: Counter = field(default_factory=Counter)
    draft_ms: float = 0.0
    rested: int = 0

    def window(self, sources: Sequence[str], n_committed: int, draft_ms: float) -> None:
        """Count a window: sources of the drafts in it, tokens that it committed."""
        for place, source in enumerate(sources):
            self.offered[source, place] += 1
            if place < n_committed - 1:
                self.accepted[source, place] += 1
        self.committed[n_committed] += 1
        self.draft_ms += draft_ms

    def add(self, other: Tally) -> None:
        """Count in what another one counted; safe while that one goes on counting in another thread."""
        for name in ("offered", "accepted", "committed"):
            getattr(self, name).update(dict(getattr(other, name)))
        self.draft_ms += other.draft_ms
        self.rested += other.rested

    def summary(self) -> dict[str, Any]:
        """Plain numbers: windows, committed_per_window, windows_by_committed (index 0: one token), offered, accepted,
        draft_ms, and by_source: offered and accepted by position in the window."""
        committed, offered = dict(self.committed), dict(self.offered)
        committed[1] = committed.get(1, 0) + self.rested
        windows = sum(committed.values())
        tokens = sum(n * count for n, count in committed.items())
        by_source: dict[str, dict[str, list[int]]] = {}
        for (source, place), count in sorted(offered.items()):
            entry = by_source.setdefault(source, {"offered": [], "accepted": []})
            for key, value in (("offered", count), ("accepted", self.accepted[source, place])):
                entry[key] += [0] * (place + 1 - len(entry[key]))
                entry[key][place] = value
        return {
            "windows": windows,
            "committed_per_window": tokens / windows if windows else 0.0,
            "windows_by_committed": [committed.get(n, 0) for n in range(1, WINDOW_ROWS + 1)],
            "offered": sum(offered.values()),
            "accepted": sum(e for entry in by_source.values() for e in entry["accepted"]),
            "draft_ms": self.draft_ms,
            "by_source": by_source,
        }


def drafting_facts(speculators: Sequence[Speculator]) -> dict[str, Any] | None:
    """What the speculators of a model did altogether, and what their policy knows; None without any.

    Beside the fields of `Tally.summary`: drafters, why a user's drafter was switched_off (or None), window_ms of
    T = 1..8 rows, one_draft_ms and asking_ms (lookup and policy in a round) as expected now, 0.0 before they are
    known, and probe_share of all time so far.
    """
    if not speculators:
        return None
    first, total = speculators[0], Tally()
    for speculator in speculators:
        total.add(speculator.total)
    policy, guard = first.policy, first.guard
    own = ["user"] if guard is not None else ["mtp"] if first.session.mtp is not None else []
    return total.summary() | {
        "drafters": [*own, "lookup"],
        "switched_off": None if guard is None else guard.disabled,
        "window_ms": [policy.window_ms(T) for T in range(1, WINDOW_ROWS + 1)],
        "one_draft_ms": policy.draft_ms if own else 0.0,
        "asking_ms": policy.asking_ms,
        "probe_share": max(policy.probe_ms, 0.0) / policy.total_ms if policy.total_ms > 0 else 0.0,  # probes may gain
    }


@functools.cache
def _compile_lookup() -> None:
    """Nothing compiles after load."""
    lookup = SuffixLookup()
    for tokens in (np.arange(8, dtype=np.int32), np.arange(8)):  # prompts are int32, lists become int64
        lookup.extend(tokens)
        lookup.propose(2, after=[1, 2, 3])
    lookup.truncate(12)
    lookup.truncate(1)


class Proposed(NamedTuple):
    """A round's drafts: all that were made, and the tokens that go into the window with their sources.

    draft_ms   the drafter's time         asking_ms  lookup's and the policy's time
    late_ms    part of draft_ms that went into rows of earlier rounds without drafts
    """

    drafts: tuple[Draft, ...] = ()
    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    distributions: tuple = ()
    draft_ms: float = 0.0
    asking_ms: float = 0.0
    late_ms: float = 0.0


NOTHING = Proposed()

ASKING_SHARE = 0.002
"""Part of the time that asking lookup and policy may take in stretches where they draft nothing."""

LONGEST_REST = 64
"""Rounds."""

FRUITLESS = 3
"""Rounds in a row whose drafts were not worth verifying: from then on they count as rounds without drafts."""

CHEAP_DRAFT_MS = 0.15
"""A draft of less is made at once with those that will probably follow it: asking the policy between two drafts, and
waiting for the backend, takes more time than a draft in vain now and then."""


class Speculator:
    """Drafts of one session under a policy that the whole model shares.

    Asking is Python and takes a fraction of a millisecond. That is nothing beside a large model's window and much
    beside a small one's, so it counts as a cost: the policy adds it to the time of windows with drafts, and while
    nothing is drafted, rounds are skipped, 1, 3, 7, ... at a time, until asking takes ASKING_SHARE of the time.

    rest    rounds that are not asked about from here on, of one row each: `rested` takes them, `propose` all others
    total   what drafting did since the session's memory was made
    guard   a user's own drafter, or None: then the session's draft layer is used, if it has one
    """

    def __init__(self, session: SessionState, policy: DraftPolicy, guard: DrafterGuard | None = None):
        self.session, self.policy, self.guard = session, policy, guard
        _compile_lookup()
        self.lookup = SuffixLookup()
        self.total = Tally()
        self._known, self._seen = np.zeros(0, np.int32), 0
        self._wake_up()

    def _wake_up(self) -> None:
        self._last_rest = self.rest = 0  # rounds to skip, as they were given and as they are left
        self._rested_s = 0.0  # seconds of those that the policy was not told of
        self._fruitless = 0  # rounds in a row whose drafts were made in vain

    def begin(self, prompt: np.ndarray) -> None:
        """A new prompt: the lookup goes back to what both have in common and follows."""
        self._wake_up()
        n = min(len(self._known), len(prompt))
        different = np.flatnonzero(self._known[:n] != prompt[:n])
        common = int(different[0]) if different.size else n
        self.lookup.truncate(common)
        self.lookup.extend(prompt[common:])
        self._seen = len(prompt)  # tokens that the lookup holds
        self._known = prompt.copy()

    def end(self, tokens: np.ndarray) -> None:
        """The answer is over: prompt and answer, as far as the lookup knows them."""
        self._learn_rested()
        self.lookup.extend(tokens[self._seen :])
        self._seen = len(tokens)
        self._known = tokens

    def rested(self, seconds: float, tally: Tally) -> None:
        """A round that was not asked about: one row, one token."""
        self.rest -= 1
        self._rested_s += seconds
        tally.rested += 1
        self.total.rested += 1

    def _learn_rested(self) -> None:
        if self._rested_s > 0.0:
            self.policy.rested(self._last_rest - self.rest, self._rested_s * 1e3)
            self._rested_s = 0.0

    def propose(self, pending: int, room: int) -> Proposed:
        """Drafts for the window that begins with `pending`; room: most drafts it may hold."""
        began = time.perf_counter()
        self._learn_rested()
        text = self.session.text(pending)
        self.lookup.extend(text[self._seen :])
        self._seen = len(text)
        room, mtp = min(room, MAX_DRAFTS), self.session.mtp
        stepwise = self.guard is None
        can = mtp is not None if stepwise else self.guard.disabled is None
        found = self.lookup.propose(room)
        choice = self.policy.choose(RoundFacts(room, can, stepwise, len(found.tokens), found.match_length))
        if not (found.tokens or choice.n_drafts):
            return Proposed(asking_ms=(time.perf_counter() - began) * 1e3)
        drafts = [Draft(found.tokens, None, "lookup", found.match_length)] if found.tokens else []
        tokens, sources = found.tokens[: choice.n_lookup], ("lookup",) * choice.n_lookup
        draft_ms = late_ms = 0.0
        if choice.n_drafts:
            asked = time.perf_counter()
            if stepwise and mtp.behind > WINDOW_ROWS:
                mtp.catch_up(self.session.state)
                late_ms = (time.perf_counter() - asked) * 1e3
            made = self._ask(pending, choice)
            draft_ms = (time.perf_counter() - asked) * 1e3
            drafts.append(made)
            tokens, sources = self._settle(made, room, drafts)
        asking_ms = (time.perf_counter() - began) * 1e3 - draft_ms
        return Proposed(tuple(drafts), tokens, sources, (None,) * len(tokens), draft_ms, asking_ms, late_ms)

    def _ask(self, pending: int, choice: Choice) -> Draft:
        n = choice.n_drafts
        if self.guard is not None:
            return self.guard.propose(np.append(self.session.tokens, np.int32(pending)), n)
        likely = n if choice.planned is None else choice.planned
        tokens, probabilities = self.session.mtp.propose(
            self.session.state, pending, n, self.policy.continue_drafting,
            at_once=likely if self.policy.draft_ms < CHEAP_DRAFT_MS else 1,
        )  # fmt: skip
        return Draft(tuple(tokens), tuple(probabilities), "mtp") if tokens else NO_DRAFT

    def _settle(self, made: Draft, room: int, drafts: list[Draft]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Tokens of the window and their sources, once the drafter has made its drafts. What is looked up behind them
        is added to `drafts`."""
        if not made.tokens:
            return (), ()
        more = self.lookup.propose(room - len(made.tokens), after=made.tokens)
        probabilities = made.probabilities or (None,) * len(made.tokens)
        choice = self.policy.settle(probabilities, len(more.tokens), more.match_length)
        if more.tokens:
            drafts.append(Draft(more.tokens, None, "chain", more.match_length, len(made.tokens)))
        tokens = made.tokens[: choice.n_drafts] + more.tokens[: choice.n_lookup]
        return tokens, (made.source,) * choice.n_drafts + ("chain",) * choice.n_lookup

    def observe(self, proposed: Proposed, ms: float, committed: list[int], tally: Tally) -> None:
        """Learn from a round: its milliseconds without the drafter's, and the tokens it committed."""
        for counted in (tally, self.total):
            counted.window(proposed.sources, len(committed), proposed.draft_ms)
        began = time.perf_counter()
        self._fruitless = 0 if proposed.tokens else self._fruitless + (proposed.draft_ms > 0.0)
        idle = not proposed.tokens and (proposed.draft_ms == 0.0 or self._fruitless >= FRUITLESS)
        self.policy.observe(
            Outcome(1 + len(proposed.tokens), max(ms - proposed.asking_ms, 1e-6), proposed.draft_ms - proposed.late_ms,
                    committed, proposed.drafts, proposed.late_ms + proposed.asking_ms)
        )  # fmt: skip
        judging_ms = (time.perf_counter() - began) * 1e3
        self.policy.asking_ms = _follow(self.policy.asking_ms, judging_ms + proposed.asking_ms)
        if idle:
            self._last_rest = self._rest_after(self._last_rest)
        elif not (self.policy.probing and len(committed) == 1):  # a probe in vain changes nothing
            self._last_rest = 0
        self.rest = self._last_rest

    def _rest_after(self, last: int) -> int:
        """Rounds to skip after one in which nothing was drafted."""
        longest = self.policy.asking_ms / (ASKING_SHARE * max(self.policy.window_ms(1), 1e-6))
        return min(2 * last + 1, int(longest), LONGEST_REST)


def _follow(mean: float, value: float) -> float:
    """A running mean that a stray slow value moves little; a first one that pays for set-up is soon forgotten."""
    return value if mean == 0.0 or value < 0.5 * mean else mean + 0.1 * (min(value, 2.0 * mean) - mean)
