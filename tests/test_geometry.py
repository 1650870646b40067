"""Models of other geometry, variants and optional keys; files that break the contract; float activations."""

from __future__ import annotations

import re

import numpy as np
import pytest

import strata
from tests.gguf_maker import Made, MadeTensor, Typed, array, string
from tests.model_probe import route
from tests.reference import qsa
from tests.reference.forward import ReferenceModel
from tests.tiny_models import BOOL, F32, I32, PREFIX, U32, U64, TinyModel, as_float32, ngram, small

TOKENS = np.where(np.arange(70) == 20, 256, np.random.default_rng(0).integers(0, 250, 70))
I64 = 11
KV_AND_FLOATS = 1e-4
QUANTISED_ACTIVATIONS = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def logits_of(path, **options):
    with strata.load(path, context=256, kv="f16", threads=2, **options) as model:
        logits = model.logits(TOKENS)
        answer = model.generate(TOKENS[:5], max_tokens=4, ignore_eos=True)
        assert len(answer.tokens) == 4
        return logits


def relative_rms(found, wanted) -> float:
    return float(np.sqrt(((found - wanted) ** 2).sum() / (wanted**2).sum()))


SHAPES = {
    "as it is": {},
    "1 stream": {"C": 1},
    "2 streams": {"C": 2},
    "3 streams, D 96": {"C": 3, "D": 96},
    "widths that no block divides": {"D": 72, "F": 20, "shared_width": 12, "hc_rank": 5},
    "64 experts": {"E": 64, "K": 6},
    "256 experts": {"E": 256, "K": 10},
    "every expert": {"E": 4, "K": 4},
    "one expert": {"E": 1, "K": 1},
    "one KV head, all dims rotated": {"H": 6, "Hkv": 1, "dh": 32, "rotary_dims": 32, "indexer_heads": 3,
                                      "indexer_dim": 48},
    "a KV head per head": {"H": 3, "Hkv": 3, "dh": 80, "rotary_dims": 20},
    "3 value heads per key head": {"gdn_key_heads": 1, "gdn_value_heads": 3, "gdn_key_dim": 24, "gdn_value_dim": 48,
                                   "gdn_conv_taps": 2},
    "long convolution": {"gdn_key_heads": 3, "gdn_value_heads": 3, "gdn_key_dim": 32, "gdn_value_dim": 64,
                         "gdn_conv_taps": 6},
    "blocks of 8": {"budget_cells": 32, "block_cells": 8},
    "one block of 2": {"budget_cells": 2, "block_cells": 2},
    "one block of 16": {"budget_cells": 16, "block_cells": 16},
    "blocks of 3": {"budget_cells": 9, "block_cells": 3},
    "blocks of 1": {"budget_cells": 9, "block_cells": 1},
    "no n-grams": {"ngram": None},
    "n-grams in layer 0": {"ngram": ngram(0, 3, 16, 2)},
    "n-grams before attention": {"ngram": ngram(3, 1, 64, 5)},
    "two layers": {"L": 2, "kinds": ("gdn", "qsa")},
    "attention only": {"L": 2, "kinds": ("qsa", "qsa"), "ngram": None},
    "another epsilon": {"rms_eps": 2.0**-10},
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_other_geometry(folder, name):
    """All weights F32, so activations are floats: what is left is float16 KV and float32 sums."""
    made = TinyModel(small(**SHAPES[name]))
    path = made.write(folder / "shape.gguf")
    with strata.load(path, context=256, kv="f16", threads=2) as model:
        assert model.geometry == made.geometry
        logits = model.logits(TOKENS)
    wanted = ReferenceModel(path).forward(TOKENS)
    assert relative_rms(logits, wanted.logits) <= KV_AND_FLOATS


def test_recurrent_layers_only(folder):
    """No attention at all: the answer depends on every token nevertheless."""
    g = small(L=2, kinds=("gdn", "gdn"), ngram=None, block_cells=0, budget_cells=0)
    path = TinyModel(g).write(folder / "gdn.gguf")
    logits = logits_of(path)
    with strata.load(path, context=256, threads=1) as model:
        assert model.geometry.qsa_layers == ()
        np.testing.assert_array_equal(model.logits(TOKENS, prefill="windows"), logits)
        assert not np.array_equal(model.logits(TOKENS[::-1][:5])[-1], model.logits(TOKENS[::-1][1:5])[-1])


TYPES = {
    "F16": ({}, {"*": "F16"}, KV_AND_FLOATS),
    "BF16": ({}, {"*": "BF16"}, KV_AND_FLOATS),
    "Q8_0": ({"hc_rank": 32}, {"*": "Q8_0"}, QUANTISED_ACTIVATIONS),
    "Q8_0 experts, floats elsewhere": ({}, {"*exps.weight": "Q8_0", "*_inp*": "BF16"}, QUANTISED_ACTIVATIONS),
    "a mix in every layer": (
        {"D": 256, "F": 64, "hc_rank": 32, "shared_width": 32},
        {"*": "BF16", "*attn_*": "Q8_0", "*_exps.weight": "Q5_1", "*gate_exps.weight": "Q5_0", "*_shexp.weight": "Q4_1",
         "blk.2.ffn_*_exps.weight": "Q8_0", "output.weight": "Q8_0", "token_embd.weight": "Q4_0",
         "per_layer_token_embd.weight": "Q8_0", "*_hc_*": "F16", "*inp_shexp*": "F16"},
        QUANTISED_ACTIVATIONS,
    ),
    "K and IQ types": (
        {"D": 256, "F": 64, "hc_rank": 32, "shared_width": 32},
        {"*": "BF16", "*attn_qkv*": "IQ4_XS", "*attn_gate*": "Q4_K", "*attn_q.*": "Q6_K", "*_gate_exps*": "IQ3_XXS",
         "*_up_exps*": "IQ3_XXS", "*_down_exps*": "IQ4_NL", "output.weight": "Q5_K", "token_embd.weight": "Q3_K",
         "per_layer*": "IQ4_NL"},
        QUANTISED_ACTIVATIONS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_weight_types(folder, name):
    """Every expert is routed and every block attended, so that quantised activations change no choice."""
    shape, types, tolerance = TYPES[name]
    made = TinyModel(small(E=2, K=2, budget_cells=512, **shape), types)
    path = made.write(folder / "types.gguf")
    logits = logits_of(path)
    error = relative_rms(logits, ReferenceModel(path).forward(TOKENS).logits)
    print(f"{name}: relative RMS {error:.5f}")
    assert error <= tolerance


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_merged_gate_and_up(folder, kind):
    """`ffn_gate_up_exps` is the same model as the two tensors."""
    types = {"*_exps.weight": kind}
    apart = logits_of(TinyModel(small(), types).write(folder / "apart.gguf"))
    merged = logits_of(TinyModel(small(), types, merged=True).write(folder / "merged.gguf"))
    np.testing.assert_array_equal(apart, merged)


def test_dense_attention(folder, caplog):
    """Ratios of 0 switch the indexer off, with a warning: the same as a budget that nothing exceeds."""
    wide = logits_of(TinyModel(small(budget_cells=512)).write(folder / "wide.gguf"))
    dense = logits_of(TinyModel(small(block_cells=0, budget_cells=0)).write(folder / "dense.gguf"))
    assert any("dense" in r.message for r in caplog.records)
    assert relative_rms(dense, wide) <= 1e-5
    ratios = {PREFIX + "attention.compress_ratios": array(I32, [0, 0, 0, 0])}
    with_indexer = TinyModel(small(), keys=ratios).write(folder / "unused.gguf")
    np.testing.assert_array_equal(logits_of(with_indexer), dense)


def extra(name, typed):
    return TinyModel(small(), keys={PREFIX + name: typed})


def with_shape(pattern, shape):
    def edit(made):
        for t in made.tensors:
            if re.fullmatch(pattern, t.name):
                t.shape = shape(t.shape)

    return TinyModel(small(), edit=edit)


def with_draft_block(made: Made) -> None:
    made.tensors += [MadeTensor("blk.4.attn_q.weight", (512, 64)), MadeTensor("blk.4.nextn.eh_proj.weight", (64, 128))]


SAME_MODEL = {
    "embedding_length_out": extra("embedding_length_out", Typed(U32, 256)),
    "recurrent_layers": extra("attention.recurrent_layers", array(BOOL, [True, True, True, False])),
    "no interval": extra("full_attention_interval", None),
    "indexer.block_size beside ratios": extra("attention.indexer.block_size", Typed(U32, 4)),
    "indexer.block_size alone": TinyModel(small(), keys={
        PREFIX + "attention.indexer.block_size": Typed(U32, 4), PREFIX + "attention.compress_ratios": None}),
    "nextn_predict_layers 0": extra("nextn_predict_layers", Typed(U32, 0)),
    "a draft block in the file": TinyModel(
        small(), edit=with_draft_block,
        keys={PREFIX + "nextn_predict_layers": Typed(U32, 1), PREFIX + "block_count": Typed(U32, 5),
              PREFIX + "attention.compress_ratios": array(I32, [0, 0, 0, 4, 0])}),
    "expert_weights_scale": extra("expert_weights_scale", Typed(F32, 1.0)),
    "lowrank": TinyModel(small(), keys={PREFIX + "hyper_connection.low_rank": None,
                                        PREFIX + "hyper_connection.lowrank": Typed(U32, 8)}),
    "unknown keys": TinyModel(small(), keys={PREFIX + "something.new": string("x"), "other.key": array(F32, [1.0])}),
    "no value_length": extra("attention.value_length", None),
    "no expert_count": extra("expert_count", None),
    "no expert width": extra("expert_feed_forward_length", None),
    "no row width": extra("embedding_length_per_layer_input", None),
    "no image token": extra("ple.image_token_id", None),
    "ratios u32": extra("attention.compress_ratios", array(U32, [0, 0, 0, 4])),
    "ratios i64": extra("attention.compress_ratios", array(I64, [0, 0, 0, 4])),
    "layers u64": extra("ple.layers", array(U64, [1])),
    "offsets i64": extra("ple.head_offsets", array(I64, ngram().offsets)),
    "moduli u32": extra("ple.head_vocab_sizes", array(U32, ngram().moduli)),
    "shared gate as a matrix": with_shape(r".*ffn_gate_inp_shexp.weight", lambda s: (1, *s)),
    "convolution with three axes": with_shape(r".*conv1d.weight", lambda s: (s[0], 1, s[1])),
    "a table with spare rows": TinyModel(small(), edit=lambda made: [
        t.__dict__.update(shape=(t.shape[0] + 7, t.shape[1]), data=t.data + bytes(7 * 4 * t.shape[1]))
        for t in made.tensors if t.name.startswith("per_layer")]),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(folder):
    return logits_of(TinyModel(small()).write(folder / "plain.gguf"))


@pytest.mark.parametrize("name", SAME_MODEL)
def test_optional_keys_and_forms(folder, plain, name):
    np.testing.assert_array_equal(logits_of(SAME_MODEL[name].write(folder / "same.gguf")), plain)


def test_a_router_scale_is_applied(folder, plain):
    """Doubling the routed experts' weights is doubling their down projections."""

    def doubled(made):
        for t in made.tensors:
            if t.name.endswith("ffn_down_exps.weight"):
                t.data = (2 * np.frombuffer(t.data, np.float32)).tobytes()

    scaled = logits_of(extra("expert_weights_scale", Typed(F32, 2.0)).write(folder / "scaled.gguf"))
    weights = logits_of(TinyModel(small(), edit=doubled).write(folder / "doubled.gguf"))
    assert relative_rms(scaled, weights) <= 1e-6
    assert relative_rms(scaled, plain) > 0.01


# ---- float activations on the bundled model


@pytest.fixture(scope="module")
def float_model(tiny_path, folder):
    path = as_float32(tiny_path, folder / "float32.gguf")
    with strata.load(path, context=512, kv="f16", threads=2) as model:
        yield model
    path.unlink()


@pytest.mark.parametrize("prompt", ["code", "chat_no_think", "code_long"])
def test_float_activations(float_model, reference, golden, prompt, monkeypatch):
    """The bundled weights dequantised to F32, so that products take float activations.

    The reference is given the product's float16 cells; everything else of it is float64. Routing is that of the golden
    data too, except where the rounding of cells alone changes the reference's own choice.
    """
    exact = qsa.project

    def half(*args):
        q, gate, k, v = exact(*args)
        return q, gate, k.astype(np.float16).astype(np.float64), v.astype(np.float16).astype(np.float64)

    name = f"IQ3_XXS.{prompt}."
    tokens = np.concatenate([golden[name + "tokens"], golden[name + "greedy"]])
    monkeypatch.setattr(qsa, "project", half)
    wanted = reference.forward(tokens)
    found, routes = float_model.logits(tokens), np.sort(route(float_model, tokens), -1)
    errors = np.sqrt(((found - wanted.logits) ** 2).mean(1) / (wanted.logits**2).mean(1))
    print(f"{prompt}: relative RMS median {np.median(errors):.2e}, largest {errors.max():.2e}")
    assert errors.max() <= KV_AND_FLOATS
    np.testing.assert_array_equal(routes, np.sort(wanted.router_ids, -1))
    flips = (routes != np.sort(golden[name + "router"], -1)).any(-1).sum()
    assert flips == {"code": 0, "chat_no_think": 0, "code_long": 2}[prompt]
    at, stored = golden[name + "logits_pos"], golden[name + "logits"]
    golden_errors = np.sqrt(((found[at] - stored) ** 2).mean(1) / (stored**2).mean(1))
    print(f"{prompt}: against the golden data, whose cells are not rounded: median {np.median(golden_errors):.2e}")
    assert np.median(golden_errors) <= KV_AND_FLOATS
    np.testing.assert_array_equal(found[at].argmax(1), stored.argmax(1))
