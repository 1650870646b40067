"""How rounds are spent: which are asked about, what is timed and counted, and what the policy makes of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

import strata
from strata.base.errors import BadArgument
from strata.spec.drafter import Draft
from strata.spec.policy import DraftPolicy, Outcome, RoundFacts
from tests.drafters import Oracle, PlantedError, Told, drafting_session
from tests.test_drafting import GREEDY

N_NEW = 64


@pytest.fixture(scope="module")
def model(tiny_path, mtp_path):
    with strata.load(tiny_path, context=512, draft=mtp_path, threads=1, checkpoints=0) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def prompt(val) -> np.ndarray:
    return val["code"][7000:7048].astype(np.int32)


@pytest.fixture(scope="module")
def plain(model, prompt) -> strata.Result:
    return drafting_session(model, None).generate(prompt, max_tokens=N_NEW, **GREEDY)


@pytest.fixture(scope="module")
def text(prompt, plain) -> list[int]:
    return [*prompt.tolist(), *plain.tokens]


# ---- rounds in which nothing is asked


class Idle(Told):
    """Never drafts; windows are said to be so short that asking is dear."""

    def __init__(self):
        super().__init__(lambda: 0)
        self.rests: list[int] = []

    def window_ms(self, T: int) -> float:
        return 1e-3 * T

    def rested(self, rounds: int, ms: float) -> None:
        assert ms > 0
        self.rests.append(rounds)


def test_while_nothing_is_drafted_most_rounds_are_not_asked_about(model, plain, text, prompt):
    policy = Idle()
    session = drafting_session(model, policy, draft_layer=False)
    answer = session.generate(prompt, max_tokens=200, **GREEDY)
    assert answer.tokens[:N_NEW] == plain.tokens
    assert policy.rests == [1, 3, 7, 15, 31, 63, 64, 8] and len(policy.outcomes) == 8
    assert answer.drafts["windows"] == 200 and answer.drafts["windows_by_committed"][0] == 200
    lookup = session._state.speculator.lookup
    assert lookup._tokens[: lookup._n].tolist() == [*prompt.tolist(), *answer.tokens]
    total = session._state.speculator.total
    assert (total.committed, total.rested) == ({1: 8}, 192) and total.summary()["windows_by_committed"][0] == 200


def test_asking_begins_again_with_the_next_answer_and_after_a_draft(model, plain, text, prompt):
    policy = Idle()
    session = drafting_session(model, policy, Oracle(text), draft_layer=False)
    session.generate(prompt, max_tokens=20, **GREEDY)
    assert policy.rests == [1, 3, 7, 5]
    session.clear()
    script = iter([0, 0, 2, 0, 0, 0, 0])
    policy.lengths, policy.rests = lambda: next(script), []
    answer = session.generate(prompt, max_tokens=20, **GREEDY)
    assert answer.tokens == plain.tokens[:20]
    assert policy.rests == [1, 3, 1, 3, 4]


def test_a_probe_in_vain_does_not_begin_to_ask_again(model, plain, text, prompt):
    """The policy says which rounds are probes; nothing has changed where one fails."""
    policy = Idle()
    policy.probing = True
    script = iter([0, 0, 0, 2, 0, 0])
    policy.lengths = lambda: next(script)
    wrong = [(token + 1) % 4000 for token in text]
    session = drafting_session(model, policy, Oracle(wrong), draft_layer=False)
    answer = session.generate(prompt, max_tokens=40, **GREEDY)
    assert answer.tokens == plain.tokens[:40] and answer.drafts["offered"] == 2
    assert policy.rests == [1, 3, 7, 7, 15, 1]


# ---- telemetry


def test_what_drafting_did_is_counted(model, plain, text, prompt):
    session = drafting_session(model, Told(lambda: 4), PlantedError(text))
    told = session.generate(prompt, max_tokens=N_NEW, **GREEDY).drafts
    policy = session._state.speculator.policy
    assert told["windows"] == len(policy.outcomes)
    assert told["committed_per_window"] == pytest.approx(N_NEW / told["windows"])
    assert sum(n * windows for n, windows in enumerate(told["windows_by_committed"], 1)) == N_NEW
    assert told["draft_ms"] == pytest.approx(sum(o.draft_ms for o in policy.outcomes)) and told["draft_ms"] > 0
    assert list(told["by_source"]) == ["user"]
    user = told["by_source"]["user"]
    made = [(o, d) for o in policy.outcomes for d in o.drafts if d.source == "user"]
    agreed = [draft.agreement(outcome.committed)[0] for outcome, draft in made]
    assert user["accepted"] == [sum(a > place for a in agreed) for place in range(4)]
    assert user["offered"] == [sum(len(draft.tokens) > place for _, draft in made) for place in range(4)]
    assert told["offered"] == sum(user["offered"]) and told["accepted"] == sum(user["accepted"]) < told["offered"]


def test_statistics_of_a_model(tiny_path, mtp_path, prompt):
    class Fails:
        def propose(self, tokens, k):
            raise RuntimeError("no luck")

    with strata.load(tiny_path, context=256, draft=mtp_path, sessions=2) as model:
        before = model.stats()["drafting"]
        assert (before["windows"], before["offered"], before["by_source"]) == (0, 0, {})
        assert before["drafters"] == ["mtp", "lookup"] and before["switched_off"] is None
        with model.session() as other:
            answers = [model.generate(prompt, max_tokens=30), other.generate(prompt[9:], max_tokens=30)]
            stream = other.stream(prompt[5:], max_tokens=30)
            next(stream)
            stream.close()  # windows of an answer that was broken off count as well
        after = model.stats()["drafting"]
        assert after["windows"] == sum(a.drafts["windows"] for a in answers) + 1
        assert after["offered"] == sum(a.drafts["offered"] for a in answers) + stream.result.drafts["offered"]
        assert len(after["window_ms"]) == 8 and after["window_ms"][0] > 0 and after["one_draft_ms"] > 0
        assert 0 <= after["probe_share"] < 1
    with strata.load(tiny_path, context=256, draft=Fails()) as model:
        model.generate(prompt, max_tokens=20)
        assert model.stats()["drafting"]["drafters"] == ["user", "lookup"]
        assert "no luck" in model.stats()["drafting"]["switched_off"]
    with strata.load(tiny_path, context=256) as model:
        assert model.stats()["drafting"] is None


def test_options_of_drafting_are_checked(model):
    for wrong in ({"drafts": 1}, {"draft_acceptance": "typical"}):
        with pytest.raises(BadArgument):
            model.generate("a", max_tokens=1, **wrong)


# ---- the draft layer after a pause


def step(session, tokens) -> None:
    part = np.asarray(tokens, np.int32)
    session.window(part)
    session.commit(part, len(part))


def test_catching_up_is_known_beforehand(model, text):
    session = drafting_session(model, None)._state
    assert session.mtp.behind == 0
    session.read(np.array(text[:20], np.int32))
    assert session.mtp.behind == 0
    for at in range(20, 30):
        step(session, text[at : at + 1])
    assert session.mtp.behind == 10
    session.mtp.catch_up(session.state)
    assert session.mtp.behind == 0
    drafts, _ = session.mtp.propose(session.state, text[30], 3)
    assert session.mtp.behind == 0 and len(drafts) == 3


def test_drafts_for_a_token_that_did_not_come(model, text):
    """A round that is broken off after drafting may be followed by another token."""
    one, other = (drafting_session(model, None)._state for _ in range(2))
    for session in (one, other):
        session.read(np.array(text[:20], np.int32))
    one.mtp.propose(one.state, 7, 3)
    for at in range(20, 24):
        for session in (one, other):
            step(session, text[at : at + 1])
    assert one.mtp.propose(one.state, text[24], 3) == other.mtp.propose(other.state, text[24], 3)
    name = next(n for n in one.state.arrays if n.startswith("mtp."))
    np.testing.assert_array_equal(one.state.arrays[name][:23], other.state.arrays[name][:23])


@pytest.mark.parametrize(("draft_ms", "wanted"), [(0.0, 3), (5.0, 1)])
def test_cheap_drafts_are_made_at_once(model, prompt, plain, draft_ms, wanted):
    policy, asked = Told(lambda: 3), []
    policy.draft_ms = draft_ms
    session = drafting_session(model, policy)
    mtp = session._state.mtp
    propose = mtp.propose
    mtp.propose = lambda *a, at_once=1: asked.append(at_once) or propose(*a, at_once=at_once)
    assert session.generate(prompt, max_tokens=12, **GREEDY).tokens == plain.tokens[:12]
    assert set(asked[:2]) == {wanted} and len(policy.outcomes[0].drafts[0].tokens) == 3


def test_the_policy_says_how_many_drafts_are_likely():
    policy = DraftPolicy()
    fed(policy, 200, RoundFacts(7, drafter=True, stepwise=False))
    choices = [policy.choose(RoundFacts(7, drafter=True)) for _ in range(3)]
    assert all(choice.n_drafts == 7 and 3 < choice.planned <= 7 for choice in choices if choice.reason == "drafter")
    assert any(choice.reason == "drafter" for choice in choices)


# ---- what the policy learns from it


def fed(policy, rounds, facts, ms=lambda T: 1.0 + 0.2 * (T - 1), draft_ms=0.05, other_ms=0.0) -> list[int]:
    """Rounds of a world in which every draft is right; returns the rows of each."""
    rows = []
    for _ in range(rounds):
        choice = policy.choose(facts)
        drafts = []
        if facts.lookup_tokens:
            drafts.append(Draft((5,) * facts.lookup_tokens, None, "lookup", facts.match_length))
        if choice.n_drafts:
            drafts.append(Draft((5,) * choice.n_drafts, None, "user"))
            choice = policy.settle((None,) * choice.n_drafts)
        T = 1 + choice.n_drafts + choice.n_lookup
        made = sum(len(d.tokens) for d in drafts if d.source == "user")
        policy.observe(Outcome(T, ms(T), draft_ms * made, [5] * T, drafts, other_ms))
        rows.append(T)
    return rows


def test_skipped_rounds_count_as_rounds_of_one_row():
    skipping, asked = DraftPolicy(), DraftPolicy()
    for policy in (skipping, asked):
        fed(policy, 20, RoundFacts())
    for _ in range(10):
        skipping.rested(8, 8 * 1.4)
        skipping.choose(RoundFacts())
        skipping.observe(Outcome(1, 1.4, 0.0, [5]))
    fed(asked, 90, RoundFacts(), ms=lambda T: 1.4)
    assert skipping.total_ms == pytest.approx(asked.total_ms)
    for policy in (skipping, asked):
        assert policy.window_ms(1) == pytest.approx(1.4, rel=0.1)
        assert policy.tokens_per_ms == pytest.approx(1 / 1.4, rel=0.1)
    for rounds, ms in ((0, 1.0), (1, 0.0), (1, math.nan), (2, math.inf)):
        with pytest.raises(BadArgument):
            skipping.rested(rounds, ms)


def test_asking_must_pay_as_well():
    facts = RoundFacts(drafter=True, stepwise=False)
    policy = DraftPolicy()
    assert fed(policy, 60, facts)[-1] > 3
    policy.asking_ms = 20.0
    rows = fed(policy, 60, facts, other_ms=20.0)
    assert rows.count(1) > 55 and policy.choose(facts).n_drafts == 0


def test_other_milliseconds_are_spent_but_say_nothing_about_windows():
    policy = DraftPolicy()
    fed(policy, 30, RoundFacts(drafter=True, stepwise=False))
    before = policy.total_ms, [policy.window_ms(T) for T in (1, 8)], policy.draft_ms
    policy.choose(RoundFacts(drafter=True, stepwise=False))
    policy.observe(Outcome(8, policy.window_ms(8), 7 * policy.draft_ms, [5] * 8, [Draft((5,) * 7)], other_ms=50.0))
    assert policy.total_ms > before[0] + 50
    assert [policy.window_ms(T) for T in (1, 8)] == pytest.approx(before[1])
    assert policy.draft_ms == pytest.approx(before[2])
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(BadArgument):
            policy.observe(Outcome(1, 1.0, 0.0, [5], (), wrong))


@pytest.mark.parametrize("slow_first", [2.0, 6.0])
def test_lookup_gets_over_slow_first_windows(slow_first):
    """The first windows of every size pay for what they set up; if that is taken for their price, lookup looks bad."""
    seen: dict[int, int] = {}

    def ms(T):
        seen[T] = seen.get(T, 0) + 1
        return 1.0 + 0.35 * (T - 1) + (slow_first if T > 1 and seen[T] == 1 else 0.0)

    rows = fed(DraftPolicy(), 4000, RoundFacts(lookup_tokens=7, match_length=30), ms)
    assert np.mean(rows[-200:]) > 7
