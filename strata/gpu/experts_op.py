"""The experts op as launches: gate and up of routed and shared experts, SwiGLU with the down product's quantiser, down,
exact combine. Which entries share an expert is the products' own business."""

from __future__ import annotations

from strata.base.program import Op
from strata.gpu.activations import Activations
from strata.gpu.experts import grouped_gemv
from strata.gpu.experts_ends import combine, swiglu
from strata.gpu.float_gemv import FloatMatrix, float_gemv, float_grouped
from strata.gpu.gemv import gemv
from strata.gpu.lower import Lowering
from strata.gpu.weights import Matrix
from strata.pack.formats import BlockFormat


def product(c: Lowering, op: Op, m: Matrix, x: str, T: int, y: int) -> None:
    """y (T, rows) = the buffer x times a matrix in any format."""
    if m.format.group:
        c.add(gemv(m.format, m.address, m.rows, c.activations(op, x, m.columns, m.format.group, T), y))
    else:
        c.add(float_gemv(c.memory.address(x), T, m.columns, [FloatMatrix(m.format.name, m.address, m.rows, y)]))


def _hidden(c: Lowering, name: str, format: BlockFormat, rows: int, width: int) -> Activations | int:
    """Where the input of a down product goes: activations, or an address of float32 rows."""
    if not format.group:
        return c.scratch(f"{name}.h", 4 * rows * width)
    n_bytes = Activations.n_bytes(rows, width, format.group)
    return Activations.at(c.scratch(f"{name}.h", n_bytes), rows, width, format.group)


def _grouped(
    c: Lowering, op: Op, part: int, h: Activations | int, n_x: int, rows: int, columns: int, entries: int, y: int
) -> None:
    """y (entries, rows) = gate (0), up (1) or down (2) of every entry's expert times its row of h."""
    format = c.weights.expert_format(op.layer, part)
    at, stride = c.weights.expert_matrices(op.layer, part, op.consts["E"], rows, columns)
    ids = c.at(op, "ids")
    if isinstance(h, Activations):
        c.add(grouped_gemv(format, at, stride, rows, ids, entries, h, y))
    else:
        c.add(float_grouped(format.name, at, stride, rows, ids, entries, h, n_x, columns, y))


def lower_experts(c: Lowering, op: Op) -> None:
    k, T, x = op.consts, c.T, op.buffers["x"]
    D, K, F, entries = k["D"], k["K"], k["F"], c.T * k["K"]
    error, where, ids = c.error, c.where(op), c.at(op, "ids")
    g_scales, u_scales, down_scales = c.weights.expert_scales(op.layer)
    sides: dict[str, int] = {}
    for part, name in ((0, "g"), (1, "u")):
        sides[name] = c.scratch(f"experts.routed.{name}", 4 * entries * F)
        format = c.weights.expert_format(op.layer, part)
        rows = c.activations(op, x, D, format.group, T) if format.group else c.memory.address(x)
        _grouped(c, op, part, rows, T, F, D, entries, sides[name])
    h = _hidden(c, "experts.routed", c.weights.expert_format(op.layer, 2), entries, F)
    c.add(swiglu(sides["g"], sides["u"], entries, F, h, error, where, ids=ids, g_scales=g_scales, u_scales=u_scales))
    out = c.scratch("experts.routed.out", 4 * entries * D)
    _grouped(c, op, 2, h, entries, D, F, entries, out)

    width = k["shared_width"]
    gate, up, down = (c.weights.matrix(op.buffers[f"shared_{part}_w"]) for part in ("gate", "up", "down"))
    g, u = (c.scratch(f"experts.shared.{n}", 4 * T * width) for n in "gu")
    product(c, op, gate, x, T, g)
    product(c, op, up, x, T, u)
    h = _hidden(c, "experts.shared", down.format, T, width)
    c.add(swiglu(g, u, T, width, h, error, where))
    shared = c.scratch("experts.shared.out", 4 * T * D)
    if isinstance(h, Activations):
        c.add(gemv(down.format, down.address, down.rows, h, shared))
    else:
        c.add(float_gemv(h, T, width, [FloatMatrix(down.format.name, down.address, down.rows, shared)]))
    c.add(combine(out, ids, c.at(op, "weights"), shared, c.at(op, "shared_gate"), c.at(op, "y"), T, K, D, error, where,
                  down_scales=down_scales))  # fmt: skip
