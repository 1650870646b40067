"""What to change when a plan does not fit or reads experts from disk: each remedy is tried before it is offered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strata.base.geometry import CELL_ROWS
from strata.base.plan import GIB, MIB
from strata.planner.estimate import residency
from strata.planner.facts import ModelFacts
from strata.planner.fitting import PriceOf, largest_context
from strata.planner.machine import Gpu, Machine
from strata.planner.options import PlanOptions
from strata.planner.pricing import Priced, price
from strata.planner.ram_room import amount, ram_needed_bytes
from strata.planner.state_bytes import KV_GROUP

MOST_REMEDIES = 3

MOST_TRIALS = 3
"""How often an amount of RAM is priced; the first is usually enough."""


def _changes(
    m: ModelFacts, o: PlanOptions, context: int, kv: str, gpu: Gpu | None
) -> Iterator[tuple[str, PlanOptions, int]]:
    """Single changes of options in the order of what they cost the user: (text, options, context)."""
    if o.slots is not None:
        yield "slots=None (as many as fit)", replace(o, slots=None), context
    if o.experts not in ("auto", "mapped"):
        yield 'experts="auto"', replace(o, experts="auto"), context
    if o.pcie_share:
        yield "pcie_share=0", replace(o, pcie_share=0.0), context
    if kv == "f16" and context > 256 and m.geometry.dh % KV_GROUP == 0:
        yield 'kv="int8" (half the KV cache)', replace(o, kv="int8"), context
    if o.checkpoints > 1:
        yield "checkpoints=1", replace(o, checkpoints=1), context
    if o.prefill != "windows":
        yield 'prefill="windows" (no chunk buffers, prompts are read slower)', replace(o, prefill="windows"), context
    if o.reserve_mib is not None and o.reserve_mib > 300:
        yield "reserve_mib=300", replace(o, reserve_mib=300), context
    if o.draft_vocabulary is None and (o.draft == "mtp" if m.draft is None else m.draft.is_standard):
        yield "draft_vocabulary=40525 (the English subset)", replace(o, draft_vocabulary=40_525), context
    if o.sessions > 1:
        yield "sessions=1", replace(o, sessions=1), context
    if o.draft != "off":
        without = ", without draft_vocabulary" if o.draft_vocabulary is not None else ""
        yield f'draft="off"{without}', replace(o, draft="off", draft_vocabulary=None), context
    if gpu is not None and o.device != "cpu" and o.experts in ("auto", "mapped"):
        given = {"slots": o.slots, "vram_gib": o.vram_gib, "pcie_share": o.pcie_share or None}
        given |= {name: getattr(o, name) for name in ("reserve_mib", "hit_rate", "profile")}
        dropped = [name for name, value in given.items() if value is not None]
        dropped += ["prefill"] if isinstance(o.prefill, int) and o.prefill != CELL_ROWS else []
        alone = replace(o, device="cpu", **dict.fromkeys(given), prefill="auto" if "prefill" in dropped else o.prefill)
        without = f", without {' and '.join(dropped)}" if dropped else ""
        yield f'device="cpu" (slower{without})', alone, context


def _more_memory(machine: Machine, gpu: Gpu | None, o: PlanOptions, priced: Priced) -> str:
    """What amounts of memory would do, all of them together, from the shortfalls themselves."""
    parts = []
    for s in priced.shortfalls:
        if s.free_bytes != priced.free_bytes[s.device]:  # a limit that more memory does not lift
            parts += ['experts="auto"'] if o.experts in ("pinned", "resident") else []
            parts += ["pcie_share=0"] if o.pcie_share else []
            continue
        parts.append(_amount(machine, gpu, o, s.device, s.needed_bytes))
    bought = any("more" in part for part in parts)
    return " and ".join(parts) + (", or a smaller release of the model" if bought else "")


def _amount(machine: Machine, gpu: Gpu | None, o: PlanOptions, device: str, needed_bytes: int, unit: int = MIB) -> str:
    """How so many free bytes are had where there are fewer, or where a cap leaves fewer."""
    if device == "vram":
        name, option, total = "VRAM", "vram_gib", gpu.total_bytes
        free, with_more = gpu.free_bytes, gpu.total_with(needed_bytes)
    else:
        name, option, total = "RAM", "ram_gib", machine.ram_total_bytes
        free, with_more = machine.ram_available_bytes, machine.ram_total_with(needed_bytes)
    if free >= needed_bytes:
        return f"{option}={-(-needed_bytes * 10 // GIB) / 10:g} or no cap"
    more, lacks = with_more - total, needed_bytes - free
    text = f"{-(-more // MIB):,} MiB" if unit == MIB else f"{-(-more * 10 // GIB) / 10:,.1f} GiB"
    why = f"of {amount(with_more)}, {amount(needed_bytes)} are taken to be free" if more > lacks else ""
    capped = f"no {option}" if getattr(o, option) is not None else ""
    notes = "; ".join(filter(None, (why, capped)))
    return f"{text} more {name}" + (f" ({notes})" if notes else "")


def remedies(
    m: ModelFacts,
    machine: Machine,
    gpu: Gpu | None,
    o: PlanOptions,
    context: int,
    priced: Priced,
    price_of: PriceOf = price,
) -> tuple[str, ...]:
    """Up to three changes, the cheapest first. Every change of an option or of the context was priced and fits. Those
    after which experts come from disk are only for what does not fit, say so, and come behind those that cure."""
    if not priced.shortfalls and not priced.needs_disk:
        return ()
    no_disk = not priced.shortfalls
    found: list[str] = []
    half: list[str] = []

    def take(text: str, options: PlanOptions, at: int) -> None:
        made = price_of(m, machine, None if options.device == "cpu" else gpu, options, at)
        if not made.shortfalls and not made.needs_disk:
            found.append(text)
        elif not made.shortfalls and not no_disk:
            half.append(_with_reads(text, m, options, made))

    for text, options, at in _changes(m, o, context, priced.kv, gpu):
        if len(found) == MOST_REMEDIES - 1:
            break
        take(text, options, at)
    if len(found) < MOST_REMEDIES - 1:
        smaller = largest_context(m, machine, gpu, o, no_disk=no_disk, price_of=price_of)
        if 0 < smaller < context:
            take(f"context={smaller}", o, smaller)
    found = [*found, *half][: MOST_REMEDIES - 1]
    if priced.shortfalls:
        memory = _more_memory(machine, gpu, o, priced)
    else:
        memory = _ram_for_all(m, machine, gpu, o, context, priced, price_of)
    return (*found, memory) if memory not in found else tuple(found)


def _with_reads(text: str, m: ModelFacts, o: PlanOptions, made: Priced) -> str:
    """The text of a change after which experts come from disk, with how much a token reads."""
    where = residency(m, made.allotment.slots, made.ram_expert_bytes, o.hit_rate, o.profile is not None)
    reads = f"reads {amount(int(where.disk * m.routed_bytes_per_token))} of experts from disk a token"
    return f"{text[:-1]}, {reads})" if text.endswith(")") else f"{text} ({reads})"


def _ram_for_all(
    m: ModelFacts, machine: Machine, gpu: Gpu | None, o: PlanOptions, context: int, priced: Priced, price_of: PriceOf
) -> str:
    """RAM with which no expert would come from disk: where they are locked then, a chunk may need more beside them."""
    slots = priced.allotment.slots
    places = m.split.places if slots and m.split is not None else m.expert_bytes
    held = sum(n * size for n, size in zip(slots, places, strict=True)) if slots else 0
    lacking = m.geometry.E * sum(places) - held - priced.ram_expert_bytes
    used = sum(x.held_bytes for x in priced.lines if x.device == "ram" and x.kind != "reserve")
    needed, free = ram_needed_bytes(machine, used + lacking), replace(o, ram_gib=None)
    for _ in range(MOST_TRIALS):
        needed += (machine.ram_available_bytes - needed) % (GIB // 10)  # as much as will be said
        made = price_of(m, machine.with_free_ram(needed), gpu, free, context)
        short = [s for s in made.shortfalls if s.device == "ram"]
        if not short:
            break
        needed = max(needed, *(s.needed_bytes for s in short))
    text = _amount(machine, gpu, o, "ram", needed, GIB)
    return f"{text}, or a release whose experts are that much smaller" if "more" in text else text


def slots_per_gib(
    m: ModelFacts,
    machine: Machine,
    gpu: Gpu | None,
    o: PlanOptions,
    context: int,
    priced: Priced,
    price_of: PriceOf = price,
) -> int:
    """Further slots that one more GiB of VRAM buys."""
    if gpu is None or o.slots is not None:
        return 0
    larger = replace(gpu, free_bytes=gpu.free_bytes + GIB, total_bytes=gpu.total_bytes + GIB)
    options = replace(o, vram_gib=None if o.vram_gib is None else o.vram_gib + 1)
    return max(price_of(m, machine, larger, options, context).allotment.n_slots - priced.allotment.n_slots, 0)
