"""Dense products with matrices of few rows: the warps of a block share out the chunks of eight rows (split.cuh), or of
four rows for one column (spread.cuh)."""

from __future__ import annotations

from strata.base.errors import need
from strata.gpu.activations import Activations
from strata.gpu.gemv import choices
from strata.gpu.gemv.choices import brings_column, chunks_of, column_bytes
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.gpu.relayout import LAYOUTS, ROWS
from strata.pack.formats import BlockFormat

WITH_MINIMA = ("Q4_K", "Q5_K")
"""Formats of these kernels whose rows have minima."""
SPLIT_ROWS = 8
"""Of a block."""
SPLIT_COLUMNS, SPLIT_STEPS = 4, 8
"""Most columns of a block, and steps of a row that a round holds."""
SPLIT_FEW_ROWS, SPLIT_WARPS = 2048, 5
"""More rows than that are blocks of at most so many warps: three have room on a processor instead of two."""
SPREAD_WARPS, SPREAD_BYTES = 4, 31 << 10
"""Warps of a block for one column, and most bytes of terms of a round. With the column they fit into 48 KiB."""


def split_rows(
    source: Source, format: BlockFormat, weights: int, rows: int, x: Activations, y: int, y_stride: int
) -> Launch:
    """The launch of a product whose blocks have eight rows, by the kernel in the format's source."""
    chunks = chunks_of(format, x.K)
    most = min(8 if rows <= SPLIT_FEW_ROWS else SPLIT_WARPS, SPLIT_STEPS // LAYOUTS[format.name].steps)
    warps = min(range(4, most + 1), key=lambda w: (-(-chunks // w) * w, -w))
    args = (pointer(weights), i32(x.T), pointer(x.codes), pointer(x.scales), pointer(x.sums), pointer(y), i64(y_stride),
            i32(rows), i32(x.K))  # fmt: skip
    grid = (-(-x.T // SPLIT_COLUMNS), -(-rows // SPLIT_ROWS))
    return launch(source, f"split<{format.name}, 4>", grid, 32 * warps, *args)


def spread_rows(source: Source, format: BlockFormat, weights: int, rows: int, x: Activations, y: int) -> Launch:
    """The launch of a product of one column whose blocks have four rows, likewise."""
    need(x.T == 1 and brings_column(x.K), "a column of a product whose rows are spread", found=(x.T, x.K),
         needed=f"one, of a multiple of 64 values and {choices.MOST_COLUMN_BYTES} bytes at most")  # fmt: skip
    layout, step_bytes = LAYOUTS[format.name], 512 if format.name in WITH_MINIMA else 384
    chunks, loaded = chunks_of(format, x.K), layout.steps * sum(n for _, n in layout.sections)
    own_bytes = column_bytes(x.K, x.group) if x.group == 256 else 0
    at_once = SPREAD_WARPS * layout.steps * min(max(160 // loaded, 2), 6)  # as spread.cuh has it
    steps = chunks * layout.steps
    whole = -(-chunks // SPREAD_WARPS) * SPREAD_WARPS * layout.steps
    most = whole if steps * step_bytes <= SPREAD_BYTES else max(SPREAD_BYTES // (at_once * step_bytes), 1) * at_once
    args = (pointer(weights), pointer(x.codes), pointer(x.scales), pointer(x.sums), pointer(y), i32(rows), i32(x.K),
            i32(own_bytes), i32(most))  # fmt: skip
    return launch(source, f"spread<{format.name}>", -(-rows // ROWS), 32 * SPREAD_WARPS, *args,
                  shared_bytes=own_bytes + (min(steps, most) + layout.steps) * step_bytes)  # fmt: skip
