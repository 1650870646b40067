"""Router: ids and weights of the K experts of every row."""

from __future__ import annotations

import numpy as np

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, f32, i32, launch, pointer

EACH = (16, 64)
"""Instances: experts that one lane of the row's warp holds."""
SOURCE = Source("router.cu", tuple(f"router<{n}>" for n in EACH))
MOST_EXPERTS = 128
"""Most experts a row may choose."""


def router(
    logits: int, ids: int, weights: int, T: int, E: int, K: int, scale: float, error: int, where: np.uint64
) -> list[Launch]:
    """logits (T, E) float32 -> ids (T, K) int32 by descending logit and weights (T, K) float32. Addresses."""
    need(1 <= K <= min(E, MOST_EXPERTS), "experts of a row", found=K, needed=f"1..{min(E, MOST_EXPERTS)}")
    need(E % 4 != 0 or logits % 16 == 0, "alignment of logits", found=logits % 16, needed="16 bytes")
    args = (pointer(logits), pointer(ids), pointer(weights), i32(E), i32(K), f32(scale), pointer(error), where)
    each = next((n for n in EACH if 32 * n >= E), 0)
    need(each > 0, "experts of a layer", found=E, needed=f"at most {32 * EACH[-1]}")
    return [launch(SOURCE, f"router<{each}>", T, 32, *args)]
