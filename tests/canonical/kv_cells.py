"""What a K or V head becomes in its cell, and what is read back."""

from __future__ import annotations

import numpy as np

GROUP = 64


def store_f16(x: np.ndarray) -> tuple[np.ndarray, bool]:
    """x (..., n) float32 -> float16 cells, and whether all are finite."""
    with np.errstate(all="ignore"):
        cells = x.astype(np.float16)
    return cells, bool(np.isfinite(cells).all())


def store_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x (..., n) float32 that fits -> codes int8 (..., n) and scales float16 (..., n / 64)."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    with np.errstate(all="ignore"):
        scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
        wide = scales.astype(np.float32)[..., None]
        codes = np.where(wide > 0, np.clip(np.rint(groups / wide), -127, 127), 0)
    return codes.astype(np.int8).reshape(x.shape), scales


def fits_int8(x: np.ndarray) -> bool:
    """Whether the largest value of every group reads back finite."""
    _, scales = store_int8(x)
    with np.errstate(all="ignore"):
        largest = (np.float32(127) * scales.astype(np.float32)).astype(np.float16)
    return bool(np.isfinite(largest).all())


def load_int8(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 values of codes (..., n) and scales (..., n / 64)."""
    groups = codes.reshape(*codes.shape[:-1], -1, GROUP).astype(np.float32)
    values = (groups * scales.astype(np.float32)[..., None]).astype(np.float16)
    return values.astype(np.float32).reshape(codes.shape)
