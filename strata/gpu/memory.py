"""Where everything lies on the device: io, scratch and table buffers of all programs, and the slots of sessions.

Built in two passes, like the CPU's: a first lowering with `measuring` on finds what private scratch ops ask for (the
addresses it sees are made up), `allocate` takes one piece of memory, and a second lowering gets the real addresses.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strata.base.program import Buffer, Program
from strata.gpu.device import ALIGN, Device

MADE_UP = 1 << 44
"""First address of the measuring pass: aligned, not null, and no real one."""

MOST_INBOX_BYTES = 8 << 10
"""Larger io buffers do not go through the inbox."""

INBOX_SKIPS = ("ngram.rows", "ngram.ticket", "mtp.x")
"""io buffers with a way of their own: the op that waits for rows copies them, rows of drafts are on the device."""


HEAD_AREA = (256, 4608)
"""Offsets in the outbox of what heads report: of the logits as they are, and after penalties and bias (gpu/head.py)."""

DRAFT_AREA = 16
"""Offset in the outbox of what a chain of drafts leaves (gpu/draft_rows.py)."""

OUTBOX_BYTES = 8960
"""The error word (8 bytes), a chain of drafts and the two areas."""


def aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGN) * ALIGN


class Memory:
    """Addresses by name.

    shared   io and scratch buffers, each as large as the largest program, or one of `larger`, needs
    inbox    io buffers that the first node of every graph copies from the host, side by side
    states   buffers of sessions; a program finds them through the slot table, one word a name
    """

    def __init__(self, programs: Iterable[Program], larger: Iterable[Buffer] = ()):
        self.shared: dict[str, Buffer] = {}
        self.states: dict[str, Buffer] = {}
        self.table_buffers: dict[str, Buffer] = {}
        for program in programs:
            for b in program.buffers.values():
                if b.role in ("io", "scratch"):
                    if b.name not in self.shared or b.n_bytes > self.shared[b.name].n_bytes:
                        self.shared[b.name] = b
                elif b.role == "table":
                    self.table_buffers[b.name] = b
                else:
                    self.states[b.name] = b
        for b in larger:
            if b.n_bytes > self.shared[b.name].n_bytes:
                self.shared[b.name] = b
        self.slots = {name: i for i, name in enumerate(self.states)}
        self.inbox: dict[str, int] = {}
        self.inbox_bytes = 0
        for name, b in self.shared.items():
            if b.role == "io" and name not in INBOX_SKIPS:
                self.inbox[name] = self.inbox_bytes
                self.inbox_bytes += -(-b.n_bytes // 8) * 8
        assert self.inbox_bytes <= MOST_INBOX_BYTES
        self.measuring = True
        self.clusters = False  # whether the device has clusters of blocks; no size depends on it
        self.outbox_bytes = OUTBOX_BYTES
        self.private_bytes: dict[str, int] = {}
        self._tables: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._end = MADE_UP
        self._place_fixed()
        self._base = 0

    def _place(self, name: str, n_bytes: int) -> None:
        self._places[name] = self._end
        self._end += aligned(n_bytes)

    def _place_fixed(self) -> None:
        self._place("outbox", OUTBOX_BYTES)
        self._place("inbox", self.inbox_bytes)
        self._place("slots", 8 * max(len(self.slots), 1))
        for name, b in self.shared.items():
            if name in self.inbox:
                self._places[name] = self._places["inbox"] + self.inbox[name]
            else:
                self._place(name, b.n_bytes)

    @property
    def n_bytes(self) -> int:
        """Bytes of io, scratch, private scratch, slots and error word; final when measuring has ended."""
        return self._end - MADE_UP + (sum(map(aligned, self.private_bytes.values())) if self.measuring else 0)

    def allocate(self, device: Device) -> None:
        """End measuring: take the memory, and make addresses real."""
        self.measuring, self.clusters = False, device.clusters
        for name, n_bytes in self.private_bytes.items():
            self._place("private " + name, n_bytes)
        self._base = device.alloc(self.n_bytes) - MADE_UP
        self._places = {name: place + self._base for name, place in self._places.items()}

    def add_table(self, name: str, address: int) -> None:
        """A table buffer, or memory of the host, whose place others know."""
        self._tables[name] = address

    def address(self, name: str) -> int:
        return self._tables[name] if name in self._tables else self._places[name]

    def slot(self, name: str) -> int:
        """Address of the word that holds the address of a state buffer."""
        return self._places["slots"] + 8 * self.slots[name]

    def scratch(self, name: str, n_bytes: int) -> int:
        """Private scratch. Ops that use one name share the place: they never run at the same time."""
        if self.measuring:
            self.private_bytes[name] = max(self.private_bytes.get(name, 0), n_bytes)
            return MADE_UP
        assert n_bytes <= self.private_bytes[name]
        return self._places["private " + name]

    @property
    def error(self) -> int:
        return self._places["outbox"]

    def buffer(self, name: str) -> Buffer:
        return self.shared[name]

    def view(self, host: np.ndarray, name: str) -> np.ndarray:
        """An inbox buffer inside the host's copy of the inbox (uint8)."""
        b = self.shared[name]
        at = self.inbox[name]
        return host[at : at + b.n_bytes].view(b.dtype).reshape(b.shape)
