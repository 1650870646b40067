"""The kernels of quantised formats for any number of activation rows, in the tier 512."""

from __future__ import annotations

from strata.base.compiled import CFunction
from strata.cpu.gemv import wide_grid, wide_k, wide_small
from strata.cpu.gemv.tiles import N_ARGS
from strata.cpu.gemv.wide import MOST_VALUES, Wide, emit_wide
from strata.cpu.simd import Simd, kernel_intrinsic

TIER = 512

WIDES: dict[str, Wide] = wide_small.WIDES | wide_k.WIDES | wide_grid.WIDES
"""The formats that have one."""

__all__ = ["MOST_VALUES", "TIER", "WIDES", "kernel"]


def _emit(s: Simd, name: str) -> None:
    emit_wide(s, WIDES[name])


_product = kernel_intrinsic("wide", _emit, N_ARGS)


def kernel(name: str) -> CFunction:
    """The kernel as `gemv.table` describes it; K <= MOST_VALUES."""

    def product(w, w_stride, n_rows, act, K, T, out, out_stride):
        _product(name, w, w_stride, n_rows, act, K, T, out, out_stride)

    product.__qualname__ = f"{name}_wide_{TIER}"
    return CFunction(product, N_ARGS)
