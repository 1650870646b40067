"""The seam between products and their kernels: which compiled function serves a (format, rows, tier), on which records.

A kernel is a C function, all arguments int64:

    kernel(w, w_stride, n_rows, act, K, out, out_stride)

    w, w_stride      address of the first matrix row, bytes from row to row
    n_rows           rows of the matrix
    act              R activation records in the layout of (format, tier), one behind the other
    K                values of a row, a multiple of the format's block
    out, out_stride  float32 results: activation row r, matrix row i at out + r * out_stride + 4 i (strides in bytes)

In the tiers 512 and 256 some formats also have one for any number of activation rows, worth its preparations from a
number of rows on that depends on the format:

    kernel(w, w_stride, n_rows, act, K, T, out, out_stride)

and a quantiser is one too, writing R records:

    quantise(x, K, R, x_stride, records, error_word)

    x, x_stride      float32 rows, bytes from row to row
    error_word       int64; becomes NOT_FINITE if it was 0 and a value is Inf or NaN

Kernels never read past a row of the matrix, and their results do not depend on R, n_rows or the tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from strata.base.compiled import CFunction
from strata.base.errors import BadArgument
from strata.cpu.gemv import (
    float_simd,
    float_wide,
    floats,
    q8_wide,
    records,
    records256,
    small256,
    small512,
    super_kernels,
    wide_kernels,
)
from strata.cpu.gemv.activations import quantise_p32, quantise_p256, swiglu_rows
from strata.cpu.gemv.portable import QUANTISED
from strata.cpu.gemv.prefetch import Prefetch, text_of
from strata.cpu.gemv.rows import MOST_ROWS, record_bytes
from strata.cpu.tiers import PORTABLE, available_tiers, best_tier
from strata.cpu.tiers import TIERS as ALL_TIERS
from strata.pack.formats import BlockFormat

MANY_ROWS = 9
"""Activation rows of which no window has so many: the formats whose kernel for any number of rows has no better limit
take it from here on."""

TIERS = available_tiers()
"""Tiers of this machine, slowest first."""


@dataclass(frozen=True)
class ActivationLayout:
    """How one tier wants the activations of a format.

    name      layouts with the same name hold the same bytes: quantise once for all formats that share it
    group     values that share a scale; 0: the record is the float32 row itself, and there is no quantiser
    """

    name: str
    group: int
    _record_bytes: Callable[[int], int]
    _quantiser: CFunction | None

    def record_bytes(self, K: int) -> int:
        """Bytes of one record, and the distance of records; a multiple of 64 for quantised layouts."""
        return self._record_bytes(K)

    @property
    def quantise_address(self) -> int:
        """Address of the quantiser, compiled on first use; 0 without one."""
        return self._quantiser.address if self._quantiser else 0


_FLOAT = ActivationLayout("float", 0, lambda K: 4 * K, None)
_LAYOUTS = {
    "float": _FLOAT,
    "q8x32": ActivationLayout("p32", 32, lambda K: record_bytes.py_func(K, 32), quantise_p32),
    "q8x256": ActivationLayout("p256", 256, lambda K: record_bytes.py_func(K, 256), quantise_p256),
}

_PORTABLE_KERNELS: dict[str, Callable[[int], CFunction]] = QUANTISED | {
    "F32": floats.f32,
    "F16": floats.f16,
    "BF16": floats.bf16,
}


# ---- the tiers with kernels of their own: format -> factory of R, and its layout


@cache
def _small_layout(records_name: str, tier: int) -> ActivationLayout:
    layout = records.RECORDS[records_name]
    return ActivationLayout(layout.name, records.GROUP, layout.record_bytes, records.quantiser(layout.name, tier))


@cache
def _super_layout(arrangement_name: str, tier: int) -> ActivationLayout:
    layout = records256.ARRANGEMENTS[arrangement_name]
    quantise = records256.quantiser(layout.name, tier)
    return ActivationLayout(layout.name, records256.STEP, layout.record_bytes, quantise)


_Entry = tuple[Callable[[int], CFunction], ActivationLayout]


def _own_kernels(tier: int) -> dict[str, _Entry]:
    small = {512: small512, 256: small256}[tier]
    entries: dict[str, _Entry] = {}
    for name in small.FORMATS:
        entries[name] = partial(small.kernel, name), _small_layout(records.records_for(name, tier).name, tier)
    for name in super_kernels.SUPER_FORMATS:
        layout = _super_layout(super_kernels.arrangement_of(name, tier).name, tier)
        entries[name] = partial(super_kernels.super_kernel, name, tier=tier), layout
    for name in float_simd.FORMATS:
        entries[name] = partial(float_simd.kernel, name, tier=tier), _FLOAT
    return entries


_OWN: dict[int, dict[str, _Entry]] = {tier: _own_kernels(tier) for tier in ALL_TIERS[::-1] if tier != PORTABLE}


def _portable(name: str, R: int) -> CFunction:
    function = _PORTABLE_KERNELS[name](np.int64(R))  # a numpy integer is no literal type: loops compile once for all R
    # One cache index a kernel: variants that share one could take each other's file when two processes compile at once.
    function.py_func.__qualname__ = f"{name}_r{R}_t{PORTABLE}"
    return function


def _entry(format: BlockFormat, tier: int) -> _Entry:
    """What serves a format in a tier: the tier's own kernel, or that of the next lower tier that has one."""
    for own, entries in _OWN.items():
        if own <= tier and format.name in entries:
            return entries[format.name]
    return partial(_portable, format.name), _LAYOUTS[format.activation]


def _checked(format: BlockFormat, tier: int | None) -> int:
    tier = best_tier() if tier is None else tier
    if tier not in TIERS:
        raise BadArgument("no such kernel tier", found=tier, needed=f"one of {TIERS}")
    if format.name not in _PORTABLE_KERNELS:
        needed = "one of " + ", ".join(_PORTABLE_KERNELS)
        raise BadArgument(f"{format.name} matrices have no products", found=format.name, needed=needed)
    return tier


@cache
def _function(format: BlockFormat, R: int, tier: int, *asked: str) -> CFunction:
    return _entry(format, tier)[0](R, *asked)


def kernel_function(
    format: BlockFormat, R: int, tier: int | None = None, prefetch: Prefetch | None = None
) -> CFunction:
    """The kernel of `format` for exactly R activation rows, 1 <= R <= MOST_ROWS, not yet compiled.

    prefetch  other than the kernel's own choice, to be measured; quantised formats in the tiers 512 and 256 take one
    """
    tier = _checked(format, tier)
    if not 1 <= R <= MOST_ROWS:
        raise BadArgument(
            "rows of a kernel are out of range",
            found=R,
            needed=f"1 to {MOST_ROWS}",
            advice=f"Run more rows as {MOST_ROWS} and the rest.",
        )
    if prefetch is None:
        return _function(format, R, tier)
    if tier == PORTABLE or format.activation == "float":
        raise BadArgument("the prefetches of the kernel cannot be chosen", found=f"{format.name} in tier {tier}",
                          needed="a quantised format in tier 512 or 256")  # fmt: skip
    return _function(format, R, tier, text_of(prefetch))


def kernel(format: BlockFormat, R: int, tier: int | None = None) -> int:
    """Address of that kernel; compiles it on first use."""
    return kernel_function(format, R, tier).address


@dataclass(frozen=True)
class WideKernel:
    """A kernel for any number of activation rows, for rows of some lengths; least_rows: from which it is faster."""

    function: CFunction
    least_values: int
    most_values: int
    least_rows: int = MANY_ROWS


@cache
def _wide_kernel(format: BlockFormat, tier: int) -> WideKernel | None:
    if tier != PORTABLE and format.name in float_wide.FORMATS:
        return WideKernel(float_wide.kernel(format.name, tier), float_wide.LEAST_VALUES, 1 << 40)
    if tier == q8_wide.TIER and format.name == q8_wide.FORMAT:
        return WideKernel(q8_wide.kernel(), q8_wide.BLOCK, q8_wide.MOST_VALUES)
    if tier == wide_kernels.TIER and format.name in wide_kernels.WIDES:
        least_rows = wide_kernels.WIDES[format.name].least_rows
        return WideKernel(wide_kernels.kernel(format.name), format.block_values, wide_kernels.MOST_VALUES, least_rows)
    return None


def wide_kernel(format: BlockFormat, tier: int | None = None) -> WideKernel | None:
    """The kernel of `format` for any number of activation rows, not yet compiled; None where there is none."""
    return _wide_kernel(format, _checked(format, tier))


def kernel_table(format: BlockFormat, tier: int | None = None) -> np.ndarray:
    """(8,) int64, what `cpu.linear.multiply` wants. Compiles all.

    Addresses of the kernels for 1..4 activation rows and of the one for any number, or 0; least and most values that a
    row may have for that one, and the activation rows from which it is taken.
    """
    wide = wide_kernel(format, tier)
    addresses = [kernel(format, R, tier) for R in range(1, MOST_ROWS + 1)]
    last = (wide.function.address, wide.least_values, wide.most_values, wide.least_rows) if wide else (0, 0, 0, 0)
    return np.array([*addresses, *last], np.int64)


def layout_of(format: BlockFormat, tier: int | None = None) -> ActivationLayout:
    """The activation records that kernels of (format, tier) read."""
    return _entry(format, _checked(format, tier))[1]


def swiglu_address() -> int:
    """Address of swiglu(g, u, h, n): h[i] = silu(g[i]) u[i], float32."""
    return swiglu_rows.address
