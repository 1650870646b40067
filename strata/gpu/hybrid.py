"""What a backend needs to share its experts with the CPU: mailbox, areas on the device, the service's life, telemetry.

The service comes from outside, as a `MissServer`. It is awake from before a window's launch until the window has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from strata.base import doorbell as mail
from strata.base.doorbell import Mailbox
from strata.base.errors import StrataError, need
from strata.base.geometry import WINDOW_ROWS
from strata.base.program import ERROR_TEXT, EXPERTS_TIMEOUT, Allocation, Op
from strata.gpu import doorbell as bells
from strata.gpu.device import Device
from strata.gpu.doorbell import Doorbell
from strata.gpu.error_word import Reported
from strata.gpu.gemm.experts import Order
from strata.gpu.launch import Launch
from strata.gpu.link_fetch import ALIGN
from strata.gpu.mailbox import copy_values, outbox
from strata.gpu.relayout import relayout_bytes
from strata.gpu.split_experts import Split
from strata.pack.experts import ExpertLayout

if TYPE_CHECKING:
    from strata.gpu.chunk_lower import ChunkLowering

WHOLE_SHARE = 256
STAGING_BLOBS = 16


class MissServer(Protocol):
    """Computes the CPU's entries of every request in a mailbox (base/doorbell.py)."""

    def begin_window(self) -> None:
        """Be awake: requests may come from now on."""

    def end_window(self) -> None:
        """No request will come until the next `begin_window`; on return the mailbox is not touched any more."""

    def close(self) -> None:
        """End the service."""


Serve = Callable[[Mailbox, int, object], MissServer]
"""Starts a service for a mailbox at an address; the service holds the third, its memory, until it has ended."""


@dataclass(frozen=True)
class LayerTimes:
    """One layer of the last window. Entries are (row, choice) pairs; experts are distinct ones.

    post_us      from the start of `post` until it had rung
    hits_us, link_us, cpu_us   from there to the end of each branch; 0: not measured. cpu_us is that of the wait, with
                 the copy of the sums, and counts only if the CPU had entries
    join_us      to the start of the combine, which every branch has ended before
    link_bytes   read over the link
    """

    layer: int
    rows: int
    hit_entries: int
    link_entries: int
    cpu_entries: int
    link_experts: int
    cpu_experts: int
    link_bytes: int
    post_us: float
    hits_us: float
    link_us: float
    cpu_us: float
    join_us: float

    @property
    def waited_for(self) -> str:
        """The branch that ended last: hits, link or cpu. See `bells.START_NS`."""
        unknown_us = self.join_us - bells.START_NS / 1e3
        ends = {"cpu": self.cpu_us} if self.cpu_entries else {}
        if self.link_experts:
            ends["link"] = self.link_us if self.link_us < self.join_us else unknown_us
        if self.hit_entries:
            ends["hits"] = self.hits_us if self.hits_us < self.join_us else unknown_us
        return max(ends, key=ends.__getitem__, default="hits")


def _expert_bytes(experts: ExpertLayout, layer: int) -> int:
    """Bytes of a place for an expert of a layer."""
    projections = experts.layers[layer].projections
    return sum(-(-relayout_bytes(p.format, p.rows, p.columns) // ALIGN) * ALIGN for p in projections)


def needs(experts: ExpertLayout, K: int, staging_blobs: int) -> list[Allocation]:
    """Device and pinned host memory of a `Hybrid`."""
    mailbox = Mailbox(WINDOW_ROWS, K, experts.D)
    places = staging_blobs * max(_expert_bytes(experts, l) for l in range(experts.n_layers))
    stamps = _report_bytes(experts, K)
    areas = sum(-(-n // ALIGN) * ALIGN for n in _areas(experts, K, staging_blobs))
    if staging_blobs:
        areas += -(-24 * experts.n_layers * experts.E // ALIGN) * ALIGN
    out = [Allocation("expert exchange", "vram", areas + -(-stamps // ALIGN) * ALIGN, "decisions, lists, times")]
    if places:
        out.append(Allocation("link staging", "vram", places, f"{staging_blobs} experts over the link"))
    return [*out, Allocation("exchange", "ram", mailbox.n_bytes + stamps, "pinned: requests to the CPU and its sums")]


def _log_bytes(experts: ExpertLayout, K: int, rows: int = WINDOW_ROWS) -> int:
    """Of the routed ids of a window."""
    return -(-4 * experts.n_layers * rows * K // 8) * 8


def _report_bytes(experts: ExpertLayout, K: int) -> int:
    """Of what windows report: stamps, and behind them routed ids."""
    return 8 * bells.STAMP_WORDS * experts.n_layers + _log_bytes(experts, K)


def _areas(experts: ExpertLayout, K: int, staging_blobs: int) -> tuple[int, ...]:
    """Bytes of control, work, decisions, staged, jobs, counts of a prompt's chunk."""
    work, counts = 4 * (bells.EXPERTS + max(1, staging_blobs)), 4 * experts.n_layers * experts.E
    return 8 * bells.CONTROL_WORDS, work, WINDOW_ROWS * K, 24 * experts.E, 8 * (1 + WINDOW_ROWS * K), counts


class Hybrid:
    """Shares the experts of a model's layers between device, link and CPU.

    serve          starts the service that computes the CPU's share
    raws           (L, E, 3) uint64 addresses in host memory that the device reads, 0 for experts without one; None if
                   it cannot read any: then nothing goes over the link
    share          of the distinct missing experts of a layer that go over the link, 0..1 in steps of 1/256; with 0 and
                   with more, different graphs are used: see `form`
    staging_blobs  most experts a layer over the link
    limit_s        how long a window waits for the CPU in one layer
    """

    def __init__(
        self,
        device: Device,
        experts: ExpertLayout,
        K: int,
        serve: Serve,
        raws: np.ndarray | None = None,
        *,
        share: float = 0.0,
        staging_blobs: int = STAGING_BLOBS,
        limit_s: float = 10.0,
        stamp_branches: bool = True,
        copy_sums: bool = True,
    ):
        need(staging_blobs >= 0, "experts over the link", found=staging_blobs, needed="at least 0")
        self.device, self.experts = device, experts
        self.mailbox = Mailbox(WINDOW_ROWS, K, experts.D)
        self.staging_blobs = staging_blobs if raws is not None else 0
        self._host = device.host(self.mailbox.n_bytes)
        self._words = self._host[: mail.PAYLOAD].view(np.int64)
        areas = [device.alloc(n) for n in _areas(experts, K, self.staging_blobs)]
        control, work, decisions, staged, jobs, self._chunk_counts = areas
        places = self.staging_blobs * max(_expert_bytes(experts, l) for l in range(experts.n_layers))
        staging = device.alloc(places) if places else 0
        self._raws = device.alloc(raws.nbytes) if self.staging_blobs else 0
        self._n_stamps = bells.STAMP_WORDS * experts.n_layers
        stamps = device.alloc(_report_bytes(experts, K))
        self._report = device.host(_report_bytes(experts, K))
        self._stamps = self._report[: 8 * self._n_stamps].view(np.int64)
        bell = Doorbell(self.mailbox, self._host.ctypes.data, control, work, decisions, staged, jobs)
        raws_at, of_layer = self._raws, 24 * experts.E
        # A function of numbers: one of this object would keep it, and the file's mapping, for the garbage collector.
        self.split = Split(bell, lambda layer: raws_at and raws_at + of_layer * layer, staging, self.staging_blobs,
                           stamps, stamp_branches, copy_sums, stamps + 8 * self._n_stamps)  # fmt: skip
        self._unlinked = replace(self.split, staging=0, places=0) if self.staging_blobs else self.split
        self._control = np.zeros(bells.CONTROL_WORDS, np.int64)
        self.set_limit(limit_s)
        self.set_share(share)
        if self._raws:
            self.set_raws(raws)
        self.server = serve(self.mailbox, self._host.ctypes.data, self._host)

    # ---- what may change between windows

    def set_limit(self, limit_s: float) -> None:
        """How long a window waits for the CPU in one layer."""
        need(0 < limit_s <= 3600, "seconds to wait for the CPU's experts", found=limit_s, needed="up to 3600")
        self._set(bells.LIMIT_NS, int(limit_s * 1e9))

    def set_share(self, share: float, staging_blobs: int | None = None) -> None:
        """Share of missing experts for the link, and at most how many of a layer (not above the places there are)."""
        most = self.staging_blobs if staging_blobs is None else staging_blobs
        need(0 <= share <= 1, "share of the link", found=share, needed="0..1")
        need(0 <= most <= self.staging_blobs, "experts over the link", found=most, needed=f"0..{self.staging_blobs}")
        self._set(bells.STAGING, most)
        self._set(bells.SHARE, round(share * WHOLE_SHARE))

    def set_raws(self, raws: np.ndarray) -> None:
        """Other addresses of experts' bytes in host memory, (L, E, 3) uint64."""
        shape = (self.experts.n_layers, self.experts.E, 3)
        need(raws.shape == shape and raws.dtype == np.uint64, "a table of experts in host memory",
             found=f"{raws.dtype} {raws.shape}", needed=f"uint64 {shape}")  # fmt: skip
        need(self._raws != 0, "addresses of experts in host memory", needed="places for experts over the link")
        self.device.upload(self._raws, np.ascontiguousarray(raws))

    @property
    def form(self) -> Split:
        """`split`, without its link where the share sends nothing over it: what a window's graph needs now."""
        linked = self._control[bells.SHARE] and self._control[bells.STAGING]
        return self.split if linked else self._unlinked

    @property
    def share(self) -> float:
        return int(self._control[bells.SHARE]) / WHOLE_SHARE

    def _set(self, word: int, value: int) -> None:
        if self._control[word] != value:
            self._control[word] = value
            self.device.upload(self.split.doorbell.control + 8 * word, self._control[word : word + 1].copy())

    # ---- chunks

    def count_chunk(self, c: ChunkLowering, op: Op) -> None:
        """Behind an experts op of a chunk: keep how many of its entries each expert has."""
        E = self.experts.E
        order = Order.at(c.scratch("experts.order", Order.n_bytes(c.T * self.mailbox.K, E)), c.T * self.mailbox.K, E)
        c.add(copy_values(order.counts, self._chunk_counts + 4 * E * op.layer, E))

    def chunk_counts(self) -> np.ndarray:
        """int32 (L, E): entries of the last chunk; waits for it."""
        out = np.empty((self.experts.n_layers, self.experts.E), np.int32)
        self.device.download(self._chunk_counts, out)
        return out

    # ---- windows

    def launches(self, T: int) -> list[Launch]:
        """What the graph of a window of T rows ends with: stamps and routed ids, to the host."""
        n_bytes = 8 * self._n_stamps + _log_bytes(self.experts, self.mailbox.K, T)
        return [replace(one, gathers=True) for one in outbox(self.split.stamps, self._report.ctypes.data, n_bytes)]

    @contextmanager
    def window(self) -> Iterator[None]:
        """Around a launch and its end: the service is awake."""
        self.server.begin_window()
        try:
            yield
        finally:
            self.server.end_window()

    def failure(self, found: Reported, position: int) -> StrataError:
        """The error for a window whose error word names this op.

        The next window may run: numbers of requests only grow, so a late answer is not taken for another one.
        """
        limit_s = self._control[bells.LIMIT_NS] / 1e9
        late = found.code == EXPERTS_TIMEOUT
        return StrataError(
            f"window at position {position} stopped: {ERROR_TEXT[found.code]} in layer {found.layer}, "
            f"experts {self._requested()}",
            found=None if late else f"detail {found.detail}",
            needed=f"an answer in {limit_s:g} s" if late else None,
            advice="The session is as before. Other programs may take the processor's cores." if late
            else "The session is as before.",
        )  # fmt: skip

    def _requested(self) -> str:
        """Experts of the last request's entries for the CPU."""
        m, n = self.mailbox, int(self._words[mail.HEADER // 8 + mail.ROWS]) * self.mailbox.K
        ids = self._host[m.ids : m.ids + 4 * n].view(np.int32)
        cpu = self._host[m.decisions : m.decisions + n] == mail.CPU
        return ", ".join(map(str, dict.fromkeys(ids[cpu].tolist())))

    # ---- facts

    @property
    def host(self) -> np.ndarray:
        """The mailbox, uint8: for requests beside those of windows, none of which may be under way."""
        return self._host

    def asked(self, number: int) -> None:
        """Requests up to this number have come from the host: those of windows have higher ones from now on."""
        self._set(bells.COUNTER, number)

    def routed(self, T: int) -> np.ndarray:
        """int32 (L, T, K): routed ids of the last window, which had T rows; valid until the next one."""
        L, K = self.experts.n_layers, self.mailbox.K
        return self._report[8 * self._n_stamps :][: 4 * L * T * K].view(np.int32).reshape(L, T, K)

    @property
    def stamps(self) -> np.ndarray:
        """int64 (L, STAMP_WORDS): stamps of the last window; valid until the next one."""
        return self._stamps.reshape(-1, bells.STAMP_WORDS)

    def telemetry(self) -> list[LayerTimes]:
        """The last window, layer by layer; without layers whose experts are all on the device."""
        return decode_telemetry(self._stamps, self.experts)

    def allocations(self) -> list[Allocation]:
        """What this holds."""
        return needs(self.experts, self.mailbox.K, self.staging_blobs)

    def close(self) -> None:
        """End the service and drop what shows pinned memory, which the device keeps until it is closed."""
        self.server.close()
        self._host = self._words = self._report = self._stamps = np.empty(0, np.uint8)


def decode_telemetry(stamps: np.ndarray, experts: ExpertLayout) -> list[LayerTimes]:
    """Records from the stamps of a window, int64 (L * STAMP_WORDS,); none for layers that are not shared."""
    out = []
    for layer, words in enumerate(stamps.reshape(-1, bells.STAMP_WORDS).tolist()):
        posted = words[bells.POSTED]
        if not posted:
            continue

        def since(word: int, posted: int = posted, words: list[int] = words) -> float:
            end = words[word]
            if words[bells.JOINED] > posted:  # not where the window ended before
                end = min(end, words[bells.JOINED])  # a branch has ended when the combine begins, its stamp perhaps not
            return max(0.0, (end - posted) / 1e3)

        linked = words[bells.N_LINK_EXPERTS]
        out.append(
            LayerTimes(
                layer=layer,
                rows=words[bells.N_ROWS],
                hit_entries=words[bells.N_HIT],
                link_entries=words[bells.N_LINK],
                cpu_entries=words[bells.N_CPU],
                link_experts=linked,
                cpu_experts=words[bells.N_CPU_EXPERTS],
                link_bytes=linked * experts.blob_bytes(layer),
                post_us=(posted - words[bells.BEGAN]) / 1e3,
                hits_us=since(bells.HITS_END),
                link_us=since(bells.LINK_END),
                cpu_us=since(bells.WAIT_END),
                join_us=since(bells.JOINED),
            )
        )
    return out
