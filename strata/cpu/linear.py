"""Products of one input with one or several matrices, straight from their GGUF blocks.

The rows of all matrices of an op form one list that is cut into chunks of about CHUNK_BYTES of weights, so small and
large matrices share the threads evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from strata.base.compiled import chunk
from strata.cpu.machine_code import call7, i64_view, ld64

if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering

CHUNK_BYTES = 64 << 10
SMALL_BYTES = 12 << 10
"""Below this an op is one chunk: handing out work costs about as much as doing it."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix in place. address of its first row, bytes a row, rows, values a row, and the addresses of its
    kernels for 1..4 activation rows as an int64 array."""

    name: str
    address: int
    row_bytes: int
    rows: int
    columns: int
    format_name: str
    kernels: np.ndarray


@njit(error_model="numpy")
def multiply(w, stride, n_rows, act, act_bytes, T, K, out, out_stride, kernels):
    """n_rows weight rows times T activation rows, four activation rows a pass. All arguments int64.

    act_bytes and out_stride are bytes from one activation row to the next; kernels is the address of four addresses.
    """
    row = 0
    while row < T:
        R = min(4, T - row)
        call7(
            ld64(kernels + 8 * (R - 1)), w, stride, n_rows, act + row * act_bytes, K, out + row * out_stride, out_stride
        )
        row += R


@chunk
def linear_chunk(a, k, n_chunks):
    """Record: piece starts (n_chunks + 1), pieces (matrix, first row, last row), matrices (9 words each), T.

    A matrix's words: address, bytes a row, rows, columns, kernels, activation address, its bytes a row, output, output
    bytes a row.
    """
    p = i64_view(a, 4)
    T = p[3]
    for piece in range(ld64(p[0] + 8 * k), ld64(p[0] + 8 * k + 8)):
        q = i64_view(p[1] + 24 * piece, 3)
        m = i64_view(p[2] + 72 * q[0], 9)
        multiply(m[0] + q[1] * m[1], m[1], q[2] - q[1], m[5], m[6], T, m[3], m[7] + 4 * q[1], m[8], m[4])


def split_rows(rows: list[int], row_bytes: list[int], threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut the rows of several matrices into chunks of about equal bytes.

    Returns piece starts (n_chunks + 1,) and pieces (n, 3): matrix, first row, last row (exclusive); int64. Every row is
    in exactly one piece, and a chunk's pieces follow each other.
    """
    total = sum(r * b for r, b in zip(rows, row_bytes, strict=True))
    n_chunks = 1
    if threads > 1 and total > SMALL_BYTES:
        n_chunks = max(2 * threads, -(-total // CHUNK_BYTES))
    target = total / n_chunks
    starts, pieces, filled = [0], [], 0.0
    for index, (count, width) in enumerate(zip(rows, row_bytes, strict=True)):
        row = 0
        while row < count:
            room = target * len(starts) - filled
            take = min(count - row, max(1, round(room / width)))
            pieces.append((index, row, row + take))
            row, filled = row + take, filled + take * width
            if filled >= target * len(starts) - width / 2 and len(starts) < n_chunks:
                starts.append(len(pieces))
    starts.append(len(pieces))
    return np.array(starts, np.int64), np.array(pieces, np.int64).reshape(-1, 3)


def lower_linear(c: Lowering, op: Op) -> None:
    names = [(op.buffers[f"w{i}"], op.buffers[f"y{i}"]) for i in range(op.consts["n"])]
    T = c.T * op.consts["rows"]
    x = op.buffers["x"]
    words, rows, row_bytes = [], [], []
    for name, y in names:
        info = c.weights.tensors.info(name)
        columns = info.shape[-1]
        act, act_bytes = c.records(x, columns, c.weights.layout(name), op.layer, T)
        if c.memory.measuring:
            continue
        m = c.weights.matrix(name)
        rows.append(m.rows)
        row_bytes.append(m.row_bytes)
        words.append((m.address, m.row_bytes, m.rows, m.columns, m.kernels.ctypes.data, act, act_bytes,
                      c.memory.address(y), m.rows * 4))  # fmt: skip
    if not c.memory.measuring:
        starts, pieces = split_rows(rows, row_bytes, c.threads)
        c.parallel(len(starts) - 1, linear_chunk, starts, pieces, np.array(words, np.int64), T)
