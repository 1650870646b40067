"""Tool calls: types, odd values, broken forms; any split of the text gives the same events."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument
from strata.text import ToolCallParser, parse
from strata.text.tool_calls import collect


def tool(name, properties, **more):
    schema = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [
    tool(
        "f",
        {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
            "list": {"type": "array"},
            "map": {"type": "object"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"type": ["integer", "string"]},
            "colour": {"$ref": "#/$defs/Colour"},
            "level": {"enum": [1, 2]},
            "any": {},
        },
        **{"$defs": {"Colour": {"enum": ["red", "1"]}}},
    )
]


def written(name, *parameters):
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def new_id(index):
    return f"call_{index}"


def arguments(text, tools=TOOLS):
    content, calls = parse(text, tools, new_id)
    assert content is None
    return [json.loads(call["function"]["arguments"]) for call in calls]


def test_openai_shape():
    text = "Let me look.\n\n" + written("f", ("text", "a"), ("count", "3")) + "\n" + written("g") + "\n"
    content, calls = parse(text, TOOLS, new_id)
    assert content == "Let me look."
    assert calls == [
        {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"text": "a", "count": 3}'}},
        {"id": "call_1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    ids = [call["id"] for call in parse(text)[1]]
    assert len(set(ids)) == 2 and all(i.startswith("call_") for i in ids)


def test_deltas_of_a_stream():
    parser = ToolCallParser(TOOLS, new_id)
    text = "Hm" + written("f", ("text", 'a"b'), ("flag", "true"))
    deltas = [event.delta() for event in parser.push(text) + parser.finish()]
    assert deltas == [
        {"content": "Hm"},
        {"tool_calls": [{"index": 0, "id": "call_0", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"text": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"a\\"b"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ', "flag": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "true"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        None,
    ]


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("text", "12", "12"),
        ("text", "", ""),
        ("text", "\n two\nlines \n", "\n two\nlines \n"),
        ("text", '"quoted" \\ \t\x00\u2028', '"quoted" \\ \t\x00\u2028'),
        ("text", "<b>bold</b> </parameter> <parameter=x", "<b>bold</b> </parameter> <parameter=x"),
        ("text", "</parameter>\nbut then more", "</parameter>\nbut then more"),
        ("text", "<tool_call> </tool_call> </function>", "<tool_call> </tool_call> </function>"),
        ("count", " 12 ", 12),
        ("count", "twelve", "twelve"),
        ("count", "1.5", "1.5"),
        ("ratio", "12", 12),
        ("ratio", "-1.5e3", -1500.0),
        ("ratio", "NaN", "NaN"),
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", "yes", "yes"),
        ("list", '[1, "a", {"b": null}]', [1, "a", {"b": None}]),
        ("list", "[1,", "[1,"),
        ("map", '{\n  "a": 1\n}', {"a": 1}),
        ("map", "[1]", "[1]"),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "7", "7"),
        ("maybe", '"x"', '"x"'),
        ("either", "7", 7),
        ("either", "x", "x"),
        ("colour", "1", "1"),
        ("level", "2", 2),
        # no type given
        ("any", "12", 12),
        ("other", "[1]", [1]),
        ("other", "true", True),
        ("other", "trues", "trues"),
        ("other", "tr", "tr"),
        ("other", "null", None),
        ("other", "None", "None"),
        ("other", "0123", "0123"),
        ("other", "-", "-"),
        ("other", '"x"', '"x"'),
        ("other", "{not json}", "{not json}"),
        ("other", " words here ", " words here "),
        ("other", "", ""),
        ("other", "Infinity", "Infinity"),
    ],
)
def test_values(key, value, wanted):
    found = arguments(written("f", (key, value)))[0][key]
    assert found == wanted and type(found) is type(wanted)


def test_numbers_keep_their_digits():
    digits = "0.1000000000000000000000000001"
    assert parse(written("f", ("ratio", digits)), TOOLS)[1][0]["function"]["arguments"] == f'{{"ratio": {digits}}}'
    assert parse(written("g", ("x", "1e999")))[1][0]["function"]["arguments"] == '{"x": 1e999}'


def test_values_on_the_line_of_their_tags():
    text = "<tool_call><function=f><parameter=text>a b</parameter><parameter=count>1</parameter></function></tool_call>"
    assert arguments(text) == [{"text": "a b", "count": 1}]


def test_strings_stream_while_they_arrive():
    parser = ToolCallParser(TOOLS, new_id)
    assert [e.text for e in parser.push("<tool_call>\n<function=f>\n<parameter=text>\nabc")] == [
        "",
        '{"text": ',
        '"abc',
    ]
    assert [e.text for e in parser.push("def\n</para")] == ["def"]
    assert [e.text for e in parser.push("graph>")] == ["\\n</paragraph>"]
    # Without a type, as soon as the text can only be a string; other types when complete.
    parser.push("\n</parameter>\n<parameter=other>\n")
    assert parser.push("tru") == []
    assert [e.text for e in parser.push("th")] == ['"truth']
    parser.push("\n</parameter>\n<parameter=list>\n")
    assert parser.push("[1, 2") == [] and parser.push("]\n</parameter>") == []
    assert [e.text for e in parser.push("\n</func")] == []
    assert [e.text for e in parser.push("tion>")] == ["[1, 2]", "}"]
    assert parser.open_call
    assert [e.kind for e in parser.push("\n</tool_call>")] == ["end"] and not parser.open_call


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("plain text\n", "plain text\n"),
        ("", ""),
        ("a < b and <tool", "a < b and <tool"),
        ("the tag <tool_call> opens a call", "the tag <tool_call> opens a call"),
        ("x \n<tool_call>\n{}", "x \n<tool_call>\n{}"),
        ("<tool_call>\n<function=>\n</function>", "<tool_call>\n<function=>\n</function>"),
        ("<tool_call>\n<function=f", "<tool_call>\n<function=f"),
        ("<tool_call> ", "<tool_call> "),
    ],
)
def test_text_that_is_no_call_is_content(text, content):
    assert parse(text, TOOLS) == (content, [])


def test_a_refused_tag_does_not_hide_the_next_call():
    content, calls = parse("<tool_call>" + written("g"), None, new_id)
    assert content == "<tool_call>" and calls[0]["function"] == {"name": "g", "arguments": "{}"}


@pytest.mark.parametrize(
    ("text", "prefix", "content"),
    [
        ("<tool_call>\n<function=f>\n", "", None),
        ("<tool_call>\n<function=f>\n<parameter=text>\nab\n</par", '{"text": "ab', None),
        ("<tool_call><function=f><parameter=text></parameter></tool_call>", '{"text": "</parameter></tool_call>', None),
        ("<tool_call>\n<function=f>\n<parameter=text>\nab\n</parameter>\n</function>\n", '{"text": "ab"}', None),
        ("<tool_call>\n<function=f>\n<parameter=count>\n12", '{"count": ', None),
        ("<tool_call>\n<function=f>\nwhat?", "", "\nwhat?"),
        ("<tool_call>\n<function=f>\n</function>\nwhat?", "{}", "\nwhat?"),
    ],
)  # fmt: skip
def test_unfinished_and_broken_calls_stay_open(text, prefix, content):
    parser = ToolCallParser(TOOLS, new_id)
    events = parser.push(text) + parser.finish()
    kinds = [e.kind for e in events]
    assert kinds.count("start") == 1 and "end" not in kinds
    assert "".join(e.text for e in events if e.kind == "arguments") == prefix
    assert "".join(e.text for e in events if e.kind == "content") == (content or "")
    assert parse(text, TOOLS) == (content or "", [])


def test_bad_tools_are_refused():
    with pytest.raises(BadArgument, match=r"tools\[0\].function.name"):
        ToolCallParser([{"type": "function", "function": {}}])


# Splits

PIECES = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>", "<parameter=count>"),
            *("<parameter=other>", "</parameter>", "\n</parameter>\n", "\n", " ", "<", ">", "</", "<par", '"', "\\"),
            *("a", "é😀", "12", "[1]", "true", "tr", "{", written("f", ("text", "x\ny"), ("count", "1")), written("g")),
        ]
    ),
    max_size=24,
).map("".join)
TEXTS = PIECES | PIECES.map(
    lambda text: f"<tool_call>\n<function=f>\n<parameter=text>\n{text}\n</parameter>\n</function>\n</tool_call>"
)
CUTS = st.lists(st.integers(0, 400), max_size=16)


def cut(text, places):
    bounds = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def summary(events):
    """Content, and per call its id, name, argument text and whether it is complete; checks the order of events."""
    content, calls = "", []
    for event in events:
        if event.kind == "content":
            content += event.text
        elif event.kind == "start":
            assert event.index == len(calls)
            calls.append([event.id, event.name, "", False])
        else:
            assert event.index == len(calls) - 1 and not calls[-1][3]
            if event.kind == "arguments":
                calls[-1][2] += event.text
            else:
                calls[-1][3] = True
    return content, calls


@settings(deadline=None, max_examples=500)
@given(text=TEXTS, cuts=CUTS)
def test_any_split_gives_the_same_calls(text, cuts):
    parser = ToolCallParser(TOOLS, new_id)
    events = [event for piece in cut(text, cuts) for event in parser.push(piece)] + parser.finish()
    whole = ToolCallParser(TOOLS, new_id)
    assert summary(events) == summary(whole.push(text) + whole.finish())
    assert collect(events) == parse(text, TOOLS, new_id)
    for _, _, text, complete in summary(events)[1]:
        if complete:
            assert isinstance(json.loads(text), dict)


@settings(deadline=None, max_examples=200)
@given(text=TEXTS, end=st.integers(0, 400))
def test_what_was_emitted_is_a_prefix_of_what_follows(text, end):
    parser = ToolCallParser(TOOLS, new_id)
    events = parser.push(text[: end % (len(text) + 1)])
    content, calls = summary(events)
    events += parser.push(text[end % (len(text) + 1) :]) + parser.finish()
    later_content, later_calls = summary(events)
    assert later_content.startswith(content)
    for call, later in zip(calls, later_calls, strict=False):
        assert later[:2] == call[:2] and later[2].startswith(call[2]) and later[3] >= call[3]


VALUE_TEXT = st.text(max_size=30) | st.lists(
    st.sampled_from(["</parameter>", "<parameter=a>", "</function>", "\n", "x", '"', "\\", "{", "é", "</tool_call>"]),
    max_size=8,
).map("".join)


LIKE_AN_END = re.compile(r"</parameter>\s*(<parameter=[^<>\n]+>|</function>)")


@settings(deadline=None, max_examples=300)
@given(
    calls=st.lists(
        st.dictionaries(
            st.sampled_from(["text", "list", "count"]) | st.text('abc_é"\\', min_size=1, max_size=4),
            VALUE_TEXT.filter(lambda value: not LIKE_AN_END.search(value)),
            max_size=3,
        ),
        max_size=3,
    ),
    cuts=CUTS,
)
def test_written_calls_are_read_back(calls, cuts):
    """Strings come back as they were, unless they hold what ends a parameter: a closing tag and what follows it."""
    tools = [tool("f", {key: {"type": "string"} for call in calls for key in call})]
    text = "".join(written("f", *call.items()) for call in calls)
    parser = ToolCallParser(tools, new_id)
    events = [event for piece in cut(text, cuts) for event in parser.push(piece)] + parser.finish()
    content, found = collect(events)
    assert [json.loads(c["function"]["arguments"]) for c in found] == calls
    assert content in (None, "")
