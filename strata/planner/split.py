"""Who computes the experts that VRAM does not hold: the split of a layer's misses between CPU and link, by cost.

A layer has hits, which the GPU computes from VRAM, and misses. Of these a share travels over the link and is computed
by the GPU too, while the CPU computes the others from RAM. Everything here is a pure function of measured costs,
continuous in each of them, so that a small error of a measurement is a small error of the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.base.errors import need

WHOLE = 256
"""Shares are given to the device in steps of 1/256."""

LEAST_GAIN, FULL_GAIN = 0.10, 0.15
"""The link is used from the first gain over the CPU alone; from the second on to the full balanced share. In between
the share grows, so that it does not jump where a cost passes a threshold."""

STEPS = 48
"""Halvings of the search for the balance; each is one bit of the share."""


@dataclass(frozen=True)
class SplitCosts:
    """Measured costs of one expert. Times in us, rates in GB/s.

    cpu_us          all workers together, at 1, 2, ... rows that want the expert; between measured rows one may
                    interpolate with `cpu_us_at`
    expert_bytes    of one expert in RAM
    link_gbps       rate of the link for experts, 0 if there is none
    link_fixed_us   of each expert beside its bytes
    gpu_us          the GPU's time for one expert that it holds
    join_us         from the end of the CPU's part to its use: doorbell and sums
    memory_gbps     what CPU and link can read from RAM together
    """

    cpu_us: Sequence[float]
    expert_bytes: float
    link_gbps: float
    link_fixed_us: float = 0.0
    gpu_us: float = 0.0
    join_us: float = 0.0
    memory_gbps: float = float("inf")

    def __post_init__(self) -> None:
        need(len(self.cpu_us) >= 1 and min(self.cpu_us) > 0, "cpu_us is out of range", found=self.cpu_us,
             needed="a time for one row or more, each > 0")  # fmt: skip
        need(self.expert_bytes > 0 and self.memory_gbps > 0, "expert_bytes and memory_gbps are out of range",
             found=(self.expert_bytes, self.memory_gbps), needed="> 0")  # fmt: skip
        rest = (self.link_gbps, self.link_fixed_us, self.gpu_us, self.join_us)
        need(min(rest) >= 0, "costs are negative", found=rest, needed=">= 0")

    def cpu_us_at(self, rows: float) -> float:
        """CPU time of an expert that `rows` rows want (any number from 1), on the line between measured rows."""
        last = len(self.cpu_us) - 1
        at = min(max(rows - 1, 0.0), float(last))
        i = min(int(at), max(last - 1, 0))
        after = self.cpu_us[min(i + 1, last)]
        return self.cpu_us[i] + (at - i) * (after - self.cpu_us[i])

    @property
    def link_us(self) -> float:
        """Link time of one expert; inf without a link."""
        return self.link_fixed_us + self.expert_bytes / self.link_gbps / 1e3 if self.link_gbps > 0 else float("inf")


def cpu_line(one_us: float, eight_us: float) -> tuple[float, ...]:
    """cpu_us for 1..8 rows from measurements at 1 and 8."""
    return tuple(one_us + (eight_us - one_us) * i / 7 for i in range(8))


@dataclass(frozen=True)
class Branches:
    """When the branches of a layer end, in us from the decision: the CPU with its join, the link with the products of
    what it brought, the hits. total_us: the last of them."""

    cpu_us: float
    link_us: float
    hits_us: float

    @property
    def total_us(self) -> float:
        return max(self.cpu_us, self.link_us, self.hits_us)


@dataclass(frozen=True)
class Split:
    """A choice. fraction of the misses for the link; what it is expected to take, and what the CPU alone would.

    gain: share of the time of the CPU alone that the best split saves, whether it is used or not
    """

    fraction: float
    chosen: Branches
    alone: Branches
    gain: float

    @property
    def pcie_num(self) -> int:
        """The share in steps of 1/256, as the device takes it: of n misses it sends (n + 1) pcie_num / 256, rounded
        down, so that each goes where it ends earlier."""
        return round(WHOLE * self.fraction)


def predict(costs: SplitCosts, misses: float, fraction: float, rows: float = 1.0, hits: float = 0.0) -> Branches:
    """Times of a layer.

    misses, hits   distinct experts of either kind, expected numbers      fraction  of the misses for the link
    rows           rows that want a miss, on average

    While CPU and link both read, they slow down by one factor if together they ask for more than RAM gives; when one
    has ended, the other goes on alone. The link's experts are computed when the hits are done.
    """
    need(misses >= 0 and hits >= 0 and 0 <= fraction <= 1, "misses, hits or fraction are out of range",
         found=(misses, hits, fraction), needed=">= 0, >= 0 and 0 to 1")  # fmt: skip
    each_cpu, each_link = costs.cpu_us_at(rows), costs.link_us
    hits_us = hits * costs.gpu_us
    cpu, link = (1 - fraction) * misses * each_cpu, fraction * misses * each_link if fraction * misses else 0.0
    bytes_per_us = costs.memory_gbps * 1e3
    cpu_rate, link_rate = costs.expert_bytes / each_cpu, costs.expert_bytes / each_link
    both = max(1.0, (cpu_rate + link_rate) / bytes_per_us)
    together = min(cpu, link) * both
    cpu_end = together + max(cpu - link, 0.0) * max(1.0, cpu_rate / bytes_per_us)
    copied = together + max(link - cpu, 0.0) * max(1.0, link_rate / bytes_per_us)
    link_end = max(copied, hits_us) + fraction * misses * costs.gpu_us
    # Without misses nobody rings; the first part of one rings in full, and in between the join is in proportion.
    join = costs.join_us * min(1.0, (1 - fraction) * misses)
    return Branches(cpu_end + join, link_end, hits_us)


def choose_split(costs: SplitCosts, misses: float, rows: float = 1.0, hits: float = 0.0) -> Split:
    """The share of the link that makes the later of CPU and link earliest, if that is worth it.

    The balance is where both end together: a larger share ends the CPU earlier and the link later. It is used only if
    the layer then ends at least 10 % earlier than with the CPU alone.
    """
    alone = predict(costs, misses, 0.0, rows, hits)
    if misses <= 0 or costs.link_gbps <= 0 or alone.total_us <= 0:
        return Split(0.0, alone, alone, 0.0)
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        b = predict(costs, misses, middle, rows, hits)
        low, high = (middle, high) if b.link_us < b.cpu_us else (low, middle)
    gain = 1 - predict(costs, misses, low, rows, hits).total_us / alone.total_us
    fraction = low * min(max((gain - LEAST_GAIN) / (FULL_GAIN - LEAST_GAIN), 0.0), 1.0)
    return Split(fraction, predict(costs, misses, fraction, rows, hits), alone, gain)
