"""The expert cache: how many experts of each layer fit into given bytes. Slots have the size of their layer's experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.pack.profile import ExpertProfile

SLOT_ALIGNMENT = 256


@dataclass(frozen=True)
class Allotment:
    """slots per layer; n_bytes they take together."""

    slots: tuple[int, ...]
    n_bytes: int

    @property
    def n_slots(self) -> int:
        return sum(self.slots)


def slot_sizes(expert_bytes: tuple[int, ...]) -> tuple[int, ...]:
    """Bytes of one slot by layer: the layer's expert, rounded up. Layers differ, so no size is a constant of the model."""
    return tuple(-(-b // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for b in expert_bytes)


def admission_order(n_layers: int, n_experts: int, profile: ExpertProfile | None) -> np.ndarray:
    """(n,) layer of each pair in the order of admission: the profile's ranking, else every layer in turn.

    A ranking that does not hold every pair ends where it ends: more slots than ranked pairs would stay empty.
    """
    if profile is not None:
        return profile.ranked[:, 0].astype(np.int64)
    return np.tile(np.arange(n_layers, dtype=np.int64), n_experts)


def allot(sizes: tuple[int, ...], order: np.ndarray, room_bytes: int, max_slots: int | None = None) -> Allotment:
    """Admit pairs in `order` until the next one would pass `room_bytes` or `max_slots`."""
    by_layer = np.asarray(sizes, np.int64)
    ends = np.cumsum(by_layer[order])
    n = int(np.searchsorted(ends, room_bytes, side="right")) if room_bytes > 0 else 0
    if max_slots is not None:
        n = min(n, max_slots)
    counts = np.bincount(order[:n], minlength=len(sizes))
    return Allotment(tuple(int(c) for c in counts), int(ends[n - 1]) if n else 0)
