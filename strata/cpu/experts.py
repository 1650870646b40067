"""The routed and the shared expert of a window.

    y_t = sum over j of w_tj Down_e(silu(Gate_e x) * Up_e x) + sigmoid(shared gate) * the same of the shared expert

The op is one job of a pool, see `strata.cpu.expert_jobs`. The records built here serve the experts of other devices'
windows too (`strata.cpu.miss_jobs`), which have no shared expert and end as exact sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.base.compiled import step
from strata.cpu.expert_groups import LEAST_CHUNK_BYTES, MOST_RUN_BYTES
from strata.cpu.expert_jobs import experts_chunk, run_jobs
from strata.cpu.expert_record import (
    CHUNK,
    COUNTERS,
    D_,
    DOWN,
    DOWN_STARTS,
    E_,
    ENTRY_OF,
    ERROR,
    GATE,
    GATHER,
    IDS,
    JOB_WORDS,
    JOBS,
    K_,
    LAYER,
    LEAST,
    MOST,
    OUT,
    POOL,
    QUANTISE,
    ROUTED,
    ROW_OF,
    SEEN,
    SHARED,
    SHARED_GATE,
    SWIGLU,
    T_,
    TABLE,
    THREADS,
    TOTAL,
    UP,
    WEIGHTS,
    WIDTH,
    WORDS,
    G,
    H,
    U,
    Y,
    counter_bytes,
    starts_bytes,
)
from strata.cpu.gemv.table import swiglu_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from strata.base.program import Op
    from strata.cpu.gemv.table import ActivationLayout
    from strata.cpu.lower import Lowering, Memory
    from strata.cpu.weights import Weights


@step
def experts(a):
    """Record: WORDS int64, as laid out in `strata.cpu.expert_record`."""
    run_jobs(a)


def fill_side(
    record: list, side: int, names: tuple[str, ...], width: int, D: int, rows: int, weights: Weights, memory: Memory,
    records: Callable[[ActivationLayout], tuple[int, int]], scales: tuple[np.ndarray, ...] | None = None,
) -> None:  # fmt: skip
    """Words of the routed experts (side ROUTED, rows = entries) or of the shared one (SHARED, rows = T), but for TABLE.

    names: tensors of gate, up and down. records: from a layout to (address, bytes) of the activation records of x.
    """
    own = "routed" if side == ROUTED else "shared"
    for i, (at, name) in enumerate(zip((GATE, UP, DOWN), names, strict=True)):
        info, layout = weights.tensors.info(name), weights.layout(name)
        act, act_bytes = records(layout) if at != DOWN else (0, layout.record_bytes(width))
        kernels = 0 if memory.measuring else weights.kernels(info.ggml_type)
        record[side + at : side + at + 5] = info.row_bytes, kernels, act, act_bytes, scales[i] if scales else 0
    layout = weights.layout(names[2])
    g = memory.scratch(f"experts.{own}.g", rows * width * 4)
    record[side + WIDTH], record[side + G] = width, g
    record[side + U] = memory.scratch(f"experts.{own}.u", rows * width * 4)
    record[side + OUT] = memory.scratch(f"experts.{own}.out", rows * D * 4)
    h = memory.scratch(f"experts.{own}.h", rows * layout.record_bytes(width))
    record[side + H] = h if layout.group else g
    if not memory.measuring:
        record[side + QUANTISE] = layout.quantise_address if layout.group else 0


def fill_common(record: list, T: int, K: int, D: int, E: int, memory: Memory, pool: int, threads: int) -> None:
    """Sizes, pool, and places for grouping, of windows of up to T rows; the side ROUTED is filled before."""
    entries = T * K
    record[T_], record[E_], record[K_], record[D_] = T, E, K, D
    record[POOL], record[THREADS], record[LEAST], record[MOST] = pool, threads, LEAST_CHUNK_BYTES, MOST_RUN_BYTES
    gather = entries * (record[ROUTED + GATE + 3] + record[ROUTED + UP + 3])
    record[ROUTED + GATHER] = memory.scratch("experts.gather", gather)
    record[JOBS] = memory.scratch("experts.jobs", (entries + 1) * JOB_WORDS * 8)
    record[ENTRY_OF] = memory.scratch("experts.entry_of", entries * 4)
    record[ROW_OF] = memory.scratch("experts.row_of", entries * 4)
    record[SEEN] = memory.scratch("experts.seen", E * 4)
    record[COUNTERS] = memory.scratch("experts.counters", counter_bytes(entries))
    record[DOWN_STARTS] = memory.scratch("experts.down_starts", starts_bytes(entries, E))
    if not memory.measuring:
        record[CHUNK], record[SWIGLU] = experts_chunk.address, swiglu_rows.address


def lower_experts(c: Lowering, op: Op) -> None:
    k, T, x, m = op.consts, c.T, op.buffers["x"], c.memory
    D, K = k["D"], k["K"]
    record: list = [0] * WORDS
    record[IDS], record[WEIGHTS], record[SHARED_GATE], record[Y] = (
        c.at(op, port) for port in ("ids", "weights", "shared_gate", "y")
    )
    record[ERROR], record[LAYER] = c.error, op.layer
    shared = tuple(op.buffers[f"shared_{part}_w"] for part in ("gate", "up", "down"))
    routed = c.weights.expert_names(op.layer)

    def records(layout: ActivationLayout) -> tuple[int, int]:
        return c.records(x, D, layout, op.layer)

    fill_side(record, ROUTED, routed, k["F"], D, T * K, c.weights, m, records, c.weights.expert_scales(op.layer))
    fill_side(record, SHARED, shared, k["shared_width"], D, T, c.weights, m, records)
    fill_common(record, T, K, D, k["E"], m, c.pool, c.threads)
    record[TOTAL] = m.scratch("experts.total", T * D * 8)
    if not m.measuring:
        record[ROUTED + TABLE] = c.weights.expert_table(op.layer)
        record[SHARED + TABLE] = np.array([[c.weights.tensors.address(n) for n in shared]], np.int64)
        c.step(experts, *record)
