"""Token embedding: rows of the table, in the blocks of the file, into all streams."""

from __future__ import annotations

import numpy as np

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.pack.formats import FORMATS, BlockFormat
from strata.pack.grids import GRID, SIGNS

LOOKUP_FORMATS = tuple(sorted(i for i, f in FORMATS.items() if f.activation != "none"))
SOURCE = Source("embed.cu", tuple(f"embed<{i}>" for i in LOOKUP_FORMATS))


def tables(format: BlockFormat) -> tuple[np.ndarray, np.ndarray] | None:
    """(grid int8, signs uint8) that must lie on the device for a format, or None."""
    return (np.ascontiguousarray(GRID[format.name]), SIGNS) if format.name in GRID else None


def embed(
    tokens: int, w: int, format: BlockFormat, row_bytes: int, grid: int, signs: int, y: int, T: int, C: int, D: int,
    V: int, error: int, where: np.uint64,
) -> list[Launch]:  # fmt: skip
    """y (T, C, D) float32: the table's row of each token (T,) int32, C times.

    w: address of V rows of blocks, row_bytes apart; grid and signs: addresses of `tables`, 0 where there are none.
    """
    need(format.ggml_id in LOOKUP_FORMATS, f"rows of {format.name} cannot be looked up", found=format.name,
         needed="a type that products take")  # fmt: skip
    need((grid != 0) == (tables(format) is not None), f"tables of {format.name}")
    args = (pointer(tokens), pointer(w), i64(row_bytes), pointer(grid), pointer(signs), pointer(y), i32(C), i32(D),
            i32(V), pointer(error), where)  # fmt: skip
    return [launch(SOURCE, f"embed<{format.ggml_id}>", (-(-D // 256), T), 256, *args)]
