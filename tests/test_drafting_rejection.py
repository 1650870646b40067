"""Sampled drafts: rejection keeps the distribution of plain sampling, as the generate loop applies it to real logits.

The model reads each continuation once; thousands of windows are then accepted from the stored logits, one a seed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import strata
import strata.runtime.generate as generate_module
from strata.base.window import HeadRequest, HeadRows
from strata.cpu.head_rows import summarise
from strata.runtime.generate import Generation
from strata.runtime.sampling import SamplingParams, row_distribution
from strata.runtime.speculation import NOTHING, Proposed
from strata.spec.accept import accept_rejection
from strata.spec.drafter import Draft
from tests.drafters import drafting_session

N_SEEDS, TOP_K = 4000, 5
PICKS = SamplingParams(temperature=1.3, top_k=TOP_K, repetition_penalty=1.2, penalty_last_n=16, seed=0)
SURE = 52.6
"""Chi-square of 24 degrees of freedom is below this in 99.93 % of cases."""


class StoredLogits:
    """The model's logits after a prompt and after every first and second token that these parameters allow."""

    def __init__(self, model, prompt):
        self.session = drafting_session(model, None)
        self.session._state.read(prompt[:-1])
        self.prompt, self.position = prompt, len(prompt) - 1
        self._model, self._rows = model, {}

    def row(self, *after: int) -> np.ndarray:
        """(V,) logits after the prompt and these tokens."""
        if after not in self._rows:
            window = np.array([self.prompt[-1], *after], np.int32)
            self.session._state.window(window)
            full = self._model._backend.head(0, len(window), HeadRequest(full=True)).full
            self._rows[after] = full[-1].copy()
        return self._rows[after]

    def window(self, params: SamplingParams, history, *rows_after) -> tuple[HeadRows, object]:
        """Head rows of a window that begins with history[-1] and goes on with the tokens of the last of rows_after."""
        rows = np.array([history[-1], *rows_after[-1][len(rows_after[0]) :]], np.int32)
        request = params.head_request(np.array(history[:-1], np.int32), rows)
        return summarise(np.stack([self.row(*after) for after in rows_after]), request), request

    def joint(self) -> np.ndarray:
        """(first, second) probabilities of plain sampling over the ids in `self.ids`."""
        def after(*tokens):
            history = [*self.prompt, *tokens]
            heads, request = self.window(PICKS, history, tokens)
            return row_distribution(heads, 0, PICKS, request)

        ids, first = after()
        seconds = {int(a): after(int(a)) for a in ids}
        return {(int(a), int(b)): p * q for a, p in zip(ids, first, strict=True)
                for b, q in zip(*seconds[int(a)], strict=True)}  # fmt: skip


@pytest.fixture(scope="module")
def stored(tiny_path, val) -> StoredLogits:
    with strata.load(tiny_path, context=256) as model:
        yield StoredLogits(model, val["doc"][21000:21048].astype(np.int32))


def first_two_tokens(stored: StoredLogits, drafts: tuple[int, ...], mode: str) -> dict[tuple[int, int], int]:
    """Counts of what the generate loop commits first and second, over seeds, when this is drafted."""
    prompt, counts = stored.prompt.tolist(), {}
    rows_after = [drafts[:t] for t in range(len(drafts) + 1)]
    opening = stored.window(PICKS, prompt, *rows_after)
    proposed = Proposed((Draft(drafts),), drafts, ("user",) * len(drafts), (None,) * len(drafts))
    seconds = {}
    for seed in range(N_SEEDS):
        params = replace(PICKS, seed=seed)
        loop = Generation(stored.session._state, stored.prompt, params, 2, acceptance=mode)
        tokens = [d.token for d in loop._accept(*opening, stored.position, proposed)]
        if len(tokens) == 1:
            (a,) = tokens
            if a not in seconds:
                seconds[a] = stored.window(PICKS, [*prompt, a], (a,))
            tokens += [d.token for d in loop._accept(*seconds[a], stored.position + 1, NOTHING)]
        pair = (tokens[0], tokens[1])
        counts[pair] = counts.get(pair, 0) + 1
    return counts


def chi_square(counts: dict, joint: dict) -> float:
    """Pearson's statistic; pairs that are expected less than five times are counted together."""
    assert set(counts) <= set(joint), "a pair came out that plain sampling cannot give"
    total, rest_seen, rest_expected = 0.0, 0.0, 0.0
    for pair, p in joint.items():
        seen, expected = counts.get(pair, 0), p * N_SEEDS
        if expected < 5:
            rest_seen, rest_expected = rest_seen + seen, rest_expected + expected
        else:
            total += (seen - expected) ** 2 / expected
    return total + ((rest_seen - rest_expected) ** 2 / rest_expected if rest_expected > 0 else 0.0)


def draft_cases(joint: dict) -> dict[str, tuple[int, ...]]:
    by_p = sorted(joint, key=joint.get)
    outside = next(t for t in range(4096) if t not in {a for a, _ in joint})
    middle = by_p[len(by_p) // 2]
    return {"likely": by_p[-1], "middling": middle, "unlikely": by_p[0], "one": by_p[-1][:1],
            "impossible": (outside, by_p[-1][1]), "impossible second": (by_p[-1][0], outside)}  # fmt: skip


@pytest.mark.parametrize("case", ["likely", "middling", "unlikely", "one", "impossible", "impossible second"])
def test_rejection_has_the_distribution_of_plain_sampling(stored, case):
    joint = stored.joint()
    assert len(joint) == TOP_K**2 and sum(joint.values()) == pytest.approx(1)
    found = chi_square(first_two_tokens(stored, draft_cases(joint)[case], "rejection"), joint)
    print(f"{case}: {found:.1f}")
    assert found < SURE


def test_exact_is_plain_sampling_draw_by_draw(stored):
    joint = stored.joint()
    wanted = first_two_tokens(stored, (), "exact")
    assert chi_square(wanted, joint) < SURE
    for case in ("likely", "impossible second"):
        assert first_two_tokens(stored, draft_cases(joint)[case], "exact") == wanted


def accepts_too_much(mode, drafts, draw, distribution, uniforms, proposals):
    """A wrong rule: a draft is judged against the most likely token's probability instead of by its own."""
    tokens = []
    for t, draft in enumerate(drafts):
        ids, p = distribution(t)
        accepted, token = accept_rejection(ids, p, draft, None, None, uniforms(t)[0] * p.max(), uniforms(t)[1])
        tokens.append(token)
        if not accepted:
            return tokens
    return [*tokens, draw(len(drafts))]


def draws_again_from_all(mode, drafts, draw, distribution, uniforms, proposals):
    """A wrong rule: after a rejection the whole distribution is drawn from, the rejected draft included."""
    tokens = []
    for t, draft in enumerate(drafts):
        ids, p = distribution(t)
        accepted, token = accept_rejection(ids, p, draft, None, None, *uniforms(t))
        if not accepted:
            return [*tokens, int(ids[min(np.searchsorted(np.cumsum(p), uniforms(t)[1], side="right"), len(p) - 1)])]
        tokens.append(token)
    return [*tokens, draw(len(drafts))]


def one_uniform_for_both(mode, drafts, draw, distribution, uniforms, proposals):
    """A wrong rule: the draw after a rejection uses the number that rejected."""
    tokens = []
    for t, draft in enumerate(drafts):
        accepted, token = accept_rejection(*distribution(t), draft, None, None, uniforms(t)[0], uniforms(t)[0])
        tokens.append(token)
        if not accepted:
            return tokens
    return [*tokens, draw(len(drafts))]


@pytest.mark.parametrize("wrong", [accepts_too_much, draws_again_from_all, one_uniform_for_both])
def test_the_test_sees_wrong_rules(monkeypatch, stored, wrong):
    joint = stored.joint()
    monkeypatch.setattr(generate_module, "accept_window", wrong)
    found = chi_square(first_two_tokens(stored, draft_cases(joint)["likely"], "rejection"), joint)
    print(f"{wrong.__name__}: {found:.1f}")
    assert found > 2 * SURE
