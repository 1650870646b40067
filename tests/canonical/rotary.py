"""Rotary positions from the table."""

from __future__ import annotations

import numpy as np

from strata.base.arithmetic import rms_norm


def rotate(x: np.ndarray, cos_sin: np.ndarray) -> np.ndarray:
    """x (..., n) by one table row (rotary,) = cos | sin: pairs (i, i + rotary / 2), the rest passes through."""
    cos, sin = np.split(cos_sin, 2)
    half = len(cos)
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    with np.errstate(all="ignore"):
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def norm_rotate(x: np.ndarray, w: np.ndarray, eps: float, cos_sin: np.ndarray) -> np.ndarray:
    return rotate(rms_norm(x, w, eps), cos_sin)
