"""Damaged weights: the error names op and layer, nothing is committed, the session answers good prompts as before."""

from __future__ import annotations

import re

import numpy as np
import pytest

import strata
from strata.base.errors import ModelError, NotFinite
from strata.pack.formats import by_name
from strata.pack.gguf_file import GgufFile
from strata.pack.ngram import NgramTable
from tests.block_data import F16_FIELDS
from tests.tiny_models import TinyModel, copy_shards, poke, small

BAD_TOKEN = 5
GOOD = np.random.default_rng(0).integers(10, 200, 300).astype(np.int32)
GREEDY = {"max_tokens": 6, "ignore_eos": True}
NAN = {"F32": b"\0\0\xc0\x7f", "BF16": b"\xc0\x7f"}
INF = {"F32": b"\0\0\x80\x7f", "BF16": b"\x80\x7f"}


def bad_bytes(kind: str, values: dict[str, bytes] = NAN) -> tuple[int, bytes]:
    """Where in a block, and which bytes, make a value NaN (or infinite): the scale of a quantised block."""
    if kind in values:
        return 0, values[kind]
    return F16_FIELDS.get(kind, (0,))[0], b"\0\x7e" if values is NAN else b"\0\x7c"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def maker():
    floats = dict.fromkeys(("*hc_*", "*_inp*", "*ssm_*", "*attn_gate*", "blk.3.attn_q.*", "*indexer*"), "BF16")
    return TinyModel(small(hc_rank=32), {"*": "Q8_0", **floats, "*ple_value*": "F32"})


def damaged(maker, path, tensor, values=NAN, row=0):
    """Write the model with one bad value in a row of `tensor`; in every expert of an expert tensor."""
    maker.write(path)
    with GgufFile(path) as gguf:
        info = gguf.info(tensor)
    at, data = bad_bytes(info.format.name, values)
    experts = info.shape[0] if len(info.shape) == 3 else 1
    for e in range(experts):
        poke(path, tensor, e * (info.n_bytes // experts) + row * info.row_bytes + at, data)
    return path


HEAD = ("output.weight", "output_hc_down.weight", "output_hc_up.weight")
MATRICES = [
    *(f"blk.0.{n}.weight" for n in ("hc_attn_down", "hc_attn_up", "hc_attn_inject", "hc_ffn_down", "hc_ffn_inject",
                                     "attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_out")),
    *(f"blk.1.{n}.weight" for n in ("ple_key", "ple_value")),
    *(f"blk.2.ffn_{n}.weight" for n in ("gate_inp", "gate_inp_shexp", "gate_exps", "up_exps", "down_exps", "gate_shexp",
                                         "up_shexp", "down_shexp")),
    *(f"blk.3.{n}.weight" for n in ("attn_q", "attn_k", "attn_v", "attn_output", "indexer.q_proj", "indexer.k_proj",
                                     "hc_ffn_up", "ffn_down_exps")),
]  # fmt: skip


GATE_ROW = 64
"""Of attn_q: the first row of head 0's gate, behind its 64 rows of the query."""


@pytest.mark.parametrize(("tensor", "row"), [(name, 0) for name in MATRICES] + [("blk.3.attn_q.weight", GATE_ROW)])
@pytest.mark.parametrize("kind", ["NaN", "infinite"])
def test_a_bad_value_in_a_matrix(folder, maker, tensor, row, kind):
    """Also an infinity that a sigmoid would hide."""
    path = damaged(maker, folder / "bad.gguf", tensor, NAN if kind == "NaN" else INF, row)
    layer = tensor.split(".")[1]
    with strata.load(path, context=512, threads=2) as model:
        session = model._default._state
        for tokens in (GOOD[:5], GOOD):  # a window, and a whole cell
            empty = session.state.digest()
            with pytest.raises(NotFinite, match=rf"position 0 .* op \w+, layer {layer}\b") as caught:
                model.generate(tokens, **GREEDY)
            assert caught.value.advice
            assert session.rows == 0
            assert session.state.digest() == empty
        with pytest.raises(NotFinite):
            model.logits(GOOD[:3])


@pytest.mark.parametrize("tensor", HEAD)
def test_a_bad_value_in_the_head(folder, maker, tensor):
    """No answer comes out, whatever is asked of the logits; the prompt itself was read."""
    path = damaged(maker, folder / "bad.gguf", tensor)
    with strata.load(path, context=512, threads=2) as model:
        for options in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"logprobs": True},
                        {"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}):  # fmt: skip
            with pytest.raises(NotFinite, match=r"position 8 stopped.* op \w+.*outside the layers"):
                model.generate(GOOD[:9], **GREEDY, **options)
            assert model._default._state.rows == 8
        with pytest.raises(NotFinite):
            model.logits(GOOD[:9])
        with pytest.raises(NotFinite):
            model.perplexity(GOOD)


VECTORS = [
    "output_hc_norm.weight", "blk.0.hc_attn_norm.weight", "blk.2.hc_ffn_norm.weight", "blk.0.ssm_a",
    "blk.0.ssm_dt.bias",
    "blk.1.ssm_conv1d.weight", "blk.2.ssm_norm.weight", "blk.1.ple_norm_key.weight", "blk.1.ple_conv1d.weight",
    "blk.3.attn_q_norm.weight", "blk.3.indexer.k_norm.weight",
]  # fmt: skip


@pytest.mark.parametrize("tensor", VECTORS)
def test_a_bad_value_in_a_vector_is_found_at_load(folder, maker, tensor):
    path = damaged(maker, folder / "bad.gguf", tensor, INF)
    with pytest.raises(ModelError, match=re.escape(tensor)) as caught:
        strata.load(path, context=512, threads=2)
    assert caught.value.found == "index 0"


@pytest.fixture(scope="module")
def bad_token(folder, maker):
    """A model whose embedding of BAD_TOKEN alone is damaged, and the good model's answers."""
    good = maker.write(folder / "good.gguf")
    answers = {}

    def answer(prompt):
        with strata.load(good, context=512, threads=2) as model:
            return answers.setdefault(tuple(prompt), model.generate(prompt, **GREEDY).tokens)

    path = damaged(maker, folder / "token.gguf", "token_embd.weight", row=BAD_TOKEN)
    with strata.load(path, context=512, threads=2) as model:
        yield model, answer


@pytest.mark.parametrize("at", [0, 3, 100, 255, 258, 298, 299])
def test_a_bad_token_anywhere_in_a_prompt(bad_token, at):
    """In a cell, in a window, as the last token: the session keeps what was read before that piece and goes on."""
    model, answer = bad_token
    model._default.clear()
    assert model.generate(GOOD[:40], **GREEDY).tokens == answer(GOOD[:40])
    model._default.clear()
    prompt = GOOD.copy()
    prompt[at] = BAD_TOKEN
    with pytest.raises(NotFinite, match=r"op embed, outside the layers"):
        model.generate(prompt, **GREEDY)
    held = model._default.tokens
    assert len(held) == (0 if at < 256 else 256 + (at - 256) // 8 * 8 if at < 299 else 299)
    np.testing.assert_array_equal(held, GOOD[: len(held)])
    good = model.generate(GOOD, **GREEDY)
    assert good.usage.reused_tokens == min(len(held), 299)
    assert good.tokens == answer(GOOD)


def test_a_bad_token_that_the_model_chose_itself(bad_token):
    """It comes out, the window that would read it fails, the session holds all before it."""
    model, answer = bad_token
    model._default.clear()
    stream = model.stream(GOOD[:20], max_tokens=9, logit_bias={BAD_TOKEN: 100.0})
    assert next(stream).token == BAD_TOKEN
    with pytest.raises(NotFinite, match="op embed"):
        next(stream)
    assert list(stream) == []
    np.testing.assert_array_equal(model._default.tokens, GOOD[:20])
    longer = np.concatenate([GOOD[:20], GOOD[50:60]])
    again = model.generate(longer, **GREEDY)
    assert again.usage.reused_tokens == 20
    assert again.tokens == answer(longer)


def test_a_checkpoint_survives_a_bad_window(bad_token):
    model, answer = bad_token
    session = model._default
    session.clear()
    session.generate(GOOD[:30], **GREEDY)
    point, held = session.checkpoint(), session.tokens
    with pytest.raises(NotFinite):
        session.generate([*held, BAD_TOKEN, 7], **GREEDY)
    session.restore(point)
    longer = np.concatenate([held, GOOD[:7]])
    assert session.generate(longer, **GREEDY).tokens == answer(longer)


def test_another_session_goes_on(folder, maker):
    with strata.load(folder / "token.gguf", context=512, sessions=2, threads=2) as model:
        with model.session() as one, model.session() as two:
            stream = one.stream(GOOD[:30], **GREEDY)
            first = next(stream)
            with pytest.raises(NotFinite):
                two.generate([BAD_TOKEN], **GREEDY)
            tokens = [first.token, *(c.token for c in stream if c.token is not None)]
        model._default.clear()
        assert tuple(tokens) == model.generate(GOOD[:30], **GREEDY).tokens


def test_a_bad_row_of_the_ngram_table(folder, maker):
    """Only prompts whose n-grams hash to the row are refused."""
    path = maker.write(folder / "good.gguf")
    with GgufFile(path) as gguf:
        table = NgramTable(gguf, maker.geometry.ngram)
        used = table.row_ids(GOOD[:40], -1, -1)
        row = next(int(r) for r in used[30] if not np.isin(used[:30], r).any())
    path = damaged(maker, folder / "bad.gguf", "per_layer_token_embd.weight", row=row)
    with strata.load(path, context=512, threads=2) as model:
        before = model.generate(GOOD[:28], **GREEDY | {"max_tokens": 1})
        with pytest.raises(NotFinite, match=r"op \w+, layer 1\b"):
            model.generate(GOOD[:40], **GREEDY)
        assert model._default._state.rows == 28  # the window that begins at 28 failed
        model._default.clear()
        assert model.generate(GOOD[:28], **GREEDY | {"max_tokens": 1}).tokens == before.tokens


def test_expert_outputs_that_overflow(folder):
    """Finite weights whose products leave the range of the exact sum are refused too."""

    def huge(made):
        for t in made.tensors:
            if t.name == "blk.2.ffn_down_exps.weight":
                t.data = np.full(t.shape, 1e9, np.float32).tobytes()

    path = TinyModel(small(), edit=huge).write(folder / "huge.gguf")
    with strata.load(path, context=512, threads=2) as model, pytest.raises(NotFinite, match=r"op experts, layer 2\b"):
        model.generate(GOOD[:5], **GREEDY)


@pytest.mark.parametrize("tensor", ["blk.0.ffn_gate_exps.weight", "blk.7.attn_output.weight", "output.weight"])
def test_the_bundled_model_damaged(tiny_path, folder, tensor):
    """IQ3_S experts, a Q5_K matrix, the Q5_K head; loaded from either shard."""
    first = copy_shards(tiny_path, folder)
    with GgufFile(first) as gguf:
        info = gguf.info(tensor)
    assert by_name(info.format.name).activation != "float"
    at, data = bad_bytes(info.format.name)
    blocks = info.shape[0] if len(info.shape) == 3 else 1
    for e in range(blocks):
        poke(first, tensor, e * (info.n_bytes // blocks) + at, data)
    where = "op linear of the head" if tensor == "output.weight" else rf"op \w+, layer {tensor.split('.')[1]}\b"
    with strata.load(first, context=512, threads=2) as model:
        for prompt in ("def f(x):", "# " * 300):
            with pytest.raises(NotFinite, match=where):
                model.generate(prompt[:900], max_tokens=4)
