"""The device layout of several matrices of one shape in one launch."""

from __future__ import annotations

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.gpu.relayout import LAYOUTS, ROWS, row_block_bytes
from strata.pack.formats import BlockFormat

FIELDS = (1, 2, 4, 8)
"""Bits that formats move together."""
SOURCE = Source("relayout_stack.cu", tuple(f"relayout_stack<{n}>" for n in FIELDS))
MOST_MATRICES = 65535
"""Of one launch: the last axis of a grid."""
BLOCK_BYTES = 12 << 10
"""Of four rows, that one block lays out: all of them, in most matrices, so that blocks have work and reads are long."""


def in_place(format: BlockFormat, rows: int, K: int) -> bool:
    """Whether `relayout_stack` may write matrices where they lie: a block has read what it writes over, and no more."""
    row_bytes = format.row_bytes(K)
    return rows % ROWS == 0 and ROWS * row_bytes == row_block_bytes(format, K) <= BLOCK_BYTES


def relayout_stack(format: BlockFormat, places: int, n: int, rows: int, K: int, table: int, field: int) -> list[Launch]:
    """n matrices (rows, K) as in the file; all addresses are on the device.

    places        uint64 (n, 2): where a matrix is and where it goes, which is a multiple of 16 with room for
                  relayout_bytes; the same address twice if they go `in_place`
    table, field  of `field_map(format, K)`
    """
    need(0 < n <= MOST_MATRICES and rows > 0 and K > 0 and table % 16 == 0 and field in FIELDS, "matrices to relay",
         found=(n, rows, K, table, field))  # fmt: skip
    layout = LAYOUTS[format.name]
    chunk_bytes = layout.steps * layout.blocks * format.block_bytes
    row_bytes = format.row_bytes(K)
    chunks = -(-row_bytes // chunk_bytes)
    together = chunks if ROWS * row_bytes <= BLOCK_BYTES else max(1, BLOCK_BYTES // (ROWS * chunk_bytes))
    args = (pointer(places), pointer(table), i32(rows), i32(row_bytes), i32(chunk_bytes), i32(together),
            i64(row_block_bytes(format, K)))  # fmt: skip
    grid = (-(-rows // ROWS), -(-chunks // together), n)
    shared_bytes = ROWS * min(together * chunk_bytes, row_bytes)
    return [launch(SOURCE, f"relayout_stack<{field}>", grid, 256, *args, shared_bytes=shared_bytes)]
