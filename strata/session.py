"""Session: the text front of one conversation."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.base.errors import Busy, Closed, need
from strata.base.numbers import one_of, shown
from strata.options import generate_options, token_ids, truth
from strata.records import ChatResult, Result
from strata.runtime.checkpoints import Checkpoint
from strata.runtime.generate import Generation
from strata.runtime.session import SessionState
from strata.runtime.transfer import export_session, import_session
from strata.streams import ChatStream, TextStream
from strata.text.stop import TextStop
from strata.text.thinking import opens_thinking

if TYPE_CHECKING:
    from strata.model import Model

Prompt = str | Sequence[int] | np.ndarray


class Session:
    """One conversation with its own memory. Made by `Model.session()`; closing it returns its memory to the model.

    A prompt that begins like what the session holds is read only from where it differs. One call at a time: a second
    one raises Busy, or waits with wait=True.
    """

    def __init__(self, model: Model, state: SessionState, give_back: Callable[[], None]):
        self._model, self._state = model, state
        self._lock = threading.Lock()
        self._owner = 0  # thread that took the lock last
        self._closed = False
        self._stream: weakref.ref[TextStream] | None = None
        # Also runs when nobody closes the session; it must hold neither the session nor the model.
        self._give_back = weakref.finalize(self, give_back)

    # ---- text

    def generate(
        self, prompt: Prompt, *, on_progress: Callable[[int, int], None] | None = None, **options: Any
    ) -> Result:
        """Continue a prompt (text or token ids) to the end; options as in `Model.generate`, on_progress as in
        `stream`."""
        return self._start(prompt, options, "generate", (), TextStream, on_progress).run()

    def stream(
        self, prompt: Prompt, *, on_progress: Callable[[int, int], None] | None = None, **options: Any
    ) -> TextStream:
        """As generate, piece by piece. on_progress(tokens read, tokens to read) is called while the prompt is read;
        it may use other sessions."""
        return self._start(prompt, options, "stream", (), TextStream, on_progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool | None = None,
        reasoning_effort: str | None = None,
        stream: bool | None = False,
        template_variables: Mapping[str, Any] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> ChatResult | ChatStream:
        """Answer a conversation in OpenAI form through the model's own chat template; options as in `Model.generate`.

        thinking: True, False or None (the template's default). Returns a ChatResult, or a ChatStream with stream=True;
        stream=None is False.
        """
        self._need_open()
        piecewise = stream is not None and truth("stream", stream)
        text = reasoning_effort is None or isinstance(reasoning_effort, str)
        need(text, "reasoning_effort is no text", found=shown(reasoning_effort), needed='None, or a text as "low"')
        named = isinstance(template_variables, Mapping) and all(isinstance(name, str) for name in template_variables)
        need(template_variables is None or named, "template_variables is no mapping", found=shown(template_variables),
             needed="names and values")  # fmt: skip
        extra = template_variables or {}
        prompt = self._model.template.render(messages, tools, thinking, reasoning_effort, extra=extra)
        ids = self._model.tokenize(prompt)
        turn = self._model.turn_token
        starts = [] if turn is None else np.flatnonzero(ids == turn).tolist()
        make = lambda *a, **k: ChatStream(*a, thinking=opens_thinking(prompt), tools=tools, **k)  # noqa: E731
        answer = self._start(ids, options, "chat", starts[-1:], make, on_progress)
        return answer if piecewise else answer.run()

    def _start(self, prompt, options, where, turn_starts, make, on_progress) -> Any:
        model = self._model
        self._need_open()
        usable = on_progress is None or callable(on_progress)
        need(usable, "on_progress is no function", found=shown(on_progress), needed="a function of two numbers")
        checked = generate_options(options, model.geometry.V, where)
        ids = token_ids(model.tokenize(prompt) if isinstance(prompt, str) else prompt, model.geometry.V)
        self._take(checked.wait)
        try:
            model.check_file()
            text = TextStop(model.tokenizer, checked.stop, () if checked.ignore_eos else None)
            generation = Generation(
                self._state, ids, checked.params, checked.max_tokens, text, lambda: text.stopped, turn_starts,
                model.windows_only, self._state.speculator if checked.drafts else None, checked.draft_acceptance,
            )  # fmt: skip
            stream = make(generation, text, model.turn, self._leave, on_progress)
        except BaseException:
            self._leave()
            raise
        self._stream = weakref.ref(stream)
        return stream

    def _take(self, wait: bool) -> None:
        """Become the session's only caller."""
        self._need_open()
        if wait and self._lock.locked() and self._owner == threading.get_ident():
            raise Busy("this thread is reading an answer of the session", found="an open stream",
                       needed="a free one", advice="Finish or close that stream first.")  # fmt: skip
        if not self._lock.acquire(blocking=wait):
            raise Busy("the session is answering another call", found="a call under way, or an open stream",
                       needed="a free one", advice="Wait for it, pass wait=True, or use another session.")  # fmt: skip
        self._owner = threading.get_ident()
        if self._closed:
            self._leave()
            self._need_open()

    def _leave(self) -> None:
        """The only caller is done. Whoever finds the session closed and free gives its memory back."""
        self._lock.release()
        if self._closed and self._lock.acquire(blocking=False):
            self._give_back()
            self._lock.release()

    def _need_open(self) -> None:
        self._model.need_open()
        if self._closed:
            raise Closed("the session was closed", found="a closed session", needed="an open one",
                         advice="Use model.session() for a new one.")  # fmt: skip

    # ---- scores

    def logits(self, tokens: Sequence[int] | np.ndarray, prefill: str | None = None) -> np.ndarray:
        """(T, V) float32: the logits after each of the tokens, read from an empty state. See `Model.logits`."""
        ids = token_ids(tokens, self._model.geometry.V, "token list")
        out = np.empty((len(ids), self._model.geometry.V), np.float32)

        def sink(first: int, rows: np.ndarray) -> None:
            out[first : first + len(rows)] = rows

        self.read_logits(ids, sink, prefill)
        return out

    def read_logits(self, ids: np.ndarray, sink: Callable[[int, np.ndarray], None], prefill: str | None = None) -> None:
        """Hand the logits of every row to sink(first row, (n, V) view) without keeping them.

        The sink runs while the backend is held: it must not use the model or its sessions.
        """
        from strata.runtime.generate import score

        need(prefill is None or one_of(prefill, ("auto", "windows")), "prefill is unknown", found=shown(prefill),
             needed='None, "auto" or "windows"')  # fmt: skip
        need(len(ids) <= self.context, "more tokens than the context", found=len(ids), needed=f"<= {self.context}",
             advice="Load with a larger context=.")  # fmt: skip
        windows_only = self._model.windows_only if prefill is None else prefill == "windows"
        self._take(wait=False)
        try:
            self._model.check_file()
            score(self._state, ids, windows_only, sink, self._model.turn)
        finally:
            self._leave()

    # ---- memory

    @property
    def context(self) -> int:
        """Tokens the session can hold, prompt and answer and a reserve of 8 together."""
        return self._state.context

    @property
    def tokens(self) -> np.ndarray:
        """A copy of the tokens the session holds now; Closed behind its end, when its memory may be another's."""
        self._need_open()
        return self._state.tokens.copy()

    def checkpoint(self) -> Checkpoint:
        """The current position, to come back to with `restore` while its cells have not been written again."""
        self._take(wait=False)
        try:
            with self._model.turn():
                return self._state.checkpoint()
        finally:
            self._leave()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Back to a checkpoint of this session; BadArgument if it no longer holds."""
        need(isinstance(checkpoint, Checkpoint), "that is no checkpoint", found=type(checkpoint).__name__,
             needed="what checkpoint() returned")  # fmt: skip
        self._take(wait=False)
        try:
            with self._model.turn():
                self._state.restore(checkpoint)
        finally:
            self._leave()

    def export(self) -> bytes:
        """The conversation as bytes, for `import_` in another session, process or backend: tokens, recurrent state and
        the used part of the KV cache."""
        self._take(wait=False)
        try:
            with self._model.turn():
                return export_session(self._state, self._model.identity)
        finally:
            self._leave()

    def import_(self, blob: bytes) -> None:
        """Go on with a conversation that `export` wrote: what follows has the same bits as there.

        What the session held is forgotten, checkpoints included. BadArgument for bytes that are no export, damaged, or
        of another model or KV format; ContextFull if they hold more tokens than this session can. The session is then
        as before.
        """
        self._take(wait=False)
        try:
            with self._model.turn():
                import_session(self._state, blob, self._model.identity)
        finally:
            self._leave()

    def clear(self) -> None:
        """Forget the conversation."""
        self._take(wait=False)
        try:
            with self._model.turn():
                self._state.clear()
        finally:
            self._leave()

    def close(self) -> None:
        """Give the memory back to the model. A running answer ends, with Closed, after its current piece of work."""
        if not self._model.is_here:
            return  # a copy in another process, whose locks may be held by threads that it does not have
        self._closed = True
        stream = self._stream() if self._stream is not None else None
        if stream is not None:
            stream.abort(Closed("the session was closed while it answered", found="a closed session",
                                needed="an open one", advice="Use a new session."))  # fmt: skip
        if self._lock.acquire(blocking=False):
            self._leave()

    @property
    def closed(self) -> bool:
        return self._closed

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
