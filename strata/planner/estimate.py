"""What bounds decoding: bytes per token from each memory, times, and the resource that takes most of it.

All figures are for windows of one row without drafts and a context that is full. They are expectations over the
routing; where a rate is not measured on the machine, the assumption is listed with the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.base.plan import DiskRead, Estimate
from strata.planner.facts import ModelFacts
from strata.planner.machine import Gpu, Machine
from strata.planner.rates import CpuCosts, Part, exposed, product_ms
from strata.planner.state_bytes import gdn_state_bytes, kv_cell_bytes

SKEW = 0.4
"""With a ranking but no counts, a share s of the experts is taken to serve s**SKEW of the routed entries."""

NGRAM_CACHE_HITS = 0.5
"""Share of n-gram rows that the row cache is taken to serve in decoding."""

JOIN_US = 6.5
NODE_US = 0.8
NODES_PER_LAYER = 12
"""A layer's doorbell and the gaps between its graph nodes."""

DISK_GBPS, DISK_READS_PER_S, DISK_LATENCY_US = 2.0, 100_000.0, 120.0
ROTATING_GBPS, ROTATING_READS_PER_S, ROTATING_LATENCY_US = 0.15, 120.0, 8000.0


@dataclass(frozen=True)
class Residency:
    """Shares of the routed entries by place, with the source of the VRAM share."""

    vram: float
    ram: float
    disk: float
    source: str


def residency(m: ModelFacts, slots: tuple[int, ...], ram_bytes: int, hit_rate: float | None, ranked: bool) -> Residency:
    """Where routed entries are found. ram_bytes: expert bytes that RAM holds beyond what VRAM holds."""
    routed = sum(m.expert_bytes)
    held = sum(s * b for s, b in zip(slots, m.expert_bytes, strict=True)) if slots else 0
    share = held / (m.geometry.E * routed)
    if held >= m.experts_bytes:
        vram, source = 1.0, "all of them"
    elif hit_rate is not None:
        vram, source = hit_rate if held else 0.0, "given"
    elif ranked and held:
        vram, source = share**SKEW, f"profile, skew assumed (share^{SKEW})"
    else:
        vram, source = share, "uniform routing; real routing is skewed, a profile does better"
    rest = max(m.experts_bytes - held, 0)
    in_ram = 1.0 if rest == 0 or ram_bytes >= rest else ram_bytes / rest
    return Residency(vram, (1 - vram) * in_ram, (1 - vram) * (1 - in_ram), source)


def pcie_split(cpu_gbps: float, link_gbps: float, ram_gbps: float) -> float:
    """Share of the misses that the GPU reads over the link, so that both sides end together.

    Both rates shrink by the same factor when together they exceed what memory gives; the link is used only if that ends
    at least 10 % earlier than the CPU alone.
    """
    if cpu_gbps <= 0 or link_gbps <= 0:
        return 0.0
    scale = min(1.0, ram_gbps / (cpu_gbps + link_gbps))
    alone = 1 / min(cpu_gbps, ram_gbps)
    together = 1 / (scale * (cpu_gbps + link_gbps))
    return link_gbps / (cpu_gbps + link_gbps) if together <= 0.9 * alone else 0.0


def attention_bytes(m: ModelFacts, context: int, kv: str) -> float:
    """Bytes of KV and pooled keys that one token reads at a full context."""
    g = m.geometry
    cells = min(context, g.budget_cells + g.block_cells) if g.block_cells else context
    keys = context // g.block_cells * g.indexer_dim * 4 if g.block_cells else 0
    return len(g.qsa_layers) * (cells * kv_cell_bytes(g, kv) + keys)


def _disk(machine: Machine) -> tuple[float, float, float, str | None]:
    """(GB/s, random reads a second, latency us, assumption) of the model's disk."""
    d = machine.disk
    slow = d is not None and d.rotational
    gbps = d.read_gbps if d and d.read_gbps else ROTATING_GBPS if slow else DISK_GBPS
    reads = d.random_reads_per_s if d and d.random_reads_per_s else ROTATING_READS_PER_S if slow else DISK_READS_PER_S
    known = d is not None and d.read_gbps
    return gbps, reads, ROTATING_LATENCY_US if slow else DISK_LATENCY_US, None if known else f"disk reads {gbps:g} GB/s"


def disk_reads(m: ModelFacts, machine: Machine, where: Residency, table_in_ram: float) -> list[DiskRead]:
    """What a token reads from disk. table_in_ram: share of the n-gram table that free memory keeps cached."""
    gbps, reads_per_s, latency_us, _ = _disk(machine)
    out = []
    n_bytes = where.disk * m.routed_bytes_per_token
    if n_bytes > 0:
        reads = where.disk * m.geometry.K * len(m.expert_bytes)
        out.append(DiskRead("experts", "model file", n_bytes, reads, n_bytes / gbps / 1e6))
    if m.geometry.ngram is not None and m.ngram_rows:
        reads = m.geometry.ngram.heads * (1 - NGRAM_CACHE_HITS) * (1 - table_in_ram)
        if reads > 0:
            ms = max(latency_us / 1e3 * min(reads, 1.0), reads / reads_per_s * 1e3)
            out.append(DiskRead("n-gram rows", "n-gram table", reads * 4096, reads, ms))
    return out


def _finish(
    m: ModelFacts,
    where: Residency,
    share: float,
    sizes: dict[str, float],
    serial: dict[str, float],
    parallel: dict[str, float],
    hidden_ms: float,
    notes: list[str],
) -> Estimate:
    """The terms summed: serial ones, the longest parallel one, and what of the n-gram wait the first layers do not
    hide."""
    longest = max(parallel, key=lambda k: parallel[k], default=None)
    total = sum(serial.values()) + (parallel[longest] if longest else 0.0)
    wait = max(0.0, hidden_ms - 2 * total / m.geometry.L)
    if wait > 0:
        serial = {**serial, "n-gram rows from disk": wait}
        total += wait
    counted = {**serial, **({longest: parallel[longest]} if longest else {})}
    limit = max(counted, key=lambda k: counted[k])
    return Estimate(
        hit_rate=where.vram,
        hit_source=where.source,
        ram_rate=where.ram,
        disk_rate=where.disk,
        pcie_share=share,
        vram_bytes=sizes.get("vram", 0.0),
        ram_bytes=sizes.get("ram", 0.0),
        pcie_bytes=sizes.get("pcie", 0.0),
        disk_bytes=sizes.get("disk", 0.0),
        terms={**serial, **parallel},
        decode_ms=total,
        limit=limit,
        assumptions=tuple(notes),
    )


def dense_parts(m: ModelFacts) -> list[Part]:
    """Matrices of the trunk and head that every token multiplies, by type; the routed experts are not among them."""
    return [Part(k, b, c.rows_by_type[k]) for c in (*m.dense, m.head) for k, b in c.by_type.items()]


def expert_parts(m: ModelFacts) -> list[Part]:
    """The routed experts of one token."""
    K = m.geometry.K
    return [Part(k, K * b, K * rows) for layer in m.expert_parts for k, b, rows in layer]


def estimate_cpu(
    m: ModelFacts,
    machine: Machine,
    threads: int,
    context: int,
    kv: str,
    where: Residency,
    reads: list[DiskRead],
    n_ops: int,
    costs: CpuCosts,
) -> Estimate:
    """Decode estimate of the CPU backend. n_ops: ops of trunk, head and commit."""
    g = m.geometry
    dense, experts = dense_parts(m), expert_parts(m)
    state_bytes = 3.0 * gdn_state_bytes(g) + attention_bytes(m, context, kv)
    read_bytes = sum(p.n_bytes for p in (*dense, *experts)) + state_bytes
    cached = m.dense_bytes + m.experts_bytes + state_bytes < machine.cache_bytes
    gbps = float("inf") if cached else machine.ram_gbps
    cells = min(context, g.budget_cells + g.block_cells) if g.block_cells else context
    disk_ms = sum(r.ms_per_token for r in reads if r.what == "experts")
    serial = {
        "dense weights from RAM": product_ms(dense, costs, threads, gbps),
        "experts from RAM": (product_ms(experts, costs, threads, gbps) + costs.expert_ms(g, threads))
        * (1 - where.disk),
        "state and attention": exposed(costs.state_ms(g, cells, threads), state_bytes / gbps / 1e6),
        "ops and joins": costs.fixed_ms(g, n_ops, threads),
    }
    if disk_ms:
        serial["experts from disk"] = disk_ms
    notes = _notes(machine, costs)
    if cached:
        notes.append("all weights stay in the CPU's cache")
    sizes = {"ram": read_bytes - where.disk * m.routed_bytes_per_token, "disk": sum(r.bytes_per_token for r in reads)}
    hidden = sum(r.ms_per_token for r in reads if r.what != "experts")
    return _finish(m, where, 0.0, sizes, serial, {}, hidden, notes)


def estimate_gpu(
    m: ModelFacts,
    machine: Machine,
    gpu: Gpu,
    threads: int,
    context: int,
    kv: str,
    where: Residency,
    reads: list[DiskRead],
    link_usable: bool,
    costs: CpuCosts,
    given_share: float | None = None,
) -> Estimate:
    """Decode bound with a GPU: dense weights from VRAM, then hits, misses on the CPU and the PCIe share side by
    side."""
    g = m.geometry
    dense = float(sum(c.read_bytes for c in (*m.dense, m.embedding, m.head)))
    state = 3.0 * gdn_state_bytes(g) + attention_bytes(m, context, kv)
    routed = float(m.routed_bytes_per_token)
    hit_bytes, ram_bytes = where.vram * routed, where.ram * routed
    cpu_ms = product_ms(expert_parts(m), costs, threads, machine.ram_gbps) + costs.expert_ms(g, threads)
    cpu_gbps = routed / cpu_ms / 1e6
    share = pcie_split(cpu_gbps, gpu.link_gbps, machine.ram_gbps) if given_share is None else given_share
    share = share if link_usable and ram_bytes > 0 else 0.0
    scale = min(1.0, machine.ram_gbps / (cpu_gbps + gpu.link_gbps)) if share else 1.0
    serial = {
        "dense weights from VRAM": (dense + state) / gpu.vram_gbps / 1e6,
        "graph nodes and joins": g.L * (NODES_PER_LAYER * NODE_US + (JOIN_US if where.vram < 1 else 0.0)) / 1e3,
    }
    bound = " (RAM-bound)" if scale < 1 else ""
    parallel = {
        "expert hits from VRAM": hit_bytes / gpu.vram_gbps / 1e6,
        f"expert misses on the CPU{bound}": (1 - share) * ram_bytes / (cpu_gbps * scale) / 1e6,
        f"expert misses over PCIe{bound}": share * ram_bytes / (gpu.link_gbps * scale) / 1e6,
    }
    disk_ms = sum(r.ms_per_token for r in reads if r.what == "experts")
    if disk_ms:
        serial["experts from disk"] = disk_ms
    notes = _notes(machine, costs)
    if not gpu.rates_known:
        notes.append(f"card not in the list: {gpu.vram_gbps:g} GB/s of memory bandwidth assumed")
    sizes = {
        "vram": dense + state + hit_bytes,
        "ram": ram_bytes,
        "pcie": share * ram_bytes,
        "disk": sum(r.bytes_per_token for r in reads),
    }
    hidden = sum(r.ms_per_token for r in reads if r.what != "experts")
    return _finish(m, where, share, sizes, serial, {k: v for k, v in parallel.items() if v > 0}, hidden, notes)


def _notes(machine: Machine, costs: CpuCosts) -> list[str]:
    """What the estimate takes for granted."""
    notes = [] if costs.measured else [f"{costs.tier} kernels at listed rates"]
    if not machine.ram_gbps_measured:
        notes.append(f"RAM reads {machine.ram_gbps:.3g} GB/s")
    assumed = _disk(machine)[3]
    if assumed:
        notes.append(assumed)
    return notes
