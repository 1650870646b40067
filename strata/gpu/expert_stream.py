"""Experts that device memory does not hold, on their way to a prefill chunk: batch by batch through a ring of places.

A chunk asks for nearly every expert of every layer, so which ones it needs is known before it begins. Its products take
experts in batches by number; a stage is what one batch lacks of gate and up, or of down. While the products of a stage
run, the next stages cross the link. Resident experts are read in their slots: a table of its own tells kernels where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.base.errors import need
from strata.gpu.device import COPY_STREAMS, MAIN, Device
from strata.gpu.gemv import Place
from strata.gpu.memory import MADE_UP, aligned
from strata.gpu.relayout import relayout_bytes
from strata.gpu.slots import ExpertSlots, ExpertSource
from strata.gpu.upload import Uploader

PLACES = 3
"""Stages in the ring: one is read, two are on their way, so that attention hides a part of the link's time too."""

STAGE_BYTES = 96 << 20
"""Of one place: some fifty experts, enough to fill a device with their products."""


@dataclass(frozen=True)
class Stage:
    """Experts first .. first + n - 1 of a layer: their gate and up (parts 0, 1) or down (2)."""

    layer: int
    parts: tuple[int, ...]
    first: int
    n: int


class ExpertStream:
    """The ring, its table, and the order of a chunk: `begin`, then `arrive` at every stage in turn.

    Sizes are known at once; `allocate` takes the memory.
    """

    def __init__(self, slots: ExpertSlots, *, stage_bytes: int | None = None):
        stage_bytes = STAGE_BYTES if stage_bytes is None else stage_bytes
        self.slots, self.stage_bytes = slots, stage_bytes
        largest = max(
            sum(self._bytes(l, p) for p in parts) for l in range(slots.experts.n_layers) for parts in ((0, 1), (2,))
        )
        need(largest <= stage_bytes, "a place for experts on their way", found=stage_bytes, needed=f">= {largest}")
        self._base = self._table = MADE_UP
        self._stages: list[Stage] = []
        self._sent: list[list[Any]] = []
        self._coming: list[list[tuple[int, int, int]]] = []

    def _bytes(self, layer: int, part: int) -> int:
        p = self.slots.experts.layers[layer].projections[part]
        need(p.format.group != 0, f"experts in {p.format.name} on their way", needed="a quantised format")
        return aligned(relayout_bytes(p.format, p.rows, p.columns))

    @property
    def n_bytes(self) -> int:
        """Device bytes of ring and table."""
        return PLACES * aligned(self.stage_bytes) + self.slots.table_bytes

    def allocate(self, device: Device, uploader: Uploader, source: ExpertSource) -> None:
        """Take the memory; `source` has the bytes of all experts that have no slot."""
        self._device, self._uploader, self._source = device, uploader, source
        self._base = device.alloc(PLACES * aligned(self.stage_bytes))
        self._table = device.alloc(self.slots.table.nbytes)

    # ---- for the lowering

    def place(self, layer: int, part: int) -> Place:
        """Where products of a chunk find gate (0), up (1) or down (2) of a layer's experts."""
        return Place(table=self._table + layer * self.slots.table[0].nbytes, part=part)

    def experts_a_stage(self, layer: int, parts: tuple[int, ...]) -> int:
        """Experts whose parts fill a place, if none of them has a slot."""
        return min(self.slots.experts.E, self.stage_bytes // sum(self._bytes(layer, p) for p in parts))

    # ---- while a chunk runs

    def begin(self, stages: list[Stage]) -> None:
        """Before a chunk, when no other is running: tell kernels where experts will be, and send the first ones.

        Experts must keep their slots until the chunk has ended.
        """
        self._uploader.finish()  # what an interrupted chunk had sent
        table = self.slots.table.copy()
        self._stages, self._coming = stages, []
        for i, stage in enumerate(stages):
            at, coming = self._base + i % PLACES * aligned(self.stage_bytes), []
            for e in range(stage.first, stage.first + stage.n):
                if self.slots.table[stage.layer, e, 0]:
                    continue
                for part in stage.parts:
                    table[stage.layer, e, part] = at
                    coming.append((e, part, at))
                    at += self._bytes(stage.layer, part)
            self._coming.append(coming)
        self._device.upload(self._table, table)
        self._sent = []
        for i in range(min(PLACES - 1, len(stages))):
            self._send(i)

    def _send(self, i: int) -> None:
        """Queue the copies of a stage; they wait for what the main stream was given, which has its last readers."""
        layer = self._stages[i].layer
        projections = self.slots.experts.layers[layer].projections
        for e, part, at in self._coming[i]:
            self._uploader.matrix(projections[part].format, at, self._source.raw(layer, e, part))
        self._uploader.send()
        self._sent.append([self._device.record(stream) for stream in COPY_STREAMS])

    def arrive(self, i: int) -> None:
        """What is queued on the main stream from now on finds stage i in its place. The stages before are queued."""
        if i + PLACES - 1 < len(self._stages):
            self._send(i + PLACES - 1)
        for event in self._sent[i]:
            self._device.after(MAIN, event)
