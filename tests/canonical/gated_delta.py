"""Gated DeltaNet: convolution, delta rule over the rows of a window, and what commit leaves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.arithmetic import exp32, fma32, rms_norm, sigmoid32, silu32, softplus32, sum_squares

F = np.float32


@dataclass(frozen=True)
class Sizes:
    Hk: int
    Hv: int
    dk: int
    dv: int
    taps: int

    @property
    def channels(self) -> int:
        return 2 * self.Hk * self.dk + self.Hv * self.dv


def conv(history: np.ndarray, qkv: np.ndarray, w: np.ndarray) -> np.ndarray:
    """history (taps - 1, channels), qkv (T, channels), w (taps, channels): oldest tap first, one fma each from +0."""
    rows = np.concatenate([history, qkv])
    out = np.zeros_like(qkv)
    for i, tap in enumerate(w):
        out = fma32(tap, rows[i : i + len(qkv)], out)
    return silu32(out)


def shifted(history: np.ndarray, rows: np.ndarray, n_keep: int) -> np.ndarray:
    """The last rows of history after n_keep more."""
    return np.concatenate([history, rows[:n_keep]])[n_keep:]


def unit(x: np.ndarray, scale: np.float32) -> np.ndarray:
    """x / sqrt(sum x^2 + 1e-6) over the last axis, times scale."""
    r = F(1) / np.sqrt(sum_squares(x) + F(1e-6))
    return (x * r[..., None]) * scale


def over_keys(m: np.ndarray, x: np.ndarray) -> np.ndarray:
    """m (Hv, dk, dv), x (Hv, dk): sum over dk in 4 lanes, dk mod 4."""
    acc = np.zeros((m.shape[0], 4, m.shape[2]), F)
    for i in range(0, m.shape[1], 4):
        acc = fma32(m[:, i : i + 4], x[:, i : i + 4, None], acc)
    return (acc[:, 0] + acc[:, 2]) + (acc[:, 1] + acc[:, 3])


@dataclass(frozen=True)
class Gates:
    """decay and beta (T, Hv), after their functions."""

    decay: np.ndarray
    beta: np.ndarray


def gates(alpha: np.ndarray, beta: np.ndarray, a: np.ndarray, dt: np.ndarray) -> Gates:
    return Gates(exp32(a * softplus32(alpha + dt)), sigmoid32(beta))


def split(mixed: np.ndarray, s: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One row after the convolution -> q, k (Hv, dk) of every value head, v (Hv, dv)."""
    q, k, v = np.split(mixed, [s.Hk * s.dk, 2 * s.Hk * s.dk])
    key_head = np.arange(s.Hv) % s.Hk
    q_scale = F(1) / np.sqrt(F(s.dk))
    q, k = unit(q.reshape(s.Hk, s.dk), q_scale), unit(k.reshape(s.Hk, s.dk), F(1))
    return q[key_head], k[key_head], v.reshape(s.Hv, s.dv)


def advance(S: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """State (Hv, dk, dv) after one token."""
    S = S * decay[:, None, None]
    delta = beta[:, None] * (v - over_keys(S, k))
    return fma32(k[:, :, None], delta[:, None, :], S)


def window(S, mixed, g: Gates, z, norm, eps, s: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """mixed (T, channels), z (T, Hv, dv) -> y (T, Hv, dv) and the state after the last row."""
    y = np.empty(z.shape, F)
    for t in range(len(mixed)):
        q, k, v = split(mixed[t], s)
        S = advance(S, k, v, g.decay[t], g.beta[t])
        y[t] = rms_norm(over_keys(S, q), norm, eps) * sigmoid32(z[t])
    return y, S


def committed(S, mixed, g: Gates, n_keep: int, s: Sizes) -> np.ndarray:
    for t in range(n_keep):
        _, k, v = split(mixed[t], s)
        S = advance(S, k, v, g.decay[t], g.beta[t])
    return S
