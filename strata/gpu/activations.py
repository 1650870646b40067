"""Quantised activations on the device: where codes, scales and sums of T rows lie, and the kernels that make them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.gpu.launch import Launch, Source, i32, launch, pointer

SOURCE = Source("quantise.cu", ("quantise<1>", "quantise<8>", "squeeze"))
ALIGN = 256


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


@dataclass(frozen=True)
class Activations:
    """T rows of K values quantised in groups of 32 or 256; addresses are multiples of 256.

    codes   int8 (T, K)                 scales  float32 (T, K / group)
    sums    int32 (T, K / 16): sums of every 16 codes
    """

    T: int
    K: int
    group: int
    codes: int
    scales: int
    sums: int

    @staticmethod
    def n_bytes(T: int, K: int, group: int) -> int:
        return _aligned(T * K) + _aligned(T * K // group * 4) + _aligned(T * K // 16 * 4)

    @classmethod
    def at(cls, address: int, T: int, K: int, group: int) -> Activations:
        """Views into one piece of n_bytes(T, K, group) bytes."""
        need(group in (32, 256) and K % group == 0, f"rows of {K} values in groups of {group}", needed="whole groups")
        scales = address + _aligned(T * K)
        return cls(T, K, group, address, scales, scales + _aligned(T * K // group * 4))


def places_of(quantised: tuple[Activations, ...]) -> list[np.generic]:
    """Codes, scales and sums of groups of 32, then of 256, as kernel arguments; null where there are none."""
    by_group = {q.group: q for q in quantised}
    need(len(by_group) == len(quantised), "activations of one buffer", needed="at most one of each group")
    places = [(q.codes, q.scales, q.sums) if (q := by_group.get(group)) else (0, 0, 0) for group in (32, 256)]
    return [pointer(at) for place in places for at in place]


def quantise(x: int, out: Activations, error: int, where: np.uint64, *, squeeze_by: int = 0) -> list[Launch]:
    """Float32 rows (T, K) at address x into `out`. squeeze_by C: first x = silu(x / C), in place; 0: x as it is."""
    V, groups = out.group // 32, out.T * out.K // out.group
    args = (pointer(x), pointer(out.codes), pointer(out.scales), pointer(out.sums), i32(out.K // out.group),
            i32(groups), i32(squeeze_by), pointer(error), where)  # fmt: skip
    return [launch(SOURCE, f"quantise<{V}>", -(-groups // 8), 256, *args)]


def squeeze(x: int, T: int, n: int, C: int, error: int, where: np.uint64) -> list[Launch]:
    """x = silu(x / C) in place on (T, n) float32."""
    args = (pointer(x), i32(T * n), i32(C), i32(n), pointer(error), where)
    return [launch(SOURCE, "squeeze", -(-T * n // 256), 256, *args)]
