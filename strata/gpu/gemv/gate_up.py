"""Gate and up of experts in Q4_K with what follows them until the down product, in windows of several rows."""

from __future__ import annotations

from strata.gpu.activations import Activations
from strata.gpu.gemv.half import half_bytes, with_rings
from strata.gpu.gemv.records import Entries, Hidden, Place
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer

SOURCE = Source("gemv/gate_up.cu", ("gate_up",))


def gate_up(gate: Place, rows: int, x: Activations, entries: Entries, hidden: Hidden, across: int) -> Launch:
    """The launch for `across` jobs, or groups of entries."""
    h, ring_at = hidden.h, half_bytes(x.K)  # more than a lone column takes
    args = (
        pointer(gate.address), pointer(hidden.up.address), pointer(gate.table), i32(gate.part), i64(gate.stride),
        pointer(entries.ids), pointer(entries.decisions), i32(entries.take), pointer(entries.jobs), i32(entries.n),
        i32(entries.n // x.T), pointer(x.codes), pointer(x.scales), pointer(x.sums), i32(rows), i32(x.K),
        pointer(h.codes), pointer(h.scales), pointer(h.sums), pointer(hidden.factors), i32(hidden.experts),
        pointer(hidden.error), hidden.where, i32(ring_at),
    )  # fmt: skip
    return with_rings(launch(SOURCE, "gate_up", (rows // 32, across), 256, *args, shared_bytes=ring_at))
