"""Stop strings over text and over tokens; reasoning and answer told apart."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument
from strata.pack.gguf_file import GgufFile
from strata.text import StopStrings, TextStop, ThinkingSplitter, Tokenizer, opens_thinking, split_thinking

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples/models/tiny-flash-next/tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_metadata(GgufFile(MODEL).metadata)


def cut(text, places):
    """`text` in pieces, cut at the given places."""
    bounds = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


CUTS = st.lists(st.integers(0, 200), max_size=12)


def naive_stop(text, stops):
    """(text before the stop string that is complete first, that string), by growing prefixes; else (text, None)."""
    for end in range(len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None, max_examples=300)
@given(
    text=st.text("abcé", max_size=40),
    stops=st.lists(st.text("abcé", min_size=1, max_size=5), max_size=3),
    cuts=CUTS,
)
def test_stop_strings_equal_a_naive_search_at_any_split(text, stops, cuts):
    stopper, shown, stopped = StopStrings(stops), "", False
    wanted, matched = naive_stop(text, stops)
    for piece in cut(text, cuts):
        emit, stopped = stopper.push(piece)
        shown += emit
        assert wanted.startswith(shown)
    shown += stopper.finish()
    assert (shown, stopper.matched, stopped) == (wanted, matched, matched is not None)


def test_the_stop_string_complete_first_wins():
    for pieces in (["xabcd"], list("xabcd"), ["xab", "cd"]):
        stopper = StopStrings(["abcd", "bc", "c"])
        assert "".join(stopper.push(piece)[0] for piece in pieces) == "xa"
        assert stopper.matched == "bc"


def test_only_text_that_may_begin_a_stop_string_is_held():
    stopper = StopStrings(["\nUser:"])
    assert stopper.push("Hello") == ("Hello", False)
    assert stopper.push(" you\nUs") == (" you", False)
    assert stopper.push("ually\n") == ("\nUsually", False)
    assert stopper.push("User: x") == ("", True)
    assert stopper.push("more") == ("", True) and stopper.finish() == ""
    assert StopStrings("one").push("one") == ("", True)


@pytest.mark.parametrize(("stop", "message"), [([""], r"stop\[0\] is empty"), (["a", 3], r"stop\[1\] is not a string"),
                                               (7, "stop is not a string; found 7"), (b"a", "stop is not a string"),
                                               ("a\udcff", r"stop is not valid Unicode.*U\+DCFF at character 1")])
def test_bad_stop_strings_are_refused(stop, message):
    with pytest.raises(BadArgument, match=message):
        StopStrings(stop)


@settings(deadline=None, max_examples=150)
@given(
    text=st.lists(st.sampled_from(["def ", "end", "\n", "é", "😀", "你好", "return", " x", "User:"]), max_size=25).map(
        "".join
    ),
    stops=st.lists(st.sampled_from(["\nUser", "😀你", "好r", "é", "n x", "turn"]), max_size=2),
    rounds=CUTS,
)
def test_text_stop_keeps_the_tokens_up_to_the_stop(tokenizer, text, stops, rounds):
    ids = tokenizer.encode(text, special=False).tolist()
    wanted, matched = naive_stop(text, stops)
    stop, shown, kept = TextStop(tokenizer, stops, stop_ids=()), "", 0
    for window in cut(ids, rounds):
        n_keep = stop(window)
        shown += stop.take()
        kept += n_keep
        if n_keep < len(window) or stop.stopped:
            break
    shown += stop.finish()
    assert shown == wanted and stop.n_tokens == kept
    if matched is None:
        assert kept == len(ids) and stop.finished_by is None
    else:
        assert (stop.finished_by, stop.stopped_on) == ("stop_string", matched)
        # The last kept token is the one that completed the stop string.
        assert matched in tokenizer.decode(ids[:kept])
        assert matched not in tokenizer.decode(ids[: kept - 1])
        assert stop([1, 2]) == 0


def test_text_stop_ends_at_a_stop_id(tokenizer):
    ids = [*tokenizer.encode("Hello").tolist(), 4084, *tokenizer.encode("more").tolist()]
    stop = TextStop(tokenizer, ["lo!"])
    n_keep = stop(ids)
    assert ids[n_keep - 1] == 4084
    assert (stop.finish(), stop.finished_by, stop.stopped_on) == ("Hello", "stop_id", 4084)
    assert stop.finish() == ""


def test_text_stop_shows_half_a_character_before_a_stop_id(tokenizer):
    stop = TextStop(tokenizer)
    first = tokenizer.encode("😀").tolist()[0]
    assert stop([first, 4082, first]) == 2
    assert stop.finish() == "\ufffd"


def test_text_stop_reports_a_stop_string_that_ends_with_the_text(tokenizer):
    """U+FFFD appears only when the stop id shows that the character stays incomplete."""
    stop = TextStop(tokenizer, ["a\ufffd"])
    tokens = [tokenizer.token_id("a"), tokenizer.encode("😀").tolist()[0], 4084, 5]
    assert stop(tokens) == 3
    assert (stop.finished_by, stop.finish()) == ("stop_string", "")


# Thinking

PARTS = ["<think>", "</think>", "<thi", "nk>", "</", "\n", " ", "a", "ok"]


@pytest.mark.parametrize(
    ("text", "started", "wanted"),
    [
        ("plan\n</think>\n\nanswer\n", True, ("plan", "answer\n")),
        ("\n</think>\n\nanswer", True, ("", "answer")),
        ("<think>\nplan\n\nmore\n</think>\n\nanswer", False, ("plan\n\nmore", "answer")),
        (" \n<think>plan</think>answer", False, ("plan", "answer")),
        ("<think>\nplan</think>x", True, ("plan", "x")),
        ("never closed\n", True, ("never closed\n", "")),
        ("cut at </thin", True, ("cut at </thin", "")),
        ("an answer with <think> in it</think>", False, ("", "an answer with <think> in it</think>")),
        ("a</think>b</think><think>c", True, ("a", "b</think><think>c")),
        ("  verbatim\n", False, ("", "  verbatim\n")),
        ("<thin", False, ("", "<thin")),
        ("\n", True, ("", "")),
        ("", False, ("", "")),
    ],
)
def test_reasoning_and_answer(text, started, wanted):
    assert split_thinking(text, started) == wanted


@settings(deadline=None, max_examples=300)
@given(text=st.lists(st.sampled_from(PARTS), max_size=16).map("".join), started=st.booleans(), cuts=CUTS)
def test_any_split_gives_the_same_reasoning_and_answer(text, started, cuts):
    splitter = ThinkingSplitter(started)
    texts = {"reasoning": "", "content": ""}
    order = []
    for pieces in [*map(splitter.push, cut(text, cuts)), splitter.finish()]:
        for kind, piece in pieces:
            assert piece
            texts[kind] += piece
            order.append(kind)
    assert (texts["reasoning"], texts["content"]) == split_thinking(text, started)
    assert order == sorted(order, reverse=True)


def test_thinking_says_where_the_text_is():
    splitter = ThinkingSplitter(True)
    assert splitter.thinking
    assert splitter.push("plan</thi") == [("reasoning", "plan")]
    assert splitter.push("nk>") == [] and not splitter.thinking
    assert splitter.push("\nyes") == [("content", "yes")]


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [("assistant\n<think>\n", True), ("<think>\n\n</think>\n\n", False), ("assistant\n", False), ("", False)],
)
def test_open_block_at_the_end_of_a_prompt(prompt, wanted):
    assert opens_thinking(prompt) is wanted
