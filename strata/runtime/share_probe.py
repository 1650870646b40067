"""What a missing expert costs on this machine now: the CPU's service and the link on the experts of a load, timed.

Requests go through the mailbox as a window's do, and experts over the link as in a window: other experts each time, so
that no cache holds them. Each side is timed alone, and both at once for what memory gives to both together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.base import doorbell as mail
from strata.base.compiled import c_function
from strata.base.errors import StrataError
from strata.cpu.machine_code import st_seq_cst64
from strata.cpu.miss_server import MissServer
from strata.gpu import doorbell as bells
from strata.gpu.hybrid import Hybrid
from strata.gpu.link_fetch import link_fetch
from strata.gpu.split_experts import layer_parts
from strata.gpu.weights import Weights
from strata.planner.split import SplitCosts

ALONE_S = 0.012
"""How long the CPU alone is timed. A turn that was begun is finished."""
LINK_BYTES, BOTH_BYTES = 2e8, 4e8
"""Brought over the link alone, and while the CPU is timed again: 4 and 10 ms of a fast one."""
WARM_UP = 3
LEAST_SLOPE = 0.75
"""Of the mean cost of an expert in a full request: the least that one more can cost, whatever noise says."""


@c_function(2)
def _ring(address, number):
    st_seq_cst64(address, number)


@dataclass(frozen=True)
class _Timed:
    """Requests of n experts: us from seeing one to its reply, in order."""

    us: list[float]
    n: int


class ShareProbe:
    """Times what a window would do; none may be under way.

    weights    those of the device, for the layouts of experts over the link
    addresses  int64 (L, E, 3): where RAM holds experts, 0 where it does not
    """

    def __init__(self, hybrid: Hybrid, server: MissServer, weights: Weights, addresses: np.ndarray, seed: int = 1):
        self._hybrid, self._server, self._device = hybrid, server, hybrid.device
        self._m, self._K = hybrid.mailbox, hybrid.mailbox.K
        self._words = hybrid.host[: mail.PAYLOAD].view(np.int64)
        self._number = int(self._words[mail.REPLY // 8])
        self._parts = [layer_parts(weights, l) for l in range(len(addresses))]
        self._held = addresses[:, :, 0] != 0
        rng = np.random.default_rng(seed)
        self._turns = _turns(self._held, self._K, rng) if (self._held.sum(axis=1) >= self._K).any() else None
        often = self._held.sum(axis=0)
        self._common = rng.permutation(np.flatnonzero((often == often.max()) & (often > 0)).astype(np.int32))
        self._bytes = float(np.mean([hybrid.experts.blob_bytes(l) for l in range(len(addresses))]))
        x = hybrid.host[self._m.x :][: 4 * self._m.D].view(np.float32)
        x[:] = np.sin(np.arange(self._m.D, dtype=np.float32))

    # ---- one side

    def _ask(self, layer: int, experts: np.ndarray) -> float:
        """us that the service takes for these experts of one row."""
        host, words, m, n = self._hybrid.host, self._words, self._m, len(experts)
        host[m.decisions : m.decisions + self._K] = mail.HIT
        host[m.decisions : m.decisions + n] = mail.CPU
        host[m.ids : m.ids + 4 * n].view(np.int32)[:] = experts
        host[m.weights : m.weights + 4 * self._K].view(np.float32)[:] = 1 / self._K
        header = words[mail.HEADER // 8 :]
        header[mail.LAYER], header[mail.ROWS], header[mail.CPU_ENTRIES] = layer, 1, n
        self._number += 1
        _ring.held(host.ctypes.data + mail.REQUEST, self._number)
        until = time.perf_counter() + 1.0
        while words[mail.REPLY // 8] < self._number:
            if time.perf_counter() > until:
                raise StrataError("the CPU's experts do not answer", found="none in 1 s", needed="an answer",
                                  advice="Load again, or give pcie_share= to measure nothing.")  # fmt: skip
        if words[mail.STATUS // 8]:
            raise StrataError("the CPU's experts failed while they were timed", needed="status 0",
                              found=f"status {int(words[mail.STATUS // 8])}", advice="Please report this.")  # fmt: skip
        row = self._server.telemetry()[layer]
        return float(row["end_ns"] - row["start_ns"]) / 1e3

    def _requests(self, counts: tuple[int, ...], more: Callable[[], bool]) -> list[_Timed]:
        """Requests of so many experts in turn, while `more()` holds."""
        found = [_Timed([], n) for n in counts]
        self._server.begin_window()
        try:
            for _ in range(WARM_UP):
                self._ask(*next(self._turns))
            while not found[0].us or more():
                for timed in found:
                    layer, experts = next(self._turns)
                    timed.us.append(self._ask(layer, experts[: timed.n]))
        finally:
            self._server.end_window()
        return found

    def _fetch(self, n_bytes: float) -> tuple[Callable[[], float], Any]:
        """Queue about n_bytes of experts over the link: a call that waits and tells the us of one, and the event of the
        end. The same numbers in every layer, so that one list serves all launches."""
        d, split, device = self._hybrid.split.doorbell, self._hybrid.split, self._device
        n = min(self._K, self._hybrid.staging_blobs)
        self._common = np.roll(self._common, -n)
        experts = self._common[:n]
        layers = [l for l in range(len(self._parts)) if self._held[l, experts].all()]
        layers = layers[: max(1, int(n_bytes / (n * self._bytes)))]
        words = np.zeros(bells.EXPERTS + n, np.int32)
        words[bells.STAGED], words[bells.EXPERTS :] = n, experts
        device.upload(d.work, words)
        launches = [one for l in layers for one in link_fetch(d.work, split.raws(l), split.staging, self._parts[l])]
        began = device.record(timed=True)
        device.run(launches)
        ended = device.record(timed=True)

        def took() -> float:
            device.wait(ended)
            return 1e3 * device.elapsed_ms(began, ended) / (n * len(layers))

        return took, ended

    # ---- all

    def measure(self) -> SplitCosts | None:
        """Costs of the mean expert wanted by one row; None where no layer has enough experts in RAM to tell."""
        if self._turns is None or not self._common.size:
            return None
        try:
            return self._measured()
        finally:
            self._hybrid.asked(self._number)

    def _measured(self) -> SplitCosts:
        counts = (self._K, max(1, self._K // 3)) if self._K > 1 else (1,)
        until = time.perf_counter() + ALONE_S
        # A request costs something beside its experts, but so do the link's launches and products: the balance is that
        # of one expert more.
        cpu_us, asked_us = _line(self._requests(counts, lambda: time.perf_counter() < until))
        self._fetch(0)[0]()  # loads and warms the kernel
        link_us = self._fetch(LINK_BYTES)[0]()
        took, ended = self._fetch(BOTH_BYTES)
        beside = self._requests((self._K,), lambda: not self._device.done(ended))
        slower = max(1.0, _usual(beside[0].us) / (self._K * cpu_us + asked_us))
        both = self._bytes / (cpu_us * slower) / 1e3 + self._bytes / max(took(), link_us) / 1e3
        both = max(both, self._bytes / min(cpu_us, link_us) / 1e3)  # memory has given that to one side alone
        return SplitCosts((cpu_us,), self._bytes, self._bytes / link_us / 1e3, memory_gbps=both)


def _turns(held: np.ndarray, K: int, rng: np.random.Generator) -> Iterator[tuple[int, np.ndarray]]:
    """(layer, K of its experts in RAM) for ever: layers in turn, all experts before any again. held (L, E) bool."""
    layers = np.flatnonzero(held.sum(axis=1) >= K).tolist()
    at = dict.fromkeys(layers, 0)
    orders = {l: rng.permutation(np.flatnonzero(held[l])).astype(np.int32) for l in layers}
    while True:
        for l in layers:
            if at[l] + K > len(orders[l]):
                at[l] = 0
            yield l, orders[l][at[l] : at[l] + K]
            at[l] += K


def _usual(us: list[float]) -> float:
    """The lower quartile: what comes in between only ever makes a request longer."""
    return float(np.quantile(us, 0.25))


def _line(timed: list[_Timed]) -> tuple[float, float]:
    """us of one expert more, and of a request beside its experts, from requests of two sizes."""
    most, n = _usual(timed[0].us), timed[0].n
    mean = most / n
    if len(timed) == 1:
        return mean, 0.0
    slope = (most - _usual(timed[1].us)) / (n - timed[1].n)
    cpu_us = min(max(slope, LEAST_SLOPE * mean), mean)
    return cpu_us, n * (mean - cpu_us)
