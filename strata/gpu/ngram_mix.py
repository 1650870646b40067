"""N-gram block: wait for the looked-up rows, gate them into every stream, with a dilated causal convolution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.gpu.gated_delta import history_commit
from strata.gpu.launch import Launch, Source, f32, i32, launch, pointer

SOURCE = Source("ngram_mix.cu", ("ngram_wait", "ngram_gate", "ngram_gate_near", "ngram_conv"))
NEAR_VALUES = range(256, 2561)
"""Values of a stream whose gate is computed from registers; others are read again for every sum."""
WAIT_BLOCK_VALUES = 4 * 256 * 4
"""Values that a block copies: all its reads are on their way at once."""


@dataclass(frozen=True)
class NgramWeights:
    """Addresses of float32 weights: norms (C, D), conv (taps, C, D)."""

    norm_key: int
    norm_query: int
    norm_conv: int
    conv: int


def ngram_wait(
    ticket: int, staged: int, rows: int, n: int, limit_ns: int, error: int, where: np.uint64
) -> list[Launch]:
    """Copy n float32 from the host's staging buffer once ticket (wanted, done) says that they are there.

    n: a multiple of 4. staged and rows: addresses of whole 16 bytes.
    """
    need(n > 0 and n % 4 == 0 and staged % 16 == 0 and rows % 16 == 0, "n-gram rows to copy",
         found=(n, staged % 16, rows % 16), needed="whole pieces of 16 bytes")  # fmt: skip
    args = (pointer(ticket), pointer(staged), pointer(rows), i32(n), np.uint64(limit_ns), pointer(error), where)
    return [launch(SOURCE, "ngram_wait", -(-n // WAIT_BLOCK_VALUES), 256, *args)]


def ngram_mix(
    x: int,
    key: int,
    value: int,
    w: NgramWeights,
    history_slot: int,
    conv_rows: int,
    gates: int,
    whole_chunk: int,
    T: int,
    C: int,
    D: int,
    taps: int,
    dilation: int,
    eps: float,
    error: int,
    where: np.uint64,
) -> list[Launch]:
    """x (T, C, D) in place, from key (T, C, D) and value (T, D); conv_rows (T, C, D) is what commit shifts in.

    gates: scratch of T C floats. whole_chunk: 0, or the address of an int64 T, for a chunk that advances the history.
    """
    gate = (pointer(x), pointer(key), pointer(value), pointer(w.norm_key), pointer(w.norm_query), pointer(w.norm_conv),
            pointer(conv_rows), pointer(gates), i32(C), i32(D), f32(eps), pointer(error), where)  # fmt: skip
    conv = (pointer(x), pointer(value), pointer(conv_rows), pointer(gates), pointer(w.conv), pointer(history_slot),
            i32(C), i32(D), i32(taps), i32(dilation), pointer(error), where)  # fmt: skip
    out = [
        launch(SOURCE, "ngram_gate_near" if D in NEAR_VALUES else "ngram_gate", (C, T), 256, *gate),
        launch(SOURCE, "ngram_conv", (-(-C * D // 256), T), 256, *conv),
    ]
    if whole_chunk:
        out += history_commit(history_slot, conv_rows, whole_chunk, (taps - 1) * dilation, C * D)
    return out
