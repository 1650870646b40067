"""strata bench cpu-kernels --chunk-rows: products of many rows, four at a time and by the kernel for any number.

One core, CPU time, a matrix that stays in the caches; both forms in turn, and every bit of their results compared.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from strata.base.errors import StrataError, need
from strata.cpu.gemv.table import wide_kernel
from strata.cpu.pool import Pool
from strata.kernel_speed import Job, Product, activation_records, core_seconds, kernels_of, multiplying
from strata.pack.formats import BlockFormat
from strata.pack.random_blocks import random_rows

WIDE, LEAST_ROWS = 4, 7
"""Words of a kernel table: the kernel for any number of rows, and the fewest rows that it is taken for."""
PASS_OUTPUTS = 1 << 18
"""Of one timing, about."""


def compare(
    format: BlockFormat, tier: int, matrix_rows: int, columns: int, R: int, repeats: int
) -> dict[str, Any] | None:
    """ns an output of R activation rows in both forms; None where a tier has no kernel for any number of such rows."""
    wide = wide_kernel(format, tier)
    if wide is None or not wide.least_values <= columns <= wide.most_values:
        return None
    raw = random_rows(format, matrix_rows, columns, 0.02, np.random.default_rng(1))
    records, table = activation_records(format, columns, R, tier), kernels_of(format, tier)
    passes = max(1, PASS_OUTPUTS // (matrix_rows * R))
    pieces = np.array([(0, 0, matrix_rows)] * passes, np.int64)
    outputs: list[np.ndarray] = []
    jobs: list[Job] = []
    for values in ({WIDE: 0}, {LEAST_ROWS: 1}):
        kernels = table.copy()
        for word, value in values.items():
            kernels[word] = value
        outputs.append(np.zeros((R, matrix_rows), np.float32))
        product = Product(raw.ctypes.data, raw.shape[1], matrix_rows, columns, kernels, records, outputs[-1])
        jobs.append(multiplying([product], R, pieces))
    with Pool(1) as pool:
        for job in jobs:
            core_seconds(job, pool)  # once to warm up, and for the results
        if outputs[0].tobytes() != outputs[1].tobytes():
            raise StrataError(f"the kernel of any number of rows of {format.name} is wrong", needed="the same bits",
                              found=f"{R} rows, matrix {matrix_rows} x {columns}",
                              advice="Please report this.")  # fmt: skip
        turns = [[core_seconds(job, pool) for job in jobs] for _ in range(repeats)]
    four, any_number = (1e9 * statistics.median(t) / (passes * matrix_rows * R) for t in zip(*turns, strict=True))
    return {
        "type": format.name, "rows": R, "matrix": [matrix_rows, columns], "four_ns": round(four, 2),
        "any_number_ns": round(any_number, 2),
        "times": round(statistics.median(a / b for a, b in turns), 3), "taken_from_rows": wide.least_rows,
    }  # fmt: skip


def measure(
    formats: list[BlockFormat], tier: int, matrix_rows: int, columns: int, rows: list[int], repeats: int
) -> list[dict[str, Any]]:
    """Both forms of all of these. BadArgument if the tier has no such kernel for any of them."""
    found = [compare(f, tier, matrix_rows, columns, R, repeats) for f in formats for R in rows]
    some = [one for one in found if one is not None]
    need(bool(some), "no kernel for any number of rows", found=f"tier {tier}, {columns} values",
         needed="a tier and a format that have one")  # fmt: skip
    return some


def line(found: dict[str, Any]) -> str:
    """Of `compare`, for people."""
    height, columns = found["matrix"]
    return (
        f"{found['type']:<9}{height} x {columns}, {found['rows']:>4} rows: four at a time {found['four_ns']:.2f}, any "
        f"number {found['any_number_ns']:.2f}, {found['times']:.2f} times; in use from {found['taken_from_rows']} on"
    )
