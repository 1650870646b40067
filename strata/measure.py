"""Where the time of a token goes: the generate loop that answers run, with clocks around the backend and the text.

Both wrappers stand where the real object stands in the loop; nothing is patched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.base.compiled import chunk
from strata.base.errors import StrataError
from strata.base.geometry import CELL_ROWS
from strata.base.state import State
from strata.base.window import HeadRequest, HeadRows
from strata.chunk_speed import PrefillSpeed, measure_prompt, prompt_rates
from strata.cpu.lower import parallel
from strata.cpu.machine_code import clock_ns, pause
from strata.cpu.pool import Pool
from strata.cpu.walker import WalkList
from strata.gpu.backend import GpuBackend
from strata.planner.machine import Machine
from strata.runtime.expert_stats import ExpertStats
from strata.runtime.generate import Generation
from strata.runtime.orchestrator import TieredBackend
from strata.runtime.sampling import SamplingParams
from strata.runtime.session import SessionState
from strata.streams import TextStream
from strata.text.stop import TextStop

if TYPE_CHECKING:
    from strata.model import Model

PROMPT_TOKENS = 64
"""What decode starts from; short, so that a repeat is mostly decode."""

KINDS = ("code", "prose", "unpredictable")
"""Texts that drafting is measured on. Code and prose are continued greedily. Unpredictable is random tokens, continued
by nearly random draws: what drafting must not slow down."""

NOISE = {"temperature": 2.5}

JOBS = 256
RUNS = 15
CHUNK_NS = 2000


class Clock:
    """Seconds spent in calls made through it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self.seconds += time.perf_counter() - began


class TimedBackend:
    """A backend whose windows, heads, commits and prefill chunks are timed; everything else is the backend's own."""

    def __init__(self, backend: Any):
        self._backend = backend
        self.chunk_rows = backend.chunk_rows
        self.clock = Clock()

    def new_state(self) -> State:
        return self._backend.new_state()

    def window(self, state: State, tokens: np.ndarray, previous: tuple[int, int]) -> None:
        self.clock.call(self._backend.window, state, tokens, previous)

    def prefill(
        self, state: State, tokens: np.ndarray, previous: tuple[int, int], following: np.ndarray | None = None
    ) -> None:
        self.clock.call(self._backend.prefill, state, tokens, previous, following)

    def head(self, first_row: int, T: int, request: HeadRequest) -> HeadRows:
        return self.clock.call(self._backend.head, first_row, T, request)

    def commit(self, state: State, n_keep: int) -> None:
        self.clock.call(self._backend.commit, state, n_keep)


class TimedText:
    """A TextStop whose work is timed."""

    def __init__(self, text: TextStop):
        self._text = text
        self.clock = Clock()

    def __call__(self, tokens: Iterable[int]) -> int:
        return self.clock.call(self._text, tokens)

    def take(self) -> str:
        return self.clock.call(self._text.take)

    def finish(self) -> str:
        return self.clock.call(self._text.finish)

    @property
    def stopped(self) -> bool:
        return self._text.stopped

    @property
    def stopped_on(self) -> str | int | None:
        return self._text.stopped_on


@chunk
def _keep_busy(desc, index, n_chunks):
    """A chunk that takes CHUNK_NS."""
    until = clock_ns() + CHUNK_NS
    while clock_ns() < until:
        pause()


def job_overhead_us(pool: Pool) -> float:
    """What sharing a job adds to its work, in us: the median over runs of many jobs of one 2 us chunk a thread.

    The workers are awake, as they are between the ops of a window. 0 with one thread, where jobs are not shared.
    """
    if pool.threads == 1:
        return 0.0
    walk = WalkList()
    for _ in range(JOBS):
        walk.add(parallel, pool.address, pool.threads, _keep_busy.address)
    walk.run()
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        walk.run()
        times.append(time.perf_counter() - began)
    return max(float(np.median(times)) / JOBS * 1e6 - CHUNK_NS / 1e3, 0.0)


@dataclass(frozen=True)
class Sample:
    """One repeat of decode; times in us a token.

    wall     from asking for a chunk of the stream to the next          backend  inside the backend's entry points
    walk     inside compiled programs (0 unless profiled)               text     detokeniser and stop strings
    join     sharing jobs among threads, within walk                    jobs     jobs shared, a token
    busy     CPU seconds a second of all threads                        ops      walk by kind of op
    experts  where VRAM does not hold all experts, the parts of a window: decisions, waits for the branch that ended
             last, joins, and the rest of it
    """

    wall_us: float
    backend_us: float
    walk_us: float
    join_us: float
    text_us: float
    jobs: float
    busy: float
    ops: dict[str, float]
    experts: dict[str, float] = field(default_factory=dict)

    def shared_parts(self) -> dict[str, float]:
        """The split where experts are shared: parts of windows, then everything else; they add up to the wall time."""
        window = sum(self.experts.values())
        return {
            "wall": self.wall_us,
            **self.experts,
            "head, commit, swaps": self.backend_us - window,
            "loop": self.wall_us - self.backend_us - self.text_us,
            "text": self.text_us,
        }

    def parts(self) -> dict[str, float]:
        """The split; its five parts add up to the wall time."""
        return {
            "wall": self.wall_us,
            "kernels": self.walk_us - self.join_us,
            "join": self.join_us,
            "python_backend": self.backend_us - self.walk_us,
            "python_loop": self.wall_us - self.backend_us - self.text_us,
            "text": self.text_us,
        }


def _window_parts(now: ExpertStats, before: ExpertStats, n_tokens: int) -> dict[str, float]:
    """us a token of the parts of windows between two moments."""
    spent = now.copy()
    spent -= before
    each = spent.windows / n_tokens
    parts = {name: us * each for name, us in spent.layer_us().items()}
    return parts | {"rest of the window": spent.window_us / n_tokens - sum(parts.values())}


class Speed:
    """A model's generate loop and backend under clocks, with a session of its own, from the tokens of a text."""

    def __init__(self, model: Model, text: str):
        self.model, self.inner = model, model._backend
        self.backend = TimedBackend(self.inner)
        self.state = SessionState(self.backend, model.context, checkpoints=0)
        self.tokens = model.tokenize(text, special=False)
        self.overhead_us = 0.0 if self.inner.pool is None else job_overhead_us(self.inner.pool)

    @property
    def _jobs(self) -> int:
        """Jobs shared among threads so far; none on a device."""
        return 0 if self.inner.pool is None else self.inner.pool.stats()["jobs"]

    def prompt(self, n: int) -> np.ndarray:
        """The first n tokens of the stored text, repeated where it is shorter."""
        return np.resize(self.tokens, n)

    def decode(self, n_tokens: int, profile: bool) -> Sample:
        """Decode n_tokens greedily; the prompt and the first token are not timed. Only a CPU backend can be profiled:
        of a device the whole of its time is inside the backend's entry points."""
        profile = profile and self.inner.name == "cpu"
        shared = self.inner.orchestrator if isinstance(self.inner, TieredBackend) else None
        self.state.clear()
        text = TimedText(TextStop(self.model.tokenizer, (), ()))
        generation = Generation(
            self.state, self.prompt(PROMPT_TOKENS), SamplingParams().seeded(), n_tokens + 1, text, lambda: text.stopped,
            windows_only=self.model.windows_only,
        )  # fmt: skip
        stream = TextStream(generation, text, self.model.turn, lambda: None)
        next(stream)
        if profile:
            self.inner.profile(True)
        jobs = self._jobs
        experts = shared and shared.stats.copy()  # asked for each time: the last window's stamps are summed then
        backend_s, text_s = self.backend.clock.seconds, text.clock.seconds
        cpu_s, began = time.process_time(), time.perf_counter()
        for _ in stream:
            pass
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
        backend_s, text_s = self.backend.clock.seconds - backend_s, text.clock.seconds - text_s
        jobs = (self._jobs - jobs) / n_tokens
        op_ns = self.inner.op_times() if profile else {}
        if profile:
            self.inner.profile(False)
        us = 1e6 / n_tokens
        return Sample(
            wall_us=wall_s * us,
            backend_us=backend_s * us,
            walk_us=sum(op_ns.values()) / 1e9 * us,
            join_us=jobs * self.overhead_us if profile else 0.0,
            text_us=text_s * us,
            jobs=jobs,
            busy=cpu_s / wall_s,
            ops={kind: ns / 1e9 * us for kind, ns in op_ns.items()},
            experts={} if shared is None else _window_parts(shared.stats, experts, n_tokens),
        )

    def prefill(self, n_tokens: int) -> float:
        """Tokens/s of reading a prompt into an empty state."""
        self.state.clear()
        tokens = self.prompt(n_tokens)
        began = time.perf_counter()
        with self.model.turn():
            self.state.read(tokens, windows_only=self.model.windows_only)
        return n_tokens / (time.perf_counter() - began)

    def prefill_floor_ms(self, n_tokens: int) -> float | None:
        """Milliseconds in which a device reads its weights once for each chunk of a prompt; None on the CPU."""
        index = self.model.plan.device.partition(":")[2]
        if not index:
            return None
        gpu = next(g for g in Machine.here(measure=False).gpus if g.index == int(index))
        chunks = -(-n_tokens // self.inner.chunk_rows)
        return round(chunks * self.inner.weights.n_bytes / gpu.vram_gbps / 1e6, 3)

    def prompt_parts(self, lengths: Sequence[int], repeats: int) -> PrefillSpeed | None:
        """Where the time of prompts' chunks goes, beside the floors of link and tensor cores, for lengths that fill a
        cell; None where no GPU reads by chunks."""
        gpu = self.inner
        if self.model.windows_only or not isinstance(gpu, GpuBackend) or not gpu.reads_chunks:
            return None
        with self.model.turn():
            rates, state = prompt_rates(gpu), self.state.state
            chunks = [measure_prompt(gpu, state, self.prompt(n), repeats, rates) for n in lengths if n >= CELL_ROWS]
        self.state.clear()
        return PrefillSpeed(gpu.device.name, gpu.geometry.L, 0, *rates, tuple(chunks)) if chunks else None

    def chunk_ops(self, n_tokens: int) -> dict[str, float]:
        """Milliseconds by kind of op of reading a prompt's whole cells as chunks, largest first."""
        rows = self.inner.chunk_rows
        total: dict[str, float] = {}
        self.state.clear()
        tokens = self.prompt(n_tokens // CELL_ROWS * CELL_ROWS)
        with self.model.turn():
            for first in range(0, len(tokens), rows):
                part = tokens[first : first + rows]
                for kind, ms in self.inner.prefill_ops(self.state.state, part, self.state.previous).items():
                    total[kind] = total.get(kind, 0.0) + ms
            self.state.clear()
        return {kind: round(ms, 3) for kind, ms in sorted(total.items(), key=lambda item: -item[1])}


@dataclass(frozen=True)
class Pair:
    """The same answer decoded without and with drafts, windows taking turns.

    per_s       (without, with) tokens a second
    per_cpu_s   (without, with) tokens a CPU second of all threads
    drafts      what drafting did, as `Result.drafts`
    """

    per_s: tuple[float, float]
    per_cpu_s: tuple[float, float]
    drafts: dict[str, Any]

    @property
    def speedup(self) -> tuple[float, float]:
        """Rate with drafts over rate without: by the clock, by CPU time."""
        return self.per_s[1] / self.per_s[0], self.per_cpu_s[1] / self.per_cpu_s[0]


class DraftingSpeed:
    """A model's generate loop without and with its drafting, side by side on one backend.

    texts   kind -> token ids to take prompts from; see KINDS
    """

    def __init__(self, model: Model, texts: dict[str, np.ndarray]):
        self.model, self.texts = model, texts
        self.plain = SessionState(model._backend, model.context, checkpoints=0)
        self.drafted = model._new_state()

    def prompt(self, kind: str, number: int) -> np.ndarray:
        """Prompt `number` of a kind."""
        if kind == "unpredictable":
            return np.random.default_rng(number).integers(0, self.model.geometry.V, PROMPT_TOKENS).astype(np.int32)
        return np.roll(self.texts[kind], -PROMPT_TOKENS * number)[:PROMPT_TOKENS]

    def pair(self, kind: str, number: int, n_tokens: int) -> Pair:
        """Decode n_tokens after a prompt, without and with drafts. StrataError if the two answers differ."""
        prompt = self.prompt(kind, number)
        params = SamplingParams(seed=number, **(NOISE if kind == "unpredictable" else {}))
        streams = [self._stream(state, prompt, params, n_tokens + 1) for state in (self.plain, self.drafted)]
        # a first window reads the prompt and is not timed
        first = [_round(stream) for stream in streams]
        wall, cpu, made = [0.0, 0.0], [0.0, 0.0], list(first)
        while min(made) <= n_tokens:
            i = int(made[1] < made[0])  # whoever is behind goes next
            cpu_began, began = time.process_time(), time.perf_counter()
            made[i] += _round(streams[i])
            wall[i] += time.perf_counter() - began
            cpu[i] += time.process_time() - cpu_began
        results = [stream.run() for stream in streams]
        if results[0].tokens != results[1].tokens:
            raise StrataError("drafting changed an answer", found=f"{kind} text, prompt {number}",
                              needed="the same tokens", advice="Please report this.")  # fmt: skip
        timed = [all_made - untimed for all_made, untimed in zip(made, first, strict=True)]
        return Pair((timed[0] / wall[0], timed[1] / wall[1]), (timed[0] / cpu[0], timed[1] / cpu[1]), results[1].drafts)

    def _stream(self, state: SessionState, prompt: np.ndarray, params: SamplingParams, n: int) -> TextStream:
        state.clear()
        text = TextStop(self.model.tokenizer, (), ())
        generation = Generation(state, prompt, params, n, text, lambda: text.stopped,
                                windows_only=self.model.windows_only, speculator=state.speculator)  # fmt: skip
        return TextStream(generation, text, self.model.turn, lambda: None)


def _round(stream: TextStream) -> int:
    """Take the tokens of one window from a stream; returns how many there were."""
    n = 0
    for one in stream:
        n += one.token is not None
        if not stream.pending:
            break
    return n
