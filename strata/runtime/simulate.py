"""What a cache of experts would hit: routing replayed through residency policies, without a model or a device.

All policies play by the rules of the runtime. A window finds what is resident when it begins; what it misses is
computed where it lies; residency changes between windows. They differ in what they keep:

    static   the profile's hottest experts, never changed
    lru      the experts asked for last
    lfu      the experts asked for most often, the profile's counts included
    ours     `ExpertTiers`: counted swaps every few windows, whose copies take a window to land
    oracle   of what it holds and what the window asked for, the experts that are asked for again soonest

lru, lfu and oracle copy as much as they like at once; the copies of each policy are reported beside its hits. oracle
knows the future: with windows of one row, no policy that takes in only what was just asked for hits more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.base.errors import BadArgument, FileError, need
from strata.pack.trace import DECODE, Commit, Routing, read_trace
from strata.runtime.swaps import SwapRules, counted_profile, fill_order
from strata.runtime.tiers import ExpertTiers

POLICIES = ("static", "lru", "lfu", "ours", "oracle")

_NEVER = np.iinfo(np.int64).min
_COUNT = 1 << 36
"""One use in the score of lfu; below it, when that use was."""


@dataclass(frozen=True, eq=False)
class RoutedWindow:
    """ids (L, T, K) int32 of a window; its first n_keep rows were kept; phase is PROMPT or DECODE of a trace."""

    ids: np.ndarray
    n_keep: int
    phase: int = DECODE


@dataclass(frozen=True)
class Replay:
    """What a policy did. lookups and hits are routed entries; copies are experts brought in."""

    policy: str
    lookups: int
    hits: int
    copies: int
    windows: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def copies_per_window(self) -> float:
        return self.copies / self.windows if self.windows else 0.0


class ReplaySlots:
    """Slots without memory, for `ExpertTiers`: a copy has landed when it is asked about for the first time."""

    def __init__(self, n_slots: Sequence[int]):
        self.expert_of = [np.full(n, -1, np.int32) for n in n_slots]
        self._coming: list[tuple[int, int]] = []

    def fill(self, order: Iterable[tuple[int, int]]) -> int:
        free = [np.flatnonzero(row < 0)[::-1].tolist() for row in self.expert_of]
        n = 0
        for layer, expert in order:
            if free[layer]:
                self.expert_of[layer][free[layer].pop()] = expert
                n += 1
        return n

    def place(self, layer: int, expert: int, slot: int) -> None:
        self.expert_of[layer][slot] = expert
        self._coming.append((layer, expert))

    def evict(self, layer: int, expert: int) -> int:
        slot = int(np.flatnonzero(self.expert_of[layer] == expert)[0])
        self.expert_of[layer][slot] = -1
        return slot

    def move(self, layer: int, expert: int, slot: int) -> None:
        self.expert_of[layer][self.expert_of[layer] == expert] = -1
        self.expert_of[layer][slot] = expert

    def landed(self) -> list[tuple[int, int]]:
        landed, self._coming = self._coming, []
        return landed

    wait_landed = landed

    def publish(self) -> None:
        """Nobody looks."""


# ---- routing


def cut_windows(ids: np.ndarray, rows: int = 1) -> list[RoutedWindow]:
    """Tokens as decoded windows of `rows` rows that are all kept. ids (tokens, L, K) int32."""
    need(rows >= 1, "rows of a window are out of range", found=rows, needed=">= 1")
    parts = (ids[i : i + rows] for i in range(0, len(ids), rows))
    return [RoutedWindow(np.ascontiguousarray(p.transpose(1, 0, 2), np.int32), len(p)) for p in parts]


def change_topics(ids: np.ndarray, n_experts: int, every: int, share: float = 0.25, seed: int = 1) -> np.ndarray:
    """Routing whose favourites change: every `every` tokens, that share of each layer's experts swap roles anew.

    ids (tokens, L, K) int32 of steady routing, as `strata.replay.skewed_ids` makes it.
    """
    need(every >= 1 and 0 <= share <= 1, "topics are out of range", found=(every, share), needed=">= 1 and 0..1")
    rng = np.random.default_rng(seed)
    changed = ids.copy()
    for start in range(0, len(ids), every):
        for layer in range(ids.shape[1]):
            role = np.arange(n_experts, dtype=np.int32)
            some = rng.permutation(n_experts)[: round(share * n_experts)]
            role[some] = role[rng.permutation(some)]
            changed[start : start + every, layer] = role[ids[start : start + every, layer]]
    return changed


def trace_windows(path: str | Path, n_layers: int, n_experts: int) -> list[RoutedWindow]:
    """Windows of a trace in order. Without commits in it, a window ends where the layers begin anew.

    FileError for a trace of another model, and for a window whose layers do not all have the same rows.
    """
    windows: list[RoutedWindow] = []
    layers: list[list[np.ndarray]] = [[] for _ in range(n_layers)]
    last = -1

    def close(n_keep: int | None, phase: int) -> None:
        nonlocal last, layers
        if last < 0:
            return
        shapes = {(len(rows), *{len(r) for r in rows}) for rows in layers}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            found = sorted({len(rows) for rows in layers})
            raise FileError(f"'{path}': window {len(windows)} is not whole", found=f"{found} rows by layer",
                            needed="the same rows and experts in every layer")  # fmt: skip
        ids = np.array(layers, np.int32)
        windows.append(RoutedWindow(ids, ids.shape[1] if n_keep is None else min(n_keep, ids.shape[1]), phase))
        layers, last = [[] for _ in range(n_layers)], -1

    for record in read_trace(path, n_layers, n_experts):
        if isinstance(record, Routing):
            if record.layer < last:
                close(None, DECODE)
            layers[record.layer].append(record.experts)
            last = record.layer
        elif isinstance(record, Commit):
            close(record.n_accepted, record.phase)
    close(None, DECODE)
    return windows


def count_windows(windows: Iterable[RoutedWindow], n_layers: int, n_experts: int) -> np.ndarray:
    """(L, E) int64: how often the kept rows of windows asked for each expert."""
    counts = np.zeros((n_layers, n_experts), np.int64)
    for w in windows:
        np.add.at(counts, (np.arange(n_layers)[:, None, None], w.ids[:, : w.n_keep]), 1)
    return counts


# ---- replay


def simulate(
    windows: Sequence[RoutedWindow],
    counts: np.ndarray,
    n_slots: Sequence[int],
    policies: Sequence[str] = POLICIES,
    rules: SwapRules | None = None,
) -> list[Replay]:
    """Replay windows through policies that all begin with the hottest experts by `counts`.

    counts   (L, E) int64 of earlier routing: what the profile is made from
    n_slots  slots by layer
    """
    L, E = counts.shape
    need(len(n_slots) == L, "slots of another number of layers", found=len(n_slots), needed=L)
    need(all(0 <= s <= E for s in n_slots), "slots of a layer are out of range", found=tuple(n_slots), needed=f"<= {E}")
    for policy in policies:
        if policy not in POLICIES:
            raise BadArgument("no such policy", found=repr(policy), needed=", ".join(POLICIES))
    for w in windows:
        need(w.ids.ndim == 3 and w.ids.shape[0] == L and w.ids.min(initial=0) >= 0 and w.ids.max(initial=0) < E,
             "a window is of another model", found=w.ids.shape, needed=f"({L}, T, K), ids below {E}")  # fmt: skip
    return [_replay(policy, windows, counts, n_slots, rules) for policy in policies]


def _replay(
    policy: str, windows: Sequence[RoutedWindow], counts: np.ndarray, n_slots: Sequence[int], rules: SwapRules | None
) -> Replay:
    if policy == "ours":
        return _replay_ours(windows, counts, n_slots, rules)
    L, E = counts.shape
    layers = np.arange(L)[:, None]
    resident = np.zeros((L, E), bool)
    order = fill_order(counted_profile(counts), n_slots)
    resident[order[:, 0], order[:, 1]] = True
    keep = None if policy == "static" else _KEEPERS[policy](windows, counts, order)
    hits = copies = lookups = 0
    for i, w in enumerate(windows):
        flat = w.ids.reshape(L, -1)
        hits += int(resident[layers, flat].sum())
        lookups += flat.size
        if keep is not None:
            scores = keep(i, flat, resident)
            new = _best(scores, n_slots)
            copies += int((new & ~resident).sum())
            resident = new
    return Replay(policy, lookups, hits, copies, len(windows))


def _replay_ours(
    windows: Sequence[RoutedWindow], counts: np.ndarray, n_slots: Sequence[int], rules: SwapRules | None
) -> Replay:
    L, E = counts.shape
    tiers = ExpertTiers(ReplaySlots(n_slots), counted_profile(counts), n_experts=E, expert_bytes=[1] * L, rules=rules)
    tiers.fill()
    for w in windows:
        tiers.observe(w.ids, w.n_keep)
        tiers.between_windows()
    s = tiers.stats()
    return Replay("ours", int(s["lookups"]), int(s["hits"]), int(s["copies"]), len(windows))


def _best(scores: np.ndarray, n_slots: Sequence[int]) -> np.ndarray:
    """(L, E) bool: in each layer the n_slots largest scores. Scores (L, E) int64 differ within a layer, but for _NEVER,
    which is never among them."""
    E = scores.shape[1]
    ordered = np.sort(scores, axis=1)
    slots = np.asarray(n_slots)
    least = np.where(slots > 0, ordered[np.arange(len(slots)), np.minimum(E - slots, E - 1)], np.iinfo(np.int64).max)
    return (scores >= least[:, None]) & (scores > _NEVER)


Keep = Callable[[int, np.ndarray, np.ndarray], np.ndarray]
"""keep(window, (L, n) ids, resident) -> (L, E) int64 scores: what is worth a slot after the window."""


def _last_used(windows: Sequence[RoutedWindow], counts: np.ndarray, order: np.ndarray) -> Keep:
    scores = np.full(counts.shape, _NEVER)
    scores[order[:, 0], order[:, 1]] = -1 - np.arange(len(order))
    layers = np.arange(len(counts))[:, None]
    widest = max((w.ids.shape[1] * w.ids.shape[2] for w in windows), default=1)

    def keep(window: int, ids: np.ndarray, resident: np.ndarray) -> np.ndarray:
        scores[layers, ids] = window * widest + np.arange(ids.shape[1])
        return scores

    return keep


def _most_used(windows: Sequence[RoutedWindow], counts: np.ndarray, order: np.ndarray) -> Keep:
    # Of equal counts the later use wins, and before any use the lower index: as the profile ranks.
    scores = counts * _COUNT + (_COUNT // 2 - 1 - np.arange(counts.shape[1]))
    held = np.zeros(counts.shape, bool)
    held[order[:, 0], order[:, 1]] = True
    seen = held.copy()
    layers = np.arange(len(counts))[:, None]
    widest = max((w.ids.shape[1] * w.ids.shape[2] for w in windows), default=1)

    def keep(window: int, ids: np.ndarray, resident: np.ndarray) -> np.ndarray:
        uses = scores // _COUNT
        np.add.at(uses, (layers, ids), 1)
        scores[layers, ids] = uses[layers, ids] * _COUNT + _COUNT // 2 + window * widest + np.arange(ids.shape[1])
        seen[layers, ids] = True
        return np.where(seen, scores, _NEVER)

    return keep


def _next_used(windows: Sequence[RoutedWindow], counts: np.ndarray, order: np.ndarray) -> Keep:
    L, E = counts.shape
    layers = np.arange(L)[:, None]
    last = len(windows)
    coming = np.full((L, E), last, np.int64)
    following: list[np.ndarray] = [np.zeros(0)] * last
    for i in range(last - 1, -1, -1):
        flat = windows[i].ids.reshape(L, -1)
        following[i] = coming[layers, flat]
        coming[layers, flat] = i
    index = np.arange(E)

    def keep(window: int, ids: np.ndarray, resident: np.ndarray) -> np.ndarray:
        coming[layers, ids] = following[window]
        held = resident.copy()
        held[layers, ids] = True
        return np.where(held, -(coming * E + index), _NEVER)

    return keep


_KEEPERS = {"lru": _last_used, "lfu": _most_used, "oracle": _next_used}
