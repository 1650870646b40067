"""Records that cross the line between runtime and backend."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SUMMARY_TOP = 20
"""Largest unmodified logits that every head row reports."""

CANDIDATES = 64
"""Largest modified logits that every head row reports; sampling with a longer list reads the full row."""


@dataclass(frozen=True)
class HeadRequest:
    """What the caller needs of a window's logits.

    greedy      only the argmax is needed; the rest may be left out of HeadRows (None)
    summary     log-sum-exp and top-20 of the unmodified logits (for logprobs)
    full        keep the full (T, V) logits
    repetition, presence, frequency   penalties; 1.0, 0.0, 0.0 = off (runtime rules: see strata.runtime.sampling)
    history     (n,) int32, tokens that count for penalties before row 0
    rows        (T,) int32, the window's tokens: row j counts history plus rows[: j + 1]
    bias        token id -> additive logit bias
    last_n      row j counts only the last `last_n` tokens of history plus rows[: j + 1]; 0 = all of them
    """

    greedy: bool = True
    summary: bool = False
    full: bool = False
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    history: np.ndarray | None = None
    rows: np.ndarray | None = None
    bias: dict[int, float] = field(default_factory=dict)
    last_n: int = 0

    @property
    def modified(self) -> bool:
        """Whether penalties or bias change the logits before sampling."""
        return bool(self.bias) or self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0


@dataclass
class HeadRows:
    """Per row of a window; T rows.

    argmax       (T,) int32, of the unmodified logits; ties to the lowest id
    logsumexp    (T,) float64, of the unmodified logits, or None
    top_ids      (T, 20) int32 and top_logits (T, 20) float32, descending, ties to the lowest id, or None
    mod_ids, mod_logits   (T, 64) int32 and float32: the largest after penalties and bias, or None
    mod_logsumexp         (T,) float64, of the logits after penalties and bias, or None
    full         (T, V) float32 view, valid until the next window, or None; logits of any other id are read here
    """

    argmax: np.ndarray
    logsumexp: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logits: np.ndarray | None = None
    mod_ids: np.ndarray | None = None
    mod_logits: np.ndarray | None = None
    mod_logsumexp: np.ndarray | None = None
    full: np.ndarray | None = None
