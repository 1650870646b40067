"""The draft layer behind a prefill chunk: K and V of its cells, made of the chunk's streams where they are."""

from __future__ import annotations

import numpy as np

from strata.base.errors import need
from strata.base.program import Program
from strata.gpu.chunk_lower import ChunkLowering
from strata.gpu.chunk_memory import ChunkMemory
from strata.gpu.error_word import NO_ERROR
from strata.gpu.mailbox import inbox, outbox
from strata.gpu.prefill import Chunks
from strata.gpu.prefill_ops import CHUNK_LOWERING


class DraftChunks:
    """Runs an append for many cells in the arena of a trunk's chunks, which is idle meanwhile.

    streams  address of the chunk's streams, (rows, C D) float32
    """

    def __init__(self, program: Program, chunks: Chunks, streams: int):
        self.program, self.chunks, self._streams = program, chunks, streams
        self._ones = np.ones(program.buffers["mtp.one"].shape, np.float32)
        self._row_bytes = 4 * program.buffers["mtp.x"].shape[1]
        self.arena = ChunkMemory(program, chunks.arena.memory, {"mtp.x": streams}, ("mtp.one",))
        launches = self._lower(program.T).launches
        needed, room = self.arena.measured(), chunks.arena.n_bytes
        need(needed <= room, "memory of a chunk for its draft layer", found=room, needed=needed)
        self.arena.lie_at(chunks.arena.base)
        chunks.device.prepare(launches)

    def _lower(self, T: int) -> ChunkLowering:
        c = self.chunks
        return ChunkLowering(self.program, self.arena, c.weights, c.context, T).run(CHUNK_LOWERING)

    def run(self, first_row: int, tokens: np.ndarray, position: int) -> list[ChunkLowering]:
        """Store cells from `position` on: streams from row first_row of the chunk, tokens (n,) int32 after them.

        Returns what was run, part by part; the error word is that of the last part, or of the first that failed.
        """
        c, done = self.chunks, []
        if c.borrow is not None:
            c.borrow()
        for first in range(0, len(tokens), self.program.T):
            part = np.ascontiguousarray(tokens[first : first + self.program.T], np.int32)
            self.arena.elsewhere["mtp.x"] = self._streams + (first_row + first) * self._row_bytes
            c.device.upload(self.arena.address("mtp.tokens"), part)
            c.device.upload(self.arena.address("mtp.pos"), np.array([position + first], np.int64))
            c.device.upload(self.arena.address("mtp.one"), self._ones)
            low = self._lower(len(part))
            done.append(low)
            c.device.run([*inbox(c.host_out.ctypes.data, c.arena.error, 0, c.arena.error), *low.launches,
                          *outbox(c.arena.error, c.host_out.ctypes.data, 8)])  # fmt: skip
            c.device.synchronize()
            if int(c.host_out[:8].view(np.uint64)[0]) != NO_ERROR:
                break
        return done
