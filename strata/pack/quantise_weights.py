"""Weights to block formats: Q8_0, Q2_0, BF16 and F32. What a draft layer's files are converted with.

Q8_0  scale = amax / 127 in float32, codes from the float32 scale (half away from zero), then the scale as float16.
Q2_0  of 17 scales from amax / 2 to amax the one with the least squared error for codes -1, 0, 1, 2; it is stored as
      float16 and the codes are taken again against what was stored.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from strata.base.compiled import cached_njit
from strata.base.errors import BadArgument, ModelError
from strata.pack.formats import by_name

_f32 = np.float32

Q2_0_SCALES = 17
"""Scales tried per block."""

TINY = np.float32(2.0**-100)
"""Blocks below it have a float16 scale of zero, so they are stored as zeros."""


@cached_njit
def _largest(x):
    """Largest magnitude of a block."""
    amax = _f32(0)
    for j in range(x.size):
        amax = max(amax, abs(x[j]))
    return amax


@cached_njit
def _q8_0_blocks(x, codes, scales):
    """x (n, 32) float32 -> codes (n, 32) int8, scales (n,) float32."""
    for b in range(x.shape[0]):
        scale = _largest(x[b]) / _f32(127)
        inverse = _f32(0) if scale < TINY else _f32(1) / scale
        scales[b] = scale
        for j in range(32):
            t = x[b, j] * inverse
            size = abs(t)
            whole = np.floor(size)
            # Doubling the fraction is exact; adding a half to the whole value would round 0.49999997 up.
            whole += np.floor(_f32(2) * (size - whole))
            codes[b, j] = np.int8(whole if t >= 0 else -whole)


@cached_njit
def _q2_0_code(t):
    """Nearest of -1, 0, 1, 2 (halves to even), as float32."""
    return _f32(t >= _f32(-0.5)) + _f32(t > _f32(0.5)) + _f32(t >= _f32(1.5)) - _f32(1)


@cached_njit
def _q2_0_scales(x, scales):
    """x (n, 64) float32 -> the best of the scales tried (n,) float32; of equally good ones the smallest."""
    tried = np.empty(Q2_0_SCALES, np.float32)
    inverse, error = np.empty_like(tried), np.empty_like(tried)
    for b in range(x.shape[0]):
        amax = _largest(x[b])
        scales[b] = 0
        if amax < TINY:
            continue
        for i in range(Q2_0_SCALES):
            tried[i] = amax * (_f32(16 + i) / _f32(32))
            inverse[i] = _f32(1) / tried[i]
            error[i] = 0
        # The scales are the inner loop: 17 sums side by side, each in the order of the values.
        for j in range(64):
            v = x[b, j]
            for i in range(Q2_0_SCALES):
                e = v - tried[i] * _q2_0_code(v * inverse[i])
                error[i] += e * e
        best = 0
        for i in range(1, Q2_0_SCALES):
            if error[i] < error[best]:
                best = i
        scales[b] = tried[best]


@cached_njit
def _q2_0_bytes(x, scales, out):
    """Codes of x (n, 64) against the stored scales (n,) float32, four a byte, low bits first: out (n, 16) uint8."""
    for b in range(x.shape[0]):
        d = scales[b]
        for k in range(16):
            packed = 0
            for i in range(4):
                code = _f32(0) if d == 0 else _q2_0_code(x[b, 4 * k + i] / d)
                packed |= (np.int64(code) + 1) << (2 * i)
            out[b, k] = packed


def _as_float16(scales: np.ndarray, what: str, format_name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        stored = scales.astype(np.float16)
    if not np.isfinite(stored).all():
        raise ModelError(
            f"{what} has values too large for {format_name}",
            found=f"a block scale of {scales.max():.4g}",
            needed="at most 65504, the largest float16",
            advice="Choose BF16, or download the file again if it may be damaged.",
        )
    return stored


def _q8_0(rows: np.ndarray, what: str) -> np.ndarray:
    x = rows.reshape(-1, 32)
    out, scales = np.empty((len(x), 34), np.uint8), np.empty(len(x), np.float32)
    _q8_0_blocks(x, out[:, 2:].view(np.int8), scales)
    out[:, :2] = _as_float16(scales, what, "Q8_0")[:, None].view(np.uint8)
    return out


def _q2_0(rows: np.ndarray, what: str) -> np.ndarray:
    x = rows.reshape(-1, 64)
    out, scales = np.empty((len(x), 18), np.uint8), np.empty(len(x), np.float32)
    _q2_0_scales(x, scales)
    stored = _as_float16(scales, what, "Q2_0")
    out[:, :2] = stored[:, None].view(np.uint8)
    _q2_0_bytes(x, stored.astype(np.float32), out[:, 2:])
    return out


def _bf16(rows: np.ndarray, what: str) -> np.ndarray:
    bits = rows.view(np.uint32)
    # To nearest, ties to even; values that round up to Inf count as too large.
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    if (rounded & 0x7FFF == 0x7F80).any():
        found = f"{np.abs(rows).max():.5g}"
        raise ModelError(
            f"{what} has values too large for BF16",
            found=found,
            needed="at most 3.3895e38",
            advice="The file is damaged: download it again.",
        )
    return rounded.view(np.uint8)


_QUANTISERS: dict[str, Callable[[np.ndarray, str], np.ndarray]] = {
    "Q8_0": _q8_0,
    "Q2_0": _q2_0,
    "BF16": _bf16,
    "F32": lambda rows, what: rows.view(np.uint8),
}

WEIGHT_FORMATS = tuple(_QUANTISERS)
"""Formats that `quantise_weights` writes."""


def quantise_weights(values: np.ndarray, format_name: str, what: str = "a tensor") -> np.ndarray:
    """values (..., n) float32 -> uint8 (rows, row_bytes) in the block format, rows over all axes but the last.

    ModelError naming `what` for values that are not finite or too large for the format's scales, and for rows that are
    no whole number of blocks; BadArgument for a format without a quantiser. Q8_0 gives the bits of `gguf.quants`.
    """
    quantiser = _QUANTISERS.get(format_name)
    if quantiser is None:
        raise BadArgument("weights cannot be quantised to this", found=format_name, needed=", ".join(WEIGHT_FORMATS))
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    row_bytes = by_name(format_name).row_bytes(rows.shape[1])
    finite = np.isfinite(rows)
    if not finite.all():
        raise ModelError(
            f"{what} holds a non-finite value",
            found=f"index {int(np.argmin(finite.reshape(-1)))}",
            needed="finite numbers",
            advice="The file is damaged: download it again.",
        )
    return quantiser(rows, what).reshape(len(rows), row_bytes)
