"""Experts that device memory does not hold, on their way to a prefill chunk: batch by batch through a ring of places.

A chunk asks for nearly every expert of every layer, so which ones it needs is known before it begins. Its products take
experts in batches by number; a stage is what one batch lacks of gate and up, or of down. While the products of a stage
run, the next stages cross the link. Resident experts are read in their slots: a table of its own tells kernels where.

Neighbours are copied as one, straight to their places, and laid out there in place. From pinned memory the host only
queues, so it is always ahead of the link; other sources go through the pinned pieces of the `Uploader`, which threads
fill. What cannot be laid out in place goes matrix by matrix.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from strata.base.errors import need
from strata.gpu.device import COPY_STREAMS, MAIN, Device
from strata.gpu.expert_store import ExpertStore
from strata.gpu.gemv import Place
from strata.gpu.launch import Launch
from strata.gpu.memory import MADE_UP, aligned
from strata.gpu.relayout import relayout_bytes
from strata.gpu.relayout_stack import in_place, relayout_stack
from strata.gpu.slots import ExpertSlots
from strata.gpu.upload import Uploader
from strata.pack.experts import Projection

PLACES = 4
"""Stages in the ring: one is read, three are on their way, so that attention hides a part of the link's time too."""

STAGE_BYTES = 96 << 20
"""Of one place: some fifty experts, enough to fill a device with their products."""

COPY, LAYOUT = COPY_STREAMS

POINTS = ("copies", "copied", "waits", "arrived")
"""What `watch` hears of a stage: its copies begin and end on the stream COPY; the main stream waits, has it."""


@dataclass(frozen=True)
class Stage:
    """Experts first .. first + n - 1 of a layer: their gate and up (parts 0, 1) or down (2)."""

    layer: int
    parts: tuple[int, ...]
    first: int
    n: int


@dataclass
class _Coming:
    """What a stage brings: copies (place, source, bytes) of pinned memory and of other memory, launches that lay them
    out, and single matrices (expert, part, place) that are not laid out in place."""

    layer: int
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    bounced: list[tuple[int, int, int]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    others: list[tuple[int, int, int]] = field(default_factory=list)


class _Facts:
    """Of the three parts of a layer's experts. kinds: the first part of the same shape and format."""

    def __init__(self, projections: Sequence[Projection]):
        self.projections = projections
        shapes = [(p.format.name, p.rows, p.columns) for p in projections]
        self.kinds = np.array([shapes.index(shape) for shape in shapes])
        self.sizes = np.array([p.n_bytes for p in projections])
        self.rooms = np.array([aligned(p.n_bytes) for p in projections])
        self.relaid = np.array([aligned(relayout_bytes(p.format, p.rows, p.columns)) for p in projections])
        self.in_place = np.array([in_place(p.format, p.rows, p.columns) for p in projections])


class ExpertStream:
    """The ring, its table, and the order of a chunk: `begin`, then `arrive` and `leave` at every stage in turn.

    Sizes are known at once; `allocate` takes the memory. watch(point, stage) is for measurements; see POINTS.
    """

    def __init__(self, slots: ExpertSlots, *, stage_bytes: int | None = None):
        self.slots, E = slots, slots.experts.E
        for p in (p for layer in slots.experts.layers for p in layer.projections):
            need(p.format.group != 0, f"experts in {p.format.name} on their way", needed="a quantised format")
        self._facts = [_Facts(layer.projections) for layer in slots.experts.layers]
        largest = max(int(max(f.relaid[0] + f.relaid[1], f.relaid[2])) for f in self._facts)
        self.stage_bytes = stage_bytes = min(STAGE_BYTES, E * largest) if stage_bytes is None else stage_bytes
        need(largest <= stage_bytes, "a place for experts on their way", found=stage_bytes, needed=f">= {largest}")
        self.watch: Callable[[str, int], None] | None = None
        self._base = self._table = self._places = MADE_UP
        self._planned: tuple[Sequence[Stage], int] | None = None
        self._seen = np.zeros(0, np.uint64)
        self._coming: list[_Coming] = []
        self._number: dict[int, int] = {}
        self._sent: list[list[Any]] = []
        self._left: list[Any] = []

    @property
    def ring_bytes(self) -> int:
        """Device bytes of the ring."""
        return PLACES * aligned(self.stage_bytes)

    @property
    def list_bytes(self) -> int:
        """Device bytes of the table and of the list of places to lay out."""
        return self.slots.table_bytes + aligned(2 * self.slots.table.nbytes)

    @property
    def base(self) -> int:
        """Device address of the ring."""
        return self._base

    @property
    def coming_bytes(self) -> int:
        """Of the experts that the last chunk brought, as the host has them."""
        layers = self.slots.experts.layers
        single = sum(layers[c.layer].projections[part].n_bytes for c in self._coming for _, part, _ in c.others)
        return single + sum(n_bytes for c in self._coming for *_, n_bytes in (*c.copies, *c.bounced))

    def allocate(self, device: Device, uploader: Uploader, source: ExpertStore, ring: int = 0) -> None:
        """Take the memory; `source` has the bytes of all experts that have no slot. ring: address of memory for it that
        is free while chunks run; 0: of its own."""
        self._device, self._uploader, self._source = device, uploader, source
        self._base = ring or device.alloc(self.ring_bytes)
        self._table = device.alloc(self.slots.table.nbytes)
        self._places = device.alloc(2 * self.slots.table.nbytes)
        for p in {(p.format, p.columns) for layer in self.slots.experts.layers for p in layer.projections}:
            uploader.table(*p)  # nothing waits for one in the middle of a chunk

    # ---- for the lowering

    def place(self, layer: int, part: int) -> Place:
        """Where products of a chunk find gate (0), up (1) or down (2) of a layer's experts."""
        return Place(table=self._table + layer * self.slots.table[0].nbytes, part=part)

    def experts_a_stage(self, layer: int, parts: tuple[int, ...]) -> int:
        """Experts whose parts fill a place, if none of them has a slot."""
        return min(self.slots.experts.E, self.stage_bytes // int(self._facts[layer].relaid[list(parts)].sum()))

    # ---- what comes where

    def _plan(self, stages: Sequence[Stage]) -> None:
        """Where everything will be, for the device too. Stands until slots or the host's places change."""
        table, missing, lists = self.slots.table.copy(), self.slots.table[:, :, 0] == 0, []
        self._coming, self._number = [], {}
        for (layer, parts), members in groupby(enumerate(stages), key=lambda one: (one[1].layer, one[1].parts)):
            some = []
            for i, stage in members:
                experts = stage.first + np.flatnonzero(missing[layer, stage.first : stage.first + stage.n])
                if experts.size:
                    self._number[i] = len(self._coming) + len(some)
                    some.append(experts)
            if some:
                lists.append(self._group(layer, parts, some, table, sum(map(len, lists))))
        self._device.upload(self._table, table)
        if lists and sum(map(len, lists)):
            self._device.upload(self._places, np.repeat(np.concatenate(lists), 2))

    def _group(
        self, layer: int, parts: tuple[int, ...], experts: list[np.ndarray], table: np.ndarray, n_listed: int
    ) -> np.ndarray:
        """Add to `_coming` what neighbouring stages of a layer bring: `experts` of each. Places are noted in `table`;
        those of what is laid out, uint64, are returned, and will stand behind n_listed others in their list."""
        facts, n = self._facts[layer], len(experts)
        of = np.repeat(np.arange(n), [len(parts) * len(some) for some in experts])  # the stage of every matrix
        numbers, parts_of = np.repeat(np.concatenate(experts), len(parts)), np.tile(parts, sum(map(len, experts)))
        sources = self._source.addresses[layer, numbers, parts_of]
        order = np.lexsort((sources, of))
        numbers, parts_of, sources = numbers[order], parts_of[order], sources[order]
        sizes, rooms = facts.sizes[parts_of], facts.rooms[parts_of]
        good = facts.in_place[parts_of] & (sources != 0)
        # A run is copied as one: neighbours in memory whose distance keeps both within their room.
        steps, first = np.diff(sources), np.ones(len(sources), bool)
        first[1:] = (steps < sizes[:-1]) | (steps > rooms[:-1]) | (steps % 16 != 0) | ~good[1:] | ~good[:-1]
        first[1:] |= of[1:] != of[:-1]
        starts, run = np.flatnonzero(first), np.cumsum(first) - 1
        ends = np.append(starts[1:], len(sources)) - 1
        lengths = np.where(good[starts], sources[ends] + sizes[ends] - sources[starts], facts.relaid[parts_of[starts]])
        ahead = np.append(0, np.cumsum(-(-lengths // 256) * 256)[:-1])
        bounds = np.searchsorted(of[starts], np.arange(n + 1))  # runs of every stage
        ring = self._base + (len(self._coming) + np.arange(n)) % PLACES * aligned(self.stage_bytes)
        places = ring[of[starts]] + ahead - ahead[bounds[of[starts]]]
        targets = places[run] + sources - sources[starts][run]
        table[layer, numbers, parts_of] = targets
        runs, direct = list(zip(places.tolist(), sources[starts].tolist(), lengths.tolist(), strict=True)), good[starts]
        inside, kinds, listed = np.searchsorted(of, np.arange(n + 1)).tolist(), facts.kinds[parts_of], []
        for k, (begin, end) in enumerate(pairwise(bounds.tolist())):
            coming, mine = _Coming(layer), slice(inside[k], inside[k + 1])
            for copy, whole in zip(runs[begin:end], direct[begin:end].tolist(), strict=True):
                if whole:
                    (coming.copies if self._device.is_registered(*copy[1:]) else coming.bounced).append(copy)
            rest = inside[k] + np.flatnonzero(~good[mine])
            coming.others = list(zip(*(x[rest].tolist() for x in (numbers, parts_of, targets)), strict=True))
            for kind in dict.fromkeys(facts.kinds[list(parts)].tolist()):
                found = targets[mine][good[mine] & (kinds[mine] == kind)]
                if found.size:
                    p, at = facts.projections[kind], self._places + 16 * (n_listed + sum(map(len, listed)))
                    table_and_field = self._uploader.table(p.format, p.columns)
                    coming.launches += relayout_stack(p.format, at, len(found), p.rows, p.columns, *table_and_field)
                    listed.append(found)
            self._coming.append(coming)
        return np.concatenate(listed).astype(np.uint64) if listed else np.zeros(0, np.uint64)

    # ---- while a chunk runs

    def begin(self, stages: Sequence[Stage]) -> None:
        """Before a chunk, when no other is running: tell kernels where experts will be, and send the first ones.

        Experts must keep their slots, and their places in the host's memory, until the chunk has ended.
        """
        self._uploader.finish()  # what an interrupted chunk had sent
        for stream in COPY_STREAMS:
            self._device.wait(self._device.record(stream))
        planned = (stages, self._source.version)
        known = self._planned is not None and self._planned[0] is stages and self._planned[1] == planned[1]
        if not known or not np.array_equal(self._seen, self.slots.table):
            self._planned = None
            self._plan(stages)
            self._planned, self._seen = planned, self.slots.table.copy()
        self._sent, self._left = [], []
        if self._coming:
            self._device.after(COPY, self._device.record())  # who had the ring's memory before
        for i in range(min(PLACES, len(self._coming))):
            self._send(i)

    def _send(self, i: int) -> None:
        """Queue what is number i on its way. Its place is free when the products that read it last have ended."""
        coming, device = self._coming[i], self._device
        if coming.copies:
            if i >= PLACES:
                device.after(COPY, self._left[i - PLACES])
            self._tell("copies", i)
            for copy in coming.copies:
                device.copy_in(*copy, COPY)
            self._tell("copied", i)
            device.after(LAYOUT, device.record(COPY))
        for place, source, n_bytes in coming.bounced:  # in pieces, in order with the stream LAYOUT
            self._uploader.raw(place, np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(source)))
        self._uploader.send()
        device.run(coming.launches, LAYOUT)
        projections = self.slots.experts.layers[coming.layer].projections
        for e, part, at in coming.others:
            self._uploader.matrix(projections[part].format, at, self._source.raw(coming.layer, e, part))
        self._uploader.send()
        self._sent.append([device.record(stream) for stream in COPY_STREAMS])

    def arrive(self, i: int) -> None:
        """What is queued on the main stream from now on finds stage i in its place. The stages before are queued."""
        if i in self._number:
            number = self._number[i]
            self._tell("waits", number)
            for event in self._sent[number]:
                self._device.after(MAIN, event)
            self._tell("arrived", number)

    def leave(self, i: int) -> None:
        """All products of stage i are queued on the main stream: behind them its place is free."""
        if i in self._number:
            self._left.append(self._device.record())
            if len(self._sent) < len(self._coming):
                self._send(len(self._sent))

    def _tell(self, point: str, number: int) -> None:
        if self.watch is not None:
            self.watch(point, number)
