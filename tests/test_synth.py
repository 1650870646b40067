"""Synthetic models: weights of mean 0, real widths, readable by this library and by llama.cpp, routing as asked for."""

from __future__ import annotations

import dataclasses
import errno

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import strata
from strata import synth
from strata.arch import architecture_of
from strata.base.errors import BadArgument, DoesNotFit, FileError, ModelError
from strata.cli import app
from strata.pack.formats import FORMATS, by_name
from strata.pack.gguf_file import GgufFile
from strata.pack.gguf_write import NewTensor, file_layout
from strata.pack.random_blocks import random_rows
from strata.replay import routing, routing_facts, skewed_ids, uniform_ids
from strata.synth import PIECE_BYTES, SynthSpec, geometry_of, memory_model, model_bytes, tensors_of, write_model

PRODUCTS = [f.name for f in FORMATS.values() if f.activation != "none"]
SMALL = SynthSpec(layers=2, experts=20, vocabulary=1024, ngram_rows=50)


@pytest.fixture(scope="module")
def small():
    with memory_model(SMALL) as path:
        yield path


@pytest.fixture(scope="module")
def model(small):
    with strata.load(small, context=256, threads=1) as loaded:
        yield loaded


# ---- weights


@pytest.mark.parametrize("name", PRODUCTS)
def test_random_weights_have_mean_zero_and_the_spread_asked_for(name):
    format = by_name(name)
    values = format.dequantise(random_rows(format, 256, 2560, 0.02, np.random.default_rng(5)))
    assert values.shape == (256, 2560)
    coarse = {"MXFP4": 0.42, "NVFP4": 0.2}.get(name, 0.02)  # powers of two; three fraction bits near the smallest
    assert abs(values.std() / 0.02 - 1) < coarse
    # A mean would add up with K (to 5 and more here), not with its root. Codes like -4 .. 3 are off centre by half a
    # step with their scale's sign, which adds at most a third to the sum of independent values.
    sums = values.astype(np.float64).sum(1) / (values.std() * 2560**0.5)
    assert 0.8 < sums.std() < 1.5
    assert abs(sums.mean()) < 5 * 1.34 / 256**0.5


def test_spread_out_of_range():
    with pytest.raises(BadArgument, match="spread"):
        random_rows(by_name("Q4_K"), 1, 256, 0.0, np.random.default_rng(0))


def test_experts_that_repeat():
    """With one distinct piece all pieces of a tensor of experts are its first one, and nothing else changes."""
    once = dataclasses.replace(SMALL, distinct_pieces=1)
    with memory_model(SMALL, threads=1) as a, memory_model(once) as b, GgufFile(a) as drawn, GgufFile(b) as repeated:
        for name, tensor in drawn.tensors.items():
            rows, wanted = repeated.raw(name).reshape(-1), drawn.raw(name).reshape(-1)
            if name.endswith("_exps.weight"):
                piece = PIECE_BYTES // tensor.row_bytes * tensor.row_bytes
                wanted = np.resize(wanted[:piece], wanted.size)
                assert piece < wanted.size
            assert np.array_equal(rows, wanted), name


# ---- file


@settings(deadline=None, max_examples=30)
@given(
    words=st.lists(st.text(max_size=9), max_size=5),
    number=st.integers(0, 2**63),
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4),
)
def test_a_written_header_is_read_back(tmp_path_factory, words, number, shapes):
    keys = {"general.architecture": ("string", "x"), "a": ("string[]", words), "b": ("u64", number),
            "c": ("i32[]", [-1, 4]), "d": ("bool", True), "e": ("f32", 0.5)}  # fmt: skip
    tensors = [NewTensor(f"t{i}", (rows, 64 * blocks), "Q2_0") for i, (rows, blocks) in enumerate(shapes)]
    layout = file_layout(keys, tensors)
    path = tmp_path_factory.mktemp("made") / "m.gguf"
    path.write_bytes(layout.header.ljust(layout.n_bytes, b"\7"))
    with GgufFile(path) as gguf:
        assert (list(gguf.metadata["a"]), gguf.metadata["b"], gguf.metadata["d"]) == (words, number, True)
        assert list(gguf.metadata["c"]) == [-1, 4]
        for tensor, offset in zip(tensors, layout.offsets, strict=True):
            found = gguf.tensors[tensor.name]
            assert (found.shape, found.offset, found.n_bytes) == (tensor.shape, offset, tensor.n_bytes)


def test_an_unknown_type_of_key():
    with pytest.raises(BadArgument, match="no such type of key"):
        file_layout({"a": ("u128", 1)}, [])


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 9])
def test_geometry_is_read_back(layers, tmp_path):
    spec = SynthSpec(layers=layers, experts=10, vocabulary=600, ngram_rows=20)
    g = geometry_of(spec)
    assert (g.D, g.F, g.K, g.C, g.CD) == (2560, 640, 10, 4, 10240)
    assert layers == 1 or g.kinds[g.ngram.layer] == "gdn"
    from strata.synth import _keys

    tensors = tensors_of(spec, g)
    layout = file_layout(_keys(spec, g), tensors)
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.n_bytes)
    with GgufFile(path) as gguf:
        arch = architecture_of(gguf)
        assert arch.read_geometry(gguf) == g
        arch.check_contract(gguf, g)
        assert gguf.total_bytes == model_bytes(spec)


def test_the_release_s_types():
    kinds = {t.name: t.format_name for t in tensors_of(SynthSpec(), geometry_of(SynthSpec()))}
    assert kinds["token_embd.weight"] == "Q3_K"
    assert kinds["output.weight"] == "Q5_K"
    assert kinds["blk.0.ffn_gate_exps.weight"] == "Q4_K"
    assert kinds["blk.1.ffn_down_exps.weight"] == "IQ4_NL"
    assert kinds["blk.1.attn_k.weight"] == "Q6_K"
    assert kinds["blk.0.hc_attn_up.weight"] == "BF16"
    assert kinds["blk.0.ple_key.weight"] == "Q2_0"


@pytest.mark.parametrize("dense", ["Q8_0", "Q6_K"])
def test_another_type_of_dense_matrices(dense):
    """Of those of layers whose rows it can store; experts, head, tables and what is in 16 bits stay."""
    spec = SynthSpec(dense=dense)
    g = geometry_of(spec)
    before = {t.name: t.format_name for t in tensors_of(SynthSpec(), g)}
    kinds = {t.name: t.format_name for t in tensors_of(spec, g)}
    changed = {name for name, kind in kinds.items() if kind != before[name]}
    assert {kinds[name] for name in changed} == {dense}
    for part in ("attn_qkv", "attn_gate", "ssm_out", "ffn_gate_shexp", "ffn_up_shexp", "ple_key"):
        assert kinds[f"blk.0.{part}.weight"] == dense
    assert kinds["blk.1.attn_v.weight"] == dense
    assert kinds["blk.0.ffn_down_shexp.weight"] == ("Q8_0" if dense == "Q8_0" else "Q2_0")  # rows of 640 values
    assert "output.weight" not in changed
    assert not any(word in name for name in changed for word in ("_exps", "token_embd", "inp", "hc_"))
    assert spec.name == f"{SynthSpec().name}-{dense}"


def test_bad_specs():
    with pytest.raises(BadArgument, match="cannot be read"):
        SynthSpec.of_types("Q4_K")
    with pytest.raises(ModelError, match="cannot be stored"):
        SynthSpec.of_types("Q4_K/Q4_K")
    with pytest.raises(BadArgument, match="layers"):
        SynthSpec(layers=0)
    with pytest.raises(BadArgument, match="I32"):
        SynthSpec(dense="I32")


def test_a_file_is_the_model_in_memory(small, tmp_path):
    path = write_model(tmp_path / "new", SMALL)
    assert path.read_bytes() == small.read_bytes()
    with pytest.raises(FileError, match="there already"):
        write_model(tmp_path / "new", SMALL)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


# ---- running


def test_other_tokens_ask_for_other_experts(model):
    """Weights with a mean would send all tokens to the same experts."""
    with routing(model._backend) as log:
        model.generate(list(range(40, 100)), max_tokens=2, ignore_eos=True)
    facts = routing_facts(log.ids, SMALL.experts)
    assert facts.distinct > 0.9 * SMALL.experts
    assert facts.overlap < 0.7  # half of the experts are chosen each time


def test_text_is_bytes(model):
    assert model.tokenize("Hé").tolist() == model.tokenize("H").tolist() + model.tokenize("é").tolist()
    assert len(model.tokenize("é")) == 2


def test_logging_changes_nothing_and_replay_does(model):
    prompt = list(range(50, 80))
    plain = model.generate(prompt, max_tokens=6, ignore_eos=True).tokens
    with routing(model._backend) as log:
        assert model.generate(prompt, max_tokens=6, ignore_eos=True).tokens == plain
    own = log.ids
    assert own.shape[1:] == (2, 10)
    ids = uniform_ids(7, 2, SMALL.experts, 10)
    with routing(model._backend, ids) as log:
        model.generate([*range(80, 110)], max_tokens=6, ignore_eos=True)
    np.testing.assert_array_equal(log.ids[:14], np.concatenate([ids, ids]))
    assert model.generate(prompt, max_tokens=6, ignore_eos=True).tokens == plain


def test_llama_cpp_reads_it_and_agrees(small, model):
    pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    from tests.oracle.llama import LlamaOracle

    prompt = list(range(40, 60))
    with LlamaOracle(small, 256, 1) as oracle:
        theirs = oracle.greedy(prompt, 4)
    ours = model.generate(prompt, max_tokens=1, ignore_eos=True).tokens
    assert theirs.tokens[0] == ours[0]


# ---- routing


def test_skewed_ids_share_what_they_should():
    ids = skewed_ids(400, 3, 512, 10, seed=3)
    assert all(len(set(row)) == 10 for row in ids.reshape(-1, 10).tolist())
    facts = routing_facts(ids, 512)
    assert facts.overlap == pytest.approx(0.35, abs=0.01)
    assert facts.top_share > 0.2
    even = routing_facts(uniform_ids(400, 3, 512, 10, seed=3), 512)
    assert even.overlap == pytest.approx(10 / 512, abs=0.01)
    assert even.top_share < 0.05
    assert facts.distinct < even.distinct


def test_routing_facts_of_a_known_case():
    ids = np.array([[[0, 1]], [[1, 2]], [[1, 2]], [[3, 1]]], np.int32)
    facts = routing_facts(ids, 8)
    assert (facts.tokens, facts.span, facts.distinct) == (4, 4, 4.0)
    assert facts.overlap == pytest.approx((1 + 2 + 1) / 3 / 2)
    assert facts.top_share == pytest.approx(6 / 8)


def test_command_prints_routing_before_rates():
    small = ["--layers", "1", "--vocabulary", "1024"]
    arguments = ["bench", "synth", *small, "--n-experts", "20", "-n", "4", "-r", "1", "--prefill-tokens", "8"]
    done = CliRunner().invoke(app, [*arguments, "--experts", "Q2_0/Q2_0", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert done.stdout.index("routing    replayed") < done.stdout.index("decode ") < done.stdout.index("prefill ")


def test_command_refuses():
    done = CliRunner().invoke(app, ["bench", "synth", "--arch", "other"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no such architecture" in done.stderr


def test_a_folder_that_cannot_be_written_is_said_and_another_writers_part_is_kept(tmp_path, monkeypatch):
    spec = SynthSpec(layers=1, experts=16, vocabulary=1000)
    taken = tmp_path / "taken"
    taken.write_text("no folder")
    with pytest.raises(FileError, match=r"cannot be written; found .*; needed a folder"):
        write_model(taken, spec)
    theirs = tmp_path / f"{spec.name}.part"
    theirs.write_text("theirs")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(synth, "_make", full)
    with pytest.raises(DoesNotFit, match=r"is too small; found No space left on device; needed .* GB\. Make fewer"):
        write_model(tmp_path, spec)
    assert sorted(tmp_path.iterdir()) == [theirs, taken]


def test_a_model_larger_than_the_memory_is_not_begun(monkeypatch):
    made = []
    monkeypatch.setattr(synth, "_make", lambda *a: made.append(a))
    with pytest.raises(DoesNotFit, match="GB free"), memory_model(SynthSpec(layers=1024)):
        pass
    assert not made


def test_an_interrupt_is_not_hidden_by_the_memory_it_leaves():
    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), memory_model(SMALL, interrupted):
        pytest.fail("it was made")
