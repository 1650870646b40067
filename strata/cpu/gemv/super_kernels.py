"""The compiled kernels of the super-block formats in the tiers 512 and 256, and which records they read."""

from __future__ import annotations

from functools import cache

from strata.base.compiled import CFunction
from strata.cpu.gemv import super256_grid, super256_k, super512_far, super512_grid, super512_k, super512_xs
from strata.cpu.gemv.frame import N_ARGS, Step, emit_product
from strata.cpu.gemv.prefetch import prefetch_of, suffix_of
from strata.cpu.gemv.records256 import BYTES, K2, K4, K6, WORDS, XS, Arrangement
from strata.cpu.simd import Simd, kernel_intrinsic

_SCALED = {"Q2_K": K2, "Q3_K": K2, "Q4_K": K4, "Q5_K": K4, "Q6_K": K6, "IQ4_XS": XS}
_GRID = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")

SUPER_FORMATS = (*_SCALED, *_GRID)
"""Formats with kernels here."""

_STEPS: dict[int, dict[str, Step]] = {
    512: super512_k.STEPS | super512_xs.STEPS | super512_grid.STEPS,
    256: super256_k.STEPS | super256_grid.STEPS,
}


def arrangement_of(name: str, tier: int) -> Arrangement:
    """The records that kernels of (format, tier) read."""
    return _SCALED[name] if name in _SCALED else {512: BYTES, 256: WORDS}[tier]


def _emit(s: Simd, name: str, R: int, tier: int, asked: str) -> None:
    prefetch = prefetch_of(asked) if asked else None
    if tier == 512 and name in super512_far.FORMATS:
        super512_far.emit_far(s, name, R, prefetch)
    else:
        emit_product(s, _STEPS[tier][name], tier, R, prefetch)


_super_product = kernel_intrinsic("super_product", _emit, n_args=N_ARGS)


@cache
def super_kernel(name: str, R: int, asked: str = "", *, tier: int) -> CFunction:
    """The kernel of a format for R activation rows in the tier 512 or 256, not yet compiled. asked: text of other
    prefetches."""

    def product(w, w_stride, n_rows, act, K, out, out_stride):
        _super_product(name, R, tier, asked, w, w_stride, n_rows, act, K, out, out_stride)

    product.__qualname__ = f"super_{name}_{R}_{tier}{suffix_of(asked)}"
    return CFunction(product, N_ARGS)
