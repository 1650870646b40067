"""Bytes in VRAM that geometry alone does not tell: matrices in the device's layout, and private scratch of ops.

A plan reads headers and is made without the GPU backend, so the backend's rules are written here once more; a test
holds them against its own measuring walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod

from strata.base.geometry import CELL_ROWS, WINDOW_ROWS, Geometry
from strata.base.program import Op, Program
from strata.pack.experts import ExpertLayout
from strata.pack.formats import BlockFormat

ALIGNMENT = 256
"""Of every piece of VRAM."""

RELAID_ROWS, RELAID_BYTES = 4, 16
"""Rows of a quantised matrix that lie side by side, and what their bytes are rounded up to."""

ATTENTION_TILE = 64
"""Cells of one attention tile; a window keeps every tile's maximum, sum and output until they are merged."""

HEAD_RUN = 64
"""Logits of which a head keeps the largest while it looks for the top."""

SUM_LANES = 256
"""Partial sums of a row's log-sum-exp."""

OUTBOX_BYTES = 8960
"""What a graph reports: the error word and the summaries of a head."""

DRAFT_EXPERTS = tuple(f"mtp.ffn_{part}_exps.weight" for part in ("gate", "up", "down"))

FormatOf = Callable[[str], BlockFormat]


def aligned(n_bytes: int) -> int:
    """Bytes that a piece of `n_bytes` takes."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def relaid_bytes(rows: int, row_bytes: int) -> int:
    """A quantised matrix: the blocks of the file in another order, in whole groups of rows."""
    group = -(-RELAID_ROWS * row_bytes // RELAID_BYTES) * RELAID_BYTES
    return aligned(-(-rows // RELAID_ROWS) * group)


def matrix_bytes(format: BlockFormat, rows: int, row_bytes: int) -> int:
    """A matrix in any format; float ones are as in the file."""
    return relaid_bytes(rows, row_bytes) if format.group else aligned(rows * row_bytes)


def activation_bytes(rows: int, columns: int, group: int) -> int:
    """Codes, scales and sums of quantised rows."""
    values = rows * columns
    return aligned(values) + aligned(values // group * 4) + aligned(values // 16 * 4)


def private_bytes(
    programs: Iterable[Program], format_of: FormatOf, experts: ExpertLayout, form: tuple[bool, bool] | None = None
) -> int:
    """Scratch that ops of the programs ask for besides buffers, without what depends on the context.

    format_of: tensor name -> format. Ops that use one name share the place. form: None where VRAM holds all experts,
    else whether any layer has slots, and whether experts may come over the link.
    """
    largest: dict[str, int] = {}
    for program in programs:
        for op in program.ops:
            for name, n_bytes in _of_op(op, program, format_of, experts, form):
                largest[name] = max(largest.get(name, 0), n_bytes)
    return sum(map(aligned, largest.values()))


def _of_op(
    op: Op, program: Program, format_of: FormatOf, experts: ExpertLayout, form: tuple[bool, bool] | None
) -> Iterator[tuple[str, int]]:
    k, T = op.consts, program.T
    if op.kind == "linear":
        rows = T * k["rows"]
        x = op.buffers["x"]
        width = prod(program.buffers[x].shape[1:]) // k["rows"]
        for group in {format_of(op.buffers[f"w{i}"]).group for i in range(k["n"])} - {0}:
            yield f"{x}.{group}", activation_bytes(rows, width, group)
    elif op.kind == "experts":
        yield from _of_experts(op, T, format_of, experts, form)
    elif op.kind == "gdn_heads" and not k["advance"]:
        yield "gdn.arrived", 4 * -(-k["Hv"] * k["dv"] // 256)
    elif op.kind == "router":
        yield "router.arrived", 4
    elif op.kind == "ngram_mix":
        yield "ngram.gates", 4 * T * k["C"]


def _of_experts(
    op: Op, T: int, format_of: FormatOf, experts: ExpertLayout, form: tuple[bool, bool] | None
) -> Iterator[tuple[str, int]]:
    k, x = op.consts, op.buffers["x"]
    if op.layer < experts.n_layers:
        routed = [p.format for p in experts.layers[op.layer].projections]
    else:
        routed = [format_of(name) for name in DRAFT_EXPERTS]
    shared = [format_of(op.buffers[f"shared_{part}_w"]) for part in ("gate", "up", "down")]
    sides = [("routed", T * k["K"], k["F"], routed), ("shared", T, k["shared_width"], shared)]
    for group in {f.group for f in (*routed[:2], *shared[:2])} - {0}:
        yield f"{x}.{group}", activation_bytes(T, k["D"], group)
    if form is not None and op.layer < experts.n_layers:
        held, link = form
        sides = [*sides[0 if held else 1 :], *([("linked", *sides[0][1:])] if link else [])]
        yield "sums", 8 * T * k["D"]
    else:
        yield "terms", 8 * k["D"]
        yield "arrived", 4 * -(-k["D"] // 8)
    for name, n, width, formats in sides:
        gate, up, down = formats
        yield f"{name}.out", 4 * n * k["D"]
        yield f"{name}.h", 4 * n * width
        if down.group:
            yield f"{name}.hidden", activation_bytes(n, width, down.group)
        if not (gate == up and gate.group and down.group == 32 and width % 32 == 0):
            yield f"{name}.g", 4 * n * width
            yield f"{name}.u", 4 * n * width


def attention_shapes(programs: Iterable[Program]) -> frozenset[tuple[int, int, int, int, int]]:
    """(rows, heads, head size, cells of a block or 0, budget) of every attention of the programs."""
    names = ("H", "dh", "block", "budget")
    return frozenset(
        (min(p.T, WINDOW_ROWS), *(op.consts[n] for n in names))
        for p in programs
        for op in p.ops
        if op.kind == "qsa_attend"
    )


def context_bytes(g: Geometry, shapes: frozenset[tuple[int, int, int, int, int]], context: int) -> int:
    """Scratch that may grow with the context: scores of every block, partial results of attention tiles, a
    head's partial sums, and the tokens that penalties count. shapes: see `attention_shapes`."""
    scores = aligned(WINDOW_ROWS * (context // g.block_cells) * 4) if g.block_cells and g.qsa_layers else 0
    sums, parts = aligned(8 * WINDOW_ROWS * SUM_LANES), 0
    for rows, heads, size, block, budget in shapes:
        # Lists of blocks and the last cells have the room of the longest list in every context.
        cells = budget * block + block - 1 if block else budget or context
        tiles = -(-cells // ATTENTION_TILE)
        parts = max(parts, aligned(4 * rows * heads * tiles * (size + 2)))
    return scores + parts + sums + aligned(4 * context) + aligned(4 * WINDOW_ROWS)


def logits_bytes(V: int) -> int:
    """Logits of a window as they are and after penalties, with most of what the summaries of heads take."""
    rows = WINDOW_ROWS * V
    runs = -(-V // HEAD_RUN)
    sizes = (4 * rows, 4 * rows, 4 * rows, 4 * WINDOW_ROWS * runs, 4 * V, 8 * V)
    return sum(map(aligned, sizes))


def stream_bytes(g: Geometry) -> int:
    """Streams of a whole cell, twice: of the windows it is read in, and collected; without a window's own."""
    return 2 * aligned(4 * CELL_ROWS * g.CD) - aligned(4 * WINDOW_ROWS * g.CD)

