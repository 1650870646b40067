"""How large the expert cache is: reserve, prefill buffers and slots out of the VRAM that every other line leaves."""

from __future__ import annotations

from dataclasses import dataclass

from strata.base.plan import MIB
from strata.planner import needs
from strata.planner.facts import ModelFacts
from strata.planner.options import PlanOptions
from strata.planner.slots import Allotment, Queue, allot

EVERYTHING = 1 << 62

RESERVE_MIB, SMALLEST_RESERVE_MIB = 700, 300
LOAN_KEEP_SLOTS, LOAN_SHARE = 128, 0.9
"""A prefill chunk may borrow the cold tail of the cache, but leaves this many slots and a tenth of them."""

CHUNKS = (8192, 6144, 4096, 3072, 2048, 1024, 512, 256)
SMALLEST_CHUNK, OWN_CHUNK = 256, 1024


@dataclass(frozen=True)
class CacheSize:
    """Outcome of sizing the expert cache."""

    allotment: Allotment
    reserve_bytes: int
    prefill_rows: int
    own_bytes: int
    borrowed_bytes: int
    shortfall: tuple[str, int] | None
    notes: tuple[str, ...] = ()


def _loan(m: ModelFacts, rows: int, slot: int) -> int:
    """Slots that a chunk of `rows` rows borrows."""
    return -(-needs.prefill_bytes(m.geometry, rows, slot) // slot)


def _largest_chunk(m: ModelFacts, slots: int, slot: int, context: int) -> int:
    """Largest automatic chunk whose loan the cache can give; 0 if none."""
    for rows in CHUNKS:
        loan = _loan(m, rows, slot)
        if rows <= max(context, SMALLEST_CHUNK) and loan + LOAN_KEEP_SLOTS <= slots and loan <= LOAN_SHARE * slots:
            return rows
    return 0


def size_cache(
    m: ModelFacts, o: PlanOptions, room: int, context: int, sizes: tuple[int, ...], queue: Queue
) -> CacheSize:
    """Reserve, prefill and expert cache out of `room`, the VRAM left after every other line.

    The order of wishes: a cache large enough to lend a prefill chunk, at the full reserve; the same at a smaller
    reserve; no chunk buffers and at least one slot. More room never gives fewer slots.
    """
    slot = max(sizes)
    reserve = int((RESERVE_MIB if o.reserve_mib is None else o.reserve_mib) * MIB)
    least = reserve if o.reserve_mib is not None else min(reserve, SMALLEST_RESERVE_MIB * MIB)
    notes: list[str] = []
    wanted = o.slots
    if wanted is not None and wanted > len(queue):
        notes.append(
            f"{wanted:,} slots asked for, {len(queue):,} pairs are ranked: more would stay empty, {len(queue):,} taken"
        )
        wanted = len(queue)
    rows = o.prefill if isinstance(o.prefill, int) else SMALLEST_CHUNK
    lends = (
        o.prefill != "windows"
        and wanted != 0
        and _loan(m, rows, slot) + LOAN_KEEP_SLOTS <= min(len(queue), wanted or len(queue))
    )
    if not lends:
        return _own_buffers(m, o, room, context, sizes, queue, reserve, least, wanted, notes)
    if wanted is not None:
        bytes_wanted = allot(queue, EVERYTHING, wanted).n_bytes
        if bytes_wanted > room - reserve:
            return CacheSize(
                Allotment((0,) * len(sizes), 0), reserve, 0, 0, 0, ("expert cache", bytes_wanted), tuple(notes)
            )
        taken = allot(queue, bytes_wanted, wanted)
    else:
        base = (_loan(m, rows, slot) + LOAN_KEEP_SLOTS) * slot
        if room - reserve < base:
            if room - base >= least:
                reserve = room - base
                notes.append(f"reserve {reserve / MIB:,.0f} MiB instead of {RESERVE_MIB}: a prefill chunk comes first")
            elif isinstance(o.prefill, int):
                return CacheSize(
                    Allotment((0,) * len(sizes), 0),
                    least,
                    0,
                    0,
                    0,
                    (f"prefill chunk of {rows:,} rows", base),
                    tuple(notes),
                )
            else:
                notes.append(
                    f"prompts are read by windows: a chunk of {rows} rows would need a cache of {base / MIB:,.0f} MiB"
                )
                return _own_buffers(m, o, room, context, sizes, queue, reserve, least, wanted, notes, chunk=False)
        taken = allot(queue, room - reserve)
    chunk = o.prefill if isinstance(o.prefill, int) else _largest_chunk(m, taken.n_slots, slot, context)
    borrowed = needs.prefill_bytes(m.geometry, chunk, slot)
    notes.append(f"prefill chunks of {chunk:,} rows borrow {borrowed / MIB:,.0f} MiB of the coldest slots")
    return CacheSize(taken, reserve, chunk, 0, borrowed, None, tuple(notes))


def _own_buffers(
    m: ModelFacts,
    o: PlanOptions,
    room: int,
    context: int,
    sizes,
    queue,
    reserve: int,
    least: int,
    wanted: int | None,
    notes: list[str],
    chunk: bool = True,
) -> CacheSize:
    """A cache that lends nothing. Chunk buffers of their own only from room that the experts do not need, or on
    demand."""
    none = Allotment((0,) * len(sizes), 0)
    own, rows = 0, 0
    if isinstance(o.prefill, int):
        rows, own = o.prefill, needs.prefill_bytes(m.geometry, o.prefill, max(sizes))
    elif o.prefill == "auto" and chunk:
        every = allot(queue, EVERYTHING, wanted).n_bytes
        for candidate in (c for c in CHUNKS if c <= min(OWN_CHUNK, max(context, SMALLEST_CHUNK))):
            n_bytes = needs.prefill_bytes(m.geometry, candidate, max(sizes))
            if every + n_bytes + reserve <= room:
                rows, own = candidate, n_bytes
                break
        else:
            notes.append("prompts are read by windows: no room for a chunk beside the experts")
    if wanted is not None:
        taken = allot(queue, EVERYTHING, wanted)
        if taken.n_bytes + own + reserve > room:
            return CacheSize(none, reserve, rows, own, 0, ("expert cache", taken.n_bytes), tuple(notes))
        return CacheSize(taken, reserve, rows, own, 0, None, tuple(notes))
    if room - own - reserve < max(sizes):
        if room - own - max(sizes) < least:
            return CacheSize(none, least, rows, own, 0, ("expert cache", max(sizes)), tuple(notes))
        reserve = room - own - max(sizes)
        notes.append(f"reserve {reserve / MIB:,.0f} MiB instead of {RESERVE_MIB}: room for a first slot")
    return CacheSize(allot(queue, room - own - reserve), reserve, rows, own, 0, None, tuple(notes))
