"""Dense products of Q4_K or Q5_K with several columns on tensor cores in float16."""

from __future__ import annotations

from dataclasses import replace

from strata.gpu.activations import Activations
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.pack.formats import BlockFormat

HALF_STAGE_BYTES = {"Q4_K": 1280, "Q5_K": 1536}
"""Of a chunk that is on its way to a warp, by format (half_ring.cuh)."""
SOURCE = Source(
    "gemv/half_rows.cu",
    tuple(f"half_rows<{name}, {stays}>" for name in HALF_STAGE_BYTES for stays in ("false", "true")),
)
STAYING, STAYING_ROWS = 2, 65536
"""Most blocks of a processor that stay, where there is room: they take all tiles of a matrix with that many rows and
more. Code for one tile is faster where each has one."""
COLUMNS, WARPS, WARP_ROWS = 4, 8, 8
"""Columns and warps of a block, and rows of a warp. Blocks of four warps were 1 to 35 % slower with four columns."""


def half_bytes(K: int) -> int:
    """Shared memory of a block for four columns of K values in float16 (half_q4.cuh)."""
    return K // 256 * 2192


def with_rings(one: Launch, format: str = "Q4_K") -> Launch:
    """A launch whose warps have rings (half_ring.cuh) behind its shared memory: four stages, two on Turing."""
    stages = HALF_STAGE_BYTES[format] * one.block[0] // 32
    return replace(one, shared_bytes=one.shared_bytes + 4 * stages, ring_bytes=2 * stages)


def half_rows(format: BlockFormat, weights: int, rows: int, x: Activations, y: int, y_stride: int) -> Launch:
    """The launch of a product; x.K a multiple of 256."""
    grid = (-(-x.T // COLUMNS), -(-rows // (WARP_ROWS * WARPS)))
    args = (pointer(weights), i32(x.T), pointer(x.codes), pointer(x.scales), pointer(x.sums), pointer(y), i64(y_stride),
            i32(rows), i32(x.K))  # fmt: skip
    stays = rows >= STAYING_ROWS
    one = launch(SOURCE, f"half_rows<{format.name}, {str(stays).lower()}>", grid, 32 * WARPS, *args,
                 shared_bytes=half_bytes(x.K))  # fmt: skip
    return replace(with_rings(one, format.name), staying=STAYING * stays)
