"""Kernels that only measurements launch: routing from a table instead of from logits, and a copy at full speed."""

from __future__ import annotations

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, f32, i32, i64, launch, pointer

SOURCE = Source("speed.cu", ("replay_ids", "copy_blocks"))


def replay_ids(
    table: int, at: int, n: int, L: int, layer: int, T: int, K: int, ids: int, weights: int
) -> list[Launch]:
    """ids (T, K) int32 and equal weights (T, K) float32 of a layer, from table (n, L, K) int32. Addresses.

    at  uint64: the table's row for row 0 of the window; the last layer of the window moves it on by T, modulo n
    """
    need(0 <= layer < L and n > 0, "layer of replayed routing", found=layer, needed=f"0 .. {L - 1}")
    args = (pointer(table), pointer(at), i32(n), i32(L), i32(layer), i32(T), i32(K), f32(1 / K), pointer(ids),
            pointer(weights))  # fmt: skip
    return [launch(SOURCE, "replay_ids", 1, 256, *args)]


def copy_blocks(source: int, target: int, n_bytes: int) -> list[Launch]:
    """n_bytes, a multiple of 16, from one place on the device to another."""
    need(n_bytes > 0 and n_bytes % 16 == 0, "bytes to copy", found=n_bytes, needed="a multiple of 16")
    blocks = max(1, min(2048, n_bytes // 16 // 256))
    return [launch(SOURCE, "copy_blocks", blocks, 256, pointer(source), pointer(target), i64(n_bytes // 16))]
