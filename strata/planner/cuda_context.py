"""What the CUDA driver keeps of a card for a process, before any allocation of ours."""

from __future__ import annotations

import ctypes
import os

from strata.base.plan import MIB

FITTED_MIB = ((48, 352), (132, 527))
"""(multiprocessors, MiB) of the two cards that the line below goes through: one of 12 GB, and an H200."""

MULTIPROCESSORS = 48
"""Assumed of a card that is neither here nor known by name."""

DRIVER = "libcuda.so.1"


def context_bytes(multiprocessors: int | None) -> int:
    """Expected bytes of a context. They grow with the card: local memory of every thread that may run at once is part
    of them."""
    (few, low), (many, high) = FITTED_MIB
    n = MULTIPROCESSORS if multiprocessors is None else multiprocessors
    return round(low + (high - low) * (n - few) / (many - few)) * MIB


def has_context(index: int, library: ctypes.CDLL | None = None) -> bool:
    """Whether this process has a context on a device already, so that free memory is without it. Starts nothing: where
    no CUDA driver is loaded there is none."""
    lib = library if library is not None else _loaded_driver()
    if lib is None:
        return False
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    try:
        if lib.cuDeviceGet(ctypes.byref(device), ctypes.c_int(index)) != 0:  # also before cuInit
            return False
        state = lib.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    except (AttributeError, OSError, ctypes.ArgumentError):
        return False
    return state == 0 and active.value != 0


def _loaded_driver() -> ctypes.CDLL | None:
    """The driver's library if this process has it loaded."""
    flag = getattr(os, "RTLD_NOLOAD", None)
    if flag is None:
        return None
    try:
        return ctypes.CDLL(DRIVER, mode=flag)
    except OSError:
        return None
