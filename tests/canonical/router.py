"""The K largest logits and the softmax over them."""

from __future__ import annotations

import numpy as np

from strata.base.arithmetic import exp32


def route(logits: np.ndarray, K: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """One row: logits (E,) -> ids (K,) int32 by descending logit, ties to the lowest id, and weights (K,) float32."""
    ids = np.lexsort((np.arange(len(logits)), -logits))[:K]
    with np.errstate(all="ignore"):
        e = exp32(logits[ids] - logits[ids[0]])
    total = np.float32(0)
    for value in e:
        total = total + value
    weights = e / total
    return ids.astype(np.int32), weights if scale == 1 else weights * np.float32(scale)
