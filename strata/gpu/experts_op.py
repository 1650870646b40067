"""The experts op as launches: gate, up and SwiGLU with the down product's quantiser, down, exact combine, for the
routed experts and the shared one.

Where gate and up have one format and the down product takes groups of 32, the three steps before it are one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.base.program import Op
from strata.gpu.activations import Activations
from strata.gpu.experts_ends import combine, swiglu
from strata.gpu.float_gemv import FloatMatrix, float_gemv, float_grouped
from strata.gpu.gemv import Entries, Hidden, Place, gemv, product
from strata.gpu.lower import Lowering
from strata.gpu.weights import Matrix
from strata.pack.formats import BlockFormat


def multiply(c: Lowering, op: Op, m: Matrix, x: str, T: int, y: int) -> None:
    """y (T, rows) = the buffer x times a matrix in any format."""
    if m.format.group:
        c.add(gemv(m.format, m.address, m.rows, c.activations(op, x, m.columns, m.format.group, T), y))
    else:
        c.add(float_gemv(c.memory.address(x), T, m.columns, [FloatMatrix(m.format.name, m.address, m.rows, y)]))


@dataclass(frozen=True)
class _Side:
    """The routed experts (n entries for T rows), or the shared one (n = T). Formats and places of gate, up and down."""

    name: str
    n: int
    T: int
    width: int
    formats: tuple[BlockFormat, BlockFormat, BlockFormat]
    places: tuple[Place, Place, Place]
    ids: int = 0
    factors: tuple[int, int, int] = (0, 0, 0)


def _product(c: Lowering, op: Op, s: _Side, part: int, x: str | Activations | int, y: int) -> None:
    """y (n, rows) of one part; x is a buffer, activations, or an address of float32 rows."""
    D = op.consts["D"]
    rows, columns = (D, s.width) if part == 2 else (s.width, D)
    format, place = s.formats[part], s.places[part]
    n_x = s.n if part == 2 else s.T
    if format.group:
        a = x if isinstance(x, Activations) else c.activations(op, x, columns, format.group, s.T)
        entries = Entries(s.ids, s.n, s.T) if s.ids else None
        c.add(product(format, place, rows, a, y, entries=entries))
        return
    source = c.memory.address(x) if isinstance(x, str) else x
    if s.ids:
        c.add(float_grouped(format.name, place.address, place.stride, rows, s.ids, s.n, source, n_x, columns, y))
    else:
        c.add(float_gemv(source, n_x, columns, [FloatMatrix(format.name, place.address, rows, y)]))


def _run(c: Lowering, op: Op, s: _Side) -> int:
    """Address of the side's outputs (n, D) float32, before their weights."""
    x, error, where = op.buffers["x"], c.error, c.where(op)
    gate, up, down = s.formats
    out = c.scratch(f"experts.{s.name}.out", 4 * s.n * op.consts["D"])
    h: Activations | int = c.scratch(f"experts.{s.name}.h", 4 * s.n * s.width)
    if down.group:
        h = Activations.at(
            c.scratch(f"experts.{s.name}.hidden", Activations.n_bytes(s.n, s.width, down.group)),
            s.n,
            s.width,
            down.group,
        )
    if gate == up and gate.group and down.group == 32 and s.width % 32 == 0:
        a = c.activations(op, x, op.consts["D"], gate.group, s.T)
        hidden = Hidden(s.places[1], h, error, where, s.factors[0], (s.factors[1] - s.factors[0]) // 4)
        entries = Entries(s.ids, s.n, s.T) if s.ids else None
        c.add(product(gate, s.places[0], s.width, a, entries=entries, hidden=hidden))
    else:
        sides = [c.scratch(f"experts.{s.name}.{n}", 4 * s.n * s.width) for n in "gu"]
        for part in range(2):
            _product(c, op, s, part, x, sides[part])
        scales = {"g_scales": s.factors[0], "u_scales": s.factors[1]}
        c.add(swiglu(*sides, s.n, s.width, h, error, where, ids=s.ids, **scales))
    _product(c, op, s, 2, h, out)
    return out


def lower_experts(c: Lowering, op: Op) -> None:
    k, T = op.consts, c.T
    D, K, F, ids = k["D"], k["K"], k["F"], c.at(op, "ids")
    factors = c.weights.expert_scales(op.layer)
    shapes = ((F, D), (F, D), (D, F))
    places = tuple(Place(*c.weights.expert_matrices(op.layer, part, k["E"], *shapes[part])) for part in range(3))
    formats = tuple(c.weights.expert_format(op.layer, part) for part in range(3))
    routed_side = _Side("routed", T * K, T, F, formats, places, ids, factors)
    matrices = [c.weights.matrix(op.buffers[f"shared_{part}_w"]) for part in ("gate", "up", "down")]
    formats, places = tuple(m.format for m in matrices), tuple(Place(m.address) for m in matrices)
    shared_side = _Side("shared", T, T, k["shared_width"], formats, places)
    for group in sorted({f.group for s in (routed_side, shared_side) for f in s.formats[:2]} - {0}):
        c.activations(op, op.buffers["x"], D, group, T)
    c.branch()
    routed = _run(c, op, routed_side)
    c.branch()
    shared = _run(c, op, shared_side)
    c.join()
    places = (routed, ids, c.at(op, "weights"), shared, c.at(op, "shared_gate"), c.at(op, "y"))
    c.add(combine(*places, T, K, D, c.error, c.where(op), down_scales=factors[2]))
