"""Looking inside a loaded model's CPU backend, op by op."""

from __future__ import annotations

import numpy as np

import strata
from strata.runtime.session import SessionState


def route(model: strata.Model, tokens: np.ndarray) -> np.ndarray:
    """(L, T, K) expert ids of every layer and row, read in windows of 8 from an empty state."""
    backend = model._backend
    session = SessionState(backend, model.context, checkpoints=0)
    rows = []

    def keep(op) -> None:
        if op.kind == "router":
            rows[-1].append(backend.memory.arrays["moe.ids"].reshape(-1, model.geometry.K)[: len(part)].copy())

    for start in range(0, len(tokens), 8):
        part = np.asarray(tokens[start : start + 8], np.int32)
        rows.append([])
        backend.window(session.state, part, session.previous, after_op=keep)
        session.commit(part, len(part))
    return np.concatenate([np.stack(r) for r in rows], axis=1)
