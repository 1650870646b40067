"""Rows of a buffer on the device as the host sees them."""

from __future__ import annotations

import numpy as np

from strata.gpu.device import Device


class DeviceRows:
    """Rows of a float32 buffer on the device; a slice of rows is a copy on the host."""

    def __init__(self, device: Device, address: int, shape: tuple[int, ...]):
        self._device, self._address, self.shape = device, address, shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1
        out = np.empty((max(0, stop - start), self.shape[1]), np.float32)
        self._device.download(self._address + 4 * start * self.shape[1], out)
        return out
