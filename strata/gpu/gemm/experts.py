"""Wide products with the matrices of experts: entries sorted by expert, and a product for a batch of experts."""

from __future__ import annotations

from dataclasses import dataclass

from strata.base.errors import need
from strata.gpu.gemm.quantised import (
    MINIMA,
    TILE_WEIGHTS,
    Rows,
    expand,
    group_of,
    multiply,
    shared_bytes,
    tiles_at_once,
)
from strata.gpu.gemv import Place
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.gpu.relayout import row_block_bytes
from strata.pack.formats import BlockFormat

SORT = Source("gemm/sort.cu", ("count_entries", "place_entries"))
PACKED = Source("gemm/packed.cu", tuple(f"packed<{f}>" for f in ("Q4_K", "IQ4_NL")))
PACKED_VALUES = 64
"""Rows whose products take packed matrices have a multiple of that many values."""


def _aligned(n: int) -> int:
    return -(-n // 256) * 256


@dataclass(frozen=True)
class Order:
    """n entries by expert: those of expert e are entries[offsets[e]] .. entries[offsets[e + 1] - 1], ascending.

    offsets, entries  addresses of int32 (E + 1,) and (n,)      counts  of int32 (E,)
    An id outside of 0 .. E - 1 is left out.
    """

    n: int
    E: int
    counts: int
    offsets: int
    entries: int

    @staticmethod
    def n_bytes(n: int, E: int) -> int:
        return _aligned(4 * E) + _aligned(4 * (E + 1)) + _aligned(4 * n)

    @classmethod
    def at(cls, address: int, n: int, E: int) -> Order:
        """In n_bytes(n, E) bytes at `address`."""
        need(n > 0 and E > 0, "entries and experts", found=(n, E), needed="at least one")
        offsets = address + _aligned(4 * E)
        return cls(n, E, address, offsets, offsets + _aligned(4 * (E + 1)))


def sort_entries(ids: int, order: Order) -> list[Launch]:
    """The order of entries whose experts are at address ids, int32 (order.n,), into `order`; the same in every run."""
    count = (pointer(ids), i32(order.n), pointer(order.counts))
    place = (pointer(ids), i32(order.n), i32(order.E), pointer(order.counts), pointer(order.offsets),
             pointer(order.entries))  # fmt: skip
    return [launch(SORT, "count_entries", order.E, 256, *count), launch(SORT, "place_entries", order.E, 256, *place)]


def grouped(
    format: BlockFormat, place: Place, rows: int, x: Rows, y: int, scratch: int, order: Order, first: int = 0,
    experts: int = 0,
) -> list[Launch]:  # fmt: skip
    """y[i] (rows,) float32 = matrix (rows, K) of the expert of entry i times its row of x, for the entries i of experts
    `first` .. `first` + experts - 1 (0: all of them); other rows of y (order.n, rows) are left as they are.

    place    relaid matrices by expert id: address + e * stride, or word 3 e + part of the table. Matrices of experts
             without entries are not read, so their words may hold anything.
    x        a row for every entry, or for every n / x.x.T neighbouring entries
    scratch  scratch_bytes(format, rows, K, experts) bytes, free again afterwards
    BadArgument if formats, groups or sizes do not fit.
    """
    experts = experts or order.E - first
    need(0 <= first and 0 < experts and first + experts <= order.E, "experts of a product", found=(first, experts),
         needed=f"within {order.E}")  # fmt: skip
    need(order.n % x.x.T == 0, "entries of a product", found=order.n, needed=f"a multiple of {x.x.T} rows")
    need(y != 0 and (place.address or place.table), "where the product comes from and goes")
    grid = (-(-rows // TILE_WEIGHTS), tiles_at_once(order.n, order.E), experts)
    return [
        *expand(format, place, rows, x.x.K, scratch, first=first, matrices=experts, offsets=order.offsets),
        *multiply(format, rows, x, y, rows, scratch, "Experts", grid, order=order.entries, offsets=order.offsets,
                  first=first, share=order.n // x.x.T),
    ]  # fmt: skip


def takes_packed(format: BlockFormat, K: int) -> bool:
    """Whether `grouped_packed` has a kernel for matrices with rows of K values."""
    return f"packed<{format.name}>" in PACKED.instances and K % PACKED_VALUES == 0


def grouped_packed(
    format: BlockFormat, place: Place, rows: int, x: Rows, y: int, order: Order, first: int = 0, experts: int = 0
) -> list[Launch]:
    """`grouped` without scratch, and the same bits: matrices are unpacked where they are multiplied."""
    experts, K = experts or order.E - first, x.x.K
    need(takes_packed(format, K), "a product with packed matrices", found=f"{format.name}, rows of {K} values",
         needed=f"{', '.join(PACKED.instances)}, a multiple of {PACKED_VALUES}")  # fmt: skip
    need(0 <= first and 0 < experts and first + experts <= order.E, "experts of a product", found=(first, experts),
         needed=f"within {order.E}")  # fmt: skip
    need(order.n % x.x.T == 0, "entries of a product", found=order.n, needed=f"a multiple of {x.x.T} rows")
    need(y != 0 and (place.address or place.table), "where the product comes from and goes")
    need((x.group, x.x.group) == (group_of(format), format.group), f"rows of a product with {format.name}",
         found=(x.group, x.x.group), needed=(group_of(format), format.group))  # fmt: skip
    grid = (-(-rows // TILE_WEIGHTS), tiles_at_once(order.n, order.E), experts)
    args = (pointer(place.address), pointer(place.table), i32(place.part), i64(place.stride),
            i64(row_block_bytes(format, K)), pointer(x.x.codes), pointer(x.scales), pointer(x.sums), i32(K), i32(rows),
            pointer(y), pointer(order.entries), pointer(order.offsets), i32(first),
            i32(order.n // x.x.T))  # fmt: skip
    shared = shared_bytes(32, int(format.name in MINIMA), "Experts")
    return [launch(PACKED, f"packed<{format.name}>", grid, 256, *args, shared_bytes=shared)]
