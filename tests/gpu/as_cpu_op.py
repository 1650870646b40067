"""Runs the tests of CPU ops on the GPU's code: `GpuCall` takes the place of `Call` in a test module.

A call names a CPU function and its argument record; an adapter turns the words of that record into launches. So one set
of tests and one numpy reference hold for both backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from strata.gpu.error_word import decode, where
from strata.gpu.launch import Launch
from tests.canonical.call import LAYER, Call, Slot, check_guards
from tests.gpu.run_on_cpu import ErrorWord, address, run_all

Adapter = Callable[..., list[Launch]]
"""(words of the record, error word address, where) -> launches. Arrays and slots come as addresses."""


def gpu_call(adapters: dict[object, Adapter]) -> type[Call]:
    """A `Call` whose run() launches kernels; adapters by CPU function."""

    class GpuCall(Call):
        def run(self, n_chunks: int = 0, order: Iterable[int] | None = None) -> Call:
            self.gpu_error = ErrorWord()
            words = [self._place(w, int(v)) for w, v in zip(self.words, self.record, strict=True)]
            launches = adapters[self.function](words, self.gpu_error.address, where(5, LAYER), n_chunks)
            run_all(launches, reverse=order is not None)
            for word in self.words:
                array = word.array if isinstance(word, Slot) else word
                if isinstance(array, np.ndarray):
                    check_guards(array)
            return self

        @staticmethod
        def _place(word: object, value: int) -> object:
            if isinstance(word, float | np.floating):
                return word
            return address(word) if isinstance(word, np.ndarray | Slot) else value

        @property
        def reported(self):
            found = decode(int(self.gpu_error.word[0]))
            return None if found is None else (found.code, found.layer, found.detail)

    return GpuCall
