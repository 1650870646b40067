"""Quantised products on the device: matrices in their device layout times quantised rows, by the formats' lane rules.

One kernel per format, in two instances: for one column and for up to four. It multiplies a dense matrix, or those of
the experts that a window's entries want, gate and up together with what follows them where that is possible. What has
a kernel of its own has a module of its own; choices.py says when it is taken.
"""

from __future__ import annotations

import numpy as np

from strata.base.arithmetic import COMBINE_TERMS
from strata.base.errors import need
from strata.gpu.activations import Activations
from strata.gpu.gemv import choices
from strata.gpu.gemv.ahead import ahead
from strata.gpu.gemv.choices import (
    brings_column,
    column_bytes,
    columns_of,
    combines,
    form_of,
    goes_half,
    goes_half_split,
)
from strata.gpu.gemv.gate_up import gate_up
from strata.gpu.gemv.half import half_rows
from strata.gpu.gemv.half_split import half_split
from strata.gpu.gemv.huge import huge
from strata.gpu.gemv.records import Combine, Entries, Hidden, Place, combine_bytes
from strata.gpu.gemv.sources import COLUMNS, GRIDS, SHORT, SHORT_VALUES, source_of
from strata.gpu.gemv.split import split_rows, spread_rows
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.gpu.relayout import relayout, relayout_bytes, restore
from strata.pack.formats import BlockFormat

__all__ = ["Combine", "Entries", "Hidden", "Place", "columns_of", "combine_bytes", "combines", "gemv", "product",
           "relayout", "relayout_bytes", "restore", "source_of"]  # fmt: skip

NOWHERE = np.uint64(0)
NO_SUMS = (pointer(0),) * 5


def _warps(rows: int, source: Source) -> int:
    """Warps of a block for `rows` rows of all matrices; a warp takes eight. Grid formats fill a table first: not too
    small."""
    least = 4 if source is GRIDS else 1
    warps = 8
    while warps > least and -(-rows // (8 * warps)) < choices.BLOCKS_WANTED:
        warps //= 2
    return warps


def product(
    format: BlockFormat,
    matrices: Place,
    rows: int,
    x: Activations,
    y: int = 0,
    y_stride: int = 0,
    *,
    entries: Entries | None = None,
    hidden: Hidden | None = None,
    combine: Combine | None = None,
) -> list[Launch]:
    """y (x.T or entries, rows) float32 with y_stride values from row to row = matrices (rows, x.K) times rows of x.

    With `entries`, matrices are those of their experts and x has a row for each entry or for each row of the window.
    With `hidden` nothing is written to y: matrices are gate, and silu(gate x) (up x) goes into hidden.h. With `combine`
    y (rows,) is the sum over all experts, the shared one among them.
    """
    source = source_of(format)
    need(x.group == format.group, f"activations of a product with {format.name}", found=x.group, needed=format.group)
    need(x.K % format.block_values == 0 and rows > 0, f"a row of {x.K} values in {format.name}",
         needed=f"a multiple of {format.block_values}")  # fmt: skip
    n = entries.n if entries else x.T
    T = entries.T if entries else x.T
    need(0 < T <= choices.MOST_COLUMNS and n % x.T == 0, "columns of a product", found=(T, n, x.T),
         needed=f"at most {choices.MOST_COLUMNS} for a matrix, as many entries for each row")  # fmt: skip
    need(entries is not None or not matrices.table, "a table of matrices needs entries")
    together = hidden is not None and entries is not None and format.name == "Q4_K" and x.K <= choices.HALF_MOST
    short = entries is not None and hidden is None and SHORT_VALUES.get(format.name) == x.K and n == x.T
    if (together or short) and not entries.jobs and T in choices.ALONE_ROWS and brings_column(x.K):
        T = 1
    M = COLUMNS[0] if T == 1 and brings_column(x.K) else COLUMNS[-1]
    groups = -(-T // M)
    across = groups if not entries else entries.most_jobs if entries.jobs else n * groups
    h = hidden.h if hidden else None
    if combine is not None:
        fits = entries is not None and not (entries.decisions or entries.jobs or hidden or y_stride)
        need(fits and combines(format, T, x.K), "a product that combines", found=(format.name, x.K, entries),
             needed="all entries of one row, which comes into shared memory")  # fmt: skip
        need(n + 1 <= COMBINE_TERMS, "terms of one sum", found=n + 1, needed=f"at most {COMBINE_TERMS}")
    if h is not None:
        need(h.group == 32 and (h.T, h.K) == (n, rows) and rows % 32 == 0, "rows of gate and up together",
             found=(h.T, h.K, h.group), needed=(n, rows, 32))  # fmt: skip
        need(hidden.up.stride == matrices.stride and bool(hidden.up.table) == bool(matrices.table), "gate and up alike")
        warps, tiles = 8, rows // 32
    else:
        need(y != 0, "where the product goes")
        warps = _warps(rows * (entries.most_jobs or n if entries else 1), source)
        if M == 1:  # the warps of a block share the work of bringing the column
            warps = 8 if not entries and rows >= choices.WIDE_BLOCKS_ROWS else 4
        tiles = -(-rows // (8 * warps))
    ends = hidden or combine
    args = (
        pointer(matrices.address), pointer(hidden.up.address if hidden else 0), pointer(matrices.table),
        i32(matrices.part), i64(matrices.stride), pointer(entries.ids if entries else 0),
        pointer(entries.decisions if entries else 0), i32(entries.take if entries else 0),
        pointer(entries.jobs if entries else 0), i32(n), i32(n // x.T),
        pointer(x.codes), pointer(x.scales), pointer(x.sums), pointer(y), i64(y_stride or rows), i32(rows), i32(x.K),
        pointer(h.codes if h else 0), pointer(h.scales if h else 0), pointer(h.sums if h else 0),
        pointer(ends.factors if ends else 0), i32((hidden or entries).experts if hidden or entries else 0),
        pointer(ends.error if ends else 0), ends.where if ends else NOWHERE,
    )  # fmt: skip
    if together and T > 1:
        return [gate_up(matrices, rows, x, entries, hidden, across)]
    if not entries and not hidden and goes_half(format, T, x.K):
        return [half_rows(format, matrices.address, rows, x, y, y_stride or rows)]
    c = combine
    sums = tuple(map(pointer, (c.sums, c.arrived, c.weights, c.shared, c.gate))) if c else NO_SUMS
    if short and M <= choices.SHORT_COLUMNS and rows % 8 == 0:
        per = choices.SHORT_PAIRS_OF_ONE if M == 1 else choices.SHORT_PAIRS
        tiles = -(-rows // (8 * per))
        grid = (across, tiles) if M == 1 else (tiles, across)
        return [launch(SHORT, f"short_rows<{format.name}, {x.K}, {M}>", grid, 128, *args, *sums, i32(per))]
    # Only where a block may meet a lone column: blocks that ask for less are more, and leave more to L1.
    lone = brings_column(x.K) and (M == 1 or (source is not GRIDS and (entries is not None or T % M == 1)))
    return [launch(source, f"product<{format.name}, {M}>", (across, tiles), 32 * warps, *args, *sums,
                   shared_bytes=column_bytes(x.K, x.group) if lone else 0)]  # fmt: skip


def gemv(
    format: BlockFormat,
    weights: int,
    rows: int,
    x: Activations,
    y: int,
    y_stride: int = 0,
    *,
    form: str | None = None,
) -> list[Launch]:
    """y (x.T, rows) float32, y_stride values from row to row (0: rows) = a relaid matrix at `weights` times x.

    form  "product": eight rows a warp; "split": the warps of a block share out the chunks of eight rows (formats of
          SPLIT); "spread": those of four rows, for one column; "huge": weights by way of shared memory (formats of
          HUGE); "ahead": whole rows on their way at once (ahead.py); None: as is fastest
    """
    source = source_of(format)
    form = form_of(format, rows, x.T, x.K) if form is None else form
    if form == "product":
        return product(format, Place(weights), rows, x, y, y_stride)
    need(x.group == format.group, f"activations of a product with {format.name}", found=x.group, needed=format.group)
    need(x.K % format.block_values == 0 and rows > 0 and y != 0, f"a row of {x.K} values in {format.name}",
         needed=f"a multiple of {format.block_values}")  # fmt: skip
    stride = y_stride or rows
    if form == "split" and goes_half_split(format, x.T, x.K):
        return [half_split(weights, rows, x, y, stride)]
    if form == "ahead":
        return [ahead(format, weights, rows, x, y, stride)]
    if form == "huge":
        return [huge(format, weights, rows, x, y, stride, columns_of(x.T))]
    if form == "spread":
        return [spread_rows(source, format, weights, rows, x, y)]
    return [split_rows(source, format, weights, rows, x, y, stride)]
