"""Kernels that only measurements launch: logits of a table's experts instead of a model's, and a copy at full speed."""

from __future__ import annotations

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer
from strata.gpu.router import MOST_EXPERTS

SOURCE = Source("speed.cu", ("replay_logits", "copy_blocks"))


def replay_logits(
    table: int, at: int, n: int, L: int, T: int, K: int, E: int, logits: int, arrived: int, moves: bool = True
) -> list[Launch]:
    """logits (L, T, E) float32 from which a router chooses the ids of table (n, L, K) int32, in its order and with
    nearly equal weights. Addresses.

    at       uint64: the table's row for row 0 of the window; moves: afterwards it is T further, modulo n
    arrived  uint32, zero and zero again afterwards
    """
    need(1 <= K <= min(E, MOST_EXPERTS) and n > 0, "replayed experts of a row", found=K,
         needed=f"1..{min(E, MOST_EXPERTS)}")  # fmt: skip
    args = (pointer(table), pointer(at), i32(moves), i32(n), i32(K), i32(E), pointer(logits), pointer(arrived))
    return [launch(SOURCE, "replay_logits", (T, L), 256, *args)]


def copy_blocks(source: int, target: int, n_bytes: int) -> list[Launch]:
    """n_bytes, a multiple of 16, from one place on the device to another."""
    need(n_bytes > 0 and n_bytes % 16 == 0, "bytes to copy", found=n_bytes, needed="a multiple of 16")
    blocks = max(1, min(2048, n_bytes // 16 // 256))
    return [launch(SOURCE, "copy_blocks", blocks, 256, pointer(source), pointer(target), i64(n_bytes // 16))]
