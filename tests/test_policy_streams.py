"""Texts whose acceptance changes by token: what the draft policy gains by learning how buckets follow each other.

Streams are played twice, by the policy as it is and with what follows a bucket drowned in the mix of the last few.
"""

from __future__ import annotations

import numpy as np
import pytest

from strata.spec import estimates
from strata.spec.drafter import Draft
from strata.spec.policy import MAX_DRAFTS, DraftPolicy, Outcome, RoundFacts

TOKENS, ROW_MS, DRAFT_ROWS = 1500, 10.0, 0.25
CARD = (1, 1.36, 1.6, 1.85, 2.05, 2.25, 2.5, 2.8)
"""Cost of windows of 1 to 8 rows on a card, in rows."""


def turns(rng, kinds):
    """Stretches of (acceptance, tokens) of each kind in turn."""
    parts, n, i = [], 0, int(rng.integers(len(kinds)))
    while n < TOKENS:
        rate, length = kinds[i % len(kinds)](rng)
        parts.append(np.full(length, rate))
        n, i = n + length, i + 1
    return np.concatenate(parts)[:TOKENS]


def log_length(rng):
    return int(np.exp(rng.uniform(np.log(20), np.log(200))))


FAMILIES = {
    "by token": lambda rng: rng.beta(1.5, 0.7, TOKENS),
    "blocks of 20": lambda rng: np.repeat(rng.choice([0.3, 0.9], TOKENS // 20), 20),
    "blocks of 50": lambda rng: np.repeat(rng.choice([0.1, 0.95], TOKENS // 50), 50),
    "bursts": lambda rng: turns(
        rng, [lambda r: (0.15, int(r.geometric(1 / 40))), lambda r: (0.95, int(r.geometric(1 / 12)))]
    ),
    "code and prose": lambda rng: turns(
        rng, [lambda r: (r.uniform(0.85, 0.97), log_length(r)), lambda r: (r.uniform(0.1, 0.6), log_length(r))]
    ),
    "steady 0.7": lambda rng: np.full(TOKENS, 0.7),
}


def tokens_per_row(family: str, seed: int) -> float:
    """Of a new policy over a stream of a family; a draft's probability is about its acceptance."""
    rng = np.random.default_rng([seed, sorted(FAMILIES).index(family)])
    rates = FAMILIES[family](rng)
    rates = np.concatenate([rates, np.full(MAX_DRAFTS, rates[-1])])[np.arange(TOKENS)[:, None] + np.arange(MAX_DRAFTS)]
    good = rng.random(rates.shape) < rates
    p = np.clip(rates + rng.normal(0, 0.05, rates.shape), 0.02, 1).tolist()
    noise = np.clip(rng.normal(1, 0.05, TOKENS), 0.5, 2)
    policy, n, spent = DraftPolicy(), 0, 0.0
    while n < TOKENS:
        made, verified = min(1, policy.choose(RoundFacts(MAX_DRAFTS, True, True, 0, 0)).n_drafts), 0
        if made:
            while made < MAX_DRAFTS and policy.continue_drafting(p[n][:made]):
                made += 1
            verified = policy.settle(p[n][:made]).n_drafts
        kept = int(np.cumprod(good[n, :verified]).sum())
        shown = tuple(i if good[n, i] else 100 + i for i in range(made))
        drafts = [Draft(shown, tuple(p[n][:made]), "mtp")] if made else []
        ms, draft_ms = ROW_MS * CARD[verified] * noise[n], ROW_MS * DRAFT_ROWS * made
        policy.observe(Outcome(1 + verified, ms, draft_ms, tuple(range(kept + 1)), drafts))
        spent += (ms + draft_ms) / ROW_MS
        n += kept + 1
    return n / spent


def gains(family: str, seeds: range, monkeypatch) -> np.ndarray:
    """Per cent gained in each stream by what is learnt of the next bucket."""
    learnt = [tokens_per_row(family, seed) for seed in seeds]
    with monkeypatch.context() as m:
        m.setattr(estimates, "MIX_WEIGHT", 1e9)
        plain = [tokens_per_row(family, seed) for seed in seeds]
    return 100 * (np.array(learnt) / np.array(plain) - 1)


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_a_bucket_is_worth_learning(family, monkeypatch):
    found = gains(family, range(60), monkeypatch)
    mean, error = found.mean(), found.std(ddof=1) / len(found) ** 0.5
    print(f"{family}: {mean:+.2f} +- {error:.2f} %")
    assert mean > -2 * error, found
    assert mean > 0 or family == "steady 0.7", found
