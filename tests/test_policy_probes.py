"""Probes of a drafter: when they are due, and that chance does not keep drafts away that would pay."""

from __future__ import annotations

import numpy as np
import pytest

from strata.spec.estimates import PRIOR_WEIGHT, TRUST, DrafterRates
from strata.spec.policy import DraftPolicy
from strata.spec.probes import DrafterProbes, expected_excess
from tests.test_policy import play, stream

CARD = np.interp(np.arange(1, 9), [1, 2, 4, 8], [1, 1.32, 1.84, 3.08])
"""Windows of 1..8 rows on a card, in rows."""
ROUNDS, LEARNING, ASKED_ROWS = 700, 170, 0.03


# ---- what may be missed


@pytest.mark.parametrize("mean, deviation", [(0.3, 0.1), (0.1, 0.05), (0.5, 0.2), (0.36, 0.01)])
def test_the_expected_excess_is_that_of_draws(mean, deviation):
    draws = np.random.default_rng(0).normal(mean, deviation, 400_000)
    wanted = np.maximum(draws - 0.37, 0).mean()
    assert expected_excess(mean, deviation**2, 0.37) == pytest.approx(wanted, rel=0.02, abs=2e-5)
    assert expected_excess(0.05, 1e-4, 0.5) == 0.0


def pause(probes: DrafterProbes, loss: float, excess: float, found: float) -> int:
    return next(n for n in range(1, 10**6) if probes.due(probes.last + n, loss, excess, found))


def test_the_pause_is_what_pays_for_a_probe():
    probes = DrafterProbes()
    assert pause(probes, 0.3, 0.1, 0.0) == 3 and pause(probes, 0.3, 0.01, 0.0) == 30
    assert pause(probes, 0.3, 0.01, 0.5) < 30, "a text may have begun in which drafts come out"
    assert pause(probes, 0.6, 0.0, 0.5) > pause(probes, 0.3, 0.0, 0.5) > pause(probes, 0.3, 0.0, 1.0)
    assert pause(probes, -0.1, 0.0, 0.0) == 1, "what gains is not put off"


def test_pauses_grow_and_are_bounded():
    probes, pauses = DrafterProbes(), []
    probes.pays(10)
    for _ in range(60):
        now = probes.last + pause(probes, 0.3, 0.0, 0.5)
        pauses.append(now - probes.last)
        probes.trial(now, 0.1, False)
    assert pauses[0] < 60 and pauses[5] > 2 * pauses[1] and max(pauses) < 400


def test_a_draft_that_comes_out_unexpectedly_calls_for_another():
    def after(expected: float, good: bool) -> int:
        probes = DrafterProbes()
        probes.trial(200, expected, good)
        return pause(probes, 0.3, 0.0, 1.0)

    assert 2 * after(0.1, True) < after(0.6, True) and 2 * after(0.6, True) < after(0.1, False)
    probes = DrafterProbes()
    for _ in range(100):
        probes.trial(probes.last + 1, 0.1, True)
    probes.trial(probes.last + 1, 0.1, False)
    probes.trial(probes.last + 1, 0.1, False)
    assert pause(probes, 0.3, 0.0, 1.0) > 8, "however many came out, two that fail end the hope"


# ---- what is known from how much


def test_a_trial_counts_once():
    """Position, bucket and calibration learn from the same drafts; none of them takes another's for news."""
    rates, prior = DrafterRates(), TRUST * 0.7
    for n in range(1, 6):
        rates.trial(0, None, False)
        rates.drafted(0, rates.bucket(None))
        wanted = PRIOR_WEIGHT * prior / (PRIOR_WEIGHT + n)
        assert (rates.rate(0, None), rates.mean(0)) == pytest.approx((wanted, wanted), rel=0.02)
        assert rates.variance == pytest.approx(wanted * (1 - wanted) / (PRIOR_WEIGHT + n + 1), rel=0.02)
    assert rates.rate(3, None) == pytest.approx(rates.rate(0, None), rel=0.1), "other positions hear of it"


def test_calibration_survives_its_change_of_unit():
    one, other = DrafterRates(), DrafterRates()
    other._unit = 0.99e9
    for i in range(300):
        for rates in (one, other):
            rates.trial(0, 0.97, i % 3 == 0)
    assert other._unit < 1e9 and one.rate(0, 0.6) == pytest.approx(other.rate(0, 0.6), rel=1e-9)


# ---- streams


def of_fixed(acceptance: float, seed: int) -> tuple[float, float]:
    """Of what one draft in every round gives: the policy's part behind the first rounds, and of plain decoding."""
    s = stream(CARD, acceptance, ASKED_ROWS, seed, p=0.7, rounds=ROUNDS)
    lengths = [choice.n_drafts for choice in play(DraftPolicy(), s, stepwise=False)[1]]
    late = slice(LEARNING, None)
    ours = s.of_part(lengths, late, s.made)
    return ours / s.of_part([1] * s.R, late), ours / s.of_part([0] * s.R, late)


def test_chance_does_not_keep_drafts_away():
    """At an acceptance of 0.5 one draft gains a ninth; one stream in ten used to go without for hundreds of rounds."""
    parts = np.array([of_fixed(0.5, seed)[0] for seed in range(24)])
    assert np.mean(parts) > 0.975 and np.mean(parts < 0.95) < 0.1, parts


@pytest.mark.soak
@pytest.mark.parametrize("acceptance", [0.05, 0.15, 0.25, 0.4, 0.5, 0.6])
def test_streams_of_short_answers(acceptance):
    found = np.array([of_fixed(acceptance, seed) for seed in range(100)])
    (part, ratio), (part_error, ratio_error) = found.mean(0), found.std(0, ddof=1) / 10
    print(f"{acceptance}: {part:.4f} +- {part_error:.4f} of one draft a round, {ratio:.4f} +- {ratio_error:.4f} of "
          f"none, least {found[:, 1].min():.3f}")  # fmt: skip
    assert found[:, 1].min() > 0.96 and (acceptance < 0.5 or part > 0.98)
