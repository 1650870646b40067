"""Activation records of the portable tier and the row loop of its quantised kernels.

For every row of the matrix and every 1024 values, `unpack` writes the weights as signed bytes with their scales; then
`take_step` adds them up for each of the R activation rows. Unpacking a few steps ahead keeps the wide loads of
`take_step` away from the narrow stores of `unpack`. Nothing depends on R, so a row's bits do not either.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.cpu.gemv.vectors import SCALES_BYTES, sum_lanes, take_step
from strata.cpu.gemv.words import set_real, stack

F = np.float32

STEP = 256
"""Values a kernel takes at a time."""

AHEAD = 4
"""Steps unpacked before they are used."""

MOST_ROWS = 4
"""Rows one kernel call takes."""

_CODES, _SCALES = AHEAD * STEP, AHEAD * SCALES_BYTES


@njit(error_model="numpy")
def padded(K):
    """Values of a row filled up to whole steps: the codes of a record, in bytes."""
    return (K + STEP - 1) // STEP * STEP


@njit(error_model="numpy")
def sums_at(K):
    """Offset of a record's int32 sums of codes: of 32 where a scale belongs to 32 values, else of 16."""
    return padded(K)


@njit(error_model="numpy")
def scales_at(K, group):
    """Offset of a record's float32 scales."""
    return padded(K) + 4 * (padded(K) // (32 if group == 32 else 16))


@njit(error_model="numpy")
def record_bytes(K, group):
    """Bytes of the record of one activation row: codes int8, sums int32, scales float32, each filled up with zeros to
    whole steps; a multiple of 64."""
    return (scales_at(K, group) + 4 * (padded(K) // group) + 63) // 64 * 64


def named(function, name):
    """njit of a function made in a factory, under a name of its own.

    Compiled code finds its helpers by name, and names are only made unique within a process. Two functions of one
    factory, compiled in two processes and loaded from disk in a third, could otherwise take each other's place.
    """
    function.__name__ = function.__qualname__ = name
    return njit(error_model="numpy")(function)


def row_loop(name, unpack, group):
    """The row loop of the format `name`, to be called from its kernels:

    rows(R, w, w_stride, n_rows, act, K, out, out_stride)
    out[r * out_stride + 4 i] = row i of the matrix times activation row r, for i < n_rows, r < R <= MOST_ROWS
    """
    sums_step = 4 * STEP // (32 if group == 32 else 16)
    scales_step = 4 * STEP // group

    def rows(R, w, w_stride, n_rows, act, K, out, out_stride):
        codes, scales, lanes, lowest = stack(_CODES), stack(_SCALES), stack(256), stack(64)
        record, x_sums, x_scales = record_bytes(K, group), sums_at(K), scales_at(K, group)
        n_steps = padded(K) // STEP
        for i in range(n_rows):
            row = w + i * w_stride
            for l in range(0, 64 * R, 4):
                set_real(lanes, l, F(0))
            for l in range(0, 16 * R, 4):
                set_real(lowest, l, F(0))
            for first in range(0, n_steps, AHEAD):
                n = min(n_steps - first, AHEAD)
                for s in range(n):
                    unpack(row, first + s, K - STEP * (first + s), codes + STEP * s, scales + SCALES_BYTES * s)
                for r in range(R):
                    x = act + r * record
                    for s in range(n):
                        step = first + s
                        take_step(
                            name, codes + STEP * s, scales + SCALES_BYTES * s, x + STEP * step,
                            x + x_scales + scales_step * step, x + x_sums + sums_step * step,
                            lanes + 64 * r, lowest + 16 * r,
                        )  # fmt: skip
            for r in range(R):
                set_real(out + r * out_stride, 4 * i, sum_lanes(lanes + 64 * r, lowest + 16 * r))

    return named(rows, f"rows_{name}")
