"""What the CPU backend's ops cost: kernel rates by type and tier, and the costs of everything that is no product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from strata.base.geometry import Geometry
from strata.planner.machine import TIERS

CORE_GBPS: dict[str, tuple[float, float, float]] = {
    "Q8_0": (8.4, 29.7, 35.9), "IQ4_NL": (2.0, 14.6, 27.8), "MXFP4": (2.0, 15.6, 23.5), "Q2_0": (1.1, 13.9, 19.8),
    "Q4_K": (4.1, 23.4, 26.6), "Q5_K": (3.7, 22.7, 24.6), "Q6_K": (4.1, 26.0, 26.0), "Q3_K": (2.0, 12.5, 14.4),
    "Q2_K": (2.1, 10.9, 15.0), "IQ3_XXS": (2.4, 4.6, 14.1), "IQ3_S": (2.0, 3.6, 13.4), "IQ2_XXS": (1.9, 4.1, 8.7),
    "IQ2_XS": (1.8, 4.7, 7.9), "IQ2_S": (1.8, 5.4, 7.6), "IQ1_S": (1.2, 3.6, 4.6), "IQ1_M": (1.0, 3.0, 5.1),
    "IQ4_XS": (2.0, 17.0, 26.3), "NVFP4": (2.2, 18.1, 22.0), "Q4_0": (3.3, 19.6, 29.1), "Q4_1": (3.6, 20.5, 26.9),
    "Q5_0": (2.8, 16.1, 23.9), "Q5_1": (3.0, 17.3, 23.4), "BF16": (18.0, 37.5, 45.0), "F16": (15.5, 41.2, 55.5),
    "F32": (26.0, 67.6, 67.6),
}  # fmt: skip
"""GB/s of weight bytes that one core turns into products at one row of 2,560 values, from its cache: portable, avx2,
avx512; see docs/measurements/cpu-kernels.md."""

ROW_NS = {"portable": (15.0, 45.0), "avx2": (3.0, 6.0), "avx512": (2.5, 3.5)}
"""Cost of one matrix row besides its bytes (sums across lanes, loop), for quantised and for float types."""

EXPERT_NS = {"portable": 20.0, "avx2": 6.0, "avx512": 5.0}

EXPOSED_SHARE = 0.2
"""Of computing and reading at once: share of the shorter one that the other does not hide."""

FLOAT_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Part:
    """Products of one type: bytes and rows of the matrices."""

    kind: str
    n_bytes: float
    rows: float


@dataclass(frozen=True)
class CpuCosts:
    """Costs of one core. The constants were fitted on two models of different size; see `docs/planning.md`.

    tier            kernel tier of the listed rates
    core_gbps       measured rates by type, instead of the listed ones
    row_ns          measured cost of a row by type
    stream_gbps     measured rates by type, with the bytes read from memory
    gdn_ns          a window's step, per value of recurrent state in the cache; commit_ns for its commit
    attend_ns       per attended cell and value of all query heads
    hc_ns           hyper-connection reads and adds, per value of the streams
    element_ns      other element-wise work, per value
    expert_ns       activation, quantisation and combine, per value of an expert's width and output; None: the tier's
    op_us, join_us  per op, and per op that several threads share
    host_us         Python around a window
    pace            time of everything but products as a multiple of what it took where the constants were fitted
    """

    tier: str = "portable"
    core_gbps: Mapping[str, float] = field(default_factory=dict)
    row_ns: Mapping[str, float] = field(default_factory=dict)
    stream_gbps: Mapping[str, float] = field(default_factory=dict)
    gdn_ns: float = 0.16
    commit_ns: float = 0.13
    attend_ns: float = 0.09
    hc_ns: float = 1.3
    element_ns: float = 1.5
    expert_ns: float | None = None
    op_us: float = 0.03
    join_us: float = 1.0
    host_us: float = 50.0
    pace: float = 1.0

    @property
    def measured(self) -> bool:
        return bool(self.core_gbps)

    def gbps(self, kind: str) -> float:
        """Rate of one core on a type; an unlisted type counts as the slowest of the tier."""
        if kind in self.core_gbps:
            return self.core_gbps[kind]
        column = TIERS.index(self.tier)
        row = CORE_GBPS.get(kind)
        return row[column] if row else min(r[column] for r in CORE_GBPS.values())

    def row(self, kind: str) -> float:
        return self.row_ns.get(kind, ROW_NS[self.tier][kind in FLOAT_TYPES])

    def state_ms(self, g: Geometry, cells: int, threads: int) -> float:
        """Recurrence with its commit, and attention over `cells` cells; heads are shared among threads."""
        state = len(g.gdn_layers) * g.gdn_value_heads * g.gdn_key_dim * g.gdn_value_dim
        attended = len(g.qsa_layers) * cells * g.H * g.dh
        return self.pace * (state * (self.gdn_ns + self.commit_ns) + attended * self.attend_ns) / threads / 1e6

    def expert_ms(self, g: Geometry, threads: int) -> float:
        """What an expert costs besides its products."""
        each = EXPERT_NS[self.tier] if self.expert_ns is None else self.expert_ns
        return self.pace * g.L * (g.K + 1) * (g.F + g.D) * each / threads / 1e6

    def fixed_ms(self, g: Geometry, n_ops: int, threads: int) -> float:
        """Everything that one thread does alone, dispatch and Python."""
        hc = (2 * g.L + 1) * g.CD * self.hc_ns
        other = len(g.gdn_layers) * g.gdn_channels + len(g.qsa_layers) * 2 * g.H * g.dh + g.L * g.D
        other += 3 * g.CD if g.ngram is not None else 0
        joins = n_ops * (self.op_us + (self.join_us if threads > 1 else 0.0))
        return self.pace * ((hc + other * self.element_ns) / 1e6 + (joins + self.host_us) / 1e3)


def exposed(compute: float, read: float) -> float:
    """Time of computing on bytes while they are read: the longer of both, and what it does not hide of the shorter."""
    return max(compute, read) + EXPOSED_SHARE * min(compute, read)


def product_ms(parts: Iterable[Part], costs: CpuCosts, threads: int, memory_gbps: float) -> float:
    """Time of products: `threads` cores at their types' rates, while memory is read (inf: in the cache)."""
    total = 0.0
    for p in parts:
        rows, read = p.rows * costs.row(p.kind) / threads, p.n_bytes / memory_gbps
        compute = p.n_bytes / costs.gbps(p.kind) / threads + rows
        if read and p.kind in costs.stream_gbps:
            total += max(p.n_bytes / costs.stream_gbps[p.kind] / threads + rows, read)
        else:
            total += exposed(compute, read)
    return total / 1e6
