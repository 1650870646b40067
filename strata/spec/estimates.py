"""What the draft policy has learnt: milliseconds of a window by rows, and how often drafts come out as drafted.

Everything is a running mean with a limited memory. Nothing here decides and nothing reads a clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from operator import mul

from strata.base.geometry import WINDOW_ROWS

SHAPE = (1.0, 1.35, 1.7, 2.05, 2.45, 2.85, 3.25, 3.6)
"""Cost of a window of 1..8 rows in units of one row, where nothing else is known."""

COMMON = 0.8
"""Part of a size's change in cost that sizes not measured at that moment are taken to share."""

MEMORY = 200.0
"""Trials that a rate looks back on."""

PRIOR_WEIGHT = 3.0
"""Trials that a prior counts for."""

BUCKET_WEIGHT = 16.0
"""Trials that a bucket of all positions counts for at one position."""

CALIBRATION_WEIGHT = 3.0
"""Drafts that a drafter's calibration is expected from before anything is known."""

EDGES = (0.3, 0.5, 0.7, 0.85, 0.95)
"""Borders of the buckets of a drafter's own probability."""

MIDDLES = (0.15, 0.4, 0.6, 0.78, 0.9, 0.97, 0.7)
"""Probability that stands for a bucket; the last bucket holds drafts without a probability."""

NO_PROBABILITY = len(EDGES) + 1
EMPTY = NO_PROBABILITY + 1
"""Bucket of a call that brought no draft."""

MIX_KEPT = 0.85
"""Weight of the mix of buckets that a further draft leaves: what comes next looks like the last few drafts. With 0.98
twice as many drafts were made in vain where code turned into text that nobody can foretell."""

FOLLOWED_KEPT = 0.95
"""Weight of what followed a bucket that a further draft behind that bucket leaves."""

MIX_WEIGHT, SAME_WEIGHT = 20.0, 1.0
"""Drafts that the mix, and the same bucket once more, count for beside those that followed a bucket. With 4 for the
mix, text where drafting hardly pays lost 0.2 to 0.4 %: what follows a rare bucket is known from too few."""

MOST_SURE = 0.98
"""Most acceptance that is expected before anything is known."""

TRUST = 0.9
"""Acceptance expected per unit of a drafter's own probability, before anything is known."""

NO_DOUBT, MOST_DOUBT = -8.0, 1.0
"""Least and most log odds that a drafter has lost the text. With more doubt to begin with, a change of text costs less
and steady texts of middling acceptance cost more, where chance makes several drafts in a row fail."""

CAUTION = -5.9
"""Log odds at which doubt begins to shorten drafts: at an acceptance of 0.9 after one failure, at 0.7 after two."""

WARINESS = 3.0
"""Added to the log odds where the number of drafts is chosen: a wrong length costs less than drafts in vain."""

LOST = 0.1
"""Acceptance of the first draft where a drafter has lost the text."""

MATCH_EDGES = (6, 12, 24)
LOOKUP_PRIORS = (0.75, 0.88, 0.93, 0.96)
CHAIN_PRIORS = (0.45, 0.65, 0.8, 0.9)


class Costs:
    """Milliseconds of a window (verify and commit) by its rows.

    table[T] for T = 1..8 (table[0] is unused): the running mean of what was measured, else interpolated between, or
    extrapolated from, the sizes measured, along SHAPE.
    """

    def __init__(self) -> None:
        self.table = [0.0] * (WINDOW_ROWS + 1)
        self.n = [0] * (WINDOW_ROWS + 1)
        self.last = [0] * (WINDOW_ROWS + 1)
        self._slow = [False] * (WINDOW_ROWS + 1)  # the last one was much slower than the mean
        self.longest = 0  # most rows measured
        self._between: list[tuple[int, int, int, float]] = []
        self._beyond: list[tuple[int, int, float]] = []
        self._ends: tuple[int, int, float] = (1, 1, SHAPE[0])

    def observe(self, T: int, ms: float, round_index: int) -> None:
        """Take in one window. A stray slow one is ignored, unless the next of its size is slow as well."""
        n, mean = self.n[T], self.table[T]
        slow, was_slow = n > 0 and ms > 1.5 * mean, self._slow[T]
        self._slow[T] = slow
        if n == 0 or (n < 4 and ms * 1.5 < mean):  # the first windows of a size may pay for its set-up
            mean = ms
        elif not slow or was_slow:
            age = round_index - self.last[T]
            step = max(0.3 if slow else 0.1, 1.0 / (n + 1), min(0.3, age / 400.0))
            before, mean = mean, mean + step * (min(ms, 4.0 * mean) - mean)
            if n >= 8:  # what slows one size (a longer context, a busier machine) slows the others
                moved = 1.0 + COMMON * (mean / before - 1.0)
                table, last = self.table, self.last
                mine = last[T]
                for other in range(1, WINDOW_ROWS + 1):  # one measured since has seen it already
                    if last[other] < mine:
                        table[other] *= moved
        self.table[T] = mean
        self.n[T], self.last[T] = n + 1, round_index
        if n == 0:
            self.longest = max(self.longest, T)
            self._plan()
        self._fill()

    def _plan(self) -> None:
        """How the sizes that were never measured follow from those that were."""
        seen = [T for T in range(1, WINDOW_ROWS + 1) if self.n[T]]
        low, high = seen[0], seen[-1]
        self._ends = low, high, SHAPE[high - 1] - SHAPE[low - 1] if low < high else SHAPE[low - 1]
        self._between, self._beyond = [], []
        for T in range(1, WINDOW_ROWS + 1):
            if self.n[T]:
                continue
            if low < T < high:
                below, above = max(t for t in seen if t < T), min(t for t in seen if t > T)
                part = (SHAPE[T - 1] - SHAPE[below - 1]) / (SHAPE[above - 1] - SHAPE[below - 1])
                self._between.append((T, below, above, part))
            else:
                end = low if T < low else high
                self._beyond.append((T, end, SHAPE[T - 1] - SHAPE[end - 1]))

    def _fill(self) -> None:
        """Estimate the sizes that were never measured."""
        table = self.table
        for T, below, above, part in self._between:
            table[T] = table[below] + part * (table[above] - table[below])
        if self._beyond:
            low, high, run = self._ends
            slope = max(0.0, table[high] - table[low]) / run if low < high else table[low] / run
            for T, end, steps in self._beyond:
                table[T] = max(0.05 * table[end], table[end] + slope * steps)


class Rate:
    """Share of trials that were good, over the last MEMORY trials; a change of regime shortens the memory at once."""

    __slots__ = ("bad", "fast", "good")

    def __init__(self) -> None:
        self.good = self.bad = self.fast = 0.0

    def add(self, good: bool) -> None:
        n = self.good + self.bad
        value = 1.0 if good else 0.0
        if n < 16.0:
            self.fast += (value - self.fast) / (n + 1.0) if n else value
        else:
            self.fast += 0.15 * (value - self.fast)
            mean = self.good / n
            # the variance of `fast` is mean (1 - mean) 0.15 / 1.85; four deviations are no chance
            if (self.fast - mean) ** 2 > 16.0 * 0.081 * max(0.05, mean * (1.0 - mean)):
                self.good, self.bad = 6.0 * self.fast, 6.0 * (1.0 - self.fast)
        keep = 1.0 - 1.0 / MEMORY
        self.good = self.good * keep + value
        self.bad = self.bad * keep + 1.0 - value

    def value(self, prior: float, weight: float = PRIOR_WEIGHT) -> float:
        """Estimate, the prior counting for `weight` trials."""
        return (self.good + weight * prior) / (self.good + self.bad + weight)


class Doubt:
    """Whether the drafter has lost the text: a run of drafts that all fail tells it sooner than the rates do.

    Two explanations are weighed: the rates hold, or drafts are right only one time in ten. Each round's first draft
    moves the log odds of the second by how much better it explains what came out. Drafts that come out as often as the
    rates have it keep the odds low, so that a steady text is hardly ever doubted, whatever its acceptance.

    trust     chance that the rates hold, 0 to 1
    wary      the same for choosing how many drafts are made: less, once it begins to look as if they did not hold
    cautious  whether it does
    """

    __slots__ = ("_log_odds", "cautious", "trust", "wary")

    def __init__(self) -> None:
        self._hold(NO_DOUBT)

    def _hold(self, log_odds: float) -> None:
        self._log_odds = min(max(log_odds, NO_DOUBT), MOST_DOUBT)
        self.trust = 1.0 / (1.0 + math.exp(self._log_odds))
        self.cautious = self._log_odds > CAUTION
        self.wary = 1.0 / (1.0 + math.exp(self._log_odds + WARINESS)) if self.cautious else self.trust

    def trial(self, expected: float, good: bool) -> None:
        """Note whether a round's first draft came out, where the rates expected it to with that chance."""
        expected = min(max(expected, LOST), 0.95)
        self._hold(self._log_odds + math.log(LOST / expected if good else (1.0 - LOST) / (1.0 - expected)))


class DrafterRates:
    """Acceptance of a drafter by position in the window (0-based) and by bucket of its own probability.

    A cell with few trials leans on its bucket at all positions, and that on the drafter's calibration: drafts that came
    out per draft expected.

    Which bucket a draft will fall into depends on the one before it: a round's first draft on the first draft of the
    round before, every other on its predecessor. Where texts change, sure drafts follow sure ones and poor ones poor
    ones, so that one poor draft tells much; where they come in any order it tells nothing. Which of the two holds is
    learnt.
    """

    def __init__(self) -> None:
        places, buckets = range(WINDOW_ROWS - 1), range(EMPTY + 1)
        self._rates = [[Rate() for _ in MIDDLES] for _ in places]
        self._buckets = [Rate() for _ in MIDDLES]
        self._mix = [[0.0] * (EMPTY + 1) for _ in places]
        self._followed = [[[0.0] * (EMPTY + 1) for _ in buckets] for _ in range(2)]  # [not the first][before][bucket]
        self._first = self._latest = -1  # buckets of the latest first draft, and of the latest draft; -1: none
        self._good, self._expected = [0.0] * len(MIDDLES), [0.0] * len(MIDDLES)  # by bucket, in units of `_unit`
        self._all_good = self._all_expected = 0.0
        self._unit = 1.0  # weight of the latest trial
        self._deepest = -1  # last position that was ever drafted at
        self._seen: list[int] = []  # buckets that drafts ever fell into, EMPTY left out
        self._cells: list[list[float]] = []  # acceptance by position up to the deepest and by bucket
        self._mean = [TRUST * MIDDLES[-1] for _ in places]
        self._variance = 0.0  # 0: not worked out
        self._stale = True  # something was learnt since those three were worked out
        self._prospects: list[tuple[float, list[float]]] | None = None
        self.best_gains: list[float] = []

    @staticmethod
    def bucket(probability: float | None) -> int:
        return NO_PROBABILITY if probability is None else bisect_right(EDGES, probability)

    def _expects(self, b: int, p: float) -> float:
        """Acceptance of drafts of probability p in bucket b by the calibration in all other buckets."""
        known = CALIBRATION_WEIGHT * self._unit
        calibration = (self._all_good - self._good[b] + known) / (self._all_expected - self._expected[b] + known)
        value = (calibration if calibration < 1.1 else 1.1) * TRUST * p
        return value if value < MOST_SURE else MOST_SURE

    def _cell(self, position: int, b: int, expected: float) -> tuple[float, float]:
        """(acceptance, trials it is known from) at a position in a bucket, of which the calibration expects so much.

        No trial counts twice: what stands beside those of the cell are trials at other positions, and the prior.
        """
        here, anywhere = self._rates[position][b], self._buckets[b]
        hits, misses = here.good, here.bad
        good, bad = anywhere.good - hits, anywhere.bad - misses
        if good < 0.0:
            good = 0.0
        n = good + (bad if bad > 0.0 else 0.0) + PRIOR_WEIGHT
        weight = n if n < BUCKET_WEIGHT else BUCKET_WEIGHT
        trials = hits + misses + weight
        return (hits + weight * (good + PRIOR_WEIGHT * expected) / n) / trials, trials

    def rate(self, position: int, probability: float | None) -> float:
        """Chance that this draft is accepted, given that those before it are."""
        b = self.bucket(probability)
        return self._cell(position, b, self._expects(b, MIDDLES[b] if probability is None else probability))[0]

    def _work_out(self) -> None:
        """Cells and means, from what was learnt."""
        expected = [(b, self._expects(b, MIDDLES[b])) for b in self._seen]
        self._cells = []
        for place in range(self._deepest + 1):
            cells = [0.0] * (EMPTY + 1)
            for b, value in expected:
                cells[b] = self._cell(place, b, value)[0]
            mix = self._mix[place] if place else self._behind_bucket(0, self._first)
            self._cells.append(cells)
            self._mean[place] = sum(map(mul, mix, cells)) / sum(mix)
        for place in range(self._deepest + 1, len(self._mean)):  # as at the position before, or as a fair drafter
            self._mean[place] = self._mean[place - 1] if place else TRUST * MIDDLES[-1]
        self._stale, self._prospects, self._variance = False, None, 0.0

    def _behind_bucket(self, position: int, before: int) -> list[float]:
        """Weights of the buckets of a draft behind one of bucket `before`."""
        mix = self._mix[min(position, self._deepest)]
        share = MIX_WEIGHT / sum(mix)
        weights = [n + share * w for n, w in zip(self._followed[position > 0][before], mix, strict=True)]
        weights[before] += SAME_WEIGHT
        return weights

    def outlook(self, position: int, probabilities: Sequence[float | None] = ()) -> list[tuple[float, float]]:
        """(weight, acceptance) of the buckets that the next draft at this position may fall into.

        probabilities  the drafter's own, of the drafts before it
        """
        if self._stale:
            self._work_out()
        if self._deepest < 0:
            return [(1.0, self._mean[position])]
        before = self.bucket(probabilities[-1]) if position else self._first
        if position and before not in self._seen:  # the round's own drafts are noted when it is over
            self._seen.append(before)
            self._work_out()
        weights = self._behind_bucket(position, before)
        total, cells = sum(weights), self._cells[min(position, self._deepest)]
        least = 0.01 * total
        return [(w / total, q) for w, q in zip(weights, cells, strict=True) if w > least]

    def mean(self, position: int) -> float:
        """Chance that a draft at this position is accepted, whatever its probability will be."""
        if self._stale:
            self._work_out()
        return self._mean[position]

    @property
    def variance(self) -> float:
        """How far off `mean(0)` may be, squared: what is known of each bucket, and of which comes next."""
        mean = self.mean(0)
        if self._variance > 0.0:
            return self._variance
        if self._deepest < 0:
            return mean * (1.0 - mean) / (PRIOR_WEIGHT + 1.0)
        weights, cells, known, square = self._behind_bucket(0, self._first), self._cells[0], 0.0, 0.0
        total = sum(weights)
        for b in self._seen:
            w, q = weights[b] / total, cells[b]
            known += w * w * q * (1.0 - q) / (self._cell(0, b, q)[1] + 1.0)
            square += w * (q - mean) * (q - mean)
        square += weights[EMPTY] / total * mean * mean
        self._variance = max(known + (1.0 - MIX_KEPT) * square, 1e-6)
        return self._variance

    def prospects(self) -> list[tuple[float, list[float]]]:
        """(weight, gains) by bucket of the first draft: gains[n - 1] is how many of n drafts are expected to come out.

        best_gains is then the most over the buckets, by n. Both stay until something is learnt.
        """
        if self._stale or self._prospects is None:
            found = []
            for weight, q in self.outlook(0):
                reach, gained, gains = q, q, [q]
                for mean in self._mean[1:]:
                    reach *= mean
                    gained += reach
                    gains.append(gained)
                found.append((weight, gains))
            self._prospects = found
            self.best_gains = [max(column) for column in zip(*(gains for _, gains in found), strict=True)]
        return self._prospects

    def drafted(self, position: int, bucket: int) -> None:
        """Note that a draft was made there, or, as bucket EMPTY, that the drafter had none; each round in its order."""
        self._mix[position] = mix = [MIX_KEPT * weight for weight in self._mix[position]]
        mix[bucket] += 1.0
        rows, before = self._followed[position > 0], self._latest if position else self._first
        if before >= 0:
            rows[before] = followed = [FOLLOWED_KEPT * weight for weight in rows[before]]
            followed[bucket] += 1.0
        self._latest = bucket
        if not position:
            self._first = bucket
        if position > self._deepest:
            self._deepest = position
        if bucket != EMPTY and bucket not in self._seen:
            self._seen.append(bucket)
        self._stale = True

    def trial(self, position: int, probability: float | None, good: bool) -> None:
        """Note whether a draft came out, those before it having come out."""
        b = self.bucket(probability)
        self._rates[position][b].add(good)
        self._buckets[b].add(good)
        p = MIDDLES[b] if probability is None else probability
        self._unit *= 1.0 / 0.98
        if self._unit > 1e9:
            self._good, self._expected = [x / self._unit for x in self._good], [x / self._unit for x in self._expected]
            self._all_good, self._all_expected, self._unit = sum(self._good), sum(self._expected), 1.0
        if good:
            self._good[b] += self._unit
            self._all_good += self._unit
        expected = self._unit * TRUST * p
        self._expected[b] += expected
        self._all_expected += expected
        self._stale = True


class LookupRates:
    """Acceptance of looked-up drafts by length of the match and position behind it."""

    def __init__(self, priors: tuple[float, ...]):
        self._priors = priors
        self._rates = [[Rate() for _ in range(3)] for _ in priors]

    def rate(self, match_length: int, position: int) -> float:
        """Chance that draft `position` (0-based) is accepted, given that those before it are."""
        b = bisect_right(MATCH_EDGES, match_length)
        return self._rates[b][min(position, 2)].value(self._priors[b])

    def trial(self, match_length: int, position: int, good: bool) -> None:
        self._rates[bisect_right(MATCH_EDGES, match_length)][min(position, 2)].add(good)
