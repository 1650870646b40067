"""float32 to float16 in integer steps: no target instruction, so every tier and machine agrees."""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.cpu.float_bits import bits_f32, f32_bits, half_f32

I = np.int32


@njit(error_model="numpy")
def f16_bits(x):
    """Nearest float16 (ties to even) of a float32, as an int32 of its 16 bits. From 65,520 on it is infinity."""
    u = f32_bits(x)
    sign = I((u >> I(16)) & I(0x8000))
    m = I(u & I(0x7FFFFFFF))
    if m > I(0x7F800000):
        return I(sign | I(0x7E00))
    if m >= I(0x477FF000):
        return I(sign | I(0x7C00))
    if m < I(0x38800000):  # below 2^-14: a multiple of 2^-24, rounded by adding 0.5
        return I(sign | I(f32_bits(bits_f32(m) + np.float32(0.5)) - I(0x3F000000)))
    odd = I((m >> I(13)) & I(1))
    return I(sign | I(I(m - I(0x38000000) + I(0xFFF) + odd) >> I(13)))


@njit(error_model="numpy")
def f16_value(bits):
    """The float32 of a float16's bits (any integer type); exact."""
    return half_f32(I(bits))
