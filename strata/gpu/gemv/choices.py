"""Which kernel a product takes: the constants that choose, and what follows from them alone.

Tests and `strata bench gpu --compare` set constants of this module, so whoever reads one reads it from here.
"""

from __future__ import annotations

from strata.gpu.gemv.ahead import AHEAD
from strata.gpu.gemv.huge import HUGE, HUGE_COLUMNS, HUGE_ROWS
from strata.gpu.gemv.sources import COLUMNS, SPLIT
from strata.gpu.relayout import LAYOUTS
from strata.pack.formats import BlockFormat

MOST_COLUMNS = 32
MOST_COLUMN_BYTES = 16 << 10
"""A longer column does not go into shared memory."""
BLOCKS_WANTED = 1024
"""Small matrices are cut into smaller blocks, down to one warp, until there are that many: processors end together."""
WIDE_BLOCKS_ROWS = 8192
"""One column of a dense matrix: from here on blocks of eight warps are fastest, four else."""

SPLIT_MOST_ROWS = 6144
"""Up to here it is faster when the warps of a block share out the rows; above, eight rows a warp."""
SPREAD_MOST_ROWS = 6144
"""Up to here one column is faster with row blocks of their own and all terms of a row kept."""
RING_ROWS, RING_FORMATS = 8192, ("Q8_0",)
"""One column of a lone matrix of so many rows, in a format of many bytes, is fastest by way of rings (huge.py)."""
AHEAD_FROM = 2
"""Fewest columns of a dense matrix whose whole rows are on their way before the inputs are there (ahead.py)."""

HALF_FROM = 3
"""Fewest columns of a dense matrix in Q4_K or Q5_K for tensor cores in float16."""
HALF_LEAST_ROWS = 2048
"""Fewer rows are shared out to the warps of a block."""
HALF_MOST, HALF_Q5_MOST = 5120, 4608
"""Most values of a row in Q4_K and in Q5_K (0: never) for that: four columns must fit beside what is on its way."""
HALF_SPLIT_FROM, HALF_SPLIT_VALUES = 3, 4096
"""Fewest columns and values of a row in Q4_K for those where warps share out the chunks (half_split.py)."""

ALONE_ROWS = (2, 5, 6, 7, 8)
"""Windows of so many rows whose products of experts are those of every entry by itself, where they have been measured:
L2 serves who comes second. Three and four rows that want the same experts gain more by reading them once."""
SHORT_COLUMNS = 4
"""Most columns at once for which the kernel of SHORT_VALUES is taken; 0: never."""
SHORT_PAIRS_OF_ONE, SHORT_PAIRS = 4, 8
"""Times eight rows that a block of it takes, for one column (at most 16) and for more. Fewer blocks start sooner."""


def column_bytes(K: int, group: int) -> int:
    """Shared memory of a block for one column of K values: codes, sums and scales."""
    return -(-(K + K // 4 + 4 * K // group) // 16) * 16


def brings_column(K: int) -> bool:
    """Whether a single column of K values goes into shared memory first (kernels.cuh has the same); others take the
    code of several columns."""
    return K % 64 == 0 and column_bytes(K, 32) <= MOST_COLUMN_BYTES


def columns_of(T: int) -> int:
    """Most entries of a job in a window of T rows."""
    return COLUMNS[0] if T == 1 else COLUMNS[1]


def chunks_of(format: BlockFormat, K: int) -> int:
    """Whole chunks of a row of K values."""
    layout = LAYOUTS[format.name]
    return K // format.block_values // (layout.steps * layout.blocks)


def goes_half(format: BlockFormat, T: int, K: int) -> bool:
    """Whether T columns of K values meet a dense matrix on tensor cores in float16."""
    most = {"Q4_K": HALF_MOST, "Q5_K": HALF_Q5_MOST}.get(format.name, 0)
    return T >= HALF_FROM and K <= most


def goes_half_split(format: BlockFormat, T: int, K: int) -> bool:
    """Whether T columns of K values meet few rows on tensor cores in float16, where warps share out the chunks."""
    return format.name == "Q4_K" and T >= HALF_SPLIT_FROM and K >= HALF_SPLIT_VALUES


def combines(format: BlockFormat, T: int, K: int) -> bool:
    """Whether the down product of routed experts in a window of T rows, K values long, can `Combine`."""
    return format.group > 0 and T == 1 and brings_column(K)


def form_of(format: BlockFormat, rows: int, T: int, K: int) -> str:
    """The form of `gemv` that is fastest for T columns and a matrix (rows, K)."""
    chunks = chunks_of(format, K) if format.name in SPLIT else 0
    several = T <= COLUMNS[-1] or goes_half_split(format, T, K)
    form = "split" if rows <= SPLIT_MOST_ROWS and chunks >= 4 and several else "product"
    form = "spread" if form == "split" and T == 1 and brings_column(K) and rows <= SPREAD_MOST_ROWS else form
    least = min(RING_ROWS, HUGE_ROWS) if T == 1 and format.name in RING_FORMATS else HUGE_ROWS
    form = "huge" if format.name in HUGE and rows >= least and K <= HUGE_COLUMNS else form
    split = form == "split" and (rows < HALF_LEAST_ROWS or K >= HALF_SPLIT_VALUES)
    form = "product" if goes_half(format, T, K) and not split else form
    return "ahead" if form == "product" and T >= AHEAD_FROM and AHEAD.get(format.name) == K else form
