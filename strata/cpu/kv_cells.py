"""One K or V head in its cell: float16, or int8 codes with a float16 scale per 64 values.

int8: scale = f16(max|x| / 127), code = clamp(round_half_even(x / scale), -127, 127), read back as f16(code * scale).
A scale of zero (all-zero group, or below what float16 holds) gives codes 0. A group fits when 127 * scale, its largest
value read back, is finite in float16.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.cpu.float_bits import rint32
from strata.cpu.half import f16_bits, f16_value
from strata.cpu.machine_code import i8_view, u16_view

F = np.float32
SCALE_GROUP = 64


@njit(error_model="numpy")
def store_head(cells, scales, at, x, n):
    """Write n values of x as head number `at`. scales = 0 means float16. Returns False when a value does not fit."""
    fine = True
    if scales == 0:
        out = u16_view(cells + at * n * 2, n)
        for i in range(n):
            out[i] = f16_bits(x[i])
        for i in range(n):
            fine = fine and (out[i] & 0x7C00) != 0x7C00
        return fine
    codes = i8_view(cells + at * n, n)
    steps = u16_view(scales + at * (n // SCALE_GROUP) * 2, n // SCALE_GROUP)
    for group in range(n // SCALE_GROUP):
        top = F(0)
        for i in range(group * SCALE_GROUP, (group + 1) * SCALE_GROUP):
            top = max(top, abs(x[i]))
            fine = fine and abs(x[i]) <= F(3.4028234663852886e38)
        bits = f16_bits(top / F(127))
        scale = f16_value(bits)
        fine = fine and (f16_bits(F(127) * scale) & 0x7C00) != 0x7C00
        steps[group] = bits
        for i in range(group * SCALE_GROUP, (group + 1) * SCALE_GROUP):
            code = F(0)
            if scale > F(0) and fine:
                code = min(max(rint32(x[i] / scale), F(-127)), F(127))
            codes[i] = np.int8(code)
    return fine


@njit(error_model="numpy")
def load_head(cells, scales, at, out, n):
    """Read head number `at` into n float32 values."""
    if scales == 0:
        bits = u16_view(cells + at * n * 2, n)
        for i in range(n):
            out[i] = f16_value(bits[i])
        return
    codes = i8_view(cells + at * n, n)
    steps = u16_view(scales + at * (n // SCALE_GROUP) * 2, n // SCALE_GROUP)
    for group in range(n // SCALE_GROUP):
        scale = f16_value(steps[group])
        for i in range(group * SCALE_GROUP, (group + 1) * SCALE_GROUP):
            out[i] = f16_value(f16_bits(F(codes[i]) * scale))
