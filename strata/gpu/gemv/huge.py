"""Products with one huge dense matrix, such as a head: weights by way of rings in shared memory (ring.cuh)."""

from __future__ import annotations

from dataclasses import replace

from strata.gpu.activations import Activations
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.gpu.relayout import LAYOUTS, ROWS, row_block_bytes
from strata.pack.formats import BlockFormat

HUGE_ROWS = 65536
"""Fewer rows are for kernels that leave shared memory to their neighbours."""
HUGE_COLUMNS = 8192
"""Most values of a row: the activations of four must fit beside the rings."""
BLOCK_WARPS = 4


def _source(file: str, *formats: str) -> Source:
    return Source(f"gemv/{file}.cu", tuple(f"huge<{f}, {M}>" for f in formats for M in (1, 4)))


K_QUANTS = _source("huge_k", "Q4_K", "Q5_K", "Q6_K")
SMALL = _source("huge_small", "Q8_0", "IQ4_NL", "IQ4_XS")
HUGE = {i.partition("<")[2].partition(",")[0]: s for s in (K_QUANTS, SMALL) for i in s.instances}
"""Their sources by format: those of heads of releases."""


def ring_bytes(format: BlockFormat, M: int, K: int) -> int:
    """Shared memory of a warp for what is under way of its two row blocks, as ring.cuh has it."""
    layout, (stages, most) = LAYOUTS[format.name], (3, 4800) if M == 1 else (4, 2400)
    chunk = ROWS * layout.steps * sum(items * n for items, n in layout.sections)
    span = max(most // (2 * chunk), 1) * chunk
    return 16 * stages + min(stages, -(-row_block_bytes(format, K) // span)) * 2 * span


def area_bytes(M: int, K: int, group: int) -> int:
    """Shared memory for the activations of M rows."""
    return M * K + -(-M * K // group * 4 // 16) * 16 + -(-M * K // 4 // 16) * 16


def huge(format: BlockFormat, weights: int, rows: int, x: Activations, y: int, y_stride: int, M: int) -> Launch:
    """The launch of a product of at most M columns at a time."""
    tiles, rings = -(-rows // (8 * BLOCK_WARPS)), BLOCK_WARPS * ring_bytes(format, M, x.K)
    args = (pointer(weights), i32(x.T), pointer(x.codes), pointer(x.scales), pointer(x.sums), pointer(y), i64(y_stride),
            i32(rows), i32(x.K))  # fmt: skip
    one = launch(HUGE[format.name], f"huge<{format.name}, {M}>", (-(-x.T // M), tiles), 32 * BLOCK_WARPS, *args)
    return replace(one, shared_bytes=area_bytes(M, x.K, format.group) + rings,
                   ring_bytes=area_bytes(M, x.K, format.group) + rings)  # fmt: skip
