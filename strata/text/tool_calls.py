"""Tool calls in a model's answer, parsed while the text streams.

The form is

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A parameter ends only at its closing tag followed by the next parameter or the function's end, so a value may hold tags.
One line end on either side of a value belongs to the form.

Types come from the tool's JSON schema:

string             the text as it is, passed on while it arrives
another type       passed on when complete: the text if it is JSON of an allowed type (True, False and None in Python's
                   spelling count where boolean or null is allowed), else as a string, for the caller to judge
no schema or type  the text if it is a JSON object, array, number, boolean or null, else a string; it streams as soon as
                   it can only be a string

JSON text is passed on as the model wrote it, so numbers keep their digits.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from strata.text.chat import checked_tools
from strata.text.stop import held_suffix
from strata.text.tool_schema import ParameterTypes, json_type, parameter_types

CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_NAME = re.compile(r"([^<>\n]+)>")
_PART_OF_NAME = re.compile(r"[^<>\n]*")
_JSON_SPACE = " \t\r\n"
_JSON_FIRST = frozenset("{[-0123456789")
_PYTHON_WORDS = {"True": ("boolean", "true"), "False": ("boolean", "false"), "None": ("null", "null")}


@dataclass(frozen=True)
class ToolEvent:
    """One step of a streamed answer.

    kind   "content": text of the answer; "start": a call with index, id and name; "arguments": more JSON text of the
           call `index`; "end": the call `index` is complete
    text   content or JSON text
    """

    kind: Literal["content", "start", "arguments", "end"]
    text: str = ""
    index: int = -1
    id: str = ""
    name: str = ""

    def delta(self) -> dict[str, Any] | None:
        """The OpenAI chunk delta of this event; None for "end", which has none."""
        if self.kind == "content":
            return {"content": self.text}
        if self.kind == "start":
            function = {"name": self.name, "arguments": ""}
            return {"tool_calls": [{"index": self.index, "id": self.id, "type": "function", "function": function}]}
        if self.kind == "arguments":
            return {"tool_calls": [{"index": self.index, "function": {"arguments": self.text}}]}
        return None


def _random_id(index: int) -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ToolCallParser:
    """Push answer text (without reasoning), get events; any split gives the same content, calls and argument texts.

    tools   the request's tools (OpenAI form) for parameter types, or None
    new_id  index of a call -> its id; random by default

    A `<tool_call>` not followed by a function header is content. A call whose form breaks later, or that the end of the
    text cuts off, stays open: its arguments are a prefix and no "end" follows; text after the break is content.
    White space before a call, and after the last one, is dropped.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None, new_id: Callable[[int], str] | None = None):
        self._types = parameter_types(checked_tools(tools))
        self._new_id = new_id or _random_id
        self._held = ""
        self._events: list[ToolEvent] = []
        self._step: Callable[[], bool] = self._content
        self._spaces = ""  # white space before a <tool_call> that may turn out to be content
        self._n_calls = 0
        self._n_parameters = 0
        self._name = ""
        self._value: _Value | None = None

    @property
    def open_call(self) -> bool:
        """Whether the text so far ends inside a call that has started."""
        return self._step in (self._body, self._first_line, self._parameter, self._tail)

    def push(self, text: str) -> list[ToolEvent]:
        """The events that are decided now."""
        self._held += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> list[ToolEvent]:
        """The content held back at the end of the text; an unfinished call stays as it is."""
        text, self._held = self._held, ""
        if self._step == self._header:
            self._emit_content(self._spaces + CALL + text)
        elif self._step == self._content and (text.strip() or not self._n_calls):
            self._emit_content(text)
        return self._take()

    def _take(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events

    def _emit_content(self, text: str) -> None:
        if text:
            self._events.append(ToolEvent("content", text))

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._events.append(ToolEvent("arguments", text, index=self._n_calls - 1))

    # Each step consumes held text and says whether there may be more to do without new text.

    def _content(self) -> bool:
        start = self._held.find(CALL)
        found = start >= 0
        if not found:
            start = len(self._held) - held_suffix(self._held, (CALL,))
        # White space waits: it goes if a call follows.
        text = self._held[:start].rstrip()
        self._emit_content(text)
        if not found:
            self._held = self._held[len(text) :]
            return False
        self._spaces = self._held[len(text) : start]
        self._held = self._held[start + len(CALL) :]
        self._step = self._header
        return True

    def _header(self) -> bool:
        """From behind <tool_call> to the end of <function=NAME>."""
        name, length = _tag_with_name(self._held, FUNCTION)
        if name is None:
            return False
        if name == "":
            self._emit_content(self._spaces + CALL)
            self._step = self._content
            return True
        self._events.append(ToolEvent("start", index=self._n_calls, id=self._new_id(self._n_calls), name=name))
        self._n_calls += 1
        self._n_parameters = 0
        self._name = name
        self._held = self._held[length:]
        self._step = self._body
        return True

    def _body(self) -> bool:
        """Between parameters: the next one, or the function's end."""
        key, length = _tag_with_name(self._held, PARAMETER)
        if key:
            self._begin_parameter(key, length)
            return True
        end = _tag(self._held, FUNCTION_END)
        if end > 0:
            self._end_function(end)
            return True
        if key is None or end == 0:
            return False
        return self._break()

    def _break(self) -> bool:
        self._step = self._content
        return True

    def _begin_parameter(self, key: str, length: int) -> None:
        opening = ", " if self._n_parameters else "{"
        self._emit_arguments(f"{opening}{_quoted(key)}: ")
        self._n_parameters += 1
        self._held = self._held[length:]
        self._value = _Value(self._types(self._name, key))
        self._step = self._first_line

    def _first_line(self) -> bool:
        """The line end behind <parameter=KEY> is no part of the value."""
        if not self._held:
            return False
        self._held = self._held.removeprefix("\n")
        self._step = self._parameter
        return True

    def _parameter(self) -> bool:
        """Text of a value up to a closing tag that counts."""
        searched = 0
        while (close := self._held.find(PARAMETER_END, searched)) >= 0:
            rest = self._held[close + len(PARAMETER_END) :]
            key, key_length = _tag_with_name(rest, PARAMETER)
            end = _tag(rest, FUNCTION_END)
            if key or end > 0:
                self._emit_arguments(self._value.push(self._held[:close].removesuffix("\n")) + self._value.finish())
                self._held = rest
                if key:
                    self._begin_parameter(key, key_length)
                else:
                    self._end_function(end)
                return True
            if key is None or end == 0:
                break
            searched = close + len(PARAMETER_END)
        if close < 0:
            close = len(self._held) - held_suffix(self._held, (PARAMETER_END,))
        # A line end before a possible closing tag waits with it.
        if self._held[:close].endswith("\n"):
            close -= 1
        self._emit_arguments(self._value.push(self._held[:close]))
        self._held = self._held[close:]
        return False

    def _end_function(self, length: int) -> None:
        self._emit_arguments("}" if self._n_parameters else "{}")
        self._held = self._held[length:]
        self._step = self._tail

    def _tail(self) -> bool:
        """From </function> to </tool_call>."""
        end = _tag(self._held, CALL_END)
        if end > 0:
            self._events.append(ToolEvent("end", index=self._n_calls - 1))
            self._held = self._held[end:]
            self._step = self._content
            return True
        return False if end == 0 else self._break()


def _tag(text: str, tag: str) -> int:
    """Length of white space and `tag` at the start of `text`; 0 if more text may complete them, -1 if it cannot."""
    start = text.lstrip()
    if start.startswith(tag):
        return len(text) - len(start) + len(tag)
    return 0 if tag.startswith(start) else -1


def _tag_with_name(text: str, tag: str) -> tuple[str | None, int]:
    """(name, length) of white space, `tag`, name and '>'; name None if more text may complete them, '' if it cannot."""
    length = _tag(text, tag)
    if length <= 0:
        return (None, 0) if length == 0 else ("", 0)
    match = _NAME.match(text, length)
    if match:
        return match[1], match.end()
    return (None, 0) if _PART_OF_NAME.fullmatch(text, length) else ("", 0)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Value:
    """One parameter's text to JSON text, streamed where it can only be a string."""

    def __init__(self, types: ParameterTypes):
        self._types = types
        self._whole: list[str] | None = None if types == {"string"} else []
        self._undecided = types is None
        self._start = ""  # the text so far from its first character that is not space, while undecided
        self._quote = '"'

    def push(self, text: str) -> str:
        """JSON text that is decided now."""
        if not text:
            return ""
        if self._whole is not None:
            self._whole.append(text)
            if not self._undecided or self._may_be_json(text):
                return ""
            text, self._whole = "".join(self._whole), None
        quote, self._quote = self._quote, ""
        return quote + _quoted(text)[1:-1]

    def finish(self) -> str:
        """The rest of the JSON text."""
        if self._whole is None:
            return self._quote + '"'
        text = "".join(self._whole)
        stripped = text.strip(_JSON_SPACE)
        kind = json_type(stripped)
        # A string is its bare text; one in JSON's quotes has the quotes as part of it.
        if kind not in (None, "string") and _allowed(kind, self._types):
            return stripped
        kind, word = _PYTHON_WORDS.get(stripped, (None, ""))
        return word if self._types is not None and kind in self._types else _quoted(text)

    def _may_be_json(self, more: str) -> bool:
        """Whether the text so far may become a JSON value other than a string."""
        self._start = (self._start + more).lstrip(_JSON_SPACE)
        if not self._start:
            return True
        self._undecided = self._start[0] not in _JSON_FIRST
        word = self._start.rstrip(_JSON_SPACE)
        return not self._undecided or any(full.startswith(word) for full in ("true", "false", "null"))


def _allowed(kind: str, types: ParameterTypes) -> bool:
    return types is None or kind in types or (kind == "integer" and "number" in types)


def parse(
    text: str, tools: Sequence[Mapping[str, Any]] | None = None, new_id: Callable[[int], str] | None = None
) -> tuple[str | None, list[dict[str, Any]]]:
    """(content, tool_calls) of a whole answer, as an OpenAI message holds them; content None beside calls without text.

    Only complete calls are listed. Equal to what the events of `ToolCallParser` concatenate to.
    """
    parser = ToolCallParser(tools, new_id)
    return collect(parser.push(text) + parser.finish())


def collect(events: Sequence[ToolEvent]) -> tuple[str | None, list[dict[str, Any]]]:
    """(content, tool_calls) of the events of an answer; see `parse`."""
    content, names, arguments, complete = [], {}, {}, []
    for event in events:
        if event.kind == "content":
            content.append(event.text)
        elif event.kind == "start":
            names[event.index] = (event.id, event.name)
            arguments[event.index] = []
        elif event.kind == "arguments":
            arguments[event.index].append(event.text)
        else:
            complete.append(event.index)
    calls = []
    for index in complete:
        call_id, name = names[index]
        function = {"name": name, "arguments": "".join(arguments[index])}
        calls.append({"id": call_id, "type": "function", "function": function})
    text = "".join(content)
    return (text if text or not calls else None), calls
