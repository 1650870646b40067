"""Which experts deserve a place in VRAM: pure functions over routing counts, residency and rankings.

Nothing here knows a device. Equal inputs give equal decisions, with ties broken by layer and index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata.base.errors import BadArgument, need
from strata.pack.profile import ExpertProfile
from strata.runtime import swap_choice as kernels

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
    long_weight: float = 4.0
    head_start: float = 30.0

    def __post_init__(self) -> None:
        need(self.every >= 1 and self.most >= 0, "every and most are out of range", found=(self.every, self.most),
             needed=">= 1 and >= 0")  # fmt: skip
        need(0 < self.decay < 1 and 0 < self.long_decay < 1, "decay and long_decay are out of range",
             found=(self.decay, self.long_decay), needed="between 0 and 1")  # fmt: skip
        need(0 < self.link_share <= 1, "link_share is out of range", found=self.link_share, needed="above 0, at most 1")
        need(self.long_weight >= 0 and self.head_start >= 0, "long_weight and head_start are out of range",
             found=(self.long_weight, self.head_start), needed=">= 0")  # fmt: skip
        need(self.least > 0 and self.margin >= 0, "least and margin are out of range", found=(self.least, self.margin),
             needed="above 0 and >= 0")  # fmt: skip


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
    return SwapChooser(*usage.shape, rules.most).choose(usage, resident, empty, expert_bytes, rules, budget_bytes)


class SwapChooser:
    """Scratch of `plan_swaps` for L layers of E experts and up to `most` swaps at once, made and compiled once."""

    def __init__(self, L: int, E: int, most: int):
        need(E <= 1 << 16, "experts of a layer", found=E, needed="at most 65536")
        self._empty, self._bytes = np.zeros(L, np.int64), np.zeros(L, np.int64)
        self._limits = np.zeros(2, np.int64)
        self._keys = np.zeros((L, 2, E), np.int64)
        self._cursors = np.zeros(L * (8 * kernels.CURSOR_WORDS + 4), np.uint8)
        self._out = np.zeros((3, most), np.int64)
        self._gains = np.zeros(most, np.float32)
        self._words = np.zeros(kernels.WORDS, np.int64)
        self._words[: kernels.FOUND] = (L, E, most, 0, 0, *(a.ctypes.data for a in (
            self._empty, self._bytes, self._limits, self._keys, self._cursors)))  # fmt: skip
        places = [row.ctypes.data for row in self._out]
        self._words[kernels.OUT_LAYERS : kernels.SPARE] = *places, self._gains.ctypes.data
        kernels.choose.address  # noqa: B018  compiles or loads from disk

    def choose(
        self, scores: np.ndarray, resident: np.ndarray, empty: np.ndarray, expert_bytes: np.ndarray, rules: SwapRules,
        budget_bytes: float,
    ) -> Swaps:  # fmt: skip
        """See `plan_swaps`; the arrays returned are valid until the next call."""
        self._empty[:], self._bytes[:] = empty, expert_bytes
        self._limits[:1].view(np.float32)[:] = rules.least, rules.margin
        self._limits[1] = min(max(budget_bytes, -1.0), float(1 << 62))
        self._words[kernels.MOST] = min(rules.most, self._out.shape[1])
        scores, held = np.ascontiguousarray(scores, np.float32), np.ascontiguousarray(resident).view(np.uint8)
        self._words[kernels.SCORES], self._words[kernels.RESIDENT] = scores.ctypes.data, held.ctypes.data
        kernels.choose.held(self._words.ctypes.data)
        n = int(self._words[kernels.FOUND])
        return Swaps(*(row[:n] for row in self._out), self._gains[:n])


class Usage:
    """How much each expert is asked for: counts (L, E) float32 since the last adaptation, and two memories of them.

    `score` is what swaps are planned by. With steady routing the long memory counts `long_weight` times what the short
    one does: it is weighted by the ratio of their horizons. The short one follows a change of topic, the long one keeps
    experts that are needed now and then from being thrown out by a few tokens.
    """

    def __init__(self, L: int, E: int, rules: SwapRules):
        self.rules = rules
        self.fresh = np.zeros((L, E), np.float32)
        self._short = np.zeros((L, E), np.float32)
        self._long = np.zeros((L, E), np.float32)
        self._score = np.zeros((L, E), np.float32)
        kernels.score.address, kernels.age.address  # noqa: B018  compiles or loads from disk

    def favour(self, resident: np.ndarray) -> None:
        """Give experts (L, E) bool, that a profile chose, their head start."""
        self._long[resident] += np.float32(self.rules.head_start)

    def score(self) -> np.ndarray:
        """(L, E) float32, valid until the next call."""
        r = self.rules
        weight = np.array([r.long_weight * (1 - r.long_decay) / (1 - r.decay)], np.float32)
        kernels.score.held(self.fresh.size, *self._places(), weight.ctypes.data, self._score.ctypes.data)
        return self._score

    def read(self, counts: np.ndarray, rows: int) -> None:
        """Take in rows of a prompt, as if they had come one by one. counts (L, E): how often they asked for experts."""
        times, usage = rows / self.rules.every, counts.astype(np.float32) * np.float32(self.rules.every / max(rows, 1))
        for memory, decay in ((self._short, self.rules.decay), (self._long, self.rules.long_decay)):
            kept = decay**times
            memory *= np.float32(kept)
            memory += usage * np.float32((1 - kept) * decay / (1 - decay))

    def age(self) -> None:
        """After an adaptation: take the counts in and let everything fade."""
        numbers = np.array([self.rules.decay, self.rules.long_decay, FORGOTTEN], np.float32)
        kernels.age.held(self.fresh.size, *self._places(), numbers.ctypes.data)

    def _places(self) -> tuple[int, int, int]:
        return self.fresh.ctypes.data, self._short.ctypes.data, self._long.ctypes.data


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


def moves_to_lend(heat: np.ndarray, lent: np.ndarray) -> list[tuple[int, int]]:
    """Moves (slot to lend, slot to keep) after which the slots of a layer to lend are its coldest.

    heat  (slots,) float32 usage of what a slot holds, below 0 for an empty slot
    lent  (slots,) bool: those to lend

    The content of the first goes to the second, whose own may be lost. Between equals nothing moves.
    """
    coldest = np.zeros(len(heat), bool)
    coldest[np.lexsort((~lent, heat))[: np.count_nonzero(lent)]] = True
    return list(zip(np.flatnonzero(lent & ~coldest).tolist(), np.flatnonzero(coldest & ~lent).tolist(), strict=True))


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
