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

from strata.base.compiled import chunk, step
from strata.base.errors import need
from strata.base.program import NOT_FINITE
from strata.cpu.delta_rule import BLOCK, delta_rows
from strata.cpu.error_word import report
from strata.cpu.float_bits import exp32, fma32, sigmoid32, silu32, softplus32, sqrt32
from strata.cpu.float_sums import all_finite, dot_lanes, inverse_rms, is_finite, lanes_of
from strata.cpu.float_vectors import LANES
from strata.cpu.machine_code import copy_bytes, f32_view, i64_view, ld64, ldf32
from strata.cpu.walker import float_argument

if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering

F = np.float32
L2_EPS = F(1e-6)
CONV_VALUES = 4096
"""Channels times rows of one convolution chunk: about 4 us."""
GROUP_ROWS = 8
"""Rows of a prefill chunk whose keys and queries are made at a time."""


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
def _heads_of(k, n_chunks, channels, Hk, dk, dv):
    """(first, last, Hv): the value heads of chunk k."""
    Hv = (channels - 2 * Hk * dk) // dv
    return k * Hv // n_chunks, (k + 1) * Hv // n_chunks, Hv


@chunk
def gdn_heads(a, chunk_index, n_chunks):
    """Some value heads over all rows.

    Record: conv, decay (in: alpha), beta (in: raw), z, a, dt, norm, state slot, y, T, Hk, dk, dv, channels, advance,
    eps (a float32 argument), 1/sqrt(dk) (float32 arguments), error, layer. dk is a multiple of 4, dv of 16.
    """
    p = i64_view(a, 19)
    T, Hk, dk, dv, channels, advance = p[9], p[10], p[11], p[12], p[13], p[14]
    low, high, Hv = _heads_of(chunk_index, n_chunks, channels, Hk, dk, dv)
    state_bytes = dk * dv * 4
    most = min(T, GROUP_ROWS) if advance != 0 else T
    k, q = np.empty((most, dk), np.float32), np.empty((most, dk), np.float32)
    gates, lanes = np.empty((most, 2), np.float32), np.empty(256, np.float32)
    space = np.empty(dk * BLOCK + 16, np.float32)
    spare = (space.ctypes.data + 63) & -64
    norm = f32_view(p[6], dv)
    eps, q_scale = ldf32(a + 8 * 15), ldf32(a + 8 * 16)
    for h in range(low, high):
        state, later = ld64(p[7]) + h * state_bytes, state_bytes if h + 1 < high else 0
        key_head = h % Hk
        ah, dth = ldf32(p[4] + h * 4), ldf32(p[5] + h * 4)
        for first in range(0, T, most):
            rows = min(most, T - first)
            for r in range(rows):
                at = (first + r) * Hv + h
                conv = p[0] + (first + r) * channels * 4
                _unit(f32_view(conv + key_head * dk * 4, dk), dk, q_scale, q[r], lanes)
                _unit(f32_view(conv + (Hk + key_head) * dk * 4, dk), dk, F(1), k[r], lanes)
                decay, beta = f32_view(p[1] + at * 4, 1), f32_view(p[2] + at * 4, 1)
                # What a sigmoid, softplus or exp would make a finite number of.
                if not (is_finite(decay[0]) and is_finite(beta[0])):
                    report(p[17], NOT_FINITE, p[18], first + r)
                decay[0] = exp32(ah * softplus32(decay[0] + dth))
                beta[0] = sigmoid32(beta[0])
                gates[r, 0], gates[r, 1] = decay[0], beta[0]
            v = p[0] + (first * channels + 2 * Hk * dk + h * dv) * 4
            y = p[8] + (first * Hv + h) * dv * 4
            if advance != 0:
                delta_rows(1, 1, state, dk, dv, rows, k.ctypes.data, q.ctypes.data, gates.ctypes.data, v, channels * 4,
                           y, Hv * dv * 4, spare, later)  # fmt: skip
            else:
                delta_rows(1, 0, state, dk, dv, rows, k.ctypes.data, q.ctypes.data, gates.ctypes.data, v, channels * 4,
                           y, Hv * dv * 4, spare, later)  # fmt: skip
            for r in range(rows):
                at = (first + r) * Hv + h
                out, z = f32_view(p[8] + at * dv * 4, dv), f32_view(p[3] + at * dv * 4, dv)
                scale = inverse_rms(out, dv, eps, lanes)
                for j in range(dv):
                    out[j] = ((out[j] * scale) * norm[j]) * sigmoid32(z[j])
                if not (all_finite(out) and all_finite(z)):
                    report(p[17], NOT_FINITE, p[18], first + r)
    k[0, 0] = q[0, 0] = gates[0, 0] = space[0] = F(0)  # the last use: what lies at their addresses lives as long


@chunk
def gdn_commit(a, chunk_index, n_chunks):
    """Replay rows into the states of some heads.

    Record: conv, decay, beta, state slot, address of n_keep, Hk, dk, dv, channels.
    """
    p = i64_view(a, 9)
    n_keep, Hk, dk, dv, channels = ld64(p[4]), p[5], p[6], p[7], p[8]
    if n_keep == 0:
        return
    low, high, Hv = _heads_of(chunk_index, n_chunks, channels, Hk, dk, dv)
    state_bytes = dk * dv * 4
    k, gates, lanes = np.empty((n_keep, dk), np.float32), np.empty((n_keep, 2), np.float32), np.empty(256, np.float32)
    space = np.empty(dk * BLOCK + 16, np.float32)
    for h in range(low, high):
        for t in range(n_keep):
            key, at = p[0] + (t * channels + (Hk + h % Hk) * dk) * 4, (t * Hv + h) * 4
            _unit(f32_view(key, dk), dk, F(1), k[t], lanes)
            gates[t, 0], gates[t, 1] = ldf32(p[1] + at), ldf32(p[2] + at)
        delta_rows(0, 1, ld64(p[3]) + h * state_bytes, dk, dv, n_keep, k.ctypes.data, 0, gates.ctypes.data,
                   p[0] + (2 * Hk * dk + h * dv) * 4, channels * 4, 0, 0, (space.ctypes.data + 63) & -64,
                   state_bytes if h + 1 < high else 0)  # fmt: skip
    k[0, 0] = gates[0, 0] = space[0] = F(0)  # the last use: what lies at their addresses lives as long


def head_chunks(Hv: int, threads: int) -> int:
    """Chunks of the value heads: few, as a chunk asks for the next state while it computes one."""
    return 1 if threads == 1 else min(Hv, 4 * threads)


def conv_chunks(channels: int, T: int) -> int:
    """Chunks of one convolution."""
    return min(max(1, channels * T // CONV_VALUES), max(1, channels // 64))


def lower_gdn_conv(c: Lowering, op: Op) -> None:
    k = op.consts
    c.parallel(conv_chunks(k["channels"], c.T), gdn_conv, c.at(op, "qkv"), c.at(op, "conv"),
               c.vector(op, "w", transposed=True), c.slot(op, "history"), c.T, k["channels"], k["taps"], k["advance"],
               c.error, op.layer)  # fmt: skip


def lower_gdn_heads(c: Lowering, op: Op) -> None:
    k = op.consts
    need(k["dk"] % 4 == 0 and k["dv"] % LANES == 0, "heads of the gated delta rule have an odd size",
         found=f"{k['dk']} x {k['dv']}", needed=f"multiples of 4 x {LANES}")  # fmt: skip
    q_scale = float(np.float32(1) / np.sqrt(np.float32(k["dk"])))
    c.parallel(head_chunks(k["Hv"], c.threads), gdn_heads, c.at(op, "conv"), c.at(op, "decay"), c.at(op, "beta"),
               c.at(op, "z"), c.vector(op, "a"), c.vector(op, "dt"), c.vector(op, "norm"), c.slot(op, "state"),
               c.at(op, "y"), c.T, k["Hk"], k["dk"], k["dv"], k["channels"], k["advance"], float_argument(k["eps"]),
               float_argument(q_scale), c.error, op.layer)  # fmt: skip


def lower_gdn_commit(c: Lowering, op: Op) -> None:
    k = op.consts
    c.parallel(head_chunks(k["Hv"], c.threads), gdn_commit, c.at(op, "conv"), c.at(op, "decay"), c.at(op, "beta"),
               c.slot(op, "state"), c.at(op, "n_keep"), k["Hk"], k["dk"], k["dv"], k["channels"])  # fmt: skip


def lower_history_commit(c: Lowering, op: Op) -> None:
    c.step(history_commit, c.slot(op, "history"), c.at(op, "rows"), c.at(op, "n_keep"), op.consts["rows"],
           op.consts["width"])  # fmt: skip
