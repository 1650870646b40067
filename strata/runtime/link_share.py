"""The share of missing experts that a load begins with: as remembered, else by the costs of the plan."""

from __future__ import annotations

from strata.planner.estimate import JOIN_US, expert_parts
from strata.planner.facts import ModelFacts
from strata.planner.machine import Gpu, Machine
from strata.planner.rates import CpuCosts, product_ms
from strata.runtime.remembered import remembered
from strata.runtime.split import SplitCosts, choose_split


def planned_costs(m: ModelFacts, machine: Machine, gpu: Gpu, threads: int) -> SplitCosts:
    """Costs of the model's mean expert from listed rates. The GPU's own time is that of reading it from VRAM."""
    g, costs = m.geometry, CpuCosts(machine.kernel_tier)
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


def first_share(m: ModelFacts, machine: Machine, gpu: Gpu, threads: int, hit_rate: float) -> float:
    """Share of the missing experts for the link: what a calibration kept for this machine and file, else by cost.

    hit_rate: of routed entries, as the plan expects it.
    """
    kept = remembered(machine, m.path)
    if kept is not None and kept.pcie_num is not None:
        return kept.pcie_num / 256
    K = m.geometry.K
    return choose_split(planned_costs(m, machine, gpu, threads), K * (1 - hit_rate), 1.0, K * hit_rate).fraction
