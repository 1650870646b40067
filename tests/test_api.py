"""The public names: loading, arguments and what is refused, records, scores and facts."""

from __future__ import annotations

import json
import pickle
import threading
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import strata
from strata.base.errors import BadArgument, ContextFull, DoesNotFit, FileError, StrataError
from tests.tiny_models import TinyModel, small

TOKENS = np.random.default_rng(0).integers(0, 200, 290)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return TinyModel(small()).write(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def model(path):
    with strata.load(path, context=512, threads=2) as loaded:
        yield loaded


# ---- loading


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"context": 9}, "context"), ({"context": 0}, "context"), ({"context": 2.5}, "context"),
        ({"context": "4K"}, "context"),
        ({"sessions": 0}, "sessions"), ({"sessions": True}, "sessions"), ({"checkpoints": -1}, "checkpoints"),
        ({"pin": "yes"}, "pin"), ({"pin": None}, "pin"), ({"draft": ""}, "draft is empty"),
        ({"on_progress": 3}, "on_progress"),
        ({"threads": 0}, "threads"), ({"threads": "2"}, "threads"), ({"threads": 5000}, "threads"),
        ({"kv": "f8"}, "kv"), ({"kv": None}, "kv"), ({"prefill": "fast"}, "prefill"), ({"draft": 3}, "draft"),
        ({"contxt": 5}, "Did you mean context"), ({"max_context": 5}, "Did you mean context"),
        ({"thread": 2}, "Did you mean threads"),
    ],
)  # fmt: skip
def test_bad_options_of_load(path, options, what):
    with pytest.raises(BadArgument, match=what) as caught:
        strata.load(path, **options)
    assert caught.value.found is not None
    assert isinstance(caught.value, ValueError)


def test_sizes_may_be_numpy_integers(path):
    sizes = {"context": np.int64(300), "sessions": np.int8(2), "threads": np.uint16(1), "checkpoints": np.int32(0)}
    with strata.load(path, **sizes) as a, strata.load(path, context=300, sessions=2, threads=1, checkpoints=0) as b:
        assert type(a.context) is int and a.plan.lines == b.plan.lines
    with pytest.raises(BadArgument, match="context"):
        strata.load(path, context=np.int64(0))


def test_an_empty_path_is_not_the_current_folder():
    with pytest.raises(BadArgument, match="path is empty"):
        strata.load("")


def test_a_failed_load_leaves_no_thread(path):
    before = threading.active_count()
    for options in ({"context": 10**9}, {"kv": "f8"}, {"sessions": 10**6, "context": 512}):
        with pytest.raises(StrataError):
            strata.load(path, threads=3, **options)
    assert threading.active_count() == before


def test_a_context_that_does_not_fit(path):
    with pytest.raises(DoesNotFit) as caught:
        strata.load(path, context=2_000_000_000)
    assert "MiB" in caught.value.found
    assert "MiB" in caught.value.needed
    assert "context" in caught.value.advice


@pytest.mark.parametrize("what", ["no_such_file.gguf", "folder", 5, None, b"x.gguf"])
def test_paths_that_are_no_model(tmp_path, what):
    target = tmp_path if what == "folder" else tmp_path / what if isinstance(what, str) else what
    with pytest.raises((FileError, BadArgument)) as caught:
        strata.load(target)
    assert caught.value.found
    assert caught.value.needed


def test_the_context_by_default_and_beyond_the_trained_one(path, caplog):
    with strata.load(str(path)) as model:
        assert model.context == 1024
        assert model.kv == "f16"
        assert isinstance(model.stats()["threads"], int)
    with strata.load(Path(path), context=2000, kv="int8") as model:
        assert model.context == 2000
        assert model.kv == "int8"
        assert any("context 2,000 is beyond the 1,024" in r.message for r in caplog.records)
        assert len(model.generate(np.resize(TOKENS, 1500), max_tokens=2, ignore_eos=True).tokens) == 2


def test_int8_is_close_to_f16(path, model):
    with strata.load(path, context=512, kv="int8", threads=1) as small_model:
        a, b = model.logits(TOKENS), small_model.logits(TOKENS)
    error = np.sqrt(((a - b) ** 2).mean() / (a**2).mean())
    assert 0 < error < 0.03


def test_either_shard_opens_the_bundled_model(tiny_path):
    second = tiny_path.with_name(tiny_path.name.replace("00001-of", "00002-of"))
    assert second != tiny_path
    seen = []
    for shard in (tiny_path, second):
        with strata.load(shard, context=64, threads=2) as model:
            seen.append(model.generate("import", max_tokens=3).tokens)
    assert seen[0] == seen[1]


# ---- arguments


@pytest.mark.parametrize(
    ("call", "name", "meant"),
    [
        ("generate", "temprature", "temperature"), ("generate", "max_token", "max_tokens"),
        ("generate", "topk", "top_k"), ("generate", "stops", "stop"), ("stream", "on_progres", "on_progress"),
        ("generate", "repeat_penality", "repeat_penalty"),
        ("generate", "ignore_eot", "ignore_eos"), ("generate", "frequency_penalti", "frequency_penalty"),
        ("chat", "thinkin", "thinking"), ("chat", "tool", "tools"), ("chat", "temprature", "temperature"),
    ],
)  # fmt: skip
def test_unknown_arguments_name_the_closest(tiny_model, call, name, meant):
    prompt = [{"role": "user", "content": "a"}] if call == "chat" else "a"
    with pytest.raises(BadArgument, match=f"{call} has no argument {name}") as caught:
        getattr(tiny_model, call)(prompt, **{name: 1})
    assert caught.value.advice == f"Did you mean {meant}?"


@pytest.fixture(scope="module")
def tiny_model(tiny_path):
    with strata.load(tiny_path, context=768, threads=2) as loaded:
        yield loaded


def test_an_argument_like_nothing_lists_all(model):
    with pytest.raises(BadArgument) as caught:
        model.generate("a", zzzqqq=1)
    assert "temperature" in caught.value.advice


def test_aliases(model):
    how = {"ignore_eos": True, "penalty_last_n": 4096}
    a = model.generate(TOKENS, max_new_tokens=7, repeat_penalty=50, **how)
    b = model.generate(TOKENS, max_tokens=7, repetition_penalty=50, **how)
    assert a.tokens == b.tokens
    assert len(a.tokens) == 7
    assert a.tokens != model.generate(TOKENS, max_tokens=7, **how).tokens
    for both in ({"max_tokens": 2, "max_new_tokens": 2}, {"repeat_penalty": 1.1, "repetition_penalty": 1.1}):
        with pytest.raises(BadArgument, match="given twice"):
            model.generate(TOKENS, **both)


BAD_VALUES = [
    {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 2.0}, {"max_tokens": True}, {"max_tokens": "5"},
    {"stop": ""}, {"stop": ["a", ""]}, {"stop": 5}, {"stop": [5]}, {"stop": b"a"}, {"ignore_eos": 1}, {"wait": None},
    {"stop": ["a", "b\udcff"]}, {"temperature": -1}, {"temperature": 101}, {"temperature": "hot"},
    {"temperature": float("nan")}, {"top_k": -1}, {"top_k": 1.5},
    {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2}, {"repetition_penalty": 0}, {"presence_penalty": 200},
    {"penalty_last_n": -1}, {"penalty_last_n": 5000}, {"seed": -1}, {"seed": 1 << 64}, {"seed": 1.0}, {"logprobs": 1},
    {"top_logprobs": 21}, {"logprobs": False, "top_logprobs": 2}, {"logit_bias": [1]}, {"logit_bias": {300: 1.0}},
    {"logit_bias": {-1: 1.0}}, {"logit_bias": {1: 1000.0}}, {"logit_bias": {"1": 1.0}}, {"on_progress": 3},
]  # fmt: skip


@pytest.mark.parametrize("options", BAD_VALUES, ids=str)
def test_values_out_of_range(model, options):
    with pytest.raises(BadArgument) as caught:
        model.generate(TOKENS, **options)
    assert caught.value.found is not None
    assert next(iter(options)).split("_")[0] in str(caught.value)
    assert len(model.generate(TOKENS[:3], max_tokens=1, ignore_eos=True).tokens) == 1  # and the session is free


def test_a_number_too_long_to_be_written(model):
    with pytest.raises(ContextFull, match="a value of type int max_tokens"):
        model.generate(TOKENS, max_tokens=10**5000)


@pytest.mark.parametrize(
    "prompt",
    [None, b"ab", bytearray(b"ab"), memoryview(b"ab"), 5, 1.5, [1.5], [[1, 2]], [[1, 2], [3]], ["a"], {1: 2},
     iter([1]), [True], np.zeros((2, 2), int), [2**70], object()],
    ids=lambda prompt: type(prompt).__name__,
)  # fmt: skip
def test_prompts_that_are_neither_text_nor_ids(model, prompt):
    for call in (model.generate, model.logits, model.perplexity):
        with pytest.raises(BadArgument):
            call(prompt)


@pytest.mark.parametrize("bad", [-1, 300, 2**31, 2**40])
def test_ids_outside_the_vocabulary(model, bad):
    for call in (model.generate, model.stream, model.logits, model.perplexity):
        with pytest.raises(BadArgument, match=r"token 2 .* outside the vocabulary") as caught:
            call([1, 2, bad, 3])
        assert caught.value.found == bad
        assert caught.value.needed == "0..299"


def test_text_that_is_no_unicode(model):
    with pytest.raises(BadArgument, match="Unicode"):
        model.generate("a\ud800")


def test_kinds_of_prompts(model):
    how = {"max_tokens": 3, "ignore_eos": True}
    wanted = model.generate("abc", **how).tokens
    ids = model.tokenize("abc")
    for same in (ids, ids.tolist(), tuple(ids.tolist()), ids.astype(np.uint8), ids.astype(np.int64), range(97, 100)):
        assert model.generate(same, **how).tokens == wanted


# ---- records


def test_result(model):
    result = model.generate(TOKENS[:50], max_tokens=5, ignore_eos=True)
    assert str(result) == result.text == model.detokenize(result.tokens)
    assert f"{result}" == result.text
    assert len(result) == len(result.text)
    assert result.usage.total_tokens == 50 + 5
    assert result.usage.output_tokens == len(result.tokens) == 5
    t = result.timings
    assert t.first_token_ms > 0
    assert t.decode_ms > 0
    assert t.decode_tokens_per_s == pytest.approx(5 / t.decode_ms * 1e3)
    with pytest.raises(AttributeError):
        result.text = "b"
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_result_is_json_whatever_numbers_were_given(model):
    options = {"max_tokens": np.int64(3), "temperature": np.float32(0.7), "top_k": np.int32(5), "seed": np.uint64(7),
               "logit_bias": {np.int64(5): np.float32(1.5)}, "top_logprobs": np.int8(2)}  # fmt: skip
    result = model.generate(np.arange(4, dtype=np.int64), **options)
    plain = model.generate([0, 1, 2, 3], max_tokens=3, temperature=float(np.float32(0.7)), top_k=5, seed=7,
                           logit_bias={5: 1.5}, top_logprobs=2)  # fmt: skip
    assert json.loads(json.dumps(asdict(result)))["seed"] == 7
    assert (result.tokens, result.logprobs) == (plain.tokens, plain.logprobs)


def test_stream_records(model):
    chunks = list(model.stream(TOKENS[:50], max_tokens=5, ignore_eos=True))
    assert [c.token is None for c in chunks] == [False] * 5 + [True]
    assert [c.finish_reason for c in chunks] == [None] * 5 + ["length"]
    assert all(c.kind == "text" and c.delta is None and not c.from_draft for c in chunks)
    assert all(c.tokens_per_s > 0 for c in chunks)


def test_progress(model):
    model._default.clear()
    seen = []
    model.generate(TOKENS, max_tokens=1, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (256, 289)
    assert seen[-1] == (289, 289)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)


def test_chat_answers(tiny_model):
    talk = [{"role": "user", "content": "What does os.path.join do?"}]
    answer = tiny_model.chat(talk, max_tokens=24, thinking=False)
    assert answer.message["role"] == "assistant"
    assert answer.message["content"] == answer.text
    stream = tiny_model.chat(talk, max_tokens=24, thinking=False, stream=True)
    deltas = [c.delta for c in stream if c.delta]
    assert "".join(d.get("content", "") for d in deltas) == answer.text
    assert stream.result.tokens == answer.tokens
    for bad in ("hi", [], [{"role": "user"}], [5]):
        with pytest.raises(StrataError):
            tiny_model.chat(bad)


def test_errors_say_found_needed_advice():
    error = StrataError("it broke", found=3, needed=4, advice="Fix it.")
    assert str(error) == "it broke; found 3; needed 4. Fix it."
    assert str(StrataError("it broke", found=10**5000)) == "it broke; found a value of type int"  # too long for Python
    for name in strata.__all__:
        assert getattr(strata, name) is not None


# ---- scores and facts


def test_logits(model):
    logits = model.logits(TOKENS)
    assert logits.shape == (290, 300)
    assert logits.dtype == np.float32
    kept = logits.copy()
    np.testing.assert_array_equal(model.logits(TOKENS, prefill="windows"), kept)
    np.testing.assert_array_equal(logits, kept)  # an array of its own
    model.generate(TOKENS[:7], max_tokens=2)
    np.testing.assert_array_equal(model.logits(TOKENS[:9]), kept[:9])  # from an empty state
    with pytest.raises(BadArgument) as caught:
        model.logits(np.resize(TOKENS, 513))
    assert "512" in str(caught.value.needed)
    assert model.logits(np.resize(TOKENS, 512)).shape == (512, 300)
    with pytest.raises(BadArgument):
        model.logits(TOKENS, prefill="fast")


def test_perplexity(model):
    logits = model.logits(TOKENS).astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    wanted = -log_p[np.arange(289), TOKENS[1:]].mean()
    score = model.score(TOKENS)
    assert score.tokens == 289
    assert score.nats == pytest.approx(wanted, rel=1e-12)
    assert model.perplexity(TOKENS) == pytest.approx(np.exp(wanted), rel=1e-12)
    assert model.perplexity(TOKENS, prefill="windows") == model.perplexity(TOKENS)
    text = "the text as bytes"
    assert model.perplexity(text) == model.perplexity(model.tokenize(text))
    for short in ([5], "", "a", []):
        with pytest.raises(BadArgument):
            model.perplexity(short)


def test_scores_leave_the_session_consistent(model):
    how = {"max_tokens": 4, "ignore_eos": True}
    model._default.clear()
    wanted = model.generate(TOKENS, **how).tokens
    model.perplexity(TOKENS[5:60])
    assert model.generate(TOKENS, **how).tokens == wanted
    model.logits(TOKENS)
    again = model.generate(np.append(TOKENS, 7), **how)
    assert again.usage.reused_tokens == len(TOKENS)


def test_stats(model):
    model.generate(TOKENS, max_tokens=3)
    stats = model.stats()
    assert json.loads(json.dumps(stats)) == stats
    assert stats["context"] == 512
    assert stats["threads"] == 2
    assert stats["kv"] == "f16"
    assert stats["sessions"] == 1
    # one attention layer: cells x (K, V) x heads x values x bytes
    assert stats["memory_bytes"]["KV cache"] == 512 * 2 * 2 * 64 * 2
    before = stats["ngram"]["requests"]
    model.generate(TOKENS, max_tokens=3)
    assert stats["ngram"]["requests"] == before  # a copy, not a live view
    assert model.stats()["ngram"]["requests"] > before


def test_tokenize(model, tiny_model):
    assert model.detokenize(model.tokenize("héllo 😀")) == "héllo 😀"
    assert model.tokenize("").shape == (0,)
    one, many = tiny_model.tokenize("<|im_end|>"), tiny_model.tokenize("<|im_end|>", special=False)
    assert len(one) == 1 < len(many)
    assert tiny_model.detokenize(one, skip_special=True) == ""
    for bad in (5, None, b"a"):
        with pytest.raises(BadArgument):
            model.tokenize(bad)
    for bad in ([300], [-1]):
        with pytest.raises(BadArgument):
            model.detokenize(bad)


# ---- wrong types


@pytest.mark.parametrize("what", [None, 3, "checkpoint", np.zeros(3)], ids=repr)
def test_what_is_no_checkpoint(model, what):
    with pytest.raises(BadArgument, match="no checkpoint") as caught:
        model._default.restore(what)
    assert caught.value.found == type(what).__name__
    assert len(model.generate(TOKENS[:3], max_tokens=1, ignore_eos=True).tokens) == 1  # and the session is free


@pytest.mark.parametrize("variables", [3, "x", ["a"], [("a", 1)], {1: 2}], ids=repr)
def test_template_variables_that_are_none(tiny_model, variables):
    with pytest.raises(BadArgument, match="template_variables"):
        tiny_model.chat([{"role": "user", "content": "hi"}], template_variables=variables, max_tokens=1)


def test_template_variables_that_chat_gives_itself_are_refused(tiny_model):
    with pytest.raises(BadArgument, match="given twice") as caught:
        tiny_model.chat([{"role": "user", "content": "hello"}], template_variables={"messages": 5})
    assert caught.value.found == "messages"


def test_ids_that_can_be_read_once_are_refused(model):
    with pytest.raises(BadArgument, match="token ids"):
        model.detokenize(t for t in [1, 2])
    for ids in (5, [True], [1.0], np.zeros((1, 2), int)):
        with pytest.raises(BadArgument, match="token ids"):
            model.detokenize(ids)
