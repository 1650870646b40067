"""The draft policy where a text changes: how soon drafts that nobody wants are given up, and found again."""

import numpy as np
import pytest

from strata.base.geometry import DRAFT_QUEUE_ROWS
from strata.spec.drafter import Draft
from strata.spec.estimates import LOST, Doubt
from strata.spec.mtp import MtpDrafter
from strata.spec.policy import PROBE_OF_DRAFTER, Choice, DraftPolicy, Outcome, RoundFacts
from tests.test_policy import play, stream

CARD = np.interp(np.arange(1, 9), [1, 2, 4, 8], [1, 1.3, 1.76, 2.8])
"""Windows of 1..8 rows on a card, in rows; a draft of the draft layer costs a quarter of one."""
GOOD, POOR = 120, 256
"""Rounds before the change, and after it."""


def changed(low: float, p: float | None, seed: int) -> tuple[float, float]:
    """Part of plain decoding's speed that is left after the text has changed; the same before it did."""
    s = stream(CARD, np.repeat([0.9, low], [GOOD, POOR]), 0.25, seed, p=p, rounds=GOOD + POOR)
    lengths = [choice.n_drafts for choice in play(DraftPolicy(), s)[1]]
    parts = slice(GOOD, None), slice(0, GOOD)
    return tuple(s.of_part(lengths, part, s.made) / s.of_part([0] * s.R, part) for part in parts)


@pytest.mark.parametrize(
    ("p", "least"), [(None, 0.98), (0.9, 0.967)], ids=["it knows what it does not know", "it is as sure as before"]
)
@pytest.mark.parametrize("low", [0.0, 0.05, 0.2])
def test_little_is_lost_where_text_turns_unpredictable(low, p, least):
    """Rates alone, without a look at drafts that fail in a row, lose 1.7 to 2.2 % there, and 3.3 to 4.6 %."""
    after, before = np.mean([changed(low, p, seed) for seed in range(8)], 0)
    assert after >= least
    assert before > 1.15


def test_text_that_becomes_predictable_again_is_found():
    """Probes find it, after 45 rounds in the middle and 150 at most, as chance has it."""
    acceptance, drafting = np.repeat([0.9, 0.05, 0.9], [GOOD, POOR, 200]), []
    for seed in range(12):
        s = stream(CARD, acceptance, 0.25, seed, rounds=len(acceptance))
        drafting.append([choice.n_drafts > 0 for choice in play(DraftPolicy(), s)[1]])
    assert np.mean([d[-100:] for d in drafting]) > 0.9
    assert min(np.mean(d[-20:]) for d in drafting) > 0.9


# ---- doubt


@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.7, 0.9])
def test_a_steady_text_is_hardly_doubted(acceptance):
    doubt, rng, trust = Doubt(), np.random.default_rng(0), []
    for good in rng.random(5000) < acceptance:
        doubt.trial(acceptance, bool(good))
        trust.append(doubt.trust)
    assert np.mean(trust) > 0.99


def test_failures_in_a_row_are_doubted_by_what_was_expected():
    def failures(expected: float) -> int:
        doubt, n = Doubt(), 0
        while doubt.trust > 0.5:
            doubt.trial(expected, False)
            n += 1
            assert doubt.wary <= doubt.trust
        return n

    assert [failures(q) for q in (0.9, 0.7, 0.5)] == [4, 8, 14]
    doubt = Doubt()
    for _ in range(10_000):  # what was never expected says nothing
        doubt.trial(LOST, False)
        doubt.trial(0.0, True)
    assert doubt.trust == Doubt().trust and not doubt.cautious


def test_doubt_ends_with_drafts_that_come_out():
    doubt = Doubt()
    for _ in range(1000):
        doubt.trial(0.9, False)
    assert 0.2 < doubt.trust < 0.5, "however long it lasted, a few drafts end it"
    for _ in range(5):
        doubt.trial(0.9, True)
    assert doubt.trust > 0.99 and not doubt.cautious and doubt.wary == doubt.trust


# ---- probes


def rounds(policy: DraftPolicy, n: int, right: bool, p: float = 0.9) -> list[Choice]:
    """Rounds of a drafter whose drafts are all right or all wrong; the choices that were settled, probes alone."""
    settled = []
    for _ in range(n):
        choice, drafts = policy.choose(RoundFacts(drafter=True)), []
        made = min(1, choice.n_drafts)
        while 0 < made < choice.n_drafts and policy.continue_drafting([p] * made):
            made += 1
        if made:
            was_probe = choice.reason == PROBE_OF_DRAFTER
            choice = policy.settle([p] * made)
            drafts = [Draft((5 if right else 6,) * made, (p,) * made, "mtp")]
            settled += [choice] if was_probe else []
        T = 1 + choice.n_drafts
        committed = [5] * (T if right else 1)
        policy.observe(Outcome(T, 10.0 * CARD[T - 1], 2.5 * made, committed, drafts))
    return settled


def test_a_draft_that_is_hopeless_is_judged_without_a_row():
    policy = DraftPolicy()
    rounds(policy, 60, right=True)
    assert policy.choose(RoundFacts(drafter=True)).n_drafts > 1
    first = rounds(policy, 250, right=False)
    assert 2 <= len(first) < 10 and first[0].n_drafts == 1, "the price of two rows is not known yet"
    probes = rounds(policy, 250, right=False)
    assert len(probes) > 2 and {p.n_drafts for p in probes[1:]} == {0}
    rounds(policy, 500, right=True)
    assert policy.choose(RoundFacts(drafter=True)).n_drafts > 0


def test_a_price_that_is_old_is_measured_again():
    policy = DraftPolicy()
    rounds(policy, 60, right=True)
    probes = rounds(policy, 4000, right=False)
    assert {p.n_drafts for p in probes} == {0, 1}
    assert policy._round - policy._costs.last[2] < 1500


# ---- rows that wait


class Stored:
    """A draft layer that notes what it stores."""

    def __init__(self):
        self.cells: list[tuple[int, list[int]]] = []

    def append(self, state, tokens, position):
        self.cells.append((position, tokens.tolist()))


class Rows:
    rows = 0


@pytest.mark.parametrize("n", [1, 3, DRAFT_QUEUE_ROWS, DRAFT_QUEUE_ROWS + 1, 200])
def test_rows_taken_in_late_are_those_taken_in_at_once(n):
    text = np.random.default_rng(n).integers(0, 1000, 300).astype(np.int32)
    found = []
    for at_once in (True, False):
        stored, state = Stored(), Rows()
        drafter = MtpDrafter(stored)
        drafter.follow(state, text)
        for _ in range(n):
            state.rows += 1
            if at_once:
                assert drafter.behind <= DRAFT_QUEUE_ROWS
        behind = drafter.behind
        drafter.catch_up(state)
        assert drafter.behind == 0
        found.append((behind, stored.cells))
    assert found[0] == found[1]
    tokens = [t for _, cells in found[0][1] for t in cells]
    assert len(tokens) == min(n - 1, found[0][0]) and tokens == text[n - len(tokens) : n].tolist()


def test_rows_that_are_gone_are_forgotten():
    stored, state = Stored(), Rows()
    drafter = MtpDrafter(stored)
    drafter.follow(state, np.arange(50, dtype=np.int32))
    state.rows = 30
    drafter.catch_up(state)
    state.rows = 10
    assert drafter.behind == 0
    state.rows = 12
    assert drafter.behind == 1
