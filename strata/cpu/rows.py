"""Rows of a tensor as float32: one C function per block format, with exactly the bits of `BlockFormat.dequantise`.

The unpackers of the matrix products turn 256 values at a time into signed bytes and scales; what differs here is only
how a value is made of them. What is not exact is rounded in the order of the format's definition, and NaN and infinity
arise where they do there; the payload and the sign of a NaN are not defined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba.extending import overload

from strata.base.compiled import CFunction, c_function
from strata.base.errors import ModelError
from strata.cpu.float_bits import bf16_f32, half_f32, i32_f32
from strata.cpu.gemv.rows import STEP
from strata.cpu.gemv.unpack_grid import (
    unpack_iq1_m,
    unpack_iq1_s,
    unpack_iq2_s,
    unpack_iq2_xs,
    unpack_iq2_xxs,
    unpack_iq3_s,
    unpack_iq3_xxs,
)
from strata.cpu.gemv.unpack_k import (
    unpack_iq4_xs,
    unpack_q2_k,
    unpack_q3_k,
    unpack_q4_k,
    unpack_q5_k,
    unpack_q6_k,
)
from strata.cpu.gemv.unpack_small import (
    unpack_iq4_nl,
    unpack_mxfp4,
    unpack_nvfp4,
    unpack_q2_0,
    unpack_q4_0,
    unpack_q4_1,
    unpack_q5_0,
    unpack_q5_1,
    unpack_q8_0,
)
from strata.cpu.gemv.vectors import MIN_SCALES, SCALES_BYTES, SUB_MINIMA, SUB_SCALES
from strata.cpu.gemv.words import real, set_real, short, signed_byte, stack, word
from strata.cpu.machine_code import copy_bytes
from strata.pack.formats import by_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.pack.formats import BlockFormat


# A row function takes the id of its format first, by which `_row` below finds it; it has no use for it.


def _f32_row(ggml_id, row, n_values, out):
    copy_bytes(out, row, 4 * n_values)


def _f16_row(ggml_id, row, n_values, out):
    for i in range(n_values):
        set_real(out, 4 * i, half_f32(short(row, 2 * i)))


def _bf16_row(ggml_id, row, n_values, out):
    for i in range(n_values):
        set_real(out, 4 * i, bf16_f32(short(row, 2 * i)))


def _block_row(unpack: Callable, group: int, *, sub_scales: bool = False, minima: bool = False) -> Callable:
    """Row function of a block format.

    group       values that share a scale
    sub_scales  scales and minima are integers of every group times a float32 of the block, and minima are subtracted;
                else they are float32 of every group, and minima are added
    minima      whether there are any
    """

    def block_row(ggml_id, row, n_values, out):
        codes, scales = stack(STEP), stack(SCALES_BYTES)
        for first in range(0, n_values, STEP):
            left = n_values - first
            unpack(row, first // STEP, left, codes, scales)
            for g in range(min(left, STEP) // group):
                scale, shift = real(scales, 4 * g), real(scales, MIN_SCALES + 4 * g)
                if sub_scales:
                    scale = real(scales, 0) * i32_f32(word(scales, SUB_SCALES + 4 * g))
                    shift = -(real(scales, MIN_SCALES) * i32_f32(word(scales, SUB_MINIMA + 4 * g)))
                for i in range(group * g, group * g + group):
                    value = scale * i32_f32(signed_byte(codes, i))
                    set_real(out, 4 * (first + i), value + shift if minima else value)

    return block_row


_BY_NAME: dict[str, Callable] = {
    "F32": _f32_row,
    "F16": _f16_row,
    "BF16": _bf16_row,
    "Q4_0": _block_row(unpack_q4_0, 32),
    "Q4_1": _block_row(unpack_q4_1, 32, minima=True),
    "Q5_0": _block_row(unpack_q5_0, 32),
    "Q5_1": _block_row(unpack_q5_1, 32, minima=True),
    "Q8_0": _block_row(unpack_q8_0, 32),
    "IQ4_NL": _block_row(unpack_iq4_nl, 32),
    "MXFP4": _block_row(unpack_mxfp4, 32),
    "NVFP4": _block_row(unpack_nvfp4, 16),
    "Q2_0": _block_row(unpack_q2_0, 64),
    "Q2_K": _block_row(unpack_q2_k, 16, sub_scales=True, minima=True),
    "Q3_K": _block_row(unpack_q3_k, 16, sub_scales=True),
    "Q4_K": _block_row(unpack_q4_k, 32, sub_scales=True, minima=True),
    "Q5_K": _block_row(unpack_q5_k, 32, sub_scales=True, minima=True),
    "Q6_K": _block_row(unpack_q6_k, 16, sub_scales=True),
    "IQ4_XS": _block_row(unpack_iq4_xs, 32, sub_scales=True),
    "IQ2_XXS": _block_row(unpack_iq2_xxs, 16),
    "IQ2_XS": _block_row(unpack_iq2_xs, 16),
    "IQ2_S": _block_row(unpack_iq2_s, 16),
    "IQ3_XXS": _block_row(unpack_iq3_xxs, 16),
    "IQ3_S": _block_row(unpack_iq3_s, 16),
    "IQ1_S": _block_row(unpack_iq1_s, 16),
    "IQ1_M": _block_row(unpack_iq1_m, 16),
}

_BY_ID = {by_name(name).ggml_id: row for name, row in _BY_NAME.items()}


def _row(ggml_id, row, n_values, out):
    """The row function of a format, for compiled code; `ggml_id` must be a constant there."""


@overload(_row, prefer_literal=True, jit_options={"error_model": "numpy"})
def _choose_row(ggml_id, row, n_values, out):
    return _BY_ID[ggml_id.literal_value]


def _kernel(name: str, ggml_id: int) -> CFunction:
    def dequantise(row, n_values, out):
        _row(ggml_id, row, n_values, out)

    # The disk cache keeps one index per function name: a name for each format lets threads compile them side by side.
    dequantise.__qualname__ = f"dequantise_{name}"
    return c_function(3)(dequantise)


_KERNELS = {by_name(name).ggml_id: _kernel(name, by_name(name).ggml_id) for name in _BY_NAME}


def row_kernel(format: BlockFormat) -> int:
    """Address of the C function void(int64 row, int64 n_values, int64 out) that dequantises one row of `format`.

    row       address of the row's blocks, any alignment; nothing outside of format.row_bytes(n_values) is read
    n_values  a multiple of format.block_values (not checked)
    out       address of n_values float32, not overlapping the row

    The first request for a format compiles the function or loads it from disk. ModelError for a format without rows of
    real numbers.
    """
    kernel = _KERNELS.get(format.ggml_id)
    if kernel is None:
        raise ModelError(
            f"rows of {format.name} cannot be looked up",
            found=format.name,
            needed="one of " + ", ".join(_BY_NAME),
            advice="Store the tensor in one of these formats.",
        )
    return kernel.address
