"""Products of a prefill chunk: `linear` and `experts` on tensor cores (gpu/gemm); inputs are made once for all."""

from __future__ import annotations

from dataclasses import dataclass

from strata.base.errors import ModelError
from strata.base.program import Op
from strata.gpu.activations import Activations
from strata.gpu.chunk_lower import ChunkLowering
from strata.gpu.experts_ends import combine, swiglu
from strata.gpu.float_narrow import MOST_ROWS, float_narrow
from strata.gpu.gemm import (
    FloatRows,
    Order,
    Rows,
    float_gemm,
    float_scratch_bytes,
    gemm,
    group_of,
    grouped,
    grouped_packed,
    prepare,
    scratch_bytes,
    sort_entries,
    split_rows,
    takes_packed,
)
from strata.gpu.gemv import Place
from strata.gpu.weights import Matrix
from strata.pack.formats import BlockFormat

MOST_GRID_ROWS = 65_535
"""Rows of a grid's second axis."""
EXPANDED_BYTES = 192 << 20
"""Expanded matrices of a batch of experts: enough of them to fill a device, few beside a chunk's other buffers."""


def quantised_rows(c: ChunkLowering, op: Op, buffer: str, T: int, K: int, format: BlockFormat) -> Rows:
    """T rows of a buffer for products with `format`; made on first use, kept for the last reader."""
    activation, group = format.group, group_of(format)
    codes = c.kept(buffer, activation, Activations.n_bytes(T, K, activation),
                   lambda at: c.quantise(op, buffer, Activations.at(at, T, K, activation)))  # fmt: skip
    x = Activations.at(codes, T, K, activation)
    rows = c.kept(buffer, f"{activation}.{group}", Rows.n_bytes(T, K, group),
                  lambda at: prepare(Rows.at(at, x, group)))  # fmt: skip
    return Rows.at(rows, x, group)


def float_rows(c: ChunkLowering, buffer: str, T: int, K: int) -> FloatRows:
    """T rows of a buffer for products with float matrices."""
    at = c.kept(buffer, "parts", FloatRows.n_bytes(T, K),
                lambda at: split_rows(c.memory.address(buffer), FloatRows.at(at, T, K)))  # fmt: skip
    return FloatRows.at(at, T, K)


def multiply(c: ChunkLowering, op: Op, m: Matrix, buffer: str, y: int, T: int) -> None:
    """y (T, rows) float32 = T rows of a buffer times a matrix in any format."""
    if m.format.group:
        rows = quantised_rows(c, op, buffer, T, m.columns, m.format)
        scratch = c.scratch("gemm", scratch_bytes(m.format, m.rows, m.columns))
        c.add(gemm(m.format, m.address, m.rows, rows, y, scratch))
        return
    if m.rows <= MOST_ROWS:
        c.add(float_narrow(m.format.name, m.address, m.rows, c.memory.address(buffer), T, m.columns, y))
        return
    scratch = float_scratch_bytes(m.format.name, m.rows, m.columns)
    x = float_rows(c, buffer, T, m.columns)
    c.add(float_gemm(m.format.name, m.address, m.rows, x, y, c.scratch("gemm", scratch) if scratch else 0))


def lower_linear(c: ChunkLowering, op: Op) -> None:
    T = c.T * op.consts["rows"]
    for i in range(op.consts["n"]):
        multiply(c, op, c.weights.matrix(op.buffers[f"w{i}"]), op.buffers["x"], c.at(op, f"y{i}"), T)


# ---- experts


def _rows_of(a: Activations, first: int, n: int) -> Activations:
    """Rows first .. first + n - 1."""
    scales, sums = (4 * first * a.K // values for values in (a.group, 16))
    return Activations(n, a.K, a.group, a.codes + first * a.K, a.scales + scales, a.sums + sums)


def _hidden(c: ChunkLowering, name: str, n: int, F: int, format: BlockFormat) -> tuple[Activations, Rows]:
    """Where the quantised input of a down product goes."""
    h = Activations.at(c.scratch(f"{name}.h", Activations.n_bytes(n, F, format.group)), n, F, format.group)
    group = group_of(format)
    return h, Rows.at(c.scratch(f"{name}.h rows", Rows.n_bytes(n, F, group)), h, group)


def _shared(c: ChunkLowering, op: Op) -> int:
    """Address of the shared expert's outputs (T, D) float32."""
    T, D, F = c.T, op.consts["D"], op.consts["shared_width"]
    gate, up, down = (c.weights.matrix(op.buffers[f"shared_{part}_w"]) for part in ("gate", "up", "down"))
    sides = [c.scratch(f"shared.{n}", 4 * T * F) for n in "gu"]
    multiply(c, op, gate, op.buffers["x"], sides[0], T)
    multiply(c, op, up, op.buffers["x"], sides[1], T)
    out = c.scratch("shared.out", 4 * T * D)
    if down.format.group:
        h, rows = _hidden(c, "shared", T, F, down.format)
        c.add(swiglu(*sides, T, F, h, c.error, c.where(op)))
        c.add(prepare(rows))
        c.add(gemm(down.format, down.address, D, rows, out, c.scratch("gemm", scratch_bytes(down.format, D, F))))
        return out
    c.add(swiglu(*sides, T, F, sides[0], c.error, c.where(op)))
    parts = FloatRows.at(c.scratch("shared.parts", FloatRows.n_bytes(T, F)), T, F)
    c.add(split_rows(sides[0], parts))
    scratch = float_scratch_bytes(down.format.name, D, F)
    c.add(float_gemm(down.format.name, down.address, D, parts, out, c.scratch("gemm", scratch) if scratch else 0))
    return out


def _batch(format: BlockFormat, rows: int, K: int, E: int) -> int:
    """Experts whose matrices are expanded together."""
    return max(1, min(E, EXPANDED_BYTES // scratch_bytes(format, rows, K)))


@dataclass(frozen=True)
class _Part:
    """One product of all experts: gate (0), up (1) or down (2), y (n, rows) from x."""

    number: int
    format: BlockFormat
    place: Place
    rows: int
    x: Rows
    y: int


def _grouped(c: ChunkLowering, layer: int, order: Order, parts: list[_Part]) -> None:
    """Products of all experts, inside of stages that bring what is not there: of packed matrices where there is a
    kernel for them, else in batches whose expansion fits into scratch."""
    numbers = tuple(p.number for p in parts)
    together = order.E if c.stream is None else c.stream.experts_a_stage(layer, numbers)
    for start in range(0, order.E, together):
        n = min(together, order.E - start)
        if c.stream is not None:
            c.stage(layer, numbers, start, n)
        for p in parts:
            if takes_packed(p.format, p.x.x.K):
                c.add(grouped_packed(p.format, p.place, p.rows, p.x, p.y, order, start, n))
                continue
            batch = _batch(p.format, p.rows, p.x.x.K, order.E)
            scratch = c.scratch("gemm", scratch_bytes(p.format, p.rows, p.x.x.K, batch))
            for first in range(start, start + n, batch):
                experts = min(batch, start + n - first)
                c.add(grouped(p.format, p.place, p.rows, p.x, p.y, scratch, order, first, experts))
        if c.stream is not None:
            c.stage_end()


def lower_experts(c: ChunkLowering, op: Op) -> None:
    k, T, buffer = op.consts, c.T, op.buffers["x"]
    D, K, F, E, ids = k["D"], k["K"], k["F"], k["E"], c.at(op, "ids")
    n = T * K
    formats = tuple(c.weights.expert_format(op.layer, part) for part in range(3))
    for format in formats:
        if not format.group:
            raise ModelError(
                f"layer {op.layer} has experts in {format.name}",
                found="a float format",
                needed="a quantised format, to read prompts in chunks",
                advice='Load with prefill="windows".',
            )
    gate_factors, up_factors, down_factors = c.weights.expert_scales(op.layer)
    shapes = ((F, D), (F, D), (D, F))
    if c.stream is None:
        places = [c.weights.expert_place(op.layer, part, E, *shapes[part]) for part in range(3)]
    else:
        places = [c.stream.place(op.layer, part) for part in range(3)]
    order = Order.at(c.scratch("experts.order", Order.n_bytes(n, E)), n, E)
    c.add(sort_entries(ids, order))
    # What gate and up leave is gone when the down product writes.
    wide = c.scratch("experts.wide", max(8 * n * F, 4 * n * D))
    sides = (wide, wide + 4 * n * F)
    inputs = [quantised_rows(c, op, buffer, T, D, formats[part]) for part in range(2)]
    _grouped(c, op.layer, order, [_Part(i, formats[i], places[i], F, inputs[i], sides[i]) for i in range(2)])
    h, rows = _hidden(c, "experts", n, F, formats[2])
    scales = {"g_scales": gate_factors, "u_scales": up_factors}
    for first in range(0, n, MOST_GRID_ROWS):
        part = _rows_of(h, first, min(MOST_GRID_ROWS, n - first))
        g, u = (side + 4 * first * F for side in sides)
        c.add(swiglu(g, u, part.T, F, part, c.error, c.where(op), ids=ids + 4 * first, **scales))
    c.add(prepare(rows))
    _grouped(c, op.layer, order, [_Part(2, formats[2], places[2], D, rows, wide)])
    shared = _shared(c, op)
    c.add(combine(wide, ids, c.at(op, "weights"), shared, c.at(op, "shared_gate"), c.at(op, "y"), T, K, D, c.error,
                  c.where(op), down_scales=down_factors))  # fmt: skip
