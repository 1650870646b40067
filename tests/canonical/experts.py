"""Routed and shared experts of one row, without any grouping, and their exact sum."""

from __future__ import annotations

import numpy as np

from strata.base.arithmetic import (
    combine_back,
    combine_terms,
    dot_float,
    fma32,
    quantise,
    sigmoid32,
    swiglu,
    tree_sum,
)


def product_f32(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """w (rows, K) float32 times x (K,)."""
    return dot_float(w, x)


def product_q8_0(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """w uint8 (rows, K / 32 * 34) times x (K,): lane 8 (b mod 2) + j takes values 4j..4j+3 of block b."""
    blocks = w.reshape(len(w), -1, 34)
    d = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[..., 0].astype(np.float32)
    codes = blocks[:, :, 2:].view(np.int8).astype(np.int32)
    x_codes, x_scales, _ = quantise(x, 32)
    dots = (codes * x_codes.reshape(-1, 32).astype(np.int32)).reshape(len(w), -1, 8, 4).sum(-1)
    acc = np.zeros((len(w), 16), np.float32)
    for b in range(blocks.shape[1]):
        lanes = slice(8 * (b % 2), 8 * (b % 2) + 8)
        acc[:, lanes] = fma32(dots[:, b].astype(np.float32), (d[:, b] * x_scales[b])[:, None], acc[:, lanes])
    return tree_sum(acc) + np.float32(0)


def expert(x: np.ndarray, matrices, products, scales=(1, 1, 1)) -> np.ndarray:
    """One expert (gate, up, down) of one row before its weight; the last scale belongs to the combine."""
    g, u = (products[i](matrices[i], x) * np.float32(scales[i]) for i in range(2))
    return products[2](matrices[2], swiglu(g, u))


def combine(weights, outputs, down_scales, shared_gate, shared) -> tuple[np.ndarray, bool]:
    """One row: weights and down_scales (K,), outputs (K, D), shared_gate (), shared (D,) -> y (D,), whether a term
    overflowed."""
    total, overflow = combine_terms(sigmoid32(shared_gate), shared)
    for w, y, s in zip(weights, outputs, down_scales, strict=True):
        with np.errstate(all="ignore"):
            scaled = y * np.float32(s)
        terms, bad = combine_terms(w, scaled)
        total, overflow = total + terms, overflow or bad
    return combine_back(total), overflow
