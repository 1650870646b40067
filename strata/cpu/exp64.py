"""exp and log in float64, written out, so that probabilities have the same bits on every machine.

Both use only *, +, -, / and fma, each rounded once, and exponent shifts: a library's exp differs in the last bit from
version to version, and a draw that sits on an edge would then give another token. Loops over `exp64` vectorise.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

_SHIFTER = 6755399441055744.0  # 1.5 * 2^52: adding it rounds to an integer that the low bits of the sum hold
_LOG2E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_LOWEST = -708.0
_SQRT_HALF = 0.7071067811865476
_EXPONENT, _MANTISSA = 0x7FF0000000000000, 0x000FFFFFFFFFFFFF
_HALF_BITS = 0x3FE0000000000000


@intrinsic
def fma64(typingctx, a, b, c):
    """a * b + c in float64, rounded once."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float64(types.float64, types.float64, types.float64), generate


@njit(error_model="numpy")
def exp64(x):
    """e^x for x <= 709; 0 below -708, also for -inf. Largest relative error 3e-16; exact 1 at 0."""
    bounded = max(x, _LOWEST)
    shifted = fma64(bounded, _LOG2E, _SHIFTER)
    n = shifted - _SHIFTER
    r = fma64(n, -_LN2_LOW, fma64(n, -_LN2_HIGH, bounded))
    p = fma64(1 / 6227020800, r, 1 / 479001600)  # Taylor: |r| <= 0.347, the next term is below 2^-57
    p = fma64(p, r, 1 / 39916800)
    p = fma64(p, r, 1 / 3628800)
    p = fma64(p, r, 1 / 362880)
    p = fma64(p, r, 1 / 40320)
    p = fma64(p, r, 1 / 5040)
    p = fma64(p, r, 1 / 720)
    p = fma64(p, r, 1 / 120)
    p = fma64(p, r, 1 / 24)
    p = fma64(p, r, 1 / 6)
    p = fma64(p, r, 0.5)
    p = fma64(p, r, 1.0)
    p = fma64(p, r, 1.0)
    power = (np.float64(shifted).view(np.int64) + np.int64(1023)) << np.int64(52)
    y = p * np.int64(power).view(np.float64)
    return y if x >= _LOWEST else 0.0


@njit(error_model="numpy")
def log64(x):
    """Natural logarithm of a finite x >= 2^-1022; -inf for smaller x. Absolute error below 2e-16 + 2e-16 |log x|."""
    bits = np.float64(x).view(np.int64)
    if x < 2.2250738585072014e-308:
        return -np.inf
    n = ((bits & np.int64(_EXPONENT)) >> np.int64(52)) - np.int64(1022)
    f = np.int64((bits & np.int64(_MANTISSA)) | np.int64(_HALF_BITS)).view(np.float64)
    if f < _SQRT_HALF:
        f = f + f
        n -= 1
    z = (f - 1.0) / (f + 1.0)  # log f = 2 atanh z, |z| <= 0.1716
    s = z * z
    p = 1 / 21
    p = fma64(p, s, 1 / 19)
    p = fma64(p, s, 1 / 17)
    p = fma64(p, s, 1 / 15)
    p = fma64(p, s, 1 / 13)
    p = fma64(p, s, 1 / 11)
    p = fma64(p, s, 1 / 9)
    p = fma64(p, s, 1 / 7)
    p = fma64(p, s, 1 / 5)
    p = fma64(p, s, 1 / 3)
    tail = 2.0 * z * s * p
    return fma64(np.float64(n), _LN2_HIGH, fma64(np.float64(n), _LN2_LOW, tail) + 2.0 * z)
