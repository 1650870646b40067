"""Model: load a GGUF file, answer prompts, close."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from strata.arch import architecture_of
from strata.base.errors import Closed, DoesNotFit, ModelError, StrataError, need
from strata.base.geometry import Geometry
from strata.base.numbers import shown, whole_number
from strata.base.plan import Mismatch, Plan
from strata.base.process import OwnProcess
from strata.base.program import Allocation
from strata.base.progress import COMPILING, LoadProgress, listening, report
from strata.loading import LoadOptions, find_draft_layer, load_draft_layer, make_backend, plan_load
from strata.options import refuse_unknown, token_ids, truth
from strata.pack.fingerprint import fingerprint
from strata.pack.gguf_file import GgufFile
from strata.records import ChatResult, Result
from strata.runtime import sampling
from strata.runtime.compile_ahead import second_process
from strata.runtime.orchestrator import TieredBackend
from strata.runtime.session import AUTOMATIC_CHECKPOINTS, SessionState
from strata.runtime.speculation import Speculator, drafting_facts
from strata.runtime.transfer import Identity
from strata.scoring import Score, score_tokens
from strata.session import Prompt, Session
from strata.spec.drafter import DrafterGuard
from strata.spec.mtp import MtpDrafter
from strata.spec.policy import DraftPolicy
from strata.streams import ChatStream, TextStream
from strata.text.chat import ChatTemplate
from strata.text.tokenizer import Tokenizer

log = logging.getLogger("strata")

GIVE_WAY_S = 0.0005
"""How long a thread leaves the backend to others that wait for it: they wake up meanwhile."""


def load(
    path: str | Path,
    *,
    context: int | None = None,
    sessions: int = 1,
    threads: int | None = None,
    pin: bool = False,
    kv: str = "auto",
    prefill: str = "auto",
    draft: Any = "off",
    checkpoints: int = AUTOMATIC_CHECKPOINTS,
    device: str = "auto",
    vram_gib: float | None = None,
    ngram: str = "auto",
    slots: int | str | None = None,
    experts: str = "auto",
    pcie_share: float | None = None,
    profile: Any = None,
    on_progress: Callable[[LoadProgress], None] | None = None,
    **unknown: Any,
) -> Model:
    """Load a model from a GGUF file (any one shard, or the folder that holds only it), after planning what it takes
    (`strata.plan`).

    context      cells for prompt and answer together (8 are kept free); None: the trained context, or what fits
    sessions     conversations that can be held at once, each with its own memory
    threads      CPU threads, the caller's included; None: all physical cores this process may use, beside a GPU all but
                 one
    pin          bind workers to cores
    kv           "f16", "int8" (half the memory) or "auto": f16 up to 8,192 cells, where that fits
    prefill      "auto": prompts in chunks of 256 rows where they fill one; "windows": 8 rows at a time
    draft        "off" or None; "auto": the draft layer beside the model, if any, and lookup in earlier text; "lookup":
                 the latter alone; a path to a draft layer; or an object with propose(tokens, k)
    checkpoints  automatic prefix checkpoints a session keeps
    device       "auto": the first GPU if it can be used and holds the model, else the CPU (a GPU that is there and not
                 used is mentioned once, or is an error if vram_gib, slots, pcie_share or experts ask for it); "cpu";
                 "cuda" or "cuda:N": that GPU, or an error that says what is lacking
    vram_gib     most that is taken of the GPU's memory, the driver's share included; None: what is free
    slots        routed experts that the GPU holds; None: all if they fit, else as many as fit; "all": every one, or
                 DoesNotFit; 0: none. The CPU computes the others
    experts      where RAM holds experts when the GPU does not hold all: "mapped" (pages of the file), "pinned" (all,
                 locked), "resident" (what the GPU does not hold, locked) or "auto": the first of the last two that
                 fits, else "mapped"
    pcie_share   share of the experts missing in a layer that the GPU reads over PCIe instead, 0 to 1; None: as
                 `strata calibrate` kept it, else by cost. Above 0 with experts="mapped" it locks the file's pages
    profile      file of a ranking of experts (`strata profile`), or an ExpertProfile: the first are held by the GPU;
                 on the CPU it is checked, and has no use
    ngram        how rows of the n-gram table are read: "mapped": through the page cache; "direct": past it, while the
                 window already runs; "auto": mapped where free RAM holds the whole table, or where
                 nothing else fits; else direct if the file system can
    on_progress  called with `strata.LoadProgress` records (what, done, total, name) while kernels are compiled and
                 tested and weights are uploaded; what it raises ends the load

    What is asked for is never made smaller: it fits or raises DoesNotFit before anything is allocated; what is chosen
    automatically may shrink, with a warning. `Model.plan` is the plan, `Model.stats()["plan"]` compares it with what
    was taken. Raises FileError, ModelError, BadArgument, NoDevice or DoesNotFit, each with found, needed and advice.
    """
    refuse_unknown(unknown, [*(f.name for f in fields(LoadOptions)), "on_progress"], "load")
    need(isinstance(path, str | Path), "path is no path", found=shown(path), needed="str or Path")
    need(str(path) != "", "path is empty", found="''", needed="a GGUF file or its folder")
    usable = on_progress is None or callable(on_progress)
    need(usable, "on_progress is no function", found=shown(on_progress), needed="a function of one record, or None")
    options = LoadOptions(context, sessions, threads, pin, kv, prefill, draft, checkpoints, device, vram_gib, ngram,
                          slots, experts, pcie_share, profile)  # fmt: skip
    options.validate()
    began = time.perf_counter()
    gguf = GgufFile(path)
    try:
        with listening(on_progress):
            model = Model(gguf, options)
    except BaseException:
        gguf.close()
        raise
    model.load_seconds = time.perf_counter() - began
    log.info("loaded %s in %.2f s", gguf.path.name, model.load_seconds)
    return model


class Model:
    """A loaded model. Use it as a context manager, or call `close`.

    Thread-safe: rounds of different sessions take turns; a second call on one session raises Busy, or waits with
    wait=True. `generate`, `stream` and `chat` use the model's own session, which is one of `sessions`.
    """

    def __init__(self, gguf: GgufFile, options: LoadOptions):
        arch = architecture_of(gguf)
        self._gguf, self.sessions = gguf, options.sessions
        self.geometry: Geometry = arch.read_geometry(gguf)
        arch.check_contract(gguf, self.geometry)
        self.tokenizer = Tokenizer.from_metadata(gguf.metadata)
        if self.tokenizer.vocab_size < self.geometry.V:
            raise ModelError(f"{gguf.path.name}: the head has tokens without a text", found=self.tokenizer.vocab_size,
                             needed=self.geometry.V, advice="Use a GGUF made with its own tokenizer.")  # fmt: skip
        self._template: ChatTemplate | None = None
        self.turn_token = self.tokenizer.token_id("<|im_start|>")
        self.windows_only = options.prefill == "windows"
        self.load_seconds = 0.0
        source = find_draft_layer(gguf, options.draft)
        self.plan: Plan = plan_load(gguf, self.geometry, options, source)
        self.context, self.kv = self.plan.context, self.plan.kv
        self.draft_layer = load_draft_layer(source, gguf, arch, self.geometry)
        with second_process(cpu=self.plan.device == "cpu") as finish:
            self._backend = make_backend(gguf, arch, self.geometry, self.plan, options.pin, self.draft_layer,
                                         options.ranking(self.geometry))  # fmt: skip
            try:
                report(COMPILING, 0, 1, "sampling")
                finish()  # it may be writing what this process would write
                sampling.warm_up()  # so that no token waits for it
                report(COMPILING, 1, 1)
            except BaseException:
                self._backend.close()
                raise
        if self.draft_layer is not None and self.plan.device != "cpu":
            self.draft_layer = self.draft_layer.without_tensors()  # they are on the device
        self._turn = threading.RLock()
        self._waiting: set[int] = set()  # threads that want it
        self._process = OwnProcess()
        self._pool_lock = threading.RLock()  # around which session holds which state; never held during work
        self.policy = DraftPolicy() if options.drafting else None
        self._guard = None
        if callable(getattr(options.draft, "propose", None)):
            self._guard = DrafterGuard(options.draft, self.geometry.V)
        try:
            with self._backend.current():
                self._states = [self._new_state() for _ in range(self.sessions)]
            self.taken = self._allocations()
        except BaseException:
            self._backend.close()
            raise
        self._free = list(self._states)
        self.mismatches: list[Mismatch] = self.plan.verify(self.taken)
        for mismatch in self.mismatches:
            log.warning("allocation differs from the plan: %s", mismatch)
        self._own: Session | None = None
        self._closed = False
        self._live: weakref.WeakSet[Session] = weakref.WeakSet()

    # ---- sessions

    def _allocations(self) -> list[Allocation]:
        """What the load took, under the plan's line names."""
        taken = self._backend.allocations([s.state for s in self._states])
        taken.append(Allocation("checkpoints", "ram", sum(s.ledger.n_bytes for s in self._states), "of all sessions"))
        if self.draft_layer is not None and self.draft_layer.vocabulary is not None:
            ids = self.draft_layer.vocabulary.nbytes
            line = "draft head" if self.plan.device == "cpu" else "token ids of drafts"
            taken.append(Allocation(line, "ram", ids, "of the head's rows"))
        return [a for a in taken if a.n_bytes]

    def _new_state(self) -> SessionState:
        mtp = None
        if self.draft_layer is not None:
            mtp = MtpDrafter(self._backend.draft)
        state = SessionState(self._backend, self.context, self.plan.checkpoints, mtp)
        if self.policy is not None:
            state.speculator = Speculator(state, self.policy, self._guard)
        return state

    def session(self) -> Session:
        """A new, empty conversation. DoesNotFit when all sessions allocated at load are in use."""
        self.need_open()
        with self._pool_lock:
            if not self._free:
                raise DoesNotFit(
                    "every session is in use",
                    found=f"{self.sessions} loaded, all in use" + (", one by the model itself" if self._own else ""),
                    needed="a free one", advice=f"Close one, or load with sessions={self.sessions + 1}.")  # fmt: skip
            state = self._free.pop()
            with self._backend.current():
                state.renew()
            made = Session(self, state, functools.partial(self._free.append, state))
            self._live.add(made)
            return made

    @property
    def _default(self) -> Session:
        self.need_here()
        with self._pool_lock:
            if self._own is None:
                self._own = self.session()
            return self._own

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the backend for one piece of work."""
        self.need_here()
        me = threading.get_ident()
        self._waiting.add(me)
        try:
            with self._turn, self._backend.current():
                self._waiting.discard(me)
                self.need_open()
                yield
        finally:
            self._waiting.discard(me)
        if self._waiting:
            time.sleep(GIVE_WAY_S)  # a lock goes to whoever asks first, which is this thread, again and again

    @property
    def is_here(self) -> bool:
        """Whether this process loaded the model; a forked child has a copy without its threads."""
        return self._process.is_here

    def need_here(self) -> None:
        """StrataError in another process than the one that loaded the model."""
        self._process.need("the model")

    def check_file(self) -> None:
        """FileError if experts are read from a file that is no longer as long as it was."""
        if isinstance(self._backend, TieredBackend):
            self._backend.check_file()

    # ---- text

    def generate(self, prompt: Prompt, **options: Any) -> Result:
        """Continue a prompt (text or token ids).

        max_tokens=None (what the context leaves; alias max_new_tokens), stop=None (string or strings),
        ignore_eos=False, temperature=None (greedy), top_k, top_p, min_p, repetition_penalty (alias repeat_penalty),
        presence_penalty, frequency_penalty, penalty_last_n, logit_bias, seed, logprobs, top_logprobs: see
        `strata.SamplingParams`. wait=True waits for a running call instead of raising Busy. drafts=False decodes
        without drafts; draft_acceptance="exact" (the same text as without) or "rejection" (the same distribution).
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
        need(isinstance(text, str), "tokenize takes text", found=type(text).__name__, needed="str")
        return self.tokenizer.encode(text, truth("special", special))

    def detokenize(self, tokens: Sequence[int] | np.ndarray, skip_special: bool = False) -> str:
        """The text of token ids."""
        many = isinstance(tokens, Sequence | np.ndarray) and not isinstance(tokens, str | bytes)
        flat = isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind in "iu"
        whole = flat or (many and all(whole_number(t) is not None for t in tokens))
        need(whole, "detokenize takes token ids", found=type(tokens).__name__, needed="integers")
        return self.tokenizer.decode(tokens, truth("skip_special", skip_special))

    # ---- scores

    def logits(self, tokens: Sequence[int] | np.ndarray, prefill: str | None = None) -> np.ndarray:
        """(T, V) float32 logits after each token, read from an empty state; takes the model's own session.

        prefill: None as loaded, "auto" or "windows".
        """
        return self._default.logits(tokens, prefill)

    def score(self, tokens: Prompt, prefill: str | None = None) -> Score:
        """How well the model predicts tokens[1:] (or a text's tokens), read from an empty state."""
        ids = token_ids(self.tokenize(tokens) if isinstance(tokens, str) else tokens, self.geometry.V, "token list")
        need(len(ids) >= 2, "a score needs a token to predict", found=f"{len(ids)} tokens", needed=">= 2")
        return score_tokens(ids, lambda sink: self._default.read_logits(ids, sink, prefill))

    def perplexity(self, tokens: Prompt, prefill: str | None = None) -> float:
        """exp of the mean negative log-likelihood of tokens[1:]."""
        return self.score(tokens, prefill).perplexity

    # ---- facts

    def stats(self) -> dict[str, Any]:
        """Facts about the model and counters of the backend, as plain numbers and strings."""
        self.need_open()
        b, compared = self._backend, self.plan.compared(self.taken)
        return {
            "architecture": self.geometry.architecture,
            "file": str(self._gguf.path),
            "backend": b.name,
            "device": self.plan.device,
            "threads": b.threads,
            "context": self.context,
            "kv": self.kv,
            "sessions": self.sessions,
            "sessions_free": len(self._free),
            "load_seconds": round(self.load_seconds, 3),
            "memory_bytes": {line: taken for (line, _), (_, taken) in compared.items()},
            "plan": {
                "verdict": self.plan.verdict,
                "lines": {
                    line: {"device": device, "planned_bytes": planned, "taken_bytes": taken}
                    for (line, device), (planned, taken) in compared.items()
                },
                "mismatches": [str(m) for m in self.mismatches],
                "notes": list(self.plan.notes),
            },
            "pool": b.pool.stats() if b.pool is not None else None,
            "ngram": dict(vars(b.ngram.stats)) if b.ngram else None,
            "experts": b.orchestrator.record() if isinstance(b, TieredBackend) else None,
            "drafting": drafting_facts([s.speculator for s in self._states if s.speculator is not None]),
        }

    @functools.cached_property
    def identity(self) -> Identity:
        """What exported sessions must have in common with this model."""
        return Identity(fingerprint(self._gguf), self.kv)

    @property
    def closed(self) -> bool:
        return self._closed

    def need_open(self) -> None:
        """Closed if it is, StrataError in another process."""
        self.need_here()
        if self._closed:
            raise Closed("the model was closed", found=self._gguf.path.name, needed="an open one",
                         advice="Load it again.")  # fmt: skip

    def close(self) -> None:
        """End every session after the running piece of work, stop the threads, unmap the file. Does nothing in a forked
        child."""
        if not self.is_here:
            return
        with self._pool_lock:
            closing, self._closed = not self._closed, True
            sessions = list(self._live)
        for session in sessions:
            session.close()
        with self._turn:
            if closing:
                with contextlib.closing(self._gguf):
                    self._backend.close()
                # What refers back would keep memory and mappings until the garbage collector comes.
                with self._pool_lock:
                    self._own = None
                for state in self._states:
                    state.speculator = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(StrataError):  # the first error counts
            self.close()
