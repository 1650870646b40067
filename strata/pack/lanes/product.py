"""Sum of a quantised product by its format's lane rule.

A rule turns the elementwise integer products into steps: at every step, 16 exact integers meet 16 exact weight scales
and 16 activation scales, and each lane takes one fma(float(I), fl(weight scale * activation scale), lane). Formats with
minima have four more lanes. The lanes are added by a fixed tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strata.base.arithmetic import fma32, tree_sum
from strata.base.errors import need
from strata.pack.formats import BlockFormat
from strata.pack.lanes.integers import Weights, read_weights

f32 = np.float32


@dataclass(frozen=True)
class _Steps:
    """All steps of a product: integers int32, weight and activation scales float32, each broadcastable to
    (n, steps, lanes); the last step may be padded with zeros."""

    integers: np.ndarray
    weight_scales: np.ndarray
    activation_scales: np.ndarray

    def sum(self) -> np.ndarray:
        """Final lanes, float32 (n, lanes)."""
        with np.errstate(all="ignore"):
            scales = np.broadcast_to(self.weight_scales * self.activation_scales, self.integers.shape)
        lanes = np.zeros((self.integers.shape[0], self.integers.shape[2]), f32)
        for k in range(self.integers.shape[1]):
            lanes = fma32(self.integers[:, k].astype(f32), scales[:, k], lanes)
        return lanes


def _by_steps(x: np.ndarray, lanes: int) -> np.ndarray:
    """(n, blocks, lanes a block) -> (n, steps, lanes): blocks share steps; the last is zero-filled."""
    n, blocks, per_block = x.shape
    missing = -blocks % (lanes // per_block)
    if missing:
        x = np.concatenate([x, np.zeros((n, missing, per_block), x.dtype)], 1)
    return x.reshape(n, -1, lanes)


def _small(integers: np.ndarray, weight_scales: np.ndarray, activation_scales: np.ndarray) -> _Steps:
    """Blocks of less than 256 values: all three arguments are (n or 1, blocks, lanes a block)."""
    return _Steps(*(_by_steps(x, 16) for x in (integers, weight_scales, activation_scales)))


def _repeat(x: np.ndarray, times: int) -> np.ndarray:
    return np.repeat(x, times, -1)


# products p: int32 (n, blocks, B); weights; d: activation scales float32 (K / group)


def _words8(p: np.ndarray, weights: Weights, d: np.ndarray) -> _Steps:
    n, nb, _ = p.shape
    return _small(p.reshape(n, nb, 8, 4).sum(-1), _repeat(weights.scale, 8), _repeat(d.reshape(1, nb, 1), 8))


def _halves(p: np.ndarray, weights: Weights, d: np.ndarray) -> _Steps:
    n, nb, _ = p.shape
    return _small(p.reshape(n, nb, 2, 4, 4).sum((2, 4)), _repeat(weights.scale, 4), _repeat(d.reshape(1, nb, 1), 4))


def _runs16(p: np.ndarray, weights: Weights, d: np.ndarray) -> _Steps:
    n, nb, _ = p.shape
    return _small(p.reshape(n, nb, 4, 16).sum(-1), _repeat(weights.scale, 4), _repeat(d.reshape(1, nb, 2), 2))


def _halves_of_16(p: np.ndarray, weights: Weights, d: np.ndarray) -> _Steps:
    n, nb, _ = p.shape
    integers = p.reshape(n, nb, 4, 2, 2, 4).sum((3, 5)).reshape(n, nb, 8)
    return _small(integers, _repeat(weights.scale, 2), _repeat(d.reshape(1, nb, 2), 4))


def _k_steps(integers: np.ndarray, weights: Weights, d: np.ndarray) -> _Steps:
    return _Steps(integers, weights.scale, d[None, :, None])


def _k4(p: np.ndarray, weights: Weights, d: np.ndarray) -> _Steps:
    n, nb, _ = p.shape
    scaled = p.reshape(n, nb, 8, 8, 4).sum(-1) * weights.sub_scales[..., None]
    lanes = [scaled[:, :, list(subs)].sum(2) for subs in ((0, 1, 4, 5), (2, 3, 6, 7))]
    return _k_steps(np.concatenate(lanes, -1), weights, d)


def _k2(p: np.ndarray, weights: Weights, d: np.ndarray) -> _Steps:
    n, nb, _ = p.shape
    words = p.reshape(n, nb, 2, 4, 2, 4, 4).sum(-1)  # half, plane, sub-block of 16, word
    scaled = words * weights.sub_scales.reshape(n, nb, 2, 4, 2, 1)
    return _k_steps(scaled.sum(3).reshape(n, nb, 16), weights, d)


def _k6(p: np.ndarray, weights: Weights, d: np.ndarray) -> _Steps:
    n, nb, _ = p.shape
    words = p.reshape(n, nb, 4, 4, 4, 4).sum(-1)  # quarter, sub-block of 16, word
    return _k_steps((words * weights.sub_scales.reshape(n, nb, 4, 4, 1)).sum(2).reshape(n, nb, 16), weights, d)


def _iq4_xs(p: np.ndarray, weights: Weights, d: np.ndarray) -> _Steps:
    n, nb, _ = p.shape
    words = p.reshape(n, nb, 2, 4, 2, 4, 4).sum((4, 6))  # half, sub-block of 32, nibble half, word
    return _k_steps((words * weights.sub_scales.reshape(n, nb, 2, 4, 1)).sum(2).reshape(n, nb, 16), weights, d)


def _grid(p: np.ndarray, weights: Weights, d: np.ndarray) -> _Steps:
    n, nb, _ = p.shape
    return _k_steps(p.reshape(n, nb, 16, 16).sum(-1), weights, d)


# minima: extra lanes (steps of 4 integers), added to the sum; codes int32 (K,)


def _block_minimum(weights: Weights, codes: np.ndarray, d: np.ndarray) -> _Steps:
    n, nb = weights.min_scale.shape
    sums = np.broadcast_to(codes.reshape(1, nb, 32).sum(-1), (n, nb))
    rows = (sums, weights.min_scale, np.broadcast_to(d, (n, nb)))
    return _Steps(*(_by_steps(x[..., None], 4) for x in rows))


def _k4_minimum(weights: Weights, codes: np.ndarray, d: np.ndarray) -> _Steps:
    n, nb, _ = weights.minima.shape
    terms = weights.minima * codes.reshape(1, nb, 8, 32).sum(-1)
    return _Steps(-terms.reshape(n, nb, 4, 2).sum(-1), weights.min_scale[..., None], d[None, :, None])


def _k2_minimum(weights: Weights, codes: np.ndarray, d: np.ndarray) -> _Steps:
    n, nb, _ = weights.minima.shape
    terms = weights.minima * codes.reshape(1, nb, 16, 16).sum(-1)
    return _Steps(-terms.reshape(n, nb, 2, 4, 2).sum((2, 4)), weights.min_scale[..., None], d[None, :, None])


_RULES: dict[str, Callable[[np.ndarray, Weights, np.ndarray], _Steps]] = {
    "Q8_0": _words8, "Q4_0": _halves, "Q4_1": _halves, "Q5_0": _halves, "Q5_1": _halves, "IQ4_NL": _halves,
    "MXFP4": _halves, "NVFP4": _halves_of_16, "Q2_0": _runs16, "Q4_K": _k4, "Q5_K": _k4, "Q2_K": _k2, "Q3_K": _k2,
    "Q6_K": _k6, "IQ4_XS": _iq4_xs, "IQ2_XXS": _grid, "IQ2_XS": _grid, "IQ2_S": _grid, "IQ3_XXS": _grid,
    "IQ3_S": _grid, "IQ1_S": _grid, "IQ1_M": _grid,
}  # fmt: skip

_MINIMA: dict[str, Callable[[Weights, np.ndarray, np.ndarray], _Steps]] = {
    "Q4_1": _block_minimum, "Q5_1": _block_minimum, "Q4_K": _k4_minimum, "Q5_K": _k4_minimum, "Q2_K": _k2_minimum,
}  # fmt: skip


def gemv(format: BlockFormat, raw: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Matrix times one quantised row, bit for bit by the format's lane rule.

    raw     uint8 (n, row_bytes), n rows of K values in a quantised format
    codes   int8 (K,), scales float32 (K / format.group,): the row, as `base.arithmetic.quantise` makes it
    returns float32 (n,)
    """
    need(format.name in _RULES, f"{format.name} has no quantised products", advice="use base.arithmetic.dot_float")
    K = len(codes)
    need(
        raw.ndim == 2 and raw.shape[1] == format.row_bytes(K) and len(scales) * format.group == K,
        "matrix and row do not match",
        found=f"rows of {raw.shape[1:]} bytes, {K} codes, {len(scales)} scales",
        needed=f"rows of {format.row_bytes(K)} bytes, {K // format.group} scales",
    )
    scales = np.asarray(scales, f32)
    codes = codes.astype(np.int32)
    weights = read_weights(format, raw)
    products = weights.integers * codes.reshape(1, *weights.integers.shape[1:])
    total = tree_sum(_RULES[format.name](products, weights, scales).sum())
    with np.errstate(all="ignore"):
        if format.name in _MINIMA:
            total = total + tree_sum(_MINIMA[format.name](weights, codes, scales).sum())
        return total + f32(0)
