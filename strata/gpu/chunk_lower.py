"""The lowering of a prefill chunk: launches one after the other; inputs of products are kept while they are read."""

from __future__ import annotations

from collections.abc import Callable

from strata.base.program import Op, Program
from strata.gpu.activations import Activations
from strata.gpu.activations import quantise as quantise_rows
from strata.gpu.chunk_memory import ChunkMemory, written
from strata.gpu.expert_stream import ExpertStream, Stage
from strata.gpu.launch import Launch
from strata.gpu.lower import PRODUCTS, Lowering
from strata.gpu.qsa_append import KvSlots
from strata.gpu.weights import Weights


class ChunkLowering(Lowering):
    """Launches of a chunk of T rows, T up to the program's, in arena memory.

    stages  (index of the first launch that needs it, stage) of everything that `stream` has to bring
    ends    index of the first launch behind those that need it, for every stage
    """

    def __init__(
        self,
        program: Program,
        memory: ChunkMemory,
        weights: Weights,
        context: int,
        T: int,
        stream: ExpertStream | None = None,
    ):
        super().__init__(program, memory, weights, context, fuse=False)
        self.T, self.stream = T, stream
        self.stages: list[tuple[int, Stage]] = []
        self.ends: list[int] = []

    def stage(self, layer: int, parts: tuple[int, ...], first: int, n: int) -> None:
        """The launches from here on need these experts."""
        self.stages.append((len(self.launches), Stage(layer, parts, first, n)))

    def stage_end(self) -> None:
        """No launch from here on needs the experts of the last stage."""
        self.ends.append(len(self.launches))

    def scratch(self, name: str, n_bytes: int) -> int:
        return self.memory.scratch(name, n_bytes, self.index, self.index)

    def kv_slots(self, op: Op) -> KvSlots:
        return KvSlots(self.slot(op, "k"), self.slot(op, "v"), self.slot(op, "k_scales"), self.slot(op, "v_scales"))

    def kept(self, buffer: str, kind: int | str, n_bytes: int, make: Callable[[int], list[Launch]]) -> int:
        """Address of something made of a buffer's rows for products: made now, or before and still good."""
        key = (buffer, kind)
        if key not in self._activations:
            at = self.memory.scratch(f"{kind} of {buffer}", n_bytes, self.index, self._last_reader(buffer))
            self._activations[key] = at
            self.add(make(at))
        return self._activations[key]

    def quantise(self, op: Op, buffer: str, out: Activations) -> list[Launch]:
        return quantise_rows(self.memory.address(buffer), out, self.error, self.where(op))

    def _last_reader(self, buffer: str) -> int:
        """The last product that reads the buffer before it is written again."""
        last = self.index
        for index in range(self.index + 1, len(self.program.ops)):
            op = self.program.ops[index]
            if op.kind in PRODUCTS and op.buffers["x"] == buffer:
                last = index
            elif buffer in written(op):
                break
        return last
