"""The norm of hyper-connection streams together with the float products that read it, for narrow windows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from strata.base.errors import need
from strata.gpu.float_gemv import KINDS, FloatMatrix
from strata.gpu.launch import Launch, Source, f32, i32, launch, pointer

WIDTHS = (256, 2560)
"""Values of a stream that the kernel is compiled for."""
NEAR_WIDTH = 2560
"""Values of a stream for which the weights of one row can be in registers before the inputs are there."""
SOURCE = Source("norm_down.cu", (*(f"norm_down<{D // 256}>" for D in WIDTHS), f"norm_down<{NEAR_WIDTH // 256}, true>"))
CLUSTERED = Source("norm_down_cluster.cu", tuple(f"norm_down_cluster<{D // 256}>" for D in WIDTHS))
"""The same for windows of more rows, by clusters of blocks."""
CLUSTER, CLUSTER_COLUMNS, CLUSTER_MATRIX_ROWS = 4, 4, 12
"""Blocks of a cluster; rows of streams and of a matrix that it takes."""
MOST_STREAMS, MOST_MATRICES = 4, 2
MATRIX_ROWS = 3
"""Rows of a matrix that a block multiplies."""


def fits(C: int, D: int, n_matrices: int) -> bool:
    """Whether `norm_down` takes streams of this shape and so many matrices."""
    return D in WIDTHS and C <= MOST_STREAMS and 1 <= n_matrices <= MOST_MATRICES


def _check(C: int, D: int, matrices: list[FloatMatrix], y: int, a: int) -> None:
    need(fits(C, D, len(matrices)), "streams of a norm with its products", found=(C, D, len(matrices)),
         needed=f"up to {MOST_STREAMS} streams of {' or '.join(map(str, WIDTHS))} values, 1 or 2 matrices")  # fmt: skip
    need((y == 0) == (a == 0), "an added branch needs y and a")
    need(not any(m.squeeze for m in matrices[1:]), "only the first matrix of a list is squeezed")


def norm_down(
    x: int,
    w: int,
    normed: int,
    T: int,
    C: int,
    D: int,
    eps: float,
    matrices: list[FloatMatrix],
    error: int,
    where: np.uint64,
    where_squeeze: np.uint64,
    *,
    y: int = 0,
    a: int = 0,
    near: bool = False,
) -> list[Launch]:
    """normed (T, C, D) = rms norm of every stream of x (T, C, D) times w (C, D), and the matrices' outputs from it.

    Matrices have C D values a row; the first may be squeezed. y, a: addresses of a branch's output (T, D) and strengths
    (T, C) that count as added to x, or 0: x itself stays as it is, see `float_gemv.Branch`. Errors of the norm are
    reported at `where`, those of the squeeze at `where_squeeze`. near: weights in 16 bits go into registers before the
    inputs are there, where there is a kernel for it. float32 addresses, 16-byte aligned matrices.
    """
    _check(C, D, matrices, y, a)
    words: list[np.generic] = []
    for m in matrices + [FloatMatrix("F32", 0, 0, 0)] * (MOST_MATRICES - len(matrices)):
        words += [pointer(m.address), pointer(m.y), i32(m.rows), i32(KINDS[m.format_name])]
    args = (pointer(x), pointer(y), pointer(a), pointer(w), pointer(normed), i32(C), f32(eps), *words,
            i32(matrices[0].squeeze), pointer(error), where,
            where_squeeze)  # fmt: skip
    tiles = sum(-(-m.rows // MATRIX_ROWS) for m in matrices)
    near = near and D == NEAR_WIDTH and matrices[0].format_name != "F32"
    return [launch(SOURCE, f"norm_down<{D // 256}{', true' if near else ''}>", (tiles, T), 256, *args)]


def norm_down_cluster(
    x: int,
    w: int,
    normed: int,
    T: int,
    C: int,
    D: int,
    eps: float,
    matrices: list[FloatMatrix],
    error: int,
    where: np.uint64,
    where_squeeze: np.uint64,
    *,
    y: int = 0,
    a: int = 0,
) -> list[Launch]:
    """As `norm_down`, for MOST_STREAMS streams, BF16 matrices and devices with clusters (`launch.CLUSTERS_FROM`)."""
    _check(C, D, matrices, y, a)
    need(C == MOST_STREAMS, "streams of a norm by clusters", found=C, needed=MOST_STREAMS)
    need(all(m.format_name == "BF16" for m in matrices), "matrices of a norm by clusters", needed="BF16",
         found=[m.format_name for m in matrices])  # fmt: skip
    words: list[np.generic] = []
    for m in matrices + [FloatMatrix("BF16", 0, 0, 0)] * (MOST_MATRICES - len(matrices)):
        words += [pointer(m.address), pointer(m.y), i32(m.rows)]
    args = (pointer(x), pointer(y), pointer(a), pointer(w), pointer(normed), i32(T), f32(eps), *words,
            i32(matrices[0].squeeze), pointer(error), where,
            where_squeeze)  # fmt: skip
    tiles = sum(-(-m.rows // CLUSTER_MATRIX_ROWS) for m in matrices)
    grid = (CLUSTER * tiles, -(-T // CLUSTER_COLUMNS))
    one = launch(CLUSTERED, f"norm_down_cluster<{D // 256}>", grid, 256, *args, shared_bytes=cluster_shared_bytes(D))
    return [replace(one, cluster=CLUSTER)]


def cluster_shared_bytes(D: int) -> int:
    """Shared memory of a block: normed values, weights of the norm, lanes of squares and sums, inverses, two words."""
    steps, squares = MOST_STREAMS * D // 256, CLUSTER_COLUMNS * MOST_STREAMS
    sums = CLUSTER_MATRIX_ROWS // CLUSTER * CLUSTER_COLUMNS
    return 4 * (steps * (CLUSTER_COLUMNS + 1) * 64 + (squares + sums) * 256 + squares) + 16
