"""Float sums in the canonical order: lane = index mod lanes, ascending fma per lane from +0, halving tree.

`lanes_of(n)` of them: 256, or the largest power of two that an axis shorter than 256 holds. Heads (attention, block
scores) use 32 lanes, so that one warp or two vector registers hold a sum.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.cpu.float_bits import f32_bits, fma32, sqrt32
from strata.cpu.float_vectors import dot64, dot128, dot256

F = np.float32
HEAD_LANES = 32


@njit(error_model="numpy")
def lanes_of(n, most=256):
    """Number of lanes for an axis of n values: `most`, or the largest power of two <= n."""
    lanes = most
    while lanes > n:
        lanes >>= 1
    return lanes


@njit(error_model="numpy")
def tree(acc, lanes):
    """Halving tree over acc[:lanes], in place."""
    half = lanes >> 1
    while half > 0:
        for i in range(half):
            acc[i] = acc[i] + acc[i + half]
        half >>= 1
    return acc[0]


@njit(error_model="numpy")
def dot_lanes(x, y, n, lanes, acc):
    """Sum of x[i] * y[i] over n values with the given number of lanes.

    x, y contiguous; acc is scratch of at least `lanes` floats, whose first becomes the sum.
    """
    if lanes >= 64 and n % lanes == 0:
        if lanes == 256:
            acc[0] = dot256(x.ctypes.data, y.ctypes.data, n)
        elif lanes == 128:
            acc[0] = dot128(x.ctypes.data, y.ctypes.data, n)
        else:
            acc[0] = dot64(x.ctypes.data, y.ctypes.data, n)
        return acc[0]
    for i in range(lanes):
        acc[i] = F(0)
    whole = n // lanes * lanes
    for base in range(0, whole, lanes):
        for i in range(lanes):
            acc[i] = fma32(x[base + i], y[base + i], acc[i])
    for i in range(n - whole):
        acc[i] = fma32(x[whole + i], y[whole + i], acc[i])
    return tree(acc, lanes)


@njit(error_model="numpy")
def inverse_rms(x, n, eps, acc):
    """1 / sqrt(mean(x^2) + eps), one rounding a step."""
    mean = dot_lanes(x, x, n, lanes_of(n), acc) / F(n)
    return F(1) / sqrt32(mean + eps)


@njit(error_model="numpy")
def is_finite(x):
    """False for NaN and both infinities."""
    return abs(x) <= F(3.4028234663852886e38)


@njit(error_model="numpy")
def all_finite(x):
    """Whether a float32 array holds no NaN and no infinity; an integer maximum, so that NaN cannot hide."""
    top = np.int32(0)
    for i in range(x.size):
        top = max(top, np.int32(f32_bits(x[i]) & np.int32(0x7FFFFFFF)))
    return top < np.int32(0x7F800000)
