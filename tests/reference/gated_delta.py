"""Gated delta rule (GDN): causal convolution, one recurrent matrix per value head, gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.geometry import Geometry

from .hyper_connection import rms, sigmoid, silu

NORM_EPS = 1e-6
"""Inside the square root of the L2 norm of q and k."""


@dataclass(frozen=True)
class GdnState:
    """S (Hv, dk, dv): the recurrent matrices. conv (taps - 1, channels): the last inputs of the convolution."""

    S: np.ndarray
    conv: np.ndarray

    @staticmethod
    def empty(g: Geometry) -> GdnState:
        return GdnState(
            np.zeros((g.gdn_value_heads, g.gdn_key_dim, g.gdn_value_dim)),
            np.zeros((g.gdn_conv_taps - 1, g.gdn_channels)),
        )


def causal_conv(history: np.ndarray, x: np.ndarray, weight: np.ndarray, dilation: int = 1) -> np.ndarray:
    """Depthwise: c[t] = sum over i of weight[:, i] * row[t - (taps - 1 - i) * dilation].

    history ((taps - 1) * dilation, channels) lies before x (T, channels); weight is (channels, taps).
    Returns (T, channels).
    """
    rows = np.concatenate([history, x])
    return sum(weight[:, i] * rows[i * dilation : i * dilation + len(x)] for i in range(weight.shape[1]))


def l2_normalise(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, x)


def delta_rule(S, q, k, v, decay, beta) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence, one token after the other: outputs (T, Hv, dv) and the last S (Hv, dk, dv).

    q, k (T, Hv, dk); v (T, Hv, dv); decay = exp(g) and beta (T, Hv). The decay comes first, the prediction uses the
    decayed matrix, the output the updated one.
    """
    outputs = np.empty(v.shape)
    for t in range(len(v)):
        S = decay[t][:, None, None] * S
        predicted = np.einsum("hkv,hk->hv", S, k[t])
        delta = beta[t][:, None] * (v[t] - predicted)
        S = S + k[t][:, :, None] * delta[:, None, :]
        outputs[t] = np.einsum("hkv,hk->hv", S, q[t])
    return outputs, S


def gated_delta(u: np.ndarray, scope, g: Geometry, state: GdnState) -> tuple[np.ndarray, GdnState]:
    """The mixer of a GDN layer: u (T, D) -> y (T, D) and the state after the last row."""
    T = len(u)
    qkv = scope.product("attn_qkv.weight", u)
    z = scope.product("attn_gate.weight", u).reshape(T, g.gdn_value_heads, g.gdn_value_dim)
    beta = sigmoid(scope.product("ssm_beta.weight", u))
    rate = softplus(scope.product("ssm_alpha.weight", u) + scope.vector("ssm_dt.bias"))
    decay = np.exp(scope.vector("ssm_a") * rate)

    mixed = silu(causal_conv(state.conv, qkv, scope.matrix("ssm_conv1d.weight")))
    q, k, v = np.split(mixed, [g.gdn_key_width, 2 * g.gdn_key_width], axis=1)
    # The file tiles the value heads: head h belongs to key head h modulo the number of key heads.
    key_head = np.arange(g.gdn_value_heads) % g.gdn_key_heads
    q = l2_normalise(q.reshape(T, g.gdn_key_heads, g.gdn_key_dim))[:, key_head] / np.sqrt(g.gdn_key_dim)
    k = l2_normalise(k.reshape(T, g.gdn_key_heads, g.gdn_key_dim))[:, key_head]
    v = v.reshape(T, g.gdn_value_heads, g.gdn_value_dim)
    o, S = delta_rule(state.S, q, k, v, decay, beta)

    o = rms(o, scope.vector("ssm_norm.weight"), g.rms_eps) * sigmoid(z)
    y = scope.product("ssm_out.weight", o.reshape(T, g.gdn_value_width))
    conv = np.concatenate([state.conv, qkv])[T:]
    return y, GdnState(S, conv)
