"""Grid formats (IQ1_*, IQ2_*, IQ3_*) into signed bytes and 16 float32 scales.

unpack(row, step, left, codes, scales): `codes` receives 32 longs, eight values each, in value order; `scales` the exact
float32 scale of every 16 values.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.cpu.float_bits import half_f32, i32_f32
from strata.cpu.gemv.words import byte, less8, negate8, set_long, set_real, short, word
from strata.pack.grids import GRID, SIGNS

I, F, U = np.int32, np.float32, np.uint64


def _longs(grid: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(grid).view(np.int64)[:, 0]


def _masks(signs: np.ndarray) -> np.ndarray:
    """Sign bytes -> (n,) int64 with 0xff in every byte whose bit is set."""
    bits = (signs[:, None] >> np.arange(8, dtype=np.uint8)) & 1
    return _longs((bits * 0xFF).astype(np.uint8))


_MASK_8 = _masks(np.arange(256, dtype=np.uint8))
_MASK_7 = _masks(SIGNS)
_IQ2_XXS, _IQ2_XS, _IQ2_S = (_longs(GRID[n]) for n in ("IQ2_XXS", "IQ2_XS", "IQ2_S"))
_IQ3_XXS, _IQ3_S = (np.ascontiguousarray(GRID[n]).view(np.uint32)[:, 0].astype(np.int64) for n in ("IQ3_XXS", "IQ3_S"))
_IQ1 = _longs(8 * GRID["IQ1_S"] + 8)
_HALF, _QUARTER, _EIGHTH = F(0.5), F(0.25), F(0.125)


@njit(error_model="numpy")
def unpack_iq2_xxs(row, step, left, codes, scales):
    block = row + 66 * step
    d = half_f32(short(block, 0)) * _QUARTER
    for s in range(8):
        aux = word(block, 6 + 8 * s)
        scale = (i32_f32(I((aux >> 28) & 15)) + _HALF) * d
        set_real(scales, 8 * s, scale)
        set_real(scales, 8 * s + 4, scale)
        for k in range(4):
            grid = _IQ2_XXS[U(byte(block, 2 + 8 * s + k))]
            set_long(codes, 32 * s + 8 * k, negate8(grid, _MASK_7[U((aux >> (7 * k)) & 127)]))


@njit(error_model="numpy")
def unpack_iq2_xs(row, step, left, codes, scales):
    block = row + 74 * step
    d = half_f32(short(block, 0)) * _QUARTER
    for s in range(8):
        both = byte(block, 66 + s)
        set_real(scales, 8 * s, (i32_f32(I(both & 15)) + _HALF) * d)
        set_real(scales, 8 * s + 4, (i32_f32(I(both >> 4)) + _HALF) * d)
    for k in range(32):
        q = short(block, 2 + 2 * k)
        set_long(codes, 8 * k, negate8(_IQ2_XS[U(q & 511)], _MASK_7[U(q >> 9)]))


@njit(error_model="numpy")
def unpack_iq2_s(row, step, left, codes, scales):
    block = row + 82 * step
    d = half_f32(short(block, 0)) * _QUARTER
    for s in range(8):
        both = byte(block, 74 + s)
        set_real(scales, 8 * s, (i32_f32(I(both & 15)) + _HALF) * d)
        set_real(scales, 8 * s + 4, (i32_f32(I(both >> 4)) + _HALF) * d)
        high = byte(block, 66 + s) << 8
        for k in range(4):
            index = byte(block, 2 + 4 * s + k) | ((high >> (2 * k)) & 0x300)
            set_long(codes, 32 * s + 8 * k, negate8(_IQ2_S[U(index)], _MASK_8[U(byte(block, 34 + 4 * s + k))]))


@njit(error_model="numpy")
def unpack_iq3_xxs(row, step, left, codes, scales):
    block = row + 98 * step
    d = half_f32(short(block, 0)) * _HALF
    for s in range(8):
        aux = word(block, 66 + 4 * s)
        scale = (i32_f32(I((aux >> 28) & 15)) + _HALF) * d
        set_real(scales, 8 * s, scale)
        set_real(scales, 8 * s + 4, scale)
        for k in range(4):
            low = _IQ3_XXS[U(byte(block, 2 + 8 * s + 2 * k))]
            high = _IQ3_XXS[U(byte(block, 3 + 8 * s + 2 * k))]
            set_long(codes, 32 * s + 8 * k, negate8(low | (high << 32), _MASK_7[U((aux >> (7 * k)) & 127)]))


@njit(error_model="numpy")
def unpack_iq3_s(row, step, left, codes, scales):
    block = row + 110 * step
    d = half_f32(short(block, 0))
    for s in range(8):
        four = (byte(block, 106 + (s >> 1)) >> (4 * (s & 1))) & 15
        scale = i32_f32(I(2 * four + 1)) * d
        set_real(scales, 8 * s, scale)
        set_real(scales, 8 * s + 4, scale)
        ninth = byte(block, 66 + s) << 8
        for k in range(4):
            low = _IQ3_S[U(byte(block, 2 + 8 * s + 2 * k) | ((ninth >> (2 * k)) & 256))]
            high = _IQ3_S[U(byte(block, 3 + 8 * s + 2 * k) | ((ninth >> (2 * k + 1)) & 256))]
            mask = _MASK_8[U(byte(block, 74 + 4 * s + k))]
            set_long(codes, 32 * s + 8 * k, negate8(low | (high << 32), mask))


@njit(error_model="numpy")
def unpack_iq1_s(row, step, left, codes, scales):
    block = row + 50 * step
    d = half_f32(short(block, 0)) * _EIGHTH
    for s in range(8):
        h = short(block, 34 + 2 * s)
        scale = i32_f32(I(2 * ((h >> 12) & 7) + 1)) * d
        set_real(scales, 8 * s, scale)
        set_real(scales, 8 * s + 4, scale)
        bias = 7 + 2 * (h >> 15)  # the table holds 8 grid + 8; the values are 8 grid + 1 or 8 grid - 1
        for k in range(4):
            index = byte(block, 2 + 4 * s + k) | (((h >> (3 * k)) & 7) << 8)
            set_long(codes, 32 * s + 8 * k, less8(_IQ1[U(index)], bias))


@njit(error_model="numpy")
def unpack_iq1_m(row, step, left, codes, scales):
    block = row + 56 * step
    bits = 0
    for i in range(4):
        bits |= (short(block, 48 + 2 * i) >> 12) << (4 * i)
    d = half_f32(I(bits)) * _EIGHTH
    for s in range(16):
        three = (short(block, 48 + 2 * (s >> 2)) >> (3 * (s & 3))) & 7
        set_real(scales, 4 * s, i32_f32(I(2 * three + 1)) * d)
        both = byte(block, 32 + s)
        for k in range(2):
            h = both >> (4 * k)
            index = byte(block, 2 * s + k) | ((h & 7) << 8)
            set_long(codes, 16 * s + 8 * k, less8(_IQ1[U(index)], 7 + ((h & 8) >> 2)))
