"""Files that break the contract: refused at load, naming tensor or key, found and needed."""

from __future__ import annotations

import re

import pytest

import strata
from strata.base.errors import FileError, ModelError
from strata.cli.inspect import inspect_file
from tests.gguf_maker import MadeTensor, Typed, array, string
from tests.tiny_models import BOOL, F32, I32, PREFIX, U32, U64, TinyModel, small


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def without(name):
    return TinyModel(small(), edit=lambda made: made.tensors.remove(next(t for t in made.tensors if t.name == name)))


def reshaped(name, shape):
    def edit(made):
        made.tensors = [MadeTensor(t.name, shape) if t.name == name else t for t in made.tensors]

    return TinyModel(small(), edit=edit)


def retyped(name, ggml_type, shape=None):
    def edit(made):
        made.tensors = [MadeTensor(t.name, shape or t.shape, ggml_type) if t.name == name else t for t in made.tensors]

    return TinyModel(small(), edit=edit)


REQUIRED = [
    "token_embd.weight", "output.weight", "output_hc_norm.weight", "output_hc_down.weight", "output_hc_up.weight",
    "per_layer_token_embd.weight", "blk.0.hc_attn_norm.weight", "blk.2.hc_ffn_inject.weight", "blk.1.attn_gate.weight",
    "blk.0.ssm_a", "blk.0.ssm_dt.bias", "blk.1.ssm_conv1d.weight", "blk.2.ssm_out.weight", "blk.3.attn_k.weight",
    "blk.3.attn_output.weight", "blk.3.attn_q_norm.weight", "blk.3.indexer.k_proj.weight",
    "blk.3.indexer.q_norm.weight",
    "blk.3.ffn_gate_inp.weight", "blk.0.ffn_gate_inp_shexp.weight", "blk.2.ffn_gate_exps.weight",
    "blk.2.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight", "blk.1.ffn_down_shexp.weight", "blk.1.ple_key.weight",
    "blk.1.ple_norm_conv.weight", "blk.1.ple_conv1d.weight",
]  # fmt: skip


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_tensor_is_named(folder, name):
    with pytest.raises(ModelError, match=re.escape(name)) as caught:
        strata.load(without(name).write(folder / "broken.gguf"), context=256)
    error = caught.value
    assert "broken.gguf" in error.message and error.found and error.needed and error.advice


RESHAPED = {
    "output.weight": (299, 64), "output_hc_norm.weight": (255,), "blk.0.hc_attn_up.weight": (256, 9),
    "blk.2.hc_ffn_down.weight": (9, 256), "blk.0.attn_qkv.weight": (193, 64), "blk.0.ssm_alpha.weight": (5, 64),
    "blk.0.ssm_a": (5,), "blk.1.ssm_conv1d.weight": (192, 5), "blk.0.ssm_norm.weight": (16,),
    "blk.3.attn_q.weight": (256, 64), "blk.3.attn_k_norm.weight": (32,), "blk.3.indexer.q_proj.weight": (32, 64),
    "blk.1.ffn_gate_exps.weight": (8, 33, 64), "blk.1.ffn_up_exps.weight": (8, 32, 65),
    "blk.1.ffn_down_exps.weight": (8, 64, 33), "blk.2.ffn_gate_shexp.weight": (63, 64),
    "blk.1.ple_value.weight": (64, 127), "blk.1.ple_conv1d.weight": (256, 3), "blk.0.ffn_gate_inp_shexp.weight": (63,),
}  # fmt: skip


@pytest.mark.parametrize("name", RESHAPED)
def test_another_shape_is_refused_with_both(folder, name):
    with pytest.raises(ModelError, match=re.escape(name)) as caught:
        strata.load(reshaped(name, RESHAPED[name]).write(folder / "broken.gguf"), context=256)
    assert str(RESHAPED[name]) in str(caught.value.found)
    assert str(tuple(next(t.shape for t in TinyModel(small()).tensors() if t.name == name))) in str(caught.value.needed)


Q8_0, I8 = 8, 24
RETYPED = {
    "blk.0.ssm_norm.weight": (Q8_0, None), "blk.0.ffn_gate_inp_shexp.weight": (Q8_0, None),
    "output_hc_norm.weight": (Q8_0, None), "blk.3.indexer.q_norm.weight": (Q8_0, None),
    "blk.1.attn_gate.weight": (I8, None), "blk.1.ffn_up_exps.weight": (I8, None), "token_embd.weight": (I8, None),
    "per_layer_token_embd.weight": (I8, None),
}  # fmt: skip


@pytest.mark.parametrize("name", RETYPED)
def test_a_type_without_this_use_is_refused(folder, name):
    kind, shape = RETYPED[name]
    with pytest.raises(ModelError, match=re.escape(name)) as caught:
        strata.load(retyped(name, kind, shape).write(folder / "broken.gguf"), context=256)
    assert caught.value.found == {Q8_0: "Q8_0", I8: "I8"}[kind]
    assert caught.value.needed and caught.value.advice and "broken.gguf" in caught.value.message


def key(name, typed):
    return TinyModel(small(), keys={PREFIX + name: typed})


def sixteen_in_layer_2(made):
    for i, t in enumerate(made.tensors):
        if t.name.startswith("blk.2.ffn_") and (t.name.endswith("_exps.weight") or t.name.endswith("gate_inp.weight")):
            made.tensors[i] = MadeTensor(t.name, (16, *t.shape[1:]))


WRONG = {
    "architecture": (TinyModel(small(), keys={"general.architecture": string("llama")}), "architecture", "llama",
                     "qwen4exp"),
    "layers disagree on E": (TinyModel(small(), edit=sixteen_in_layer_2), "layers disagree", "16", "one number"),
    "expert_count": (key("expert_count", Typed(U32, 512)), "expert_count", "512", "8"),
    "expert width": (key("expert_feed_forward_length", Typed(U32, 33)), "expert_feed_forward_length", "33", "32"),
    "K > E": (key("expert_used_count", Typed(U32, 9)), "experts per token", "9", "8"),
    "D": (key("embedding_length", Typed(U32, 65)), "embedding_length", "64", "65"),
    "rank": (key("hyper_connection.low_rank", Typed(U32, 9)), "rank", "8", "9"),
    "streams": (key("hyper_connection.count", Typed(U32, 3)), "hc_attn_down", "256", "192"),
    "too many layers": (key("block_count", Typed(U32, 5)), "layer 4", "neither", ""),
    "no layers": (key("block_count", Typed(U32, 0)), "block_count", "0", ">= 1"),
    "missing key": (key("attention.head_count", None), "attention.head_count", "", "integer"),
    "key of another type": (key("attention.head_count", string("4")), "attention.head_count", "'4'", "integer"),
    "negative": (key("ssm.state_size", Typed(I32, -16)), "ssm.state_size", "-16", ">= 1"),
    "epsilon 0": (key("attention.layer_norm_rms_epsilon", Typed(F32, 0.0)), "epsilon", "0.0", "positive"),
    "epsilon NaN": (key("attention.layer_norm_rms_epsilon", Typed(F32, float("nan"))), "epsilon", "nan", "positive"),
    "heads": (key("attention.head_count_kv", Typed(U32, 3)), "KV heads", "4 and 3", "whole"),
    "value_length": (key("attention.value_length", Typed(U32, 32)), "value_length", "32", "64"),
    "odd rotation": (key("rope.dimension_count", Typed(U32, 15)), "rope.dimension_count", "15", "even"),
    "wide rotation": (key("rope.dimension_count", Typed(U32, 66)), "", "66", ""),
    "rotation wider than the indexer": (key("rope.dimension_count", Typed(U32, 48)), "indexer", "48", ""),
    "budget": (key("attention.indexer.top_k", Typed(U32, 18)), "indexer", "18", "multiple"),
    "no indexer heads": (key("attention.indexer.head_count", Typed(U32, 0)), "indexer", "64", "(0, 64)"),
    "ratios short": (key("attention.compress_ratios", array(I32, [0, 0])), "compress_ratios", "2", "4"),
    "ratios of strings": (key("attention.compress_ratios", array(8, ["a"])), "compress_ratios", "", "integers"),
    "interval": (key("full_attention_interval", Typed(U32, 2)), "full_attention_interval", "gdn", "qsa"),
    "recurrent_layers": (key("attention.recurrent_layers", array(BOOL, [True] * 4)), "recurrent_layers", "qsa", "gdn"),
    "GDN heads": (key("ssm.time_step_rank", Typed(U32, 5)), "GDN", "5", ""),
    "GDN width": (key("ssm.inner_size", Typed(U32, 130)), "GDN", "130", ""),
    "n-gram heads outside": (key("ple.head_offsets", array(U64, [0, 97, 195, 9000])), "n-gram", "394", "9100"),
    "n-gram moduli short": (key("ple.head_vocab_sizes", array(U64, [97])), "head_vocab_sizes", "1", "4"),
    "n-gram layer": (key("ple.layers", array(I32, [4])), "", "4", ""),
    "two n-gram layers": (key("ple.layers", array(I32, [0, 1])), "ple.layers", "2", "one"),
    "n-gram row width": (key("embedding_length_per_layer_input", Typed(U32, 64)), "row width", "32", "64"),
    "reset token": (key("ple.eos_token_id", None), "ple.eos_token_id", "", "integer"),
    "no architecture": (TinyModel(small(), keys={"general.architecture": None}), "architecture", "no such key",
                        "qwen4exp"),
    "layers without end": (key("block_count", Typed(U32, 2**32 - 1)), "layer 4", "neither", ""),
    "an array of heads": (key("attention.head_count", array(I32, [4] * 999)), "head_count", "int32 (999,)", "integer"),
    "no epsilon": (key("attention.layer_norm_rms_epsilon", None), "epsilon is missing", "no such key", "positive"),
    "ratios of floats": (key("attention.compress_ratios", array(F32, [0.5] * 4)), "compress_ratios", "f32", "integers"),
    "recurrent_layers of one": (key("attention.recurrent_layers", Typed(U32, 1)), "recurrent_layers", "1", "integers"),
    "odd value heads": (TinyModel(small(gdn_value_dim=20)), "ssm.inner_size", "20", "multiple of 16"),
    "odd attention heads": (TinyModel(small(dh=36)), "attention.key_length", "36", "multiple of 16"),
    "odd indexer heads": (TinyModel(small(indexer_dim=30)), "indexer.key_length", "30", "multiple of 16"),
    "n-gram table too small": (reshaped("per_layer_token_embd.weight", (100, 32)), "fewer rows", "100", "394"),
    "n-gram multipliers": (key("ple.layer_multipliers", array(U64, [0, 1, 2])), "multipliers", "(0, 1, 2)", "above 0"),
    "token types short": (TinyModel(small(), keys={"tokenizer.ggml.token_type": array(I32, [1] * 299)}), "token_type",
                          "299", "300"),
    "tokens of numbers": (TinyModel(small(), keys={"tokenizer.ggml.tokens": array(I32, [1] * 300)}), "ggml.tokens",
                          "array of i32", "strings"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_numbers_that_do_not_fit(folder, name):
    made, what, found, needed = WRONG[name]
    with pytest.raises(ModelError) as caught:
        strata.load(made.write(folder / "broken.gguf"), context=256)
    error = caught.value
    assert what in error.message and "broken.gguf" in error.message
    assert found in str(error.found) and needed in str(error.needed)
    assert error.advice


def changed(at=0, **values):
    """A model with other values in its header, or in tensor number `at`."""

    def edit(made):
        for name, value in values.items():
            setattr(made if hasattr(made, name) else made.tensors[at], name, value)

    return TinyModel(small(), edit=edit)


DAMAGED = {
    "magic": (changed(magic=b"GGML"), "not a GGUF file", "GGML", "GGUF"),
    "version": (changed(version=4), "GGUF version", "4", "2 or 3"),
    "keys": (changed(n_keys=2**60), f"list of {2**60} keys", "a file of", "bytes"),
    "tensors": (changed(n_tensors=2**60), f"list of {2**60} tensors", "a file of", "bytes"),
    "twice": (changed(1, name="token_embd.weight"), "token_embd.weight' appears twice", "tensor 1", "once"),
    "unknown type": (changed(ggml_type=99), "token_embd.weight", "99", "Q8_0 (8)"),
    "overlap": (changed(1, offset=64), "'token_embd.weight' and 'output.weight' overlap", "offset", "at least"),
    "misaligned": (changed(1, offset=7), "'output.weight' is misaligned", "7", "32"),
    "place": (changed(1, offset=2**64 - 32), "offset of tensor 'output.weight'", str(2**64 - 32), "2^63"),
    "dimensions": (changed(ne=[2**60, 2**60]), "token_embd.weight", str(2**60), "2^63"),
    "alignment": (TinyModel(small(), keys={"general.alignment": Typed(U32, 3)}), "general.alignment", "3", "power"),
    "text": (TinyModel(small(), keys={"general.architecture": string(b"\xff")}), "architecture", "xff", "UTF-8"),
    "key": (TinyModel(small(), keys={"general.architecture": Typed(U32, 3)}), "architecture", "u32", "string"),
    "rank": (reshaped("token_embd.weight", (300 * 64,)), "token_embd.weight", "(19200,)", "2 dimensions"),
    "no tensor": (without("blk.0.hc_attn_down.weight"), "blk.0.hc_attn_down.weight", "no such", "2 dimensions"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_told_alike_by_load_plan_and_inspect(folder, name):
    made, what, found, needed = DAMAGED[name]
    path, texts = made.write(folder / "broken.gguf"), set()
    for use in (lambda: strata.load(path), lambda: strata.plan(path), lambda: inspect_file(path)):
        with pytest.raises((FileError, ModelError)) as caught:
            use()
        error = caught.value
        texts.add(str(error))
        assert what in error.message and "broken.gguf" in error.message and error.advice
        assert found in str(error.found) and needed in str(error.needed)
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("name", "typed", "found"),
    [
        ("ple.head_vocab_sizes", array(8, ["97"] * 4), "array of string"),
        ("ple.head_offsets", Typed(U32, 0), "u32"),
        ("embedding_length_per_layer_input", string("32"), "string"),
    ],
)
def test_a_plan_without_the_table_s_shard_names_a_key_of_another_type(folder, name, typed, found):
    keys = {PREFIX + name: typed, "split.count": Typed(U32, 2), "split.tensors.count": Typed(I32, 113)}
    path = folder / "cut-00001-of-00002.gguf"
    made = TinyModel(small(), keys=keys, edit=without("per_layer_token_embd.weight").edit).write(path)
    with pytest.raises(ModelError, match=rf"{path.name}.*{name}' has another type; found {found}; needed an"):
        strata.plan(made)


def test_int8_needs_whole_groups(folder):
    path = TinyModel(small(dh=32)).write(folder / "heads.gguf")
    with pytest.raises(strata.BadArgument) as caught:
        strata.load(path, context=256, kv="int8")
    assert "32" in caught.value.found
    with strata.load(path, context=256) as model:
        assert model.kv == "f16"
