"""Matrices of F32, F16 and BF16 times float32 rows: lane = index mod 256, ascending fma, halving tree.

For shorter rows the lanes are the largest power of two that is not longer than the row.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.base.arithmetic import MAX_LANES
from strata.base.compiled import CFunction, c_function
from strata.cpu.float_bits import bf16_f32, fma32, half_f32
from strata.cpu.gemv.rows import MOST_ROWS, named
from strata.cpu.gemv.words import real, set_real, short, stack

F = np.float32

_REALS, _LANES = 4 * MAX_LANES, 4 * MAX_LANES * MOST_ROWS


@njit(error_model="numpy", forceinline=True)
def _read_f32(row, index):
    return real(row, 4 * index)


@njit(error_model="numpy", forceinline=True)
def _read_f16(row, index):
    return half_f32(short(row, 2 * index))


@njit(error_model="numpy", forceinline=True)
def _read_bf16(row, index):
    return bf16_f32(short(row, 2 * index))


@njit(error_model="numpy")
def lanes_of(K):
    """Lanes of a row of K values."""
    lanes = MAX_LANES
    while lanes > K:
        lanes //= 2
    return lanes


@njit(error_model="numpy")
def _sum_halving(lanes, n):
    while n > 1:
        n //= 2
        for l in range(0, 4 * n, 4):
            set_real(lanes, l, real(lanes, l) + real(lanes, l + 4 * n))
    return real(lanes, 0) + F(0)


def _row_loop(name, read):
    def rows(R, w, w_stride, n_rows, act, K, out, out_stride):
        values, lanes = stack(_REALS), stack(_LANES)
        n_lanes = lanes_of(K)
        for i in range(n_rows):
            row = w + i * w_stride
            for l in range(0, _REALS * R, 4):
                set_real(lanes, l, F(0))
            for start in range(0, K, n_lanes):
                m = min(n_lanes, K - start)
                for l in range(m):
                    set_real(values, 4 * l, read(row, start + l))
                for r in range(R):
                    x, mine = act + 4 * (r * K + start), lanes + _REALS * r
                    for l in range(0, 4 * m, 4):
                        set_real(mine, l, fma32(real(values, l), real(x, l), real(mine, l)))
            for r in range(R):
                set_real(out + r * out_stride, 4 * i, _sum_halving(lanes + _REALS * r, n_lanes))

    return named(rows, f"rows_{name}")


_rows_f32 = _row_loop("f32", _read_f32)
_rows_f16 = _row_loop("f16", _read_f16)
_rows_bf16 = _row_loop("bf16", _read_bf16)


def f32(R: int) -> CFunction:
    @c_function(7)
    def gemv_f32(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_f32(R, w, w_stride, n_rows, act, K, out, out_stride)

    return gemv_f32


def f16(R: int) -> CFunction:
    @c_function(7)
    def gemv_f16(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_f16(R, w, w_stride, n_rows, act, K, out, out_stride)

    return gemv_f16


def bf16(R: int) -> CFunction:
    @c_function(7)
    def gemv_bf16(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_bf16(R, w, w_stride, n_rows, act, K, out, out_stride)

    return gemv_bf16
