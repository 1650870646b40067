"""The n-gram block behind its two products."""

from __future__ import annotations

import numpy as np

from strata.base.arithmetic import dot_float, fma32, rms_norm, sigmoid32, silu32

F = np.float32


def gate(x, key, norm_key, norm_query, eps) -> np.ndarray:
    """x, key (..., C, D), norms (C, D) -> (..., C)."""
    D = x.shape[-1]
    s = dot_float(rms_norm(key, norm_key, eps), rms_norm(x, norm_query, eps)) / np.sqrt(F(D))
    return sigmoid32(np.sign(s) * np.sqrt(np.maximum(np.abs(s), F(1e-6))))


def mix(x, key, value, norms, conv, history, dilation, eps) -> tuple[np.ndarray, np.ndarray]:
    """x, key (T, C, D), value (T, D), norms (key, query, conv) of (C, D), conv (taps, C, D), history
    ((taps - 1) dilation, C, D) -> new x, and the convolution's input rows (T, C, D)."""
    T, taps = len(x), len(conv)
    gated = gate(x, key, norms[0], norms[1], eps)[..., None] * value[:, None, :]
    rows = rms_norm(gated, norms[2], eps)
    past = np.concatenate([history, rows])
    total = np.zeros_like(x)
    for i in range(taps):
        total = fma32(conv[i], past[i * dilation : i * dilation + T], total)
    return (x + gated) + silu32(total), rows
