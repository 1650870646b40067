"""What prefill chunks of a file take, from its headers; priced when a plan first asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from strata.arch.flash_next.program import trunk_program
from strata.base.geometry import CELL_ROWS, Geometry
from strata.base.program import Program
from strata.gpu.chunk_plan import ChunkBytes, ChunkPrices, chunk_problem
from strata.gpu.slots import ExpertSlots
from strata.pack.experts import ExpertLayout
from strata.pack.gguf_file import GgufFile, TensorInfo
from strata.planner.needs import PREFILL, trunk_programs


class _Headers:
    """Records of tensors that outlive the opened file; there is no data behind them."""

    def __init__(self, tensors: Mapping[str, TensorInfo]):
        self._tensors, self.held = dict(tensors), {}

    def info(self, name: str) -> TensorInfo:
        return self._tensors[name]


class ChunkFacts:
    """Prices of chunks of one file. problem: why its prompts are read by windows alone, or None."""

    def __init__(self, gguf: GgufFile, g: Geometry, experts: ExpertLayout):
        self._g, self._headers, self._experts = g, _Headers(gguf.tensors), experts
        self.problem = chunk_problem(g)
        if self.problem is None and not all(p.format.group for layer in experts.layers for p in layer.projections):
            self.problem = "float experts"

    def of(self, rows: int, context: int, shared: bool) -> ChunkBytes:
        """The price of a chunk of `rows` rows beside `context` cells, both whole cells of the prefill grid. shared: the
        GPU holds a part of the experts, so others come over the link."""
        found = self._prices.of(rows, context)
        return found if shared else replace(found, ring=0, lists=0)

    @cached_property
    def _prices(self) -> ChunkPrices:
        slots = ExpertSlots(self._experts, by_table=True)
        longer = self._program(CELL_ROWS, 2 * CELL_ROWS)
        return ChunkPrices(lambda rows: self._program(rows, CELL_ROWS), self._headers, self._experts, slots, longer)

    def _program(self, rows: int, context: int) -> Program:
        """Cells of either KV format lie outside of a chunk's own memory."""
        if (rows, context) == (CELL_ROWS, CELL_ROWS):
            return trunk_programs(self._g)[PREFILL]
        return trunk_program(self._g, rows, context, "f16", advance=True)
