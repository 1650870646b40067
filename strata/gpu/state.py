"""A session's memory on the device, laid out as on the host: one block for what checkpoints copy, the rest by buffer.

`recurrent` behaves like the host's byte array where the runtime uses it: copying it out, and writing all of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strata.base.errors import BadArgument, need
from strata.base.program import Buffer
from strata.base.state import ALIGN, State
from strata.gpu.device import Device


class DeviceBytes:
    """(n,) uint8 on the device; reading it copies to the host, `[:] =` copies from there."""

    def __init__(self, device: Device, address: int, n_bytes: int):
        self._device, self.address, self.nbytes = device, address, n_bytes
        self.shape, self.size, self.dtype = (n_bytes,), n_bytes, np.dtype(np.uint8)

    def copy(self) -> np.ndarray:
        out = np.empty(self.nbytes, np.uint8)
        self._device.download(self.address, out)
        return out

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        need(copy is not False, "bytes on the device can only be copied")
        return self.copy() if dtype is None else self.copy().astype(dtype)

    def __setitem__(self, key: object, value: object) -> None:
        if key != slice(None):
            raise BadArgument("bytes on the device are written as a whole", found=key, needed="[:]")
        whole = np.empty(self.nbytes, np.uint8)
        whole[:] = value
        self._device.upload(self.address, whole)


class DeviceState:
    """Buffers of one session on the device.

    recurrent  all recurrent buffers side by side, in the host's layout
    addresses_of  name -> address, for recurrent and cells buffers
    rows       positions whose effect the recurrent part holds: the next window starts here
    """

    def __init__(self, device: Device, buffers: Iterable[Buffer]):
        self._device = device
        self.buffers = {b.name: b for b in buffers}
        places, total = {}, 0
        for b in self.buffers.values():
            if b.role == "recurrent":
                places[b.name] = total
                total += -(-b.n_bytes // ALIGN) * ALIGN
        start = device.alloc(total)
        self.recurrent = DeviceBytes(device, start, total)
        self.addresses_of = {name: start + at for name, at in places.items()}
        for b in self.buffers.values():
            if b.role != "recurrent":
                self.addresses_of[b.name] = device.alloc(b.n_bytes)
        self.rows = 0

    def addresses(self, names: Iterable[str]) -> np.ndarray:
        """uint64 addresses of the named buffers, in order."""
        return np.array([self.addresses_of[n] for n in names], np.uint64)

    def clear(self) -> None:
        """Back to an empty session; cells need no clearing, they are written before they are read."""
        self._device.clear(self.recurrent.address, self.recurrent.nbytes)
        self.rows = 0

    def n_bytes(self, role: str) -> int:
        return sum(b.n_bytes for b in self.buffers.values() if b.role == role)

    # ---- to and from the host

    def read_cells(self, name: str, n: int) -> np.ndarray:
        """A copy of the first n entries of a cells buffer."""
        b = self.buffers[name]
        out = np.empty((n, *b.shape[1:]), b.dtype)
        self._device.download(self.addresses_of[name], out)
        return out

    def write_cells(self, name: str, values: np.ndarray) -> None:
        """Set the first entries of a cells buffer."""
        b = self.buffers[name]
        good = values.shape[1:] == tuple(b.shape[1:]) and len(values) <= b.shape[0] and values.dtype == b.dtype
        need(good, f"cells of {name}", found=f"{values.dtype} {values.shape}", needed=f"{b.dtype} {b.shape}")
        self._device.upload(self.addresses_of[name], np.ascontiguousarray(values))

    def export(self) -> State:
        """The same session as a host state."""
        out = State(self.buffers.values())
        out.recurrent[:] = self.recurrent.copy()
        for name, b in self.buffers.items():
            if b.role == "cells":
                self._device.download(self.addresses_of[name], out.arrays[name])
        out.rows = self.rows
        return out

    def import_(self, state: State) -> None:
        """Take over a host state with the same buffers."""
        same = {n: (b.shape, b.dtype, b.role) for n, b in state.buffers.items()} == {
            n: (b.shape, b.dtype, b.role) for n, b in self.buffers.items()
        }
        need(same, "the state belongs to another model, context or KV format")
        self.recurrent[:] = state.recurrent
        for name, b in self.buffers.items():
            if b.role == "cells":
                self._device.upload(self.addresses_of[name], state.arrays[name])
        self.rows = state.rows

    def digest(self) -> str:
        """Hash of everything that can influence what follows; equal to that of the host's state."""
        return self.export().digest()
