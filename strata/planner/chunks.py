"""Prefill chunks in the plan of a GPU: as many rows as what everything else leaves has room for.

Where a card holds a part of the experts, what a chunk needs only while it is read lies in expert slots, which are empty
meanwhile and filled again before the next window. Where RAM holds only what no slot holds they cannot be emptied: there
a chunk takes the place of slots for good.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from strata.arch.flash_next.program import trunk_program
from strata.base.geometry import Geometry
from strata.base.plan import MIB, Plan, PlanLine
from strata.gpu.chunk_plan import CHUNKS, ChunkBytes, ChunkPrices, chunk_problem, largest_chunk
from strata.gpu.slots import ExpertSlots
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.ngram import TABLE_NAME
from strata.pack.tensors import Tensors
from strata.planner.needs import TICKETS, ticket_line
from strata.planner.options import PlanOptions
from strata.planner.state_bytes import round_context

SLOT_SHARE = 0.2
"""Most of the expert cache that a prefill chunk may take for good."""

LASTING_SHARE = 0.05
"""The same where the rest is lent."""

LENT_SHARE, KEPT_SLOTS = 0.9, 128
"""Most of the expert cache that is lent, and slots that are never lent."""

MAPPED_STAGING_BYTES = 256 * MIB


def largest_for(
    gguf: GgufFile, g: Geometry, context: int, kv: str, spare: Mapping[str, int], slots: Sequence[int] = ()
) -> ChunkBytes | None:
    """The largest chunk that spare bytes have room for, or None.

    spare   "vram", "ram", and perhaps "lent": bytes for what is needed only while a chunk is read
    slots   experts that each layer holds in VRAM, all without; others come over the link through a ring
    """
    experts = expert_layout(gguf, g.L)
    if chunk_problem(g) or not all(part.format.group for layer in experts.layers for part in layer.projections):
        return None
    held = ExpertSlots(experts, slots) if slots else None
    prices = ChunkPrices(
        lambda rows: trunk_program(g, rows, round_context(context), kv, advance=True), Tensors(gguf), experts, held
    )
    lent = spare.get("lent")

    def bytes_of(rows: int) -> int:
        of = prices.of(rows)
        fits = of.staging <= spare["ram"] and (lent is None or of.lendable <= lent)
        return (of.device_bytes if lent is None else of.lasting) if fits else spare["vram"] + 1

    rows = largest_chunk(bytes_of, spare["vram"], round_context(context))
    return prices.of(rows) if rows else None


def _by_windows(g: Geometry, no_room: str) -> str:
    problem = chunk_problem(g)
    return f"prompts are read by windows: {f'chunks do not take {problem}' if problem else no_room}"


def _ram(p: Plan, gguf: GgufFile, g: Geometry) -> int:
    """RAM that staging may take beside tickets of the largest chunk: what is left, or what the cache of a mapped file
    gives back."""
    left = p.free_bytes["ram"] - p.total_bytes("ram")
    left = max(left, MAPPED_STAGING_BYTES) if p.experts == "mapped" else left
    return left - sum(x.n_bytes for x in _tickets(p, gguf, g, CHUNKS[0]))


def _tickets(p: Plan, gguf: GgufFile, g: Geometry, rows: int) -> list[PlanLine]:
    """The plan's line for the n-gram rows of a chunk on their way; empty without such a table."""
    return [ticket_line(g, gguf.info(TABLE_NAME).row_bytes, rows, p.ngram == "direct")] if g.ngram else []


def lendable_bytes(p: Plan) -> int:
    """Of the expert slots, how many may be lent to a chunk: 0 if none."""
    if p.experts == "resident" or not p.slots:
        return 0
    total = sum(n * size for n, size in zip(p.slots, p.slot_bytes, strict=True))
    return max(0, min(int(LENT_SHARE * total), total - KEPT_SLOTS * max(p.slot_bytes)))


def with_chunk(p: Plan, gguf: GgufFile, g: Geometry, lends: bool = False) -> Plan:
    """The plan with the largest prefill chunk that fits beside everything else, or with a note that none does.

    lends   what a chunk needs only while it is read lies in expert slots, if they have room for it; else beside them
    """
    spare = {"vram": p.free_bytes["vram"] - p.total_bytes("vram"), "ram": _ram(p, gguf, g)}
    if lends:
        spare["lent"] = lendable_bytes(p)
    of = largest_for(gguf, g, p.context, p.kv, spare, p.slots)
    if of is None and lends:
        return with_chunk(p, gguf, g)
    if of is None:
        return replace(p, notes=(*p.notes, _by_windows(g, "no room for a chunk beside the experts")))
    own = of.lasting if lends else of.device_bytes
    lines = [
        PlanLine("prefill buffers", "vram", own, f"chunks of up to {of.rows:,} rows"),
        PlanLine("prefill staging", "ram", of.staging, "pinned: n-gram rows of two chunks"),
    ]
    if lends:
        reason = "of the expert cache, while a chunk is read"
        lines.append(PlanLine("prefill loan", "vram", of.lendable, reason, "lent", 0))
    tickets = _tickets(p, gguf, g, of.rows)
    kept = [x for x in p.lines if not (tickets and x.line == TICKETS)]
    return replace(p, prefill_rows=of.rows, lines=(*kept, *(line for line in (*lines, *tickets) if line.n_bytes)))


def paid_with_slots(plan_of: Callable[[PlanOptions], Plan], o: PlanOptions, gguf: GgufFile, g: Geometry) -> Plan:
    """The plan of a card that holds a part of the experts, with a prefill chunk that borrows slots or replaces some.

    plan_of   makes a plan. A chunk may take up to SLOT_SHARE of the expert cache, or LASTING_SHARE beside what it
    borrows: prompts are read many times faster by chunks, and decode loses a little of its hit rate. Slots that were
    asked for stay; then only what is left counts.
    """
    made = plan_of(replace(o, prefill="windows"))
    if not made.fits or o.prefill != "auto":
        return made
    lends = lendable_bytes(made) > 0
    if o.slots is not None:
        return with_chunk(made, gguf, g, lends)
    cache = sum(line.n_bytes for line in made.lines if line.line == "expert cache")
    spare = {"vram": int((LASTING_SHARE if lends else SLOT_SHARE) * cache), "ram": _ram(made, gguf, g)}
    if lends:
        spare["lent"] = int((1 - LASTING_SHARE) * lendable_bytes(made))  # of the slots that are left
    of = largest_for(gguf, g, made.context, made.kv, spare, made.slots)
    if of is None:
        note = _by_windows(g, "a chunk would take too many of the expert slots")
        return replace(made, notes=(*made.notes, note))
    reserve, taken = made.line("reserve").n_bytes, of.lasting if lends else of.device_bytes
    options = replace(o, prefill="windows", context=made.context, reserve_mib=(reserve + taken) / MIB)
    smaller = plan_of(options)
    if not smaller.fits:
        return made
    lines = [replace(x, n_bytes=reserve) if x.line == "reserve" else x for x in smaller.lines]
    return with_chunk(replace(smaller, lines=tuple(lines), largest_context=made.largest_context), gguf, g, lends)
