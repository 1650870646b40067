"""Rotary positions from one host-made table: row p holds cos of all pairs, then sin; pairs are (i, i + n/2)."""

from __future__ import annotations

import numpy as np
from numba import njit


def rotary_table(context: int, rotary_dims: int, base: float) -> np.ndarray:
    """(context, rotary_dims) float32: cos | sin of p * base^(-2 i / rotary_dims), computed in float64."""
    half = rotary_dims // 2
    frequency = float(base) ** (-2.0 * np.arange(half) / rotary_dims)
    angle = np.arange(context)[:, None] * frequency
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


@njit(error_model="numpy")
def rotate(x, table_row, rotary):
    """In place on the first `rotary` values: products rounded one by one, then one difference or sum."""
    half = rotary // 2
    for i in range(half):
        c, s = table_row[i], table_row[half + i]
        lo, hi = x[i], x[half + i]
        x[i] = lo * c - hi * s
        x[half + i] = hi * c + lo * s
