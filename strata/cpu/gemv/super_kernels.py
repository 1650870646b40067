"""Compiled kernels and records of the super-block formats in the tiers 512 and 256."""

from __future__ import annotations

from functools import cache

from strata.cpu.compiled import CFunction
from strata.cpu.gemv import super512_grid, super512_k
from strata.cpu.gemv.records256 import BYTES, SCALED, WORDS
from strata.cpu.gemv.super_rows import Block, emit_rows
from strata.cpu.simd import Simd, kernel_intrinsic
from strata.pack.formats import by_name

SCALED_FORMATS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
GRID_FORMATS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
WITH_MINIMA = ("Q2_K", "Q4_K", "Q5_K")

_MODULES = {512: (super512_k, super512_grid)}


def arrangement_of(name: str, tier: int) -> str:
    """What the kernels of a format read, see `records256`."""
    return SCALED if name in SCALED_FORMATS else {512: BYTES, 256: WORDS}[tier]


def _block_of(name: str, tier: int) -> Block:
    scaled, grid = _MODULES[tier]
    return getattr(scaled if name in SCALED_FORMATS else grid, name.lower())


def _emit(s: Simd, name: str, R: int, tier: int) -> None:
    block_bytes = by_name(name).block_bytes
    emit_rows(s, R, tier, arrangement_of(name, tier), block_bytes, _block_of(name, tier), name in WITH_MINIMA)


_super_rows = kernel_intrinsic("super_rows", _emit, n_args=7)


@cache
def super_kernel(name: str, R: int, tier: int) -> CFunction:
    """The kernel of a format for R activation rows in the tier 512 or 256, not yet compiled."""

    def rows(w, w_stride, n_rows, act, K, out, out_stride):
        _super_rows(name, R, tier, w, w_stride, n_rows, act, K, out, out_stride)

    rows.__qualname__ = f"super_{name}_{R}_{tier}"
    return CFunction(rows, 7)
