"""Products of one input with several dense matrices of different formats, quantised or float, as one launch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from strata.base.errors import need
from strata.gpu.activations import Activations
from strata.gpu.float_gemv import HELD_ROWS
from strata.gpu.gemv import choices
from strata.gpu.gemv.choices import brings_column, column_bytes, goes_half
from strata.gpu.gemv.half import HALF_STAGE_BYTES, WARPS, half_bytes
from strata.gpu.gemv.sources import COLUMNS
from strata.gpu.launch import Launch, Source, i32, launch, pointer
from strata.pack.formats import BlockFormat

SOURCE = Source("gemv/mixed.cu", (*(f"mixed<{M}>" for M in COLUMNS), f"mixed<{COLUMNS[-1]}, true>"))
MOST_MATRICES = 5
MOST_BLOCK_BYTES = 40 << 10
"""Of columns in shared memory."""
FLOATS = ("F32", "F16", "BF16")
KINDS = {name: i for i, name in enumerate((*FLOATS, "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q8_0"))}
"""Formats that the kernel is compiled for, by its numbers: those of attention in releases."""
BYTE_STAGES = {"Q3_K": 1984, "IQ4_XS": 1152}
"""Of a chunk that is on its way to a warp, in formats that go to int8 tensor cores (byte_block.cuh)."""
BYTE_MOST, BYTE_MULTIPLE = 5120, {"Q3_K": 512, "IQ4_XS": 256}
"""Most values of a row for that, and what it is a multiple of."""
HALF_LISTS_FROM = 2
"""Fewest columns of a list on tensor cores, in float16 or int8. Two take 11.2 us and not 12.3 (IQ4_XS), 10.7 and not
12.5 (an attention layer's), or the same (Q3_K with Q4_K)."""
Q6_MOST_ROWS = 1024
"""A matrix of Q6_K, which has no products on tensor cores, with more rows than that keeps its list from them."""
HELD_K, HELD_SUM_BYTES = 2560, 32 << 10
"""Beside matrices on tensor cores: values of a row of BF16 that blocks hold in registers (held_rows.cuh; the number of
rows is a multiple of HELD_ROWS then), and a block's shared memory for their sums."""
UNIT_ROWS, FLOAT_UNIT_ROWS = 8, 2
"""Rows of a quantised matrix that a warp takes, and of a float one. With two of these all warps of a delta-rule layer's
widest product have room on 132 processors at once."""


@dataclass(frozen=True)
class Part:
    """A matrix (rows, K) at `address`, 16-byte aligned, relaid if quantised; y address of its output (T, rows)."""

    format: BlockFormat
    address: int
    rows: int
    y: int

    def units(self, half: bool = False) -> int:
        """Warps that it takes. half: beside matrices on tensor cores."""
        rows = UNIT_ROWS if self.format.group else FLOAT_UNIT_ROWS
        return -(-self.rows // (4 if half and self.format.name == "Q6_K" else rows))


def mixed(x: int, T: int, K: int, quantised: dict[int, Activations], parts: list[Part]) -> list[Launch]:
    """y (T, rows) float32 of every part = the part times x.

    x: 16-byte aligned address of float32 (T, K). quantised: its activations by group, for the parts that want them.
    Parts with little work each should come first.
    """
    need(1 <= len(parts) <= MOST_MATRICES and all(p.format.name in KINDS for p in parts), "a list of matrices",
         found=[p.format.name for p in parts], needed=f"up to {MOST_MATRICES} in " + ", ".join(KINDS))  # fmt: skip
    need(0 < T <= choices.MOST_COLUMNS and K % 8 == 0 and x % 16 == 0, "rows of a product", found=(T, K, x % 16),
         needed=f"up to {choices.MOST_COLUMNS} of K values in eights, 16-byte aligned")  # fmt: skip
    for p in parts:
        group = p.format.group
        need(p.rows > 0 and p.address % 16 == 0 and K % p.format.block_values == 0, f"a matrix in {p.format.name}",
             found=(p.rows, K), needed=f"rows of a multiple of {p.format.block_values} values")  # fmt: skip
        made = quantised.get(group)
        need(not group or (made is not None and (made.T, made.K, made.group) == (T, K, group)),
             f"activations of a product with {p.format.name}", found=made, needed=f"groups of {group}")  # fmt: skip
    places: list[np.generic] = []
    for group in (256, 32):
        made = quantised.get(group)
        places += [pointer(at) for at in ((made.codes, made.scales, made.sums) if made else (0, 0, 0))]
    words: list[np.generic] = []
    for p in parts:
        words += [pointer(p.address), pointer(p.y), i32(p.rows), i32(KINDS[p.format.name])]
    words += [pointer(0), pointer(0), i32(0), i32(0)] * (MOST_MATRICES - len(parts))
    if _goes_half(parts, T, K):
        grid = (-(-T // COLUMNS[-1]), sum(-(-p.units(half=True) // WARPS) for p in parts))
        room, less = (_half_room(parts, K, stages) for stages in (4, 2))  # two on Turing
        one = launch(SOURCE, f"mixed<{COLUMNS[-1]}, true>", grid, 32 * WARPS, pointer(x), i32(T), i32(K), i32(0),
                     *places, *words, shared_bytes=room)  # fmt: skip
        return [replace(one, ring_bytes=room - less)]
    own_bytes = column_bytes(K, 32)  # of each warp
    M = COLUMNS[0] if T == 1 and brings_column(K) else COLUMNS[-1]
    units, warps = sum(p.units() for p in parts), 8
    wanted = choices.BLOCKS_WANTED
    while warps > 1 and (-(-units // warps) < wanted or (M == 1 and warps * own_bytes > MOST_BLOCK_BYTES)):
        warps //= 2
    grid = (-(-T // M), -(-units // warps))
    return [launch(SOURCE, f"mixed<{M}>", grid, 32 * warps, pointer(x), i32(T), i32(K), i32(own_bytes), *places, *words,
                   shared_bytes=warps * own_bytes if M == 1 else 0)]  # fmt: skip


def _goes_half(parts: list[Part], T: int, K: int) -> bool:
    """Whether T columns meet a list on tensor cores: all of its quantised matrices, but for small ones in Q6_K."""
    if T < HALF_LISTS_FROM or choices.HALF_FROM > choices.MOST_COLUMNS:
        return False
    large = [p.format for p in parts if p.format.group and (p.format.name != "Q6_K" or p.rows > Q6_MOST_ROWS)]
    return bool(large) and all(goes_half(f, choices.MOST_COLUMNS, K) or _goes_by_bytes(f, K) for f in large)


def _goes_by_bytes(format: BlockFormat, K: int) -> bool:
    """Whether a list has rows of K values in a format on int8 tensor cores."""
    return format.name in BYTE_STAGES and K <= BYTE_MOST and K % BYTE_MULTIPLE[format.name] == 0


def byte_bytes(K: int) -> int:
    """Shared memory of a block for four columns of K values in bytes (byte_block.cuh)."""
    return max(K // 256 * 1296, WARPS * 1280)


def _half_room(parts: list[Part], K: int, stages: int) -> int:
    """Shared memory of a block, with rings of so many stages."""
    formats = {p.format.name for p in parts}
    rooms = [byte_bytes(K) + WARPS * stages * n for name, n in BYTE_STAGES.items() if name in formats]
    rooms += [half_bytes(K) + WARPS * stages * n for name, n in HALF_STAGE_BYTES.items() if name in formats]
    held = K == HELD_K and any(p.format.name == "BF16" and p.rows % HELD_ROWS == 0 for p in parts)
    return max(rooms + [HELD_SUM_BYTES] * held)
