"""Token embedding into all C streams, and the window's n-gram rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata.base.compiled import chunk, step
from strata.base.program import NGRAM_FAILED, NGRAM_TIMEOUT, NOT_FINITE
from strata.cpu.error_word import report
from strata.cpu.float_sums import all_finite
from strata.cpu.machine_code import (
    call3,
    clock_ns,
    copy_bytes,
    f32_view,
    i32_view,
    i64_view,
    ld_acquire64,
    pause,
)
from strata.cpu.rows import row_kernel

if TYPE_CHECKING:
    from strata.base.program import Op
    from strata.cpu.lower import Lowering


NGRAM_LIMIT_NS = 30_000_000_000
"""How long a window waits for its n-gram rows: far above any disk that still works."""


@chunk
def embed(a, t, T):
    """One row. Record: tokens, first weight row, bytes a row, row dequantiser, y, C, D, error, layer.

    The dequantiser is void(row, n values, float32 out).
    """
    p = i64_view(a, 9)
    C, D = p[5], p[6]
    token = i32_view(p[0], T)[t]
    y = p[4] + t * C * D * 4
    call3(p[3], p[1] + token * p[2], D, y)
    if not all_finite(f32_view(y, D)):
        report(p[7], NOT_FINITE, p[8], t)
    for c in range(1, C):
        copy_bytes(y + c * D * 4, y, D * 4)


@step
def ngram_wait(a):
    """Wait until the reader has filled this window's rows.

    Record: address of (wanted, done), limit in ns, error, layer.
    The reader sets `done` to `wanted`, or to its negative on failure. `wanted` differs from window to window.
    """
    p = i64_view(a, 4)
    wanted = ld_acquire64(p[0])
    end = clock_ns() + p[1]
    done = ld_acquire64(p[0] + 8)
    while done != wanted and done != -wanted:
        if clock_ns() > end:
            report(p[2], NGRAM_TIMEOUT, p[3], p[1] // 1_000_000)
            return
        pause()
        done = ld_acquire64(p[0] + 8)
    if done != wanted:
        report(p[2], NGRAM_FAILED, p[3], 0)


def lower_embed(c: Lowering, op: Op) -> None:
    info = c.weights.tensors.info(op.buffers["w"])
    if c.memory.measuring:
        return
    row = row_kernel(info.format)
    c.parallel(c.T, embed, c.at(op, "tokens"), c.weights.tensors.address(info.name), info.row_bytes, row, c.at(op, "y"),
               op.consts["C"], op.consts["D"], c.error, op.layer)  # fmt: skip


def lower_ngram_wait(c: Lowering, op: Op) -> None:
    c.step(ngram_wait, c.at(op, "ticket"), NGRAM_LIMIT_NS, c.error, op.layer)
