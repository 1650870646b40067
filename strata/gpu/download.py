"""Experts from slots back to the host, as the file has them: restored on the device, then copied at link speed."""

from __future__ import annotations

import numpy as np

from strata.gpu.device import Device
from strata.gpu.memory import aligned
from strata.gpu.restore_kernel import back_map, restore_launches
from strata.gpu.slots import ExpertSlots
from strata.pack.experts import ExpertLayout
from strata.pack.formats import BlockFormat


def _tables(experts: ExpertLayout) -> dict[tuple[str, int], np.ndarray]:
    """Tables of restore by format and columns."""
    parts = {(p.format.name, p.columns): p.format for layer in experts.layers for p in layer.projections}
    return {(name, K): back_map(format, K) for (name, K), format in parts.items() if format.group}


def blob_bytes(experts: ExpertLayout) -> int:
    """Room for the largest expert, parts aligned."""
    return max(sum(aligned(p.n_bytes) for p in layer.projections) for layer in experts.layers)


def download_bytes(experts: ExpertLayout) -> int:
    """Device bytes of a `Downloader`; its host memory is not more."""
    return blob_bytes(experts) + sum(aligned(t.nbytes) for t in _tables(experts).values())


class Downloader:
    """Brings one expert at a time into pinned memory of its own."""

    def __init__(self, device: Device, experts: ExpertLayout):
        self._device, self._experts = device, experts
        tables = _tables(experts)
        self._raw = device.alloc(blob_bytes(experts))
        at = device.alloc(sum(aligned(t.nbytes) for t in tables.values()))
        self._tables: dict[tuple[str, int], int] = {}
        for key, table in tables.items():
            device.upload(at, table)
            self._tables[key] = at
            at += aligned(table.nbytes)
        self._host = device.host(blob_bytes(experts))

    def expert(self, slots: ExpertSlots, layer: int, slot: int) -> list[np.ndarray]:
        """Gate, up and down of a slot, uint8 (rows, row_bytes), valid until the next call."""
        out, at = [], 0
        for part, p in enumerate(self._experts.layers[layer].projections):
            source = slots.address(layer, slot, part)
            if p.format.group:
                self._device.run(self._restore(p.format, source, self._raw + at, p.rows, p.columns))
                source = self._raw + at
            data = self._host[at : at + p.n_bytes]
            self._device.download(source, data)
            out.append(data.reshape(p.rows, -1))
            at += aligned(p.n_bytes)
        return out

    def _restore(self, format: BlockFormat, source: int, target: int, rows: int, K: int) -> list:
        return restore_launches(format, source, target, rows, K, self._tables[format.name, K])
