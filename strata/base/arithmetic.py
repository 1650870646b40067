"""Canonical arithmetic in numpy: one definition that portable loops, SIMD kernels and CUDA reproduce bit for bit.

All is IEEE float32, rounded to nearest even, subnormals kept, no contraction and no reassociation; `fma32` rounds
once. Written for clarity, not speed: the fast versions live in the backends. docs/arithmetic.md states the same rules.
"""

from __future__ import annotations

import numpy as np

from strata.base.errors import need

f32 = np.float32

MAX_LANES = 256
"""Float lanes of a sum over a long axis."""

TINY_BITS = 0x08800000
"""Bits of 2^-110: a group whose largest value is smaller quantises to zero, so that 127 / amax cannot overflow."""

INF_BITS = 0x7F800000

COMBINE_LIMIT = f32(2.0**24)
COMBINE_SCALE = f32(2.0**32)
COMBINE_UNSCALE = f32(2.0**-32)
COMBINE_TERMS = 127
"""Most terms that one int64 sum holds without overflow."""


def from_bits(bits: int) -> np.float32:
    """The float32 with this bit pattern."""
    return np.array(bits, np.uint32).view(f32)[()]


# exp32: log2 e, -ln 2 in two parts, and the polynomial of (e^r - 1 - r) / r^2, highest power first
EXP_HIGH, EXP_LOW = f32(88), f32(-87)
LOG2E, NEG_LN2_HIGH, NEG_LN2_LOW = from_bits(0x3FB8AA3B), from_bits(0xBF317200), from_bits(0xB5BFBE8E)
EXP_POLY = tuple(from_bits(b) for b in (0x39506967, 0x3AB743CE, 0x3C088908, 0x3D2AA9C1, 0x3E2AAAAA, 0x3F000001))

# log1p32: polynomial of (2 atanh(s) - 2 s) / s^3 in s^2 for s in [0, 1/3], highest power first
LOG1P_POLY = tuple(from_bits(b) for b in (0x3E8F6BDF, 0x3E8F5E87, 0x3ECCE904, 0x3F2AAA81))


def _f32(x: object) -> np.ndarray:
    return np.asarray(x, f32)


def fma32(a: object, b: object, c: object) -> np.ndarray:
    """a * b + c in float32 with a single rounding; arguments broadcast.

    The product is exact in float64. Its sum with c is rounded to odd there, which makes the last rounding to float32
    correct (also to subnormals).
    """
    with np.errstate(all="ignore"):
        product = _f32(a).astype(np.float64) * _f32(b).astype(np.float64)
        addend = _f32(c).astype(np.float64)
        total = np.asarray(product + addend)
        back = total - product
        error = (product - (total - back)) + (addend - back)
        bits = total.view(np.int64)
        to_odd = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
        step = np.where((error > 0) == (total > 0), 1, -1)
        bits = np.where(to_odd, bits + step, bits)
        return np.asarray(bits.view(np.float64).astype(f32))


def exp32(t: object) -> np.ndarray:
    """e^t, written out in fma, *, + and an exponent shift; t is clamped to [-87, 88] (NaN counts as 88).

    Largest relative error 8.7e-8.
    """
    t = _f32(t)
    with np.errstate(all="ignore"):
        t = np.where(t <= EXP_HIGH, t, EXP_HIGH)
        t = np.where(t >= EXP_LOW, t, EXP_LOW)
        n = np.rint(t * LOG2E)
        r = fma32(n, NEG_LN2_HIGH, t)
        r = fma32(n, NEG_LN2_LOW, r)
        p = np.broadcast_to(EXP_POLY[0], r.shape)
        for c in EXP_POLY[1:]:
            p = fma32(p, r, c)
        y = np.asarray(fma32(p, r * r, r) + f32(1))
        return np.asarray(y.view(np.int32) + (n.astype(np.int32) << 23)).view(f32)


def log1p32(e: object) -> np.ndarray:
    """log(1 + e) for e in [0, 1], written out in fma, *, +, - and one division. Largest relative error 1.2e-7.

    With s = e / (2 + e): log(1 + e) = 2 atanh(s) = e - s (e - z P(z)), z = s^2.
    """
    e = _f32(e)
    with np.errstate(all="ignore"):
        s = e / (f32(2) + e)
        z = s * s
        p = np.broadcast_to(LOG1P_POLY[0], z.shape)
        for c in LOG1P_POLY[1:]:
            p = fma32(p, z, c)
        return fma32(-s, e - z * p, e)


def sigmoid32(x: object) -> np.ndarray:
    """1 / (1 + exp32(-x)); a NaN stays NaN."""
    x = _f32(x)
    with np.errstate(all="ignore"):
        return np.where(x == x, f32(1) / (f32(1) + exp32(-x)), x)


def softplus32(x: object) -> np.ndarray:
    """log(1 + e^x) = max(x, 0) + log1p32(exp32(-|x|)); a NaN stays NaN."""
    x = _f32(x)
    with np.errstate(all="ignore"):
        return np.where(x == x, np.where(x > 0, x, f32(0)) + log1p32(exp32(-np.abs(x))), x)


def silu32(x: object) -> np.ndarray:
    """x / (1 + exp32(-x))."""
    x = _f32(x)
    with np.errstate(all="ignore"):
        return x / (f32(1) + exp32(-x))


def swiglu(g: object, u: object) -> np.ndarray:
    """silu32(g) * u."""
    with np.errstate(all="ignore"):
        return silu32(g) * _f32(u)


def tree_sum(v: object) -> np.ndarray:
    """Sum over the last axis, a power of two long: v[i] += v[i + n/2], halving until one is left."""
    v = _f32(v)
    n = v.shape[-1]
    need(n > 0 and n & (n - 1) == 0, "a halving tree needs a power of two", found=n)
    with np.errstate(all="ignore"):
        while n > 1:
            n //= 2
            v = v[..., :n] + v[..., n:]
    return v[..., 0]


def lanes_of(K: int) -> int:
    """Float lanes of a sum over an axis of K values: 256, or for shorter axes the largest power of two <= K."""
    need(K > 0, "an axis needs at least one value", found=K)
    return min(MAX_LANES, 1 << (K.bit_length() - 1))


def dot_float(w: object, x: object) -> np.ndarray:
    """Float products: w float32 (..., K) and x float32 (..., K), broadcast against each other -> float32 (...).

    A matrix (n, K) times a row (K,) gives (n,). Lane = index mod lanes_of(K), one ascending fma chain per lane from +0,
    halving tree, + 0 (so that -0 never leaves).
    """
    w, x = np.broadcast_arrays(_f32(w), _f32(x))
    K = w.shape[-1]
    lanes = lanes_of(K)
    acc = np.zeros((*w.shape[:-1], lanes), f32)
    for start in range(0, K, lanes):
        m = min(lanes, K - start)
        acc[..., :m] = fma32(w[..., start : start + m], x[..., start : start + m], acc[..., :m])
    with np.errstate(all="ignore"):
        return tree_sum(acc) + f32(0)


def sum_squares(x: object) -> np.ndarray:
    """Sum of x^2 over the last axis by the rule of `dot_float`: (..., K) -> (...)."""
    return dot_float(x, x)


def rms_norm(x: object, w: object, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * w over the last axis; w broadcasts, or is None for no weight.

    mean = fl(sum / K), r = fl(1 / fl(sqrt(fl(mean + eps)))), y = fl(fl(x r) w).
    """
    x = _f32(x)
    with np.errstate(all="ignore"):
        mean = sum_squares(x) / f32(x.shape[-1])
        r = f32(1) / np.sqrt(mean + f32(eps))
        y = x * r[..., None]
        return y if w is None else y * _f32(w)


def quantise(x: object, group: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """x float32 (..., K) -> (codes int8 (..., K), scales float32 (..., K / group), whether any value was not finite).

    The largest magnitude of a group is found on the bits, as unsigned integers. A group with Inf or NaN, or entirely
    below 2^-110, gets scale 0 and codes 0; otherwise scale = fl(amax / 127), code = rint(fl(x * fl(127 / amax))).
    """
    x = np.ascontiguousarray(x, f32)
    need(x.shape[-1] % group == 0, f"{x.shape[-1]} values do not divide into groups of {group}")
    groups = x.reshape(*x.shape[:-1], -1, group)
    largest = (groups.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(-1)
    bad = largest >= INF_BITS
    live = ~bad & (largest >= TINY_BITS)
    amax = np.where(live, largest, np.uint32(0x3F800000)).astype(np.uint32).view(f32)
    with np.errstate(all="ignore"):
        scales = np.where(live, amax / f32(127), f32(0))
        inverse = f32(127) / amax
        codes = np.where(live[..., None], np.rint(groups * inverse[..., None]), f32(0)).astype(np.int8)
    return codes.reshape(x.shape), scales, bool(bad.any())


def combine_terms(w: object, y: object) -> tuple[np.ndarray, bool]:
    """Weighted terms as integers: w and y float32 broadcast -> (int64 in units of 2^-32, whether any overflowed).

    t = fl(w y); unless |t| < 2^24 (which also catches NaN) the term is 0 and counts as an overflow; else rint(t 2^32).
    At most COMBINE_TERMS terms may be added up, in any order.
    """
    with np.errstate(all="ignore"):
        t = _f32(w) * _f32(y)
        good = np.abs(t) < COMBINE_LIMIT
        terms = np.rint(np.where(good, t, f32(0)) * COMBINE_SCALE).astype(np.int64)
    return terms, not bool(good.all())


def combine_back(total: object) -> np.ndarray:
    """An int64 sum of terms back to float32: one rounding, then an exact scaling by 2^-32."""
    return np.asarray(total, np.int64).astype(f32) * COMBINE_UNSCALE
