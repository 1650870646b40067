"""Sessions: reuse, checkpoints, Busy, interleaving, closing, interrupts, and what is left after each of them."""

from __future__ import annotations

import gc
import logging
import threading

import numpy as np
import pytest

import strata
from strata.base.errors import BadArgument, Busy, Closed, DoesNotFit
from tests.tiny_models import TinyModel, small

CONTEXT = 800
PROMPT = np.random.default_rng(0).integers(0, 200, 300).astype(np.int32)
GREEDY = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return TinyModel(small()).write(tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def shared(path):
    with strata.load(path, context=CONTEXT, sessions=2, threads=2) as model:
        yield model


@pytest.fixture
def model(shared):
    """A model whose sessions are all free and empty."""
    for state in shared._free:
        state.clear()
    yield shared
    gc.collect()
    assert len(shared._free) == 2, "a session was not given back"


@pytest.fixture(scope="module")
def expected(path):
    """tokens of the answer to PROMPT in a fresh model, and to PROMPT[:n]"""
    with strata.load(path, context=CONTEXT, threads=1, checkpoints=0) as alone:
        found = {}

        def answer(prompt):
            key = tuple(prompt)
            if key not in found:
                alone._default.clear()
                found[key] = alone.generate(prompt, **GREEDY).tokens
            return found[key]

        yield answer


# ---- reuse


def test_continuing_reuses_all_that_is_held(model, expected):
    with model.session() as s:
        first = s.generate(PROMPT, **GREEDY)
        assert first.tokens == expected(PROMPT)
        assert first.usage.reused_tokens == 0
        longer = np.concatenate([PROMPT, first.tokens, PROMPT[:9]])
        second = s.generate(longer, **GREEDY)
        assert second.usage.reused_tokens == len(PROMPT) + len(first.tokens) - 1  # the last token was never read
        assert second.tokens == expected(longer)
        assert second.usage.prompt_tokens == len(longer)


def test_the_same_prompt_again_reads_at_least_its_last_token(model, expected):
    with model.session() as s:
        s.generate(PROMPT, **GREEDY | {"max_tokens": 1})
        again = s.generate(PROMPT, **GREEDY)
        assert again.usage.reused_tokens <= len(PROMPT) - 1
        assert again.tokens == expected(PROMPT)
        shorter = s.generate(PROMPT[:17], **GREEDY)
        assert shorter.usage.reused_tokens <= 16
        assert shorter.tokens == expected(PROMPT[:17])
        assert s.generate(PROMPT[:1], **GREEDY).usage.reused_tokens == 0


def test_a_branch_goes_back_to_the_last_turn_start_and_says_why(model, expected, caplog):
    state = model._free[-1]
    with model.session() as s:
        assert s._state is state
        state.read(PROMPT, turn_starts=[100, 260])
        branch = np.concatenate([PROMPT[:280], [7, 8, 9]]).astype(np.int32)
        assert PROMPT[280] != 7
        with caplog.at_level(logging.INFO, logger="strata"):
            answer = s.generate(branch, **GREEDY)
        assert answer.usage.reused_tokens == 260
        assert answer.tokens == expected(branch)
        said = [r.message for r in caplog.records if "prefix reuse" in r.message]
        assert len(said) == 1
        assert f"position 280: held token {PROMPT[280]}, prompt token 7" in said[0]
        assert "260" in said[0]
        # The branch wrote cells from 260 on: a third prompt along the first one can use 260, and no more.
        third = s.generate(PROMPT, **GREEDY)
        assert third.usage.reused_tokens == 260
        assert third.tokens == expected(PROMPT)
        # Going back before 100 kills what lies behind.
        s.generate(PROMPT[:50], **GREEDY)
        assert s.generate(PROMPT, **GREEDY).usage.reused_tokens == 0


def test_without_a_checkpoint_the_log_says_so(model, caplog):
    with model.session() as s, caplog.at_level(logging.INFO, logger="strata"):
        s.generate(PROMPT[:20], **GREEDY)
        s.generate(PROMPT[:10], **GREEDY)
        said = [r.message for r in caplog.records if "prefix reuse" in r.message]
        assert len(said) == 1
        assert "no checkpoint" in said[0]


def test_chat_reuses_the_conversation(tiny_path):
    with strata.load(tiny_path, context=1024, threads=2) as model:
        talk = [{"role": "user", "content": "Write a function that adds two numbers."}]
        first = model.chat(talk, max_tokens=8, thinking=False)
        talk += [first.message, {"role": "user", "content": "Now subtract them, please."}]
        second = model.chat(talk, max_tokens=8, thinking=False)
        start = second.usage.reused_tokens
        assert 0 < start < second.usage.prompt_tokens
        fresh = model.session if False else None
        assert fresh is None
        model._default.clear()
        model._default._state.ledger.__init__(model._default._state.state, 0)
        again = model.chat(talk, max_tokens=8, thinking=False)
        assert again.usage.reused_tokens == 0
        assert again.tokens == second.tokens


# ---- checkpoints


def test_checkpoint_and_restore(model, expected):
    with model.session() as s:
        s.generate(PROMPT[:100], **GREEDY)
        held = s.tokens
        point = s.checkpoint()
        s.generate(np.concatenate([held, PROMPT[:50]]), **GREEDY)
        s.restore(point)
        np.testing.assert_array_equal(s.tokens, held)
        prompt = np.concatenate([held, PROMPT[60:80]])
        answer = s.generate(prompt, **GREEDY)
        assert answer.usage.reused_tokens == len(held)
        assert answer.tokens == expected(prompt)
        assert point.alive
        s.generate(PROMPT[:30], **GREEDY)  # from the start: overwrites the checkpoint's cells
        assert not point.alive
        with pytest.raises(BadArgument, match="dead") as caught:
            s.restore(point)
        assert caught.value.advice


def test_checkpoints_belong_to_their_session(model):
    one, two = model.session(), model.session()
    one.generate(PROMPT[:20], **GREEDY)
    point = one.checkpoint()
    with pytest.raises(BadArgument, match="another session"):
        two.restore(point)
    two.close()
    one.close()
    for s in (model.session(), model.session()):  # one of them has the same memory
        with pytest.raises(BadArgument):
            s.restore(point)
        s.close()


# ---- number of sessions


def test_sessions_beyond_the_loaded_number(model):
    a, b = model.session(), model.session()
    with pytest.raises(DoesNotFit) as caught:
        model.session()
    assert "2 loaded" in str(caught.value.found)
    assert "sessions=3" in caught.value.advice
    a.close()
    c = model.session()
    assert len(c.tokens) == 0
    with pytest.raises(Closed):
        a.generate(PROMPT, **GREEDY)
    a.close()  # twice: nothing happens, c keeps its memory
    assert c._state not in model._free
    b.close()
    c.close()
    assert model.stats()["sessions_free"] == 2


def test_a_dropped_session_is_given_back(model):
    model.session().generate(PROMPT[:5], **GREEDY)
    gc.collect()
    assert len(model._free) == 2
    stream = model.session().stream(PROMPT[:5], **GREEDY)  # the stream alone keeps its session
    next(stream)
    gc.collect()
    assert len(model._free) == 1
    assert len(stream.run().tokens) == 12
    del stream
    gc.collect()
    assert len(model._free) == 2


# ---- two at a time


def test_interleaved_sessions_in_one_thread(model, expected):
    prompts = PROMPT[:40], PROMPT[100:377]
    with model.session() as one, model.session() as two:
        streams = [s.stream(p, **GREEDY) for s, p in zip((one, two), prompts, strict=True)]
        tokens = [[], []]
        for _ in range(12):
            for own, stream in zip(tokens, streams, strict=True):
                own.append(next(stream).token)
        for own, stream, prompt in zip(tokens, streams, prompts, strict=True):
            assert [c.token for c in stream] == [None]
            assert tuple(own) == expected(prompt) == stream.result.tokens
            assert stream.result.finish_reason == "length"


def test_sessions_in_two_threads(model, expected):
    prompts = PROMPT[:40], PROMPT[100:377]
    found = {}

    def work(i):
        with model.session() as s:
            found[i] = [s.generate(prompts[i], **GREEDY).tokens for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert found == {i: [expected(prompts[i])] * 3 for i in range(2)}


class Paused:
    """A progress function that stops the reading thread at its first call until `go` is set."""

    def __init__(self):
        self.reached, self.go, self.calls = threading.Event(), threading.Event(), []

    def __call__(self, done, total):
        self.calls.append((done, total))
        self.reached.set()
        assert self.go.wait(30)


def started(function, *args, **kwargs):
    """Run in a thread; returns (thread, outcome list): the result or the error."""
    outcome = []

    def work():
        try:
            outcome.append(function(*args, **kwargs))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, outcome


def test_a_second_call_on_a_session_is_busy_at_once_or_waits(model, expected):
    pause = Paused()
    with model.session() as s:
        first, outcome = started(s.generate, PROMPT, progress=pause, **GREEDY)
        assert pause.reached.wait(30)
        for call in (
            lambda: s.generate(PROMPT, **GREEDY), lambda: s.stream(PROMPT), lambda: s.logits(PROMPT), s.checkpoint, s.clear,
        ):  # fmt: skip
            with pytest.raises(Busy) as caught:
                call()
            assert "wait=True" in caught.value.advice
        second, waited = started(s.generate, PROMPT[:50], wait=True, **GREEDY)
        second.join(0.2)
        assert second.is_alive()
        pause.go.set()
        first.join(60)
        second.join(60)
        assert outcome[0].tokens == expected(PROMPT)
        assert waited[0].tokens == expected(PROMPT[:50])


def test_the_models_own_session_is_busy_at_once(path):
    """Also while another thread is in the middle of a prompt, so holds the backend."""
    with strata.load(path, context=CONTEXT, threads=1) as model:
        pause = Paused()
        thread, outcome = started(model.generate, PROMPT, progress=pause, **GREEDY)
        assert pause.reached.wait(30)
        with pytest.raises(Busy):
            model.generate(PROMPT)
        with pytest.raises(Busy):
            model.perplexity(PROMPT)
        pause.go.set()
        thread.join(60)
        assert len(outcome[0].tokens) == 12


def test_an_open_stream_keeps_its_session_busy(model):
    with model.session() as s, s.stream(PROMPT[:9], **GREEDY) as stream:
        next(stream)
        with pytest.raises(Busy):
            s.generate(PROMPT[:9], **GREEDY)


# ---- ending early


def test_a_stream_closed_midway(model, expected):
    with model.session() as s:
        stream = s.stream(PROMPT, **GREEDY)
        tokens = [next(stream).token for _ in range(5)]
        stream.close()
        assert tuple(tokens) == expected(PROMPT)[:5] == stream.result.tokens
        assert stream.result.finish_reason == "cancelled"
        assert list(stream) == []
        stream.close()
        assert s.generate(PROMPT, **GREEDY).tokens == expected(PROMPT)


def test_a_dropped_stream_frees_its_session(model, expected):
    with model.session() as s:
        for chunk in s.stream(PROMPT[:30], **GREEDY):
            assert chunk.token is not None
            break
        gc.collect()
        assert s.generate(PROMPT, **GREEDY).tokens == expected(PROMPT)


def test_closing_from_another_thread_cancels_between_pieces_of_a_prompt(model, expected):
    pause = Paused()
    with model.session() as s:
        stream = s.stream(PROMPT, progress=pause, **GREEDY)
        reader, outcome = started(list, stream)
        assert pause.reached.wait(30)
        closer, _ = started(stream.close)
        pause.go.set()
        closer.join(30)
        reader.join(30)
        assert outcome == [[]]
        assert len(pause.calls) == 1
        assert pause.calls[0] == (256, 299)
        assert len(s.tokens) == 256  # what was read stays
        answer = s.generate(PROMPT, **GREEDY)
        assert answer.usage.reused_tokens == 256
        assert answer.tokens == expected(PROMPT)


def test_closing_a_session_while_it_answers(model, expected):
    """The answer ends with Closed, and the memory goes to the next session only when the piece of work is over."""
    pause = Paused()
    s, other = model.session(), model.session()
    reader, outcome = started(s.generate, PROMPT, progress=pause, **GREEDY)
    assert pause.reached.wait(30)
    closer, _ = started(s.close)
    closer.join(0.2)
    assert model._free == []
    pause.go.set()
    closer.join(30)
    reader.join(30)
    assert isinstance(outcome[0], Closed)
    with model.session() as after:
        assert len(after.tokens) == 0
        assert after.generate(PROMPT, **GREEDY).tokens == expected(PROMPT)
    other.close()


def test_closing_a_session_with_an_open_stream(model, expected):
    s = model.session()
    stream = s.stream(PROMPT[:40], **GREEDY)
    next(stream)
    s.close()
    assert len(model._free) == 2
    with pytest.raises(Closed, match="while it answered"):
        next(stream)
    with model.session() as after:
        assert after.generate(PROMPT[:40], **GREEDY).tokens == expected(PROMPT[:40])
    assert stream.result.tokens == expected(PROMPT[:40])[:1]


def test_a_waiting_call_learns_that_its_session_was_closed(model):
    pause = Paused()
    s = model.session()
    first, _ = started(s.generate, PROMPT, progress=pause, **GREEDY)
    assert pause.reached.wait(30)
    second, outcome = started(s.generate, PROMPT, wait=True, **GREEDY)
    second.join(0.1)
    closer, _ = started(s.close)
    closer.join(0.1)
    pause.go.set()
    for t in (first, second, closer):
        t.join(30)
    assert isinstance(outcome[0], Closed)


def test_closing_the_model(path):
    """A prompt being read ends between pieces, open streams end with Closed, threads stop, calls raise Closed."""
    before = {t.name for t in threading.enumerate()}
    model = strata.load(path, context=CONTEXT, sessions=2, threads=2)
    s, pause = model.session(), Paused()
    stream = model.stream(PROMPT[:9], **GREEDY)
    next(stream)
    reader, outcome = started(s.generate, PROMPT, progress=pause, **GREEDY)
    assert pause.reached.wait(30)
    closer, _ = started(model.close)
    closer.join(0.1)
    pause.go.set()
    closer.join(30)
    reader.join(30)
    assert isinstance(outcome[0], Closed)
    assert len(pause.calls) == 1
    with pytest.raises(Closed):
        next(stream)
    assert {t.name for t in threading.enumerate()} <= before
    assert model.closed
    model.close()
    s.close()
    calls = (
        lambda: model.generate("a"), lambda: model.stream([1]), lambda: model.chat([{"role": "user", "content": "a"}]),
        model.session, lambda: model.logits([1]), lambda: model.perplexity([1, 2]), model.stats,
        lambda: s.generate("a"), s.checkpoint, s.clear, lambda: s.logits([1]),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(Closed) as caught:
            call()
        assert caught.value.advice


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupt_while_the_prompt_is_read(model, expected, after):
    def interrupt(done, total):
        if done > 256 * after:
            raise KeyboardInterrupt

    with model.session() as s:
        with pytest.raises(KeyboardInterrupt):
            s.generate(PROMPT, progress=interrupt, **GREEDY)
        assert s.generate(PROMPT, **GREEDY).tokens == expected(PROMPT)


@pytest.mark.parametrize("where", ["window", "head", "commit", "prefill", "half a commit"])
@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_anywhere_in_the_backend(model, expected, monkeypatch, where, late):
    """Before or after the backend did its work; the next answer is that of a fresh session either way."""
    backend = model._backend
    name = "commit" if where == "half a commit" else where
    real, calls = getattr(backend, name), []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == (1 if name == "prefill" else 3):
            if where == "half a commit":
                args[0].recurrent[: args[0].recurrent.size // 2] += 1
            elif late:
                real(*args)
            raise KeyboardInterrupt
        return real(*args)

    with model.session() as s:
        monkeypatch.setattr(backend, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            s.generate(PROMPT, **GREEDY)
        monkeypatch.setattr(backend, name, real)
        assert len(calls) == (1 if name == "prefill" else 3)
        assert s.generate(PROMPT, **GREEDY).tokens == expected(PROMPT)
        held = s.tokens
        longer = np.concatenate([held, PROMPT[:5]])
        answer = s.generate(longer, **GREEDY)
        assert answer.usage.reused_tokens == len(held)
        assert answer.tokens == expected(longer)
