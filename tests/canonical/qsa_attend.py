"""Softmax over the selected cells of one row, in tiles of 64 list entries."""

from __future__ import annotations

import numpy as np

from strata.base.arithmetic import exp32, fma32, sigmoid32, tree_sum

from .sums import head_dot

TILE = 64


def visible_cells(n: int, block: int, budget: int, blocks: np.ndarray | None, first: int = 0) -> np.ndarray:
    """Ascending cells of a row that sees n: those of the chosen blocks and the incomplete tail; or, with block 0, the
    last `budget` (all for budget 0) from cell `first` on, and always the row's own."""
    if block == 0:
        oldest = max(first, n - budget) if budget else first
        return np.arange(min(oldest, n - 1), n)
    cells = [np.arange(b * block, (b + 1) * block) for b in blocks]
    return np.concatenate([*cells, np.arange(n // block * block, n)]).astype(np.int64)


def _tile(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    s = head_dot(q[:, None], keys) * (np.float32(1) / np.sqrt(np.float32(q.shape[1])))
    m = s.max(axis=1)
    p = exp32(s - m[:, None])
    padded = np.zeros((len(q), TILE), np.float32)
    padded[:, : p.shape[1]] = p
    o = np.zeros(q.shape, np.float32)
    for e, value in enumerate(values):
        o = fma32(p[:, e, None], value, o)
    return m, tree_sum(padded), o


def attend(q: np.ndarray, gate: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """q, gate (heads, dh) of one row over keys, values (entries, dh) of the KV head they share: (heads, dh)."""
    m, l, o = _tile(q, keys[:TILE], values[:TILE])
    for first in range(TILE, len(keys), TILE):
        m1, l1, o1 = _tile(q, keys[first : first + TILE], values[first : first + TILE])
        top = np.maximum(m, m1)
        old, new = exp32(m - top), exp32(m1 - top)
        m, l = top, fma32(l1, new, l * old)
        o = fma32(o1, new[:, None], o * old[:, None])
    return (o / l[:, None]) * sigmoid32(gate)
