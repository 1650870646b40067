"""A session's memory: one block for what checkpoints copy, one array per buffer addressed by position."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from strata.base.program import Buffer

ALIGN = 64


class State:
    """Buffers of one session on the host.

    recurrent  (n,) uint8, all recurrent buffers side by side
    arrays     name -> array, for recurrent and cells buffers
    rows       positions whose effect the recurrent part holds: the next window starts here
    slot_addresses  the backend's own note: addresses in the order of its slot table
    """

    def __init__(self, buffers: Iterable[Buffer]):
        buffers = list(buffers)
        self.buffers = {b.name: b for b in buffers}
        places, total = {}, 0
        for b in buffers:
            if b.role == "recurrent":
                places[b.name] = total
                total += -(-b.n_bytes // ALIGN) * ALIGN
        raw = np.zeros(total + ALIGN, np.uint8)
        start = -raw.ctypes.data % ALIGN
        self.recurrent = raw[start : start + total]
        self.arrays: dict[str, np.ndarray] = {}
        for b in buffers:
            if b.role == "recurrent":
                flat = self.recurrent[places[b.name] : places[b.name] + b.n_bytes]
                self.arrays[b.name] = flat.view(b.dtype).reshape(b.shape)
            else:
                self.arrays[b.name] = np.zeros(b.shape, b.dtype)
        self.rows = 0
        self.slot_addresses: np.ndarray | None = None

    def addresses(self, names: Iterable[str]) -> np.ndarray:
        """int64 addresses of the named buffers, in order."""
        return np.array([self.arrays[n].ctypes.data for n in names], np.int64)

    def clear(self) -> None:
        """Back to an empty session; cells need no clearing, they are written before they are read."""
        self.recurrent[:] = 0
        self.rows = 0

    def digest(self) -> str:
        """Hash of everything that can influence what follows: the recurrent part and all cells before `rows`.

        Ring entries and cells at or after `rows` are left out: they are written again before they are read. The draft
        layer's cells (`mtp.`) are left out too: drafts cannot change an answer.
        """
        h = hashlib.sha256(str(self.rows).encode())
        for _, part in self.parts():
            h.update(part.tobytes())
        return h.hexdigest()

    def parts(self) -> Iterator[tuple[str, np.ndarray]]:
        """What `digest` hashes, by buffer: its name, and a contiguous array of what counts of it."""
        for name, b in self.buffers.items():
            a = self.arrays[name]
            if name.startswith("mtp."):
                continue
            if b.role == "cells":
                cells = self.rows
                if name.endswith(".block_keys"):
                    cells = self.rows // self._block_cells(name)
                yield name, np.ascontiguousarray(a[:cells])
            elif name.endswith(".raw_keys"):
                open_rows = range(self.rows - self.rows % self._block_cells(name.replace("raw", "block")), self.rows)
                yield name, a[[p % len(a) for p in open_rows]]
            else:
                yield name, a

    def _block_cells(self, name: str) -> int:
        return self.arrays[name.replace("block_keys", "k")].shape[0] // self.arrays[name].shape[0]

    # ---- cells, for moving a conversation

    def read_cells(self, name: str, n: int) -> np.ndarray:
        """A copy of the first n entries of a cells buffer."""
        return self.arrays[name][:n].copy()

    def write_cells(self, name: str, values: np.ndarray) -> None:
        """Set the first entries of a cells buffer."""
        self.arrays[name][: len(values)] = values

    def n_bytes(self, role: str) -> int:
        return sum(b.n_bytes for b in self.buffers.values() if b.role == role)
