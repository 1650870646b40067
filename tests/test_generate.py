"""Answers from end to end: prompts of every size, the context's edge, stops, characters split over tokens, sampling."""

from __future__ import annotations

import numpy as np
import pytest

import strata
from strata.base.errors import BadArgument, ContextFull, ModelError
from strata.runtime.rng import uniform
from strata.runtime.sampling import SamplingParams, sample
from strata.runtime.session import SessionState
from tests.drafters import Told, random_lengths
from tests.gguf_maker import array
from tests.tiny_models import TinyModel, scripted, small

PROMPT = np.random.default_rng(0).integers(0, 60, 70).astype(np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def random_model(folder):
    with strata.load(TinyModel(small()).write(folder / "random.gguf"), context=512, threads=2) as model:
        yield model


def says(folder, *texts, **options):
    """A loaded model that continues along the texts."""
    name = f"says_{len(list(folder.iterdir()))}.gguf"
    return strata.load(scripted(*texts).write(folder / name), context=128, threads=1, **options)


# ---- prompts and the context


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_short_prompts(tiny_path, n):
    """From the first token on: the answer is what the logits of prompt + answer say."""
    with strata.load(tiny_path, context=256, threads=2) as model:
        prompt = np.arange(100, 100 + n)
        answer = model.generate(prompt, max_tokens=4, ignore_eos=True)
        rows = model.logits(np.concatenate([prompt, answer.tokens]))
        assert list(answer.tokens) == rows[n - 1 : -1].argmax(1).tolist()
        assert answer.usage.prompt_tokens == n


def test_an_empty_prompt(random_model):
    for prompt in ("", [], np.array([], np.int32)):
        with pytest.raises(BadArgument, match="empty") as caught:
            random_model.generate(prompt)
        assert caught.value.needed


def test_exactly_the_context_and_one_more(folder, random_model):
    context = random_model.context
    for n in (1, 100, 503):
        room = context - 8 - n
        prompt = np.resize(PROMPT, n)
        answer = random_model.generate(prompt, max_tokens=room, ignore_eos=True) if room < 10 or n == 100 else None
        if answer:
            assert len(answer.tokens) == room
            assert answer.finish_reason == "length"
        with pytest.raises(ContextFull) as caught:
            random_model.generate(prompt, max_tokens=room + 1)
        for number in (n, room + 1, context):
            assert str(number) in f"{caught.value.found} {caught.value.needed}".split()
        assert str(room) in caught.value.advice
    for n in (504, 505, 600):
        for max_tokens in (None, 1):
            with pytest.raises(ContextFull) as caught:
                random_model.generate(np.resize(PROMPT, n), max_tokens=max_tokens)
            assert str(n) in str(caught.value)
            assert str(context) in str(caught.value)


def test_without_max_tokens_the_context_is_filled(random_model):
    answer = random_model.generate(np.resize(PROMPT, 490), ignore_eos=True)
    assert len(answer.tokens) == 512 - 8 - 490
    assert answer.finish_reason == "length"
    assert len(random_model._default.tokens) == 512 - 8 - 1


# ---- stops


def test_stop_token(folder):
    with says(folder, "abcdefg") as model:
        answer = model.generate("a")
        assert (answer.text, answer.finish_reason, answer.stopped_on) == ("bcdefg", "stop", 258)
        assert answer.tokens == (*b"bcdefg", 258)
        assert answer.usage.output_tokens == 7
        on = model.generate("a", ignore_eos=True, max_tokens=9)
        assert on.finish_reason == "length"
        assert on.tokens[:7] == answer.tokens


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        ("d", "bc", "d"),
        ("def", "bc", "def"),
        (["xyz", "efgh", "gh"], "bcd", "efgh"),
        ("defz", "bcdefgh", None),
        ("hi", "bcdefgh", None),
        ("gh", "bcdef", "gh"),
        (["h"], "bcdefg", "h"),
        ("b", "", "b"),
        (("cd", "bcd"), "", "bcd"),
    ],
)
def test_stop_strings_over_several_tokens(folder, stop, text, found):
    with says(folder, "abcdefgh") as model:
        answer = model.generate("a", stop=stop)
        assert (answer.text, answer.finish_reason) == (text, "stop")
        assert answer.stopped_on == (found or 258)
        chunks = list(model.stream("a", stop=stop))
        assert "".join(c.text for c in chunks) == text
        assert [c.token for c in chunks[:-1]] == list(answer.tokens)
        assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        for i in range(len(chunks)):  # text that may begin a stop string is not given out too early
            assert text.startswith("".join(c.text for c in chunks[:i]))
        again = model.generate("a", stop=stop)
        assert again.text == text


def test_a_possible_stop_string_is_given_out_at_the_end(folder):
    with says(folder, "abcdefgh") as model:
        answer = model.generate("a", stop="defgX", max_tokens=5)
        assert (answer.text, answer.finish_reason, answer.stopped_on) == ("bcdef", "length", None)


def test_characters_split_over_tokens(folder):
    """Every byte is a token: no chunk holds half a character, and stops in the middle of one still work."""
    text = "😀 漢é!"
    with says(folder, "x" + text) as model:
        chunks = list(model.stream("x"))
        assert "".join(c.text for c in chunks) == text
        assert [c.text for c in chunks if c.text] == list(text)
        assert len(chunks) == len(text.encode()) + 2
        assert model.generate("x", stop="漢").text == "😀 "
        assert model.generate("x", stop="é!").text == "😀 漢"
        cut = model.generate("x", max_tokens=7)  # ends after two of the three bytes of the second character
        assert cut.tokens == tuple(text.encode()[:7])
        assert cut.text == "😀 �"
        # A prompt may end within a character: what is missing comes out as the broken rest.
        assert model.generate(list("x😀".encode()[:-1]), max_tokens=2).text == "� "


def test_bytes_that_are_no_text(folder):
    with says(folder, b"a\xff\xfeb\xc3c") as model:
        answer = model.generate("a")
        assert answer.tokens == (0xFF, 0xFE, ord("b"), 0xC3, ord("c"), 258)
        assert answer.text == "��b�c"


def resized(vocabulary: int):
    """An edit that gives the tokenizer another number of tokens than the head."""

    def edit(made):
        for i, (key, value) in enumerate(made.keys):
            if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
                kind, items = value.value
                more = [f"<|far_{n}|>" if kind == 8 else 3 for n in range(len(items), vocabulary)]
                made.keys[i] = (key, array(kind, [*items[:vocabulary], *more]))

    return edit


def test_a_tokenizer_smaller_than_the_head(folder):
    path = TinyModel(small(), edit=resized(299)).write(folder / "short.gguf")
    with pytest.raises(ModelError, match="tokenizer") as caught:
        strata.load(path, context=64)
    assert (caught.value.found, caught.value.needed) == (299, 300)


def test_a_tokenizer_larger_than_the_head(folder):
    """Text whose ids the embedding does not have is refused, not read out of bounds."""
    path = TinyModel(small(), edit=resized(301)).write(folder / "large.gguf")
    with strata.load(path, context=64, threads=1) as model:
        assert model.generate("ab", max_tokens=2, ignore_eos=True).tokens
        with pytest.raises(BadArgument, match="outside the vocabulary") as caught:
            model.generate("ab<|far_300|>", max_tokens=2)
        assert caught.value.found == 300
        with pytest.raises(BadArgument, match="outside the vocabulary"):
            model.perplexity("ab<|far_300|>")


# ---- sampling

CHAINS = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 2.5},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k of 100": {"temperature": 1.5, "top_k": 100},
    "top_p": {"temperature": 1.0, "top_p": 0.6},
    "min_p": {"temperature": 1.3, "min_p": 0.2},
    "all": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.4},
    "greedy repetition": {"repetition_penalty": 1.3, "penalty_last_n": 16},
    "presence and frequency": {"temperature": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.3,
                               "penalty_last_n": 20},
    "everything": {"temperature": 0.9, "top_k": 80, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
                   "presence_penalty": -0.2, "frequency_penalty": 0.1,
                   "logit_bias": {3: 4.0, 7: -float("inf"), 9: -2.0}},
}  # fmt: skip


def chosen(row, history, seed, position, options) -> int:
    """The next token by a plain float64 reading of the sampling rules."""
    x = row.astype(np.float64)
    last_n = options.get("penalty_last_n", 64)
    seen, counts = np.unique(history[-last_n:], return_counts=True)
    r = options.get("repetition_penalty", 1.0)
    x[seen] = np.where(x[seen] > 0, x[seen] / r, x[seen] * r)
    x[seen] -= options.get("presence_penalty", 0.0) + counts * options.get("frequency_penalty", 0.0)
    for token, bias in options.get("logit_bias", {}).items():
        x[token] += bias
    if not options.get("temperature"):
        return int(x.argmax())
    order = np.lexsort((np.arange(len(x)), -x))
    order = order[: options.get("top_k") or len(x)]
    p = np.exp(x[order] - x[order[0]])
    p /= p.sum()
    n = int(np.searchsorted(np.cumsum(p), options.get("top_p", 1.0))) + 1 if options.get("top_p", 1.0) < 1 else len(p)
    order, p = order[:n], p[:n]
    order = np.sort(order[p >= options.get("min_p", 0.0) * p[0]])
    weights = np.exp((x[order] - x[order].max()) / options["temperature"])
    edges = np.cumsum(weights)
    return int(order[np.searchsorted(edges, uniform(seed, position) * edges[-1], side="right")])


@pytest.mark.parametrize("name", CHAINS)
def test_the_sampling_chain(random_model, name):
    options, seed = CHAINS[name], 1234
    answer = random_model.generate(PROMPT, max_tokens=24, ignore_eos=True, seed=seed, **options)
    assert answer.seed == seed
    tokens = np.concatenate([PROMPT, answer.tokens])
    rows = random_model.logits(tokens)
    for j in range(24):
        n = len(PROMPT) + j
        assert chosen(rows[n - 1], tokens[:n], seed, n - 1, options) == tokens[n], f"token {j}"
    if options.get("temperature"):
        other = random_model.generate(PROMPT, max_tokens=24, ignore_eos=True, seed=seed + 1, **options)
        assert other.tokens != answer.tokens


@pytest.mark.parametrize("name", [n for n in CHAINS if n != "greedy"])
def test_windows_draw_what_single_rows_draw(random_model, name):
    """Rows of a window of T = 2..8, chosen with that window's request, are the tokens of one-token decoding."""
    options = CHAINS[name] | {"seed": 77}
    params = SamplingParams(**options)
    answer = random_model.generate(PROMPT, max_tokens=20, ignore_eos=True, **options)
    tokens = np.concatenate([PROMPT, answer.tokens]).astype(np.int32)
    backend, at = random_model._backend, len(PROMPT) - 1
    session = SessionState(backend, random_model.context, checkpoints=0)
    session.read(tokens[:at])
    for T in (2, 8, 3, 7):
        window = tokens[at : at + T]
        request = params.head_request(session.tokens, window)
        session.window(window)
        heads = backend.head(0, T, request)
        drawn = [sample(heads, j, params, at + j, request).token for j in range(T)]
        assert drawn == tokens[at + 1 : at + T + 1].tolist()
        session.commit(window, T)
        at += T


def test_a_seed_repeats_an_answer(folder, random_model):
    how = {"max_tokens": 16, "ignore_eos": True, "temperature": 1.2}
    free = random_model.generate(PROMPT, **how)
    again = random_model.generate(PROMPT, seed=free.seed, **how)
    assert again.tokens == free.tokens
    assert random_model.generate(PROMPT, **how).seed != free.seed
    for options in ({"prefill": "windows"}, {"threads": 3}, {"checkpoints": 0}):
        with strata.load(folder / "random.gguf", context=512, **options) as model:
            assert model.generate(PROMPT, seed=free.seed, **how).tokens == free.tokens


def test_logprobs_are_those_of_the_unmodified_logits(random_model):
    changed = {"temperature": 1.5, "seed": 5, "top_k": 150, "repetition_penalty": 1.3, "logit_bias": {4: 3.0}}
    answer = random_model.generate(PROMPT, max_tokens=12, ignore_eos=True, logprobs=True, top_logprobs=7, **changed)
    rows = random_model.logits(np.concatenate([PROMPT, answer.tokens]))[len(PROMPT) - 1 :].astype(np.float64)
    log_p = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1, keepdims=True)
    assert len(answer.logprobs) == 12
    for j, entry in enumerate(answer.logprobs):
        assert entry.token == answer.tokens[j]
        assert entry.logprob == pytest.approx(log_p[j, entry.token], abs=1e-9)
        order = np.lexsort((np.arange(rows.shape[1]), -rows[j]))[:7]
        assert [t for t, _ in entry.top] == order.tolist()
        np.testing.assert_allclose([p for _, p in entry.top], log_p[j, order], atol=1e-9)
    plain = random_model.generate(PROMPT, max_tokens=3, ignore_eos=True, logprobs=True)
    assert [e.top for e in plain.logprobs] == [()] * 3
    assert random_model.generate(PROMPT, max_tokens=3, ignore_eos=True).logprobs is None
    streamed = list(random_model.stream(PROMPT, max_tokens=3, ignore_eos=True, top_logprobs=2))
    assert [c.logprob for c in streamed[:3]] == [e.logprob for e in plain.logprobs]
    assert [len(c.top) for c in streamed[:3]] == [2, 2, 2]


def test_bias(random_model):
    forced = random_model.generate(PROMPT, max_tokens=5, logit_bias={42: 100.0})
    assert forced.tokens == (42,) * 5
    free = random_model.generate(PROMPT, max_tokens=1, ignore_eos=True).tokens[0]
    banned = random_model.generate(PROMPT, max_tokens=5, ignore_eos=True, logit_bias={free: -float("inf")})
    assert free not in banned.tokens
    every = dict.fromkeys(range(300), -float("inf"))
    with pytest.raises(strata.StrataError):
        random_model.generate(PROMPT, max_tokens=5, temperature=1.0, logit_bias=every)
    with pytest.raises(strata.StrataError):
        random_model.generate(PROMPT, max_tokens=5, logit_bias=every)
    assert random_model.generate(PROMPT, max_tokens=1, ignore_eos=True).tokens == (free,)


class Guesser:
    """A drafter that knows the answer to PROMPT and is right, or wrong, or both, as the seeded coin falls."""

    def __init__(self, answer, right: float):
        self.answer, self.right, self.rng = answer, right, np.random.default_rng(1)

    def propose(self, tokens, k):
        coming = self.answer[len(tokens) - len(PROMPT) :][:k]
        return [int(t) if self.rng.random() < self.right else int(self.rng.integers(300)) for t in coming]


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", ["greedy", "temperature", "all", "greedy repetition", "everything"])
def test_drafts_do_not_change_an_answer(folder, random_model, name, right):
    """Tokens, logprobs, held tokens and the session's memory are those of one-token decoding."""
    how = CHAINS[name] | {"seed": 3, "max_tokens": 30, "ignore_eos": True, "logprobs": True, "top_logprobs": 3}
    random_model._default.clear()
    plain = random_model.generate(PROMPT, **how)
    drafter = Guesser(plain.tokens, right)
    with strata.load(folder / "random.gguf", context=512, threads=2, draft=drafter) as model:
        # A busy machine's prices may forbid all drafts.
        model._default._state.speculator.policy = Told(random_lengths())
        drafted = model.generate(PROMPT, **how)
        assert drafted.tokens == plain.tokens
        assert drafted.logprobs == plain.logprobs
        assert drafted.text == plain.text
        assert model._default._state.state.digest() == random_model._default._state.state.digest()
        assert drafted.drafts["offered"] > 0
        if right == 1.0:
            assert drafted.drafts["accepted"] == drafted.drafts["offered"]
            assert drafted.drafts["windows"] < 30
        again = model.generate(np.concatenate([PROMPT, plain.tokens, [5]]), max_tokens=3, drafts=False)
        assert again.usage.reused_tokens == len(PROMPT) + 29
        assert again.drafts is None


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_stops_inside_a_drafted_window(folder, right):
    """A stop string or stop token in the middle of accepted drafts ends the answer there, and the session too."""
    text = "abcdefghijklmnop"
    with says(folder, text) as alone:
        wanted = [alone.generate("a", **how) for how in ({}, {"stop": "fgh"}, {"max_tokens": 4})]

    class Knows:
        def propose(self, tokens, k):
            last = bytes([tokens[-1]]).decode()
            coming = [*text.encode(), 258, 258, 258, 258, 258, 258, 258][text.index(last) + 1 :] if last in text else []
            return coming[:k] if right else [7] * k

    with says(folder, text, draft=Knows()) as model:
        for how, single in zip(({}, {"stop": "fgh"}, {"max_tokens": 4}), wanted, strict=True):
            answer = model.generate("a", **how)
            assert (answer.tokens, answer.text) == (single.tokens, single.text)
            assert (answer.finish_reason, answer.stopped_on) == (single.finish_reason, single.stopped_on)
            held = [ord("a"), *single.tokens]
            assert model._default.tokens.tolist() == held[:-1]
            model._default.clear()
