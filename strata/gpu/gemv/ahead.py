"""Products of several columns with dense matrices of few bits: whole rows are asked for before the inputs are there."""

from __future__ import annotations

from strata.gpu.activations import Activations
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.pack.formats import BlockFormat

AHEAD = {"Q2_0": 2560}
"""Values of a row that registers hold, by format."""
COLUMNS = (2, 3, 4)
"""Instances: columns at once."""
BLOCK_ROWS = 32
SOURCE = Source("gemv/ahead.cu", tuple(f"ahead<{f}, {K}, {N}>" for f, K in AHEAD.items() for N in COLUMNS))


def ahead(format: BlockFormat, weights: int, rows: int, x: Activations, y: int, y_stride: int) -> Launch:
    """The launch of a product of x.T columns, two at least, with a relaid matrix (rows, x.K) at `weights`."""
    N = min(x.T, COLUMNS[-1])
    args = (pointer(weights), i32(x.T), pointer(x.codes), pointer(x.scales), pointer(x.sums), pointer(y),
            i64(y_stride), i32(rows))  # fmt: skip
    return launch(SOURCE, f"ahead<{format.name}, {x.K}, {N}>", (-(-x.T // N), -(-rows // BLOCK_ROWS)), 128, *args)
