"""What the programs of a backend ask for in memory and weights, found out before there is a device."""

from __future__ import annotations

import numpy as np

from strata.base.geometry import WINDOW_ROWS, Geometry
from strata.base.program import Program, ProgramSet
from strata.base.rotary import rotary_table
from strata.gpu.head import Head
from strata.gpu.lower import Lowering
from strata.gpu.memory import MADE_UP, Memory
from strata.gpu.ops import LOWERING
from strata.gpu.slots import ExpertSlots
from strata.gpu.split_experts import Split
from strata.gpu.weights import Weights
from strata.pack.experts import ExpertLayout
from strata.pack.tensors import Tensors

HOST_BUFFERS = ("ngram.ticket", "ngram.staged")
"""Memory of the host that kernels read in place."""


def lowered_programs(programs: ProgramSet) -> list[Program]:
    """Programs that become graphs: a prefill chunk is read as windows here, whose bits are the same."""
    return [p for p in programs.all() if p is not programs.prefill]


def of_draft(program: Program, programs: ProgramSet) -> bool:
    """Whether a program is the draft layer's, which makes its own graphs."""
    return programs.draft is not None and any(program is p for p in programs.draft.all())


def measure(
    programs: ProgramSet,
    geometry: Geometry,
    tensors: Tensors,
    experts: ExpertLayout,
    split: Split | None = None,
    slots: ExpertSlots | None = None,
) -> tuple[Memory, Weights]:
    """Memory and weights that the programs ask for, without a device; both still measuring."""
    longest = programs.chunk or programs.prefill
    memory = Memory(lowered_programs(programs), [longest.buffers["streams"]])
    weights = Weights(tensors, experts, slots)
    context = programs.prefill.buffers["rope"].shape[0]
    memory.add_table(
        "rope", weights.array("rope", "tables", rotary_table(context, geometry.rotary_dims, geometry.rope_base))
    )
    memory.add_table("mtp.one", weights.array("mtp.one", "tables", np.ones((WINDOW_ROWS, geometry.C), np.float32)))
    for name in HOST_BUFFERS:
        memory.add_table(name, MADE_UP)
    for program in lowered_programs(programs):
        for fuse in (True, False):
            Lowering(program, memory, weights, context, fuse=fuse, split=split).run(LOWERING)
    Head.measure(memory, geometry.V, context)
    return memory, weights
