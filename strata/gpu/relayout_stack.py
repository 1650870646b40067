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


def relayout_stack(format: BlockFormat, places: int, n: int, rows: int, K: int, table: int, field: int) -> list[Launch]:
    """n matrices (rows, K) as in the file; all addresses are on the device.

    places        uint64 (n, 2): where a matrix is and where it goes, which is a multiple of 16 with room for
                  relayout_bytes
    table, field  of `field_map(format, K)`
    """
    need(0 < n <= MOST_MATRICES and rows > 0 and K > 0 and table % 16 == 0 and field in FIELDS, "matrices to relay",
         found=(n, rows, K, table, field))  # fmt: skip
    layout = LAYOUTS[format.name]
    chunk_bytes = layout.steps * layout.blocks * format.block_bytes
    row_bytes = format.row_bytes(K)
    args = (pointer(places), pointer(table), i32(rows), i32(row_bytes), i32(chunk_bytes),
            i64(row_block_bytes(format, K)))  # fmt: skip
    grid = (-(-rows // ROWS), -(-row_bytes // chunk_bytes), n)
    return [launch(SOURCE, f"relayout_stack<{field}>", grid, 256, *args, shared_bytes=ROWS * chunk_bytes)]
