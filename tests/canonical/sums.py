"""Sums over heads: the order of `arithmetic.dot_float` with at most 32 lanes."""

from __future__ import annotations

import numpy as np

from strata.base.arithmetic import fma32, lanes_of, tree_sum

HEAD_LANES = 32


def head_dot(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Sum of x y over the last axis, broadcasting the others: lane = index mod 32, ascending fma, halving tree."""
    n = x.shape[-1]
    lanes = min(HEAD_LANES, lanes_of(n))
    acc = np.zeros((*np.broadcast_shapes(x.shape, y.shape)[:-1], lanes), np.float32)
    for first in range(0, n, lanes):
        m = min(lanes, n - first)
        acc[..., :m] = fma32(x[..., first : first + m], y[..., first : first + m], acc[..., :m])
    return tree_sum(acc)
