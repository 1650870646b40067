"""Sparse attention, third part: softmax over the chosen cells of T rows, gated."""

from __future__ import annotations

import numpy as np

from strata.base.errors import need
from strata.gpu.activations import Activations, places_of
from strata.gpu.launch import Launch, Source, i32, launch, pointer
from strata.gpu.qsa_append import KvSlots

HEADS_A_BLOCK = (1, 2, 3, 6, 12)
"""Instances: query heads of one KV head that a block serves together; larger groups are split."""
FEWER = (1, 3, 12)
"""The same for heads of other sizes than FULL_HEAD, which no release has: fewer to compile."""

BLOCKS_WANTED = 256
"""Groups of heads are split further, down to single heads, until a launch has that many blocks."""

SOURCE = Source("qsa_attend.cu", (*(f"qsa_tiles<{g}>" for g in FEWER), "qsa_merge"))
FULL = Source("qsa_tiles.cu", tuple(f"qsa_tiles_256<{g}, {b}>" for g in HEADS_A_BLOCK for b in ("false", "true")))
FULL_HEAD = 256
"""Values of a head that have tiles of their own."""
TILE, THREADS = 64, 256
ROWS_A_PIECE = 8
"""Rows of one launch; a chunk takes several, so that its scratch stays that of a window."""


def most_tiles(context: int, block: int, budget: int) -> int:
    """Tiles of the longest list: budget blocks and a tail, the last `budget` cells, or all cells."""
    entries = min(context, budget * block + block - 1) if block else min(context, budget) if budget else context
    return -(-entries // TILE)


def part_bytes(T: int, H: int, dh: int, context: int, block: int, budget: int) -> int:
    """Bytes of the scratch for tiles of T rows: room for the longest list in every context, so that a longer context
    costs its cells and no scratch. Short ones have 6 MB too much for it, five experts of thousands."""
    longest = budget * block + block - 1 if block else budget or context
    return 4 * min(T, ROWS_A_PIECE) * H * most_tiles(longest, block, budget) * (dh + 2)


def qsa_attend(
    q: int, q_gate: int, y: int, pos: tuple[int, ...], cells: KvSlots, blocks: int, first: int, parts: int, T: int,
    H: int, Hkv: int, dh: int, block: int, budget: int, context: int, error: int, where: np.uint64,
    *, quantised: tuple[Activations, ...] = (),
) -> list[Launch]:  # fmt: skip
    """y (T, H, dh) from q (T, H, dh), gates in q_gate (T, H, 2, dh) and the K and V cells.

    quantised: where up to 8 rows of y go as activations as well, at most one of each group, a head in whole groups.

    pos: addresses of int64 positions, one for every piece of 8 rows. blocks (T, budget) int32 or 0 for dense attention
    over the last `budget` cells (0: all) from the int64 at `first` (0: none) on. parts: scratch of part_bytes.
    """
    need(len(pos) == -(-T // ROWS_A_PIECE), "positions of the pieces of rows", found=len(pos))
    fits = all((q.T, q.K) == (T, H * dh) and dh % q.group == 0 for q in quantised)
    need(not quantised or (len(pos) == 1 and fits), "activations of attention", found=(T, H, dh),
         needed="one piece of rows, heads in whole groups")  # fmt: skip
    out = []
    for piece, position in enumerate(pos):
        skip = piece * ROWS_A_PIECE
        chosen = blocks + 4 * skip * budget if blocks else 0
        out += attend_rows(q + 4 * skip * H * dh, q_gate + 8 * skip * H * dh, y + 4 * skip * H * dh, position, cells,
                           chosen, first, parts, min(ROWS_A_PIECE, T - skip), H, Hkv, dh, block, budget, context, error,
                           where, quantised=quantised)  # fmt: skip
    return out


def attend_rows(
    q: int, q_gate: int, y: int, position: int, cells: KvSlots, blocks: int, first: int, parts: int, rows: int, H: int,
    Hkv: int, dh: int, block: int, budget: int, context: int, error: int, where: np.uint64,
    *, quantised: tuple[Activations, ...] = (), full: bool = True,
) -> list[Launch]:  # fmt: skip
    """qsa_attend of one piece of `rows` rows from the int64 at `position` on; parts: scratch for that many rows.

    Without `full`, heads of 256 values take the tiles of any other size: the same bits.
    """
    need(H % Hkv == 0, "query heads do not divide among KV heads", found=f"{H}, {Hkv}")
    group = H // Hkv
    tiles, scale = most_tiles(context, block, budget), np.float32(1) / np.sqrt(np.float32(dh))
    splits = -(-group // HEADS_A_BLOCK[-1])
    while splits < group and tiles * Hkv * splits * rows < BLOCKS_WANTED:
        splits += 1
    full = full and dh == FULL_HEAD
    heads = next(g for g in (HEADS_A_BLOCK if full else FEWER) if g >= -(-group // splits))
    args = (pointer(q), pointer(position), pointer(cells.k), pointer(cells.k_scales), pointer(cells.v),
            pointer(cells.v_scales), pointer(blocks), pointer(first), pointer(parts), i32(H), i32(Hkv))  # fmt: skip
    rest = (i32(block), i32(budget), i32(splits), i32(tiles), scale, pointer(error), where)
    grid, queries_bytes = (Hkv * splits, rows, tiles), 4 * heads * (dh + TILE)
    if full:
        int8 = cells.k_scales != 0
        kernel = f"qsa_tiles_256<{heads}, {'true' if int8 else 'false'}>"
        values_bytes = TILE * (2 * dh + (8 if int8 else 0))
        scored = launch(FULL, kernel, grid, THREADS, *args, *rest, shared_bytes=values_bytes + queries_bytes)
    else:
        scored = launch(SOURCE, f"qsa_tiles<{heads}>", grid, THREADS, *args, i32(dh), *rest, shared_bytes=queries_bytes)
    merge = (pointer(parts), pointer(q_gate), pointer(y), pointer(position), pointer(first), i32(H), i32(dh),
             i32(block), i32(budget), i32(tiles), *places_of(quantised), pointer(error), where)  # fmt: skip
    return [scored, launch(SOURCE, "qsa_merge", (H, rows), THREADS, *merge)]
