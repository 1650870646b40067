"""The draft layer on the CPU backend: golden drafts, checkpoints, and long stretches without drafts."""

from __future__ import annotations

import numpy as np
import pytest

import strata
from strata.base.geometry import WINDOW_ROWS
from strata.spec.mtp import QUEUE_ROWS
from tests.draft_probe import N_DRAFTS, forced_drafts, new_session
from tests.reference.mtp import MtpReference

PROMPTS = ("code", "chat_no_think", "code_long")
EQUAL_SHARE = 0.95
"""Of golden drafts, made in float64, that the quantised product must make too."""


@pytest.fixture(scope="module")
def model(tiny_path, mtp_path):
    with strata.load(tiny_path, context=1024, kv="f16", draft=mtp_path, checkpoints=0) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def text(golden) -> np.ndarray:
    """A prompt and its greedy answer."""
    return np.concatenate([golden["IQ3_XXS.code.tokens"], golden["IQ3_XXS.code.greedy"]]).astype(np.int32)


def step(session, tokens) -> None:
    """Commit tokens as one window, as a round of decoding does."""
    part = np.asarray(tokens, np.int32)
    session.window(part)
    session.commit(part, len(part))


def drafts(session, token: int, k: int = N_DRAFTS) -> tuple[list[int], list[float]]:
    return session.mtp.propose(session.state, int(token), k)


def test_drafts_are_the_golden_ones(model, golden):
    equal = total = 0
    for prompt in PROMPTS:
        key = f"IQ3_XXS.{prompt}."
        made = forced_drafts(model, golden[key + "tokens"], golden[key + "greedy"])
        wanted = golden[key + "draft"]
        assert made.tokens.shape == wanted.shape
        error = np.abs(made.probabilities - golden[key + "draft_prob"])[made.tokens == wanted]
        print(f"{prompt}: {made.agreement(wanted)} of {wanted.size}, probability off by {np.median(error):.4f}")
        assert np.median(error) < 0.02
        equal, total = equal + made.agreement(wanted), total + wanted.size
    print(f"{equal} of {total}")
    assert equal >= EQUAL_SHARE * total


def test_drafts_do_not_depend_on_how_the_text_was_read(model, text):
    made = []
    for width in (1, 3, 8):
        session = new_session(model)
        for at in range(0, 48, width):
            step(session, text[at : min(at + width, 48)])
        made.append(drafts(session, text[48]))
    session = new_session(model)
    session.read(text[:48])
    made.append(drafts(session, text[48]))
    assert all(m == made[0] for m in made)


def test_rejected_drafts_leave_no_trace(model, text):
    clean, busy = new_session(model), new_session(model)
    for session in (clean, busy):
        session.read(text[:40])
    for at in range(40, 56):
        wrong, _ = drafts(busy, text[at], 7)
        window = np.array([text[at], *wrong], np.int32)
        busy.window(window)
        busy.commit(window, 1)
        step(clean, text[at : at + 1])
    assert busy.state.digest() == clean.state.digest()
    assert drafts(busy, text[56], 7) == drafts(clean, text[56], 7)


def test_drafting_is_only_on_request(model, text):
    session = new_session(model)
    assert drafts(session, text[0]) == ([], [])
    session.read(text[:10])
    assert drafts(session, text[10], 0) == ([], [])
    asked = []
    tokens, probabilities = session.mtp.propose(
        session.state, int(text[10]), 5, lambda p: asked.append(len(p)) or len(p) < 2
    )
    assert len(tokens) == len(probabilities) == 2 and asked == [1, 2]
    assert drafts(session, text[10], 5)[0][:2] == tokens


# ---- checkpoints


def test_a_checkpoint_brings_the_drafter_back(model, text):
    session = new_session(model)
    session.read(text[:20])
    for at in range(20, 30):
        step(session, text[at : at + 1])
    checkpoint = session.checkpoint()
    wanted = drafts(session, text[30])
    for at in range(30, 60):  # the drafts and these rows go over the drafter's cells from 29 on
        step(session, text[at : at + 1])
    assert drafts(session, text[60]) != wanted
    session.restore(checkpoint)
    assert session.rows == 30 and drafts(session, text[30]) == wanted
    step(session, text[30:38])
    fresh = new_session(model)
    fresh.read(text[:38], windows_only=True)
    assert drafts(session, text[38]) == drafts(fresh, text[38])


def test_a_checkpoint_of_an_empty_session(model, text):
    session = new_session(model)
    empty = session.checkpoint()
    session.read(text[:20])
    session.restore(empty)
    assert session.rows == 0 and drafts(session, text[0]) == ([], [])
    session.read(text[:20])
    fresh = new_session(model)
    fresh.read(text[:20])
    assert drafts(session, text[20]) == drafts(fresh, text[20])


def test_rewinding_to_an_automatic_checkpoint(model, text):
    session = new_session(model, checkpoints=4)
    session.read(text[:40], turn_starts=(24,))
    for at in range(40, 50):
        step(session, text[at : at + 1])
    other = np.concatenate([text[:28], text[60:72]])
    kept = session.rewind(other)
    assert 0 < kept <= 28, "no checkpoint was used"
    session.read(other)
    fresh = new_session(model)
    fresh.read(other)
    assert drafts(session, text[5]) == drafts(fresh, text[5])


def test_rewinding_without_a_checkpoint_starts_over(model, text):
    session = new_session(model)
    session.read(text[:40])
    assert session.rewind(text[50:60]) == 0
    session.read(text[50:60])
    fresh = new_session(model)
    fresh.read(text[50:60])
    assert drafts(session, text[60]) == drafts(fresh, text[60])


# ---- long stretches without drafts


@pytest.mark.parametrize("rows", [QUEUE_ROWS, QUEUE_ROWS + 1, QUEUE_ROWS + 18])
def test_after_a_stretch_without_drafts_the_last_rows_count(model, text, rows):
    start = 16
    session, end = new_session(model), start + rows
    session.read(text[:start])
    for at in range(start, end, 4):
        step(session, text[at : min(at + 4, end)])
    made = drafts(session, text[end])
    # A session that knows every cell; it attends from the same first cell.
    full = new_session(model)
    full.read(text[:end], windows_only=True)
    full.mtp._first = session.mtp._first
    assert made == drafts(full, text[end])
    # Cells start - 1 .. end - 2 were offered to the queue: all are kept while they fit, else whole windows are dropped.
    dropped = session.mtp._first
    assert dropped == 0 if rows <= QUEUE_ROWS else end - 1 - QUEUE_ROWS <= dropped < end - 1 - QUEUE_ROWS + WINDOW_ROWS


def test_drafts_after_an_overflow_are_those_of_the_cells_that_are_left(model, reference, mtp_path, text):
    session, end, text = new_session(model), 80, text[:91]
    session.read(text[:8])
    for at in range(8, end, 8):
        step(session, text[at : at + 8])
    made = []
    for at in range(end, len(text)):
        made.append(drafts(session, text[at])[0])
        step(session, text[at : at + 1])
    first = session.mtp._first
    assert first > 8, "the queue never overflowed"
    # Rotary angles count only as differences, so the reference may start at the first cell that is left.
    streams = reference.forward(text[:-1]).streams
    wanted, _ = MtpReference(mtp_path, reference).drafts(streams[first:], text[1:][first:], end - 1 - first, N_DRAFTS)
    equal = int((np.array(made) == wanted).sum())
    print(f"{equal} of {wanted.size} as the reference makes them from cell {first} on")
    assert equal >= EQUAL_SHARE * wanted.size
