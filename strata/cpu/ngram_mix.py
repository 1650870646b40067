"""N-gram block: gate the looked-up value into every stream, with a dilated causal convolution.

key = rms(ple_key e) * w per stream;  query = rms(X[c]) * w
s_c = (key_c . query_c) / sqrt(D);  gate_c = sigmoid(sign(s_c) sqrt(max(|s_c|, 1e-6)))
G[c] = gate_c * (ple_value e);  H[c] = rms(G[c]) * w
X[c] += G[c] + silu(sum over i of w[ch, i] H_{t - (taps - 1 - i) dilation}[ch])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from strata.base.compiled import step
from strata.base.program import NOT_FINITE
from strata.cpu.error_word import report
from strata.cpu.float_bits import fma32, sigmoid32, silu32, sqrt32
from strata.cpu.float_sums import all_finite, dot_lanes, inverse_rms, lanes_of
from strata.cpu.gated_delta import shift_history
from strata.cpu.machine_code import f32_view, i64_view, ld64, ldf32
from strata.cpu.walker import float_argument

if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering

F = np.float32
LEAST_SCORE = F(1e-6)


@njit(error_model="numpy")
def _scaled(x, w, out, n, eps, acc):
    r = inverse_rms(x, n, eps, acc)
    for i in range(n):
        out[i] = (x[i] * r) * w[i]


@step
def ngram_mix(a):
    """All rows in order. Record: x, key, value, norm_key, norm_query, norm_conv, conv (taps, C*D), history slot,
    conv_rows, T, C, D, taps, dilation, advance, eps (a float32 argument), error, layer."""
    p = i64_view(a, 18)
    T, C, D, taps, dilation = p[9], p[10], p[11], p[12], p[13]
    eps = ldf32(a + 8 * 15)
    width, n_history = C * D, (taps - 1) * dilation
    history = ld64(p[7])
    acc = np.empty(256, np.float32)
    key, query = np.empty(D, np.float32), np.empty(D, np.float32)
    gated, conv = np.empty(D, np.float32), np.empty(D, np.float32)
    root = sqrt32(F(D))
    for t in range(T):
        value = f32_view(p[2] + t * D * 4, D)
        for c in range(C):
            at = c * D * 4
            x = f32_view(p[0] + t * width * 4 + at, D)
            rows = f32_view(p[8] + t * width * 4 + at, D)
            _scaled(f32_view(p[1] + t * width * 4 + at, D), f32_view(p[3] + at, D), key, D, eps, acc)
            _scaled(x, f32_view(p[4] + at, D), query, D, eps, acc)
            s = dot_lanes(key, query, D, lanes_of(D), acc) / root
            size = abs(s)
            if size < LEAST_SCORE:
                size = LEAST_SCORE
            size = sqrt32(size)
            gate = sigmoid32(-size if s < F(0) else size if s > F(0) else s)
            for i in range(D):
                gated[i] = gate * value[i]
            _scaled(gated, f32_view(p[5] + at, D), rows, D, eps, acc)
            for i in range(D):
                conv[i] = F(0)
            for j in range(taps):
                source = t - (taps - 1 - j) * dilation
                base = p[8] + source * width * 4 if source >= 0 else history + (source + n_history) * width * 4
                h, w = f32_view(base + at, D), f32_view(p[6] + j * width * 4 + at, D)
                for i in range(D):
                    conv[i] = fma32(w[i], h[i], conv[i])
            for i in range(D):
                x[i] = (x[i] + gated[i]) + silu32(conv[i])
            if not all_finite(x):
                report(p[16], NOT_FINITE, p[17], t)
    if p[14] != 0:
        shift_history(history, p[8], T, n_history, width, 0, width)


def lower_ngram_mix(c: Lowering, op: Op) -> None:
    k = op.consts
    c.step(ngram_mix, c.at(op, "x"), c.at(op, "key"), c.at(op, "value"), c.vector(op, "norm_key"),
           c.vector(op, "norm_query"), c.vector(op, "norm_conv"), c.vector(op, "conv", transposed=True),
           c.slot(op, "history"), c.at(op, "conv_rows"), c.T, k["C"], k["D"], k["taps"], k["dilation"], k["advance"],
           float_argument(k["eps"]), c.error, op.layer)  # fmt: skip
