"""Products of float32 rows with matrices in F32, F16 or BF16; several matrices with one input are one launch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer

INSTANCE_ROWS = (1, 2, 4, 8)
"""Activation rows a kernel instance holds sums of; others run as the next larger one."""

HELD_VALUES = (2560,)
"""Values of rows in BF16 that threads hold in registers before their inputs are there."""
HELD_FROM, HELD_FEW_FROM = 1, 1
"""Activation rows from which that is done with many rows of weights, and with few; 99: never."""
HELD_ROWS, HELD_FEW = 4, 528
"""Rows of weights of a block, and how many are few: a block for each of 132 processors. The warps of larger blocks then
share out the columns too."""
HELD_COLUMNS = 4
"""Most columns at once."""

SOURCE = Source(
    "float_gemv.cu",
    (
        *(f"{kernel}<{T}>" for kernel in ("float_gemv", "float_gemv_long") for T in INSTANCE_ROWS),
        *(f"float_gemv_short<{kind}, {extra}>" for kind in ("F16_VALUES", "BF16_VALUES") for extra in (2, 8)),
        "float_gemv_tile<BF16_VALUES>",
        *(f"float_gemv_held<{K}, {n}, 1>" for K in HELD_VALUES for n in INSTANCE_ROWS if n <= HELD_COLUMNS),
        *(f"float_gemv_held<{K}, 1, {HELD_COLUMNS}>" for K in HELD_VALUES),
        "float_grouped",
    ),
)
KINDS = {"F32": 0, "F16": 1, "BF16": 2}
SHORT_ROWS = range(256, 513)
"""Values of rows that four threads share, if the matrix is alone and has 16 bits a value."""
TILED_FROM = 3
"""Activation rows from which short rows of up to 320 values in BF16 take them four by four; 99: never."""
MOST_MATRICES = 4
NOWHERE = np.uint64(0)
LONG_ROW, FEW_ROWS_LONG, FEW_ROWS = 4096, 1024, 1024
"""Values from which a row is shared by four warps: a warp alone would not keep enough loads in flight. With few rows
already from the second number on."""


@dataclass(frozen=True)
class FloatMatrix:
    """address of (rows, K) weights in F32, F16 or BF16, 16-byte aligned; y address of its output (T, rows) float32.

    squeeze C: the output is silu(y / C), in the first matrix of a list only; 0: y.
    """

    format_name: str
    address: int
    rows: int
    y: int
    squeeze: int = 0


@dataclass(frozen=True)
class Branch:
    """A branch's output that is still to be added to hyper-connection streams: streams (T, C, D) += a (T, C) y (T, D),
    float32 addresses. `float_gemv` does it beside a product with C D matrix rows that touches none of them."""

    streams: int
    y: int
    a: int
    D: int


def takes_branch(format_name: str, K: int) -> bool:
    """Whether `float_gemv` takes a branch beside the product with one matrix of rows of K values."""
    return format_name in KINDS and K < FEW_ROWS_LONG


def instance_rows(T: int) -> int:
    """The smallest instance that takes T rows at once, 8 for more."""
    return next((n for n in INSTANCE_ROWS if n >= T), INSTANCE_ROWS[-1])


def float_gemv(
    x: int,
    T: int,
    K: int,
    matrices: list[FloatMatrix],
    error: int = 0,
    where: np.uint64 = NOWHERE,
    branch: Branch | None = None,
) -> list[Launch]:
    """y (T, rows) = x (T, K) times each matrix; x is the 16-byte aligned address of float32 rows.

    A squeezed output that is not finite is reported; products themselves are not. A branch comes with one matrix that
    `takes_branch`.
    """
    if branch is not None:
        fits = len(matrices) == 1 and takes_branch(matrices[0].format_name, K) and matrices[0].rows % branch.D == 0
        need(fits, "a product that adds a branch", needed="one matrix of short rows, one for each value of the streams")
    out = []
    for first in range(0, len(matrices), MOST_MATRICES):
        out.append(_launch(x, T, K, matrices[first : first + MOST_MATRICES], error, where, branch))
    return out


def _launch(
    x: int, T: int, K: int, matrices: list[FloatMatrix], error: int, where: np.uint64, branch: Branch | None
) -> Launch:
    b = branch or Branch(0, 0, 0, 1)
    added = (pointer(b.streams), pointer(b.y), pointer(b.a), i32(b.D))
    for m in matrices:
        need(m.format_name in KINDS, "a float matrix", found=m.format_name, needed=" or ".join(KINDS))
        need(m.address % 16 == 0 and x % 16 == 0, "alignment of a float product", needed="16 bytes")
    need(K % 8 == 0, "values of a row of a float matrix", found=K, needed="a multiple of 8")
    need(not any(m.squeeze for m in matrices[1:]), "only the first matrix of a list is squeezed")
    need(error != 0 or not matrices[0].squeeze, "a squeezed product reports: it needs an error word")
    words: list[np.generic] = []
    for m in matrices + [FloatMatrix("F32", 0, 0, 0)] * (MOST_MATRICES - len(matrices)):
        words += [pointer(m.address), pointer(m.y), i32(m.rows), i32(KINDS[m.format_name])]
    m, shared_bytes = matrices[0], 4 * T * K
    if len(matrices) == 1 and not m.squeeze and K in SHORT_ROWS and m.format_name != "F32" and shared_bytes <= 48 << 10:
        short = (pointer(x), i32(K), i32(T), pointer(m.address), pointer(m.y), i32(m.rows), *added)
        if T >= TILED_FROM and K <= 320 and m.format_name == "BF16":
            return launch(SOURCE, "float_gemv_tile<BF16_VALUES>", -(-m.rows // 32), 128, *short)
        kernel = f"float_gemv_short<{m.format_name}_VALUES, {2 if K <= 320 else 8}>"
        return launch(SOURCE, kernel, -(-m.rows // 32), 128, *short, shared_bytes=shared_bytes)
    rows, n = sum(m.rows for m in matrices), instance_rows(T)
    if T >= (HELD_FEW_FROM if rows <= HELD_FEW else HELD_FROM) and branch is None and _may_be_held(K, matrices):
        return _held(x, T, K, matrices)
    pieces = -(-T // n)
    args = (pointer(x), i32(K), i32(T), *words, i32(matrices[0].squeeze), pointer(error), where, *added)
    if K >= LONG_ROW or (K >= FEW_ROWS_LONG and rows <= FEW_ROWS):
        return launch(SOURCE, f"float_gemv_long<{n}>", (rows, pieces), 128, *args)
    return launch(SOURCE, f"float_gemv<{n}>", (-(-rows // 8), pieces), 256, *args)


def _may_be_held(K: int, matrices: list[FloatMatrix]) -> bool:
    fits = K in HELD_VALUES and len(matrices) <= 2 and not matrices[0].squeeze
    return fits and all(m.format_name == "BF16" for m in matrices)


def _held(x: int, T: int, K: int, matrices: list[FloatMatrix]) -> Launch:
    rows = sum(m.rows for m in matrices)
    n, groups = (1, HELD_COLUMNS) if rows <= HELD_FEW else (min(instance_rows(T), HELD_COLUMNS), 1)
    two = (*matrices, FloatMatrix("BF16", 0, 0, 0))[:2]
    places = [w for m in two for w in (pointer(m.address), pointer(m.y), i32(m.rows))]
    kernel = f"float_gemv_held<{K}, {n}, {groups}>"
    return launch(SOURCE, kernel, -(-rows // HELD_ROWS), 128 * groups, pointer(x), i32(T), *places)


def float_grouped(
    format_name: str, weights: int, stride: int, rows: int, ids: int, entries: int, x: int, n_x: int, K: int, y: int
) -> list[Launch]:
    """y (entries, rows): matrix number ids[i], at weights + ids[i] stride, times row i // (entries // n_x) of x.

    x float32 (n_x, K).
    """
    need(format_name in KINDS and K % 8 == 0 and entries % n_x == 0, "a grouped float product", found=format_name)
    args = (pointer(x), i32(K), pointer(weights), i64(stride), i32(KINDS[format_name]), i32(rows), pointer(ids),
            i32(entries // n_x), pointer(y))  # fmt: skip
    return [launch(SOURCE, "float_grouped", (-(-rows // 8), entries), 256, *args)]
