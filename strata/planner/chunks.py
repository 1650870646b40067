"""Prefill chunks in the plan of a GPU: as many rows as what everything else leaves has room for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from strata.arch.flash_next.program import trunk_program
from strata.base.geometry import Geometry
from strata.base.plan import MIB, Plan, PlanLine
from strata.gpu.chunk_plan import ChunkBytes, ChunkPrices, chunk_problem, largest_chunk
from strata.gpu.slots import ExpertSlots
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.planner.options import PlanOptions
from strata.planner.state_bytes import round_context

SLOT_SHARE = 0.2
"""Most of the expert cache that a prefill chunk may take."""

MAPPED_STAGING_BYTES = 256 * MIB


def largest_for(
    gguf: GgufFile, g: Geometry, context: int, kv: str, spare: Mapping[str, int], slots: Sequence[int] = ()
) -> ChunkBytes | None:
    """The largest chunk that spare bytes of "vram" and "ram" have room for, or None.

    slots: experts that each layer holds in VRAM, all without; others come over the link through a ring.
    """
    experts = expert_layout(gguf, g.L)
    if chunk_problem(g) or not all(part.format.group for layer in experts.layers for part in layer.projections):
        return None
    held = ExpertSlots(experts, slots) if slots else None
    prices = ChunkPrices(
        lambda rows: trunk_program(g, rows, round_context(context), kv, advance=True), Tensors(gguf), experts, held
    )

    def bytes_of(rows: int) -> int:
        of = prices.of(rows)
        return of.device_bytes if of.staging <= spare["ram"] else spare["vram"] + 1

    rows = largest_chunk(bytes_of, spare["vram"], round_context(context))
    return prices.of(rows) if rows else None


def _by_windows(g: Geometry, no_room: str) -> str:
    problem = chunk_problem(g)
    return f"prompts are read by windows: {f'chunks do not take {problem}' if problem else no_room}"


def _ram(p: Plan) -> int:
    """RAM that staging may take: what is left, or what the cache of a mapped file gives back."""
    left = p.free_bytes["ram"] - p.total_bytes("ram")
    return max(left, MAPPED_STAGING_BYTES) if p.experts == "mapped" else left


def with_chunk(p: Plan, gguf: GgufFile, g: Geometry) -> Plan:
    """The plan with the largest prefill chunk that fits beside everything else, or with a note that none does."""
    spare = {"vram": p.free_bytes["vram"] - p.total_bytes("vram"), "ram": _ram(p)}
    of = largest_for(gguf, g, p.context, p.kv, spare, p.slots)
    if of is None:
        return replace(p, notes=(*p.notes, _by_windows(g, "no room for a chunk beside the experts")))
    lines = [
        PlanLine("prefill buffers", "vram", of.device_bytes, f"chunks of up to {of.rows:,} rows"),
        PlanLine("prefill staging", "ram", of.staging, "pinned: n-gram rows of two chunks"),
    ]
    return replace(p, prefill_rows=of.rows, lines=(*p.lines, *(line for line in lines if line.n_bytes)))


def paid_with_slots(plan_of: Callable[[PlanOptions], Plan], o: PlanOptions, gguf: GgufFile, g: Geometry) -> Plan:
    """The plan of a card that holds a part of the experts, with a prefill chunk in place of some of its slots.

    plan_of   makes a plan. A chunk may take up to SLOT_SHARE of the expert cache: prompts are read many times faster by
    chunks, and decode loses a little of its hit rate. Slots that were asked for stay; then only what is left counts.
    """
    made = plan_of(replace(o, prefill="windows"))
    if not made.fits or o.prefill != "auto":
        return made
    if o.slots is not None:
        return with_chunk(made, gguf, g)
    cache = sum(line.n_bytes for line in made.lines if line.line == "expert cache")
    of = largest_for(gguf, g, made.context, made.kv, {"vram": int(SLOT_SHARE * cache), "ram": _ram(made)}, made.slots)
    if of is None:
        note = _by_windows(g, "a chunk would take too many of the expert slots")
        return replace(made, notes=(*made.notes, note))
    reserve = made.line("reserve").n_bytes
    options = replace(o, prefill="windows", context=made.context, reserve_mib=(reserve + of.device_bytes) / MIB)
    smaller = plan_of(options)
    if not smaller.fits:
        return made
    lines = [replace(x, n_bytes=reserve) if x.line == "reserve" else x for x in smaller.lines]
    return with_chunk(replace(smaller, lines=tuple(lines), largest_context=made.largest_context), gguf, g)
