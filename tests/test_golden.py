"""The product against golden data of an independent implementation, with its quantised activations.

llvm-built engines that quantise activations sit at 0.7-0.8 % of the reference on this model; single positions go higher
where a router choice flips. Greedy text may leave the reference path only at a near tie.
"""

from __future__ import annotations

import numpy as np
import pytest

import strata
from tests.model_probe import route

PROMPTS = ("code", "chat_no_think", "code_long")
VARIANTS = ("IQ3_XXS", "Q8_0")
NEAR_TIE, CLEAR_GAP = 0.25, 0.5
MEDIAN_ERROR = 0.015
FLIP_ERROR = 0.02
"""Above this a position must have a router choice that differs from the reference."""


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tiny_path):
    """(name, model) with float16 KV, as the reference has no KV quantisation."""
    path = tiny_path
    if request.param == "Q8_0":
        folder = request.getfixturevalue("test_models_dir")
        path = folder / "tiny-flash-next-Q8_0-00001-of-00002.gguf"
    with strata.load(path, context=4096, kv="f16") as model:
        yield request.param, model


@pytest.fixture(scope="module")
def read(variant, golden):
    """prompt -> (all tokens, logits of every row, router ids (L, T, K)) of prompt + stored greedy tokens."""
    name, model = variant
    out = {}
    for prompt in PROMPTS:
        key = f"{name}.{prompt}."
        tokens = np.concatenate([golden[key + "tokens"], golden[key + "greedy"]])
        out[prompt] = (tokens, model.logits(tokens), route(model, tokens))
    return out


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_are_close(variant, read, golden, prompt):
    name, _ = variant
    key = f"{name}.{prompt}."
    positions, wanted = golden[key + "logits_pos"], golden[key + "logits"].astype(np.float64)
    _, logits, routes = read[prompt]
    assert np.isfinite(logits).all()
    error = np.sqrt(((logits[positions] - wanted) ** 2).mean(1) / (wanted**2).mean(1))
    print(f"{key} relative RMS: median {np.median(error):.4f}, largest {error.max():.4f}")
    assert np.median(error) <= MEDIAN_ERROR
    same = np.array([np.array_equal(np.sort(routes[l, p]), np.sort(golden[key + "router"][l, p]))
                     for p in positions for l in range(len(routes))]).reshape(len(positions), -1)  # fmt: skip
    # A flip at an earlier position reaches this one through attention and recurrence, so look at all rows up to it.
    for p, e in zip(positions, error, strict=True):
        flips = (np.sort(routes[:, : p + 1], -1) != np.sort(golden[key + "router"][:, : p + 1], -1)).any(-1).sum()
        assert e <= FLIP_ERROR or flips > 0, f"position {p}: error {e:.4f} without a flipped router choice"
    print(f"{key} router choices equal at the stored positions: {same.mean():.3f}")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_teacher_forced_argmax(variant, read, golden, prompt):
    name, _ = variant
    key = f"{name}.{prompt}."
    _, logits, _ = read[prompt]
    first = len(golden[key + "tokens"]) - 1
    best = logits[first : first + 64].argmax(1)
    clear = golden[key + "greedy_gap"] > CLEAR_GAP
    assert clear.sum() >= 20
    np.testing.assert_array_equal(best[clear], golden[key + "greedy"][clear])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_until_first_near_tie(variant, golden, prompt):
    name, model = variant
    key = f"{name}.{prompt}."
    result = model.generate(golden[key + "tokens"], max_tokens=64, ignore_eos=True)
    ties = np.flatnonzero(golden[key + "greedy_gap"] < NEAR_TIE)
    sure = int(ties[0]) if ties.size else 64
    if prompt == "code_long":
        sure = 64
    assert list(result.tokens[:sure]) == golden[key + "greedy"][:sure].tolist()
    if sure == 64:
        assert result.text == str(golden[key + "greedy_text"])


@pytest.mark.parametrize("kind", ["code", "doc", "chat"])
def test_perplexity(variant, golden, kind):
    name, model = variant
    tokens, window = golden[f"ppl.{kind}.tokens"].astype(np.int32), int(golden["ppl.window"])
    if name == "Q8_0" and kind != "code":
        tokens = tokens[: 2 * window]  # the whole slice of one kind; the others are compared over their first windows
    scores = [model.score(tokens[i : i + window]) for i in range(0, len(tokens), window)]
    nats = sum(s.nats * s.tokens for s in scores) / sum(s.tokens for s in scores)
    wanted = golden[f"ppl.{kind}.{name}"]
    print(f"{name} {kind}: perplexity {np.exp(nats):.4f}, reference {wanted[0]:.4f}")
    if len(tokens) == 4096:
        assert np.exp(nats) == pytest.approx(wanted[0], rel=0.005)
