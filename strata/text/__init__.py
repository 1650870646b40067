"""Text in and out: tokenizer, chat template, incremental detokeniser, stop strings, reasoning and tool calls."""

from strata.text.chat import ChatTemplate, effort_of
from strata.text.detokenizer import Detokenizer
from strata.text.stop import StopStrings, TextStop
from strata.text.thinking import ThinkingSplitter, opens_thinking, split_thinking
from strata.text.tokenizer import Tokenizer
from strata.text.tool_calls import ToolCallParser, ToolEvent, parse

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopStrings",
    "TextStop",
    "ThinkingSplitter",
    "Tokenizer",
    "ToolCallParser",
    "ToolEvent",
    "effort_of",
    "opens_thinking",
    "parse",
    "split_thinking",
]
