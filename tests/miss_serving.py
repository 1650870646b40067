"""The service of the CPU's experts over the bundled model, beside a stand-in for the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

from strata.base.doorbell import Mailbox
from strata.cpu.miss_server import MissServer
from strata.cpu.pool import Pool
from tests.conftest import TINY
from tests.doorbell_device import Device, Model, Request

LIMIT_S = 20.0


@cache
def tiny() -> Model:
    return Model(TINY / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf", 8, 4)


@cache
def tiny_requests(n: int = 48) -> tuple[Request, ...]:
    rng = np.random.default_rng(3)
    return tuple(tiny().request(rng, T=1 + i % 8) for i in range(n))


@contextmanager
def serving(model: Model, threads: int = 2, spin_us: float = 1000) -> Iterator[tuple[MissServer, Device]]:
    device = Device(Mailbox(8, model.K, model.D))
    with (
        Pool(threads, spin_us=spin_us) as pool,
        MissServer(model.weights, device.mailbox, device.address, pool, keep=device.area) as server,
    ):
        yield server, device


@contextmanager
def window(server: MissServer) -> Iterator[None]:
    server.begin_window()
    try:
        yield
    finally:
        server.end_window()


def assert_exact(device: Device, n: int, seed: int = 1) -> None:
    told = device.ask(n, LIMIT_S, seed)
    assert (told.asked, told.replied, told.wrong, told.timeouts, told.statuses) == (n, n, 0, 0, 0), told


def wait_for(condition, limit_s: float = LIMIT_S) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, "nothing happened in time"
        time.sleep(0.0002)
