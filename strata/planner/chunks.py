"""Prefill chunks in the plan of a GPU that holds every expert: as many rows as what is left has room for."""

from __future__ import annotations

from dataclasses import replace

from strata.arch.flash_next.programs import build_programs
from strata.base.geometry import Geometry
from strata.base.plan import Plan, PlanLine
from strata.gpu.chunk_plan import ChunkBytes, chunk_bytes, largest_chunk
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.planner.state_bytes import round_context


def with_chunk(p: Plan, gguf: GgufFile, g: Geometry) -> Plan:
    """The plan with the largest prefill chunk that fits beside everything else, or with a note that none does."""
    formats = [part.format for layer in expert_layout(gguf, g.L).layers for part in layer.projections]
    spare = {device: p.free_bytes[device] - p.total_bytes(device) for device in ("vram", "ram")}
    context, known = round_context(p.context), {}

    def priced(rows: int) -> ChunkBytes:
        if rows not in known:
            programs = build_programs(g, context, p.kv, chunk_rows=rows)
            known[rows] = chunk_bytes(programs, Tensors(gguf), expert_layout(gguf, g.L))
        return known[rows]

    def bytes_of(rows: int) -> int:
        return priced(rows).device_bytes if priced(rows).staging <= spare["ram"] else spare["vram"] + 1

    rows = largest_chunk(bytes_of, spare["vram"], context) if all(f.group for f in formats) else 0
    if rows == 0:
        return replace(p, notes=(*p.notes, "prompts are read by windows: no room for a chunk beside the experts"))
    of = priced(rows)
    lines = [
        PlanLine("prefill buffers", "vram", of.device_bytes, f"chunks of up to {rows:,} rows"),
        PlanLine("prefill staging", "ram", of.staging, "pinned: n-gram rows of a chunk"),
    ]
    return replace(p, prefill_rows=rows, lines=(*p.lines, *(line for line in lines if line.n_bytes)))
