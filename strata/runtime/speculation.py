"""Speculation of one session: asks the policy what a window should hold, and the drafters for it; keeps the tally."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from strata.runtime.session import SessionState
from strata.spec.drafter import NO_DRAFT, Draft, DrafterGuard
from strata.spec.policy import MAX_DRAFTS, DraftPolicy, Outcome, RoundFacts
from strata.spec.suffix import SuffixLookup


@dataclass
class Tally:
    """What drafting did. offered and accepted count verified drafts by (source, position in the window from 0);
    committed counts windows by tokens committed; draft_ms is the drafters' time."""

    offered: Counter = field(default_factory=Counter)
    accepted: Counter = field(default_factory=Counter)
    committed: Counter = field(default_factory=Counter)
    draft_ms: float = 0.0

    def add(self, other: Tally) -> None:
        self.offered += other.offered
        self.accepted += other.accepted
        self.committed += other.committed
        self.draft_ms += other.draft_ms

    def summary(self) -> dict[str, object]:
        """Plain numbers: totals, and offered and accepted by source and position."""
        windows = sum(self.committed.values())
        tokens = sum(n * count for n, count in self.committed.items())
        by_source: dict[str, dict[str, list[int]]] = {}
        for (source, place), count in sorted(self.offered.items()):
            entry = by_source.setdefault(source, {"offered": [], "accepted": []})
            for key, value in (("offered", count), ("accepted", self.accepted[source, place])):
                entry[key] += [0] * (place + 1 - len(entry[key]))
                entry[key][place] = value
        return {
            "windows": windows,
            "committed_per_window": tokens / windows if windows else 0.0,
            "offered": sum(self.offered.values()),
            "accepted": sum(self.accepted.values()),
            "draft_ms": self.draft_ms,
            "by_source": by_source,
        }


@dataclass(frozen=True)
class Proposed:
    """A round's drafts: all that were made, and the tokens that go into the window with their sources."""

    drafts: tuple[Draft, ...] = ()
    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    distributions: tuple = ()
    draft_ms: float = 0.0


NOTHING = Proposed()


class Speculator:
    """Drafts of one session under a policy that the whole model shares.

    guard   a user's own drafter, or None: then the session's draft layer is used, if it has one
    """

    def __init__(self, session: SessionState, policy: DraftPolicy, guard: DrafterGuard | None = None):
        self.session, self.policy, self.guard = session, policy, guard
        self.lookup = SuffixLookup()
        self.total = Tally()
        self._known = np.zeros(0, np.int32)

    def begin(self, prompt: np.ndarray) -> None:
        """A new prompt: the lookup goes back to what both have in common and follows."""
        n = min(len(self._known), len(prompt))
        different = np.flatnonzero(self._known[:n] != prompt[:n])
        common = int(different[0]) if different.size else n
        self.lookup.truncate(common)
        self.lookup.extend(prompt[common:])
        self._known = prompt.copy()

    def end(self, tokens: np.ndarray) -> None:
        """The answer is over: prompt and answer, as far as the lookup knows them."""
        self._known = tokens

    def add(self, tally: Tally) -> None:
        """Count a generation into the session's total."""
        self.total.add(tally)

    def propose(self, pending: int, room: int) -> Proposed:
        """Drafts for the window that begins with `pending`; room: most drafts it may hold."""
        room, mtp = min(room, MAX_DRAFTS), self.session.mtp
        stepwise = self.guard is None
        asked = mtp is not None if stepwise else self.guard.disabled is None
        found = self.lookup.propose(room)
        choice = self.policy.choose(RoundFacts(room, asked, stepwise, len(found.tokens), found.match_length))
        lookup = Draft(tuple(found.tokens), None, "lookup", found.match_length)
        if choice.n_drafts == 0:
            drafts = (lookup,) if found.tokens else ()
            return self._window(drafts, lookup.tokens[: choice.n_lookup], ("lookup",) * choice.n_lookup)
        began = time.perf_counter()
        made = self._ask(pending, choice.n_drafts)
        draft_ms = (time.perf_counter() - began) * 1e3
        drafts, probabilities = [made], list(made.probabilities or (None,) * len(made.tokens))
        if found.tokens:
            drafts.append(lookup)
        if not made.tokens:
            return self._window(tuple(drafts), (), (), draft_ms)
        more = self.lookup.propose(room - len(made.tokens), after=made.tokens)
        choice = self.policy.settle(probabilities, len(more.tokens), more.match_length)
        if more.tokens:
            drafts.append(Draft(tuple(more.tokens), None, "chain", more.match_length, len(made.tokens)))
        tokens = made.tokens[: choice.n_drafts] + tuple(more.tokens[: choice.n_lookup])
        sources = (made.source,) * choice.n_drafts + ("chain",) * choice.n_lookup
        return self._window(tuple(drafts), tokens, sources, draft_ms)

    def _ask(self, pending: int, n: int) -> Draft:
        if self.guard is not None:
            return self.guard.propose(np.append(self.session.tokens, np.int32(pending)), n)
        tokens, probabilities = self.session.mtp.propose(
            self.session.state, pending, n, self.policy.continue_drafting
        )
        return Draft(tuple(tokens), tuple(probabilities), "mtp") if tokens else NO_DRAFT

    @staticmethod
    def _window(drafts: tuple, tokens: tuple, sources: tuple, draft_ms: float = 0.0) -> Proposed:
        return Proposed(drafts, tokens, sources, (None,) * len(tokens), draft_ms)

    def observe(self, proposed: Proposed, ms: float, committed: list[int], tally: Tally) -> None:
        """Learn from a round: its window's milliseconds without drafting, and the tokens it committed."""
        T = 1 + len(proposed.tokens)
        self.policy.observe(Outcome(T, ms, proposed.draft_ms, committed, proposed.drafts))
        self.lookup.extend(committed)
        for place, source in enumerate(proposed.sources):
            tally.offered[source, place] += 1
            tally.accepted[source, place] += place < len(committed) - 1
        tally.committed[len(committed)] += 1
        tally.draft_ms += proposed.draft_ms
