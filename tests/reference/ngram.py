"""Hashed n-gram embeddings (PLE): rows of a large table chosen by the last tokens, gated into the streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.geometry import Geometry, NgramGeometry

from .gated_delta import causal_conv
from .hyper_connection import grouped_rms, sigmoid, silu

TABLE = "per_layer_token_embd.weight"
GATE_FLOOR = 1e-6
"""Smallest |s| under the square root of the gate."""


@dataclass(frozen=True)
class NgramState:
    """tokens: the order - 1 tokens before the next row. history (history_rows, C*D): the last conv inputs."""

    tokens: tuple[int, ...]
    history: np.ndarray

    @staticmethod
    def empty(g: Geometry) -> NgramState:
        n = g.ngram
        return NgramState((n.reset_token,) * (n.order - 1), np.zeros((n.history_rows, g.CD)))


def table_rows(tokens: tuple[int, ...], n: NgramGeometry) -> list[int]:
    """Table rows of one position. tokens: the order - 1 predecessors, oldest first, then the token itself.

    A predecessor that is the reset token hides everything before it; before the sequence everything is the reset token.
    """
    newest_first = list(tokens[::-1])
    for i in range(1, len(newest_first)):
        if newest_first[i] == n.reset_token:
            newest_first[i:] = [n.reset_token] * (len(newest_first) - i)
            break
    rows = []
    mix = newest_first[0] * n.multipliers[0]
    for size in range(2, n.order + 1):
        mix ^= newest_first[size - 1] * n.multipliers[size - 1]
        for _ in range(n.heads_per_order):
            head = len(rows)
            rows.append(mix % n.moduli[head] + n.offsets[head])
    return rows


def all_rows(tokens: list[int], state: NgramState, n: NgramGeometry) -> np.ndarray:
    """Table rows (T, heads) int64 of the tokens that follow `state`."""
    stream = [*state.tokens, *tokens]
    return np.array([table_rows(tuple(stream[t : t + n.order]), n) for t in range(len(tokens))], np.int64)


def ngram_block(X, tokens: list[int], weights, scope, g: Geometry, state: NgramState) -> tuple[np.ndarray, NgramState]:
    """The streams X (T, C, D) after the block, and the state after the last row. `weights` holds the table."""
    T, n = len(X), g.ngram
    rows = all_rows(tokens, state, n)
    e = weights.rows(TABLE, rows.reshape(-1)).reshape(T, n.width)

    key = scope.product("ple_key.weight", e).reshape(X.shape)
    key = grouped_rms(key, scope.vector("ple_norm_key.weight"), g.rms_eps)
    query = grouped_rms(X, scope.vector("ple_norm_query.weight"), g.rms_eps)
    s = (key * query).sum(axis=2) / np.sqrt(g.D)
    gate = sigmoid(np.sign(s) * np.sqrt(np.maximum(np.abs(s), GATE_FLOOR)))
    gated = gate[:, :, None] * scope.product("ple_value.weight", e)[:, None, :]

    conv_in = grouped_rms(gated, scope.vector("ple_norm_conv.weight"), g.rms_eps).reshape(T, g.CD)
    mixed = causal_conv(state.history, conv_in, scope.matrix("ple_conv1d.weight"), n.dilation)
    history = np.concatenate([state.history, conv_in])[T:]
    last_tokens = tuple([*state.tokens, *tokens][-(n.order - 1) :])
    return X + gated + silu(mixed).reshape(X.shape), NgramState(last_tokens, history)
