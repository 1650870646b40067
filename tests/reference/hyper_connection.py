"""Norms, activations, and reading from / adding to the residual streams."""

from __future__ import annotations

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), through tanh so that no argument overflows."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Root-mean-square norm over the last axis, times weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def grouped_rms(X: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Each stream of X (T, C, D) normalised on its own, times weight (C*D,): (T, C, D)."""
    return rms(X, weight.reshape(X.shape[1:]), eps)


def read(X: np.ndarray, scope, part: str, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """What a block reads from the streams X (T, C, D): u (T, D), and its normalised streams (T, C*D).

    `part` names the tensors: "hc_attn", "hc_ffn" or "output_hc".
    """
    T, C, D = X.shape
    N = grouped_rms(X, scope.vector(f"{part}_norm.weight"), eps).reshape(T, C * D)
    low = silu(scope.product(f"{part}_down.weight", N) / C)
    gate = sigmoid(scope.product(f"{part}_up.weight", low))
    return (gate * N).reshape(T, C, D).mean(axis=1), N


def inject(N: np.ndarray, scope, part: str, C: int) -> np.ndarray:
    """Strength (T, C) in (0, 2) with which a block's output is added to each stream."""
    return 2.0 * sigmoid(scope.product(f"{part}_inject.weight", N) / C)


def add(X: np.ndarray, strength: np.ndarray, y: np.ndarray) -> np.ndarray:
    """X[s] + strength[s] * y for every stream: the raw streams, not the normalised ones."""
    return X + strength[:, :, None] * y[:, None, :]
