"""Runs compiled ops without a model: argument records, state slots, error words, guarded outputs; compares bits."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

import numpy as np

from strata.base.compiled import CFunction
from strata.cpu.walker import float_argument

GUARD_BYTES = 64
LAYER = 11
"""Layer number that every record of these tests carries."""


class Slot:
    """A state buffer as ops see it: the address of a word that holds the buffer's address."""

    def __init__(self, array: np.ndarray):
        assert array.flags.c_contiguous
        self.array = array
        self.word = np.array([array.ctypes.data], np.int64)


class _Error:
    """Stands in a record for the address of the call's error word."""


ERROR = _Error()


class Call:
    """One op with its argument record.

    words  an int stands for itself, a float for its float32 bits, an array for its address, a Slot for the address of
           its word, None for 0, ERROR for the address of `error`
    """

    def __init__(self, function: CFunction, *words: object):
        self.function, self.words = function, words
        self.error = np.zeros(4, np.int64)
        self.record = np.array([self._word(w) for w in words], np.int64)
        needed = re.search(r"i64_view\(a, (\d+)\)", inspect.getsource(function.py_func))
        # A record that is too short would be read past its end.
        assert needed is None or len(words) >= int(needed.group(1)), (
            f"{function.__name__} reads {needed.group(1)} words"
        )

    def _word(self, word: object) -> int:
        if isinstance(word, np.ndarray):
            assert word.flags.c_contiguous
            return word.ctypes.data
        if isinstance(word, Slot):
            return word.word.ctypes.data
        if word is ERROR:
            return self.error.ctypes.data
        if isinstance(word, float | np.float32):
            return float_argument(float(word))
        return 0 if word is None else int(word)

    def run(self, n_chunks: int = 0, order: Iterable[int] | None = None) -> Call:
        """Run the step, or all chunks of a chunk function in the given order; guards of outputs must be intact."""
        address = self.record.ctypes.data
        if self.function.n_args == 1:
            self.function(address)
        else:
            for k in range(n_chunks) if order is None else order:
                self.function(address, int(k), n_chunks)
        for word in self.words:
            array = word.array if isinstance(word, Slot) else word
            if isinstance(array, np.ndarray):
                check_guards(array)
        return self

    @property
    def reported(self) -> tuple[int, int, int] | None:
        """(code, layer, detail), or None without an error."""
        code, _, layer, detail = (int(word) for word in self.error)
        return (code, layer, detail) if code else None


def guarded(values: np.ndarray) -> np.ndarray:
    """A copy of `values` between two guards that `Call.run` checks."""
    values = np.ascontiguousarray(values)
    raw = np.full(values.nbytes + 2 * GUARD_BYTES, 0xA5, np.uint8)
    copy = raw[GUARD_BYTES : GUARD_BYTES + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def room(*shape: int, dtype: str = "float32") -> np.ndarray:
    """A guarded output filled with a pattern that no op writes."""
    out = guarded(np.zeros(shape, dtype))
    out.view(np.uint8).reshape(-1)[:] = 0x5A
    return out


def check_guards(array: np.ndarray) -> None:
    raw = array
    while isinstance(raw.base, np.ndarray):
        raw = raw.base
    if raw.dtype == np.uint8 and raw.ndim == 1 and raw.nbytes == array.nbytes + 2 * GUARD_BYTES:
        assert (raw[:GUARD_BYTES] == 0xA5).all() and (raw[-GUARD_BYTES:] == 0xA5).all(), "written outside of an output"


def bits(x: np.ndarray) -> np.ndarray:
    """Bits of a float array as unsigned integers, every NaN as one pattern: its payload is not defined."""
    x = np.ascontiguousarray(x)
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}[x.itemsize]
    return np.where(np.isnan(x), np.full((), np.nan, x.dtype).view(unsigned), x.view(unsigned))


def assert_same(found: np.ndarray, wanted: np.ndarray, what: str = "") -> None:
    """Every bit equal (integers: every value)."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype, (what, found.shape, wanted.shape, found.dtype,
                                                                         wanted.dtype)  # fmt: skip
    left, right = (bits(found), bits(wanted)) if found.dtype.kind == "f" else (found, wanted)
    differ = left != right
    if differ.any():
        at = tuple(int(i) for i in np.argwhere(differ)[0])
        raise AssertionError(f"{what}: {int(differ.sum())} of {differ.size} differ, first at {at}: "
                             f"{found[at]!r} for {wanted[at]!r}")  # fmt: skip


def relative_rms(found: np.ndarray, exact: np.ndarray) -> float:
    """Root mean square of the error over that of the exact values."""
    error = np.asarray(found, np.float64) - exact
    return float(np.sqrt(np.mean(error**2) / np.mean(np.asarray(exact, np.float64) ** 2)))


def assert_accurate(found: np.ndarray, exact: np.ndarray, bound: float, what: str) -> None:
    error = relative_rms(found, exact)
    print(f"{what}: relative RMS {error:.2e} (bound {bound:.1e})")
    assert error < bound, f"{what}: relative RMS {error:.3e}, bound {bound:.1e}"


def plain(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def spiked(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal values among which some are far larger or smaller, zeros of both signs and subnormals."""
    x = plain(rng, *shape)
    kind = rng.integers(0, 60, shape)
    x = np.where(kind == 0, x * np.float32(2.0**12), x)
    x = np.where(kind == 1, x * np.float32(2.0**-30), x)
    x = np.where(kind == 2, x * np.float32(2.0**-140), x)
    return np.where(kind == 3, np.copysign(np.float32(0), x), x).astype(np.float32)
