"""Chat templates: the file's own, the sandbox, checks of messages and tools, the effort table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from strata.base.errors import BadArgument, TemplateError
from strata.pack.gguf_file import GgufFile
from strata.text import ChatTemplate, Tokenizer, effort_of

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples/models/tiny-flash-next/tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"
GOLDEN = Path(__file__).parent / "data/golden.npz"

USER = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Größe <°C>", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def metadata():
    return GgufFile(MODEL).metadata


@pytest.fixture(scope="module")
def template(metadata):
    return ChatTemplate.from_metadata(metadata)


def test_golden_prompt_is_rendered_and_tokenised_exactly(metadata, template):
    golden = np.load(GOLDEN)
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What does `json.dumps` do?"},
    ]
    prompt = template.render(messages, thinking=False)
    assert prompt == str(golden["IQ3_XXS.chat_no_think.text"])
    np.testing.assert_array_equal(
        Tokenizer.from_metadata(metadata).encode(prompt), golden["IQ3_XXS.chat_no_think.tokens"]
    )


def test_thinking_switch_and_generation_prompt(template):
    turn = "<|im_start|>user\nHi<|im_end|>\n"
    assert template.render(USER) == turn + "<|im_start|>assistant\n<think>\n"
    assert template.render(USER, thinking=True) == template.render(USER)
    assert template.render(USER, thinking=False) == turn + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert template.render(USER, extra={"enable_thinking": False}) == template.render(USER, thinking=False)
    assert template.render(USER, add_generation_prompt=False) == turn
    with pytest.raises(BadArgument, match="given twice; found enable_thinking"):
        template.render(USER, thinking=True, extra={"enable_thinking": False})
    with pytest.raises(BadArgument, match="found 'low'"):
        template.render(USER, thinking="low")


def test_tools_and_tool_calls(template):
    messages = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Look it up.",
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Köln", "days": [1, 2], "note": "a\\nb"}'},
                },
                {"id": "b", "type": "function", "function": {"name": "weather", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "12 °C"},
        {
            "role": "tool",
            "tool_call_id": "b",
            "content": [{"type": "text", "text": "13 "}, {"type": "text", "text": "°C"}],
        },
    ]
    before = json.dumps(messages)
    prompt = template.render(messages, tools=[WEATHER])
    assert json.dumps(messages) == before
    assert "<tools>\n" + json.dumps(WEATHER, ensure_ascii=False) + "\n</tools>" in prompt
    assert (
        "<|im_start|>assistant\n<think>\nLook it up.\n</think>\n\n"
        "\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n[1, 2]\n</parameter>\n"
        "<parameter=note>\na\nb\n</parameter>\n</function>\n</tool_call>"
        "\n<tool_call>\n<function=weather>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n12 °C\n</tool_response>"
        "\n<tool_response>\n13 °C\n</tool_response><|im_end|>\n"
    ) in prompt
    assert template.render(USER, tools=[]) == template.render(USER)


# The environment, with templates of our own


def render(source, messages=USER, **options):
    return ChatTemplate(source, bos_token="<b>", eos_token="<e>").render(messages, **options)


def test_blocks_are_trimmed_and_variables_reach_the_template():
    source = (
        "  {% if reasoning_effort is defined %}\n{{ reasoning_effort }} {{ shade }}\n  {% endif %}\n"
        "{{ bos_token }}{{ eos_token }}"
    )
    assert render(source, reasoning_effort="low", extra={"shade": "red"}) == "low red\n<b><e>"
    assert render(source) == "<b><e>"
    assert render("{{ tools is none }} {{ enable_thinking is defined }}") == "True False"


def test_tojson_keeps_characters_and_takes_indent():
    assert render("{{ {'b': '<é> \\'&', 'a': 1} | tojson }}") == '{"b": "<é> \'&", "a": 1}'
    assert render("{{ {'b': [1], 'a': 1} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 1,\n "b": [\n  1\n ]\n}'


def test_helpers_of_templates():
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% for m in 'abc' %}{% if m == 'b' %}{% continue %}{% endif %}{{ m }}{% endfor %}") == "ac"
    assert render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}") == "Hi"


def test_what_a_template_refuses_is_ours():
    with pytest.raises(TemplateError, match=r"refused the messages: no user; found roles .*; needed roles"):
        render("{{ raise_exception('no user.') }}")
    with pytest.raises(TemplateError, match="UndefinedError"):
        render("{{ nothing.at.all }}")
    with pytest.raises(TemplateError, match="TypeError"):
        render("{{ 1 + 'a' }}")
    with pytest.raises(TemplateError, match="line 2"):
        ChatTemplate("a\n{% if %}")
    effort = (
        "{% if reasoning_effort not in ['low'] %}{{ raise_exception('bad effort ' ~ reasoning_effort) }}{% endif %}"
    )
    with pytest.raises(TemplateError, match="bad effort huge"):
        render(effort, reasoning_effort="huge")


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ messages[0].update({}) }}", "{{ ''.__class__.__mro__[1] }}"]
)
def test_templates_stay_in_the_sandbox(source):
    with pytest.raises(TemplateError, match="SecurityError"):
        render(source)


def test_python_internals_are_undefined_for_templates():
    assert render("{{ raise_exception.__globals__ is defined }} {{ ''.__class__ is defined }}") == "False False"


def test_a_file_without_template_is_refused_with_advice():
    for metadata in ({}, {"tokenizer.chat_template": " "}):
        with pytest.raises(TemplateError, match=r"; found .*; needed tokenizer.chat_template\. Use generate"):
            ChatTemplate.from_metadata(metadata)


# Messages and tools


def call(**function):
    return [{"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages is unusable; found str; needed a list"),
        ([], "messages must not be empty"),
        ([*USER, "x"], "messages[1] is unusable; found str; needed an object"),
        ([{"content": "x"}], "messages[0].role is unusable; found None; needed a non-empty string"),
        ([{"role": 3, "content": "x"}], "messages[0].role is unusable; found 3; needed a non-empty string"),
        ([*USER, {"role": "user"}], "messages[1].content is missing"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content is missing"),
        ([{"role": "user", "content": 5}], "messages[0].content is unusable; found int; needed a string or a list"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0] is unusable; found str; needed an object"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0].content[1].type is not supported; found 'image_url'; needed 'text'",
        ),
        (
            [*USER, {"role": "user", "content": "a\udcff"}],
            "messages[1].content is not valid Unicode; found lone surrogate U+DCFF at character 1",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}], "[0].text is not valid Unicode"),
        ([{"role": "user", "content": [{"type": "text"}]}], "[0].text is unusable; found NoneType; needed a string"),
        (
            [{"role": "user", "content": "x", "tool_calls": [1]}],
            "tool_calls belong to the assistant; found role 'user'; needed role 'assistant'",
        ),
        ([{"role": "assistant", "content": "", "reasoning_content": 1}], "messages[0].reasoning_content is unusable"),
        (call(arguments="{}"), "tool_calls[0].function.name is unusable; found None; needed a non-empty string"),
        (call(name="f", arguments="{"), "messages[0].tool_calls[0].function.arguments is not valid JSON"),
        (call(name="f", arguments="[1]"), "messages[0].tool_calls[0].function.arguments is unusable; found list"),
        (call(name="f", arguments=None), "function.arguments is unusable; found NoneType; needed an object"),
    ],
)
def test_bad_messages_are_refused_by_index_and_field(template, messages, message):
    with pytest.raises(BadArgument) as error:
        template.render(messages)
    assert message in str(error.value) and error.value.found and error.value.needed


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "tools is unusable; found dict; needed a list"),
        ([1], "tools[0] is unusable; found int; needed an object"),
        ([WEATHER, {"type": "mcp"}], "tools[1].type is not supported; found 'mcp'; needed 'function'"),
        ([{"type": "function"}], "tools[0].function is unusable; found NoneType; needed an object"),
        ([{"type": "function", "function": {}}], "function.name is unusable; found None; needed a non-empty string"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "function.parameters is unusable"),
    ],
)
def test_bad_tools_are_refused_by_index_and_field(template, tools, message):
    with pytest.raises(BadArgument) as error:
        template.render(USER, tools=tools)
    assert message in str(error.value) and error.value.found and error.value.needed


# Effort


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (("none", "off", "minimal", "disabled", "false", False), (False, None)),
        (("low", 0, 2_047), (True, "low")),
        (("medium", 2_048, 8_191), (True, "medium")),
        (("high", "xhigh", "max", "maximum", None, 8_192, 100_000), (True, "xhigh")),
    ],
)
def test_effort_table(values, wanted):
    for value in values:
        assert effort_of(value) == wanted, value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("hihg", "found 'hihg'.*Did you mean 'high'"),
        ("Medium", "Did you mean 'medium'"),
        ("qqq", r"in tokens of at least 0$"),
        (True, "found True"),
        (-1, "found -1"),
        (1.5, r"found 1\.5"),
    ],
)
def test_unknown_effort_is_refused_with_the_closest(value, message):
    with pytest.raises(BadArgument, match=message):
        effort_of(value)
