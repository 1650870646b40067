"""Greedy text of strata and llama.cpp on the same file: equal, or parted at a near tie that is measured."""

from __future__ import annotations

import numpy as np
import pytest

import strata
from tests.oracle.llama import LlamaOracle

PROMPT_TOKENS, ANSWER_TOKENS = 96, 32
STARTS = {
    "code": (0, 9_000, 40_000, 120_000, 200_000),
    "doc": (1_000, 50_000, 110_000),
    "chat": (0, 20_000, 44_000, 52_000),
}
PROMPTS = [(kind, start) for kind, starts in STARTS.items() for start in starts]
NEAR_TIE = 0.1
"""Two quantised forwards differ by 0.7-0.8 % of the logits' spread each, which is about 0.03 a logit on this model; a
gap of 0.1 is what several such steps can add up to. Seen: 0.002, 0.004 and 0.033."""


@pytest.fixture(scope="module")
def both(tiny_path):
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    # one thread: its workers spin while they wait, and so do ours
    with LlamaOracle(tiny_path, threads=1) as oracle, strata.load(tiny_path, context=1024, kv="f16") as model:
        yield oracle, model


@pytest.fixture(scope="module")
def equal_counts():
    return []


@pytest.mark.parametrize("kind,start", PROMPTS)
def test_greedy_text(both, val, equal_counts, kind, start):
    oracle, model = both
    prompt = val[kind][start : start + PROMPT_TOKENS].astype(np.int32)
    theirs = oracle.greedy(prompt, ANSWER_TOKENS, n_top=2)
    ours = model.generate(prompt, max_tokens=len(theirs.tokens), ignore_eos=True, logprobs=True, top_logprobs=2)
    different = np.flatnonzero(np.array(ours.tokens) != np.array(theirs.tokens))
    if not different.size:
        equal_counts.append(len(theirs.tokens))
        return
    at = int(different[0])
    mine, theirs_top = dict(ours.logprobs[at].top), theirs.top[at]
    gap = abs(np.diff(sorted(mine.values())))[0]
    print(f"{kind}+{start}: token {at} of {len(theirs.tokens)}, our gap {gap:.3f}, top two {mine} and {theirs_top}")
    assert gap < NEAR_TIE, f"token {at} differs without a near tie"
    assert theirs.tokens[at] in mine, "their token is not even our second choice"


def test_most_prompts_are_equal_throughout(both, equal_counts):
    assert len(equal_counts) >= len(PROMPTS) // 2, equal_counts
