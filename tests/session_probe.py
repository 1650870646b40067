"""What the tests of sessions share: a small model, the answers of a fresh one, and a way to stop in the middle."""

from __future__ import annotations

import threading

import numpy as np

import strata
from tests.tiny_models import TinyModel, small

CONTEXT = 800
PROMPT = np.random.default_rng(0).integers(0, 200, 300).astype(np.int32)
GREEDY = {"max_tokens": 12, "ignore_eos": True}


def write_model(folder):
    return TinyModel(small()).write(folder / "model.gguf")


class Expected:
    """Answers of a model that reads every prompt from an empty session on one thread: expected(prompt) -> tokens."""

    def __init__(self, path):
        self.model = strata.load(path, context=CONTEXT, threads=1, checkpoints=0)
        self.found = {}

    def __call__(self, prompt):
        key = tuple(prompt)
        if key not in self.found:
            with self.model.session() as session:
                self.found[key] = session.generate(prompt, **GREEDY).tokens
        return self.found[key]


class Paused:
    """A progress function or a sink of logits that stops the reading thread at its first call until `go` is set."""

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
