"""How large a prefill chunk is: the numbers of rows there are, and bytes of a chunk. Needs no device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strata.base.errors import need
from strata.base.geometry import CELL_ROWS, Geometry
from strata.base.program import Program
from strata.gpu.chunk_lower import ChunkLowering
from strata.gpu.chunk_memory import Area, ChunkMemory, meetings, place
from strata.gpu.expert_stream import ExpertStream
from strata.gpu.gated_delta_wide import COLUMNS, KEY_GROUPS
from strata.gpu.layer_kinds import one_of_each
from strata.gpu.memory import MADE_UP, Memory, aligned
from strata.gpu.prefill_ops import CHUNK_LOWERING
from strata.gpu.qsa_wide import HEAD_SIZES, SLICE
from strata.gpu.slots import ExpertSlots
from strata.gpu.weights import Weights
from strata.pack.experts import ExpertLayout
from strata.pack.tensors import Tensors

CHUNKS = (8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512, 256)
"""Rows of a chunk, largest first. Rows share one expansion of the experts; beyond these there is little to share."""


def chunk_problem(g: Geometry) -> str | None:
    """What of a geometry the kernels of chunks do not take; windows take it."""
    checks = (
        (g.gdn_layers and g.gdn_key_dim not in [32 * n for n in KEY_GROUPS], f"keys of {g.gdn_key_dim} values"),
        (g.gdn_layers and g.gdn_value_dim % COLUMNS, f"delta-rule values of {g.gdn_value_dim}"),
        (g.qsa_layers and g.dh not in HEAD_SIZES, f"attention heads of {g.dh} values"),
        (g.qsa_layers and g.block_cells and g.indexer_dim % SLICE, f"indexer heads of {g.indexer_dim} values"),
    )
    return next((text for wrong, text in checks if wrong), None)


@dataclass(frozen=True)
class ChunkBytes:
    """Memory of a chunk program. arena, streams, and ring and lists of experts that come, on the device; staging pinned
    on the host."""

    rows: int
    arena: int
    streams: int
    staging: int
    ring: int = 0
    lists: int = 0

    @property
    def lendable(self) -> int:
        """What is needed only while a chunk is read, and may lie in slots that are empty then."""
        return self.arena + self.ring

    @property
    def _more(self) -> int:
        return self.lists + self.streams - 2 * (self.streams // self.rows * CELL_ROWS)

    @property
    def lasting(self) -> int:
        """The rest, beyond what a backend without chunks takes: that keeps the streams of a cell twice, more than a
        chunk of one cell does."""
        return max(0, self._more)

    @property
    def device_bytes(self) -> int:
        """Beyond what a backend without chunks takes."""
        return self.lendable + self._more


def stream_of(slots: ExpertSlots) -> ExpertStream | None:
    """What brings experts to a chunk; None where all of them are in their slots for good."""
    return ExpertStream(slots) if slots.by_table else None


def arena_of(
    program: Program, memory: Memory, weights: Weights, context: int, stream: ExpertStream | None = None
) -> ChunkMemory:
    """The measured arena of a chunk program; its weights are noted."""
    arena = _asked_for(program, memory, weights, context, stream)
    arena.measured()
    return arena


def _asked_for(
    program: Program, memory: Memory, weights: Weights, context: int, stream: ExpertStream | None
) -> ChunkMemory:
    """What a chunk program asks for; nothing has its place yet."""
    arena = ChunkMemory(program, memory)
    ChunkLowering(program, arena, weights, context, program.T, stream).run(CHUNK_LOWERING)
    return arena


def staging_bytes(program: Program) -> int:
    """Pinned host bytes for the n-gram rows of two chunks."""
    rows = program.buffers.get("ngram.rows")
    return 2 * rows.n_bytes if rows is not None else 0


class ChunkPrices:
    """Bytes of chunks of any number of rows, from the programs of one and of two cells: every buffer grows by the cell.

    program_of(rows) is the chunk program, of which one branch of every kind is lowered; slots say which experts the
    device holds, None: all. longer: the program of one cell at a longer context, by which what grows with the context
    is known at any. What was asked for is kept.
    """

    def __init__(
        self,
        program_of: Callable[[int], Program],
        tensors: Tensors,
        experts: ExpertLayout,
        slots: ExpertSlots | None = None,
        longer: Program | None = None,
    ):
        stream = stream_of(slots) if slots is not None else None
        self._ring, self._lists = (stream.ring_bytes, stream.list_bytes) if stream is not None else (0, 0)
        programs = [program_of(CELL_ROWS), program_of(2 * CELL_ROWS)]
        self._streams = aligned(programs[0].buffers["streams"].n_bytes)
        self._staging = staging_bytes(programs[0])
        self._contexts = [_context(p) for p in (programs[0], longer or programs[0])]
        programs += [longer] if longer is not None else []
        self._areas = [_areas(program, Weights(tensors, experts, slots), stream) for program in programs]
        self._met = meetings(self._areas[0])
        self._known: dict[tuple[int, int], ChunkBytes] = {}

    def of(self, rows: int, context: int | None = None) -> ChunkBytes:
        """The price of a chunk of so many rows, whole cells, at the context of the programs or, with `longer`, at
        another one of whole cells."""
        first, longer = self._contexts
        steps, rest = (0, 0) if context in (None, first) else divmod(context - first, longer - first or 1)
        need(not rest and (longer > first or not steps), "context of a chunk", found=context,
             needed=f"{first}, or more by a multiple of {longer - first}")  # fmt: skip
        if (rows, steps) not in self._known:
            self._known[rows, steps] = self._price(rows, steps)
        return self._known[rows, steps]

    def _price(self, rows: int, steps: int) -> ChunkBytes:
        cells = rows // CELL_ROWS
        one, two, *longer = self._areas
        grown = [
            Area(a.name, a.n_bytes + (b.n_bytes - a.n_bytes) * (cells - 1) + (c.n_bytes - a.n_bytes) * steps, a.spans)
            for a, b, c in zip(one, two, longer[0] if longer else one, strict=True)
        ]
        streams, staging = cells * self._streams, cells * self._staging
        return ChunkBytes(rows, place(grown, self._met), streams, staging, self._ring, self._lists)


def _context(program: Program) -> int:
    return program.buffers["rope"].shape[0]


def _areas(program: Program, weights: Weights, stream: ExpertStream | None) -> list[Area]:
    program = one_of_each(program, weights)
    memory = Memory([program])
    for name in [b.name for b in program.buffers.values() if b.role == "table"] + ["ngram.ticket"]:
        memory.add_table(name, MADE_UP)
    return _asked_for(program, memory, weights, _context(program), stream).areas
