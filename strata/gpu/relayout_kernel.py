"""The device layout made on the device: one kernel for all formats, driven by tables of where every bit comes from."""

from __future__ import annotations

from functools import cache

import numpy as np

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.gpu.relayout import LAYOUTS, ROWS, relayout, relayout_bytes, row_block_bytes
from strata.pack.formats import BlockFormat

__all__ = ["bit_map", "relayout_launches"]

SOURCE = Source("relayout.cu", ("relayout",))
_ROW_SHIFT, _INVERTED = 12, 15


def _chunk_blocks(format: BlockFormat) -> int:
    layout = LAYOUTS[format.name]
    return layout.steps * layout.blocks


@cache
def _piece_map(format: BlockFormat, n_blocks: int) -> np.ndarray:
    """uint16 (bits of four rows of n_blocks blocks,), read-only: source of every output bit, as the kernel reads it.

    The layout moves bits and inverts some; so relaying each digit of a bit's number gives the digits of the source.
    """
    row_bytes = n_blocks * format.block_bytes
    need(8 * row_bytes <= 1 << _ROW_SHIFT, "bytes of a row in a chunk", found=row_bytes, needed="at most 512")
    number = np.arange(8 * row_bytes) | np.arange(ROWS)[:, None] << _ROW_SHIFT
    size = ROWS * row_bytes

    def moved(bits: np.ndarray) -> np.ndarray:
        raw = np.packbits(bits.astype(np.uint8), axis=-1, bitorder="little")
        return np.unpackbits(relayout(format, raw)[:size], bitorder="little").astype(np.uint16)

    inverted = moved(np.zeros_like(number))
    source = inverted << _INVERTED
    for digit in range(_ROW_SHIFT + 2):
        source |= (moved(number >> digit & 1) ^ inverted) << digit
    source.flags.writeable = False
    return source


def bit_map(format: BlockFormat, K: int) -> np.ndarray:
    """uint16 (n,): the table of `relayout_launches` for rows of K values; 16-byte aligned on the device."""
    chunk = _chunk_blocks(format)
    left = format.row_bytes(K) // format.block_bytes % chunk
    parts = [_piece_map(format, chunk)] + ([_piece_map(format, left)] if left else [])
    return np.concatenate(parts)


def relayout_launches(format: BlockFormat, raw: int, out: int, rows: int, K: int, bits: int) -> list[Launch]:
    """Bytes of a matrix (rows, K) as in the file, at device address raw, into relayout_bytes at out, 16-byte aligned.

    bits  device address of bit_map(format, K)
    """
    need(
        relayout_bytes(format, rows, K) > 0 and out % 16 == 0 and bits % 16 == 0,
        "a matrix to relay",
        found=(rows, K, out, bits),
    )
    chunk_bytes = _chunk_blocks(format) * format.block_bytes
    pieces = -(-format.row_bytes(K) // chunk_bytes)
    args = (pointer(raw), pointer(out), pointer(bits), i32(rows), i32(format.row_bytes(K)), i32(chunk_bytes),
            i64(row_block_bytes(format, K)))  # fmt: skip
    return [launch(SOURCE, "relayout", (-(-rows // ROWS), pieces), 256, *args, shared_bytes=ROWS * chunk_bytes)]
