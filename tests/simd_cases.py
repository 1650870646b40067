"""Runs kernels and quantisers of any tier on numpy arrays, for the tests of the tiers 512 and 256."""

import numpy as np

from strata.base.compiled import CFunction
from strata.cpu.gemv import table
from strata.pack.formats import BlockFormat

SIMD_TIERS = tuple(tier for tier in table.TIERS if tier != table.PORTABLE)
"""Tiers of this machine that have kernels of their own."""


def call_address(address: int, *arguments: int) -> None:
    import ctypes

    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)


def records_of(format: BlockFormat, x: np.ndarray, tier: int, offset: int = 0) -> tuple[np.ndarray, int]:
    """Activation records uint8 (R, record_bytes) of x (R, K) for a tier, and the error word.

    offset  bytes from a 64-byte boundary
    """
    layout = table.layout_of(format, tier)
    R, K = x.shape
    if not layout.group:
        return np.ascontiguousarray(x).view(np.uint8).reshape(R, -1), 0
    n = layout.record_bytes(K)
    whole = np.full(R * n + 192, 0xA5, np.uint8)
    start = -whole.ctypes.data % 64 + offset
    records, error = whole[start : start + R * n], np.zeros(1, np.int64)
    call_address(layout.quantise_address, x.ctypes.data, K, R, x.strides[0], records.ctypes.data, error.ctypes.data)
    assert (whole[:start] == 0xA5).all() and (whole[start + R * n :] == 0xA5).all(), "written outside of the records"
    return records.reshape(R, n), int(error[0])


def product(format: BlockFormat, raw: np.ndarray, records: np.ndarray, K: int, tier: int) -> np.ndarray:
    """float32 (R, n): the kernel of a tier on raw (n, row_bytes) and records (R, record_bytes)."""
    R, n = len(records), len(raw)
    out = np.full((R, n + 1), 7, np.float32)
    function: CFunction = table.kernel_function(format, R, tier)
    function(raw.ctypes.data, raw.strides[0], n, records.ctypes.data, K, out.ctypes.data, out.strides[0])
    assert (out[:, -1] == 7).all(), "written behind the last row"
    return out[:, :-1]
