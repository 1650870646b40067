"""Hyper-connections: norm of the streams (with the last branch's output added first), mixing, add."""

from __future__ import annotations

import numpy as np

from strata.base.errors import need
from strata.gpu.activations import Activations, places_of
from strata.gpu.launch import Launch, Source, f32, i32, launch, pointer

SOURCE = Source("hyper_connection.cu", ("hc_norm<false>", "hc_norm<true>", "hc_add", "hc_mix", "hc_mix_four"))
STREAMS = 4
"""Streams that have a kernel of their own for the mix: those of releases."""


def hc_norm(
    x: int, w: int, out: int, T: int, C: int, D: int, eps: float, error: int, where: np.uint64,
    *, first: int = 0, y: int = 0, a: int = 0,
) -> list[Launch]:  # fmt: skip
    """out (T, C, D) = rms norm of every stream of x (rows, C, D) times w (C, D); float32 addresses.

    first: address of an int64, the index of the first row of x, or 0. y, a: addresses of a branch's output (T, D) and
    strengths (T, C) that are added to x first, or 0. out may be x.
    """
    need((y == 0) == (a == 0) and not (first and y), "an added branch needs y and a, and rows from the first on")
    kernel = "hc_norm<true>" if y else "hc_norm<false>"
    args = (pointer(x), pointer(y), pointer(a), pointer(w), pointer(out), i32(C), i32(D), f32(eps), pointer(first),
            pointer(error), where)  # fmt: skip
    return [launch(SOURCE, kernel, (C, T), 256, *args)]


def hc_add(x: int, y: int, a: int, T: int, C: int, D: int) -> list[Launch]:
    """x (T, C, D) += a (T, C) y (T, D), one fma each."""
    args = (pointer(x), pointer(y), pointer(a), i32(C), i32(D))
    return [launch(SOURCE, "hc_add", (-(-C * D // 256), T), 256, *args)]


def hc_mix(
    normed: int, gate: int, u: int, T: int, C: int, D: int, error: int, where: np.uint64,
    *, inject: int = 0, a: int = 0, quantised: tuple[Activations, ...] = (),
) -> list[Launch]:  # fmt: skip
    """u (T, D) from normed and gate (T, C, D); a (T, C) from inject (T, C) unless that is 0.

    quantised: where u goes as activations as well, at most one of each group.
    """
    need(all((q.T, q.K) == (T, D) for q in quantised), "activations of u")
    four = C == STREAMS
    shape = (i32(D),) if four else (i32(C), i32(D))
    args = (pointer(normed), pointer(gate), pointer(u), *shape, pointer(inject), pointer(a),
            *places_of(quantised), pointer(error), where)  # fmt: skip
    need(C <= 256, "streams", found=C, needed="at most 256")
    if four:
        return [launch(SOURCE, "hc_mix_four", (-(-D // 256) + (inject != 0), T), 256, *args)]
    return [launch(SOURCE, "hc_mix", (-(-D // 256), T), 256, *args)]
