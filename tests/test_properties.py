"""What must hold for any prompt and any schedule of windows: bits do not depend on how rows were read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strata
from strata.base.errors import BadArgument
from strata.base.window import HeadRequest
from strata.runtime.session import SessionState
from tests.tiny_models import TinyModel, ngram, small

CONTEXT = 640
FULL = HeadRequest(full=True)
MODELS = {
    "f16": (TinyModel(small(L=5, kinds=("gdn", "gdn", "gdn", "qsa", "gdn"))), "f16", 2),
    "int8, mixed types": (
        TinyModel(small(hc_rank=32), {"*": "Q8_0", "*_exps*": "Q4_0", "*down*": "BF16", "output*": "Q5_0"}), "int8", 2),
    "one thread, long blocks": (
        TinyModel(small(C=3, block_cells=8, budget_cells=24, gdn_conv_taps=5, ngram=ngram(2, 1, 16, 5))), "int8", 1),
    "three threads, dense": (
        TinyModel(small(L=3, kinds=("gdn", "qsa", "gdn"), block_cells=0, budget_cells=0, ngram=ngram(0, 3, 8, 2)),
                  keys={"qwen4exp.full_attention_interval": None}), "f16", 3),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    made, kv, threads = MODELS[request.param]
    path = made.write(tmp_path_factory.mktemp("model") / "model.gguf")
    with strata.load(path, context=CONTEXT, kv=kv, threads=threads) as loaded:
        yield loaded


def tokens_of(seed: int, n: int) -> np.ndarray:
    """Tokens with repetitions, and the n-gram reset token among them."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(n) < 0.1, 256, rng.integers(0, 40, n)).astype(np.int32)


def fresh(model, tokens=(), **how) -> SessionState:
    session = SessionState(model._backend, model.context, checkpoints=3)
    session.read(np.asarray(tokens, np.int32), **how)
    return session


def logits(session: SessionState, window: np.ndarray) -> np.ndarray:
    """(T, V) logits of a window that is not committed."""
    session.window(window)
    return session.backend.head(0, len(window), FULL).full.copy()


SHORT = settings(max_examples=8)


@SHORT
@given(data=st.data())
def test_window_equals_single_rows(model, data):
    n = data.draw(st.sampled_from((0, 1, 2, 3, 7, 13, 15, 16, 64, 250, 256, 300)), label="rows before")
    T = data.draw(st.integers(1, 8), label="T")
    keep = data.draw(st.integers(0, T), label="n_keep")
    tokens = tokens_of(data.draw(st.integers(0, 99), label="seed"), n + T)
    whole, single = fresh(model, tokens[:n]), fresh(model, tokens[:n])
    together = logits(whole, tokens[n:])
    before = whole.state.digest()
    whole.commit(tokens[n:], keep)
    for t in range(T):
        if t == keep:
            assert single.state.digest() == whole.state.digest()
        row = tokens[n + t : n + t + 1]
        np.testing.assert_array_equal(logits(single, row)[0], together[t], err_msg=f"row {t}")
        single.commit(row, 1)
    if keep == T:
        assert single.state.digest() == whole.state.digest()
    if keep == 0:
        assert before == whole.state.digest()


@SHORT
@given(data=st.data())
def test_every_split_of_a_prompt_reads_the_same(model, data):
    n = data.draw(st.sampled_from((255, 256, 257, 400, 512, 520, 639)), label="tokens")
    tokens = tokens_of(n, n)
    marks = data.draw(st.lists(st.integers(1, n), max_size=4), label="turn starts")
    stops = data.draw(st.lists(st.sampled_from((256, 512)) | st.integers(1, n), max_size=3), label="calls end at")
    once = fresh(model, tokens)
    split = fresh(model)
    for stop in sorted(s for s in stops if s <= n):
        split.read(tokens[:stop], turn_starts=marks)
    split.read(tokens, turn_starts=marks, windows_only=data.draw(st.booleans(), label="windows only"))
    assert split.state.digest() == once.state.digest()
    np.testing.assert_array_equal(logits(split, tokens[:1]), logits(once, tokens[:1]))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("try"), st.integers(1, 8), st.just(0)),
        st.tuples(st.just("keep"), st.integers(1, 8), st.integers(1, 8)),
        st.tuples(st.just("read"), st.integers(1, 300), st.just(0)),
        st.tuples(st.just("checkpoint"), st.just(0), st.just(0)),
        st.tuples(st.just("restore"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("prompt"), st.integers(0, 320), st.integers(1, 20)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    min_size=2,
    max_size=9,
)


@settings(max_examples=10)
@given(actions=ACTIONS, seed=st.integers(0, 99))
def test_any_history_leaves_the_state_of_its_tokens(model, actions, seed):
    """Windows tried and dropped, checkpoints, reuse: afterwards the state is what reading its tokens afresh gives."""
    rng = np.random.default_rng(seed)
    session, taken = fresh(model), []
    for kind, a, b in actions:
        rows, held = session.rows, session.tokens.copy()
        some = rng.integers(0, 40, 320).astype(np.int32)
        if kind in ("try", "keep") and rows + 8 <= CONTEXT:
            session.window(some[:a])
            if kind == "keep":
                session.commit(some[:a], min(a, b))
        elif kind == "read" and rows + a <= CONTEXT:
            session.read(np.concatenate([held, some[:a]]), turn_starts=[rows + a // 2])
        elif kind == "checkpoint":
            taken.append(session.checkpoint())
        elif kind == "restore" and taken:
            chosen = taken[a % len(taken)]
            if chosen.alive:
                session.restore(chosen)
                np.testing.assert_array_equal(session.tokens, chosen.tokens)
            else:
                with pytest.raises(BadArgument, match="dead"):
                    session.restore(chosen)
        elif kind == "prompt":
            prompt = np.concatenate([held[:a], some[:b]])
            reused = session.rewind(prompt)
            assert reused == session.rows <= len(prompt) - 1
            np.testing.assert_array_equal(session.tokens, prompt[:reused])
            session.read(prompt[:-1])
        elif kind == "clear":
            session.clear()
        for c in taken:  # exactly those whose cells are still theirs are alive
            if c.alive and c.rows <= session.rows:
                np.testing.assert_array_equal(c.tokens, session.tokens[: c.rows])
    again = fresh(model, session.tokens.copy())
    assert session.state.digest() == again.state.digest()
    if session.rows < CONTEXT:
        row = np.array([7], np.int32)
        np.testing.assert_array_equal(logits(session, row), logits(again, row))


def test_a_dropped_window_leaves_no_trace(model):
    """Several wrong windows at a place where they complete blocks and wrap the ring of raw keys."""
    tokens = tokens_of(3, 61)
    session, clean = fresh(model, tokens[:45]), fresh(model, tokens[:45])
    for wrong in range(6):
        before = session.state.digest()
        session.window(tokens_of(100 + wrong, 8))
        assert session.state.digest() == before
    np.testing.assert_array_equal(logits(session, tokens[45:53]), logits(clean, tokens[45:53]))
    for s in (session, clean):
        s.window(tokens[45:53])
        s.commit(tokens[45:53], 8)
    assert session.state.digest() == clean.state.digest()


def test_other_tokens_give_other_bits(model):
    """The digest and the logits do see a change: of the oldest token, and of the order of the last two."""
    tokens = tokens_of(5, 40)
    first = fresh(model, tokens)
    for at, value in ((0, 77), (39, 78)):
        changed = tokens.copy()
        changed[at] = value
        other = fresh(model, changed)
        assert other.state.digest() != first.state.digest()
        assert not np.array_equal(logits(other, tokens[:1]), logits(first, tokens[:1]))


def test_two_states_do_not_touch_each_other(model):
    a, b = tokens_of(1, 300), tokens_of(2, 300)
    first, second = fresh(model), fresh(model)
    for at in range(0, 48, 6):  # windows of both in turn
        first.window(a[at : at + 6])
        first.commit(a[at : at + 6], 6)
        second.window(b[at : at + 6])
        second.commit(b[at : at + 6], 6)
    first.read(a)
    second.read(b)
    assert first.state.digest() == fresh(model, a).state.digest()
    assert second.state.digest() == fresh(model, b).state.digest()


def test_the_last_cell_of_the_context(model):
    tokens = tokens_of(8, CONTEXT)
    session = fresh(model, tokens[:-1])
    assert np.isfinite(logits(session, tokens[-1:])).all()
    session.commit(tokens[-1:], 1)
    assert session.rows == CONTEXT
    assert session.state.digest() == fresh(model, tokens, windows_only=True).state.digest()


def test_threads_do_not_change_bits(tiny_path, val):
    tokens = val["code"][:270].astype(np.int32)
    seen = []
    for threads in (1, 2, 3):
        with strata.load(tiny_path, context=512, kv="int8", threads=threads) as model:
            seen.append(model.logits(tokens[:40]))
            session = fresh(model, tokens)
            seen[-1] = np.concatenate([seen[-1], logits(session, tokens[:8])])
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[0], seen[2])


def test_windows_and_prefill_of_the_bundled_model(tiny_path, val):
    """300 tokens, beyond the attention budget: one read, windows of 8, single rows; all bits equal."""
    tokens = val["doc"][:300].astype(np.int32)
    with strata.load(tiny_path, context=512, kv="f16") as model:
        auto = model.logits(tokens)
        np.testing.assert_array_equal(auto, model.logits(tokens, prefill="windows"))
        session = fresh(model, tokens[:280])
        for t in range(280, 300):
            np.testing.assert_array_equal(logits(session, tokens[t : t + 1])[0], auto[t])
            session.commit(tokens[t : t + 1], 1)
