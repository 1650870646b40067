"""Where the host's bytes of the routed experts lie, and whether the device reads them there.

file      in the mapping of the file, nothing pinned: uploads go through bounce buffers, kernels do not read
mapped    in the mapping, which is pinned in place, read only: no copy, its pages stay in memory
pinned    in an arena of anonymous memory, filled from the file and pinned
resident  like pinned, but the arena has only what the device does not hold; an `exchange` moves bytes both ways

Kernels read the experts of the last three at the addresses of `device_table`, if the device can.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from strata.base.errors import BadArgument, Closed, DoesNotFit, need
from strata.gpu.device import Device
from strata.gpu.download import Downloader
from strata.gpu.slots import ExpertSlots
from strata.pack.experts import PARTS, ExpertLayout
from strata.pack.gguf_file import GgufFile

MODES = ("file", "mapped", "pinned", "resident")
ALIGN = 64
PAGE = mmap.PAGESIZE
TOUCH_BYTES = 64 << 20
"""A thread touches that much of a mapping at a time."""
MOST_THREADS = 16


def place_bytes(experts: ExpertLayout, layer: int) -> int:
    """Host bytes of one expert in an arena: gate, up and down, each rounded up to 64."""
    return sum(_up(p.n_bytes) for p in experts.layers[layer].projections)


def arena_bytes(experts: ExpertLayout, held: np.ndarray) -> int:
    """Host bytes of an arena for the experts of held, bool (L, E)."""
    n = sum(int(np.count_nonzero(held[l])) * place_bytes(experts, l) for l in range(experts.n_layers))
    return -(-n // PAGE) * PAGE


class ExpertStore:
    """The experts' bytes in the host's memory.

    addresses  (L, E, 3) int64: gate, up and down in memory that stays there, 0 for an expert that is only on the device
    version    changes whenever an address does: tables that others made of them are to be made again

    A resident store reads from the mapping until `settle`. Raises DoesNotFit where the system has no memory or does
    not pin it, BadArgument for a mode the device cannot have.
    """

    def __init__(
        self, experts: ExpertLayout, gguf: GgufFile, device: Device, mode: str = "file", *, threads: int | None = None
    ):
        need(mode in MODES, "where experts lie", found=mode, needed=", ".join(MODES))
        if mode == "mapped" and not (device.can_read_host and device.registers_read_only):
            raise BadArgument(
                "the device cannot pin a mapped file in place",
                found=f"{device.name} does not register read-only memory",
                needed="mode 'pinned', which copies the experts, or 'file', whose misses all go to the CPU",
            )
        self.experts, self.mode, self.version = experts, mode, 0
        self._gguf, self._keeper, self._device = gguf, gguf.keeper(), device
        self._threads = threads or min(MOST_THREADS, os.cpu_count() or 1)
        self._arena: mmap.mmap | None = None
        self._bytes: np.ndarray | None = None
        self._base = 0
        self._downloader: Downloader | None = None
        self._registered: list[int] = []
        self._pinned_bytes = 0
        self._closed = False
        self.addresses = experts.addresses.copy()
        everything = np.ones((experts.n_layers, experts.E), bool)
        try:
            if mode == "mapped":
                self._register_mapping()
            elif mode == "pinned":
                self._fill_arena(everything)
        except BaseException:
            self.close()
            raise

    # ---- reading

    def raw(self, layer: int, e: int, part: int) -> np.ndarray:
        """uint8 (rows, row_bytes) view of gate (0), up (1) or down (2) as in the file, not to be written.

        Valid until `close` or an `exchange` of the expert. What a resident store left to the device is read from the
        file.
        """
        self._need_open()
        if self._bytes is None or not self.addresses[layer, e, part]:
            return self.experts.raw(layer, e, PARTS[part])
        return self._place(layer, e, part)

    def pinned(self, layer: int, e: int) -> list[int] | None:
        """Addresses of gate, up and down where the device reads them in place; None where it does not."""
        self._need_open()
        if not self._registered:
            return None
        addresses = self.addresses[layer, e].tolist()
        return addresses if addresses[0] else None

    def device_table(self) -> np.ndarray | None:
        """(L, E, 3) uint64 addresses that kernels can read, 0 for experts without one; None if they cannot read any."""
        self._need_open()
        return self.addresses.astype(np.uint64) if self._registered else None

    @property
    def pinned_bytes(self) -> int:
        """Host bytes that cannot be given back to the system while the store is open."""
        return self._pinned_bytes

    def check_file(self) -> None:
        """FileError naming a shard that is no longer as long as it was when it was opened."""
        self._need_open()
        self._gguf.check_sizes()

    # ---- memory of its own

    def settle(self, slots: ExpertSlots) -> None:
        """Take what the slots do not hold into memory, and rely on the device for the rest. Once, after the fill.

        Takes `download_bytes` (strata.gpu.download) of the device for exchanges.
        """
        need(self.mode == "resident" and self._arena is None, "a store to settle", found=f"mode {self.mode}",
             needed="a resident one, once")  # fmt: skip
        held = np.array([~slots.resident(l) for l in range(self.experts.n_layers)])
        self._downloader = Downloader(self._device, self.experts)
        self._fill_arena(held)
        self.addresses[~held] = 0

    def exchange(self, slots: ExpertSlots, layer: int, incoming: int, victim_slot: int) -> int:
        """Swap an expert in memory with the one in a slot; returns which that was. Publish the slots afterwards.

        The victim's bytes come back from the device first, and take the place of the incoming expert when that has
        arrived on the device: at no moment is there no copy of either. Waits for both.
        """
        self._need_open()
        need(self.mode == "resident" and self._arena is not None, "a store for an exchange", found=f"mode {self.mode}",
             needed="a resident one that was settled")  # fmt: skip
        need(not slots.coming, "an exchange while copies are on their way", found=len(slots.coming))
        victim = int(slots.expert_of[layer][victim_slot])
        in_memory = self.addresses[layer, :, 0] != 0
        need(victim >= 0 and not in_memory[victim] and in_memory[incoming] and not slots.resident(layer)[incoming],
             f"an exchange in layer {layer}", found=f"expert {incoming} for expert {victim} of slot {victim_slot}",
             needed="one that is in memory for one that is only on the device")  # fmt: skip
        parts = self._downloader.expert(slots, layer, victim_slot)
        slots.evict(layer, victim)
        slots.place(layer, incoming, victim_slot)
        slots.wait_landed()
        for part, data in enumerate(parts):
            self._place(layer, incoming, part)[:] = data
        self.addresses[layer, victim] = self.addresses[layer, incoming]
        self.addresses[layer, incoming] = 0
        self.version += 1
        return victim

    def _place(self, layer: int, e: int, part: int) -> np.ndarray:
        """A matrix in the arena."""
        p = self.experts.layers[layer].projections[part]
        at = int(self.addresses[layer, e, part]) - self._base
        return self._bytes[at : at + p.n_bytes].reshape(p.rows, -1)

    def _fill_arena(self, held: np.ndarray) -> None:
        n_bytes = arena_bytes(self.experts, held)
        if not n_bytes:
            return
        try:
            self._arena = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise DoesNotFit("the system has no memory for the experts", found=str(error), needed=f"{n_bytes:,} bytes",
                             advice='Close other programs, or load with experts="mapped".') from error  # fmt: skip
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._arena.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(self._arena, np.uint8)
        at, self._base = 0, self._bytes.ctypes.data
        for layer, e in np.argwhere(held):
            for part, p in enumerate(self.experts.layers[layer].projections):
                self.addresses[layer, e, part] = self._base + at
                at += _up(p.n_bytes)
        # Filling is the first touch: pages that many threads fault in are pinned ten times faster than untouched ones.
        self._each(self._fill_expert, [(int(l), int(e)) for l, e in np.argwhere(held)])
        self.version += 1
        if self._device.can_read_host:
            self._register([(self._base, n_bytes)], read_only=False)

    def _fill_expert(self, which: tuple[int, int]) -> None:
        for part in range(len(PARTS)):
            np.copyto(self._place(*which, part), self.experts.raw(*which, PARTS[part]))

    # ---- pinning

    def _register_mapping(self) -> None:
        """Pin whole pages of the mapping that hold expert tensors, after their pages were read."""
        names = dict.fromkeys(p.tensor.name for layer in self.experts.layers for p in layer.projections)
        spans: list[tuple[int, int]] = []
        for start, n_bytes in sorted((self._gguf.address(name), self._gguf.info(name).n_bytes) for name in names):
            first, stop = start // PAGE * PAGE, -(-(start + n_bytes) // PAGE) * PAGE
            if spans and first <= sum(spans[-1]):
                spans[-1] = (spans[-1][0], stop - spans[-1][0])
            else:
                spans.append((first, stop - first))
        pieces = []
        for name in names:
            self._gguf.advise(name, "willneed")
            flat = self._gguf.raw(name).reshape(-1)
            pieces += [flat[at : at + TOUCH_BYTES] for at in range(0, flat.size, TOUCH_BYTES)]
        self._each(lambda piece: int(piece[::PAGE].max()), pieces)
        self._register(spans, read_only=True)

    def _register(self, spans: list[tuple[int, int]], read_only: bool) -> None:
        for address, n_bytes in spans:
            self._device.register(address, n_bytes, read_only)
            self._registered.append(address)
        self._pinned_bytes = sum(n for _, n in spans)

    def _each(self, work: Callable, items: Iterable) -> None:
        with ThreadPoolExecutor(self._threads, "strata-experts") as pool:
            for _ in pool.map(work, items):
                pass

    # ---- life

    def _need_open(self) -> None:
        if self._closed:
            raise Closed("the store of experts was closed", needed="an open one", advice="Load the model again.")

    def close(self) -> None:
        """Unpin and give memory back; nothing that reads it may be queued. May be called twice."""
        self._closed = True
        while self._registered:
            address = self._registered.pop()
            if self._device.is_registered(address, 1):  # a device that was closed first has undone it
                self._device.unregister(address)
        self._pinned_bytes = 0
        self._bytes, self._downloader, self._keeper = None, None, ()
        if self._arena is not None:
            with suppress(BufferError):  # a view is out: the memory goes with the last one
                self._arena.close()
            self._arena = None


def _up(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN) * ALIGN
