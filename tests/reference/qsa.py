"""Sparse attention (QSA): an indexer ranks blocks of cells, the heads attend to the best blocks and the open tail."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.geometry import Geometry

from .hyper_connection import rms, sigmoid


@dataclass(frozen=True)
class QsaState:
    """Cells 0..n-1: rotated keys and values (n, Hkv, dh), raw indexer keys (n, indexer_dim)."""

    keys: np.ndarray
    values: np.ndarray
    raw: np.ndarray

    @staticmethod
    def empty(g: Geometry) -> QsaState:
        cells = np.zeros((0, g.Hkv, g.dh))
        return QsaState(cells, cells, np.zeros((0, g.indexer_dim)))


def rope(x: np.ndarray, positions: np.ndarray, dims: int, base: float) -> np.ndarray:
    """Half-split rotation of the first `dims` values of x (T, ..., d) at positions (T,)."""
    half = dims // 2
    angles = positions[:, None] * base ** (-2.0 * np.arange(half) / dims)
    angles = angles.reshape(len(x), *[1] * (x.ndim - 2), half)
    low, high = x[..., :half], x[..., half:dims]
    turned = [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)]
    return np.concatenate([*turned, x[..., dims:]], axis=-1)


def project(u: np.ndarray, scope, g: Geometry, positions: np.ndarray) -> tuple[np.ndarray, ...]:
    """Rotated queries and gates (T, H, dh), rotated keys and values (T, Hkv, dh)."""
    T = len(u)
    both = scope.product("attn_q.weight", u).reshape(T, g.H, 2, g.dh)
    q, gate = both[:, :, 0], both[:, :, 1]
    k = scope.product("attn_k.weight", u).reshape(T, g.Hkv, g.dh)
    v = scope.product("attn_v.weight", u).reshape(T, g.Hkv, g.dh)
    q = rope(rms(q, scope.vector("attn_q_norm.weight"), g.rms_eps), positions, g.rotary_dims, g.rope_base)
    k = rope(rms(k, scope.vector("attn_k_norm.weight"), g.rms_eps), positions, g.rotary_dims, g.rope_base)
    return q, gate, k, v


def attend(q: np.ndarray, gate: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One row: q, gate (H, dh) over the chosen cells' keys and values (n, Hkv, dh): (H * dh,)."""
    H, dh = q.shape
    group = H // keys.shape[1]
    out = np.empty((H, dh))
    for h in range(H):
        scores = keys[:, h // group] @ q[h] / np.sqrt(dh)
        weights = np.exp(scores - scores.max())
        out[h] = weights @ values[:, h // group] / weights.sum()
    return (out * sigmoid(gate)).reshape(-1)


def block_keys(raw: np.ndarray, scope, g: Geometry) -> np.ndarray:
    """Keys (blocks, indexer_dim) of the complete blocks: mean of the raw keys, norm, rotation by the first cell."""
    n_blocks = len(raw) // g.block_cells
    pooled = raw[: n_blocks * g.block_cells].reshape(n_blocks, g.block_cells, -1).mean(axis=1)
    normed = rms(pooled, scope.vector("indexer.k_norm.weight"), g.rms_eps)
    return rope(normed, np.arange(n_blocks) * g.block_cells, g.rotary_dims, g.rope_base)


def select_cells(scores: np.ndarray, n_cells: int, g: Geometry) -> np.ndarray:
    """Cells, ascending, that a query sees out of 0..n_cells-1: the best complete blocks and the open tail.

    scores (complete blocks,); equal scores go to the lower block. The query's own cell has no privilege.
    """
    order = np.argsort(-scores, kind="stable")
    best = np.sort(order[: g.budget_blocks])
    cells = (best[:, None] * g.block_cells + np.arange(g.block_cells)).reshape(-1)
    tail = np.arange(len(scores) * g.block_cells, n_cells)
    return np.concatenate([cells, tail]).astype(np.int64)


def sparse_attention(u, scope, g: Geometry, state: QsaState) -> tuple[np.ndarray, QsaState, list[np.ndarray], list]:
    """The mixer of a QSA layer: u (T, D) -> y (T, D), the state, and per row the cells attended and block scores."""
    T, start = len(u), len(state.keys)
    positions = np.arange(start, start + T)
    q, gate, k, v = project(u, scope, g, positions)
    raw = np.concatenate([state.raw, scope.product("indexer.k_proj.weight", u)])
    state = QsaState(np.concatenate([state.keys, k]), np.concatenate([state.values, v]), raw)

    row_scores: list[np.ndarray] = []
    if g.block_cells:
        index_q = scope.product("indexer.q_proj.weight", u).reshape(T, g.indexer_heads, g.indexer_dim)
        index_q = rms(index_q, scope.vector("indexer.q_norm.weight"), g.rms_eps)
        index_q = rope(index_q, positions, g.rotary_dims, g.rope_base)
        blocks = block_keys(raw, scope, g)
        scores = np.maximum(index_q @ blocks.T, 0.0).sum(axis=1) / np.sqrt(g.indexer_dim)
        row_scores = [scores[t, : (p + 1) // g.block_cells] for t, p in enumerate(positions)]

    outputs = np.empty((T, g.H * g.dh))
    selections = []
    for t, p in enumerate(positions):
        cells = select_cells(row_scores[t], p + 1, g) if g.block_cells else np.arange(p + 1)
        outputs[t] = attend(q[t], gate[t], state.keys[cells], state.values[cells])
        selections.append(cells)
    return scope.product("attn_output.weight", outputs), state, selections, row_scores
