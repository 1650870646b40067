"""The expert cache: how many experts of each layer fit into given bytes. Slots have the size of their layer's
experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
    """Bytes of one slot by layer: the layer's expert, rounded up. Layers differ, so no size is a constant of the
    model."""
    return tuple(-(-b // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for b in expert_bytes)


@dataclass(frozen=True, eq=False)
class Queue:
    """Pairs in the order of admission.

    layers  (n,) int64, layer of each pair
    ends    (n,) int64, bytes of all slots up to and including each pair
    """

    n_layers: int
    layers: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.layers)


def admission_queue(sizes: tuple[int, ...], n_experts: int, profile: ExpertProfile | None) -> Queue:
    """The profile's ranking, else every layer in turn. sizes: bytes of one slot by layer.

    A ranking that does not hold every pair ends where it ends: more slots than ranked pairs would stay empty.
    """
    if profile is None:
        return _in_turn(sizes, n_experts)
    return _queue(sizes, profile.ranked[:, 0].astype(np.int64))


def _queue(sizes: tuple[int, ...], layers: np.ndarray) -> Queue:
    return Queue(len(sizes), layers, np.cumsum(np.asarray(sizes, np.int64)[layers]))


@lru_cache(maxsize=16)
def _in_turn(sizes: tuple[int, ...], n_experts: int) -> Queue:
    return _queue(sizes, np.tile(np.arange(len(sizes), dtype=np.int64), n_experts))


def allot(queue: Queue, room_bytes: int, max_slots: int | None = None) -> Allotment:
    """Admit pairs of the queue until the next one would pass `room_bytes` or `max_slots`."""
    n = int(np.searchsorted(queue.ends, room_bytes, side="right")) if room_bytes > 0 else 0
    if max_slots is not None:
        n = min(n, max_slots)
    counts = np.bincount(queue.layers[:n], minlength=queue.n_layers)
    return Allotment(tuple(counts.tolist()), int(queue.ends[n - 1]) if n else 0)
