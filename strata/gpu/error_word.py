"""The error word: one u64 on the device, all ones without an error. The first op of a program that fails wins.

Op index (16 bits), layer + 1 (16), code (8), detail (24), from the top: kernels keep the minimum, so the order in which
they run does not matter. `exact.cuh` holds the other side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.errors import need

NO_ERROR = 2**64 - 1


@dataclass(frozen=True)
class Reported:
    """A decoded error word; layer is -1 outside the layers, detail a row or expert."""

    op: int
    layer: int
    code: int
    detail: int


def where(op: int, layer: int) -> np.uint64:
    """The part of the word that names an op, as a kernel argument."""
    need(0 <= op < 0xFFFF and -1 <= layer < 0xFFFF, "an op's place in the error word", found=(op, layer))
    return np.uint64(op << 48 | (layer + 1) << 32)


def decode(word: int) -> Reported | None:
    if word == NO_ERROR:
        return None
    return Reported(word >> 48, (word >> 32 & 0xFFFF) - 1, word >> 24 & 0xFF, word & 0xFFFFFF)
