"""The plan of a load: every allocation, priced, in order; what it means for speed; whether it fits.

A plan is pure data. The planner makes it from file facts, machine facts and options; a backend executes its lines and
answers with what it really took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strata.base.errors import DoesNotFit
from strata.base.plan_text import plan_json, plan_table
from strata.base.program import Allocation

PLAN_VERSION = 1
"""Version of the JSON form."""

MIB = 1 << 20
GIB = 1 << 30

FITS, NEEDS_DISK, DOES_NOT_FIT = "fits", "needs disk per token", "does not fit"

VERIFY_SHARE, VERIFY_BYTES = 0.01, 16 * MIB
"""A line may differ from the plan by this share and by this many bytes, whichever is less."""


@dataclass(frozen=True)
class PlanLine(Allocation):
    """One line. kind says how it is held:

    allocate  taken at load
    map       a part of a file used in place: `n_bytes` in all, of which `held_bytes` are counted against free memory
    later     taken while running, up to this much
    driver    taken by the GPU's driver on our behalf, not by an allocation of ours
    reserve   left free on purpose
    lent      in memory of another line, which is filled again afterwards: nothing is counted
    """

    kind: str = "allocate"
    held: int | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes counted against free memory."""
        return self.n_bytes if self.held is None else self.held


@dataclass(frozen=True)
class DiskRead:
    """What decoding one token reads from disk, from where, and how long it takes (ms)."""

    what: str
    where: str
    bytes_per_token: float
    reads_per_token: float
    ms_per_token: float


@dataclass(frozen=True)
class Estimate:
    """Decode estimate for windows of one row, without drafts. Bytes are per token; times in ms.

    hit_rate, ram_rate, disk_rate   shares of the routed experts found in VRAM, in RAM, on disk; they sum to 1
    pcie_share                      share of the experts in RAM that the GPU reads over the link
    terms                           named times; serial ones add up, of the parallel ones the longest counts
    decode_ms                       the bound; limit names the resource that takes most of it
    """

    hit_rate: float
    hit_source: str
    ram_rate: float
    disk_rate: float
    pcie_share: float
    vram_bytes: float
    ram_bytes: float
    pcie_bytes: float
    disk_bytes: float
    terms: Mapping[str, float]
    decode_ms: float
    limit: str
    assumptions: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return 1000.0 / self.decode_ms if self.decode_ms > 0 else 0.0


@dataclass(frozen=True)
class Shortfall:
    """One thing that does not fit: needed and free bytes on a device, and which line is the limiting one."""

    device: str
    line: str
    needed_bytes: int
    free_bytes: int
    detail: str = ""

    @property
    def missing_bytes(self) -> int:
        return self.needed_bytes - self.free_bytes

    def __str__(self) -> str:
        name = {"vram": "VRAM", "ram": "RAM"}.get(self.device, self.device)
        text = (
            f"{name}: {self.needed_bytes / MIB:,.0f} MiB needed, {self.free_bytes / MIB:,.0f} MiB free, "
            f"{self.missing_bytes / MIB:,.0f} MiB short at {self.line!r}"
        )
        return f"{text} ({self.detail})" if self.detail else text


@dataclass(frozen=True)
class Mismatch:
    """A line whose allocation differs from its price."""

    line: str
    device: str
    planned_bytes: int
    taken_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.line} ({self.device}): planned {self.planned_bytes:,} bytes, took {self.taken_bytes:,} "
            f"({self.taken_bytes - self.planned_bytes:+,})"
        )


@dataclass(frozen=True)
class Plan:
    """What a load will take.

    device            "cpu" or "cuda:N"
    context           cells per session, as configured; allocations are rounded up to whole cells of the prefill grid
    experts           "mapped", "pinned" or "resident": where RAM holds experts
    prefill_rows      rows of a prefill chunk; 0 = windows only
    draft             "off", "lookup" (in earlier text alone), "mtp" (a draft layer that is not here) or the draft
                      layer's file or folder
    lines             in the order of allocation
    free_bytes        by device, before anything is taken; the RAM floor is among the lines
    slots             experts held in VRAM, by layer
    slot_bytes        bytes of one slot, by layer
    ranked            True when a profile says which experts are held first
    shortfalls        empty when it fits
    notes             choices made automatically and things worth knowing, printed once
    remedies          the cheapest changes that make it fit (or stop disk reads), each tried
    largest_context   largest context per session that fits with everything else unchanged, 0 if none
    slots_per_gib     further slots that one more GiB of VRAM buys
    ngram             "mapped": rows of the n-gram table through the page cache; "direct": past it
    pcie_share        share of the experts that VRAM lacks for the GPU to read over PCIe, to begin with
    times_share       whether a load times both sides and sets that share anew
    link_gbps         rate of the card's link
    missing_bytes     what the file lacks, which a plan does not need and a load does; by shard in missing_shards, as
                      (file names, bytes)
    """

    model: str
    path: str
    machine: str
    device: str
    context: int
    trained_context: int
    sessions: int
    kv: str
    experts: str
    prefill_rows: int
    draft: str
    checkpoints: int
    ngram_cache_rows: int
    threads: int
    lines: tuple[PlanLine, ...]
    free_bytes: Mapping[str, int]
    slots: tuple[int, ...] = ()
    slot_bytes: tuple[int, ...] = ()
    ranked: bool = False
    disk: tuple[DiskRead, ...] = ()
    estimate: Estimate | None = None
    shortfalls: tuple[Shortfall, ...] = ()
    notes: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    largest_context: int = 0
    slots_per_gib: int = 0
    pcie_share: float = 0.0
    times_share: bool = False
    link_gbps: float | None = None
    missing_bytes: int = 0
    missing_shards: tuple[tuple[str, int], ...] = ()
    expert_types: str = ""
    file_bytes: int = 0
    ngram: str = "mapped"
    version: int = field(default=PLAN_VERSION)

    @property
    def fits(self) -> bool:
        """True when every allocation has its place, with or without disk reads per token."""
        return not self.shortfalls

    @property
    def complete(self) -> bool:
        """True when nothing of the file is missing; a load refuses one that is not, whether it fits or not."""
        return self.missing_bytes == 0

    @property
    def verdict(self) -> str:
        """FITS, NEEDS_DISK or DOES_NOT_FIT, of the complete file."""
        if self.shortfalls:
            return DOES_NOT_FIT
        return NEEDS_DISK if self.estimate is not None and self.estimate.disk_rate > 0 else FITS

    @property
    def n_slots(self) -> int:
        return sum(self.slots)

    def line(self, name: str, device: str | None = None) -> PlanLine:
        """The line of that name. KeyError when there is none."""
        for line in self.lines:
            if line.line == name and device in (None, line.device):
                return line
        raise KeyError(name)

    def total_bytes(self, device: str) -> int:
        """Bytes counted against the free memory of a device."""
        return sum(line.held_bytes for line in self.lines if line.device == device)

    def table(self) -> str:
        """The plan as text for people."""
        return plan_table(self)

    def to_json(self) -> dict:
        """The plan as plain values; `version` changes when a key changes its meaning or goes away."""
        return plan_json(self)

    def require(self) -> None:
        """Raise DoesNotFit with needed, free and the remedies unless the plan fits."""
        if self.fits:
            return
        raise DoesNotFit(
            f"{self.model} does not fit: " + "; ".join(str(s) for s in self.shortfalls),
            found=", ".join(f"{s.free_bytes / MIB:,.0f} MiB free ({s.device})" for s in self.shortfalls),
            needed=", ".join(f"{s.needed_bytes / MIB:,.0f} MiB" for s in self.shortfalls),
            advice="Try: " + "; ".join(self.remedies) if self.remedies else None,
        )

    def compared(self, taken: list[Allocation]) -> dict[tuple[str, str], tuple[int, int]]:
        """(line, device) -> (planned bytes, taken bytes), in the plan's order.

        Lines of kind later, driver and reserve are no allocations of a load. A line that only one side knows counts as
        0 on the other.
        """
        sums: dict[tuple[str, str], list[int]] = {}
        for line in self.lines:
            if line.kind in ("allocate", "map"):
                sums.setdefault((line.line, line.device), [0, 0])[0] += line.n_bytes
        for allocation in taken:
            sums.setdefault((allocation.line, allocation.device), [0, 0])[1] += allocation.n_bytes
        return {key: (planned, real) for key, (planned, real) in sums.items()}

    def verify(self, taken: list[Allocation]) -> list[Mismatch]:
        """Lines for which what was taken differs from its price by more than 1 % or 16 MiB; see `compared`."""
        return [
            Mismatch(line, device, price, real)
            for (line, device), (price, real) in self.compared(taken).items()
            if abs(real - price) > min(VERIFY_SHARE * max(price, real), VERIFY_BYTES)
        ]
