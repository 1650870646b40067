"""Gated DeltaNet: causal convolution, the delta rule over T rows, and its commit.

    conv_t[ch] = silu(sum over i of w[ch, i] * qkv_{t - taps + 1 + i}[ch])
    q, k = l2(q) / sqrt(dk), l2(k);  decay = exp(a * softplus(alpha + dt));  beta = sigmoid(beta)
    S <- decay S;  delta = beta (v - S'k);  S <- S + k delta';  o = S'q
    y = rms(o) * norm * sigmoid(z)

Sums over k use 4 lanes (k mod 4). A window reads the state and leaves it; commit replays rows into it. A prefill chunk
(`advance`) works on the state itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from strata.base.program import NOT_FINITE
from strata.cpu.compiled import chunk, step
from strata.cpu.error_word import report
from strata.cpu.float_bits import exp32, fma32, sigmoid32, silu32, softplus32, sqrt32
from strata.cpu.float_sums import all_finite, dot_lanes, inverse_rms, is_finite, lanes_of
from strata.cpu.machine_code import copy_bytes, f32_view, f32_view2, i64_view, ld64, ldf32
from strata.cpu.walker import float_argument

if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering

F = np.float32
L2_EPS = F(1e-6)
CONV_VALUES = 4096
"""Channels times rows of one convolution chunk: about 4 us."""


@chunk
def gdn_conv(a, k, n_chunks):
    """A range of channels over all rows.

    Record: qkv, conv, w (taps, channels), history slot, T, channels, taps, advance, error, layer.
    """
    p = i64_view(a, 10)
    T, channels, taps = p[4], p[5], p[6]
    low, high = k * channels // n_chunks, (k + 1) * channels // n_chunks
    n = high - low
    history = ld64(p[3])
    for t in range(T):
        out = f32_view(p[1] + (t * channels + low) * 4, n)
        for c in range(n):
            out[c] = F(0)
        for i in range(taps):
            source = t - (taps - 1) + i
            base = p[0] + source * channels * 4 if source >= 0 else history + (source + taps - 1) * channels * 4
            x = f32_view(base + low * 4, n)
            w = f32_view(p[2] + (i * channels + low) * 4, n)
            for c in range(n):
                out[c] = fma32(w[c], x[c], out[c])
        for c in range(n):
            out[c] = silu32(out[c])
        if not all_finite(out):
            report(p[8], NOT_FINITE, p[9], t)
    if p[7] != 0:
        shift_history(history, p[0], T, taps - 1, channels, low, n)


@njit(error_model="numpy")
def shift_history(history, rows, n_keep, n_history, width, low, n):
    """History becomes the last n_history rows of (history, rows[:n_keep]); columns low .. low + n only."""
    for j in range(n_history):
        source = n_keep - n_history + j
        if source >= 0:
            base = rows + source * width * 4
        else:
            base = history + (source + n_history) * width * 4
        if base != history + j * width * 4:
            copy_bytes(history + (j * width + low) * 4, base + low * 4, n * 4)


@step
def history_commit(a):
    """Record: history slot, rows, address of n_keep, rows of history, width."""
    p = i64_view(a, 5)
    shift_history(ld64(p[0]), p[1], ld64(p[2]), p[3], p[4], 0, p[4])


@njit(error_model="numpy")
def _unit(x, n, scale, out, acc):
    """out = x / sqrt(sum x^2 + 1e-6) * scale."""
    r = F(1) / sqrt32(dot_lanes(x, x, n, lanes_of(n), acc) + L2_EPS)
    for i in range(n):
        out[i] = (x[i] * r) * scale


@njit(error_model="numpy")
def _delta_row(source, target, keep, k, v, q, decay, beta, delta, out, acc, dk, dv):
    """One token of one head. source, target (dk, dv): state before and after; target is written only if `keep`.

    With keep = False the updated state is never stored: the second pass makes it again from source.
    """
    a0, a1, a2, a3 = acc[0], acc[1], acc[2], acc[3]
    for j in range(dv):
        a0[j] = F(0)
        a1[j] = F(0)
        a2[j] = F(0)
        a3[j] = F(0)
    for i in range(0, dk, 4):
        for j in range(dv):
            a0[j] = fma32(source[i, j] * decay, k[i], a0[j])
            a1[j] = fma32(source[i + 1, j] * decay, k[i + 1], a1[j])
            a2[j] = fma32(source[i + 2, j] * decay, k[i + 2], a2[j])
            a3[j] = fma32(source[i + 3, j] * decay, k[i + 3], a3[j])
    for j in range(dv):
        delta[j] = beta * (v[j] - ((a0[j] + a2[j]) + (a1[j] + a3[j])))
        a0[j] = F(0)
        a1[j] = F(0)
        a2[j] = F(0)
        a3[j] = F(0)
    for i in range(0, dk, 4):
        for j in range(dv):
            s0 = fma32(k[i], delta[j], source[i, j] * decay)
            s1 = fma32(k[i + 1], delta[j], source[i + 1, j] * decay)
            s2 = fma32(k[i + 2], delta[j], source[i + 2, j] * decay)
            s3 = fma32(k[i + 3], delta[j], source[i + 3, j] * decay)
            a0[j] = fma32(s0, q[i], a0[j])
            a1[j] = fma32(s1, q[i + 1], a1[j])
            a2[j] = fma32(s2, q[i + 2], a2[j])
            a3[j] = fma32(s3, q[i + 3], a3[j])
            if keep:
                target[i, j] = s0
                target[i + 1, j] = s1
                target[i + 2, j] = s2
                target[i + 3, j] = s3
    for j in range(dv):
        out[j] = (a0[j] + a2[j]) + (a1[j] + a3[j])


@chunk
def gdn_heads(a, h, n_heads):
    """One value head over all rows.

    Record: conv, decay (in: alpha), beta (in: raw), z, a, dt, norm, state slot, y, T, Hk, dk, dv, channels, advance,
    eps (a float32 argument), 1/sqrt(dk) (float32 arguments), error, layer.
    """
    p = i64_view(a, 19)
    T, Hk, dk, dv, channels = p[9], p[10], p[11], p[12], p[13]
    key_head = h % Hk
    state = f32_view2(ld64(p[7]) + h * dk * dv * 4, dk, dv)
    scratch = state
    if p[14] == 0 and T > 1:
        scratch = np.empty((dk, dv), np.float32)
    k, q = np.empty(dk, np.float32), np.empty(dk, np.float32)
    delta, acc = np.empty(dv, np.float32), np.empty((4, dv), np.float32)
    lanes = np.empty(256, np.float32)
    ah, dth = ldf32(p[4] + h * 4), ldf32(p[5] + h * 4)
    norm = f32_view(p[6], dv)
    eps, q_scale = ldf32(a + 8 * 15), ldf32(a + 8 * 16)
    for t in range(T):
        conv = p[0] + t * channels * 4
        _unit(f32_view(conv + key_head * dk * 4, dk), dk, q_scale, q, lanes)
        _unit(f32_view(conv + (Hk + key_head) * dk * 4, dk), dk, F(1), k, lanes)
        v = f32_view(conv + (2 * Hk * dk + h * dv) * 4, dv)
        decay, beta = f32_view(p[1] + (t * n_heads + h) * 4, 1), f32_view(p[2] + (t * n_heads + h) * 4, 1)
        # What a sigmoid, softplus or exp would make a finite number of.
        fine = is_finite(decay[0]) and is_finite(beta[0])
        rate = ah * softplus32(decay[0] + dth)
        decay[0] = exp32(rate)
        beta[0] = sigmoid32(beta[0])
        y = f32_view(p[8] + (t * n_heads + h) * dv * 4, dv)
        source = state if t == 0 else scratch
        keep = p[14] != 0 or t + 1 < T
        _delta_row(source, scratch, keep, k, v, q, decay[0], beta[0], delta, y, acc, dk, dv)
        r = inverse_rms(y, dv, eps, lanes)
        z = f32_view(p[3] + (t * n_heads + h) * dv * 4, dv)
        for j in range(dv):
            y[j] = ((y[j] * r) * norm[j]) * sigmoid32(z[j])
        if not (fine and all_finite(y) and all_finite(z)):
            report(p[17], NOT_FINITE, p[18], t)


@chunk
def gdn_commit(a, h, n_heads):
    """Replay rows into one head's state.

    Record: conv, decay, beta, state slot, address of n_keep, Hk, dk, dv, channels.
    """
    p = i64_view(a, 9)
    n_keep, Hk, dk, dv, channels = ld64(p[4]), p[5], p[6], p[7], p[8]
    key_head = h % Hk
    state = f32_view2(ld64(p[3]) + h * dk * dv * 4, dk, dv)
    k, pred = np.empty(dk, np.float32), np.empty((4, dv), np.float32)
    lanes = np.empty(256, np.float32)
    for t in range(n_keep):
        conv = p[0] + t * channels * 4
        _unit(f32_view(conv + (Hk + key_head) * dk * 4, dk), dk, F(1), k, lanes)
        v = f32_view(conv + (2 * Hk * dk + h * dv) * 4, dv)
        decay, beta = ldf32(p[1] + (t * n_heads + h) * 4), ldf32(p[2] + (t * n_heads + h) * 4)
        _delta_state(state, k, v, decay, beta, pred, dk, dv)


@njit(error_model="numpy")
def _delta_state(state, k, v, decay, beta, acc, dk, dv):
    """The state update of `_delta_row` without its output: the same operations in the same order."""
    a0, a1, a2, a3 = acc[0], acc[1], acc[2], acc[3]
    for j in range(dv):
        a0[j] = F(0)
        a1[j] = F(0)
        a2[j] = F(0)
        a3[j] = F(0)
    for i in range(0, dk, 4):
        for j in range(dv):
            a0[j] = fma32(state[i, j] * decay, k[i], a0[j])
            a1[j] = fma32(state[i + 1, j] * decay, k[i + 1], a1[j])
            a2[j] = fma32(state[i + 2, j] * decay, k[i + 2], a2[j])
            a3[j] = fma32(state[i + 3, j] * decay, k[i + 3], a3[j])
    for j in range(dv):
        a0[j] = beta * (v[j] - ((a0[j] + a2[j]) + (a1[j] + a3[j])))
    for i in range(dk):
        for j in range(dv):
            state[i, j] = fma32(k[i], a0[j], state[i, j] * decay)


def lower_gdn_conv(c: Lowering, op: Op) -> None:
    k = op.consts
    n_chunks = max(1, k["channels"] * c.T // CONV_VALUES)
    c.parallel(min(n_chunks, max(1, k["channels"] // 64)), gdn_conv, c.at(op, "qkv"), c.at(op, "conv"),
               c.vector(op, "w", transposed=True), c.slot(op, "history"), c.T, k["channels"], k["taps"], k["advance"],
               c.error, op.layer)  # fmt: skip


def lower_gdn_heads(c: Lowering, op: Op) -> None:
    k = op.consts
    q_scale = float(np.float32(1) / np.sqrt(np.float32(k["dk"])))
    c.parallel(k["Hv"], gdn_heads, c.at(op, "conv"), c.at(op, "decay"), c.at(op, "beta"), c.at(op, "z"),
               c.vector(op, "a"), c.vector(op, "dt"), c.vector(op, "norm"), c.slot(op, "state"), c.at(op, "y"), c.T,
               k["Hk"], k["dk"], k["dv"], k["channels"], k["advance"], float_argument(k["eps"]),
               float_argument(q_scale), c.error, op.layer)  # fmt: skip


def lower_gdn_commit(c: Lowering, op: Op) -> None:
    k = op.consts
    c.parallel(k["Hv"], gdn_commit, c.at(op, "conv"), c.at(op, "decay"), c.at(op, "beta"), c.slot(op, "state"),
               c.at(op, "n_keep"), k["Hk"], k["dk"], k["dv"], k["channels"])  # fmt: skip


def lower_history_commit(c: Lowering, op: Op) -> None:
    c.step(history_commit, c.slot(op, "history"), c.at(op, "rows"), c.at(op, "n_keep"), op.consts["rows"],
           op.consts["width"])  # fmt: skip
