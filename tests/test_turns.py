"""Sessions take turns at the backend: also while one of them reads a long prompt."""

from __future__ import annotations

import time

import numpy as np
import pytest

import strata
from strata.base.errors import Closed
from tests.session_probe import CONTEXT, GREEDY, PROMPT, Expected, started, write_model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(path):
    answers = Expected(path)
    yield answers
    answers.model.close()


class Reading:
    """A progress function. Its first call starts `work` in a thread and waits until that waits for the backend, or has
    ended where it is free."""

    def __init__(self, model, work):
        self.model, self.work, self.done = model, work, []
        self.thread = self.outcome = None

    def __call__(self, done, total):
        self.done.append(done)
        if self.thread is None:
            self.thread, self.outcome = started(self.work)
            limit = time.monotonic() + 30
            while not self.model._waiting and self.thread.is_alive() and time.monotonic() < limit:
                time.sleep(0.001)
            assert self.model._waiting or self.outcome


@pytest.mark.parametrize("prefill", ["auto", "windows"])
def test_a_short_answer_comes_while_a_long_prompt_is_read(path, expected, prefill):
    short = PROMPT[:1]
    with strata.load(path, context=CONTEXT, sessions=2, threads=1, prefill=prefill) as model:
        a, b = model.session(), model.session()
        read_before = []

        def answer():
            with b.stream(short, **GREEDY) as stream:
                first = next(stream)
                read_before.append(reading.done[-1])
                return (first.token, *(chunk.token for chunk in stream if chunk.token is not None))

        reading = Reading(model, answer)
        result = a.generate(PROMPT, on_progress=reading, **GREEDY)
        reading.thread.join(60)
        assert read_before[0] < len(PROMPT) - 1, reading.done
        assert result.tokens == expected(PROMPT) and reading.outcome == [expected(short)]


@pytest.mark.parametrize("prefill", ["auto", "windows"])
def test_a_progress_function_may_use_another_session(path, expected, prefill):
    """Also from its own thread: what was read is kept by then, and the backend is free."""
    with strata.load(path, context=CONTEXT, sessions=2, threads=1, prefill=prefill) as model:
        a, b = model.session(), model.session()
        others = []

        def on_progress(done, total):
            others.append(b.generate(PROMPT[:1], **GREEDY).tokens)
            thread, outcome = started(b.generate, PROMPT[:1], **GREEDY)
            thread.join(30)
            others.extend(result.tokens for result in outcome)

        assert a.generate(PROMPT, on_progress=on_progress, **GREEDY).tokens == expected(PROMPT)
        assert len(others) > 2 and set(map(tuple, others)) == {tuple(expected(PROMPT[:1]))}


def test_scores_take_turns_too(path, expected):
    with strata.load(path, context=CONTEXT, sessions=2, threads=1) as model:
        a, b = model.session(), model.session()
        read_before, pieces = [], []

        def answer():
            tokens = b.generate(PROMPT[:1], **GREEDY | {"max_tokens": 1}).tokens
            read_before.append(pieces[-1])
            return tokens

        reading = Reading(model, answer)

        def sink(first, rows):
            pieces.append(first + len(rows))
            reading(first, len(PROMPT))

        kept = a.logits(PROMPT[:20])
        a.read_logits(PROMPT, sink, "windows")
        reading.thread.join(60)
        assert read_before[0] < len(PROMPT) and reading.outcome == [expected(PROMPT[:1])[:1]]
        assert np.array_equal(a.logits(PROMPT[:20]), kept)


def test_closing_the_model_ends_a_prompt_between_two_pieces(path):
    with strata.load(path, context=CONTEXT, sessions=1, threads=1, prefill="windows") as model:
        read = []

        def on_progress(done, total):
            read.append(done)
            if len(read) == 2:
                closing.append(started(model.close))
                limit = time.monotonic() + 30
                while not model.closed and time.monotonic() < limit:
                    time.sleep(0.001)

        closing = []
        with pytest.raises(Closed):
            model.generate(PROMPT, on_progress=on_progress, **GREEDY)
        closing[0][0].join(60)
        assert len(read) == 2
