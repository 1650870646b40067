"""When a drafter that is not worth asking is asked all the same: as soon as what may be missed pays for one probe.

Without probes a drafter that failed by chance, or whose text has become predictable since, would never be asked again.
Two things may be missed, in tokens a round:

* The rates are known from few trials. An acceptance that was estimated as m is about normal around m, with a variance
  that falls with the number of trials; what it is above the price of a draft is missed. After few drafts in vain the
  next probe comes soon; after many, far below the price, nothing is missed.
* A text in which drafts come out may have begun. That is the likelier the less long ago the last one was, and adds up
  over the pause; what a probe shows multiplies its odds. A draft that comes out where hardly one did calls for another
  soon, and one that fails ends the hope.

A probe is due once what was missed since the last trial, so judged, reaches the loss expected of one probe. So probes
hardly cost more than what they may find, and the pause is bounded without a rule for how it grows.
"""

from __future__ import annotations

import math

RETURN, SOON = 0.02, 16
"""Chance that a text in which drafts come out comes back while the rounds since it ended, and these, grow e-fold."""

CHANGE = 1e-5
"""Chance that any round begins such a text, however long ago the last one ended."""

SHORTEST = 2
"""Least rounds from a trial to a probe."""

FOUND = 0.9
"""Acceptance of the first draft in such a text."""

MOST_ODDS = 1.0
"""Odds of such a text that trials may lead to: from there on the rates tell."""


def expected_excess(mean: float, variance: float, price: float) -> float:
    """How much an acceptance known as `mean`, with that variance, exceeds `price` on average; 0 counts where it does
    not."""
    deviation = math.sqrt(variance)
    z = (price - mean) / deviation
    if z > 4.0:
        return 0.0
    return deviation * (0.3989423 * math.exp(-0.5 * z * z) - 0.5 * z * math.erfc(0.70710678 * z))


class DrafterProbes:
    """Times probes of a drafter. Rounds are counted by the caller; prices, losses and gains are in tokens.

    last  round of the last trial
    """

    __slots__ = ("_left", "_odds", "_paid", "last")

    def __init__(self) -> None:
        self.last = self._paid = 0  # the latter: last round in which drafting paid, as far as was known
        self._odds, self._left = 0.0, SOON

    def pays(self, now: int) -> None:
        """Note that drafting pays in round `now`, by what is known."""
        self._paid, self._left = now, SOON

    def due(self, now: int, loss: float, excess: float, found: float) -> bool:
        """Whether a probe is to be made in round `now`.

        loss    tokens that the probe is expected to lose
        excess  tokens a round that drafting is expected to bring where the rates are wrong; see `expected_excess`
        found   tokens a round that drafting brings in a text in which drafts come out
        """
        pause = now - self.last
        return pause * (excess + (self._odds + 0.5 * self._since(now)) * found) >= loss

    def _since(self, now: int) -> float:
        """Chance that such a text has begun since the last trial."""
        return RETURN * math.log((SOON + now - self._paid) / self._left) + CHANGE * (now - self.last)

    def trial(self, now: int, expected: float, good: bool | None) -> None:
        """Note a first draft of round `now`, of which the rates expected that it comes out with that chance.

        good  None: there was no draft to judge
        """
        if good is not None:
            expected = min(max(expected, 0.02), 0.95)
            odds = self._odds + self._since(now)
            odds *= FOUND / expected if good else (1.0 - FOUND) / (1.0 - expected)
            self._odds = min(odds, MOST_ODDS)
        self.last = now
        self._left = SOON + now - self._paid
