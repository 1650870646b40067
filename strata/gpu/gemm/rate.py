"""Products of tensor cores alone, for measurements."""

from __future__ import annotations

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, i32, launch, pointer

SOURCE = Source("gemm/rate.cu", ("tensor_rate",))
BLOCK_OPERATIONS = 8 * 8 * 2 * 16 * 8 * 32
"""Of a block in a round: eight warps, eight products each, multiplications and additions."""


def tensor_rate(blocks: int, rounds: int, out: int) -> list[Launch]:
    """blocks x rounds x BLOCK_OPERATIONS int8 operations; out: address of int32 (blocks,)."""
    need(blocks > 0 and rounds > 0, "products to measure", found=(blocks, rounds))
    return [launch(SOURCE, "tensor_rate", blocks, 256, i32(rounds), pointer(out))]
