"""Pooled keys of the indexer; the norms and rotations of q and k are `rotary.norm_rotate`."""

from __future__ import annotations

import numpy as np

from .rotary import norm_rotate


def pooled_key(raw: np.ndarray, w: np.ndarray, eps: float, first_row: np.ndarray) -> np.ndarray:
    """raw (block, dim) keys of one block -> (dim,): mean (ascending sum), norm, rotation to the first cell."""
    total = np.zeros(raw.shape[1], np.float32)
    for key in raw:
        total = total + key
    return norm_rotate(total / np.float32(len(raw)), w, eps, first_row)


def pooled_keys(raw: np.ndarray, block: int, w: np.ndarray, eps: float, table: np.ndarray) -> np.ndarray:
    """raw (n, dim) from position 0 -> keys (n // block, dim) of the complete blocks."""
    starts = range(0, len(raw) - block + 1, block)
    keys = [pooled_key(raw[s : s + block], w, eps, table[s]) for s in starts]
    return np.array(keys, np.float32).reshape(-1, raw.shape[1])
