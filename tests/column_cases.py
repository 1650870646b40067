"""Cases of products with several columns on tensor cores, for the `check` of any kernel's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from strata.pack.formats import by_name
from tests.block_data import random_activations, random_rows
from tests.test_gpu_gemv import wanted


def check_numbers_of_columns(
    check: Callable, name: str, mode: str, shapes: Sequence[tuple[int, int]], least: int
) -> None:
    """Matrices of (K, rows): the second with every number of columns from `least` to 8, the others with 3 and 8."""
    for i, (K, rows) in enumerate(shapes):
        raw, x = random_rows(by_name(name), rows, K, mode, seed=K), random_activations(8, K, mode, seed=K + 1)
        expected = wanted(by_name(name), raw, x)
        for T in range(least, 9) if i == 1 else (3, 8):
            check(name, raw, x[:T], expected[:T], reverse=T % 2 == 1)


def largest_columns(K: int) -> np.ndarray:
    """(4, K) float32 whose codes are as large as they can be, of either sign and of both."""
    x = np.full((4, K), 3.0, np.float32)
    x[1] *= -1
    x[2, ::2] *= -1
    return x
