"""Profiles and traces from texts: which experts a model asks for when it reads them, and what a cache would hit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strata.base.errors import StrataError, need
from strata.base.geometry import CONTEXT_RESERVE
from strata.options import token_ids
from strata.pack.profile import ExpertProfile
from strata.pack.trace import PROMPT, TraceWriter
from strata.planner.slots import admission_queue, allot, slot_sizes
from strata.replay import routing
from strata.runtime.session import SessionState
from strata.runtime.simulate import POLICIES, Replay, RoutedWindow, count_windows, simulate
from strata.runtime.swaps import counted_profile

if TYPE_CHECKING:
    from strata.model import Model

DEFAULT_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of all experts: slots that a simulation looks at."""


def route_text(
    model: Model, tokens: Sequence[int] | np.ndarray, on_progress: Callable[[int, int], None] | None = None
) -> np.ndarray:
    """(n, L, K) int32: the experts of every token in every layer, for a text read from an empty state.

    tokens       (n,) token ids, cut into parts that fill the context, each read from an empty state
    on_progress  called with tokens read and tokens in all

    The model must compute on the CPU (`load(..., device="cpu")`), and be idle.
    """
    backend = model.stats()["backend"]
    if backend != "cpu":
        raise StrataError("routing is read from the CPU backend", found=backend, needed="cpu",
                          advice='Load the model with device="cpu".')  # fmt: skip
    ids = token_ids(tokens, model.geometry.V, "text")
    size = model.context - CONTEXT_RESERVE
    need(size >= 1, "the context is too small", found=model.context, needed=f"> {CONTEXT_RESERVE}")
    session, runs = SessionState(model._backend, model.context, checkpoints=0), []

    def tell(read: int) -> None:
        if on_progress is not None:
            on_progress(read, len(ids))

    for start in range(0, len(ids), size):
        session.clear()
        with model.turn(), routing(model._backend) as log:
            session.read(ids[start : start + size], windows_only=model.windows_only,
                         check=lambda start=start: tell(start + session.rows))  # fmt: skip
        runs += log.runs
    tell(len(ids))
    return np.concatenate(runs)


def write_trace(path: str | Path, texts: Sequence[Sequence[RoutedWindow]]) -> None:
    """Write the windows of texts as a trace: a request a text, its windows read as a prompt."""
    with TraceWriter(path) as trace:
        window_id = 0
        for request, windows in enumerate(texts):
            trace.request(request)
            for w in windows:
                for layer, rows in enumerate(w.ids):
                    for experts in rows:
                        trace.routing(layer, experts)
                trace.commit(window_id, w.ids.shape[1], w.n_keep, PROMPT)
                window_id += 1


@dataclass(frozen=True)
class CacheSize:
    """A size of the cache and what policies hit with it. slots of all layers; n_bytes they take."""

    slots: int
    n_bytes: int
    replays: list[Replay]


def simulate_sizes(
    windows: Sequence[RoutedWindow],
    expert_bytes: Sequence[int],
    n_experts: int,
    slots: Sequence[int] | None = None,
    held_out: float = 0.5,
    policies: Sequence[str] = POLICIES,
) -> list[CacheSize]:
    """Replay the last part of windows against a profile of the first part.

    expert_bytes (L,) of one expert; slots: sizes to look at, of all layers together, None: shares of all experts;
    held_out: the share of the windows that is replayed
    """
    L = len(expert_bytes)
    need(0 < held_out < 1, "the held-out share is out of range", found=held_out, needed="between 0 and 1")
    first = len(windows) - round(held_out * len(windows))
    need(0 < first < len(windows), "too few windows to hold some out", found=len(windows), needed=">= 2")
    sizes = [round(share * L * n_experts) for share in DEFAULT_SHARES] if slots is None else list(slots)
    for n in sizes:
        need(0 <= n <= L * n_experts, "slots are out of range", found=n, needed=f"0 to {L * n_experts}")
    counts = count_windows(windows[:first], L, n_experts)
    queue = admission_queue(slot_sizes(tuple(expert_bytes)), n_experts, counted_profile(counts))
    allotted = [allot(queue, int(queue.ends[-1]), n) for n in sizes]
    return [CacheSize(a.n_slots, a.n_bytes, simulate(windows[first:], counts, a.slots, policies)) for a in allotted]


def profile_of(windows: Sequence[RoutedWindow], n_layers: int, n_experts: int) -> ExpertProfile:
    """A ranking of every pair by how often the windows' kept rows asked for it."""
    return counted_profile(count_windows(windows, n_layers, n_experts))
