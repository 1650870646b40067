"""Routing seen and replaced: what experts a run asks for, and runs that ask for experts as a trained model would.

Random weights route almost evenly. Replayed ids have the skew of a trained model, mass ~ (rank + 1)^-1.2 over a layer's
experts, and share a part of each token's experts with the token before.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from strata.base.errors import need
from strata.base.geometry import WINDOW_ROWS
from strata.base.state import State
from strata.cpu.backend import CpuBackend
from strata.cpu.lower import Lowering

SKEW = 1.2
SHARED = 0.35
SPAN = 48
"""Tokens over which distinct experts are counted."""


def skewed_ids(tokens: int, L: int, E: int, K: int, seed: int = 1, skew: float = SKEW, shared: float = SHARED):
    """(tokens, L, K) int32 of distinct experts. Of each token's K, a part that averages `shared` is the previous
    token's; the others are drawn by mass (rank + 1)^-skew among those that the previous token did not ask for."""
    need(E >= 2 * K, "too few experts to replay routing", found=E, needed=f">= {2 * K}")
    rng = np.random.default_rng(seed)
    mass = np.log((np.arange(E) + 1.0) ** -skew)
    log_mass = np.stack([mass[rng.permutation(E)] for _ in range(L)])
    ids = np.empty((tokens, L, K), np.int32)
    layers = np.arange(L)[:, None]
    for t in range(tokens):
        keys = log_mass + rng.gumbel(size=(L, E))  # the largest keys are a draw without replacement
        if t:
            before = ids[t - 1]
            keep = int(np.floor(shared * K)) + (rng.random(L) < shared * K % 1)
            keys[layers, before] = -np.inf
            kept = rng.permuted(before, axis=1)
            for layer in range(L):
                keys[layer, kept[layer, : keep[layer]]] = 1e9 - np.arange(keep[layer])
        ids[t] = np.argpartition(-keys, K, axis=1)[:, :K]
    return ids


def uniform_ids(tokens: int, L: int, E: int, K: int, seed: int = 1) -> np.ndarray:
    """(tokens, L, K) int32 of distinct experts, all equally likely."""
    return np.random.default_rng(seed).random((tokens, L, E)).argpartition(K, axis=2)[:, :, :K].astype(np.int32)


def same_ids(tokens: int, L: int, E: int, K: int, seed: int = 1) -> np.ndarray:
    """(tokens, L, K) int32: as `skewed_ids`, but eight tokens at a time want the same experts."""
    return np.repeat(skewed_ids(-(-tokens // WINDOW_ROWS), L, E, K, seed), WINDOW_ROWS, axis=0)[:tokens]


@dataclass(frozen=True)
class RoutingFacts:
    """Of a run's routing, means over layers. distinct: experts that `span` tokens in a row ask for; overlap: share of a
    token's experts that the token before asked for too; top_share: share of all requests that a layer's K most asked
    experts get."""

    tokens: int
    span: int
    distinct: float
    overlap: float
    top_share: float

    def __str__(self) -> str:
        return (f"{self.distinct:.1f} distinct experts per {self.span} tokens, overlap with the previous token "
                f"{100 * self.overlap:.0f} %, top experts' share {100 * self.top_share:.0f} %, {self.tokens} tokens")


def routing_facts(ids: np.ndarray, E: int) -> RoutingFacts:
    """ids (tokens, L, K) int32, at least two tokens."""
    n, L, K = ids.shape
    need(n >= 2, "too few tokens to describe routing", found=n, needed=">= 2")
    chosen = np.zeros((n, L, E), bool)
    np.put_along_axis(chosen, ids.astype(np.int64), True, axis=2)
    span = min(SPAN, n)
    distinct = np.mean([chosen[i : i + span].any(0).sum(1).mean() for i in range(0, n - span + 1, span)])
    overlap = (chosen[1:] & chosen[:-1]).sum(2).mean() / K
    counts = np.sort(chosen.sum(0), axis=1)[:, ::-1]
    return RoutingFacts(n, span, float(distinct), float(overlap), float((counts[:, :K].sum(1) / (n * K)).mean()))


@dataclass
class RoutingLog:
    """Ids of windows and chunks that were run, each (rows, L, K)."""

    runs: list[np.ndarray] = field(default_factory=list)

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate(self.runs)


@contextlib.contextmanager
def routing(backend: CpuBackend, replayed: np.ndarray | None = None) -> Iterator[RoutingLog]:
    """Within the block, windows and prefill chunks stop behind each router: what it chose is logged, or replaced.

    replayed  (n, L, K) int32: row r of a session takes those at r modulo n, with equal weights; None: log alone
    A layer costs one more call from Python, about a microsecond.
    """
    log = RoutingLog()
    plain = backend._run
    cuts: dict[int, list[tuple[int, int]]] = {}

    def cuts_of(lowering: Lowering) -> list[tuple[int, int]]:
        """(layer, step behind its router) in order."""
        if id(lowering) not in cuts:
            routers = [(i, op.layer) for i, op in enumerate(lowering.program.ops) if op.kind == "router"]
            cuts[id(lowering)] = [(layer, bisect.bisect_right(lowering.op_of_step, i)) for i, layer in routers]
        return cuts[id(lowering)]

    def run(lowering: Lowering, state: State) -> None:
        stops = cuts_of(lowering)
        if not stops:
            plain(lowering, state)
            return
        T, walk = lowering.program.T, lowering.walk
        arrays = backend.memory.arrays
        ids, weights = arrays["moe.ids"][:T], arrays["moe.weights"][:T]
        seen = np.empty((T, len(stops), ids.shape[1]), np.int32)
        rows = (state.rows + np.arange(T)) % len(replayed) if replayed is not None else None
        first = 0
        for at, (layer, stop) in enumerate([*stops, (-1, len(walk))]):
            failed = walk.run_range(first, stop - first)
            backend._check(lowering, failed if failed < 0 else failed + first, state)
            first = stop
            if layer < 0:
                break
            if rows is not None:
                ids[:] = replayed[rows, layer]
                weights[:] = 1 / ids.shape[1]
            seen[:, at] = ids
        log.runs.append(seen)

    backend._run = run
    try:
        yield log
    finally:
        del backend._run
