"""The experts op as launches where every expert is in device memory: routed experts beside the shared one, combine."""

from __future__ import annotations

from strata.base.errors import need
from strata.base.program import Op
from strata.gpu.experts_ends import combine
from strata.gpu.experts_sides import Side, add_down, add_hidden, add_side, outputs_of, quantise_inputs, shared_side
from strata.gpu.float_gemv import FloatMatrix, float_gemv
from strata.gpu.gemv import Combine, combine_bytes, combines, gemv
from strata.gpu.lower import Lowering
from strata.gpu.split_experts import lower_split
from strata.gpu.weights import Matrix

COMBINED_ROWS = 1
"""Most rows of a window, 0 or 1, whose routed down product adds up the experts; else a kernel behind it does."""


def multiply(c: Lowering, op: Op, m: Matrix, x: str, T: int, y: int) -> None:
    """y (T, rows) = the buffer x times a matrix in any format."""
    if m.format.group:
        c.add(gemv(m.format, m.address, m.rows, c.activations(op, x, m.columns, m.format.group, T), y))
    else:
        c.add(float_gemv(c.memory.address(x), T, m.columns, [FloatMatrix(m.format.name, m.address, m.rows, y)]))


def begins_routing(c: Lowering, op: Op) -> bool:
    """Whether a product makes the logits of a router whose experts come next, all on the device, and may hold a branch
    up to the end of the routed experts."""
    following = c.program.ops[c.index + 1 : c.index + 3]
    if not c.fuse or [one.kind for one in following] != ["router", "experts"]:
        return False
    experts = following[1]
    by_table = experts.layer < c.weights.experts.n_layers and c.weights.slots.by_table
    if (by_table and c.split is not None) or op.buffers["x"] != experts.buffers["x"] or op.consts["rows"] != 1:
        return False
    names = {*c.inputs_of(op), *c.inputs_of(experts)}
    return c.has_activations(op.buffers["x"], {c.weights.tensors.info(name).format.group for name in names} - {0})


def lower_experts(c: Lowering, op: Op) -> None:
    k, T, slots = op.consts, c.T, c.weights.slots
    if op.layer < c.weights.experts.n_layers and slots.by_table:
        if c.split is not None:
            lower_split(c, op, c.split)
            return
        need(slots.counts[op.layer] == k["E"], f"experts of layer {op.layer} on the device",
             found=slots.counts[op.layer], needed=f"{k['E']}, or a CPU that computes the others")  # fmt: skip
    D, K, F, ids = k["D"], k["K"], k["F"], c.at(op, "ids")
    factors = c.weights.expert_scales(op.layer)
    shapes = ((F, D), (F, D), (D, F))
    places = tuple(c.weights.expert_place(op.layer, part, k["E"], *shapes[part]) for part in range(3))
    formats = tuple(c.weights.expert_format(op.layer, part) for part in range(3))
    sides = Side("routed", T * K, T, F, formats, places, ids, factors, experts=k["E"]), shared_side(c, op)
    quantise_inputs(c, op, *sides)
    if not c.release():  # else the routed side goes on in the branch of the router
        c.branch()
    routed, shared = sides
    # The memory of both forms, whichever is lowered first.
    outputs = outputs_of(c, op, routed)
    sums, arrived = map(c.scratch, ("experts.terms", "experts.arrived"), combine_bytes(D))
    weights, gate, y = c.at(op, "weights"), c.at(op, "shared_gate"), c.at(op, "y")
    hidden = add_hidden(c, op, routed)
    together = T <= COMBINED_ROWS and combines(formats[2], T, F)
    if not together:
        add_down(c, op, routed, hidden, outputs)
    c.branch()
    shared_outputs = add_side(c, op, shared)
    c.join()
    if together:  # the shared expert began earlier and has less to do
        ends = Combine(sums, arrived, weights, shared_outputs, gate, c.error, c.where(op), factors[2])
        add_down(c, op, routed, hidden, y, ends)
    else:
        places = (outputs, ids, weights, shared_outputs, gate, y)
        c.add(combine(*places, T, K, D, c.error, c.where(op), down_scales=factors[2]))
