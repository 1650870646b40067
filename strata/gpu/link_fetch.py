"""Experts over the link: read from host memory where they lie, and laid out for the products on the way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.gpu.doorbell import Blob
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.gpu.relayout import LAYOUTS, ROWS, relayout_bytes, row_block_bytes
from strata.gpu.relayout_kernel import bit_map
from strata.pack.formats import BlockFormat

SOURCE = Source("link_fetch.cu", ("link_fetch",))

BLOCKS = 264
"""Enough reads under way to fill a link; each block has those of four rows."""

ALIGN = 256


@dataclass(frozen=True)
class Part:
    """One of gate, up and down of an expert: rows x columns of a format; `table` and `field`: see `field_map`."""

    format: BlockFormat
    rows: int
    columns: int
    table: int
    field: int

    @property
    def relaid_bytes(self) -> int:
        return relayout_bytes(self.format, self.rows, self.columns)

    @property
    def row_bytes(self) -> int:
        return self.format.row_bytes(self.columns)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a row in a chunk of the layout."""
        layout = LAYOUTS[self.format.name]
        return layout.steps * layout.blocks * self.format.block_bytes


Parts = tuple[Part, Part, Part]


def field_map(format: BlockFormat, K: int) -> tuple[int, np.ndarray]:
    """(bits of a field, uint16 table): `bit_map` for the largest fields, 8 bits or less, that the layout moves whole.

    An entry tells where the lowest bit of a field comes from.
    """
    bits = bit_map(format, K)
    for field in (8, 4, 2):
        parts = bits.reshape(-1, field)
        first = parts[:, :1]
        if (first % field == 0).all() and (parts == first + np.arange(field, dtype=np.uint16)).all():
            return field, np.ascontiguousarray(first[:, 0])
    return 1, bits


def blob_of(parts: Parts) -> Blob:
    """Where the matrices of an expert lie in a place."""
    sizes = [-(-p.relaid_bytes // ALIGN) * ALIGN for p in parts]
    return Blob(sizes[0], sizes[0] + sizes[1], sum(sizes))


def link_fetch(work: int, raws: int, staging: int, parts: Parts, blocks: int = BLOCKS) -> list[Launch]:
    """Fill the places that `post` gave to experts: `work` is its list, raws uint64 (E, 3) addresses in host memory."""
    blob, shared = blob_of(parts), ROWS * max(p.row_bytes for p in parts)
    need(shared <= 48 << 10, "bytes of an expert's row", found=shared // ROWS, needed="at most 12288")
    need(staging % ALIGN == 0 and all(p.table % 16 == 0 for p in parts), "alignment of places and tables")
    numbers = [i32(getattr(p, n)) for n in ("rows", "row_bytes", "chunk_bytes", "field") for p in parts]
    numbers += [i32(row_block_bytes(p.format, p.columns)) for p in parts]
    args = (pointer(work), pointer(raws), pointer(staging), i64(blob.n_bytes), *(pointer(p.table) for p in parts),
            i64(blob.up_at), i64(blob.down_at), *numbers)  # fmt: skip
    return [launch(SOURCE, "link_fetch", blocks, 256, *args, shared_bytes=shared)]
