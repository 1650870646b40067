"""Experts that VRAM does not hold: one object a model that joins slots, host memory, the CPU's service and the link.

While a window runs the device decides for itself: hits from slots, a share over the link, the rest by the CPU. Between
windows the host counts what was asked for. While the next one runs it decides what the slots should hold and queues
that behind the window. It never waits for a copy, and nothing here changes a bit of any answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from strata.base.errors import StrataError
from strata.base.geometry import Geometry
from strata.base.program import Allocation, Op, ProgramSet
from strata.cpu.miss_server import MissServer
from strata.cpu.pool import Pool
from strata.cpu.weights import Weights
from strata.gpu import chunk_products
from strata.gpu.backend import GpuBackend
from strata.gpu.chunk_lower import ChunkLowering
from strata.gpu.device import Device
from strata.gpu.download import blob_bytes, download_bytes
from strata.gpu.expert_store import ExpertStore, arena_bytes
from strata.gpu.hybrid import STAGING_BLOBS, Hybrid
from strata.gpu.slots import ExpertSlots
from strata.gpu.state import DeviceState
from strata.gpu.weights import Weights as DeviceWeights
from strata.pack.experts import ExpertLayout
from strata.pack.profile import ExpertProfile
from strata.pack.tensors import Tensors
from strata.planner.split import SplitCosts, choose_split
from strata.runtime.expert_stats import ExpertStats
from strata.runtime.loan import Loan
from strata.runtime.share_probe import ShareProbe
from strata.runtime.swaps import SwapRules
from strata.runtime.tiers import ExpertTiers

LIMIT_S = 10.0
"""How long a window waits for the CPU in one layer."""

GAP_MEMORY = 0.1
"""What a new gap between windows, or a new time of queueing copies, counts in their mean."""

BESIDE_SHARE = 0.8
"""Of a window that the host may be busy queueing copies beside it: longer, and the window would end unseen."""

LEAST_COPIES = 4
"""Of an adaptation, however short windows are: else a few slow ones would end swaps for good."""


@dataclass(frozen=True)
class TierSetup:
    """How experts are held and shared.

    slots      experts of each layer in VRAM
    mode       where the host's bytes lie: see `strata.gpu.expert_store`
    link       whether experts may come over the link; share: of the missing ones, to begin with
    hit_rate   instead of that, the share by costs that are timed when all is there, for so many hits of routed entries
    threads    CPU threads that compute experts, that of the service included; pin: bind them to cores
    profile    ranking to fill slots by; None: in the plan's order
    link_gbps  rate of copies, None if unknown
    """

    slots: Sequence[int]
    mode: str
    link: bool
    share: float
    threads: int
    pin: bool = False
    profile: ExpertProfile | None = None
    link_gbps: float | None = None
    rules: SwapRules | None = None
    limit_s: float = LIMIT_S
    hit_rate: float | None = None


class Orchestrator:
    """Joins what shares a model's experts.

    hybrid  the device's side and the service   slots, store  experts in VRAM and in host memory
    pool    threads of the service              tiers  residency; there from `begin` on
    stats   sums over windows                   device, layout, setup  as given
    loan    slots for prefill chunks; there from `begin` on
    beside_us  the host's own time while windows ran, sum
    costs   what a missing expert was timed to cost; None if it was not

    Build it before the backend, which takes hybrid, slots and store; call `begin` when the backend is there. If the
    backend cannot be built: `quiet`, close the device, `close`.
    """

    def __init__(self, device: Device, tensors: Tensors, layout: ExpertLayout, K: int, setup: TierSetup):
        self.device, self.layout, self.setup = device, layout, setup
        self.tiers: ExpertTiers | None = None
        self.costs: SplitCosts | None = None
        self._expert_bytes = np.array([layout.blob_bytes(l) for l in range(layout.n_layers)], np.int64)
        self._stats = ExpertStats(layout.n_layers, self._expert_bytes)
        self._stamps: tuple[np.ndarray, float] | None = None
        self._gap_ms: float | None = None
        self._least_bytes = LEAST_COPIES * float(self._expert_bytes.max())
        self._byte_us: float | None = None
        self._ended = self._began = 0.0
        self._rows = 0
        self._torn = self._due = False
        self.beside_us = 0.0
        with ExitStack() as undo:
            self.slots = ExpertSlots(layout, setup.slots, by_table=True)
            self.store = ExpertStore(layout, tensors.gguf, device, setup.mode)
            undo.callback(self.store.close)
            self.pool = Pool(setup.threads, setup.pin)
            undo.callback(self.pool.close)
            # The table of the CPU's experts is the store's own: what an exchange moves, the next window finds.
            weights = Weights(tensors, layout.placed_at(self.store.addresses))
            self.hybrid = Hybrid(
                device, layout, K, lambda box, at, memory: MissServer(weights, box, at, self.pool, memory),
                self._first_raws(), share=setup.share if setup.link else 0.0,
                staging_blobs=STAGING_BLOBS if setup.link else 0, limit_s=setup.limit_s,
            )  # fmt: skip
            undo.pop_all()
        self._version = self.store.version

    def _first_raws(self) -> np.ndarray | None:
        """Addresses for the link; a store that settles later has none yet."""
        if not self.setup.link or not self.device.can_read_host:
            return None
        if self.setup.mode == "resident":
            return np.zeros(self.store.addresses.shape, np.uint64)
        return self.store.device_table()

    @property
    def stats(self) -> ExpertStats:
        """Sums over all windows that went well."""
        self._add_stamps()
        return self._stats

    def _add_stamps(self) -> None:
        if self._stamps is not None:
            self._stats.add(*self._stamps)
            self._stamps = None

    @property
    def server(self) -> MissServer:
        return self.hybrid.server

    def begin(self) -> None:
        """Fill the slots, and settle what RAM holds. The backend has taken all of its memory."""
        setup = self.setup
        if setup.profile is None:
            self.slots.fill(_in_turn(self.slots.counts))
        exchange = None
        if setup.mode == "resident":
            store, slots = self.store, self.slots  # a function that names this would keep it

            def exchange(layer: int, incoming: int, slot: int) -> int:
                return store.exchange(slots, layer, incoming, slot)

        self.tiers = ExpertTiers(
            self.slots, setup.profile, setup.link_gbps, n_experts=self.layout.E, expert_bytes=self._expert_bytes,
            rules=setup.rules, exchange=exchange,
        )  # fmt: skip
        self.tiers.fill()
        self.loan = Loan(self.tiers, self.slots.tail)
        if exchange is not None:
            self.store.settle(self.slots)
        self._tell_link()

    def _tell_link(self) -> None:
        """Send the link the addresses that the store has now."""
        if self.store.version != self._version:
            self._version = self.store.version
            if self.hybrid.staging_blobs:
                self.hybrid.set_raws(self.store.device_table())

    def choose_share(self, weights: DeviceWeights) -> None:
        """Time what a missing expert costs on either side, and set the share of the link by that. After `begin`."""
        hit_rate = self.setup.hit_rate
        if hit_rate is None or not self.hybrid.staging_blobs or hit_rate >= 1:
            return
        addresses = np.where(self.store.device_table() != 0, self.store.addresses, 0)
        self.costs = ShareProbe(self.hybrid, self.server, weights, addresses).measure()
        if self.costs is not None:
            K = self.hybrid.mailbox.K
            self.hybrid.set_share(choose_split(self.costs, K * (1 - hit_rate), 1.0, K * hit_rate).fraction)

    # ---- windows

    @property
    def last_window_us(self) -> float:
        """How long the last window took, from its launch on."""
        return max(0.0, self._ended - self._began) * 1e6

    def launched(self) -> None:
        """Before a window."""
        self.loan.take_back()
        if self._torn:
            raise StrataError("an exchange of experts between VRAM and RAM was interrupted", found="one in neither",
                              needed="every expert in one of them", advice="Load the model again.")  # fmt: skip
        began = time.perf_counter()
        if self._ended > self._began:  # else the last window failed, or was one for checks
            # A pause between answers is no time that copies may count on in the middle of one.
            gap_ms = min(began - self._ended, self._ended - self._began) * 1e3
            self._gap_ms = gap_ms if self._gap_ms is None else self._gap_ms + GAP_MEMORY * (gap_ms - self._gap_ms)
        self._began, self._rows = began, 0

    def ended(self, T: int) -> None:
        """After a window of T rows that went well; `committed` counts its routing."""
        self._ended = time.perf_counter()
        self._rows = T
        stamps = self.hybrid.stamps  # copied as bytes: numpy's copies of more give the interpreter's lock away
        stamps = np.frombuffer(stamps.tobytes(), np.int64).reshape(stamps.shape)
        self._stamps = stamps, (self._ended - self._began) * 1e6

    def committed(self, n_keep: int) -> None:
        """After the commit of the last window: count it. Swaps follow while the next window runs, but exchanges with
        RAM, which the CPU reads then, are done now."""
        if self._rows:
            rows, self._rows = self._rows, 0
            self.tiers.observe(self.hybrid.routed(rows), n_keep)
            if self._gap_ms is not None:
                self.tiers.hidden_ms = self._gap_ms * self.tiers.rules.every
            if self._byte_us is not None:
                most_bytes = BESIDE_SHARE * (self._ended - self._began) * 1e6 / self._byte_us
                self.tiers.most_bytes = max(most_bytes, self._least_bytes)
            self._due = self.setup.mode != "resident"
            if not self._due:
                self._torn = True
                self.tiers.between_windows()
                self._tell_link()
                self._torn = False

    def read_chunk(self, rows: int) -> None:
        """After a chunk of a prompt: count what it asked for. The next windows' swaps follow it."""
        self.tiers.observe_chunk(self.hybrid.chunk_counts(), rows)
        self._due = self.setup.mode != "resident"

    def running(self) -> None:
        """While a window runs: swap, if one was counted since. Changes of the table are queued behind the window, and
        copies wait for it; so it finds what it began with. The last window's stamps are summed, too."""
        began = time.perf_counter()
        self._add_stamps()
        begun = 0
        if self._due:
            self._due = False
            begun = self.tiers.between_windows()
        took_us = (time.perf_counter() - began) * 1e6
        self.beside_us += took_us
        if begun:
            byte_us = took_us / (begun * float(self._expert_bytes.mean()))
            self._byte_us = byte_us if self._byte_us is None else self._byte_us + GAP_MEMORY * (byte_us - self._byte_us)

    # ---- facts

    def allocations(self) -> list[Allocation]:
        """What this holds besides hybrid and slots, by the lines of a plan."""
        mode = "mapped" if self.setup.mode == "file" else self.setup.mode
        n_bytes = self.layout.total_bytes
        if mode != "mapped":
            n_bytes = arena_bytes(self.layout, self.store.addresses[:, :, 0] != 0)
        out = [
            Allocation(f"experts ({mode})", "ram", n_bytes, "where the CPU and the link read them"),
            Allocation("CPU experts", "ram", self.server.n_bytes, "scratch of the threads that compute them"),
        ]
        if mode == "resident":
            out.append(Allocation("swap staging", "vram", download_bytes(self.layout), "an expert on its way back"))
            out.append(Allocation("swap staging", "ram", blob_bytes(self.layout), "pinned: the same"))
        return out

    def record(self) -> dict[str, Any]:
        """Counters and state as plain values; see docs/orchestrator.md."""
        return {
            "mode": self.setup.mode,
            "pcie_share": self.hybrid.share,
            "costs": None if self.costs is None else asdict(self.costs),
            "threads": self.pool.threads,
            **self.stats.record(),
            "tiers": self.tiers.stats() if self.tiers is not None else None,
            "service": self.server.stats(),
        }

    # ---- life

    def quiet(self) -> None:
        """End the service; no window follows."""
        self.hybrid.close()

    def close(self) -> None:
        """End threads and unpin memory. The device reads none of it any more. May be called twice."""
        self.quiet()
        self.pool.close()
        self.store.close()


def _in_turn(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs (layer, expert) of the first experts of every layer."""
    return [(layer, e) for layer, n in enumerate(counts) for e in range(n)]


class TieredBackend(GpuBackend):
    """A GPU backend that holds a part of the experts; the rest comes through an orchestrator, which it closes too.

    pool, threads: those of the CPU's experts.
    """

    def __init__(
        self, tensors: Tensors, geometry: Geometry, programs: ProgramSet, orchestrator: Orchestrator, **options: Any
    ):
        self.orchestrator = o = orchestrator
        super().__init__(
            tensors, geometry, o.layout, programs, o.device, hybrid=o.hybrid, slots=o.slots, store=o.store, **options
        )
        o.begin()
        if self._chunks is not None:
            self._chunks.lower_with(self._counted)
        if len(o.slots.tail):
            self._chunks.borrow = o.loan.lend
        o.choose_share(self.weights)
        for program in programs.windows.values():
            self._graph(program)  # where the share is another than the planned one, and only one of them is 0
        self.pool, self.threads = o.pool, o.pool.threads

    def window(
        self,
        state: DeviceState,
        tokens: np.ndarray,
        previous: tuple[int, int],
        after_op: Callable[[Op], None] | None = None,
    ) -> None:
        """As `GpuBackend.window`. StrataError naming position, layer and experts when the CPU does not answer."""
        self.orchestrator.launched()
        super().window(state, tokens, previous, after_op)
        if after_op is None:
            self.orchestrator.ended(len(tokens))

    def recorded(
        self, state: DeviceState, tokens: np.ndarray, previous: tuple[int, int],
        names_of: Callable[[int], Sequence[str]],
    ) -> Iterator[tuple[Op, dict[str, np.ndarray]]]:  # fmt: skip
        """As `GpuBackend.recorded`. A commit behind it is not counted, as behind `window` with `after_op`."""
        self.orchestrator.launched()
        return super().recorded(state, tokens, previous, names_of)

    def _counted(self, c: ChunkLowering, op: Op) -> None:
        """The experts op of a chunk, and how often it asks for each expert."""
        chunk_products.lower_experts(c, op)
        if op.layer < self.orchestrator.layout.n_layers:
            self.hybrid.count_chunk(c, op)

    def prefill(
        self, state: DeviceState, tokens: np.ndarray, previous: tuple[int, int], following: np.ndarray | None = None
    ) -> None:
        """As `GpuBackend.prefill`; what the slots hold follows what prompts ask for, too."""
        super().prefill(state, tokens, previous, following)
        if self._chunks is not None:
            self.orchestrator.read_chunk(len(tokens))

    def meanwhile(self) -> None:
        self.orchestrator.running()

    def commit(self, state: DeviceState, n_keep: int) -> None:
        """As `GpuBackend.commit`; what the slots hold follows what was asked for, while the next window runs."""
        super().commit(state, n_keep)
        self.orchestrator.committed(n_keep)

    def check_file(self) -> None:
        """FileError for a file that is no longer as it was: its experts may be read in place."""
        self.store.check_file()

    def allocations(self, sessions: list[DeviceState]) -> list[Allocation]:
        return super().allocations(sessions) + self.orchestrator.allocations()

    def close(self) -> None:
        """End service and threads, free device and host memory; a second call does nothing."""
        try:
            super().close()
        finally:
            self.orchestrator.close()
