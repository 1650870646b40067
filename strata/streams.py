"""Streams: an answer piece by piece, as text or as a chat."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from strata.base.errors import StrataError
from strata.base.process import OwnProcess
from strata.records import ChatResult, Chunk, Result, TokenLogprob, timings_of, usage_of
from strata.runtime.generate import Cancelled, Generation, Step
from strata.text.stop import TextStop
from strata.text.thinking import ThinkingSplitter
from strata.text.tool_calls import ToolCallParser, ToolEvent, collect


class TextStream:
    """Iterator of `Chunk`. Closing it, or leaving its `with` block, ends the generation between two windows.

    result  the whole answer so far; after the last chunk the final one
    """

    def __init__(
        self,
        generation: Generation,
        text: TextStop,
        turn: Callable[[], contextlib.AbstractContextManager],
        release: Callable[[], None],
        on_progress: Callable[[int, int], None] | None = None,
    ):
        self._generation, self._text, self._turn, self._on_progress = generation, text, turn, on_progress
        self._release = weakref.finalize(self, release)
        self._queue: deque[Chunk] = deque()
        self._began = time.perf_counter()
        self._first_token_s = 0.0
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._over = False
        self._ended_by: StrataError | None = None
        self._working = threading.RLock()  # held during a piece of work
        self._process = OwnProcess()

    @property
    def pending(self) -> int:
        """Chunks that are ready: so many can be taken before the next window runs."""
        return len(self._queue)

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> Chunk:
        self._process.need("the stream")
        while not self._queue:
            with self._working:
                if self._over:
                    if self._ended_by is not None:
                        raise self._ended_by
                    raise StopIteration
                try:
                    self._advance()
                except Cancelled:  # another thread closed the stream: the next turn of the loop ends it
                    self.close()
                except BaseException:
                    self.close()
                    raise
        return self._queue.popleft()

    def _advance(self) -> None:
        generation = self._generation
        if generation.done:
            self._finish()
            return
        if not generation.started:
            generation.read_prompt(self._on_progress, self._turn)
        with self._turn():
            steps = generation.round()
        if not self._tokens:
            self._first_token_s = time.perf_counter() - self._began
        for i, step in enumerate(steps):
            self._take(step, self._text.take() if i == len(steps) - 1 else "")

    def _take(self, step: Step, text: str) -> None:
        draw = step.draw
        self._tokens.append(draw.token)
        top: tuple = ()
        if draw.logprob is not None:
            top = tuple(draw.top or ())
            self._logprobs.append(TokenLogprob(draw.token, draw.logprob, top))
        speed = self._generation.counts.decode_tokens_per_s
        self._put(text, token=draw.token, logprob=draw.logprob, top=top, from_draft=step.source is not None,
                  tokens_per_s=speed)  # fmt: skip

    def _finish(self) -> None:
        self._put(self._text.finish(), finish_reason=self._generation.finish_reason,
                  tokens_per_s=self._generation.counts.decode_tokens_per_s)  # fmt: skip
        self.close()

    def _put(self, text: str, **fields: Any) -> None:
        self._texts.append(text)
        self._queue.append(Chunk(text, **fields))

    def close(self) -> None:
        """End the generation and free the session; waits for a piece of work that another thread is doing. Does nothing
        in a forked child, where that thread is not."""
        if not self._process.is_here:
            return
        self._over = True
        self._generation.cancel()
        with self._working:
            self._release()

    def abort(self, error: StrataError) -> None:
        """As `close`, but whoever still reads an unfinished stream gets `error`."""
        if not self._over:
            self._ended_by = error
        self.close()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _result_fields(self) -> dict[str, Any]:
        g = self._generation
        return dict(
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish_reason=g.finish_reason or "cancelled",
            usage=usage_of(g.counts),
            timings=timings_of(g.counts, self._first_token_s),
            seed=g.params.seed,
            stopped_on=self._text.stopped_on,
            drafts=None if g.speculator is None else g.tally.summary(),
            logprobs=tuple(self._logprobs) if g.params.logprobs else None,
        )

    @property
    def result(self) -> Result:
        return Result(**self._result_fields())

    def run(self) -> Result:
        """Exhaust the stream and give the whole answer."""
        with self:
            for _ in self:
                pass
        return self.result


class ChatStream(TextStream):
    """As TextStream, with reasoning, answer and tool calls told apart; `Chunk.delta` is the OpenAI delta."""

    def __init__(self, *args: Any, thinking: bool, tools: Sequence[dict] | None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._splitter = ThinkingSplitter(thinking)
        self._parser = ToolCallParser(tools)
        self._reasoning: list[str] = []
        self._events: list[ToolEvent] = []

    def _put(self, text: str, **fields: Any) -> None:
        pieces = self._splitter.push(text)
        last = "finish_reason" in fields
        if last:
            pieces += self._splitter.finish()
        chunks: list[Chunk] = []
        for kind, part in pieces:
            if kind == "reasoning":
                self._reasoning.append(part)
                chunks.append(Chunk(part, kind="reasoning", delta={"reasoning_content": part}))
            else:
                chunks += self._chunks_of(self._parser.push(part))
        if last:
            chunks += self._chunks_of(self._parser.finish())
            if collect(self._events)[1] and fields["finish_reason"] == "stop":
                fields["finish_reason"] = "tool_calls"
                self._generation.finish_reason = "tool_calls"
        if not chunks or last:
            chunks.append(Chunk("", kind="content"))
        for chunk in chunks[:-1]:
            self._queue.append(chunk)
        final = chunks[-1]
        self._queue.append(Chunk(final.text, kind=final.kind, delta=final.delta, **fields))

    def _chunks_of(self, events: list[ToolEvent]) -> list[Chunk]:
        self._events += events
        return [
            Chunk(
                e.text if e.kind == "content" else "",
                kind="content" if e.kind == "content" else "tool_call",
                delta=e.delta(),
            )
            for e in events
            if e.kind != "end"
        ]

    @property
    def result(self) -> ChatResult:
        content, calls = collect(self._events)
        fields = self._result_fields() | {"text": content or ""}
        return ChatResult(**fields, reasoning="".join(self._reasoning), tool_calls=tuple(calls))
