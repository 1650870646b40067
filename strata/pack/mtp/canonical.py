"""The Q2_0 expert blob of an `rt` folder: code bytes and scales in planes, gate and up rows interleaved.

    codes of rows gate 0, up 0, gate 1, up 1, … | codes of down rows | float16 scales in the same order

It holds the same bytes as the GGUF blocks (a float16 scale, then 16 code bytes, per 64 values), in another order.
"""

from __future__ import annotations

import numpy as np

from strata.pack.formats import by_name

Q2_0 = by_name("Q2_0")
CODES = Q2_0.block_bytes - 2


def blob_bytes(D: int, F: int) -> int:
    """Bytes of one expert. ModelError unless D and F are whole blocks."""
    return 2 * F * Q2_0.row_bytes(D) + D * Q2_0.row_bytes(F)


def _planes(blobs: np.ndarray, D: int, F: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Views of blobs (E, blob_bytes): codes (E, F, 2, blocks, 16) and (E, D, blocks, 16), scales alike with 2 bytes."""
    E, wide, narrow = len(blobs), D // 64, F // 64
    sizes = np.cumsum([2 * F * wide * CODES, D * narrow * CODES, 2 * F * wide * 2])
    gate_up, down, gate_up_scales, down_scales = np.split(blobs, sizes, axis=1)
    return (
        gate_up.reshape(E, F, 2, wide, CODES),
        down.reshape(E, D, narrow, CODES),
        gate_up_scales.reshape(E, F, 2, wide, 2),
        down_scales.reshape(E, D, narrow, 2),
    )


def unpack(blobs: np.ndarray, D: int, F: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """uint8 (E, blob_bytes) -> GGUF rows of gate and up (E, F, row_bytes) and of down (E, D, row_bytes)."""
    E, block = len(blobs), Q2_0.block_bytes
    gate_up = np.empty((2, E, F, D // 64, block), np.uint8)
    down = np.empty((E, D, F // 64, block), np.uint8)
    for e in range(E):  # one blob at a time stays in the cache
        codes, down_codes, scales, down_scales = _planes(blobs[e : e + 1], D, F)
        for part in range(2):
            gate_up[part, e, :, :, 2:], gate_up[part, e, :, :, :2] = codes[0, :, part], scales[0, :, part]
        down[e, :, :, 2:], down[e, :, :, :2] = down_codes[0], down_scales[0]
    return gate_up[0].reshape(E, F, -1), gate_up[1].reshape(E, F, -1), down.reshape(E, D, -1)


def pack(gate_up: np.ndarray, down: np.ndarray, D: int, F: int) -> np.ndarray:
    """GGUF rows of one expert, gate then up (2 F, row_bytes) and down (D, row_bytes) -> its blob (blob_bytes,)."""
    blob = np.empty((1, blob_bytes(D, F)), np.uint8)
    codes, down_codes, scales, down_scales = _planes(blob, D, F)
    for part in range(2):
        rows = gate_up[part * F : (part + 1) * F].reshape(F, D // 64, Q2_0.block_bytes)
        codes[0, :, part], scales[0, :, part] = rows[:, :, 2:], rows[:, :, :2]
    rows = down.reshape(D, F // 64, Q2_0.block_bytes)
    down_codes[0], down_scales[0] = rows[:, :, 2:], rows[:, :, :2]
    return blob[0]
