"""Draft policy: what each round's window holds, so that tokens per measured millisecond are most.

A round is worth its expected committed tokens minus what its milliseconds would have brought at the rate of the last
rounds (the rate is never taken below one row's). The best choice by that measure is the one with the best long-run
rate, and it can never be expected to lose against T = 1, which is always among the choices. What is not chosen is
tried now and then: probes are paid from a budget of 0.8 % of the time, and a probe that changes nothing doubles the
pause before the next of its kind.

A round:

    choice = policy.choose(RoundFacts(room, drafter=True, lookup_tokens=len(found.tokens), match_length=...))
    while len(made) < choice.n_drafts and (not made or policy.continue_drafting(probabilities)):
        ...make one draft...
    if made:
        choice = policy.settle(probabilities, n_lookup_tokens_after_them, their_match_length)
    ...run the window [last token, first n_drafts made, first n_lookup looked up], accept, commit...
    policy.observe(Outcome(rows, ms, draft_ms, committed, drafts))

The object holds no clock and no randomness: the same calls give the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from strata.base.errors import need
from strata.base.geometry import WINDOW_ROWS
from strata.spec.drafter import Draft
from strata.spec.estimates import CHAIN_PRIORS, EMPTY, LOOKUP_PRIORS, SHAPE, Costs, DrafterRates, LookupRates

MAX_DRAFTS = WINDOW_ROWS - 1
MARGIN = 0.02
"""Tokens a round that drafting must be expected to gain over T = 1."""
LOOKUP_MARGIN = 0.03
"""Tokens a round that lookup must be expected to gain over the drafter."""
PROBE_SHARE = 0.008
"""Part of the time that all probes together may lose."""
CHEAP_SHARE = 0.001
"""Part of the time that probes of a drafter may always lose, however often they failed."""
FIRST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE_ONE_ROW = 16, 1024, 256
"""Rounds between probes of one kind."""
FAILED_PROBE = 2.0
"""Factor of the pause after a probe of the drafter in vain."""
SAVED_ROUNDS = 8.0
"""Rounds of one row that the probes' budget may grow to."""
STEP_ROWS = 2
"""A window is at most this much wider than the widest one measured."""


@dataclass(frozen=True)
class RoundFacts:
    """What can be drafted this round.

    room           most drafts the window may hold (context and tokens left), 0..7
    drafter        whether a drafter can be asked: the model's draft layer, or a user's
    stepwise       it makes one draft a call (draft layer); False: one call makes all (user's)
    lookup_tokens  tokens that suffix lookup proposes, with the length of their match
    """

    room: int = MAX_DRAFTS
    drafter: bool = False
    stepwise: bool = True
    lookup_tokens: int = 0
    match_length: int = 0


@dataclass(frozen=True)
class Choice:
    """What the window holds: n_drafts of the drafter, then n_lookup looked-up tokens; reason for records and logs.

    From `choose`, n_drafts > 0 is the most that may be made; `settle` says how many of those made are verified.
    planned: from `choose`, how many of n_drafts are likely to be made; None: all.
    """

    n_drafts: int
    n_lookup: int
    reason: str
    planned: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What a round brought.

    rows       T of the window
    ms         milliseconds of verification and commit, without drafting
    draft_ms   milliseconds of the drafter's calls, 0 if there were none
    committed  the tokens that the window committed
    drafts     every Draft made this round, verified or not (a lookup's proposal costs nothing to judge). Sources
               "mtp" and "user" are the drafter's; "lookup" starts at 0; "chain" starts after the drafter's drafts.
               A drafter that was asked and had nothing is an empty Draft
    other_ms   milliseconds that tell nothing about windows of this size or about one draft: asking the policy itself,
               a drafter that catches up after a pause. They count as time spent
    """

    rows: int
    ms: float
    draft_ms: float
    committed: Sequence[int]
    drafts: Sequence[Draft] = ()
    other_ms: float = 0.0


NOTHING = "one row is cheapest"


class DraftPolicy:
    """Decides windows for one model; keep it for the model's life, what it learns holds for every session.

    asking_ms            what a round with drafts spends beside window and drafter, as the caller measures it
    probe_ms, total_ms   milliseconds lost by probes (what some of them gained taken off), and of all rounds
    """

    def __init__(self) -> None:
        self._costs = Costs()
        self._drafter, self._lookup, self._chain = DrafterRates(), LookupRates(LOOKUP_PRIORS), LookupRates(CHAIN_PRIORS)
        self._draft_ms: float | None = None  # of one draft
        self._asked = 0  # calls of the drafter
        self.asking_ms = 0.0
        self._recent_tokens = self._recent_ms = 0.0
        self._round = 0
        self._budget_ms = self.probe_ms = self.total_ms = 0.0
        self._pause = [FIRST_PAUSE] * (WINDOW_ROWS + 1)
        self._drafter_pause, self._drafter_last = FIRST_PAUSE, 0
        self._probe_rows = 0  # rows of the probe under way; 0: none
        self._probe_kind = ""
        self._facts, self._limit, self._per_ms = RoundFacts(), 0, 0.0

    # ---- what is known

    @property
    def tokens_per_ms(self) -> float:
        """Rate of the last rounds, at least that of windows of one row; 0 before the first round."""
        one = self._costs.table[1]
        if one <= 0:
            return 0.0
        return max(1.0 / one, self._recent_tokens / self._recent_ms if self._recent_ms > 0 else 0.0)

    def window_ms(self, T: int) -> float:
        """Expected milliseconds of a window of T rows; 0 before the first round."""
        return self._costs.table[T]

    @property
    def draft_ms(self) -> float:
        """Expected milliseconds of one draft; a twentieth of a row before the first."""
        return 0.05 * self._costs.table[1] if self._draft_ms is None else self._draft_ms

    def _extra(self, T: int) -> float:
        """Tokens that T - 1 more rows must bring to be worth their milliseconds."""
        return self._per_ms * (max(0.0, self._costs.table[T] - self._costs.table[1]) + self.asking_ms)

    def _looked_up(self, rates: LookupRates, n: int, match_length: int, before: int, reach: float):
        """(value, length) of the best looked-up tail of at most n tokens behind `before` drafts reached by `reach`."""
        best, length, gained = -math.inf, 0, 0.0
        for k in range(min(n, self._limit - before)):
            reach *= rates.rate(match_length, k)
            gained += reach
            value = gained - self._extra(before + k + 2)
            if value > best:
                best, length = value, k + 1
        return best, length

    def _drafting(self, qs: Sequence[float], limit: int) -> tuple[float, float, int]:
        """Value of verifying the best number of drafts in hand, value of making another first, drafts planned then.

        qs  acceptance of the drafts in hand. Values in tokens over T = 1, drafts in hand being paid.
        """
        reach, gained, hand = 1.0, 0.0, 0.0
        for n, q in enumerate(qs, 1):
            reach *= q
            gained += reach
            hand = max(hand, gained - self._extra(n + 1))
        m = len(qs)
        if m >= limit:
            return hand, -math.inf, m
        one_draft = self._per_ms * self.draft_ms
        more, planned, weightiest = 0.0, m + 1, 0.0
        extra, means = [self._extra(n + 1) for n in range(m + 1, limit + 1)], self._drafter.mean
        for weight, q in self._drafter.outlook(m):
            r, g, spent = reach * q, gained + reach * q, 0.0
            best, length = g - extra[0], m + 1
            for n in range(m + 2, limit + 1):
                if r < 0.01:
                    break
                r *= means(n - 1)
                g += r
                spent += one_draft
                if g - spent - extra[n - m - 1] > best:
                    best, length = g - spent - extra[n - m - 1], n
            more += weight * max(hand, best)
            if weight > weightiest:
                planned, weightiest = length, weight
        return hand, more - one_draft, planned

    # ---- decisions

    def choose(self, facts: RoundFacts) -> Choice:
        """The round's beginning: how many drafts may be made, or how many looked-up tokens are verified at once."""
        need(0 <= facts.room <= MAX_DRAFTS, "a window has no such room", found=facts.room, needed=f"0..{MAX_DRAFTS}")
        self._round += 1
        self._facts, self._probe_rows, self._probe_kind = facts, 0, ""
        self._per_ms = self.tokens_per_ms
        self._limit = min(facts.room, self._costs.longest + STEP_ROWS - 1)
        if not self._costs.n[1] or self._limit <= 0:
            return Choice(0, 0, "the cost of one row comes first" if facts.room else "no room")
        lookup, n_lookup = -math.inf, 0
        if facts.lookup_tokens:
            lookup, n_lookup = self._looked_up(self._lookup, facts.lookup_tokens, facts.match_length, 0, 1.0)
        drafting, planned = -math.inf, 0
        if facts.drafter:
            _, drafting, planned = self._drafting((), self._limit)
        if lookup > MARGIN and lookup > drafting + LOOKUP_MARGIN:
            choice = Choice(0, n_lookup, "lookup")
            rows = 1 + n_lookup
        elif drafting > MARGIN:
            choice = Choice(self._limit if facts.stepwise else planned, 0, "drafter", planned)
            rows = 1 + planned
        else:
            choice, rows = Choice(0, 0, NOTHING), 1
        return self._probe(choice, rows) or choice

    def continue_drafting(self, probabilities: Sequence[float | None]) -> bool:
        """Whether to make another draft, given the drafter's own probabilities of those made this round."""
        made = len(probabilities)
        if self._probe_rows:
            return made + 1 < self._probe_rows
        if made >= self._limit:
            return False
        hand, more, _ = self._drafting([self._drafter.rate(i, p) for i, p in enumerate(probabilities)], self._limit)
        return more > hand

    def settle(self, probabilities: Sequence[float | None], lookup_tokens: int = 0, match_length: int = 0) -> Choice:
        """How many of the drafts made are verified, and how many looked-up tokens behind the last of them.

        probabilities  the drafter's own, of the drafts made this round
        lookup_tokens  tokens that lookup proposes after all of them, with the length of their match
        """
        made = min(len(probabilities), self._limit)
        if self._probe_rows:
            return Choice(min(made, self._probe_rows - 1), 0, self._probe_kind)
        best, n_drafts, n_chain = MARGIN, 0, 0
        reach, gained = 1.0, 0.0
        for n in range(1, made + 1):
            reach *= self._drafter.rate(n - 1, probabilities[n - 1])
            gained += reach
            if gained - self._extra(n + 1) > best:
                best, n_drafts = gained - self._extra(n + 1), n
        if lookup_tokens and made == len(probabilities):
            value, n = self._looked_up(self._chain, lookup_tokens, match_length, made, reach)
            if gained + value > best + LOOKUP_MARGIN:
                n_drafts, n_chain = made, n
        reason = "chain" if n_chain else "drafter" if n_drafts else "the drafts made are not worth their rows"
        return Choice(n_drafts, n_chain, reason)

    def _probe(self, choice: Choice, rows: int) -> Choice | None:
        """A choice that is not the best by what is known, made to know more, if it is due and the budget pays it."""
        facts, per_ms, table = self._facts, self._per_ms, self._costs.table
        if self._budget_ms <= 0:
            return None
        if facts.drafter and not choice.n_drafts:
            price = max(self.draft_ms + table[2] - table[1] + self.asking_ms, 1e-9)
            loss = price - self._drafter.mean(0) / per_ms
            # what nearly pays, or costs next to nothing, is tried more often
            pause = min(self._drafter_pause * loss / price, loss / (CHEAP_SHARE * table[1]))
            if self._round - self._drafter_last >= max(2.0, pause) and loss <= self._budget_ms:
                self._probe_rows, self._probe_kind = 2, "probe of the drafter"
                return Choice(1, 0, self._probe_kind)
        if rows == 1:  # nothing pays, by costs that may be those of a window's first use: look again
            widest = self._costs.longest
            n = min(facts.lookup_tokens, self._limit, widest - 1 if widest > 1 else self._limit)
            return self._probe_size(1 + n, True) if n else None
        age, loss = self._round - self._costs.last[1], table[1] - 1.0 / per_ms
        # one row is what drafting is measured against: where that is close, it is measured often
        if age >= max(4.0, min(self._pause[1], loss / (2 * CHEAP_SHARE * table[1]))) and loss <= self._budget_ms:
            self._probe_rows, self._probe_kind = 1, "probe of one row"
            return Choice(0, 0, self._probe_kind)
        T = 2 + self._round % (WINDOW_ROWS - 1)  # one other size is considered a round
        if T == rows or T > self._limit + 1 or (choice.n_lookup and T - 1 > facts.lookup_tokens):
            return None
        return self._probe_size(T, choice.n_lookup > 0)

    def _probe_size(self, T: int, looked_up: bool) -> Choice | None:
        """A window of T rows with looked-up tokens or with the drafter's, if it is due and may pay."""
        per_ms, table = self._per_ms, self._costs.table
        if self._round - self._costs.last[T] < self._pause[T]:
            return None
        tokens, reach = 1.0, 1.0
        for i in range(T - 1):
            reach *= self._lookup.rate(self._facts.match_length, i) if looked_up else self._drafter.mean(i)
            tokens += reach
        drafting = self.asking_ms + (0.0 if looked_up else self.draft_ms * (T - 1))
        loss = table[T] + drafting - tokens / per_ms
        # the first windows of a size may have paid for its set-up
        hoped = 0.75 * table[T] if self._costs.n[T] > 2 else min(0.5 * table[T], SHAPE[T - 1] * table[1])
        hopeful = tokens / per_ms > hoped + drafting
        if loss > self._budget_ms or not hopeful:
            return None
        self._probe_rows, self._probe_kind = T, f"probe of {T} rows"
        return Choice(0, T - 1, self._probe_kind) if looked_up else Choice(T - 1, 0, self._probe_kind)

    # ---- learning

    def observe(self, outcome: Outcome) -> None:
        """Learn from a round. Its milliseconds must be positive and finite, and it committed at least one token."""
        T, ms, draft_ms = outcome.rows, outcome.ms, outcome.draft_ms
        need(1 <= T <= WINDOW_ROWS, "a window has no such rows", found=T, needed=f"1..{WINDOW_ROWS}")
        other_ms = outcome.other_ms
        need(0 < ms < math.inf and 0 <= draft_ms < math.inf and 0 <= other_ms < math.inf,
             "a round has no such milliseconds", found=(ms, draft_ms, other_ms),
             needed="ms > 0, draft_ms >= 0, other_ms >= 0")  # fmt: skip
        need(1 <= len(outcome.committed) <= T, "a window commits one token to as many as it has rows",
             found=len(outcome.committed), needed=f"1..{T}")  # fmt: skip
        spent, n_tokens = ms + draft_ms + other_ms, len(outcome.committed)
        self._costs.observe(T, ms, self._round)
        self._recent_tokens = 0.93 * self._recent_tokens + n_tokens
        # a stray slow window says nothing about the rate
        self._recent_ms = 0.93 * self._recent_ms + min(ms, 1.5 * self._costs.table[T]) + draft_ms
        self.total_ms += spent
        one_row = self._costs.table[1]
        earned = PROBE_SHARE * spent if self._round > 1 else one_row  # the first probe need not wait
        self._budget_ms = min(self._budget_ms + earned, SAVED_ROUNDS * one_row)
        came_out = self._judge(outcome)
        if not self._probe_rows:
            self._pause[T] = FIRST_PAUSE
            return
        loss = spent - n_tokens / self._per_ms
        self.probe_ms += loss
        self._budget_ms -= loss
        longest = LONGEST_PAUSE_ONE_ROW if self._probe_rows == 1 else LONGEST_PAUSE
        self._pause[self._probe_rows] = min(longest, 2 * self._pause[self._probe_rows])
        if self._probe_kind == "probe of the drafter":
            self._drafter_pause = 2.0 if came_out else min(LONGEST_PAUSE, FAILED_PROBE * self._drafter_pause)

    def rested(self, rounds: int, ms: float) -> None:
        """Learn from rounds of one row that were not asked about: one token each, `ms` milliseconds in all."""
        need(rounds >= 1 and 0 < ms < math.inf, "no such rest", found=(rounds, ms), needed="rounds >= 1, ms > 0")
        self._round += rounds
        self._costs.observe(1, ms / rounds, self._round)
        kept = 0.93**rounds
        new = (1.0 - kept) / 0.07
        self._recent_tokens = kept * self._recent_tokens + new
        self._recent_ms = kept * self._recent_ms + new * min(ms / rounds, 1.5 * self._costs.table[1])
        self.total_ms += ms
        self._budget_ms = min(self._budget_ms + PROBE_SHARE * ms, SAVED_ROUNDS * self._costs.table[1])

    def _judge(self, outcome: Outcome) -> bool:
        """Learn from every draft; says whether a draft of the drafter came out."""
        came_out, before = False, 0
        for draft in outcome.drafts:
            if draft.source in ("lookup", "chain"):
                rates = self._lookup if draft.source == "lookup" else self._chain
                if draft.start > before:  # a draft before it did not come out
                    continue
                agreed, failed = draft.agreement(outcome.committed)
                for i in range(agreed + failed):
                    rates.trial(draft.match_length, i, i < agreed)
                continue
            self._drafter_last = self._round
            n = len(draft.tokens)
            per_draft = outcome.draft_ms / max(1, n)
            known, self._asked = self._draft_ms, self._asked + 1
            if known is None or (self._asked <= 4 and per_draft * 1.5 < known):  # the first calls may pay for set-up
                self._draft_ms = per_draft
            else:
                self._draft_ms = known + 0.1 * (min(per_draft, 3.0 * known) - known)
            if not self._probe_rows:
                self._drafter_pause = FIRST_PAUSE
            if not n:
                self._drafter.drafted(0, EMPTY)
                continue
            p = draft.probabilities or (None,) * n
            agreed, failed = draft.agreement(outcome.committed)
            for i in range(n):
                self._drafter.drafted(i, self._drafter.bucket(p[i]))
            for i in range(agreed + failed):
                self._drafter.trial(i, p[i], i < agreed)
            came_out, before = agreed > 0, agreed
        return came_out
