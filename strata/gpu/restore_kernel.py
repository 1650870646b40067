"""Bytes of the file made from the device layout, on the device: the inverse of relayout_kernel."""

from __future__ import annotations

import numpy as np

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.gpu.relayout import LAYOUTS, ROWS, relayout_bytes, row_block_bytes
from strata.gpu.relayout_kernel import bit_map
from strata.pack.formats import BlockFormat

SOURCE = Source("restore.cu", ("restore",))
_BIT, _ROW_SHIFT, _ROW, _INVERTED = (1 << 12) - 1, 12, 3, 1 << 15


def _chunk_bytes(format: BlockFormat) -> int:
    """Bytes of a row in a chunk."""
    layout = LAYOUTS[format.name]
    return layout.steps * layout.blocks * format.block_bytes


def back_map(format: BlockFormat, K: int) -> np.ndarray:
    """uint16 (n,): the table of `restore_launches` for rows of K values; 16-byte aligned on the device."""
    there, whole = bit_map(format, K), 8 * ROWS * _chunk_bytes(format)
    return np.concatenate([_inverse(piece) for piece in (there[:whole], there[whole:]) if piece.size])


def _inverse(piece: np.ndarray) -> np.ndarray:
    """For every bit of four rows, row by row, its place in the layout, with the same inversion."""
    place = (piece >> _ROW_SHIFT & _ROW).astype(np.int64) * (piece.size // ROWS) + (piece & _BIT)
    back = np.empty_like(piece)
    back[place] = np.arange(piece.size, dtype=np.uint16) | (piece & _INVERTED)
    return back


def restore_launches(format: BlockFormat, relaid: int, out: int, rows: int, K: int, bits: int) -> list[Launch]:
    """A matrix (rows, K) in the device layout at address relaid into bytes as in the file, row by row, at out.

    bits  device address of back_map(format, K)
    """
    need(relayout_bytes(format, rows, K) > 0 and relaid % 16 == 0 and bits % 16 == 0, "a matrix to restore",
         found=(rows, K, relaid, bits))  # fmt: skip
    chunk_bytes, row_bytes = _chunk_bytes(format), format.row_bytes(K)
    args = (pointer(relaid), pointer(out), pointer(bits), i32(rows), i32(row_bytes), i32(chunk_bytes),
            i64(row_block_bytes(format, K)))  # fmt: skip
    grid = (-(-rows // ROWS), -(-row_bytes // chunk_bytes))
    return [launch(SOURCE, "restore", grid, 256, *args, shared_bytes=2 * ROWS * chunk_bytes)]
