"""Sessions: reuse of what they hold, checkpoints, their number, Busy, and several at a time."""

from __future__ import annotations

import gc
import logging
import threading

import numpy as np
import pytest

import strata
from strata.base.errors import BadArgument, Busy, Closed, DoesNotFit
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
    with strata.load(tiny_path, context=1024, threads=2, checkpoints=0) as model:
        again = model.chat(talk, max_tokens=8, thinking=False)
        assert again.usage.reused_tokens == 0
        assert again.tokens == second.tokens
        assert model.chat(talk, max_tokens=8, thinking=False).usage.reused_tokens == 0


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
    for call in (lambda: a.generate(PROMPT, **GREEDY), lambda: a.tokens):  # its memory is c's now
        with pytest.raises(Closed, match="found a closed session; needed an open one"):
            call()
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


def test_a_second_call_on_a_session_is_busy_at_once_or_waits(model, expected):
    pause = Paused()
    with model.session() as s:
        first, outcome = started(s.generate, PROMPT, on_progress=pause, **GREEDY)
        assert pause.reached.wait(30)
        for call in (
            lambda: s.generate(PROMPT, **GREEDY), lambda: s.stream(PROMPT), lambda: s.logits(PROMPT), s.checkpoint,
            s.clear,
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
        thread, outcome = started(model.generate, PROMPT, on_progress=pause, **GREEDY)
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
