"""Codebooks of the block formats, taken from the data of the `gguf` package at import.

CODEBOOK    name -> (16,) int8: the integer that a 4-bit code stands for (MXFP4 and NVFP4: E2M1 doubled)
GRID        name -> (n, 4 or 8) int8: the integers an index stands for
SIGNS       (128,) uint8: seven sign bits and the eighth that makes the number of minus signs even
E4M3_HALF   (256,) float32: half the value of a scale byte of NVFP4
E8M0_HALF   (256,) float32: half the value of a scale byte of MXFP4
"""

from __future__ import annotations

import numpy as np
from gguf import quants


def _grid(name: str) -> np.ndarray:
    source = getattr(quants, name)
    source.init_grid()
    return np.ascontiguousarray(source.grid.reshape(source.grid_shape)).astype(np.int8)


_NL = np.array(quants.IQ4_NL.kvalues, np.int8)
_E2M1 = np.array(quants.MXFP4.kvalues, np.int8)

CODEBOOK: dict[str, np.ndarray] = {"IQ4_NL": _NL, "IQ4_XS": _NL, "MXFP4": _E2M1, "NVFP4": _E2M1}

GRID: dict[str, np.ndarray] = {n: _grid(n) for n in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")}
GRID["IQ1_M"] = GRID["IQ1_S"]

SIGNS = np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8).copy()


def _e4m3_half() -> np.ndarray:
    """Unsigned E4M3, bias 7, the top bit ignored; 0 and 0x7f mean 0."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    value[[0, 0x7F]] = 0
    return (value / 2).astype(np.float32)


def _e8m0_half() -> np.ndarray:
    """2^(code - 128): subnormal for the codes 0 and 1, so built from bits."""
    code = np.arange(256, dtype=np.uint32)
    bits = np.where(code < 2, np.uint32(0x00200000) << (code & 1), (code - np.uint32(1)) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


E4M3_HALF = _e4m3_half()
E8M0_HALF = _e8m0_half()
