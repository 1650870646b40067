"""Hyper-connections: norm, squeeze, mix, strength, add."""

from __future__ import annotations

import numpy as np

from strata.base.arithmetic import fma32, rms_norm, sigmoid32, silu32

F = np.float32


def norm(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    """x (T, C, D), w (C, D): every stream of every row on its own."""
    return rms_norm(x, w, eps)


def squeeze(x: np.ndarray, C: int) -> np.ndarray:
    return silu32(x / F(C))


def mix(normed: np.ndarray, gate: np.ndarray) -> np.ndarray:
    """normed, gate (T, C, D) -> u (T, D): products summed stream by stream, then one division."""
    gated = sigmoid32(gate) * normed
    total = gated[:, 0]
    for c in range(1, gated.shape[1]):
        total = total + gated[:, c]
    return total / F(gated.shape[1])


def strength(inject: np.ndarray) -> np.ndarray:
    """inject (T, C) -> a (T, C)."""
    return F(2) * sigmoid32(inject / F(inject.shape[1]))


def add(x: np.ndarray, y: np.ndarray, a: np.ndarray) -> np.ndarray:
    """x (T, C, D), y (T, D), a (T, C)."""
    return fma32(a[:, :, None], y[:, None, :], x)
