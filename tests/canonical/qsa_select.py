"""Scores of complete blocks and the best of them."""

from __future__ import annotations

import numpy as np

from .sums import head_dot


def block_scores(q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """q (heads, dim), keys (n, dim) -> (n,): positive parts added head by head."""
    total = np.zeros(len(keys), np.float32)
    for head in q:
        s = head_dot(head, keys)
        total = total + np.where(s > 0, s, np.float32(0))
    return total


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """Indices (k,) of the k largest, ascending; equal scores go to the lowest index."""
    order = sorted(range(len(scores)), key=lambda b: (-float(scores[b]), b))
    return np.array(sorted(order[:k]), np.int32)
