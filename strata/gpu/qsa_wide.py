"""Sparse attention over the rows of a prefill chunk: the best blocks of every row, slab by slab, and attention."""

from __future__ import annotations

import numpy as np

from strata.base.errors import need
from strata.gpu import qsa_select
from strata.gpu.launch import Launch, Source, i32, launch, pointer
from strata.gpu.qsa_append import KvSlots

SOURCE = Source("qsa_wide.cu", ("qsa_wide_scores",))
HEAD_SIZES, HEADS_A_BLOCK = (64, 128, 256), 16
ATTEND = Source("qsa_wide_attend.cu", tuple(f"qsa_wide_attend<{n}>" for n in HEAD_SIZES))
TILE, SLICE = 64, 32
SLAB_ROWS = 256
"""Rows whose scores lie in scratch together."""
POSITION_ROWS = 64
"""Rows from entry to entry of a chunk's table of positions."""


def score_bytes(T: int, context: int, block: int) -> int:
    """Bytes of the scratch for scores of a chunk of T rows."""
    return 4 * min(T, SLAB_ROWS) * (context // block)


def qsa_wide_select(
    iq: int, keys_slot: int, positions: int, blocks: int, scores: int, T: int, heads: int, dim: int, block: int,
    budget: int, context: int, error: int, where: np.uint64,
) -> list[Launch]:  # fmt: skip
    """blocks (T, budget) int32 ascending, from iq (T, heads, dim) and the pooled keys (context / block, dim).

    positions: address of int64 positions of rows 0, 64, 128, ..; scores: scratch of score_bytes.
    """
    need(dim % SLICE == 0, "values of an indexer head", found=dim, needed=f"a multiple of {SLICE}")
    most, out = context // block, []
    for row0 in range(0, T, SLAB_ROWS):
        rows = min(SLAB_ROWS, T - row0)
        args = (pointer(iq), pointer(keys_slot), pointer(positions), pointer(scores), i32(row0), i32(rows), i32(heads),
                i32(dim), i32(block), i32(budget), i32(most), pointer(error), where)  # fmt: skip
        grid = (-(-most // TILE), -(-rows // TILE))
        mine = positions + 8 * (row0 // POSITION_ROWS)
        out += [
            launch(SOURCE, "qsa_wide_scores", grid, 256, *args),
            *qsa_select.select(scores, mine, blocks + 4 * row0 * budget, rows, block, budget, most),
        ]
    return out


def qsa_wide_attend(
    q: int, q_gate: int, y: int, pos: int, cells: KvSlots, blocks: int, T: int, H: int, Hkv: int, dh: int, block: int,
    budget: int, error: int, where: np.uint64,
) -> list[Launch]:  # fmt: skip
    """y (T, H, dh) from q (T, H, dh), gates in q_gate (T, H, 2, dh) and the K and V cells.

    pos: address of the int64 position of row 0. blocks (T, budget) int32 or 0 for dense attention over all cells.
    """
    need(H % Hkv == 0, "query heads do not divide among KV heads", found=f"{H}, {Hkv}")
    need(dh in HEAD_SIZES, "values of an attention head", found=dh, needed=", ".join(map(str, HEAD_SIZES)))
    splits, scale = -(-(H // Hkv) // HEADS_A_BLOCK), np.float32(1) / np.sqrt(np.float32(dh))
    args = (pointer(q), pointer(q_gate), pointer(pos), pointer(cells.k), pointer(cells.k_scales), pointer(cells.v),
            pointer(cells.v_scales), pointer(blocks), pointer(y), i32(H), i32(Hkv), i32(block if blocks else 0),
            i32(budget), i32(splits), scale, pointer(error), where)  # fmt: skip
    return [launch(ATTEND, f"qsa_wide_attend<{dh}>", (Hkv * splits, T), 128, *args)]
