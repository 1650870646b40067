"""What to change when a plan does not fit or reads experts from disk: each remedy is tried before it is offered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strata.base.plan import GIB, MIB
from strata.planner.facts import ModelFacts
from strata.planner.fitting import PriceOf, fits_at, largest_context
from strata.planner.machine import Gpu, Machine
from strata.planner.options import PlanOptions
from strata.planner.pricing import Priced, price
from strata.planner.state_bytes import KV_GROUP

MOST_REMEDIES = 3


def _changes(
    m: ModelFacts, o: PlanOptions, context: int, kv: str, gpu: Gpu | None
) -> Iterator[tuple[str, PlanOptions, int]]:
    """Single changes of options in the order of what they cost the user: (text, options, context)."""
    if o.slots is not None:
        yield "slots=None (as many as fit)", replace(o, slots=None), context
    if o.experts not in ("auto", "mapped"):
        yield 'experts="auto"', replace(o, experts="auto"), context
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
        yield 'draft="off"', replace(o, draft="off"), context
    if gpu is not None and o.device != "cpu" and o.experts in ("auto", "mapped"):
        alone = replace(
            o, device="cpu", slots=None, vram_gib=None, prefill="windows" if o.prefill == "windows" else "auto"
        )
        yield 'device="cpu" (slower)', alone, context


def _more_memory(
    m: ModelFacts, machine: Machine, gpu: Gpu | None, o: PlanOptions, context: int, priced: Priced
) -> Iterator[str]:
    """What a further amount of memory would do, from the shortfalls themselves."""
    for s in priced.shortfalls:
        name = "VRAM" if s.device == "vram" else "RAM"
        option = "vram_gib" if s.device == "vram" else "ram_gib"
        capped = getattr(o, option) is not None
        free = {"vram": gpu.free_bytes if gpu else 0, "ram": machine.ram_available_bytes}[s.device]
        if capped and free >= s.needed_bytes:
            yield f"{option}={-(-s.needed_bytes * 10 // GIB) / 10:g} or no cap"
        else:
            yield f"{s.missing_bytes / MIB:,.0f} MiB more {name}, or a smaller release of the model"


def remedies(
    m: ModelFacts,
    machine: Machine,
    gpu: Gpu | None,
    o: PlanOptions,
    context: int,
    priced: Priced,
    price_of: PriceOf = price,
) -> tuple[str, ...]:
    """Up to three changes, the cheapest first. Every change of an option or of the context was priced and fits."""
    if not priced.shortfalls and not priced.needs_disk:
        return ()
    no_disk = not priced.shortfalls
    found: list[str] = []

    def cures(options: PlanOptions, at: int) -> bool:
        on = None if options.device == "cpu" else gpu
        return fits_at(m, machine, on, options, at, no_disk=no_disk, price_of=price_of)

    for text, options, at in _changes(m, o, context, priced.kv, gpu):
        if len(found) == MOST_REMEDIES - 1:
            break
        if cures(options, at):
            found.append(text)
    if len(found) < MOST_REMEDIES - 1:
        smaller = largest_context(m, machine, gpu, o, no_disk=no_disk, price_of=price_of)
        if 0 < smaller < context:
            found.append(f"context={smaller}")
    if priced.shortfalls:
        found += list(_more_memory(m, machine, gpu, o, context, priced))
    else:
        lacking = _disk_bytes(m, priced)
        found.append(f"{lacking / GIB:,.1f} GiB more RAM, or a release whose experts are that much smaller")
    return tuple(found[:MOST_REMEDIES])


def _disk_bytes(m: ModelFacts, priced: Priced) -> int:
    held = (
        sum(s * b for s, b in zip(priced.allotment.slots, m.expert_bytes, strict=True)) if priced.allotment.slots else 0
    )
    return m.experts_bytes - held - priced.ram_expert_bytes


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
