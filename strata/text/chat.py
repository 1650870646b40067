"""Messages to a prompt, through the chat template the file carries.

The template runs in jinja2's immutable sandbox with the settings and helpers that templates of this form are written
for: trimmed blocks, `tojson` without ASCII or HTML escapes, `raise_exception`, `strftime_now`, loop controls and the
`generation` block, which only marks text.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from strata.base.errors import BadArgument, TemplateError, need
from strata.base.numbers import shown
from strata.text.tokenizer import check_text

THINKING_OFF = ("none", "off", "minimal", "disabled", "false")
EFFORTS = {"low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh", "max": "xhigh", "maximum": "xhigh"}
DEFAULT_EFFORT = "xhigh"
# Thinking budgets in tokens below these bounds ask for that effort; larger ones for the default.
BUDGET_EFFORTS = ((2_048, "low"), (8_192, "medium"))


def effort_of(value: str | int | None) -> tuple[bool, str | None]:
    """(thinking, reasoning_effort) for the template, from what a client sent.

    value  a word; None (unset); False (thinking off); or a budget in tokens. Raises BadArgument for anything else.
    """
    if value is None:
        return True, DEFAULT_EFFORT
    if value is False or (isinstance(value, str) and value in THINKING_OFF):
        return False, None
    if isinstance(value, str) and value in EFFORTS:
        return True, EFFORTS[value]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return True, next((effort for bound, effort in BUDGET_EFFORTS if value < bound), DEFAULT_EFFORT)
    words = [*THINKING_OFF, *EFFORTS]
    closest = difflib.get_close_matches(str(value).lower(), words, n=1, cutoff=0.5)
    raise BadArgument(
        "unknown reasoning effort",
        found=shown(value),
        needed=f"one of {', '.join(words)}, or a budget in tokens of at least 0",
        advice=f"Did you mean {closest[0]!r}?" if closest else None,
    )


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model wrote, for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  # the extension interface wants a plain class attribute

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Refused(jinja2.TemplateError):
    """`raise_exception` was called by the template."""


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled chat template. `source` is its Jinja text."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = ""):
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                "the chat template does not compile",
                found=f"line {error.lineno}: {error.message}",
                needed="Jinja2 (key tokenizer.chat_template)",
                advice="Use generate() with a prompt of your own, or a GGUF file with another template.",
            ) from error

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> ChatTemplate:
        """The template under `tokenizer.chat_template`. Raises TemplateError where the file has none."""
        source = metadata.get("tokenizer.chat_template")
        if not isinstance(source, str) or not source.strip():
            raise TemplateError(
                "the file has no chat template",
                found="no such key" if source is None else "an empty one" if isinstance(source, str) else "no text",
                needed="tokenizer.chat_template",
                advice="Use generate() with a prompt of your own, or a GGUF file that carries its template.",
            )
        tokens = metadata.get("tokenizer.ggml.tokens")
        texts = {}
        for name in ("bos", "eos"):
            token = metadata.get(f"tokenizer.ggml.{name}_token_id")
            if token is not None and tokens is not None and 0 <= int(token) < len(tokens):
                texts[f"{name}_token"] = tokens[int(token)]
        return cls(source, **texts)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt text of a conversation.

        messages  OpenAI form: role; content (str, list of text parts, or None beside tool_calls); reasoning_content,
                  tool_calls, tool_call_id and further keys as the template reads them
        tools     OpenAI form: {"type": "function", "function": {"name": ..., "parameters": JSON schema}}
        thinking, reasoning_effort   handed on as `enable_thinking` and `reasoning_effort` unless None
        extra     further template variables, none of which the others give

        Raises BadArgument naming index and field, and TemplateError for what the template itself refuses.
        """
        variables = {
            "messages": checked_messages(messages),
            "tools": checked_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        if thinking is not None:
            need(
                isinstance(thinking, bool),
                "thinking is no truth value",
                found=shown(thinking),
                needed="True, False or None",
            )
            variables["enable_thinking"] = thinking
        if reasoning_effort is not None:
            variables["reasoning_effort"] = reasoning_effort
        twice = sorted(variables.keys() & extra.keys())
        need(not twice, "template variables are given twice", found=", ".join(twice), needed="other names")
        try:
            return self._template.render(**{**self._tokens, "documents": None, **variables, **extra})
        except _Refused as error:
            raise TemplateError(
                f"the chat template refused the messages: {error.message.rstrip('.')}",
                found=_roles(messages),
                needed="roles and contents that the template takes",
            ) from error
        except Exception as error:  # a template is a program: it may fail in any way
            raise TemplateError(
                "the chat template failed",
                found=f"{type(error).__name__}: {error}",
                needed="messages, tools and variables that the template takes",
                advice="Check roles and fields.",
            ) from error


def _roles(messages: Sequence[Mapping[str, Any]]) -> str:
    """The last roles of a conversation, as text."""
    roles = [str(message["role"]) for message in messages]
    return "roles " + ("… " if len(roles) > 8 else "") + ", ".join(roles[-8:])


def _check(
    condition: bool,
    where: str,
    message: str = "is unusable",
    *,
    found: object,
    needed: object,
    advice: str | None = None,
) -> None:
    need(condition, f"{where} {message}", found=found, needed=needed, advice=advice)


def checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy in the form templates expect: content a str (or None), tool-call arguments objects."""
    _check(_is_list(messages), "messages", needed="a list", found=type(messages).__name__)
    _check(len(messages) > 0, "messages", "must not be empty", found="none", needed="at least one message")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _checked_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    _check(isinstance(message, Mapping), where, needed="an object", found=type(message).__name__)
    role = message.get("role")
    _check(isinstance(role, str) and role != "", f"{where}.role", needed="a non-empty string", found=shown(role))
    result = dict(message)
    calls = message.get("tool_calls")
    if calls is not None:
        at = f"{where}.tool_calls"
        _check(_is_list(calls), at, needed="a list", found=type(calls).__name__)
        _check(
            role == "assistant" or not calls,
            at,
            "belong to the assistant",
            found=f"role {role!r}",
            needed="role 'assistant'",
        )
        result["tool_calls"] = [_checked_call(call, f"{at}[{i}]") for i, call in enumerate(calls)]
    result["content"] = _checked_content(message.get("content"), bool(calls), f"{where}.content")
    reasoning = message.get("reasoning_content")
    _check(
        reasoning is None or isinstance(reasoning, str),
        f"{where}.reasoning_content",
        needed="a string",
        found=type(reasoning).__name__,
    )
    return result


def _checked_content(content: object, has_calls: bool, where: str) -> str | None:
    if isinstance(content, str):
        check_text(content, where)
        return content
    if content is None:
        _check(
            has_calls,
            where,
            "is missing",
            found="None",
            needed="a string or a list of text parts; null only beside tool_calls",
        )
        return None
    _check(_is_list(content), where, needed="a string or a list of parts", found=type(content).__name__)
    return "".join(_checked_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _checked_part(part: object, where: str) -> str:
    _check(isinstance(part, Mapping), where, needed="an object", found=type(part).__name__)
    _check(
        part.get("type") == "text",
        f"{where}.type",
        "is not supported",
        found=shown(part.get("type")),
        needed="'text'",
        advice="This library runs the text model only; leave pictures and other media out.",
    )
    text = part.get("text")
    _check(isinstance(text, str), f"{where}.text", needed="a string", found=type(text).__name__)
    check_text(text, f"{where}.text")
    return text


def _checked_call(call: object, where: str) -> dict[str, Any]:
    """A tool call with its arguments as an object; the empty string means no arguments."""
    _check(isinstance(call, Mapping), where, needed="an object", found=type(call).__name__)
    nested = "function" in call
    function, at = (call["function"], f"{where}.function") if nested else (call, where)
    _check(isinstance(function, Mapping), at, needed="an object", found=type(function).__name__)
    name, arguments = function.get("name"), function.get("arguments", {})
    _check(isinstance(name, str) and name != "", f"{at}.name", needed="a non-empty string", found=shown(name))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise BadArgument(f"{at}.arguments is not valid JSON", found=str(error), needed="a JSON object") from error
    _check(isinstance(arguments, Mapping), f"{at}.arguments", needed="an object", found=type(arguments).__name__)
    function = {**function, "arguments": dict(arguments)}
    return {**call, "function": function} if nested else function


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """A copy of the tools, or None without any. Raises BadArgument naming index and field."""
    if tools is None:
        return None
    _check(_is_list(tools), "tools", needed="a list", found=type(tools).__name__)
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        _check(isinstance(tool, Mapping), where, needed="an object", found=type(tool).__name__)
        kind, function = tool.get("type"), tool.get("function")
        _check(kind == "function", f"{where}.type", "is not supported", found=shown(kind), needed="'function'")
        at = f"{where}.function"
        _check(isinstance(function, Mapping), at, needed="an object", found=type(function).__name__)
        name, schema = function.get("name"), function.get("parameters")
        _check(isinstance(name, str) and name != "", f"{at}.name", needed="a non-empty string", found=shown(name))
        _check(
            schema is None or isinstance(schema, Mapping),
            f"{at}.parameters",
            needed="a JSON schema object",
            found=type(schema).__name__,
        )
    return [dict(tool) for tool in tools] or None
