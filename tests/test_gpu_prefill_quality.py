"""What reading by chunks changes on a GPU: logits of held-out text, by chunks and by windows of the same model."""

from __future__ import annotations

import numpy as np
import pytest

import strata
from strata.planner import chunks
from strata.runtime.generate import Cancelled

pytestmark = pytest.mark.gpu
CONTEXT = 32768
TOKENS = 32512
"""Whole cells, so that all rows are chunks."""


@pytest.fixture(scope="module", params=["IQ3_XXS", "Q8_0"])
def model(request, tiny_path):
    path = tiny_path
    if request.param != "IQ3_XXS":
        path = request.getfixturevalue("test_models_dir") / tiny_path.name.replace("IQ3_XXS", request.param)
    with strata.load(path, context=CONTEXT, device="cuda") as loaded:
        assert loaded.plan.prefill_rows >= 256
        yield loaded


class Compared:
    """Sums over rows: KL of the chunks' distribution from the windows', equal argmax, nats of the next token."""

    def __init__(self, tokens: np.ndarray):
        self.tokens, self.rows, self.kl, self.same = tokens, 0, 0.0, 0
        self.nats = np.zeros(2)

    def add(self, first: int, windows: np.ndarray, chunks: np.ndarray) -> None:
        logs = [a - np.log(np.exp(a).sum(1, keepdims=True)) for a in self._centred(windows, chunks)]
        self.kl += float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())
        self.same += int((windows.argmax(1) == chunks.argmax(1)).sum())
        self.rows += len(windows)
        following = self.tokens[first + 1 : first + 1 + len(windows)]
        for i, log in enumerate(logs):
            self.nats[i] -= float(log[np.arange(len(following)), following].sum())

    @staticmethod
    def _centred(*logits: np.ndarray) -> list[np.ndarray]:
        return [a.astype(np.float64) - a.max(1, keepdims=True).astype(np.float64) for a in logits]

    def check(self, what: str) -> None:
        kl, same = self.kl / self.rows, self.same / self.rows
        perplexity = np.exp(self.nats / (len(self.tokens) - 1))
        change = perplexity[1] / perplexity[0] - 1
        print(f"{what}: KL {kl:.5f}, same argmax {same:.4f}, perplexity {perplexity[0]:.4f} to {perplexity[1]:.4f}")
        assert kl <= 0.02 and same >= 0.97 and abs(change) <= 0.003


@pytest.mark.parametrize(("kind", "n"), [("code", 4096), ("doc", 4096), ("chat", 4096), ("code", TOKENS)])
def test_chunks_read_like_windows(model, val, kind, n):
    tokens = val[kind][:n].astype(np.int32)
    windows = model.logits(tokens, prefill="windows")
    compared = Compared(tokens)

    def sink(first: int, rows: np.ndarray) -> None:
        compared.add(first, windows[first : first + len(rows)], rows)

    model._default.read_logits(tokens, sink, "auto")
    compared.check(f"{kind}, {n} tokens")


def test_any_cut_on_the_grid_gives_the_same_bits(model, val):
    tokens = val["code"][:TOKENS].astype(np.int32)
    state, backend = model._default._state, model._backend
    digests = []
    for rows in (backend.chunk_rows, 256, 1024):
        with model.turn():
            state.clear()
            for first in range(0, len(tokens), rows):
                state.prefill(tokens[first : first + rows])
            digests.append(state.state.digest())
    assert len(set(digests)) == 1


def test_an_answer_after_a_long_prompt(model, val):
    """Chunks, then windows for what fills no cell, then decode."""
    prompt = val["code"][:9000].astype(np.int32)
    by_chunks = model.generate(prompt, max_tokens=32)
    assert len(by_chunks.tokens) == 32 and by_chunks.tokens == model.generate(prompt, max_tokens=32).tokens


@pytest.mark.parametrize(("slots", "n", "context"), [(None, TOKENS, CONTEXT), (240, 5120, 6144)])
def test_a_cancel_at_every_chunk(tiny_path, val, monkeypatch, slots, n, context):
    """Each of them leaves what was read until then, and the rest reads as if nothing had happened; with buffers of
    their own, and in memory of expert slots. Those of so small a model have no room for chunks of a long context."""
    monkeypatch.setattr(chunks, "KEPT_SLOTS", 0)
    tokens = val["code"][:n].astype(np.int32)
    with strata.load(tiny_path, context=context, device="cuda", slots=slots) as model:
        assert any(line.kind == "lent" for line in model.plan.lines) == (slots is not None)
        session, seen = model._default._state, []
        answer = model.generate(tokens[:300], max_tokens=16).tokens

        def read(until: int | None = None, after=None) -> None:
            left = until

            def check() -> None:
                nonlocal left
                if left is not None:
                    left -= 1
                    if left < 0:
                        raise Cancelled("enough")

            with model.turn():
                session.read(tokens, after=after, check=check)

        with model.turn():
            session.clear()
        seen.append((0, session.state.digest()))
        read(after=lambda piece: seen.append((session.rows, session.state.digest())))
        assert len(seen) >= 3
        for k in range(len(seen) - 1):
            with model.turn():
                session.clear()
            with pytest.raises(Cancelled):
                read(until=k)
            assert (session.rows, session.state.digest()) == seen[k]
            read()
            assert (session.rows, session.state.digest()) == seen[-1]
        assert model.generate(tokens[:300], max_tokens=16).tokens == answer
