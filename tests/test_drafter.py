"""A user's drafter: what is taken, what switches it off, and the example of the documentation."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest

from strata.base.errors import BadArgument, StrataError
from strata.spec.drafter import NO_DRAFT, Draft, Drafter, DrafterGuard

VOCAB = 50
TOKENS = np.arange(5, dtype=np.int32)


class Answers:
    """Returns (or raises) what it is told, and counts calls."""

    def __init__(self, answer):
        self.answer, self.calls = answer, 0

    def propose(self, tokens, k):
        self.calls += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "tokens", "probabilities"),
    [
        ([1, 2], (1, 2), None), ((1, 2), (1, 2), None), (np.array([3, 49]), (3, 49), None), ([], (), None),
        (([1, 2], [0.5, 1]), (1, 2), (0.5, 1.0)), ((np.array([4]), np.array([0.25])), (4,), (0.25,)),
        (([7], None), (7,), None), (iter([5, 6]), (5, 6), None), (([], []), (), ()),
    ],
    ids=lambda value: "iterator" if hasattr(value, "__next__") else str(value),
)  # fmt: skip
def test_what_is_taken(answer, tokens, probabilities, caplog):
    guard = DrafterGuard(Answers(answer), VOCAB)
    draft = guard.propose(TOKENS, 3)
    assert draft == Draft(tokens, probabilities, "user") and guard.disabled is None and not caplog.records
    assert all(type(t) is int for t in draft.tokens)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([50], "vocabulary"), ([-1], "vocabulary"), ([1.0], "vocabulary"), ([True], "vocabulary"), ("ab", "vocabulary"),
        ([1, 2, 3, 4], "more tokens"), (range(10**12), "more tokens"), (([1], [0.5, 0.5]), "number of probabilities"),
        (([1], [1.5]), "out of range"), (([1], [float("nan")]), "out of range"), (([1], ["x"]), "ValueError"),
        (None, "TypeError"), (5, "TypeError"), (ZeroDivisionError("by me"), "ZeroDivisionError: by me"),
        (StrataError("own words"), "own words"),
    ],
    ids=str,
)  # fmt: skip
def test_what_switches_it_off(answer, said, caplog):
    guard = DrafterGuard(Answers(answer), VOCAB)
    with caplog.at_level(logging.WARNING, "strata"):
        assert [guard.propose(TOKENS, 3) for _ in range(3)] == [NO_DRAFT] * 3
    assert said in guard.disabled and guard.drafter.calls == 1
    assert len(caplog.records) == 1 and "Answers" in caplog.text and said in caplog.text


def test_tokens_are_read_only_and_interrupts_pass():
    class Writes:
        def propose(self, tokens, k):
            tokens[0] = 9

    kept = TOKENS.copy()
    guard = DrafterGuard(Writes(), VOCAB)
    assert guard.propose(kept, 3) == NO_DRAFT and "read-only" in guard.disabled
    assert (kept == TOKENS).all() and kept.flags.writeable

    class Interrupts:
        def propose(self, tokens, k):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DrafterGuard(Interrupts(), VOCAB).propose(TOKENS, 3)


def test_no_room_asks_nothing_and_objects_are_checked():
    guard = DrafterGuard(Answers([1]), VOCAB)
    assert guard.propose(TOKENS, 0) == NO_DRAFT and guard.drafter.calls == 0
    with pytest.raises(BadArgument, match="propose"):
        DrafterGuard(object(), VOCAB)


def test_the_documented_example():
    text = (Path(__file__).parent.parent / "docs" / "drafting.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    drafter = names["Bigrams"]()
    assert isinstance(drafter, Drafter)
    guard = DrafterGuard(drafter, VOCAB)
    history = np.array([1, 2, 3, 1, 2, 4, 1, 2, 3, 1], np.int32)
    for n in range(1, len(history) + 1):  # told bit by bit, it knows what it knows when told at once
        draft = guard.propose(history[:n], 3)
    assert draft == guard.propose(history, 3) == DrafterGuard(names["Bigrams"](), VOCAB).propose(history, 3)
    assert draft.tokens == (2, 3, 1) and draft.probabilities == (1.0, 2 / 3, 1.0)
    assert guard.propose(history[:2], 3).tokens == () and guard.disabled is None
