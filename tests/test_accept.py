"""Acceptance: greedy and exact give plain decoding's tokens, rejection gives its distribution, wrong rules are seen."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument
from strata.runtime.rng import ACCEPT, DRAFT, PICK, RESIDUAL, uniforms
from strata.spec.accept import accept_exact, accept_greedy, accept_rejection, accept_window

CHI_999 = {5: 20.515, 35: 66.619}
"""99.9 % points of chi-square by degrees of freedom."""


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


# ---- greedy and exact --------------------------------------------------------------------------------------------


def test_accept_exact():
    target = [5, 6, 7, 8]
    asked = []

    def draw(t):
        asked.append(t)
        return target[t]

    assert accept_exact([5, 6, 7], draw) == [5, 6, 7, 8]
    assert accept_exact([5, 9, 7], draw) == [5, 6]
    assert accept_exact([], draw) == [5]
    assert asked == [0, 1, 2, 3, 0, 1, 0]


def next_token(history):
    """A model: the token after a text."""
    return (3 * history[-1] + 5 * history[-2] + len(history)) % 7


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32), st.sampled_from(["greedy", "exact"]))
def test_windows_of_any_drafts_give_plain_decoding(seed, mode):
    """Right drafts, wrong drafts, right ones behind wrong ones: the text is that of one-token decoding."""
    rng = np.random.default_rng(seed)
    plain, text = [1, 2], [1, 2]
    while len(plain) < 60:
        plain.append(next_token(plain))
    while len(text) < 50:
        start = len(text)
        drafts = [int(t) if rng.random() < 0.7 else int(rng.integers(0, 7)) for t in plain[start : start + 7]]
        drafts = drafts[: rng.integers(0, 8)]
        rows = [next_token([*text, *drafts[:t]]) for t in range(len(drafts) + 1)]
        kept = accept_window(mode, drafts, rows.__getitem__)
        assert kept == accept_greedy(drafts, np.array(rows, np.int32)) and 1 <= len(kept) <= len(drafts) + 1
        assert kept[:-1] == drafts[: len(kept) - 1]
        text += kept
    assert text == plain[: len(text)]


def test_rows_and_drafts_must_fit():
    with pytest.raises(BadArgument, match="1 drafts, 1 rows"):
        accept_greedy([3], [3])
    with pytest.raises(BadArgument, match="unknown acceptance mode"):
        accept_window("typical", [], lambda t: 0)
    with pytest.raises(BadArgument, match="distribution and uniforms"):
        accept_window("rejection", [1], lambda t: 0)
    with pytest.raises(BadArgument, match="one each"):
        accept_window("rejection", [1], lambda t: 0, lambda t: (P_IDS, P), lambda t: (0.5, 0.5), [None, None])


# ---- rejection, one draft ----------------------------------------------------------------------------------------


P_IDS, P = np.array([7, 2, 9, 4, 1, 8], np.int32), np.array([0.35, 0.25, 0.2, 0.1, 0.06, 0.04])
Q_IDS, Q = np.array([2, 3, 7, 9], np.int32), np.array([0.5, 0.2, 0.2, 0.1])
N = 30_000


def rejection_counts(rule, drafts, q_ids, q_probs):
    """How often each of P_IDS comes out of a rule for the given drafts."""
    positions = np.arange(N)
    accept, residual = uniforms(3, positions, ACCEPT), uniforms(3, positions, RESIDUAL)
    tokens = [rule(P_IDS, P, d, q_ids, q_probs, a, r)[1] for d, a, r in zip(drafts, accept, residual, strict=True)]
    counts = np.array([tokens.count(i) for i in P_IDS])
    # a token outside p shows as an impossible statistic
    return math.inf if counts.sum() != N else chi_square(counts, P)


def q_drafts():
    return Q_IDS[np.searchsorted(np.cumsum(Q), uniforms(3, np.arange(N), DRAFT), side="right")].tolist()


def test_rejection_keeps_the_distribution():
    assert rejection_counts(accept_rejection, q_drafts(), Q_IDS, Q) < CHI_999[5]


@pytest.mark.parametrize("draft", [2, 8, 3])
def test_point_mass_keeps_the_distribution(draft):
    assert rejection_counts(accept_rejection, [draft] * N, None, None) < CHI_999[5]


def test_wrong_rules_are_seen():
    def residual_is_p(p_ids, p, draft, q_ids, q, u_accept, u_residual):
        accepted, token = accept_rejection(p_ids, p, draft, q_ids, q, u_accept, u_residual)
        return (True, token) if accepted else (False, int(p_ids[np.searchsorted(np.cumsum(p), u_residual)]))

    def no_list_means_zero(p_ids, p, draft, q_ids, q, u_accept, u_residual):
        inside = bool((p_ids == draft).any())
        return accept_rejection(p_ids, p, draft, q_ids, q, 0.0 if inside else u_accept, u_residual)

    assert rejection_counts(residual_is_p, q_drafts(), Q_IDS, Q) > CHI_999[5]
    assert rejection_counts(no_list_means_zero, [2] * N, None, None) > CHI_999[5]


def test_rejection_edges():
    # a draft that p excludes is refused whatever the uniform, the same distribution is always accepted
    assert accept_rejection(P_IDS, P, 3, Q_IDS, Q, 0.0, 0.0) == (False, 7)
    assert accept_rejection(P_IDS, P, 3, None, None, 0.0, 1 - 2**-53) == (False, 8)
    for u in (0.0, 1 - 2**-53):
        assert accept_rejection(P_IDS, P, 9, P_IDS, P, u, 0.5) == (True, 9)
    assert accept_rejection(P_IDS[:1], np.ones(1), 7, None, None, 1 - 2**-53, 0.5) == (True, 7)
    # rejected tokens never come back
    assert accept_rejection(P_IDS, P, 2, Q_IDS, Q, 0.9, 0.0) == (False, 7)
    with pytest.raises(BadArgument, match="own distribution"):
        accept_rejection(P_IDS, P, 1, Q_IDS, Q, 0.5, 0.5)


# ---- rejection, whole windows ------------------------------------------------------------------------------------

V, M = 6, 20_000
IDS = np.arange(V, dtype=np.int32)
_rng = np.random.default_rng(4)
NEXT = _rng.dirichlet(np.full(V, 2.0), V)  # the model: distribution of the token after each token
GUESS = 0.5 * NEXT + 0.5 * _rng.dirichlet(np.full(V, 2.0), V)  # a drafter that is about right
FIRST = 2


def step(probs, u):
    return int(np.searchsorted(np.cumsum(probs), u * probs.sum(), side="right"))


def window_counts(source, rule=None):
    """(V, V) counts of the first two tokens that windows of two drafts and plain decoding after them commit.

    source  "drawn": drafts drawn from GUESS; "point": its most likely tokens; "mixed": one of each
    rule    `right`, or a wrong one
    """
    at = np.arange(8 * M).reshape(M, 8)
    pick, draft, accept, residual = (uniforms(9, at, stream) for stream in (PICK, DRAFT, ACCEPT, RESIDUAL))
    counts = np.zeros((V, V), np.int64)
    for w in range(M):
        drafts, proposals, last = [], [], FIRST
        for t in range(2):
            drawn = source == "drawn" or (source == "mixed" and t == 0)
            last, before = step(GUESS[last], draft[w, t]) if drawn else int(GUESS[last].argmax()), last
            drafts.append(last)
            proposals.append((IDS, GUESS[before]) if drawn else None)
        rows = [NEXT[t] for t in (FIRST, *drafts)]
        tokens = (rule or right)(drafts, rows, proposals, pick[w], accept[w], residual[w])
        if len(tokens) == 1:  # the next round, without drafts
            tokens.append(step(NEXT[tokens[0]], pick[w, 7]))
        counts[tokens[0], tokens[1]] += 1
    return counts


def right(drafts, rows, proposals, pick, accept, residual):
    return accept_window("rejection", drafts, lambda t: step(rows[t], pick[t]), lambda t: (IDS, rows[t]),
                         lambda t: (accept[t], residual[t]), proposals)  # fmt: skip


JOINT = NEXT[FIRST][:, None] * NEXT
"""What plain sampling gives for the first two tokens."""


def statistic(counts):
    return chi_square(counts.ravel(), JOINT.ravel())


@pytest.mark.parametrize("source", ["drawn", "point", "mixed"])
def test_windows_keep_the_joint_distribution(source):
    assert statistic(window_counts(source)) < CHI_999[35]


def test_wrong_window_rules_are_seen():
    def goes_on_after_a_rejection(drafts, rows, proposals, pick, accept, residual):
        tokens = []
        for t, draft in enumerate(drafts):
            q = proposals[t] or (None, None)
            tokens.append(accept_rejection(IDS, rows[t], draft, *q, accept[t], residual[t])[1])
        return tokens

    def one_uniform_for_all_rows(drafts, rows, proposals, pick, accept, residual):
        return accept_window("rejection", drafts, lambda t: step(rows[t], pick[t]), lambda t: (IDS, rows[t]),
                             lambda t: (accept[0], residual[0]), proposals)  # fmt: skip

    for wrong in (goes_on_after_a_rejection, one_uniform_for_all_rows):
        assert statistic(window_counts("drawn", wrong)) > CHI_999[35], wrong.__name__


def test_a_drawn_draft_may_count_as_a_point():
    """Less often accepted, but the same distribution: the acceptance test does not know how the draft was made."""

    def as_points(drafts, rows, proposals, *randoms):
        return right(drafts, rows, None, *randoms)

    assert statistic(window_counts("drawn", as_points)) < CHI_999[35]


def test_no_row_behind_a_rejection_is_asked():
    asked = []

    def distribution(t):
        asked.append(t)
        return IDS, NEXT[0]

    kept = accept_window("rejection", [1, 1, 1], lambda t: 5, distribution, lambda t: (0.0 if t == 0 else 1.0, 0.0))
    assert asked == [0, 1] and len(kept) == 2 and kept[0] == 1 != kept[1]
    assert accept_window("rejection", [1], lambda t: 10 + t, distribution, lambda t: (0.0, 0.0)) == [1, 11]
    assert accept_window("rejection", [], lambda t: 10 + t, distribution, lambda t: (0.0, 0.0)) == [10]
