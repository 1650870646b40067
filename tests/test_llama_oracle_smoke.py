"""llama.cpp and the golden data agree about the bundled model as far as different activation rounding allows."""

from __future__ import annotations

import numpy as np
import pytest

from strata.base.errors import StrataError
from tests.oracle.llama import LlamaOracle

# Two next tokens whose logits are closer than this may swap when activations are quantised.
NEAR_TIE = 0.25


@pytest.fixture(scope="module")
def oracle(tiny_path):
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    with LlamaOracle(tiny_path, threads=1) as oracle:  # two would spin while they wait for each other
        yield oracle


@pytest.mark.parametrize("prompt", ["code", "code_long"])
def test_greedy_up_to_the_first_near_tie(oracle, golden, prompt):
    prefix = f"IQ3_XXS.{prompt}."
    wanted, gaps = golden[prefix + "greedy"], golden[prefix + "greedy_gap"]
    near = np.flatnonzero(gaps < NEAR_TIE)
    n = int(near[0]) if len(near) else len(wanted)
    assert n >= 10
    found = oracle.greedy(golden[prefix + "tokens"], n, n_top=3)
    np.testing.assert_array_equal(found.tokens, wanted[:n])
    assert str(golden[prefix + "greedy_text"]).startswith(found.text)
    assert [max(top, key=top.get) for top in found.top] == found.tokens
    assert np.all(found.logprobs <= 0)


@pytest.mark.parametrize("prompt", ["code", "chat_no_think", "code_long"])
def test_log_probabilities(oracle, golden, prompt):
    prefix = f"IQ3_XXS.{prompt}."
    tokens = np.concatenate([golden[prefix + "tokens"], golden[prefix + "greedy"]])
    errors = []
    for position, logits in zip(golden[prefix + "logits_pos"], golden[prefix + "logits"], strict=True):
        found = oracle.logprobs(tokens[: position + 1])
        logits = logits.astype(np.float64)
        wanted = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert found.shape == wanted.shape and np.all(np.isfinite(found))
        errors.append(np.sqrt(((found - wanted) ** 2).mean() / wanted.var()))
    # A flipped router choice moves single positions further, so the middle one counts.
    assert np.median(errors) < 0.02


def test_text_and_tokens(oracle, golden):
    text = str(golden["IQ3_XXS.chat_no_think.text"])
    tokens = golden["IQ3_XXS.chat_no_think.tokens"]
    assert oracle.tokenize(text) == tokens.tolist()
    assert oracle.detokenize(tokens) == text
    assert len(oracle.tokenize("<|im_start|>")) == 1 < len(oracle.tokenize("<|im_start|>", special=False))
    assert oracle.greedy(text, 4).tokens == oracle.greedy(tokens, 4).tokens


def test_template_opens_the_answer(oracle):
    prompt = oracle.apply_template([{"role": "user", "content": "Hi"}])
    assert prompt.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_too_long_a_prompt_is_refused(oracle):
    with pytest.raises(StrataError, match="context"):
        oracle.greedy([1] * 3000, 1)
