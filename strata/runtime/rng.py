"""Counter-based random numbers: Philox4x32-10. A draw depends on (seed, position, stream) and on nothing else.

So the same seed gives the same draw at the same position whatever the window size, the drafts or the threads.
The 64-bit counter is position + stream; the four streams cannot meet while positions stay below 2^61.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.base.compiled import cached_njit
from strata.base.errors import need
from strata.base.numbers import shown

PICK, DRAFT, ACCEPT, RESIDUAL = 0, 1 << 61, 1 << 62, 1 << 63
"""Streams: the target's draw, the drafter's draw, the acceptance test and the draw after a rejection."""

MAX_POSITION = (1 << 61) - 1
MAX_SEED = (1 << 64) - 1
_WORD = 0xFFFFFFFF


@njit(error_model="numpy")
def _rounds(c0, c1, c2, c3, k0, k1):
    """Ten rounds on uint64 values that hold 32-bit words."""
    low, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> word) ^ c1 ^ k0, p1 & low, (p0 >> word) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@njit(error_model="numpy")
def _unit(first, second):
    """53 bits of two words as a float64 in [0, 1)."""
    return np.float64(((second << np.uint64(32)) | first) >> np.uint64(11)) * 2.0**-53


@cached_njit
def _philox(c0, c1, c2, c3, k0, k1):
    return _rounds(np.uint64(c0), np.uint64(c1), np.uint64(c2), np.uint64(c3), np.uint64(k0), np.uint64(k1))


@cached_njit
def _uniform(c0, c1, k0, k1):
    a, b, _, _ = _rounds(np.uint64(c0), np.uint64(c1), np.uint64(0), np.uint64(0), np.uint64(k0), np.uint64(k1))
    return _unit(a, b)


@cached_njit
def _uniforms(counters, k0, k1, out):
    low, word, zero = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(0)
    for i in range(counters.size):
        a, b, _, _ = _rounds(counters[i] & low, counters[i] >> word, zero, zero, np.uint64(k0), np.uint64(k1))
        out[i] = _unit(a, b)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four output words of Philox4x32-10 for four counter words and two key words (32 bits each)."""
    return tuple(int(w) for w in _philox(*counter, *key))


def uniform(seed: int, position: int, stream: int = PICK) -> float:
    """The float64 in [0, 1) of (seed, position, stream). seed 0..2^64-1, position 0..2^61-1. No checks: hot path."""
    counter = position + stream
    return _uniform(counter & _WORD, counter >> 32, seed & _WORD, seed >> 32)


def uniforms(seed: int, positions: np.ndarray, stream: int = PICK) -> np.ndarray:
    """`uniform` for an array of positions (integers, any shape): float64 of the same shape."""
    positions = np.ascontiguousarray(positions)
    need(positions.dtype.kind in "iu", "positions must be integers", found=positions.dtype, needed="an integer dtype")
    need(0 <= seed <= MAX_SEED, "seed out of range", found=seed, needed=f"0..{MAX_SEED}")
    inside = positions.size == 0 or (int(positions.min()) >= 0 and int(positions.max()) <= MAX_POSITION)
    need(inside, "a position is out of range", found=shown(positions), needed=f"0..{MAX_POSITION}")
    counters = positions.astype(np.uint64).ravel() + np.uint64(stream)
    out = np.empty(counters.size, np.float64)
    _uniforms(counters, seed & _WORD, seed >> 32, out)
    return out.reshape(positions.shape)
