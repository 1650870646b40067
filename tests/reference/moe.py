"""Mixture of experts: router, the K best experts of a row, and the shared expert."""

from __future__ import annotations

import numpy as np

from strata.base.geometry import Geometry

from .hyper_connection import sigmoid, silu


def route(logits: np.ndarray, K: int) -> tuple[np.ndarray, np.ndarray]:
    """The K largest of logits (T, E): ids (T, K) and weights (T, K) that sum to 1.

    Largest first; equal logits go to the lower id.
    """
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :K]
    best = np.take_along_axis(logits, ids, axis=1)
    weights = np.exp(best - best[:, :1])
    return ids, weights / weights.sum(axis=1, keepdims=True)


def mixture(u: np.ndarray, scope, g: Geometry) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """u (T, D) -> y (T, D), expert ids (T, K) with the largest weight first, and their weights (T, K)."""
    ids, weights = route(scope.product("ffn_gate_inp.weight", u), g.K)
    y = np.zeros(u.shape)
    for expert in np.unique(ids):
        rows, slots = np.nonzero(ids == expert)
        gate = scope.product("ffn_gate_exps.weight", u[rows], int(expert))
        up = scope.product("ffn_up_exps.weight", u[rows], int(expert))
        y[rows] += weights[rows, slots, None] * scope.product("ffn_down_exps.weight", silu(gate) * up, int(expert))

    gate, up = scope.product("ffn_gate_shexp.weight", u), scope.product("ffn_up_shexp.weight", u)
    shared = scope.product("ffn_down_shexp.weight", silu(gate) * up)
    strength = sigmoid(u @ scope.vector("ffn_gate_inp_shexp.weight"))
    return y + strength[:, None] * shared, ids, weights
