"""How well a model predicts tokens: nats per token from logits that pass by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Sink = Callable[[int, np.ndarray], None]


@dataclass(frozen=True)
class Score:
    """Prediction of a text: tokens predicted, nats per token, perplexity = exp(nats)."""

    tokens: int
    nats: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)


def score_tokens(ids: np.ndarray, read: Callable[[Sink], None]) -> Score:
    """The score of ids[1:]. read(sink) calls sink(first row, (n, V) float32 logits) for all rows in order."""
    total = 0.0

    def sink(first: int, rows: np.ndarray) -> None:
        nonlocal total
        following = ids[first + 1 : first + 1 + len(rows)]
        used = rows[: len(following)].astype(np.float64)
        if len(used) == 0:
            return
        top = used.max(axis=1)
        total += float(
            (top + np.log(np.exp(used - top[:, None]).sum(axis=1)) - used[np.arange(len(used)), following]).sum()
        )

    read(sink)
    return Score(len(ids) - 1, total / (len(ids) - 1))
