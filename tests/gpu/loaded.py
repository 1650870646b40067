"""`strata.load(device="cuda")` without a GPU: a machine with a card, and a HostDevice in place of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata import loading
from strata.planner.machine import Machine
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE

_HERE = Machine.here


def lend_gpu(patch: pytest.MonkeyPatch, **facts: float) -> list[HostDevice]:
    """Let loading find one card (facts as in Machine.describe) that works. Returns the devices opened from now on.

    With STRATA_TEST_DEVICE=cuda the real card is used, and the list stays empty.
    """
    opened: list[HostDevice] = []
    if ON_DEVICE:
        return opened
    gpus = Machine.describe(**(facts or {"gpu": "RTX 4090"})).gpus
    patch.setattr(loading.Machine, "here", classmethod(lambda cls, *a, **k: replace(_HERE(*a, **k), gpus=gpus)))
    patch.setattr(loading, "device_problem", lambda gpu: None)

    def open_device(index: int, limit_bytes: int) -> HostDevice:
        opened.append(HostDevice(limit_bytes=limit_bytes))
        return opened[-1]

    patch.setattr(loading, "open_device", open_device)
    return opened
