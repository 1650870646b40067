"""One side of an experts op as launches: gate, up and SwiGLU with the down product's quantiser, then down.

Where gate and up have one format and the down product takes groups of 32, the three steps before it are one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.base.program import Op
from strata.gpu.activations import Activations
from strata.gpu.experts_ends import swiglu
from strata.gpu.float_gemv import FloatMatrix, float_gemv, float_grouped
from strata.gpu.gemv import Combine, Entries, Hidden, Place, product
from strata.gpu.lower import Lowering
from strata.pack.formats import BlockFormat


@dataclass(frozen=True)
class Side:
    """The routed experts (n entries for T rows), or the shared one (n = T). Formats and places of gate, up and down.

    ids        address of int32 (n,), 0 for the shared one
    factors    addresses of (E,) float32 output factors of gate, up and down, or zeros
    decisions  address of uint8 (n,), or 0: entries count whose decision is a bit of `take`; outputs of others are
               undefined
    jobs       address of the list of their jobs, of which there are at most `most_jobs` (gemv.Entries)
    experts    how many there are, or 0 (gemv.Entries)
    """

    name: str
    n: int
    T: int
    width: int
    formats: tuple[BlockFormat, BlockFormat, BlockFormat]
    places: tuple[Place, Place, Place]
    ids: int = 0
    factors: tuple[int, int, int] = (0, 0, 0)
    decisions: int = 0
    take: int = 0
    jobs: int = 0
    most_jobs: int = 0
    experts: int = 0

    @property
    def entries(self) -> Entries | None:
        if not self.ids:
            return None
        return Entries(self.ids, self.n, self.T, jobs=self.jobs, most_jobs=self.most_jobs, experts=self.experts)


def _product(
    c: Lowering, op: Op, s: Side, part: int, x: str | Activations | int, y: int, combine: Combine | None = None
) -> None:
    """y (n, rows) of one part; x is a buffer, activations, or an address of float32 rows."""
    D = op.consts["D"]
    rows, columns = (D, s.width) if part == 2 else (s.width, D)
    format, place = s.formats[part], s.places[part]
    n_x = s.n if part == 2 else s.T
    if format.group:
        a = x if isinstance(x, Activations) else c.activations(op, x, columns, format.group, s.T)
        c.add(product(format, place, rows, a, y, entries=s.entries, combine=combine))
        return
    assert combine is None, "float products have outputs only"
    source = c.memory.address(x) if isinstance(x, str) else x
    if s.ids:
        c.add(float_grouped(format.name, place.address, place.stride, rows, s.ids, s.n, source, n_x, columns, y))
    else:
        c.add(float_gemv(source, n_x, columns, [FloatMatrix(format.name, place.address, rows, y)]))


def add_hidden(c: Lowering, op: Op, s: Side) -> Activations | int:
    """Add a side's launches in front of its down product. What that one reads."""
    x, error, where = op.buffers["x"], c.error, c.where(op)
    gate, up, down = s.formats
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
        c.add(product(gate, s.places[0], s.width, a, entries=s.entries, hidden=hidden))
    else:
        sides = [c.scratch(f"experts.{s.name}.{n}", 4 * s.n * s.width) for n in "gu"]
        for part in range(2):
            _product(c, op, s, part, x, sides[part])
        more = {"g_scales": s.factors[0], "u_scales": s.factors[1], "decisions": s.decisions, "take": s.take}
        c.add(swiglu(*sides, s.n, s.width, h, error, where, ids=s.ids, **more))
    return h


def add_down(c: Lowering, op: Op, s: Side, h: Activations | int, y: int, combine: Combine | None = None) -> None:
    """Add a side's down product. y (n, D) float32: outputs before their weights; with `combine` (T, D), the op's
    result."""
    _product(c, op, s, 2, h, y, combine)


def outputs_of(c: Lowering, op: Op, s: Side) -> int:
    """Where a side's outputs (n, D) float32 go."""
    return c.scratch(f"experts.{s.name}.out", 4 * s.n * op.consts["D"])


def add_side(c: Lowering, op: Op, s: Side) -> int:
    """Add a side's launches. Address of its outputs (n, D) float32, before their weights."""
    out = outputs_of(c, op, s)
    add_down(c, op, s, add_hidden(c, op, s), out)
    return out


def shared_side(c: Lowering, op: Op) -> Side:
    """The shared expert of the op."""
    matrices = [c.weights.matrix(op.buffers[f"shared_{part}_w"]) for part in ("gate", "up", "down")]
    formats, places = tuple(m.format for m in matrices), tuple(Place(m.address) for m in matrices)
    return Side("shared", c.T, c.T, op.consts["shared_width"], formats, places)


def quantise_inputs(c: Lowering, op: Op, *sides: Side) -> None:
    """Activations that the sides' gates and ups share, before they part ways."""
    for group in sorted({f.group for s in sides for f in s.formats[:2]} - {0}):
        c.activations(op, op.buffers["x"], op.consts["D"], group, c.T)
