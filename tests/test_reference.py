"""The naive forward against golden data of an independent implementation, and its pieces against their definitions."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.geometry import NgramGeometry
from tests.reference.forward import ReferenceModel
from tests.reference.moe import route
from tests.reference.mtp import MtpReference
from tests.reference.ngram import table_rows
from tests.reference.qsa import rope, select_cells
from tests.reference.safetensors import read_safetensors

PROMPTS = ("code", "chat_no_think", "code_long")
# The golden arrays are rounded to float32: 3e-8 is what two exact implementations show.
TOLERANCE = 1e-6


def relative_rms(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Per row over the last axis."""
    wanted = np.asarray(wanted, np.float64)
    return np.sqrt(((found - wanted) ** 2).mean(-1) / (wanted**2).mean(-1))


def log_loss(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Nats of every token (T,) under logits (T, V)."""
    top = logits.max(axis=1)
    return top + np.log(np.exp(logits - top[:, None]).sum(axis=1)) - logits[np.arange(len(tokens)), tokens]


@pytest.fixture(scope="module", params=["IQ3_XXS", "Q8_0"])
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def model(request, variant) -> ReferenceModel:
    if variant == "IQ3_XXS":
        return request.getfixturevalue("reference")
    folder = request.getfixturevalue("test_models_dir")
    return ReferenceModel(folder / f"tiny-flash-next-{variant}-00001-of-00002.gguf")


@pytest.fixture(scope="module", params=PROMPTS)
def case(request, model, variant, golden):
    """Golden fields of one prompt, and the trace of prompt and greedy tokens."""
    prefix = f"{variant}.{request.param}."
    fields = {key.removeprefix(prefix): value for key, value in golden.items() if key.startswith(prefix)}
    fields["all"] = np.concatenate([fields["tokens"], fields["greedy"]])
    return fields, model.forward(fields["all"], stream_rows=[len(fields["tokens"]) - 1])


def test_logits(case):
    fields, trace = case
    error = relative_rms(trace.logits[fields["logits_pos"]], fields["logits"])
    assert error.max() <= TOLERANCE


def test_router_choices(case):
    fields, trace = case
    np.testing.assert_array_equal(trace.router_ids, fields["router"])
    assert np.all(np.diff(trace.router_weights, axis=2) <= 0)
    np.testing.assert_allclose(trace.router_weights.sum(axis=2), 1.0, rtol=1e-12)


def test_greedy_tokens_and_gaps(case):
    fields, trace = case
    P = len(fields["tokens"])
    logits = trace.logits[P - 1 : P - 1 + len(fields["greedy"])]
    np.testing.assert_array_equal(logits.argmax(axis=1), fields["greedy"])
    ordered = np.sort(logits, axis=1)
    np.testing.assert_allclose(ordered[:, -1] - ordered[:, -2], fields["greedy_gap"], atol=1e-5)


def test_streams_after_every_layer(case):
    fields, trace = case
    assert relative_rms(trace.layer_streams[:, 0], fields["streams_last_prompt_pos"]).max() <= TOLERANCE


def test_drafts(case, model, mtp_path):
    fields, trace = case
    P, n = len(fields["tokens"]), len(fields["all"]) - 1
    drafts, probabilities = MtpReference(mtp_path, model).drafts(trace.streams[:n], fields["all"][1:], P - 1, 3)
    np.testing.assert_array_equal(drafts, fields["draft"])
    np.testing.assert_allclose(probabilities, fields["draft_prob"], atol=TOLERANCE)


def check_perplexity(model: ReferenceModel, variant: str, kind: str, golden) -> None:
    window = int(golden["ppl.window"])
    tokens = golden[f"ppl.{kind}.tokens"].astype(np.int64).reshape(-1, window)
    nats = np.mean([log_loss(model.forward(row).logits[:-1], row[1:]) for row in tokens])
    np.testing.assert_allclose([np.exp(nats), nats], golden[f"ppl.{kind}.{variant}"], rtol=TOLERANCE)


def test_perplexity_of_held_out_code(reference, golden):
    check_perplexity(reference, "IQ3_XXS", "code", golden)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["code", "doc", "chat"])
def test_perplexity_of_every_slice(model, variant, kind, golden):
    check_perplexity(model, variant, kind, golden)


# -- state ------------------------------------------------------------------------------------------------------------

N_BEFORE, N_AFTER = 397, 24


@pytest.fixture(scope="module")
def continuation(reference, golden):
    """Tokens beyond the selection budget: the state before the last N_AFTER, these tokens, and their trace."""
    tokens = np.concatenate([golden["IQ3_XXS.code_long.tokens"], golden["IQ3_XXS.code_long.greedy"]])
    tokens = tokens[: N_BEFORE + N_AFTER]
    state = reference.forward(tokens[:N_BEFORE], rows=[]).state
    return state, tokens[N_BEFORE:], reference.forward(tokens, rows=np.arange(N_BEFORE, len(tokens)))


@settings(max_examples=8)
@given(cuts=st.sets(st.integers(1, N_AFTER - 1)))
def test_any_split_is_one_prefill(cuts, reference, continuation):
    state, tokens, whole = continuation
    bounds = [0, *sorted(cuts), N_AFTER]
    for begin, end in pairwise(bounds):
        part = reference.forward(tokens[begin:end], state)
        state = part.state
        assert relative_rms(part.logits, whole.logits[begin:end]).max() <= 1e-11
        rows = slice(N_BEFORE + begin, N_BEFORE + end)
        np.testing.assert_array_equal(part.router_ids, whole.router_ids[:, rows])
        for layer, cells in part.selections.items():
            for found, wanted in zip(cells, whole.selections[layer][rows], strict=True):
                np.testing.assert_array_equal(found, wanted)
    assert state.position == whole.state.position
    for found, wanted in zip(state.layers, whole.state.layers, strict=True):
        for name in vars(wanted):
            np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(state.ngram.history, whole.state.ngram.history, rtol=1e-9, atol=1e-9)
    assert state.ngram.tokens == whole.state.ngram.tokens


def test_a_state_can_be_continued_twice(reference, continuation):
    state, tokens, _ = continuation
    first = reference.forward(tokens[:3], state)
    reference.forward(tokens[::-1][:5], state)
    again = reference.forward(tokens[:3], state)
    np.testing.assert_array_equal(first.logits, again.logits)


def test_selection_prunes_and_keeps_the_tail(reference, continuation):
    _, _, whole = continuation
    g = reference.geometry
    for cells in whole.selections.values():
        for p, chosen in enumerate(cells):
            n = p + 1
            tail = n % g.block_cells
            assert len(chosen) == min(n - tail, g.budget_cells) + tail
            assert np.all(np.diff(chosen) > 0) and chosen[-1] <= p
            np.testing.assert_array_equal(chosen[len(chosen) - tail :], np.arange(n - tail, n))


def test_greedy_generation(reference, golden):
    tokens, gaps = reference.greedy(golden["IQ3_XXS.code.tokens"], 6)
    np.testing.assert_array_equal(tokens, golden["IQ3_XXS.code.greedy"][:6])
    np.testing.assert_allclose(gaps, golden["IQ3_XXS.code.greedy_gap"][:6], atol=1e-5)


def test_matmul_hook_sees_every_matrix(reference, tiny_path, golden):
    seen = set()

    def hook(name, x, expert):
        seen.add(name)
        return reference.product(name, x.astype(np.float16).astype(np.float64), expert)

    tokens = golden["IQ3_XXS.code.tokens"]
    rounded = ReferenceModel(tiny_path, matmul=hook).forward(tokens).logits
    exact = reference.forward(tokens).logits
    matrices = {name for name in reference.weights.file.tensors if reference.weights.n_rows(name) > 1}
    looked_up = {"token_embd.weight", "per_layer_token_embd.weight"}
    assert seen == {name for name in matrices - looked_up if "conv1d" not in name}
    error = relative_rms(rounded, exact)
    assert 1e-6 < np.median(error) < 1e-2


# -- pieces -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=90), st.integers(0, 3))
def test_select_cells_is_a_sort(scores, tail):
    class g:
        block_cells, budget_blocks = 4, 64

    n_cells = 4 * len(scores) + tail
    best = sorted(range(len(scores)), key=lambda b: (-scores[b], b))[:64]
    wanted = sorted(4 * b + i for b in best for i in range(4)) + list(range(4 * len(scores), n_cells))
    np.testing.assert_array_equal(select_cells(np.array(scores, float), n_cells, g), wanted)


def test_rope_is_a_complex_rotation():
    rng = np.random.default_rng(3)
    x, positions = rng.normal(size=(5, 2, 24)), np.array([0, 1, 7, 500, 100_000])
    turned = rope(x, positions, 16, 1e7)
    pairs = x[..., :8] + 1j * x[..., 8:16]
    pairs = pairs * np.exp(1j * positions[:, None, None] * 1e7 ** (-np.arange(8) / 8))
    np.testing.assert_allclose(turned, np.concatenate([pairs.real, pairs.imag, x[..., 16:]], -1), atol=1e-10)


def test_route_ties_go_to_the_lower_expert():
    ids, weights = route(np.array([[1.0, 2.0, 2.0, 1.0, 0.0]]), 3)
    np.testing.assert_array_equal(ids, [[1, 2, 0]])
    full = np.exp([1.0, 2.0, 2.0, 1.0, 0.0])
    np.testing.assert_allclose(weights, [full[[1, 2, 0]] / full[[1, 2, 0]].sum()])


NGRAM = NgramGeometry(
    layer=1, order=3, heads_per_order=2, row_width=4, conv_taps=4, reset_token=9, image_token=8,
    multipliers=(23703573157769, 20109073645365, 8052911324071),
    moduli=(101, 103, 107, 109), offsets=(0, 101, 204, 311),
)  # fmt: skip


@given(st.integers(0, 248319), st.integers(0, 248319), st.integers(0, 248319))
def test_table_rows_in_64_bit_integers(oldest, previous, own):
    c = np.array([own, previous, oldest], np.uint64)
    if previous == NGRAM.reset_token:
        c[2] = NGRAM.reset_token
    products = c * np.array(NGRAM.multipliers, np.uint64)
    bigram = products[0] ^ products[1]
    mixes = np.array([bigram, bigram, bigram ^ products[2], bigram ^ products[2]])
    wanted = mixes % np.array(NGRAM.moduli, np.uint64) + np.array(NGRAM.offsets, np.uint64)
    np.testing.assert_array_equal(table_rows((oldest, previous, own), NGRAM), wanted)


def test_reset_token_hides_what_came_before():
    assert table_rows((5, 9, 7), NGRAM) == table_rows((9, 9, 7), NGRAM)
    assert table_rows((5, 6, 9), NGRAM) != table_rows((9, 9, 9), NGRAM)


def test_safetensors_types(tmp_path):
    header = {
        "__metadata__": {"made": "by hand"},
        "a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [1, 1], "data_offsets": [4, 8]},
    }
    data = np.array([0x3FC0, 0xC000], "<u2").tobytes() + np.array([0.1], "<f4").tobytes()
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    tensors = read_safetensors(path)
    np.testing.assert_array_equal(tensors["a"], [1.5, -2.0])
    np.testing.assert_array_equal(tensors["b"], [[np.float64(np.float32(0.1))]])

    text = text.replace(b"F32", b"I32")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(ValueError, match="b is I32"):
        read_safetensors(path)
