"""Around the products of experts: SwiGLU with the quantiser of the down product, and the exact combine."""

from __future__ import annotations

import numpy as np

from strata.base.arithmetic import COMBINE_TERMS
from strata.base.errors import need
from strata.gpu.activations import Activations
from strata.gpu.launch import Launch, Source, i32, launch, pointer

SOURCE = Source("experts_ends.cu", ("swiglu<0>", "swiglu<32>", "swiglu<256>", "combine"))


def swiglu(
    g: int, u: int, rows: int, F: int, out: Activations | int, error: int, where: np.uint64,
    *, ids: int = 0, g_scales: int = 0, u_scales: int = 0, decisions: int = 0, take: int = 0,
) -> list[Launch]:  # fmt: skip
    """silu(g) u of float32 (rows, F), quantised into `out` or as float32 to the address `out`.

    ids (rows,) int32: expert of each row; with g_scales and u_scales (E,) float32 g and u are multiplied first.
    decisions uint8 (rows,): rows count whose decision is a bit of `take`, others are left as they are; 0: all count.
    """
    need((g_scales == 0) == (u_scales == 0) and (ids or not g_scales), "output factors need both sides and ids")
    q = out if isinstance(out, Activations) else None
    need(q is None or (q.T, q.K) == (rows, F), "activations of the down product", needed=(rows, F))
    places = (0, q.codes, q.scales, q.sums) if q else (out, 0, 0, 0)
    args = (pointer(g), pointer(u), pointer(ids), pointer(g_scales), pointer(u_scales), pointer(decisions), i32(take),
            *map(pointer, places), i32(F), pointer(error), where)  # fmt: skip
    return [launch(SOURCE, f"swiglu<{q.group if q else 0}>", (-(-F // 256), rows), 256, *args)]


def combine(
    outputs: int, ids: int, weights: int, shared: int, gate: int, y: int, T: int, K: int, D: int, error: int,
    where: np.uint64, *, down_scales: int = 0, mine: int = 0, linked: int = 0, extra: int = 0, stamp: int = 0,
) -> list[Launch]:  # fmt: skip
    """y (T, D) from routed outputs (T, K, D), ids and weights (T, K), shared outputs (T, D) and their gate (T,).

    down_scales (E,) float32 by expert or 0. mine (T, K) uint8 says where an entry's output is: 1 in `outputs`, 2 in
    `linked` (T, K, D), 0 in `extra` (T, D) int64, terms summed elsewhere in units of 2^-32, read for rows with such an
    entry (without `mine`: always). stamp: address of an int64 for the time at which the combine began, or 0.
    """
    need(K + 1 <= COMBINE_TERMS, "terms of one sum", found=K + 1, needed=f"at most {COMBINE_TERMS}")
    args = (pointer(outputs), pointer(linked), pointer(ids), pointer(weights), pointer(down_scales), pointer(mine),
            pointer(shared), pointer(gate), pointer(extra), pointer(y), i32(K), i32(D), pointer(stamp), pointer(error),
            where)  # fmt: skip
    return [launch(SOURCE, "combine", (-(-D // 256), T), 256, *args)]
