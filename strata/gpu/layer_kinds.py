"""A program cut down to one branch of every kind, for measuring: branches of one kind ask for the same memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from strata.base.program import Op, Program
from strata.gpu.weights import Weights


def one_of_each(program: Program, weights: Weights) -> Program:
    """The program without branches that are like an earlier one; the first and the last stay.

    A branch ends where its output is added to the streams. Alike are branches whose ops have the same constants,
    buffers, and formats and shapes of tensors. What is alive from one branch into the next is the same between any two,
    so the lifetimes of what is left meet as in the whole program. Only sizes and lifetimes may be taken from the
    result.
    """
    branches = _branches(program)
    kept: list[Op] = []
    seen: set[Hashable] = set()
    for i, ops in enumerate(branches):
        kind = (i == 0, i == len(branches) - 1, *(_kind(op, program, weights) for op in ops))
        if kind not in seen:
            seen.add(kind)
            kept += ops
    return replace(program, ops=tuple(kept))


def _branches(program: Program) -> list[list[Op]]:
    out: list[list[Op]] = [[]]
    for op in program.ops:
        out[-1].append(op)
        if op.kind == "hc_add":
            out.append([])
    return [ops for ops in out if ops]


def _kind(op: Op, program: Program, weights: Weights) -> Hashable:
    """What an op asks for memory by."""
    ports = []
    for port, name in op.buffers.items():
        buffer = program.buffers.get(name)
        if buffer is None:
            tensor = weights.tensors.info(name)
            ports.append((port, tensor.format.name, tensor.shape))
        else:  # a layer's own state has a name of its own, and is not measured
            ports.append((port, buffer.role if buffer.role in ("cells", "recurrent") else name, buffer.shape))
    routed: tuple = ()
    if op.kind == "experts":
        routed = tuple((p.format.name, p.scale is None) for p in weights.experts.layers[op.layer].projections)
    return op.kind, tuple(op.consts.items()), tuple(ports), routed
