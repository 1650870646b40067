"""The share of missing experts that a load begins with: as a calibration kept it, else by the costs of the plan."""

from __future__ import annotations

from pathlib import Path

from strata.base.errors import FileError
from strata.planner.estimate import JOIN_US, expert_parts
from strata.planner.facts import ModelFacts
from strata.planner.machine import Gpu, Machine
from strata.planner.rates import CpuCosts, product_ms
from strata.planner.remembered import remembered
from strata.planner.split import WHOLE, SplitCosts, choose_split


def planned_costs(
    m: ModelFacts, machine: Machine, gpu: Gpu, threads: int, costs: CpuCosts | None = None
) -> SplitCosts:
    """Costs of the model's mean expert, from listed rates if none are given. The GPU's own time is that of reading it
    from VRAM."""
    g, costs = m.geometry, costs or CpuCosts(machine.kernel_tier)
    n_bytes = m.experts_bytes / m.n_pairs
    cpu_ms = product_ms(expert_parts(m), costs, threads, machine.ram_gbps) + costs.expert_ms(g, threads)
    return SplitCosts(
        cpu_us=(cpu_ms * 1e3 / (g.L * g.K),),
        expert_bytes=n_bytes,
        link_gbps=gpu.link_gbps,
        gpu_us=n_bytes / gpu.vram_gbps / 1e3,
        join_us=JOIN_US,
        memory_gbps=machine.ram_gbps,
    )


def planned_share(
    m: ModelFacts, machine: Machine, gpu: Gpu, threads: int, hit_rate: float, costs: CpuCosts | None = None
) -> float:
    """Share of the missing experts for the link by cost. hit_rate: of routed entries, as the plan expects it."""
    K = m.geometry.K
    found = choose_split(planned_costs(m, machine, gpu, threads, costs), K * (1 - hit_rate), 1.0, K * hit_rate)
    return found.fraction


def kept_share(machine: Machine, model: str | Path) -> float | None:
    """The share that a calibration kept for this machine and file; None if none did."""
    try:
        kept = remembered(machine, model)
    except FileError:  # a shard is missing: such a file can be planned, and was never calibrated
        return None
    return None if kept is None or kept.pcie_num is None else kept.pcie_num / WHOLE
