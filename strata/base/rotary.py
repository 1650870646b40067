"""The table of rotary angles, made on the host in float64 and rounded once: one for all backends."""

from __future__ import annotations

import numpy as np


def rotary_table(context: int, rotary_dims: int, base: float) -> np.ndarray:
    """(context, rotary_dims) float32: cos | sin of p * base^(-2 i / rotary_dims)."""
    half = rotary_dims // 2
    frequency = float(base) ** (-2.0 * np.arange(half) / rotary_dims)
    angle = np.arange(context)[:, None] * frequency
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
