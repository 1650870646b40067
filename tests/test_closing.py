"""Answers that end early: streams and sessions closed in the middle, also from another thread, and interrupts."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

import strata
from strata.base.errors import Closed
from tests.session_probe import CONTEXT, GREEDY, PROMPT, Expected, Paused, started, write_model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


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
    answers = Expected(path)
    yield answers
    answers.model.close()


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
        stream = s.stream(PROMPT, on_progress=pause, **GREEDY)
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
    reader, outcome = started(s.generate, PROMPT, on_progress=pause, **GREEDY)
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
    first, _ = started(s.generate, PROMPT, on_progress=pause, **GREEDY)
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
    reader, outcome = started(s.generate, PROMPT, on_progress=pause, **GREEDY)
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
            s.generate(PROMPT, on_progress=interrupt, **GREEDY)
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


def test_a_forgotten_model_is_collected(path):
    """Nobody closes it: its threads stop all the same, and its memory goes."""
    before = threading.active_count()
    model = strata.load(path, context=CONTEXT, sessions=2, threads=3)
    model.generate(PROMPT[:5], **GREEDY)
    stream = model.session().stream(PROMPT[:5], **GREEDY)
    next(stream)
    state = weakref.ref(model._backend)
    assert threading.active_count() == before + 2
    del model, stream
    gc.collect()
    assert state() is None
    assert threading.active_count() == before
