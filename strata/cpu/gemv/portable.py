"""The compiled functions of the portable tier, one factory per quantised format.

A factory takes R and returns a C function (w, w_stride, n_rows, act, K, out, out_stride), all int64. The loops, the
unpackers are module globals and R is the only closure value: that is what lets the disk cache find a
kernel again.
"""

from __future__ import annotations

from collections.abc import Callable

from strata.base.compiled import CFunction, c_function
from strata.cpu.gemv.rows import row_loop
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

_rows_q4_0 = row_loop("Q4_0", unpack_q4_0, 32)
_rows_q4_1 = row_loop("Q4_1", unpack_q4_1, 32)
_rows_q5_0 = row_loop("Q5_0", unpack_q5_0, 32)
_rows_q5_1 = row_loop("Q5_1", unpack_q5_1, 32)
_rows_q8_0 = row_loop("Q8_0", unpack_q8_0, 32)
_rows_iq4_nl = row_loop("IQ4_NL", unpack_iq4_nl, 32)
_rows_mxfp4 = row_loop("MXFP4", unpack_mxfp4, 32)
_rows_nvfp4 = row_loop("NVFP4", unpack_nvfp4, 32)
_rows_q2_0 = row_loop("Q2_0", unpack_q2_0, 32)
_rows_q2_k = row_loop("Q2_K", unpack_q2_k, 256)
_rows_q3_k = row_loop("Q3_K", unpack_q3_k, 256)
_rows_q4_k = row_loop("Q4_K", unpack_q4_k, 256)
_rows_q5_k = row_loop("Q5_K", unpack_q5_k, 256)
_rows_q6_k = row_loop("Q6_K", unpack_q6_k, 256)
_rows_iq4_xs = row_loop("IQ4_XS", unpack_iq4_xs, 256)
_rows_iq2_xxs = row_loop("IQ2_XXS", unpack_iq2_xxs, 256)
_rows_iq2_xs = row_loop("IQ2_XS", unpack_iq2_xs, 256)
_rows_iq2_s = row_loop("IQ2_S", unpack_iq2_s, 256)
_rows_iq3_xxs = row_loop("IQ3_XXS", unpack_iq3_xxs, 256)
_rows_iq3_s = row_loop("IQ3_S", unpack_iq3_s, 256)
_rows_iq1_s = row_loop("IQ1_S", unpack_iq1_s, 256)
_rows_iq1_m = row_loop("IQ1_M", unpack_iq1_m, 256)


def _q4_0(R: int) -> CFunction:
    @c_function(7)
    def q4_0(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_q4_0(R, w, w_stride, n_rows, act, K, out, out_stride)

    return q4_0


def _q4_1(R: int) -> CFunction:
    @c_function(7)
    def q4_1(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_q4_1(R, w, w_stride, n_rows, act, K, out, out_stride)

    return q4_1


def _q5_0(R: int) -> CFunction:
    @c_function(7)
    def q5_0(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_q5_0(R, w, w_stride, n_rows, act, K, out, out_stride)

    return q5_0


def _q5_1(R: int) -> CFunction:
    @c_function(7)
    def q5_1(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_q5_1(R, w, w_stride, n_rows, act, K, out, out_stride)

    return q5_1


def _q8_0(R: int) -> CFunction:
    @c_function(7)
    def q8_0(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_q8_0(R, w, w_stride, n_rows, act, K, out, out_stride)

    return q8_0


def _iq4_nl(R: int) -> CFunction:
    @c_function(7)
    def iq4_nl(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_iq4_nl(R, w, w_stride, n_rows, act, K, out, out_stride)

    return iq4_nl


def _mxfp4(R: int) -> CFunction:
    @c_function(7)
    def mxfp4(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_mxfp4(R, w, w_stride, n_rows, act, K, out, out_stride)

    return mxfp4


def _nvfp4(R: int) -> CFunction:
    @c_function(7)
    def nvfp4(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_nvfp4(R, w, w_stride, n_rows, act, K, out, out_stride)

    return nvfp4


def _q2_0(R: int) -> CFunction:
    @c_function(7)
    def q2_0(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_q2_0(R, w, w_stride, n_rows, act, K, out, out_stride)

    return q2_0


def _q2_k(R: int) -> CFunction:
    @c_function(7)
    def q2_k(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_q2_k(R, w, w_stride, n_rows, act, K, out, out_stride)

    return q2_k


def _q3_k(R: int) -> CFunction:
    @c_function(7)
    def q3_k(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_q3_k(R, w, w_stride, n_rows, act, K, out, out_stride)

    return q3_k


def _q4_k(R: int) -> CFunction:
    @c_function(7)
    def q4_k(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_q4_k(R, w, w_stride, n_rows, act, K, out, out_stride)

    return q4_k


def _q5_k(R: int) -> CFunction:
    @c_function(7)
    def q5_k(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_q5_k(R, w, w_stride, n_rows, act, K, out, out_stride)

    return q5_k


def _q6_k(R: int) -> CFunction:
    @c_function(7)
    def q6_k(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_q6_k(R, w, w_stride, n_rows, act, K, out, out_stride)

    return q6_k


def _iq4_xs(R: int) -> CFunction:
    @c_function(7)
    def iq4_xs(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_iq4_xs(R, w, w_stride, n_rows, act, K, out, out_stride)

    return iq4_xs


def _iq2_xxs(R: int) -> CFunction:
    @c_function(7)
    def iq2_xxs(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_iq2_xxs(R, w, w_stride, n_rows, act, K, out, out_stride)

    return iq2_xxs


def _iq2_xs(R: int) -> CFunction:
    @c_function(7)
    def iq2_xs(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_iq2_xs(R, w, w_stride, n_rows, act, K, out, out_stride)

    return iq2_xs


def _iq2_s(R: int) -> CFunction:
    @c_function(7)
    def iq2_s(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_iq2_s(R, w, w_stride, n_rows, act, K, out, out_stride)

    return iq2_s


def _iq3_xxs(R: int) -> CFunction:
    @c_function(7)
    def iq3_xxs(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_iq3_xxs(R, w, w_stride, n_rows, act, K, out, out_stride)

    return iq3_xxs


def _iq3_s(R: int) -> CFunction:
    @c_function(7)
    def iq3_s(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_iq3_s(R, w, w_stride, n_rows, act, K, out, out_stride)

    return iq3_s


def _iq1_s(R: int) -> CFunction:
    @c_function(7)
    def iq1_s(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_iq1_s(R, w, w_stride, n_rows, act, K, out, out_stride)

    return iq1_s


def _iq1_m(R: int) -> CFunction:
    @c_function(7)
    def iq1_m(w, w_stride, n_rows, act, K, out, out_stride):
        _rows_iq1_m(R, w, w_stride, n_rows, act, K, out, out_stride)

    return iq1_m


QUANTISED: dict[str, Callable[[int], CFunction]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q2_0": _q2_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
}
