"""Dense products of Q4_K with few and long rows and several columns: warps share out the chunks of 20 rows."""

from __future__ import annotations

from dataclasses import replace

from strata.gpu.activations import Activations
from strata.gpu.gemv.half import COLUMNS
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer

ROUND_CHUNKS, ROUND_CHUNKS_OF_TURING = 8, 4
"""Chunks of a round, and where there are 64 KiB of shared memory."""
SOURCE = Source("gemv/half_split.cu", (f"half_split<{ROUND_CHUNKS}>",))
ROWS, WARPS = 20, 20
"""Rows and warps of a block."""
CHUNK_BYTES = 7040 + 2 * 2192
"""Shared memory of a chunk: terms of 20 rows and four columns, and columns of this round and the next."""


def half_split(weights: int, rows: int, x: Activations, y: int, y_stride: int) -> Launch:
    """The launch of a product. x.K is a multiple of 256."""
    grid = (-(-x.T // COLUMNS), -(-rows // ROWS))
    args = (pointer(weights), i32(x.T), pointer(x.codes), pointer(x.scales), pointer(x.sums), pointer(y), i64(y_stride),
            i32(rows), i32(x.K))  # fmt: skip
    one = launch(SOURCE, SOURCE.instances[0], grid, 32 * WARPS, *args, shared_bytes=ROUND_CHUNKS * CHUNK_BYTES)
    return replace(one, ring_bytes=(ROUND_CHUNKS - ROUND_CHUNKS_OF_TURING) * CHUNK_BYTES)
