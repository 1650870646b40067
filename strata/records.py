"""What generate, stream and chat give back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from strata.runtime.generate import Counts


@dataclass(frozen=True)
class Usage:
    """Token counts: prompt_tokens of which reused_tokens came from the session's cache, and output_tokens."""

    prompt_tokens: int
    reused_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True)
class Timings:
    """Milliseconds and rates. first_token_ms counts from the call to the first token."""

    prompt_ms: float
    decode_ms: float
    first_token_ms: float
    prompt_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability from the unmodified logits, and the most likely ones as (token, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Result:
    """An answer; str(result) is its text.

    finish_reason  "stop" (a stop token or string, see stopped_on) or "length"
    seed           the seed used, to repeat a sampled answer
    drafts         what drafting did, or None: windows, committed_per_window, windows_by_committed (from one token on),
                   offered, accepted, draft_ms, and by_source offered and accepted by position in the window
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    seed: int
    stopped_on: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    drafts: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self.text

    def __len__(self) -> int:
        return len(self.text)


@dataclass(frozen=True)
class ChatResult(Result):
    """A chat answer: `text` is the answer without reasoning and tool calls.

    tool_calls  OpenAI form, complete calls only; message  the assistant message to append to the conversation
    """

    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [dict(c) for c in self.tool_calls]
        return message


@dataclass(frozen=True)
class Chunk:
    """One step of a stream. Text may lag behind tokens: characters are never cut, possible stop strings are held back.

    text           new text, perhaps empty            token       its id, or None for text that was held back
    logprob, top   as TokenLogprob, if asked for      from_draft  whether a draft proposed the token
    tokens_per_s   decode speed so far                finish_reason  set in the last chunk
    kind           "text", or in a chat "reasoning", "content", "tool_call"
    delta          in a chat: the OpenAI delta of this step, or None
    """

    text: str
    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    from_draft: bool = False
    tokens_per_s: float = 0.0
    finish_reason: str | None = None
    kind: str = "text"
    delta: dict[str, Any] | None = field(default=None, repr=False)


def usage_of(counts: Counts) -> Usage:
    return Usage(counts.prompt_tokens, counts.reused_tokens, counts.output_tokens)


def timings_of(counts: Counts, first_token_s: float) -> Timings:
    return Timings(
        prompt_ms=counts.prompt_s * 1e3,
        decode_ms=counts.decode_s * 1e3,
        first_token_ms=first_token_s * 1e3,
        prompt_tokens_per_s=counts.prompt_tokens_per_s,
        decode_tokens_per_s=counts.decode_tokens_per_s,
    )
