"""Model: load a GGUF file, answer prompts, close."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from strata.arch import architecture_of
from strata.base.errors import Closed, DoesNotFit, need
from strata.base.geometry import CELL_ROWS, CONTEXT_RESERVE, WINDOW_ROWS, Geometry
from strata.base.program import ProgramSet
from strata.cpu.backend import CpuBackend
from strata.options import refuse_unknown
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.records import ChatResult, Result
from strata.runtime.session import AUTOMATIC_CHECKPOINTS, SessionState
from strata.session import Prompt, Session
from strata.streams import ChatStream, TextStream
from strata.text.chat import ChatTemplate
from strata.text.tokenizer import Tokenizer

log = logging.getLogger("strata")

KV_FORMATS = ("auto", "f16", "int8")
F16_CONTEXT = 8192
"""Up to this context "auto" stores K and V as float16, above as int8."""

LOAD_OPTIONS = ("context", "sessions", "threads", "pin", "kv", "prefill", "draft", "checkpoints")
RAM_SHARE = 0.8
"""Share of the available memory that an automatic context may take."""


@dataclass(frozen=True)
class Score:
    """Prediction of a text: tokens predicted, nats per token, perplexity = exp(nats)."""

    tokens: int
    nats: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)


def load(
    path: str | Path,
    *,
    context: int | None = None,
    sessions: int = 1,
    threads: int | None = None,
    pin: bool = False,
    kv: str = "auto",
    prefill: str = "auto",
    draft: str | None = "off",
    checkpoints: int = AUTOMATIC_CHECKPOINTS,
    **unknown: Any,
) -> Model:
    """Load a model from a GGUF file (any one shard of it).

    context      cells for prompt and answer together (8 are kept free); None: the trained context, or what fits
    sessions     conversations that can be held at once, each with its own memory
    threads      CPU threads, the caller's included; None: all physical cores this process may use
    pin          bind workers to cores
    kv           "f16", "int8" (half the memory) or "auto": f16 up to 8,192 cells
    prefill      "auto": prompts in chunks of 256 rows where they fill one; "windows": 8 rows at a time
    draft        "off" or None; this version has no drafter
    checkpoints  automatic prefix checkpoints a session keeps

    Raises FileError, ModelError, BadArgument or DoesNotFit, each with found, needed and advice.
    """
    refuse_unknown(unknown, LOAD_OPTIONS, "load")
    need(isinstance(path, str | Path), "path is no path", found=repr(path), needed="str or Path")
    need(draft in (None, "off"), "this version cannot draft", found=repr(draft), needed='"off" or None')
    need(kv in KV_FORMATS, "kv is unknown", found=repr(kv), needed=", ".join(KV_FORMATS))
    need(prefill in ("auto", "windows"), "prefill is unknown", found=repr(prefill), needed='"auto" or "windows"')
    for name, value, least in (("sessions", sessions, 1), ("context", context, 1), ("checkpoints", checkpoints, 0)):
        if value is not None:
            good = isinstance(value, int) and not isinstance(value, bool) and value >= least
            need(good, f"{name} is out of range", found=repr(value), needed=f"an integer >= {least}")
    began = time.perf_counter()
    gguf = GgufFile(path)
    try:
        model = Model(gguf, context, sessions, threads, pin, kv, prefill, checkpoints)
    except BaseException:
        gguf.close()
        raise
    model.load_seconds = time.perf_counter() - began
    log.info("loaded %s in %.2f s", gguf.path.name, model.load_seconds)
    return model


def kv_format(kv: str, context: int, geometry: Geometry) -> str:
    """The format "auto" stands for; refuses int8 for heads that its groups of 64 values do not divide."""
    if kv == "auto":
        return "f16" if context <= F16_CONTEXT or geometry.dh % 64 else "int8"
    if kv == "int8":
        need(geometry.dh % 64 == 0, "kv=int8 needs whole groups of 64 values", found=f"heads of {geometry.dh}", needed="a multiple of 64",
             advice='Use kv="f16".')  # fmt: skip
    return kv


def _cells(context: int) -> int:
    """Cells allocated for a context: whole prefill cells."""
    return -(-context // CELL_ROWS) * CELL_ROWS


class Model:
    """A loaded model. Use it as a context manager, or call `close`.

    Thread-safe: rounds of different sessions take turns; a second call on one session raises Busy, or waits with
    wait=True. `generate`, `stream` and `chat` use the model's own session, which is one of `sessions`.
    """

    def __init__(self, gguf: GgufFile, context, sessions, threads, pin, kv, prefill, checkpoints):
        arch = architecture_of(gguf)
        self._gguf = gguf
        self.geometry: Geometry = arch.read_geometry(gguf)
        arch.check_contract(gguf, self.geometry)
        self.tokenizer = Tokenizer.from_metadata(gguf.metadata)
        if self.tokenizer.vocab_size != self.geometry.V:
            log.info("the tokenizer has %d tokens, the head %d", self.tokenizer.vocab_size, self.geometry.V)
        self._template: ChatTemplate | None = None
        self.turn_token = self.tokenizer.token_id("<|im_start|>")
        self.windows_only = prefill == "windows"
        self.sessions = sessions
        self.load_seconds = 0.0
        self.context = self._fit_context(arch, context, sessions, kv, checkpoints)
        self.kv = kv_format(kv, self.context, self.geometry)
        cells = _cells(self.context)
        g = self.geometry
        programs = ProgramSet(
            windows={T: arch.trunk_program(g, T, cells, self.kv) for T in range(1, WINDOW_ROWS + 1)},
            heads={T: arch.head_program(g, T) for T in range(1, WINDOW_ROWS + 1)},
            commit=arch.commit_program(g, WINDOW_ROWS, cells, self.kv),
            prefill=arch.trunk_program(g, CELL_ROWS, cells, self.kv, advance=True),
            states=tuple(arch.state_buffers(g, cells, self.kv)),
        )
        self._backend = CpuBackend(Tensors(gguf), g, expert_layout(gguf, g.L), programs, threads=threads, pin=pin)
        self._turn = threading.RLock()
        self._pool_lock = threading.RLock()  # a finaliser may give a session back in the middle of `session`
        self._free = [SessionState(self._backend, self.context, checkpoints) for _ in range(sessions)]
        self._own: Session | None = None
        self._closed = False
        self._live: weakref.WeakSet[Session] = weakref.WeakSet()

    def _fit_context(self, arch, context, sessions, kv, checkpoints) -> int:
        """The context to use; automatic ones shrink (printed), explicit ones that do not fit are refused."""
        g = self.geometry
        available = int(psutil.virtual_memory().available * RAM_SHARE)

        def needed(cells: int) -> int:
            buffers = arch.state_buffers(g, _cells(cells), kv_format(kv, cells, g))
            recurrent = sum(b.n_bytes for b in buffers if b.role == "recurrent")
            return sessions * (sum(b.n_bytes for b in buffers) + checkpoints * recurrent) + 4 * g.rotary_dims * cells

        if context is not None:
            need(
                context > CONTEXT_RESERVE + 1,
                "the context is too small",
                found=context,
                needed=f">= {CONTEXT_RESERVE + 2}",
            )
            if needed(context) > available:
                raise DoesNotFit(
                    f"a context of {context} with {sessions} sessions does not fit in memory",
                    found=f"{available >> 20} MiB available",
                    needed=f"{needed(context) >> 20} MiB",
                    advice='Use a smaller context=, kv="int8", or fewer sessions.',
                )
            if context > g.trained_context:
                log.warning("context %d is beyond the trained context of %d", context, g.trained_context)
            return context
        fit = g.trained_context
        while needed(fit) > available and fit > CELL_ROWS:
            fit //= 2
        if needed(fit) > available:
            raise DoesNotFit(
                "no context fits in memory", found=f"{available >> 20} MiB available", needed=f"{needed(fit) >> 20} MiB"
            )
        if fit < g.trained_context:
            log.warning(
                "context reduced from %d to %d: %d MiB of memory available", g.trained_context, fit, available >> 20
            )
        return fit

    # ---- sessions

    def session(self) -> Session:
        """A new, empty conversation. DoesNotFit when all sessions allocated at load are in use."""
        self._need_open()
        with self._pool_lock:
            if not self._free:
                raise DoesNotFit(
                    "every session is in use",
                    found=f"{self.sessions} loaded, all in use" + (", one by the model itself" if self._own else ""),
                    needed="a free one",
                    advice=f"Close one, or load with sessions={self.sessions + 1}.",
                )
            state = self._free.pop()
            state.renew()
            made = Session(self, state, lambda: self._take_back(state))
            self._live.add(made)
            return made

    def _take_back(self, state: SessionState) -> None:
        with self._pool_lock:
            self._free.append(state)

    @property
    def _default(self) -> Session:
        with self._pool_lock:
            if self._own is None:
                self._own = self.session()
            return self._own

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the backend for one piece of work."""
        with self._turn:
            self._need_open()
            yield

    # ---- text

    def generate(self, prompt: Prompt, **options: Any) -> Result:
        """Continue a prompt (text or token ids).

        max_tokens=None (what the context leaves; alias max_new_tokens), stop=None (string or strings),
        ignore_eos=False, temperature=None (greedy), top_k, top_p, min_p, repetition_penalty (alias repeat_penalty),
        presence_penalty, frequency_penalty, penalty_last_n, logit_bias, seed, logprobs, top_logprobs: see
        `strata.SamplingParams`. wait=True waits for a running call instead of raising Busy.
        """
        return self._default.generate(prompt, **options)

    def stream(self, prompt: Prompt, **options: Any) -> TextStream:
        """As `generate`, as an iterator of `Chunk` records."""
        return self._default.stream(prompt, **options)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatResult | ChatStream:
        """Answer a conversation in OpenAI form: tools=None, thinking=None, reasoning_effort=None, stream=False, and
        every option of `generate`."""
        return self._default.chat(messages, **options)

    @property
    def template(self) -> ChatTemplate:
        """The file's chat template; TemplateError if it has none."""
        if self._template is None:
            self._template = ChatTemplate.from_metadata(self._gguf.metadata)
        return self._template

    def tokenize(self, text: str, special: bool = True) -> np.ndarray:
        """(n,) int32 ids; with special=False control tokens in the text are ordinary text."""
        need(isinstance(text, str), "tokenize takes text", found=type(text).__name__)
        return self.tokenizer.encode(text, special)

    def detokenize(self, tokens: Sequence[int] | np.ndarray, skip_special: bool = False) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(tokens, skip_special)

    # ---- scores

    def logits(self, tokens: Sequence[int] | np.ndarray, prefill: str | None = None) -> np.ndarray:
        """(T, V) float32 logits after each token, read from an empty state; takes the model's own session.

        prefill: None as loaded, "auto" or "windows".
        """
        return self._default.logits(tokens, prefill)

    def score(self, tokens: Prompt, prefill: str | None = None) -> Score:
        """How well the model predicts tokens[1:] (or a text's tokens), read from an empty state."""
        from strata.options import token_ids

        ids = self.tokenize(tokens) if isinstance(tokens, str) else token_ids(tokens, self.geometry.V, "token list")
        need(len(ids) >= 2, "a score needs a token to predict", found=f"{len(ids)} tokens", needed=">= 2")
        total = 0.0

        def sink(first: int, rows: np.ndarray) -> None:
            nonlocal total
            following = ids[first + 1 : first + 1 + len(rows)]
            used = rows[: len(following)].astype(np.float64)
            if len(used) == 0:
                return
            top = used.max(axis=1)
            total += float(
                (top + np.log(np.exp(used - top[:, None]).sum(axis=1)) - used[np.arange(len(used)), following]).sum()
            )

        self._default.read_logits(ids, sink, prefill)
        return Score(len(ids) - 1, total / (len(ids) - 1))

    def perplexity(self, tokens: Prompt, prefill: str | None = None) -> float:
        """exp of the mean negative log-likelihood of tokens[1:]."""
        return self.score(tokens, prefill).perplexity

    # ---- facts

    def stats(self) -> dict[str, Any]:
        """Facts about the model and counters of the backend, as plain numbers and strings."""
        self._need_open()
        b = self._backend
        return {
            "architecture": self.geometry.architecture,
            "file": str(self._gguf.path),
            "backend": b.name,
            "threads": b.threads,
            "context": self.context,
            "kv": self.kv,
            "sessions": self.sessions,
            "sessions_free": len(self._free),
            "load_seconds": round(self.load_seconds, 3),
            "memory_bytes": {a.line: a.n_bytes for a in b.allocations(self.sessions)},
            "pool": b.pool.stats(),
            "ngram": vars(b.ngram.stats) if b.ngram else None,
        }

    @property
    def closed(self) -> bool:
        return self._closed

    def _need_open(self) -> None:
        if self._closed:
            raise Closed("the model was closed", advice="Load it again.")

    def close(self) -> None:
        """End every session after the running piece of work, stop the threads, unmap the file."""
        with self._pool_lock:
            closing, self._closed = not self._closed, True
            sessions = list(self._live)
        for session in sessions:
            session.close()
        with self._turn:
            if closing:
                self._backend.close()
                self._gguf.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
