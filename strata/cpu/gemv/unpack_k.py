"""Super-blocks with integer sub-scales (Q2_K to Q6_K, IQ4_XS) into signed bytes and int32 scales.

unpack(row, step, left, codes, scales): `codes` receives 64 words, four values each, in value order. `scales` receives
the float32 scale at 0, that of the minima at MIN_SCALES, int32 sub-scales at SUB_SCALES and int32 minima at SUB_MINIMA.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.cpu.float_bits import half_f32
from strata.cpu.gemv.unpack_small import nl_word
from strata.cpu.gemv.vectors import MIN_SCALES, SUB_MINIMA, SUB_SCALES
from strata.cpu.gemv.words import byte, less, set_real, set_word, short, signed_byte, word

I = np.int32

_LOW, _TWO_BITS, _ONE_BIT = I(0x0F0F0F0F), I(0x03030303), I(0x01010101)


@njit(error_model="numpy")
def unpack_q2_k(row, step, left, codes, scales):
    block = row + 84 * step
    set_real(scales, 0, half_f32(short(block, 80)))
    set_real(scales, MIN_SCALES, half_f32(short(block, 82)))
    for s in range(16):
        both = byte(block, s)
        set_word(scales, SUB_SCALES + 4 * s, I(both & 15))
        set_word(scales, SUB_MINIMA + 4 * s, I(both >> 4))
    for h in range(2):
        for j in range(0, 32, 4):
            q = word(block, 16 + 32 * h + j)
            for i in range(4):
                set_word(codes, 128 * h + 32 * i + j, I((q >> (2 * i)) & _TWO_BITS))


@njit(error_model="numpy")
def unpack_q3_k(row, step, left, codes, scales):
    block = row + 110 * step
    set_real(scales, 0, half_f32(short(block, 108)))
    for s in range(16):
        low = (byte(block, 96 + (s & 7)) >> (4 * (s >> 3))) & 15
        top = (byte(block, 104 + (s & 3)) >> (2 * (s >> 2))) & 3
        set_word(scales, SUB_SCALES + 4 * s, I((low | (top << 4)) - 32))
    for h in range(2):
        for j in range(0, 32, 4):
            q = word(block, 32 + 32 * h + j)
            high = word(block, j)
            for i in range(4):
                code = I(((q >> (2 * i)) & _TWO_BITS) | (((high >> (4 * h + i)) & _ONE_BIT) << 2))
                set_word(codes, 128 * h + 32 * i + j, less(code, 4))


@njit(error_model="numpy")
def _scales_of_6_bits(block, scales):
    """Eight scales and eight minima of 6 bits from the 12 bytes at offset 4 (Q4_K, Q5_K)."""
    for s in range(4):
        a, b, c = byte(block, 4 + s), byte(block, 8 + s), byte(block, 12 + s)
        set_word(scales, SUB_SCALES + 4 * s, I(a & 63))
        set_word(scales, SUB_SCALES + 16 + 4 * s, I((c & 15) | ((a >> 6) << 4)))
        set_word(scales, SUB_MINIMA + 4 * s, I(b & 63))
        set_word(scales, SUB_MINIMA + 16 + 4 * s, I((c >> 4) | ((b >> 6) << 4)))


@njit(error_model="numpy")
def unpack_q4_k(row, step, left, codes, scales):
    block = row + 144 * step
    set_real(scales, 0, half_f32(short(block, 0)))
    set_real(scales, MIN_SCALES, half_f32(short(block, 2)))
    _scales_of_6_bits(block, scales)
    for v in range(4):
        for j in range(0, 32, 4):
            q = word(block, 16 + 32 * v + j)
            set_word(codes, 64 * v + j, I(q & _LOW))
            set_word(codes, 64 * v + 32 + j, I((q >> 4) & _LOW))


@njit(error_model="numpy")
def unpack_q5_k(row, step, left, codes, scales):
    block = row + 176 * step
    set_real(scales, 0, half_f32(short(block, 0)))
    set_real(scales, MIN_SCALES, half_f32(short(block, 2)))
    _scales_of_6_bits(block, scales)
    for v in range(4):
        for j in range(0, 32, 4):
            q = word(block, 48 + 32 * v + j)
            high = word(block, 16 + j) >> (2 * v)
            set_word(codes, 64 * v + j, I((q & _LOW) | ((high & _ONE_BIT) << 4)))
            set_word(codes, 64 * v + 32 + j, I(((q >> 4) & _LOW) | (((high >> 1) & _ONE_BIT) << 4)))


@njit(error_model="numpy")
def unpack_q6_k(row, step, left, codes, scales):
    block = row + 210 * step
    set_real(scales, 0, half_f32(short(block, 208)))
    for s in range(16):
        set_word(scales, SUB_SCALES + 4 * s, signed_byte(block, 192 + s))
    for h in range(2):
        for v in range(2):
            for j in range(0, 32, 4):
                q = word(block, 64 * h + 32 * v + j)
                high = word(block, 128 + 32 * h + j) >> (2 * v)
                low_codes = I((q & _LOW) | ((high & _TWO_BITS) << 4))
                high_codes = I(((q >> 4) & _LOW) | (((high >> 4) & _TWO_BITS) << 4))
                set_word(codes, 128 * h + 32 * v + j, less(low_codes, 32))
                set_word(codes, 128 * h + 64 + 32 * v + j, less(high_codes, 32))


@njit(error_model="numpy")
def unpack_iq4_xs(row, step, left, codes, scales):
    block = row + 136 * step
    set_real(scales, 0, half_f32(short(block, 0)))
    top = short(block, 2)
    for s in range(8):
        low = (byte(block, 4 + (s >> 1)) >> (4 * (s & 1))) & 15
        set_word(scales, SUB_SCALES + 4 * s, I((low | (((top >> (2 * s)) & 3) << 4)) - 32))
        for j in range(0, 16, 4):
            q = word(block, 8 + 16 * s + j)
            set_word(codes, 32 * s + j, nl_word(I(q & _LOW)))
            set_word(codes, 32 * s + 16 + j, nl_word(I((q >> 4) & _LOW)))
