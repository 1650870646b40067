"""Draft policy: what each round's window holds, so that tokens per measured millisecond are most.

A round is worth its expected committed tokens minus what its milliseconds would have brought at the rate of the last
rounds (the rate is never taken below one row's). The best choice by that measure is the one with the best long-run
rate, and it can never be expected to lose against T = 1, which is always among the choices. What is not chosen is
tried now and then: probes are paid from a budget of 0.8 % of the time. One of the drafter is due when what may be
missed pays for it (`strata.spec.probes`); one of another size that changes nothing doubles the pause before the next of
its kind. A run of drafts that all fail is taken for a change of text before the rates show it.

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

from strata.base.errors import BadArgument, need
from strata.base.geometry import WINDOW_ROWS
from strata.spec.estimates import CHAIN_PRIORS, EMPTY, LOOKUP_PRIORS, SHAPE, Costs, Doubt, DrafterRates, LookupRates
from strata.spec.probes import FOUND, SHORTEST, DrafterProbes, expected_excess
from strata.spec.rounds import MAX_DRAFTS, Choice, Outcome, RoundFacts

MARGIN = 0.02
"""Tokens a round that drafting must be expected to gain over T = 1."""
LOOKUP_MARGIN = 0.03
"""Tokens a round that lookup must be expected to gain over the drafter."""
PROBE_SHARE = 0.008
"""Part of the time that all probes together may lose."""
CLOSE_SHARE = 0.002
"""Part of the time that measuring one row may always lose, however often drafting won."""
FIRST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE_ONE_ROW = 16, 1024, 256
"""Rounds between probes of one kind."""
HOPELESS = 0.1
"""Tokens a round: a probe's draft that is expected to lose more is not verified."""
SAVED_ROUNDS = 8.0
"""Rounds of one row that the probes' budget may grow to."""
STEP_ROWS = 2
"""A window is at most this much wider than the widest one measured."""


FOUND_GAINS = tuple(sum(FOUND**k for k in range(1, n + 1)) for n in range(MAX_DRAFTS + 1))
"""Drafts that are expected to come out of 0, 1, 2, ... in a text in which drafts come out."""

NOTHING = Choice(0, 0, "one row is cheapest")
PROBE_OF_DRAFTER = "probe of the drafter"


class DraftPolicy:
    """Decides windows for one model; keep it for the model's life, what it learns holds for every session.

    asking_ms            what a round with drafts spends beside window and drafter, as the caller measures it
    probe_ms, total_ms   milliseconds lost by probes (what some of them gained taken off), and of all rounds
    """

    def __init__(self) -> None:
        self._costs = Costs()
        self._drafter, self._lookup, self._chain = DrafterRates(), LookupRates(LOOKUP_PRIORS), LookupRates(CHAIN_PRIORS)
        self._doubt = Doubt()
        self._draft_ms: float | None = None  # of one draft
        self._asked = 0  # calls of the drafter
        self.asking_ms = 0.0
        self._recent_tokens = self._recent_ms = 0.0
        self._round = 0
        self._budget_ms = self.probe_ms = self.total_ms = 0.0
        self._pause = [FIRST_PAUSE] * (WINDOW_ROWS + 1)
        self._probes = DrafterProbes()
        self._probe_rows = 0  # rows of the probe under way; 0: none
        self._probe_kind = ""
        self._facts, self._limit, self._most, self._per_ms = RoundFacts(), 0, 0, 0.0
        self._extra = [0.0] * (WINDOW_ROWS + 1)

    # ---- what is known

    @property
    def tokens_per_ms(self) -> float:
        """Rate of the last rounds, at least that of windows of one row; 0 before the first round."""
        one = self._costs.table[1]
        if one <= 0:
            return 0.0
        return max(1.0 / one, self._recent_tokens / self._recent_ms if self._recent_ms > 0 else 0.0)

    @property
    def probing(self) -> bool:
        """Whether the round under way, or the last one, is a probe."""
        return self._probe_rows > 0

    def window_ms(self, T: int) -> float:
        """Expected milliseconds of a window of T rows; 0 before the first round."""
        return self._costs.table[T]

    @property
    def draft_ms(self) -> float:
        """Expected milliseconds of one draft; a twentieth of a row before the first."""
        return 0.05 * self._costs.table[1] if self._draft_ms is None else self._draft_ms

    def _price(self, limit: int) -> None:
        """Work out how many tokens T - 1 more rows must bring to be worth their milliseconds, for T <= limit + 1."""
        per_ms, one, asking_ms = self._per_ms, self._costs.table[1], self.asking_ms
        least = per_ms * asking_ms
        self._extra = [per_ms * (ms - one + asking_ms) if ms > one else least for ms in self._costs.table[: limit + 2]]

    def _looked_up(self, rates: LookupRates, n: int, match_length: int, before: int, reach: float):
        """(value, length) of the best looked-up tail of at most n tokens behind `before` drafts reached by `reach`."""
        best, length, gained = -math.inf, 0, 0.0
        for k in range(min(n, self._limit - before)):
            reach *= rates.rate(match_length, k)
            gained += reach
            value = gained - self._extra[before + k + 2]
            if value > best:
                best, length = value, k + 1
        return best, length

    def _begun(self, probabilities: Sequence[float | None], limit: int) -> tuple[float, float]:
        """Value of verifying the best number of the drafts in hand, and of making another first.

        probabilities  the drafter's own. Values in tokens over T = 1, drafts in hand being paid.
        """
        reach, gained, hand, extra = self._doubt.trust, 0.0, 0.0, self._extra
        for n, p in enumerate(probabilities, 1):
            reach *= self._drafter.rate(n - 1, p)
            gained += reach
            hand = max(hand, gained - extra[n + 1])
        m = len(probabilities)
        if m >= limit:
            return hand, -math.inf
        one_draft = self._per_ms * self.draft_ms
        more, means = 0.0, [self._drafter.mean(n) for n in range(m + 1, limit)]
        for weight, q in self._drafter.outlook(m, probabilities):
            r, g, spent = reach * q, gained + reach * q, 0.0
            best = g - extra[m + 2]
            for rows, mean in enumerate(means, m + 3):
                if r < 0.01:
                    break
                r *= mean
                g += r
                spent += one_draft
                value = g - spent - extra[rows]
                if value > best:
                    best = value
            more += weight * (best if best > hand else hand)
        return hand, more - one_draft

    def _unbegun(self, limit: int) -> tuple[float, int]:
        """Value of making a first draft, in tokens over T = 1, and how many will then be likely to be made."""
        one_draft = self._per_ms * self.draft_ms
        trust, wary = self._doubt.trust, self._doubt.wary
        extra = self._extra[2 : limit + 2]
        prospects = self._drafter.prospects()
        for n, (gain, rows) in enumerate(zip(self._drafter.best_gains, extra, strict=False)):
            if trust * gain > rows + n * one_draft:
                break
        else:  # nothing pays, whatever the draft will look like
            return -one_draft, 1
        prices = [rows + n * one_draft for n, rows in enumerate(extra)]
        more, planned, weightiest = 0.0, 1, 0.0
        for weight, gains in prospects:
            best, length = wary * gains[0] - prices[0], 1
            for n in range(1, limit):
                value = wary * gains[n] - prices[n]
                if value > best:
                    best, length = value, n + 1
            value = trust * gains[length - 1] - prices[length - 1]
            if value > 0.0:
                more += weight * value
            if weight > weightiest:
                planned, weightiest = length, weight
        return more - one_draft, planned

    # ---- decisions

    def choose(self, facts: RoundFacts) -> Choice:
        """The round's beginning: how many drafts may be made, or how many looked-up tokens are verified at once."""
        if not 0 <= facts.room <= MAX_DRAFTS:
            raise BadArgument("a window has no such room", found=facts.room, needed=f"0..{MAX_DRAFTS}")
        self._round += 1
        self._facts, self._probe_rows, self._probe_kind = facts, 0, ""
        self._per_ms = self.tokens_per_ms
        self._limit = min(facts.room, self._costs.longest + STEP_ROWS - 1)
        self._most = self._limit
        if not self._costs.n[1] or self._limit <= 0:
            return Choice(0, 0, "the cost of one row comes first" if facts.room else "no room")
        self._price(self._limit)
        lookup, n_lookup = -math.inf, 0
        if facts.lookup_tokens:
            lookup, n_lookup = self._looked_up(self._lookup, facts.lookup_tokens, facts.match_length, 0, 1.0)
        drafting, planned = -math.inf, 0
        if facts.drafter:
            drafting, planned = self._unbegun(self._limit)
            if self._doubt.cautious:
                self._most = planned
        if lookup > MARGIN and lookup > drafting + LOOKUP_MARGIN:
            choice = Choice(0, n_lookup, "lookup")
            rows = 1 + n_lookup
        elif drafting > MARGIN:
            self._probes.pays(self._round)
            choice = Choice(self._most if facts.stepwise else planned, 0, "drafter", planned)
            rows = 1 + planned
        else:
            choice, rows = NOTHING, 1
        return self._probe(choice, rows) or choice

    def continue_drafting(self, probabilities: Sequence[float | None]) -> bool:
        """Whether to make another draft, given the drafter's own probabilities of those made this round."""
        made = len(probabilities)
        if self._probe_rows:
            return made + 1 < self._probe_rows
        if made >= self._most:
            return False
        hand, more = self._begun(probabilities, self._most)
        return more > hand

    def settle(self, probabilities: Sequence[float | None], lookup_tokens: int = 0, match_length: int = 0) -> Choice:
        """How many of the drafts made are verified, and how many looked-up tokens behind the last of them.

        probabilities  the drafter's own, of the drafts made this round
        lookup_tokens  tokens that lookup proposes after all of them, with the length of their match
        """
        made = min(len(probabilities), self._limit)
        if self._probe_rows and self._probe_kind != PROBE_OF_DRAFTER:
            return Choice(min(made, self._probe_rows - 1), 0, self._probe_kind)
        best, n_drafts, n_chain = MARGIN, 0, 0
        reach, gained = self._doubt.trust, 0.0
        for n in range(1, made + 1):
            reach *= self._drafter.rate(n - 1, probabilities[n - 1])
            gained += reach
            if gained - self._extra[n + 1] > best:
                best, n_drafts = gained - self._extra[n + 1], n
        if self._probe_rows:
            return Choice(int(made > 0 and not self._hopeless(probabilities[0])), 0, self._probe_kind)
        if lookup_tokens and made == len(probabilities):
            value, n = self._looked_up(self._chain, lookup_tokens, match_length, made, reach)
            if gained + value > best + LOOKUP_MARGIN:
                n_drafts, n_chain = made, n
        reason = "chain" if n_chain else "drafter" if n_drafts else "the drafts made are not worth their rows"
        return Choice(n_drafts, n_chain, reason)

    def _hopeless(self, probability: float | None) -> bool:
        """Whether a probe's draft need not be verified: the token that its window brings anyway judges it as well."""
        value = self._doubt.trust * self._drafter.rate(0, probability) - self._extra[2]
        known = self._costs.n[2] >= 4 and self._round - self._costs.last[2] <= LONGEST_PAUSE_ONE_ROW
        return known and value < -HOPELESS

    def _probe(self, choice: Choice, rows: int) -> Choice | None:
        """A choice that is not the best by what is known, made to know more, if it is due and the budget pays it."""
        facts, per_ms, table = self._facts, self._per_ms, self._costs.table
        if self._budget_ms <= 0:
            return None
        if facts.drafter and not choice.n_drafts and self._round >= self._probes.last + SHORTEST:
            mean, trust, price = self._drafter.mean(0), self._doubt.trust, per_ms * self.draft_ms + self._extra[2]
            loss = price - trust * mean
            excess = trust * expected_excess(mean, self._drafter.variance, price)
            if loss <= self._budget_ms * per_ms and self._probes.due(self._round, loss, excess, self._found()):
                self._probe_rows, self._probe_kind = 2, PROBE_OF_DRAFTER
                return Choice(1, 0, self._probe_kind)
        if rows == 1:  # nothing pays, by costs that may be those of a window's first use: look again
            widest = self._costs.longest
            n = min(facts.lookup_tokens, self._limit, widest - 1 if widest > 1 else self._limit)
            return self._probe_size(1 + n, True) if n else None
        age, loss = self._round - self._costs.last[1], table[1] - 1.0 / per_ms
        # one row is what drafting is measured against: where that is close, it is measured often
        if age >= max(4.0, min(self._pause[1], loss / (CLOSE_SHARE * table[1]))) and loss <= self._budget_ms:
            self._probe_rows, self._probe_kind = 1, "probe of one row"
            return Choice(0, 0, self._probe_kind)
        T = 2 + self._round % (WINDOW_ROWS - 1)  # one other size is considered a round
        if T == rows or T > self._limit + 1 or (choice.n_lookup and T - 1 > facts.lookup_tokens):
            return None
        return self._probe_size(T, choice.n_lookup > 0)

    def _found(self) -> float:
        """Tokens a round that drafting would gain in a text in which drafts come out."""
        one_draft, extra, best = self._per_ms * self.draft_ms, self._extra, 0.0
        for n in (1, self._limit // 2, self._limit):
            value = FOUND_GAINS[n] - n * one_draft - extra[n + 1]
            if value > best:
                best = value
        return best

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
        other_ms, n_tokens = outcome.other_ms, len(outcome.committed)
        if not 1 <= T <= WINDOW_ROWS:
            raise BadArgument("a window has no such rows", found=T, needed=f"1..{WINDOW_ROWS}")
        if not (0 < ms < math.inf and 0 <= draft_ms < math.inf and 0 <= other_ms < math.inf):
            raise BadArgument("a round has no such milliseconds", found=(ms, draft_ms, other_ms),
                              needed="ms > 0, draft_ms >= 0, other_ms >= 0")  # fmt: skip
        if not 1 <= n_tokens <= T:
            raise BadArgument("a window commits one token to as many as it has rows", found=n_tokens, needed=f"1..{T}")
        spent = ms + draft_ms + other_ms
        self._costs.observe(T, ms, self._round)
        self._recent_tokens = 0.93 * self._recent_tokens + n_tokens
        # a stray slow window says nothing about the rate
        self._recent_ms = 0.93 * self._recent_ms + min(ms, 1.5 * self._costs.table[T]) + draft_ms
        self.total_ms += spent
        one_row = self._costs.table[1]
        earned = PROBE_SHARE * spent if self._round > 1 else one_row  # the first probe need not wait
        self._budget_ms = min(self._budget_ms + earned, SAVED_ROUNDS * one_row)
        if outcome.drafts:
            self._judge(outcome)
        if not self._probe_rows:
            self._pause[T] = FIRST_PAUSE
            return
        loss = spent - n_tokens / self._per_ms
        self.probe_ms += loss
        self._budget_ms -= loss
        longest = LONGEST_PAUSE_ONE_ROW if self._probe_rows == 1 else LONGEST_PAUSE
        self._pause[self._probe_rows] = min(longest, 2 * self._pause[self._probe_rows])

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

    def _judge(self, outcome: Outcome) -> None:
        """Learn from every draft."""
        before = 0
        for draft in outcome.drafts:
            if draft.source in ("lookup", "chain"):
                rates = self._lookup if draft.source == "lookup" else self._chain
                if draft.start > before:  # a draft before it did not come out
                    continue
                agreed, failed = draft.agreement(outcome.committed)
                for i in range(agreed + failed):
                    rates.trial(draft.match_length, i, i < agreed)
                continue
            n = len(draft.tokens)
            per_draft = outcome.draft_ms / max(1, n)
            known, self._asked = self._draft_ms, self._asked + 1
            if known is None or (self._asked <= 4 and per_draft * 1.5 < known):  # the first calls may pay for set-up
                self._draft_ms = per_draft
            else:
                self._draft_ms = known + 0.1 * (min(per_draft, 3.0 * known) - known)
            if not n:
                self._probes.trial(self._round, 0.0, None)
                self._drafter.drafted(0, EMPTY)
                continue
            p = draft.probabilities or (None,) * n
            agreed, failed = draft.agreement(outcome.committed)
            # what the drafter itself was unsure of is no surprise when it fails
            expected = min(self._drafter.mean(0), self._drafter.rate(0, p[0]))
            self._doubt.trial(expected, agreed > 0)
            self._probes.trial(self._round, expected, agreed > 0)
            for i in range(n):
                self._drafter.drafted(i, self._drafter.bucket(p[i]))
            for i in range(agreed + failed):
                self._drafter.trial(i, p[i], i < agreed)
            before = agreed
