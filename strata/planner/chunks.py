"""A configuration as a load executes it: with the prefill chunk that everything else leaves room for. Pure.

Where a card holds a part of the experts, what a chunk needs only while it is read lies in expert slots, which are empty
meanwhile and filled again before the next window. Where RAM holds only what no slot holds they cannot be emptied: there
a chunk takes the place of slots for good.

A chunk that borrows slots goes with a least expert cache, the larger the chunk, the larger the cache. What a larger
chunk takes for good is saved up first: from its least cache on no slot is added until there is room for both. So more
VRAM gives a larger chunk and never fewer slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from strata.base.errors import BadArgument
from strata.base.geometry import CELL_ROWS
from strata.base.plan import MIB, PlanLine, Shortfall
from strata.gpu.chunk_plan import CHUNKS, ChunkBytes
from strata.planner.cache_size import RESERVE_MIB, SMALLEST_RESERVE_MIB
from strata.planner.facts import ModelFacts
from strata.planner.kv_choice import with_kv
from strata.planner.machine import Gpu, Machine
from strata.planner.needs import TICKETS, ticket_line
from strata.planner.options import PlanOptions
from strata.planner.pricing import Priced, all_experts, price
from strata.planner.ram_room import ram_needed_bytes
from strata.planner.state_bytes import round_context

SLOT_SHARE = 0.2
"""Most of the expert cache that a prefill chunk may take for good."""

LASTING_SHARE = 0.05
"""The same where the rest is lent."""

LENT_SHARE, KEPT_SLOTS = 0.9, 128
"""Most of the expert cache that is lent, and slots that are never lent."""

MAPPED_STAGING_BYTES = 256 * MIB
"""RAM that the cache of a mapped file gives back for staging."""

CACHE = "expert cache"

MOST_ROUNDS, USUAL_ROUNDS, STEP_BYTES = 14, 4, 8 * MIB
"""How often a configuration that does not fit is priced again with what it lacked, how often that does, and what is
added besides in the round behind those, twice as much in each that follows."""


def price_load(m: ModelFacts, machine: Machine, gpu: Gpu | None, o: PlanOptions, context: int) -> Priced:
    """The configuration of a load on `gpu`, or on the CPU when that is None; `context` in cells.

    VRAM holds every expert where that fits and nothing else was asked for. Raises BadArgument for a chunk that was
    asked for and cannot be.
    """
    if gpu is None:
        return price(m, machine, gpu, o, context)
    if o.kv == "auto":
        return with_kv(price_load, m, machine, gpu, o, context)
    made = _price_on_card(m, machine, gpu, o, context)
    return _with_whole_need(m, machine, gpu, o, made) if isinstance(o.prefill, int) and made.shortfalls else made


def _with_whole_need(m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, p: Priced) -> Priced:
    """The configuration that does not fit with what it needs in all: what was found first leaves out the chunk, and a
    reserve that was shrunk grows with what is added."""
    lacks, known = {s.device: s for s in p.shortfalls}, dict(p.free_bytes)
    o = replace(o, vram_gib=None, ram_gib=None)
    for i in range(MOST_ROUNDS):
        limited = any(s.free_bytes != p.free_bytes[s.device] for s in lacks.values())  # no amount of memory helps
        more = STEP_BYTES << (i - USUAL_ROUNDS) if i >= USUAL_ROUNDS else 0
        if limited or all(s.needed_bytes + more <= known[s.device] for s in lacks.values()):
            break
        known.update({s.device: max(s.needed_bytes + more, known[s.device]) for s in lacks.values()})
        larger, card = machine.with_free_ram(known["ram"]), replace(gpu, free_bytes=known["vram"])
        found = _price_on_card(m, larger, card, o, p.context)
        for s in found.shortfalls:
            free = s.free_bytes if s.free_bytes != found.free_bytes[s.device] else p.free_bytes[s.device]
            first = lacks.get(s.device, s)
            lacks[s.device] = replace(first, needed_bytes=s.needed_bytes, free_bytes=free)
        if not found.shortfalls:
            lacks = {d: replace(s, needed_bytes=known[d]) for d, s in lacks.items() if known[d] > p.free_bytes[d]}
            break
    return replace(p, shortfalls=tuple(lacks.values()) or p.shortfalls)


def _price_on_card(m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, context: int) -> Priced:
    """With a part of the experts where all of them do not fit, if that is what was asked for or needs less."""
    if o.slots is not None and o.slots < m.n_pairs:
        return _shared(m, machine, gpu, o, context)
    every = _every(m, machine, gpu, all_experts(m, o), context)
    if not every.shortfalls or o.slots is not None or m.split is None:
        return every
    shared = _shared(m, machine, gpu, o, context)
    alike = [s.device for s in every.shortfalls] == [s.device for s in shared.shortfalls]
    return every if alike and every.missing_bytes < shared.missing_bytes else shared


def price_windows(m: ModelFacts, machine: Machine, gpu: Gpu | None, o: PlanOptions, context: int) -> Priced:
    """Like `price_load`, quicker: it fits where that fits, but for a chunk that nobody insists on."""
    if gpu is None or isinstance(o.prefill, int):
        return price_load(m, machine, gpu, o, context)
    return price(m, machine, gpu, replace(o, prefill="windows"), context)


def lendable_bytes(slots: Sequence[int], slot_bytes: Sequence[int], experts: str) -> int:
    """Of the expert slots of all layers, how many bytes may be lent to a chunk: 0 if none."""
    if experts == "resident" or not slots:
        return 0
    total = sum(n * size for n, size in zip(slots, slot_bytes, strict=True))
    return max(0, min(int(LENT_SHARE * total), total - KEPT_SLOTS * max(slot_bytes)))


def _lendable(p: Priced) -> int:
    return lendable_bytes(p.allotment.slots, p.slot_bytes, p.experts)


def _spare(p: Priced, device: str) -> int:
    return p.free_bytes[device] - sum(x.held_bytes for x in p.lines if x.device == device)


def _bytes_of(p: Priced, line: str) -> int:
    return sum(x.n_bytes for x in p.lines if x.line == line)


# ---- which chunks there could be


def _candidates(m: ModelFacts, p: Priced, o: PlanOptions, shared: bool) -> list[ChunkBytes]:
    """Chunks that RAM has room for, small ones first: those up to the context, or the one that was asked for."""
    cells = round_context(p.context)
    sizes = (o.prefill,) if isinstance(o.prefill, int) else [n for n in reversed(CHUNKS) if n <= max(cells, CELL_ROWS)]
    room = _spare(p, "ram")
    if p.experts == "mapped":
        held = sum(x.held_bytes for x in p.lines if x.device == "ram" and x.kind == "map")
        room = max(room, min(held, MAPPED_STAGING_BYTES))
    priced = (m.chunks.of(rows, cells, shared) for rows in sizes)
    return [of for of in priced if of.staging + _more_tickets(m, p, of.rows) <= room]


def _tickets(m: ModelFacts, p: Priced, rows: int) -> list[PlanLine]:
    """The line for the n-gram rows of a chunk on their way; empty without such a table."""
    return [ticket_line(m.geometry, m.ngram_row_bytes, rows, p.ngram == "direct")] if m.ngram_rows else []


def _more_tickets(m: ModelFacts, p: Priced, rows: int) -> int:
    return sum(x.n_bytes for x in _tickets(m, p, rows)) - _bytes_of(p, TICKETS)


def _by_windows(p: Priced, why: str) -> Priced:
    return replace(p, notes=(*p.notes, f"prompts are read by windows: {why}"))


def _without(
    m: ModelFacts, machine: Machine, p: Priced, o: PlanOptions, why: str, found: list[ChunkBytes], vram_short: int
) -> Priced:
    """No chunk fits: a note, or a shortfall if one was asked for. found: those that RAM has room for."""
    if not isinstance(o.prefill, int):
        return _by_windows(p, why)
    of = m.chunks.of(o.prefill, round_context(p.context), shared=True)
    device, needed = "vram", p.free_bytes["vram"] + max(vram_short, 1)
    if not found:
        more = of.staging + _more_tickets(m, p, of.rows)
        used = sum(x.held_bytes for x in p.lines if x.device == "ram" and x.kind != "reserve")
        pages = sum(x.held_bytes for x in p.lines if x.device == "ram" and x.kind == "map")
        gives_back = more <= MAPPED_STAGING_BYTES and (more <= pages or p.needs_disk)
        of_ram = ram_needed_bytes(machine, used + more - (pages if gives_back else 0))
        if of_ram > p.free_bytes["ram"]:
            device, needed = "ram", of_ram
    lacks = Shortfall(device, f"prefill chunk of {of.rows:,} rows", needed, p.free_bytes[device])
    return replace(p, shortfalls=(*p.shortfalls, lacks))


def _problem(m: ModelFacts, p: Priced, o: PlanOptions) -> Priced | None:
    """The configuration without chunks where there are none, else None."""
    if p.shortfalls or o.prefill == "windows":
        return p
    problem = "a file of unknown tensors" if m.chunks is None else m.chunks.problem
    if problem is None:
        return None
    if isinstance(o.prefill, int):
        raise BadArgument(f"chunks do not take {problem}", found=f"prefill={o.prefill}", needed="auto or windows",
                          advice="Both read prompts in windows where there are no chunks.")  # fmt: skip
    return _by_windows(p, f"chunks do not take {problem}")


# ---- what a load does


def _with_chunk(m: ModelFacts, p: Priced, of: ChunkBytes, lends: bool) -> Priced:
    """The configuration with the lines of a chunk that it has room for."""
    own = of.lasting if lends else of.device_bytes
    lines = [
        PlanLine("prefill buffers", "vram", own, f"chunks of up to {of.rows:,} rows"),
        PlanLine("prefill staging", "ram", of.staging, "pinned: n-gram rows of two chunks"),
    ]
    if lends:
        reason = "of the expert cache, while a chunk is read"
        lines.append(PlanLine("prefill loan", "vram", of.lendable, reason, "lent", 0))
    tickets = {x.line: x for x in _tickets(m, p, of.rows)}
    kept = [tickets.get(x.line, x) for x in p.lines]
    made = replace(p, lines=(*kept, *(x for x in lines if x.n_bytes)), prefill_rows=of.rows)
    over = -_spare(made, "ram")
    if over <= 0:
        return replace(made, spare_ram_bytes=max(0, min(p.spare_ram_bytes, -over)))
    # Pinned memory pushes pages of the file out.
    pages = [replace(x, held=x.held_bytes - over) if x.device == "ram" and x.kind == "map" else x for x in made.lines]
    return replace(made, lines=tuple(pages), ram_expert_bytes=p.ram_expert_bytes - over, spare_ram_bytes=0,
                   needs_disk=True)  # fmt: skip


def _every(m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, context: int) -> Priced:
    """Every expert in VRAM; a chunk gets what that leaves."""
    base = price(m, machine, gpu, replace(o, prefill="windows"), context)
    return _problem(m, base, o) or _beside(m, machine, base, o, shared=False)


def _beside(m: ModelFacts, machine: Machine, base: Priced, o: PlanOptions, shared: bool = True) -> Priced:
    """The slots stay; a chunk borrows some of them, or lies beside them."""
    spare, lent = _spare(base, "vram"), _lendable(base) if shared else 0
    found = _candidates(m, base, o, shared)
    for of in reversed(found):
        if 0 < of.lendable <= lent and of.lasting <= spare:
            return _with_chunk(m, base, of, lends=True)
    for of in reversed(found):
        if of.device_bytes <= spare:
            return _with_chunk(m, base, of, lends=False)
    lacking = 0
    if found:
        lends = 0 < found[-1].lendable <= lent
        lacking = (found[-1].lasting if lends else found[-1].device_bytes) - spare
    return _without(m, machine, base, o, "no room for a chunk beside the experts", found, lacking)


def _shared(m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, context: int) -> Priced:
    """A part of the experts in VRAM. Where no number of slots was asked for, a chunk may take the place of some."""
    base = price(m, machine, gpu, replace(o, prefill="windows"), context)
    if o.slots is None and not base.shortfalls and base.allotment.n_slots >= m.n_pairs:
        base = _fewer(m, machine, gpu, o, context)
    settled = _problem(m, base, o)
    if settled is not None:
        return settled
    if o.slots is not None:
        return _beside(m, machine, base, o)
    if base.experts == "resident" or not _lendable(base):
        return _instead(m, machine, gpu, o, base)
    return _borrowing(m, machine, gpu, o, base)


def _fewer(m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, context: int) -> Priced:
    """The most experts in VRAM that are not all of them."""
    one_less = replace(o, prefill="windows", slots=m.n_pairs - 1)
    base = price(m, machine, gpu, one_less, context)
    if [s.device for s in base.shortfalls] != ["vram"]:
        return base
    fewer = m.n_pairs - 1 - ceil(base.missing_bytes / min(base.slot_bytes))
    return price(m, machine, gpu, replace(one_less, slots=max(fewer, 0)), context)


def _sized(
    m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, base: Priced, cache: int, reserve: int
) -> Priced:
    """The configuration of `base` with an expert cache of up to `cache` bytes and that reserve."""
    fixed = base.free_bytes["vram"] - _spare(base, "vram") - _bytes_of(base, "reserve") - _bytes_of(base, CACHE)
    left = base.free_bytes["vram"] - fixed - cache
    found = price(m, machine, gpu, replace(o, prefill="windows", reserve_mib=left / MIB), base.context)
    lines = tuple(replace(x, n_bytes=reserve) if x.line == "reserve" else x for x in found.lines)
    return replace(found, lines=lines)


def _instead(m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, base: Priced) -> Priced:
    """A chunk in the place of slots: the largest that takes no more than SLOT_SHARE of the cache, and whose slots RAM
    has room for."""
    room, reserve = _bytes_of(base, CACHE) + _spare(base, "vram"), _bytes_of(base, "reserve")
    most = room - max(base.slot_bytes) if isinstance(o.prefill, int) else int(SLOT_SHARE * room)
    found = _candidates(m, base, o, shared=True)
    fitting = [of for of in found if of.device_bytes <= most]
    for of in reversed(fitting):
        made = _sized(m, machine, gpu, o, base, room - of.device_bytes, reserve)
        good = made.experts == base.experts and not made.shortfalls
        if good and any(c.rows == of.rows for c in _candidates(m, made, o, shared=True)):
            return _with_chunk(m, made, of, lends=False)
    if fitting and o.experts == "auto" and base.experts == "resident":  # slots that could be lent need no more RAM
        mapped = _shared(m, machine, gpu, replace(o, experts="mapped"), base.context)
        if mapped.prefill_rows and not mapped.shortfalls and not mapped.needs_disk:
            return mapped
    lacking = found[-1].device_bytes - most if found and not fitting else 0
    if fitting and isinstance(o.prefill, int):  # RAM has no room for the experts of these slots, or for staging
        base = _sized(m, machine, gpu, replace(o, experts=base.experts), base, room - fitting[0].device_bytes, reserve)
        if base.shortfalls:
            return base
    why = "a chunk would take too many of the expert slots"
    return _without(m, machine, base, o, why, [] if fitting else found, lacking)


def _spared(o: PlanOptions, reserve: int) -> int:
    """Of a reserve, what a chunk may have."""
    return max(reserve - SMALLEST_RESERVE_MIB * MIB, 0) if o.reserve_mib is None else 0


def _least_cache(m: ModelFacts, p: Priced, of: ChunkBytes, insisted: bool) -> int:
    """Bytes of the smallest expert cache that goes with a chunk that borrows slots. It does not depend on the context,
    up to the trained one, so that a longer one never gives more slots."""
    longest = max(round_context(m.geometry.trained_context), round_context(p.context))
    lendable, slot = m.chunks.of(of.rows, longest, shared=True).lendable, max(p.slot_bytes)
    lends = max(ceil(lendable / LENT_SHARE) + 1, lendable + KEPT_SLOTS * slot) + slot
    return lends if insisted else max(lends, ceil(of.lasting * (1 - LASTING_SHARE) / LASTING_SHARE))


def _borrowing(
    m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, base: Priced, shrinks: bool = True
) -> Priced:
    """A chunk that borrows slots. On a small card the reserve shrinks if only that leaves enough of them."""
    insisted = isinstance(o.prefill, int)
    room, reserve = _bytes_of(base, CACHE) + _spare(base, "vram"), _bytes_of(base, "reserve")
    found = _candidates(m, base, o, shared=True)
    least = [_least_cache(m, base, of, insisted) for of in found]
    n = sum(room >= cache + of.lasting for of, cache in zip(found, least, strict=True))
    notes: tuple[str, ...] = ()
    if not n and found:
        lacking = least[0] + found[0].lasting - room
        if shrinks and o.reserve_mib is None and reserve - lacking >= SMALLEST_RESERVE_MIB * MIB:
            n, room, reserve = 1, room + lacking, reserve - lacking
            notes = (f"reserve {reserve / MIB:,.0f} MiB instead of {RESERVE_MIB}: a prefill chunk comes first",)
    taken = found[n - 1].lasting if n else 0
    cache = min([room - taken, *least[n : n + 1]])
    made = _sized(m, machine, gpu, o, base, cache, reserve)
    if made.experts != base.experts:  # more slots than before, so that RAM could hold the others
        made = _sized(m, machine, gpu, replace(o, experts=base.experts), base, cache, reserve)
    if notes and made.allotment.n_slots >= m.n_pairs:  # so small a model shares nothing then
        return _borrowing(m, machine, gpu, o, base, shrinks=False)
    if not n:
        spared = _spared(o, reserve) if shrinks else 0
        lacking = least[0] + found[0].lasting - room - spared if found else 0
        return _without(m, machine, made, o, "a chunk would take too many of the expert slots", found, lacking)
    return _with_chunk(m, replace(made, notes=(*made.notes, *notes)), found[n - 1], lends=True)
