"""Rotary positions from the table of base/rotary.py: row p holds cos of all pairs, then sin; pairs are (i, i + n/2)."""

from __future__ import annotations

from numba import njit


@njit(error_model="numpy")
def rotate(x, table_row, rotary):
    """In place on the first `rotary` values: products rounded one by one, then one difference or sum."""
    half = rotary // 2
    for i in range(half):
        c, s = table_row[i], table_row[half + i]
        lo, hi = x[i], x[half + i]
        x[i] = lo * c - hi * s
        x[half + i] = hi * c + lo * s
