"""Products of one input with one or several matrices, straight from their GGUF blocks.

In a window the rows of all matrices of an op form one list that is cut into chunks of about CHUNK_BYTES of weights, so
small and large matrices share the threads evenly. With more activation rows than a window has, chunks are tiles of some
matrix rows and some activation rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from strata.base.compiled import chunk
from strata.cpu.gemv.table import MANY_ROWS
from strata.cpu.machine_code import call7, call8, i64_view, ld64

if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering

CHUNK_BYTES = 64 << 10
SMALL_BYTES = 12 << 10
"""Below this an op is one chunk: handing out work costs about as much as doing it."""

PAIRED_BYTES = 8 << 10
"""Rows of more bytes are handed out in pairs where there are two: kernels of long float rows want that."""

TILE_BYTES, LONG_ROWS = 256 << 10, 160
"""Weights of a tile: they stay in the second cache while the tile's activation rows pass. Of rows of more than
PAIRED_BYTES so many at least: their activations are as long, and the passing of these takes more time then."""

SPAN_BYTES = 768 << 10
"""Activation records of a tile: kernels that unpack weights read all of them for every 16 matrix rows."""

TILE_UNIT = 16
"""Rows of a tile are a multiple of this: kernels for many rows take so many at a time."""

TILES_PER_THREAD = 4
"""At least, where the matrices are large enough: the threads then end together."""

LEAST_TILE_BYTES, LEAST_TILE_ROWS = 8 << 10, 32
"""Of weights, and of activation rows: below, handing out tiles costs too much."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix in place. address of its first row, bytes a row, rows, values a row, and its `kernel_table`."""

    name: str
    address: int
    row_bytes: int
    rows: int
    columns: int
    format_name: str
    kernels: np.ndarray


@njit(error_model="numpy")
def multiply(w, stride, n_rows, act, act_bytes, T, K, out, out_stride, kernels):
    """n_rows weight rows times T activation rows. All arguments int64.

    act_bytes and out_stride are bytes from one activation row to the next; kernels is the address of a `kernel_table`.
    Many rows are taken at once where there is such a kernel, else four a pass; the bits are the same.
    """
    wide = ld64(kernels + 32)
    if wide != 0 and T >= ld64(kernels + 56) and ld64(kernels + 40) <= K <= ld64(kernels + 48):
        call8(wide, w, stride, n_rows, act, K, T, out, out_stride)
        return
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


@chunk
def tile_chunk(a, k, n_chunks):
    """Record: tiles (matrix, first row, last row, first and last activation row), matrices as in `linear_chunk`."""
    p = i64_view(a, 2)
    q = i64_view(p[0] + 40 * k, 5)
    m = i64_view(p[1] + 72 * q[0], 9)
    out = m[7] + 4 * q[1] + q[3] * m[8]
    multiply(m[0] + q[1] * m[1], m[1], q[2] - q[1], m[5] + q[3] * m[6], m[6], q[4] - q[3], m[3], out, m[8], m[4])


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
        row, unit = 0, 2 if width > PAIRED_BYTES else 1
        while row < count:
            room = target * len(starts) - filled
            take = min(count - row, unit * max(1, round(room / width / unit)))
            pieces.append((index, row, row + take))
            row, filled = row + take, filled + take * width
            if filled >= target * len(starts) - width / 2 and len(starts) < n_chunks:
                starts.append(len(pieces))
    starts.append(len(pieces))
    return np.array(starts, np.int64), np.array(pieces, np.int64).reshape(-1, 3)


def split_tiles(
    rows: list[int], row_bytes: list[int], T: int, threads: int, record_bytes: list[int] | None = None
) -> np.ndarray:
    """Cut the products of T activation rows with several matrices into tiles.

    record_bytes: of an activation row, for each matrix; 0 where the kernel reads the tile's activations only once.

    Returns (n, 5) int64: matrix, first row, last row, first activation row, last one (both exclusive). Every product is
    in exactly one tile. A tile's weights stay in the cache for all its activation rows and come from memory once, so
    activation rows are cut only where there are too few tiles otherwise, or the activations need more than a cache.
    """
    record_bytes = record_bytes or [0] * len(rows)
    total, wanted = sum(r * b for r, b in zip(rows, row_bytes, strict=True)), TILES_PER_THREAD * threads
    cuts = []
    for index, (count, width) in enumerate(zip(rows, row_bytes, strict=True)):
        n_bytes = count * width
        n = -(-n_bytes // max(TILE_BYTES, LONG_ROWS * width if width > PAIRED_BYTES else 0))
        if threads > 1:
            n = max(n, min(-(-n_bytes * wanted // total), n_bytes // LEAST_TILE_BYTES))
        step = max(1, round(count / n / TILE_UNIT)) * TILE_UNIT
        cuts += [(index, first, min(first + step, count)) for first in range(0, count, step)]
    parts = 1 if threads == 1 else max(1, min(-(-wanted // len(cuts)), T // LEAST_TILE_ROWS))
    tiles = []
    for cut in cuts:
        n = max(parts, -(-T * record_bytes[cut[0]] // SPAN_BYTES))
        step = -(-T // n // TILE_UNIT) * TILE_UNIT
        tiles += [(*cut, first, min(first + step, T)) for first in range(0, T, step)]
    return np.array(tiles, np.int64)


def lower_linear(c: Lowering, op: Op) -> None:
    names = [(op.buffers[f"w{i}"], op.buffers[f"y{i}"]) for i in range(op.consts["n"])]
    T = c.T * op.consts["rows"]
    x = op.buffers["x"]
    words, rows, row_bytes, record_bytes = [], [], [], []
    for name, y in names:
        info = c.weights.tensors.info(name)
        columns = info.shape[-1]
        layout = c.weights.layout(name)
        act, act_bytes = c.records(x, columns, layout, op.layer, T)
        if c.memory.measuring:
            continue
        m = c.weights.matrix(name)
        rows.append(m.rows)
        row_bytes.append(m.row_bytes)
        record_bytes.append(act_bytes if layout.group and m.kernels[4] else 0)
        words.append((m.address, m.row_bytes, m.rows, m.columns, m.kernels.ctypes.data, act, act_bytes,
                      c.memory.address(y), m.rows * 4))  # fmt: skip
    if c.memory.measuring:
        return
    matrices = np.array(words, np.int64)
    if T < MANY_ROWS:
        starts, pieces = split_rows(rows, row_bytes, c.threads)
        c.parallel(len(starts) - 1, linear_chunk, starts, pieces, matrices, T)
    else:
        tiles = split_tiles(rows, row_bytes, T, c.threads, record_bytes)
        c.parallel(len(tiles), tile_chunk, tiles, matrices)
