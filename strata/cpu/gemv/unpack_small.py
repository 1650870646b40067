"""Blocks of 32 and 64 values into signed bytes: up to 256 values of a row at a time.

unpack(row, step, left, codes, scales): `codes` receives 64 words, four values each, in value order; `scales` receives
float32 weight scales, and block minima at MIN_SCALES, in block order. From this step on, `left` values of the row
remain; what a short last step does not fill becomes zero.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.cpu.float_bits import half_f32
from strata.cpu.gemv.vectors import MIN_SCALES
from strata.cpu.gemv.words import byte, less, set_real, set_word, short, spread4, word
from strata.pack.grids import CODEBOOK, E4M3_HALF, E8M0_HALF

I, F = np.int32, np.float32

_LOW = I(0x0F0F0F0F)


def _pairs(codebook: np.ndarray) -> np.ndarray:
    """(256,) int32: the two codebook bytes for the two nibbles of an index, as the low half of a word."""
    low, high = (codebook.view(np.uint8)[n].astype(np.int32) for n in (np.arange(256) & 15, np.arange(256) >> 4))
    return low | high << 8


_NL_PAIRS, _E2M1_PAIRS = _pairs(CODEBOOK["IQ4_NL"]), _pairs(CODEBOOK["MXFP4"])


@njit(error_model="numpy")
def nl_word(nibbles):
    """Four 4-bit codes, one a byte -> the four codebook bytes of IQ4_NL."""
    m = I(nibbles | (nibbles >> 4))
    return I(_NL_PAIRS[np.uint64(m & 255)] | (_NL_PAIRS[np.uint64((m >> 16) & 255)] << 16))


@njit(error_model="numpy")
def e2m1_word(nibbles):
    m = I(nibbles | (nibbles >> 4))
    return I(_E2M1_PAIRS[np.uint64(m & 255)] | (_E2M1_PAIRS[np.uint64((m >> 16) & 255)] << 16))


@njit(error_model="numpy")
def _blocks(left, block_values, codes, scales):
    """Whole blocks of this step; clears what a short step leaves open."""
    if left >= 256:
        return 256 // block_values
    for i in range(0, 256, 4):
        set_word(codes, i, I(0))
        set_word(scales, i, I(0))
    return left // block_values


@njit(error_model="numpy")
def unpack_q4_0(row, step, left, codes, scales):
    for b in range(_blocks(left, 32, codes, scales)):
        block = row + 18 * (8 * step + b)
        set_real(scales, 4 * b, half_f32(short(block, 0)))
        for j in range(0, 16, 4):
            q = word(block, 2 + j)
            set_word(codes, 32 * b + j, less(I(q & _LOW), 8))
            set_word(codes, 32 * b + 16 + j, less(I((q >> 4) & _LOW), 8))


@njit(error_model="numpy")
def unpack_q4_1(row, step, left, codes, scales):
    for b in range(_blocks(left, 32, codes, scales)):
        block = row + 20 * (8 * step + b)
        set_real(scales, 4 * b, half_f32(short(block, 0)))
        set_real(scales, MIN_SCALES + 4 * b, half_f32(short(block, 2)))
        for j in range(0, 16, 4):
            q = word(block, 4 + j)
            set_word(codes, 32 * b + j, I(q & _LOW))
            set_word(codes, 32 * b + 16 + j, I((q >> 4) & _LOW))


@njit(error_model="numpy")
def unpack_q5_0(row, step, left, codes, scales):
    for b in range(_blocks(left, 32, codes, scales)):
        block = row + 22 * (8 * step + b)
        set_real(scales, 4 * b, half_f32(short(block, 0)))
        fifth = word(block, 2)
        for j in range(0, 16, 4):
            q = word(block, 6 + j)
            low = I((q & _LOW) | (spread4(I(fifth >> j)) << 4))
            high = I(((q >> 4) & _LOW) | (spread4(I(fifth >> (16 + j))) << 4))
            set_word(codes, 32 * b + j, less(low, 16))
            set_word(codes, 32 * b + 16 + j, less(high, 16))


@njit(error_model="numpy")
def unpack_q5_1(row, step, left, codes, scales):
    for b in range(_blocks(left, 32, codes, scales)):
        block = row + 24 * (8 * step + b)
        set_real(scales, 4 * b, half_f32(short(block, 0)))
        set_real(scales, MIN_SCALES + 4 * b, half_f32(short(block, 2)))
        fifth = word(block, 4)
        for j in range(0, 16, 4):
            q = word(block, 8 + j)
            set_word(codes, 32 * b + j, I((q & _LOW) | (spread4(I(fifth >> j)) << 4)))
            set_word(codes, 32 * b + 16 + j, I(((q >> 4) & _LOW) | (spread4(I(fifth >> (16 + j))) << 4)))


@njit(error_model="numpy")
def unpack_q8_0(row, step, left, codes, scales):
    for b in range(_blocks(left, 32, codes, scales)):
        block = row + 34 * (8 * step + b)
        set_real(scales, 4 * b, half_f32(short(block, 0)))
        for j in range(0, 32, 4):
            set_word(codes, 32 * b + j, word(block, 2 + j))


@njit(error_model="numpy")
def unpack_iq4_nl(row, step, left, codes, scales):
    for b in range(_blocks(left, 32, codes, scales)):
        block = row + 18 * (8 * step + b)
        set_real(scales, 4 * b, half_f32(short(block, 0)))
        for j in range(0, 16, 4):
            q = word(block, 2 + j)
            set_word(codes, 32 * b + j, nl_word(I(q & _LOW)))
            set_word(codes, 32 * b + 16 + j, nl_word(I((q >> 4) & _LOW)))


@njit(error_model="numpy")
def unpack_mxfp4(row, step, left, codes, scales):
    for b in range(_blocks(left, 32, codes, scales)):
        block = row + 17 * (8 * step + b)
        set_real(scales, 4 * b, E8M0_HALF[np.uint64(byte(block, 0))])
        for j in range(0, 16, 4):
            q = word(block, 1 + j)
            set_word(codes, 32 * b + j, e2m1_word(I(q & _LOW)))
            set_word(codes, 32 * b + 16 + j, e2m1_word(I((q >> 4) & _LOW)))


@njit(error_model="numpy")
def unpack_nvfp4(row, step, left, codes, scales):
    for b in range(_blocks(left, 64, codes, scales)):
        block = row + 36 * (4 * step + b)
        for s in range(4):
            set_real(scales, 16 * b + 4 * s, E4M3_HALF[np.uint64(byte(block, s))])
            for j in range(0, 8, 4):
                q = word(block, 4 + 8 * s + j)
                set_word(codes, 64 * b + 16 * s + j, e2m1_word(I(q & _LOW)))
                set_word(codes, 64 * b + 16 * s + 8 + j, e2m1_word(I((q >> 4) & _LOW)))


@njit(error_model="numpy")
def unpack_q2_0(row, step, left, codes, scales):
    for b in range(_blocks(left, 64, codes, scales)):
        block = row + 18 * (4 * step + b)
        set_real(scales, 4 * b, half_f32(short(block, 0)))
        for j in range(16):
            q = byte(block, 2 + j)
            fields = I((q | (q << 6) | (q << 12) | (q << 18)) & I(0x03030303))
            set_word(codes, 64 * b + 4 * j, less(fields, 1))
