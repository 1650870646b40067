"""Which experts deserve a place in VRAM: pure functions over routing counts, residency and rankings.

Nothing here knows a device. Equal inputs give equal decisions, with ties broken by layer and index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata.base.errors import BadArgument, need
from strata.pack.profile import ExpertProfile

FORGOTTEN = np.float32(2.0**-20)
"""Usage below this counts as none: subnormal numbers would slow down every later pass."""

_LAST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class SwapRules:
    """When an expert replaces another one.

    every        windows from one adaptation to the next
    most         swaps of one adaptation
    least        usage from which an expert may come in
    margin       usage by which it must exceed the expert that goes
    decay        factor on all usage at every adaptation
    link_share   share of the link's hidden time that copies may fill
    long_decay   the same factor for a second, longer memory of the same counts
    long_weight  what that memory counts in an expert's score, beside its usage; 0: nothing
    head_start   counts in the long memory of experts that a profile put in their slots
    """

    every: int = 4
    most: int = 96
    least: float = 2.0
    margin: float = 1.5
    decay: float = 0.7
    link_share: float = 0.8
    long_decay: float = 0.99
    long_weight: float = 1.0
    head_start: float = 30.0

    def __post_init__(self) -> None:
        need(self.every >= 1 and self.most >= 0, "every and most are out of range", found=(self.every, self.most))
        need(0 < self.decay < 1 and 0 < self.long_decay < 1, "decay and long_decay are out of range",
             found=(self.decay, self.long_decay), needed="between 0 and 1")  # fmt: skip
        need(0 < self.link_share <= 1, "link_share is out of range", found=self.link_share, needed="above 0, at most 1")
        need(self.long_weight >= 0 and self.head_start >= 0, "long_weight and head_start are out of range",
             found=(self.long_weight, self.head_start), needed=">= 0")  # fmt: skip
        need(self.least > 0 and self.margin >= 0, "least and margin are out of range", found=(self.least, self.margin))


@dataclass(frozen=True, eq=False)
class Swaps:
    """Decisions, largest gain first. layers, incoming, victims (n,) int64, victims -1 for an empty slot; gains (n,)
    float32."""

    layers: np.ndarray
    incoming: np.ndarray
    victims: np.ndarray
    gains: np.ndarray

    def __len__(self) -> int:
        return len(self.layers)


def copy_budget_bytes(rules: SwapRules, link_gbps: float | None, hidden_ms: float | None) -> float:
    """Bytes that one adaptation may copy; no limit where the link or the hidden time is unknown."""
    if link_gbps is None or hidden_ms is None:
        return float("inf")
    return rules.link_share * link_gbps * 1e6 * hidden_ms


def plan_swaps(
    usage: np.ndarray,
    resident: np.ndarray,
    empty: np.ndarray,
    expert_bytes: np.ndarray,
    rules: SwapRules,
    budget_bytes: float = float("inf"),
) -> Swaps:
    """What one adaptation brings in, and what goes for it. No swap crosses layers.

    usage         (L, E) float32 scores, 0 or more
    resident      (L, E) bool
    empty         (L,) slots without an expert
    expert_bytes  (L,) bytes of one expert

    In a layer, candidates are the experts not resident whose usage is at least `least`, most used first. They take the
    empty slots, then each the place of the coldest resident left, until one does not exceed it by `margin`. Of all
    layers the largest gains are kept: at most `most`, and as many in order as `budget_bytes` allow.
    """
    L, E = usage.shape
    bits = usage.view(np.int32).astype(np.int64)  # of floats from 0 on, the order of the bits is that of the values
    index = np.arange(E, dtype=np.int64)
    wanted = (usage >= np.float32(rules.least)) & ~resident
    if not wanted.any():
        none = np.zeros(0, np.int64)
        return Swaps(none, none, none, np.zeros(0, np.float32))
    columns = min(E, rules.most)  # no layer can give more swaps than all together may
    candidates = np.sort(np.where(wanted, index - (bits << 16), _LAST), axis=1)[:, :columns]
    coldest = np.sort(np.where(resident, (bits << 16) + index, _LAST), axis=1)[:, :columns]
    n_wanted, n_resident = wanted.sum(axis=1), resident.sum(axis=1)
    place = np.arange(columns)
    free = place < empty[:, None]
    pair = np.clip(place - empty[:, None], 0, columns - 1) if columns else free.astype(np.int64)
    incoming = candidates & 0xFFFF
    victims = np.where(free, -1, np.take_along_axis(coldest, pair, axis=1) & 0xFFFF)
    rows = np.arange(L)[:, None]
    real = place < n_wanted[:, None]
    known = free | (place - empty[:, None] < n_resident[:, None])
    comes = usage[rows, np.where(real, incoming, 0)]
    goes = np.where(free | ~known, np.float32(0), usage[rows, np.where(known & ~free, victims, 0)])
    take = real & known & (free | (comes >= goes + np.float32(rules.margin)))
    layers, at = np.nonzero(take)
    gains = (comes - goes)[layers, at]
    best = np.argsort(-gains, kind="stable")[: rules.most]
    fits = np.searchsorted(np.cumsum(expert_bytes[layers[best]], dtype=np.float64), budget_bytes, side="right")
    best = best[:fits]
    layers, at = layers[best], at[best]
    return Swaps(layers, incoming[layers, at], victims[layers, at], gains[best])


class Usage:
    """How much each expert is asked for: counts (L, E) float32 since the last adaptation, and two memories of them.

    `score` is what swaps are planned by. With steady routing both memories have the same scale: the long one is
    weighted by the ratio of their horizons. The short one follows a change of topic, the long one keeps experts that
    are needed now and then from being thrown out by a few tokens.
    """

    def __init__(self, L: int, E: int, rules: SwapRules):
        self.rules = rules
        self.fresh = np.zeros((L, E), np.float32)
        self._short = np.zeros((L, E), np.float32)
        self._long = np.zeros((L, E), np.float32)

    def favour(self, resident: np.ndarray) -> None:
        """Give experts (L, E) bool, that a profile chose, their head start."""
        self._long[resident] += np.float32(self.rules.head_start)

    def score(self) -> np.ndarray:
        """(L, E) float32."""
        r = self.rules
        short = self._short + self.fresh
        if r.long_weight == 0:
            return short
        return short + (self._long + self.fresh) * np.float32(r.long_weight * (1 - r.long_decay) / (1 - r.decay))

    def age(self) -> None:
        """After an adaptation: take the counts in and let everything fade."""
        for memory, decay in ((self._short, self.rules.decay), (self._long, self.rules.long_decay)):
            memory += self.fresh
            memory *= np.float32(decay)
            memory[memory < FORGOTTEN] = 0
        self.fresh[:] = 0


def fill_order(profile: ExpertProfile, n_slots: Sequence[int]) -> np.ndarray:
    """(n, 3) int64 rows (layer, expert, slot), hottest first. A pair whose layer is full is left out, and that pair
    alone; slots of a layer are used from 0 on, so the last ones hold the coldest."""
    layers = profile.ranked[:, 0].astype(np.int64)
    grouped = np.argsort(layers, kind="stable")
    counts = np.bincount(layers, minlength=profile.n_layers)
    slots = np.empty(len(layers), np.int64)
    slots[grouped] = np.arange(len(layers)) - np.repeat(np.cumsum(counts) - counts, counts)
    keep = slots < np.asarray(n_slots, np.int64)[layers]
    return np.stack([layers, profile.ranked[:, 1].astype(np.int64), slots], axis=1)[keep]


def tail_slots(n_slots: Sequence[int], order: np.ndarray, n: int) -> np.ndarray:
    """(n, 2) int64 rows (layer, slot): the slots to lend, coldest first.

    order  rows of `fill_order`: a slot is as cold as its place in it; slots it never fills are colder still, later ones
    of a layer first. So what is lent are last slots of every layer. BadArgument for more than there are.
    """
    total = int(sum(n_slots))
    if not 0 <= n <= total:
        raise BadArgument("slots to lend", found=n, needed=f"0 to {total}")
    layers = np.repeat(np.arange(len(n_slots)), n_slots)
    slots = np.concatenate([np.arange(s) for s in n_slots] or [np.zeros(0, np.int64)])
    heat = np.full((len(n_slots), max(n_slots, default=0)), _LAST, np.int64)
    heat[order[:, 0], order[:, 2]] = np.arange(len(order))
    return np.stack([layers, slots], axis=1)[np.lexsort((layers, -slots, -heat[layers, slots]))[:n]]


def ranking(counts: np.ndarray, resident: np.ndarray | None = None, prior: ExpertProfile | None = None) -> np.ndarray:
    """(L * E, 2) uint16 of every pair: those resident now first, then by counted routing, then by the prior ranking,
    then by layer and index. counts (L, E)."""
    L, E = counts.shape
    before = np.full((L, E), _LAST, np.int64)
    if prior is not None:
        before[prior.ranked[:, 0], prior.ranked[:, 1]] = np.arange(len(prior.ranked))
    absent = np.ones(L * E, bool) if resident is None else ~resident.reshape(-1).astype(bool)
    order = np.lexsort((np.arange(L * E), before.reshape(-1), -counts.reshape(-1), absent))
    return np.stack([order // E, order % E], axis=1).astype(np.uint16)


def counted_profile(counts: np.ndarray, resident: np.ndarray | None = None, prior: ExpertProfile | None = None):
    """A profile that ranks every pair; see `ranking`."""
    L, E = counts.shape
    return ExpertProfile(L, E, L * E, ranking(counts, resident, prior))
