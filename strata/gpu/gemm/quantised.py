"""Wide products with quantised matrices: the expansion into codes and scales, and the product itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.gpu.activations import Activations
from strata.gpu.gemv import Place
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.gpu.relayout import LAYOUTS, ROWS
from strata.pack.formats import BlockFormat

EXPAND_BLOCKS = Source(
    "gemm/expand_blocks.cu",
    tuple(
        f"expand<{f}>"
        for f in ("Q4_0", "Q4_1", "IQ4_NL", "MXFP4", "NVFP4", "Q5_0", "Q5_1", "Q8_0", "Q2_0", "IQ4_XS", "Q2_K", "Q3_K",
                  "Q4_K", "Q5_K", "Q6_K")
    ),
)  # fmt: skip
EXPAND_GRIDS = Source(
    "gemm/expand_grids.cu",
    tuple(f"expand<{f}>" for f in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")),
)
TILE_WEIGHTS = 128
TILE_ROWS = {"Dense": 64, "Experts": 64}
"""Weights and rows of a block, by the names of tiles in quantised.cu. Wider ones (128 x 128) are not faster."""
PRODUCT = Source(
    "gemm/quantised.cu",
    ("prepare", *(f"wide<{g}, {least}, {tile}>" for g in (32, 16) for least in (0, 1) for tile in TILE_ROWS)),
)
GROUPS_16 = frozenset(("NVFP4", "Q2_K", "Q3_K", "Q6_K", "IQ2_XS", "IQ2_S", "IQ1_M"))
MINIMA = frozenset(("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"))
K_TILE = 64
"""Values of a row in one step of a product; expanded rows are filled up with zeros to a multiple."""
UNITS_PER_BLOCK = {EXPAND_BLOCKS: 32, EXPAND_GRIDS: 128}
"""Pieces of a matrix that a block of the expansion takes: grid formats fill a table first."""


def _aligned(n: int) -> int:
    return -(-n // 256) * 256


def _padded(K: int) -> int:
    return -(-K // K_TILE) * K_TILE


def group_of(format: BlockFormat) -> int:
    """Values of an expanded matrix that share a scale, 32 or 16: the `group` of the Rows it meets."""
    _source(format)
    return 16 if format.name in GROUPS_16 else 32


def _source(format: BlockFormat) -> Source:
    found = next((s for s in (EXPAND_BLOCKS, EXPAND_GRIDS) if f"expand<{format.name}>" in s.instances), None)
    need(found is not None, f"{format.name} has no quantised products", needed="a quantised format",
         advice="use float_gemm")  # fmt: skip
    return found


@dataclass(frozen=True)
class Rows:
    """T quantised rows of K values with what a wide product needs of every `group` (32 or 16) values.

    scales, sums  addresses of float32 (T, ceil(K / 64) * 64 / group): the row's scale for the group, and that times the
                  sum of its codes. `prepare` writes them; 256-byte aligned.
    """

    x: Activations
    group: int
    scales: int
    sums: int

    @staticmethod
    def n_bytes(T: int, K: int, group: int) -> int:
        return 2 * _aligned(4 * T * _padded(K) // group)

    @classmethod
    def at(cls, address: int, x: Activations, group: int) -> Rows:
        """In n_bytes(x.T, x.K, group) bytes at `address`."""
        need(group in (16, 32), "values that share a scale", found=group, needed="16 or 32")
        need(address % 256 == 0, "address of prepared rows", found=address, needed="a multiple of 256")
        return cls(x, group, address, address + _aligned(4 * x.T * _padded(x.K) // group))


def prepare(rows: Rows) -> list[Launch]:
    """Scales and sums of rows.x (codes, scales and sums as `quantise` writes them) into `rows`."""
    x, groups = rows.x, _padded(rows.x.K) // rows.group
    args = (pointer(x.scales), pointer(x.sums), pointer(rows.scales), pointer(rows.sums), i32(x.T), i32(x.K),
            i32(x.group), i32(rows.group), i32(groups))  # fmt: skip
    return [launch(PRODUCT, "prepare", -(-x.T * groups // 256), 256, *args)]


@dataclass(frozen=True)
class _Expanded:
    """Offsets in an expanded matrix of (rows, K): codes int8 (rows, padded K) at 0, scales and minima float32 (rows,
    padded K / group)."""

    scales: int
    minima: int
    n_bytes: int

    @classmethod
    def of(cls, format: BlockFormat, rows: int, K: int) -> _Expanded:
        need(K > 0 and K % format.block_values == 0 and rows > 0, f"a matrix of {rows} x {K} in {format.name}",
             needed=f"rows of a multiple of {format.block_values} values")  # fmt: skip
        whole = -(-rows // ROWS) * ROWS  # row blocks are expanded as a whole
        codes = _aligned(whole * _padded(K))
        side = _aligned(4 * whole * _padded(K) // group_of(format))
        return cls(codes, codes + side, codes + side * (2 if format.name in MINIMA else 1))


def scratch_bytes(format: BlockFormat, rows: int, K: int, matrices: int = 1) -> int:
    """Bytes of scratch, 256-byte aligned, that `gemm`, or `grouped` with that many experts at a time, needs."""
    return matrices * _Expanded.of(format, rows, K).n_bytes


def expand(
    format: BlockFormat, place: Place, rows: int, K: int, scratch: int, *, first: int = 0, matrices: int = 1,
    offsets: int = 0,
) -> list[Launch]:  # fmt: skip
    """Relaid matrices `first`, .., `first` + matrices - 1 of `place`, (rows, K) each, into scratch one after the other.

    offsets  int32 (at least first + matrices + 1,) or 0: a matrix without entries, offsets[e] = offsets[e + 1], is left
             out, and its place is not read
    """
    source, layout, out = _source(format), LAYOUTS[format.name], _Expanded.of(format, rows, K)
    need(scratch % 256 == 0, "address of scratch", found=scratch, needed="a multiple of 256")
    blocks = K // format.block_values
    chunks = blocks // (layout.steps * layout.blocks)
    pieces = chunks + -(-(blocks - chunks * layout.steps * layout.blocks) // layout.blocks)
    units, per_block = -(-rows // 4) * pieces, UNITS_PER_BLOCK[source]
    args = (pointer(place.address), pointer(place.table), i32(place.part), i64(place.stride), pointer(offsets),
            i32(first), i32(rows), i32(K), i32(pieces), i32(per_block), pointer(scratch), i64(out.scales),
            i64(out.minima), i64(out.n_bytes))  # fmt: skip
    return [launch(source, f"expand<{format.name}>", (-(-units // per_block), matrices), 256, *args)]


def shared_bytes(group: int, least: int, tile: str) -> int:
    """Two stages: codes, scales and minima of a step for the weights and the rows of a tile."""
    return 2 * (TILE_WEIGHTS + TILE_ROWS[tile]) * (K_TILE + K_TILE // group * 4 * (1 + least))


def multiply(
    format: BlockFormat, rows: int, x: Rows, y: int, y_stride: int, scratch: int, tile: str, grid: tuple[int, int, int],
    *, order: int = 0, offsets: int = 0, first: int = 0, share: int = 1,
) -> list[Launch]:  # fmt: skip
    """The product itself, on expanded matrices; `gemm` and `grouped` say what goes where."""
    need(x.group == group_of(format), f"prepared rows of a product with {format.name}", found=x.group,
         needed=group_of(format))  # fmt: skip
    need(x.x.group == format.group, f"activations of a product with {format.name}", found=x.x.group,
         needed=format.group)  # fmt: skip
    out, least = _Expanded.of(format, rows, x.x.K), int(format.name in MINIMA)
    args = (pointer(scratch), i64(out.scales), i64(out.minima), i64(out.n_bytes), pointer(x.x.codes),
            pointer(x.scales), pointer(x.sums), i32(x.x.K), i32(x.x.T), i32(rows), pointer(y), i64(y_stride or rows),
            pointer(order), pointer(offsets), i32(first), i32(share))  # fmt: skip
    kernel = f"wide<{x.group}, {least}, {tile}>"
    return [launch(PRODUCT, kernel, grid, 256, *args, shared_bytes=shared_bytes(x.group, least, tile))]


def gemm(
    format: BlockFormat, weights: int, rows: int, x: Rows, y: int, scratch: int, y_stride: int = 0
) -> list[Launch]:
    """y (x.x.T, rows) float32, y_stride values from row to row (0: rows) = a relaid matrix at `weights` times x.

    scratch  scratch_bytes(format, rows, K) bytes, free again afterwards
    BadArgument if formats, groups or sizes do not fit.
    """
    need(y != 0, "where the product goes")
    grid = (-(-x.x.T // TILE_ROWS["Dense"]), -(-rows // TILE_WEIGHTS), 1)
    return [
        *expand(format, Place(weights), rows, x.x.K, scratch),
        *multiply(format, rows, x, y, y_stride, scratch, "Dense", grid),
    ]


def tiles_at_once(entries: int, experts: int) -> int:
    """Blocks that share the row tiles of one expert: about twice what it has on average, at most 16."""
    return int(np.clip(-(-2 * entries // (experts * TILE_ROWS["Experts"])), 1, 16))
