"""Quantised products on the device: matrices in their device layout times quantised rows, by the formats' lane rules.

One kernel per format, in two instances: for one column and for up to four. It multiplies a dense matrix, or those of
the experts that a window's entries want, gate and up together with what follows them where that is possible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.arithmetic import COMBINE_TERMS
from strata.base.errors import need
from strata.gpu.activations import Activations
from strata.gpu.gemv.ahead import AHEAD, ahead
from strata.gpu.gemv.half import half_bytes, half_rows, with_rings
from strata.gpu.gemv.half_split import half_split
from strata.gpu.gemv.huge import HUGE, HUGE_COLUMNS, HUGE_ROWS, huge
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.gpu.relayout import LAYOUTS, ROWS, relayout, relayout_bytes, restore
from strata.pack.formats import BlockFormat

__all__ = ["COLUMNS", "Combine", "Hidden", "Place", "combines", "gemv", "product", "relayout", "relayout_bytes",
           "restore", "source_of"]  # fmt: skip

COLUMNS = (1, 4)
"""Most columns of the two instances of a kernel; weights are read once for that many."""
WIDE_BLOCKS_ROWS = 8192
"""One column of a dense matrix: from here on blocks of eight warps are fastest, four else."""
MOST_COLUMNS = 32
MOST_COLUMN_BYTES = 16 << 10
"""A longer column does not go into shared memory."""
BLOCKS_WANTED = 1024
"""Small matrices are cut into smaller blocks, down to one warp, until there are that many: processors end together."""
NOWHERE = np.uint64(0)
NO_SUMS = (pointer(0),) * 5


SPLIT = ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS", "Q2_0")
"""Formats with a second kernel for matrices of few rows: those that dense tensors of releases have."""
WITH_MINIMA = ("Q4_K", "Q5_K")
"""Those of them whose rows have minima."""
SPLIT_ROWS = 8
SPLIT_MOST_ROWS = 6144
"""Up to here it is faster when the warps of a block share out the rows; above, eight rows a warp."""
HALF_FROM = 3
"""Fewest columns of a dense matrix in Q4_K or Q5_K for tensor cores in float16."""
HALF_LEAST_ROWS = 2048
"""Fewer rows are shared out to the warps of a block."""
HALF_MOST, HALF_Q5_MOST = 5120, 4608
"""Most values of a row in Q4_K and in Q5_K (0: never) for that: four columns must fit beside what is on its way."""
ALONE_ROWS = (2, 5, 6, 7, 8)
"""Windows of so many rows whose products of experts are those of every entry by itself, where they have been measured:
L2 serves who comes second. Three and four rows that want the same experts gain more by reading them once."""
HALF_SPLIT_FROM, HALF_SPLIT_VALUES = 3, 4096
"""Fewest columns and values of a row in Q4_K for those where warps share out the chunks (half_split.py)."""
AHEAD_FROM = 2
"""Fewest columns of a dense matrix whose whole rows are on their way before the inputs are there (ahead.py)."""
SPLIT_COLUMNS, SPLIT_STEPS = 4, 8
"""Most columns of it, and steps of a row that a round holds."""
SPLIT_FEW_ROWS, SPLIT_WARPS = 2048, 5
"""More rows than that are blocks of at most so many warps: three have room on a processor instead of two."""
SHORT_ROWS = {"IQ4_NL": 640}
"""Values of a row whose down products of experts have a kernel of their own."""
SHORT_COLUMNS = 4
"""Most columns at once for which it is taken; 0: never."""
SHORT_PAIRS_OF_ONE, SHORT_PAIRS = 4, 8
"""Times eight rows that a block of it takes, for one column (at most 16) and for more. Fewer blocks start sooner."""
SPREAD_MOST_ROWS = 6144
"""Up to here one column is faster with row blocks of their own and all terms of a row kept."""
SPREAD_WARPS, SPREAD_BYTES = 4, 31 << 10
"""Warps of a block of it, and most bytes of terms of a round. With the column they fit into 48 KiB."""
RING_ROWS, RING_FORMATS = 8192, ("Q8_0",)
"""One column of a lone matrix of so many rows, in a format of many bytes, is fastest by way of rings (huge.py)."""


def _source(file: str, *formats: str) -> Source:
    whole = tuple(f"product<{f}, {M}>" for f in formats for M in COLUMNS)
    shared_out = tuple(f"{kernel}>" for f in formats if f in SPLIT for kernel in (f"split<{f}, 4", f"spread<{f}"))
    return Source(f"gemv/{file}.cu", whole + shared_out)


SMALL4 = _source("small4", "Q4_0", "Q4_1", "IQ4_NL", "MXFP4", "NVFP4")
SMALL5 = _source("small5", "Q5_0", "Q5_1")
Q8_0 = _source("q8_0", "Q8_0")
Q2_0 = _source("q2_0", "Q2_0")
K_QUANTS = _source("k", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
IQ4_XS = _source("iq4_xs", "IQ4_XS")
GATE_UP = Source("gemv/gate_up.cu", ("gate_up",))
SHORT = Source(
    "gemv/short_rows.cu", tuple(f"short_rows<{f}, {K}, {M}>" for f, K in SHORT_ROWS.items() for M in COLUMNS)
)
GRIDS = _source("grids", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")

_SOURCES = {
    instance[8:-4]: s
    for s in (SMALL4, SMALL5, Q8_0, Q2_0, K_QUANTS, IQ4_XS, GRIDS)
    for instance in s.instances
    if instance.startswith("product")
}


def source_of(format: BlockFormat) -> Source:
    """The source that has the kernels of a format."""
    found = _SOURCES.get(format.name)
    need(
        found is not None,
        f"{format.name} has no quantised products",
        needed="a quantised format",
        advice="use float_gemv",
    )
    return found


@dataclass(frozen=True)
class Place:
    """Where relaid matrices lie on the device, 16-byte aligned: a dense one at `address`; that of expert e at
    `address` + e * `stride`, or at the address in word 3 e + `part` of the uint64 `table`."""

    address: int = 0
    stride: int = 0
    table: int = 0
    part: int = 0


@dataclass(frozen=True)
class Entries:
    """Which expert every entry of a window wants, and which entries count. Addresses.

    ids        int32 (n,)
    T          most entries that want the same expert: the rows of the window. 1 says that all experts are different
    decisions  uint8 (n,) or 0 for all: an entry counts if bit decisions[i] of `take` is set; others get zeros
    jobs       instead of decisions: int32, how many jobs there are, then for each the first entry of an expert, and how
               many entries of it to pass over << 16. Up to `columns_of` entries a job; others are left as they are
    most_jobs  there are at most so many; the list has room for them, whatever stands there
    experts    how many there are: ids may be looked at before they are final; 0: they are not
    """

    ids: int
    n: int
    T: int
    decisions: int = 0
    take: int = 2
    jobs: int = 0
    most_jobs: int = 0
    experts: int = 0

    def __post_init__(self) -> None:
        need(not self.jobs or (self.most_jobs > 0 and not self.decisions), "jobs of a product", found=self)


def column_bytes(K: int, group: int) -> int:
    """Shared memory of a block for one column of K values: codes, sums and scales."""
    return -(-(K + K // 4 + 4 * K // group) // 16) * 16


def goes_half(format: BlockFormat, T: int, K: int) -> bool:
    """Whether T columns of K values meet a dense matrix on tensor cores in float16."""
    most = {"Q4_K": HALF_MOST, "Q5_K": HALF_Q5_MOST}.get(format.name, 0)
    return T >= HALF_FROM and K <= most


def goes_half_split(format: BlockFormat, T: int, K: int) -> bool:
    """Whether T columns of K values meet few rows on tensor cores in float16, where warps share out the chunks."""
    return format.name == "Q4_K" and T >= HALF_SPLIT_FROM and K >= HALF_SPLIT_VALUES


def brings_column(K: int) -> bool:
    """Whether a single column of K values goes into shared memory first (kernels.cuh has the same); others take the
    code of several columns."""
    return K % 64 == 0 and column_bytes(K, 32) <= MOST_COLUMN_BYTES


def columns_of(T: int) -> int:
    """Most entries of a job in a window of T rows."""
    return COLUMNS[0] if T == 1 else COLUMNS[1]


@dataclass(frozen=True)
class Hidden:
    """What gate and up together write: `h`, a row for every entry (dense: for every column), in groups of 32.

    up       where the up matrices lie (with a table: one word behind gate)
    factors  float32 (3, experts) on the outputs of gate, up and down by expert, or 0
    """

    up: Place
    h: Activations
    error: int
    where: np.uint64
    factors: int = 0
    experts: int = 0


@dataclass(frozen=True)
class Combine:
    """What the down product of routed experts makes of its outputs in a window of one row, where its y (rows,) is the
    op's result. Addresses.

    sums     int64 (rows,): zeros that are zeros again afterwards
    arrived  uint32, one for eight rows, the same
    weights  float32, one for each entry
    shared   float32 (rows,), outputs of the shared expert, which are there before
    gate     float32, of the shared expert
    factors  float32 by expert on the outputs, or 0
    """

    sums: int
    arrived: int
    weights: int
    shared: int
    gate: int
    error: int
    where: np.uint64
    factors: int = 0


def combine_bytes(rows: int) -> tuple[int, int]:
    """Bytes of the sums and the counters of a `Combine`."""
    return 8 * rows, 4 * -(-rows // 8)


def combines(format: BlockFormat, T: int, K: int) -> bool:
    """Whether the down product of routed experts in a window of T rows, K values long, can `Combine`."""
    return format.group > 0 and T == 1 and brings_column(K)


def _warps(rows: int, source: Source) -> int:
    """Warps of a block for `rows` rows of all matrices; a warp takes eight. Grid formats fill a table first: not too
    small."""
    least = 4 if source is GRIDS else 1
    warps = 8
    while warps > least and -(-rows // (8 * warps)) < BLOCKS_WANTED:
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
    need(0 < T <= MOST_COLUMNS and n % x.T == 0, "columns of a product", found=(T, n, x.T),
         needed=f"at most {MOST_COLUMNS} for a matrix, as many entries for each row")  # fmt: skip
    need(entries is not None or not matrices.table, "a table of matrices needs entries")
    gate_up = hidden is not None and entries is not None and format.name == "Q4_K" and x.K <= HALF_MOST
    short = entries is not None and hidden is None and SHORT_ROWS.get(format.name) == x.K and n == x.T
    if (gate_up or short) and not entries.jobs and T in ALONE_ROWS and brings_column(x.K):
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
            warps = 8 if not entries and rows >= WIDE_BLOCKS_ROWS else 4
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
    if gate_up and T > 1:
        return [_gate_up(matrices, rows, x, entries, hidden, across)]
    if not entries and not hidden and goes_half(format, T, x.K):
        return [half_rows(format, matrices.address, rows, x, y, y_stride or rows)]
    c = combine
    sums = tuple(map(pointer, (c.sums, c.arrived, c.weights, c.shared, c.gate))) if c else NO_SUMS
    if short and M <= SHORT_COLUMNS and rows % 8 == 0:
        per = SHORT_PAIRS_OF_ONE if M == 1 else SHORT_PAIRS
        tiles = -(-rows // (8 * per))
        grid = (across, tiles) if M == 1 else (tiles, across)
        return [launch(SHORT, f"short_rows<{format.name}, {x.K}, {M}>", grid, 128, *args, *sums, i32(per))]
    # Only where a block may meet a lone column: blocks that ask for less are more, and leave more to L1.
    lone = brings_column(x.K) and (M == 1 or (source is not GRIDS and (entries is not None or T % M == 1)))
    return [launch(source, f"product<{format.name}, {M}>", (across, tiles), 32 * warps, *args, *sums,
                   shared_bytes=column_bytes(x.K, x.group) if lone else 0)]  # fmt: skip


def _gate_up(gate: Place, rows: int, x: Activations, entries: Entries, hidden: Hidden, across: int) -> Launch:
    """The launch of gate and up in Q4_K for several rows."""
    h, ring_at = hidden.h, half_bytes(x.K)  # more than a lone column takes
    args = (
        pointer(gate.address), pointer(hidden.up.address), pointer(gate.table), i32(gate.part), i64(gate.stride),
        pointer(entries.ids), pointer(entries.decisions), i32(entries.take), pointer(entries.jobs), i32(entries.n),
        i32(entries.n // x.T), pointer(x.codes), pointer(x.scales), pointer(x.sums), i32(rows), i32(x.K),
        pointer(h.codes), pointer(h.scales), pointer(h.sums), pointer(hidden.factors), i32(hidden.experts),
        pointer(hidden.error), hidden.where, i32(ring_at),
    )  # fmt: skip
    return with_rings(launch(GATE_UP, "gate_up", (rows // 32, across), 256, *args, shared_bytes=ring_at))


def _chunks(format: BlockFormat, K: int) -> int:
    layout = LAYOUTS[format.name]
    return K // format.block_values // (layout.steps * layout.blocks)


def _spread(format: BlockFormat, weights: int, rows: int, x: Activations, y: int, chunks: int) -> Launch:
    """The launch of a product of one column whose row blocks are shared out by their warps (spread.cuh)."""
    need(x.T == 1 and brings_column(x.K), "a column of a product whose rows are spread", found=(x.T, x.K),
         needed=f"one, of a multiple of 64 values and {MOST_COLUMN_BYTES} bytes at most")  # fmt: skip
    layout, step_bytes = LAYOUTS[format.name], 512 if format.name in WITH_MINIMA else 384
    loaded = layout.steps * sum(n for _, n in layout.sections)
    own_bytes = column_bytes(x.K, x.group) if x.group == 256 else 0
    at_once = SPREAD_WARPS * layout.steps * min(max(160 // loaded, 2), 6)  # as spread.cuh has it
    steps = chunks * layout.steps
    whole = -(-chunks // SPREAD_WARPS) * SPREAD_WARPS * layout.steps
    most = whole if steps * step_bytes <= SPREAD_BYTES else max(SPREAD_BYTES // (at_once * step_bytes), 1) * at_once
    args = (pointer(weights), pointer(x.codes), pointer(x.scales), pointer(x.sums), pointer(y), i32(rows), i32(x.K),
            i32(own_bytes), i32(most))  # fmt: skip
    return launch(source_of(format), f"spread<{format.name}>", -(-rows // ROWS), 32 * SPREAD_WARPS, *args,
                  shared_bytes=own_bytes + (min(steps, most) + layout.steps) * step_bytes)  # fmt: skip


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
    source, chunks = source_of(format), _chunks(format, x.K) if format.name in SPLIT else 0
    if form is None:
        several = x.T <= COLUMNS[-1] or goes_half_split(format, x.T, x.K)
        form = "split" if rows <= SPLIT_MOST_ROWS and chunks >= 4 and several else "product"
        form = "spread" if form == "split" and x.T == 1 and brings_column(x.K) and rows <= SPREAD_MOST_ROWS else form
        least = min(RING_ROWS, HUGE_ROWS) if x.T == 1 and format.name in RING_FORMATS else HUGE_ROWS
        form = "huge" if format.name in HUGE and rows >= least and x.K <= HUGE_COLUMNS else form
        split = form == "split" and (rows < HALF_LEAST_ROWS or x.K >= HALF_SPLIT_VALUES)
        form = "product" if goes_half(format, x.T, x.K) and not split else form
        form = "ahead" if form == "product" and x.T >= AHEAD_FROM and AHEAD.get(format.name) == x.K else form
    if form == "product":
        return product(format, Place(weights), rows, x, y, y_stride)
    need(x.group == format.group, f"activations of a product with {format.name}", found=x.group, needed=format.group)
    need(x.K % format.block_values == 0 and rows > 0 and y != 0, f"a row of {x.K} values in {format.name}",
         needed=f"a multiple of {format.block_values}")  # fmt: skip
    M = columns_of(x.T)
    if form == "split" and goes_half_split(format, x.T, x.K):
        return [half_split(weights, rows, x, y, y_stride or rows)]
    if form == "ahead":
        return [ahead(format, weights, rows, x, y, y_stride or rows)]
    if form == "huge":
        return [huge(format, weights, rows, x, y, y_stride or rows, M)]
    if form == "spread":
        return [_spread(format, weights, rows, x, y, chunks)]
    most = min(8 if rows <= SPLIT_FEW_ROWS else SPLIT_WARPS, SPLIT_STEPS // LAYOUTS[format.name].steps)
    warps = min(range(4, most + 1), key=lambda w: (-(-chunks // w) * w, -w))
    args = (pointer(weights), i32(x.T), pointer(x.codes), pointer(x.scales), pointer(x.sums), pointer(y),
            i64(y_stride or rows), i32(rows), i32(x.K))  # fmt: skip
    grid = (-(-x.T // SPLIT_COLUMNS), -(-rows // SPLIT_ROWS))
    return [launch(source, f"split<{format.name}, 4>", grid, 32 * warps, *args)]
