"""How an op reports: four int64 words (code, op index, layer, detail); the first code written stays."""

from __future__ import annotations

from numba import njit

from strata.cpu.machine_code import ld64, st64


@njit(error_model="numpy")
def report(error, code, layer, detail):
    """Set the error word unless one is set. Workers of one op may race: all of them name the same op and layer."""
    if ld64(error) == 0:
        st64(error + 16, layer)
        st64(error + 24, detail)
        st64(error, code)
