"""Experts on the device: a number of slots for every layer, which experts they hold, and the table that kernels read.

A slot holds gate, up and down of one expert in the device layout, one behind the other. Slots of a layer lie back to
back in an area of their own, and all slots of a layer have one size, so a swap inside a layer always fits. The table
has three words for each expert: the addresses of its matrices, or zeros while it is not resident.

Changes go between windows: `evict` takes an expert out of the host's table at once, `place` queues the copy of another
one beside the main stream, `landed` notes those that have arrived, and `publish` sends what changed to the device, in
front of the next window. A slot may be written again as soon as its expert is evicted: copies wait for what the main
stream was given before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from strata.base.errors import BadArgument, StrataError, need
from strata.base.progress import UPLOADING, report
from strata.gpu.device import Device
from strata.gpu.driver_calls import copy_held
from strata.gpu.gemv import Place
from strata.gpu.memory import MADE_UP, aligned
from strata.gpu.relayout import relayout_bytes, restore
from strata.gpu.upload import Uploader
from strata.pack.experts import PARTS, ExpertLayout

ABSENT = -1
"""No expert in a slot, no slot for an expert."""


class ExpertSource(Protocol):
    """Where the bytes of experts come from: an `ExpertStore`."""

    def raw(self, layer: int, e: int, part: int) -> np.ndarray:
        """uint8 (rows, row_bytes) of gate (0), up (1) or down (2), as in the file."""

    def pinned(self, layer: int, e: int) -> list[int] | None:
        """Addresses of the three in registered memory; None where they lie elsewhere."""


class ExpertSlots:
    """Slots of all layers, their contents, and the table.

    counts        (L,) slots of each layer; None for all experts of all layers
    table         (L, E, 3) uint64: the host's table, which the device gets with `publish`
    expert_of     for each layer int32 (slots,): the expert a slot holds or awaits, -1 for none
    by_table      kernels find experts through the table, as they must unless all layers hold all; if not, expert e lies
                  in slot e for good
    tail          (n, 2) int64 rows (layer, slot) of the slots that lie in one piece of memory: see `join_tail`

    Sizes and counts are known at once; addresses are made up until `allocate`.
    """

    def __init__(self, experts: ExpertLayout, counts: Sequence[int] | None = None, *, by_table: bool = False):
        L, E = experts.n_layers, experts.E
        self.experts = experts
        self.counts = (E,) * L if counts is None else tuple(int(n) for n in counts)
        need(len(self.counts) == L and all(0 <= n <= E for n in self.counts), "expert slots of the layers",
             found=self.counts, needed=f"{L} numbers from 0 to {E}")  # fmt: skip
        self.by_table = by_table or any(n < E for n in self.counts)
        self._offsets: list[tuple[int, int, int]] = []
        self._slot_bytes: list[int] = []
        for layer in experts.layers:
            ends = np.cumsum([0, *(aligned(_part_bytes(p)) for p in layer.projections)])
            self._offsets.append(tuple(int(x) for x in ends[:3]))
            self._slot_bytes.append(int(ends[3]))
            floats = [p.tensor.name for p in layer.projections if not p.format.group]
            if floats and self.by_table:
                raise BadArgument(
                    f"experts of tensor {floats[0]} cannot be swapped",
                    found="a float format, whose products know no table",
                    needed=f"slots for all {E} experts of all layers, or a quantised format",
                )
        self.table = np.zeros((L, E, 3), np.uint64)
        self.expert_of = [np.full(n, ABSENT, np.int32) for n in self.counts]
        self._slot_of = np.full((L, E), ABSENT, np.int32)
        self._areas = [MADE_UP] * L
        self._ends = list(self.counts)
        """Slots in front of the tail."""
        self.tail = np.zeros((0, 2), np.int64)
        self._tail_at = [MADE_UP] * L
        self._table_at = MADE_UP
        self._changed: tuple[int, int] | None = None
        self._coming: deque[tuple[int, int, int]] = deque()
        self._device: Device | None = None

    # ---- sizes

    def slot_bytes(self, layer: int) -> int:
        """Device bytes of a slot: gate, up and down, each rounded up to 256."""
        return self._slot_bytes[layer]

    def area_bytes(self, layer: int) -> int:
        return self.counts[layer] * self._slot_bytes[layer]

    @property
    def table_bytes(self) -> int:
        return aligned(self.table.nbytes)

    @property
    def n_bytes(self) -> int:
        """Device bytes of all slots and of the table."""
        return self.table_bytes + sum(self.area_bytes(l) for l in range(len(self.counts)))

    def join_tail(self, n_bytes: int) -> None:
        """Let the last slots of every layer, the same share of each and together at least n_bytes, lie in one piece,
        which others may use while these slots are empty. Before `allocate`. BadArgument for more than all slots have.
        """
        need(self.by_table and self._device is None, "slots to join", needed="those of a table without memory")
        sizes, counts = np.array(self._slot_bytes), np.array(self.counts)
        total = int(sizes @ counts)
        need(0 < n_bytes <= total, "bytes of joined slots", found=n_bytes, needed=f"at most {total}, those of all")
        exact = counts * (n_bytes / total)
        taken = np.minimum(exact.astype(np.int64), counts)
        for layer in np.argsort(taken - exact, kind="stable").tolist() * 2:
            if int(sizes @ taken) < n_bytes and taken[layer] < counts[layer]:
                taken[layer] += 1
        self._ends = (counts - taken).tolist()
        self.tail = np.array([(l, s) for l, n in enumerate(self.counts) for s in range(self._ends[l], n)], np.int64)

    @property
    def tail_bytes(self) -> int:
        """Device bytes of the tail."""
        return sum((n - end) * size for n, end, size in zip(self.counts, self._ends, self._slot_bytes, strict=True))

    @property
    def tail_address(self) -> int:
        """Where the tail begins; 0 without one."""
        return self._tail_at[int(self.tail[0, 0])] if len(self.tail) else 0

    def allocate(self, device: Device, uploader: Uploader, source: ExpertSource) -> None:
        """Take the memory: one area a layer, the tail, and the table. DoesNotFit if the device has less."""
        self._device, self._uploader, self._source = device, uploader, source
        self._table_at = device.alloc(self.table.nbytes)
        self._published = device.host(self.table.nbytes).view(np.uint64)
        self._publishing = device.record()
        self._areas = [device.alloc(n * size) if n else 0 for n, size in zip(self._ends, self._slot_bytes, strict=True)]
        at = device.alloc(self.tail_bytes) if len(self.tail) else 0
        for l, size in enumerate(self._slot_bytes):
            self._tail_at[l] = at
            at += (self.counts[l] - self._ends[l]) * size

    # ---- where kernels find experts

    def table_address(self, layer: int) -> int:
        """Device address of the layer's table: uint64 (E, 3), zeros for experts that are not resident."""
        return self._table_at + layer * self.table[0].nbytes

    def matrices(self, layer: int, part: int) -> Place:
        """Where kernels find gate (0), up (1) or down (2) of the layer's experts."""
        # Looking addresses up costs a layer 1 to 2 us, so where nothing moves kernels compute them.
        if not self.by_table:
            return Place(self._areas[layer] + self._offsets[layer][part], self._slot_bytes[layer])
        return Place(table=self.table_address(layer), part=part)

    def address(self, layer: int, slot: int, part: int) -> int:
        """Device address of a matrix in a slot."""
        start, number = self._areas[layer], slot
        if slot >= self._ends[layer]:
            start, number = self._tail_at[layer], slot - self._ends[layer]
        return start + number * self._slot_bytes[layer] + self._offsets[layer][part]

    # ---- what is where

    def resident(self, layer: int) -> np.ndarray:
        """bool (E,): experts that kernels find on the device."""
        return self.table[layer, :, 0] != 0

    def slot_of(self, layer: int, expert: int) -> int:
        """The slot that holds or awaits an expert, or -1."""
        return int(self._slot_of[layer, expert])

    def free_slots(self, layer: int) -> list[int]:
        """Slots that hold nothing and await nothing."""
        return np.flatnonzero(self.expert_of[layer] == ABSENT).tolist()

    @property
    def coming(self) -> list[tuple[int, int]]:
        """(layer, expert) of what was placed and has not landed, oldest first."""
        return [(layer, expert) for layer, expert, _ in self._coming]

    # ---- changes, between windows

    def place(self, layer: int, expert: int, slot: int) -> None:
        """Queue the copy of an expert into a free slot; it is a miss until it has `landed` and was published.

        Copies leave together, with the next `landed` or `publish` at the latest.
        """
        self._need_swaps(layer)
        need(0 <= slot < self.counts[layer] and self.expert_of[layer][slot] == ABSENT,
             f"a slot of layer {layer} to fill", found=slot, needed="one that is free")  # fmt: skip
        need(0 <= expert < self.experts.E and self.slot_of(layer, expert) == ABSENT,
             f"an expert of layer {layer} to place", found=expert, needed="one that is not there")  # fmt: skip
        self._queue(layer, expert, slot)
        self.expert_of[layer][slot], self._slot_of[layer, expert] = expert, slot
        self._coming.append((layer, expert, self._uploader.mark()))

    def evict(self, layer: int, expert: int) -> int:
        """Take an expert off the table, and return its slot, which is free now. Publish before the next window."""
        self._need_swaps(layer)
        need(bool(self.table[layer, expert, 0]), f"an expert of layer {layer} to evict", found=expert,
             needed="one that is on the device")  # fmt: skip
        slot = self.slot_of(layer, expert)
        self.expert_of[layer][slot] = self._slot_of[layer, expert] = ABSENT
        self._write(layer, expert, [0, 0, 0])
        return slot

    def move(self, layer: int, expert: int, slot: int) -> None:
        """Bring an expert that is on the device to a free slot of its layer, behind what the main stream was given;
        its old slot is free. Publish before the next window."""
        self._need_swaps(layer)
        need(0 <= slot < self.counts[layer] and self.expert_of[layer][slot] == ABSENT,
             f"a slot of layer {layer} to move to", found=slot, needed="one that is free")  # fmt: skip
        need(bool(self.table[layer, expert, 0]), f"an expert of layer {layer} to move", found=expert,
             needed="one that is on the device")  # fmt: skip
        old = self.slot_of(layer, expert)
        self._device.copy_in(self.address(layer, slot, 0), self.address(layer, old, 0), self._slot_bytes[layer])
        self.expert_of[layer][old] = ABSENT
        self._enter(layer, expert, slot)

    def close(self) -> None:
        """Drop what shows pinned memory, and who brings experts; the device is closed."""
        self._uploader = self._source = self._published = None

    def landed(self) -> list[tuple[int, int]]:
        """(layer, expert) of what has arrived since the last call, in the order of `place`; it is in the table now.

        What has not left yet leaves; nothing is waited for.
        """
        out = []
        self._uploader.send()
        while self._coming and self._uploader.arrived(self._coming[0][2]):
            out.append(self._arrive())
        return out

    def wait_landed(self) -> list[tuple[int, int]]:
        """Like `landed`, for everything that is on its way."""
        out = []
        while self._coming:
            self._uploader.wait(self._coming[0][2])
            out.append(self._arrive())
        return out

    @property
    def dirty(self) -> bool:
        """Whether the device's table differs from the host's."""
        return self._changed is not None

    def publish(self) -> bool:
        """Send what changed in the table, in order with the main stream; False if nothing did.

        Copies that were placed and have not left yet leave too.
        """
        self._uploader.send()
        if self._changed is None:
            return False
        first, stop = self._changed
        self._device.wait(self._publishing)
        place = self._published[first:stop]
        copy_held(place, self.table.reshape(-1)[first:stop])
        self._device.copy_in(self._table_at + 8 * first, place.ctypes.data, place.nbytes)
        self._publishing = self._device.record()
        self._changed = None
        return True

    def _need_swaps(self, layer: int) -> None:
        need(self.by_table and 0 <= layer < len(self.counts), f"experts of layer {layer} to swap",
             needed="slots that kernels read through the table")  # fmt: skip

    def _queue(self, layer: int, expert: int, slot: int, parts: Iterable[int] = range(3)) -> None:
        pinned = self._source.pinned(layer, expert)
        for part in parts:
            p, target = self.experts.layers[layer].projections[part], self.address(layer, slot, part)
            if pinned and p.format.group:
                self._uploader.pinned_matrix(p.format, target, pinned[part], p.rows, p.n_bytes // p.rows)
                continue
            raw = self._source.raw(layer, expert, part)
            if p.format.group:
                self._uploader.matrix(p.format, target, raw)
            else:
                self._uploader.raw(target, raw)

    def _arrive(self) -> tuple[int, int]:
        layer, expert, _ = self._coming.popleft()
        self._enter(layer, expert, self.slot_of(layer, expert))
        return layer, expert

    def _enter(self, layer: int, expert: int, slot: int) -> None:
        """Note in the host's table that a slot holds an expert."""
        self.expert_of[layer][slot], self._slot_of[layer, expert] = expert, slot
        self._write(layer, expert, [self.address(layer, slot, part) for part in range(3)])

    def _write(self, layer: int, expert: int, words: list[int]) -> None:
        self.table[layer, expert] = words
        first = 3 * (layer * self.experts.E + int(expert))
        old = self._changed or (first, first)
        self._changed = min(old[0], first), max(old[1], first + 3)

    # ---- filling

    def fill(self, order: Iterable[tuple[int, int]] | None = None) -> int:
        """Fill free slots with (layer, expert) pairs of `order`, best first, wait, publish and check. Returns how many.

        A pair whose layer is full, or that is resident, is passed over. Without an order, or a table, experts go by
        number. What was chosen is read in the order of the file. Raises StrataError if slot 0 of a layer does not hold
        what was uploaded.
        """
        chosen = self._choose(order)
        sizes = [len(pairs) * self.experts.blob_bytes(layer) for layer, pairs in enumerate(chosen)]
        for layer, pairs in enumerate(chosen):
            if pairs:
                report(UPLOADING, sum(sizes[:layer]), sum(sizes), f"experts of layer {layer}")
            for part in range(3):
                for expert, slot in sorted(pairs):
                    self._queue(layer, expert, slot, [part])
        self._uploader.finish()
        report(UPLOADING, sum(sizes), sum(sizes))
        for layer, pairs in enumerate(chosen):
            for expert, slot in pairs:
                self._enter(layer, expert, slot)
        self.publish()
        for layer in range(len(self.counts)):
            self._check(layer)
        return sum(map(len, chosen))

    def _choose(self, order: Iterable[tuple[int, int]] | None) -> list[list[tuple[int, int]]]:
        """For each layer (expert, slot) of what is to be uploaded."""
        L, E = len(self.counts), self.experts.E
        free = [deque(self.free_slots(l)) for l in range(L)]
        chosen: list[list[tuple[int, int]]] = [[] for _ in range(L)]
        there = [set(held.tolist()) for held in self.expert_of]
        by_number = ((l, e) for l in range(L) for e in range(E))
        for layer, expert in by_number if order is None or not self.by_table else order:
            need(0 <= layer < L and 0 <= expert < E, "a pair of the fill order", found=(layer, expert),
                 needed=f"below ({L}, {E})")  # fmt: skip
            if free[layer] and expert not in there[layer]:
                there[layer].add(expert)
                chosen[layer].append((int(expert), free[layer].popleft()))
        return chosen

    def read_back(self, layer: int, slot: int) -> list[np.ndarray]:
        """Gate, up and down of the slot, uint8 (rows, row_bytes) as in the file; waits for the main stream."""
        out = []
        for part, p in enumerate(self.experts.layers[layer].projections):
            data = np.empty(_part_bytes(p), np.uint8)
            self._device.download(self.address(layer, slot, part), data)
            out.append(restore(p.format, data, p.rows, p.columns) if p.format.group else data.reshape(p.rows, -1))
        return out

    def _check(self, layer: int) -> None:
        """Compare slot 0 of a layer with what it was uploaded from."""
        expert = int(self.expert_of[layer][0]) if self.counts[layer] else ABSENT
        if expert == ABSENT or not self.table[layer, expert, 0]:
            return
        for part, found in enumerate(self.read_back(layer, 0)):
            wanted = self._source.raw(layer, expert, part)
            if not np.array_equal(found, wanted):
                at = int(np.flatnonzero(found.reshape(-1) != np.asarray(wanted).reshape(-1))[0])
                raise StrataError(
                    f"slot 0 of layer {layer} does not hold what was uploaded",
                    found=f"another byte {at} in {PARTS[part]} of expert {expert}",
                    needed="the file's bytes",
                    advice="The device or its memory may be faulty.",
                )


def _part_bytes(p) -> int:
    """Device bytes of one matrix."""
    return relayout_bytes(p.format, p.rows, p.columns) if p.format.group else p.n_bytes
