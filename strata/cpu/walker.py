"""Walk a list of steps, (function address, argument record) pairs, in one nogil call; an error word stops it.

The list is built once in Python (`WalkList`), then run per window without touching Python, without allocating and at a
few nanoseconds a step. A step is a `step` function of `strata.base.compiled`; it reads everything it needs from its
argument record, an array of int64: addresses, counts, or the bits of a float32 (`float_argument`, read with ldf32).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from strata.base.compiled import CFunction, c_function, cached_njit, chunk, step
from strata.base.errors import need
from strata.base.program import ERROR_WORDS, OK
from strata.cpu.machine_code import (
    call1,
    clock_ns,
    exact_floats,
    ld64,
    ld_acquire64,
    set_float_control,
    st64,
)

__all__ = ["WalkList", "c_function", "chunk", "float_argument", "step", "walk", "walk_timed"]


@cached_njit
def walk(steps, n_steps, error_word):
    """Run steps in order until one sets the error word; returns that step's index, or -1.

    steps       address of n_steps pairs of int64 (function address, argument record address)
    error_word  address of four int64 (code, op index, layer, detail); cleared at entry. The walk stops after the first
                step that leaves a non-zero code and writes the step's index into the second word.
    Subnormal numbers count during the walk, whatever the calling thread had set; its setting is restored.
    """
    before = exact_floats()
    for k in range(ERROR_WORDS):
        st64(error_word + 8 * k, 0)
    failed = np.int64(-1)
    for i in range(n_steps):
        call1(ld64(steps + 16 * i), ld64(steps + 16 * i + 8))
        if ld_acquire64(error_word) != OK:
            st64(error_word + 8, i)
            failed = np.int64(i)
            break
    set_float_control(before)
    return failed


@cached_njit
def walk_timed(steps, n_steps, error_word, step_ns):
    """As `walk`, and adds each step's time in ns to the int64 array at `step_ns` (n_steps,)."""
    before = exact_floats()
    for k in range(ERROR_WORDS):
        st64(error_word + 8 * k, 0)
    failed = np.int64(-1)
    began = clock_ns()
    for i in range(n_steps):
        call1(ld64(steps + 16 * i), ld64(steps + 16 * i + 8))
        now = clock_ns()
        st64(step_ns + 8 * i, ld64(step_ns + 8 * i) + now - began)
        began = now
        if ld_acquire64(error_word) != OK:
            st64(error_word + 8, i)
            failed = np.int64(i)
            break
    set_float_control(before)
    return failed


def float_argument(value: float) -> int:
    """A float32's bits as an int64 argument; the step reads it with `ldf32` at the argument's address."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


class WalkList:
    """Steps in order, with their argument records in one block of memory.

    error_word  address of four int64 that the steps write errors into, or None for words of its own

    `add` all steps, then `run` any number of times. The first run (or `freeze`) fixes the addresses; nothing can be
    added afterwards. The list keeps alive what it was given: step functions, array arguments and `keep` objects.
    """

    def __init__(self, error_word: int | None = None):
        self._own_error = np.zeros(ERROR_WORDS, np.int64)
        self._error_address = self._own_error.ctypes.data if error_word is None else int(error_word)
        self._functions: list[CFunction | int] = []
        self._arguments: list[int] = []
        self._starts: list[int] = []
        self._kept: list[Any] = []
        self._arena: np.ndarray | None = None
        self._steps: np.ndarray | None = None
        self._steps_address = 0
        self._step_ns: np.ndarray | None = None
        self._step_ns_address = 0

    def __len__(self) -> int:
        return len(self._functions)

    @property
    def error_address(self) -> int:
        """Address of the error word, for the argument records of steps that can fail."""
        return self._error_address

    @property
    def error(self) -> tuple[int, int, int, int]:
        """(code, step, layer, detail) of the last run, for a list with words of its own."""
        return tuple(int(word) for word in self._own_error)

    def add(self, function: CFunction | int, *arguments: int | np.ndarray, keep: Any = None) -> int:
        """Append a step; returns its index.

        function   a `step` function (compiled no later than the first run) or an address
        arguments  the int64 of its record, in order; an array stands for its address and must be C-contiguous
        keep       anything that must live as long as the list
        """
        need(self._arena is None, "a walk list that has run cannot grow", found=f"{len(self)} steps",
             advice="Build a new list.")  # fmt: skip
        if isinstance(function, CFunction):
            need(function.n_args == 1, f"{function.__qualname__} is no step", found=f"{function.n_args} arguments",
                 needed=1)  # fmt: skip
        words = [self._word(argument) for argument in arguments]
        self._functions.append(function)
        self._starts.append(len(self._arguments))
        self._arguments.extend(words)
        self._kept.append((arguments, keep))
        return len(self) - 1

    @staticmethod
    def _word(argument: int | np.ndarray) -> int:
        if isinstance(argument, np.ndarray):
            need(argument.flags.c_contiguous, "an array argument is not contiguous", found=argument.strides)
            return argument.ctypes.data
        need(isinstance(argument, int | np.integer), "an argument is neither an integer nor an array", found=argument,
             advice="Pass floats as float_argument(x).")  # fmt: skip
        need(-(1 << 63) <= argument < 1 << 63, "an argument does not fit int64", found=argument)
        return int(argument)

    def compile(self) -> None:
        """Compile the step functions added so far, or load them from disk."""
        for function in self._functions:
            if isinstance(function, CFunction):
                function.address  # noqa: B018  # its first use compiles

    def freeze(self) -> None:
        """Compile all step functions and fix the addresses."""
        if self._arena is not None:
            return
        addresses = [f.address if isinstance(f, CFunction) else int(f) for f in self._functions]
        arena = np.array(self._arguments or [0], np.int64)
        steps = np.empty((len(self), 2), np.int64)
        steps[:, 0] = addresses
        steps[:, 1] = arena.ctypes.data + 8 * np.array(self._starts, np.int64)
        self._steps, self._steps_address, self._arena = steps, steps.ctypes.data, arena

    @property
    def step_words(self) -> np.ndarray:
        """(n_steps, 2) int64: function and record addresses, for `walk` in compiled code."""
        self.freeze()
        return self._steps

    def record(self, step: int, n_words: int) -> np.ndarray:
        """(n_words,) int64: a view of a step's argument record."""
        self.freeze()
        return self._arena[self._starts[step] : self._starts[step] + n_words]

    def run(self) -> int:
        """Run all steps; returns the index of the step that set the error word, or -1."""
        if self._arena is None:
            self.freeze()
        if self._step_ns is not None:
            return walk_timed(self._steps_address, len(self._functions), self._error_address, self._step_ns_address)
        return walk(self._steps_address, len(self._functions), self._error_address)

    def run_range(self, first: int, n_steps: int) -> int:
        """Run n_steps steps from `first` on; as `run`, the result counts from `first`."""
        self.freeze()
        return walk(self._steps_address + 16 * first, n_steps, self._error_address)

    def profile(self, on: bool = True) -> None:
        """Start (from zero) or stop adding up the time of every step, at about 25 ns a step; results stay the same."""
        self._step_ns = None
        if on:
            self.freeze()
            self._step_ns = np.zeros(len(self), np.int64)
            self._step_ns_address = self._step_ns.ctypes.data

    @property
    def step_ns(self) -> np.ndarray:
        """(n_steps,) int64, time of each step since `profile()`, summed over runs."""
        need(self._step_ns is not None, "the walk list is not being profiled", advice="Call profile() first.")
        return self._step_ns.copy()

    @property
    def names(self) -> list[str]:
        """Name of each step's function (an address in hexadecimal where only that was given)."""
        return [f.__qualname__ if isinstance(f, CFunction) else hex(f) for f in self._functions]
