"""Small inputs into the device and results out of it, as nodes of the graphs."""

from __future__ import annotations

from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer

SOURCE = Source("mailbox.cu", ("inbox", "outbox", "copy_values"))


def inbox(host: int, words: int, n_bytes: int, error: int) -> list[Launch]:
    """n_bytes (a multiple of 8) from mapped host memory into device words; the error word is cleared."""
    return [launch(SOURCE, "inbox", 1, 256, pointer(host), pointer(words), i32(n_bytes // 8), pointer(error))]


def outbox(words: int, host: int, n_bytes: int) -> list[Launch]:
    """n_bytes (a multiple of 8) of device words into mapped host memory."""
    return [launch(SOURCE, "outbox", 1, 256, pointer(words), pointer(host), i32(n_bytes // 8))]


def copy_values(source: int, target: int, n: int) -> list[Launch]:
    """n float32 from one place on the device to another."""
    blocks = max(1, min(1024, -(-n // 256)))
    return [launch(SOURCE, "copy_values", blocks, 256, pointer(source), pointer(target), i64(n))]
