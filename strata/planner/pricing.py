"""One configuration priced on one machine: lines in order, cache slots, what does not fit. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata.base.geometry import CELL_ROWS
from strata.base.plan import GIB, MIB, PlanLine, Shortfall
from strata.pack.ngram_reader import reader_bytes
from strata.planner import needs
from strata.planner.cache_size import size_cache
from strata.planner.draft import DraftFacts, head_bytes, standard_facts
from strata.planner.facts import ModelFacts
from strata.planner.kv_choice import as_on_smaller_card, with_kv
from strata.planner.machine import Gpu, Machine
from strata.planner.ngram_choice import with_ngram
from strata.planner.options import PlanOptions
from strata.planner.ram_room import amount, ram_floor_bytes, ram_free_bytes, ram_needed_bytes
from strata.planner.slots import Allotment, admission_queue
from strata.planner.state_bytes import kv_format
from strata.planner.vram_bytes import relaid_bytes

WSL_PINNED_BYTES = GIB
"""WSL locks about this much memory for a GPU."""

PAGE_BYTES = 4096

NGRAM_ROWS_CPU, NGRAM_ROWS_GPU = 65_536, 1_048_576


@dataclass(frozen=True)
class Priced:
    """What a configuration takes. ram_expert_bytes: expert bytes that RAM holds; spare_ram_bytes: left for cached
    pages."""

    context: int
    kv: str
    lines: tuple[PlanLine, ...]
    free_bytes: dict[str, int]
    experts: str
    prefill_rows: int
    ngram_rows: int
    allotment: Allotment
    slot_bytes: tuple[int, ...]
    shortfalls: tuple[Shortfall, ...]
    notes: tuple[str, ...]
    ram_expert_bytes: int
    spare_ram_bytes: int
    needs_disk: bool
    ngram: str = "mapped"

    @property
    def missing_bytes(self) -> int:
        """What it lacks, of all memories."""
        return sum(s.missing_bytes for s in self.shortfalls)


def vram_free_bytes(gpu: Gpu, o: PlanOptions) -> int:
    return gpu.free_bytes if o.vram_gib is None else min(gpu.free_bytes, int(o.vram_gib * GIB))


def default_threads(machine: Machine, gpu: Gpu | None, o: PlanOptions) -> int:
    """Workers: every usable core, one less beside a GPU, whose service thread spins while a window is in flight."""
    return o.threads if o.threads is not None else max(machine.usable_cores - (1 if gpu is not None else 0), 1)


def _held(m: ModelFacts, machine: Machine, gpu: Gpu | None, o: PlanOptions) -> needs.HostNeeds:
    threads = default_threads(machine, gpu, o)
    reader = reader_bytes() if o.ngram == "direct" else 0
    return needs.HostNeeds(o.sessions, o.checkpoints, o.draft != "off", draft_of(m, o), threads, reader)


def draft_of(m: ModelFacts, o: PlanOptions) -> DraftFacts | None:
    """The draft layer that is priced, or None."""
    if o.draft in ("off", "lookup") or (o.draft == "auto" and m.draft is None):
        return None
    row_bytes = m.head.n_bytes // m.geometry.V
    if m.draft is None or m.draft.is_standard:
        of = m.draft
        cpu, gpu = (of.private_bytes, of.gpu_private_bytes) if of else (m.cpu_private_bytes, m.gpu_private_bytes)
        return standard_facts(m.geometry, row_bytes, o.draft_vocabulary, cpu, gpu_private_bytes=gpu)
    if o.draft_vocabulary is None:
        return m.draft
    rows = min(o.draft_vocabulary, m.geometry.V)
    copied = head_bytes(m.geometry, row_bytes, rows)
    return replace(
        m.draft, vocabulary=rows, head_bytes=copied, vram_head_bytes=relaid_bytes(rows, row_bytes) if copied else 0
    )


def _ngram_rows(o: PlanOptions, default: int) -> int:
    return default if o.ngram_cache_rows is None else o.ngram_cache_rows


def _first_over(lines: list[PlanLine], free_bytes: int) -> str:
    """Name of the line that passes the free memory when lines are taken in order."""
    total = 0
    for line in lines:
        total += line.held_bytes
        if total > free_bytes:
            return line.line
    return lines[-1].line


def _sums(lines: list[PlanLine]) -> str:
    """The parts of a sum that a user can act on, in MiB."""

    def of(*starts: str) -> float:
        return sum(x.held_bytes for x in lines if x.line.startswith(starts)) / MIB

    parts = (
        ("dense weights", of("weights", "LM head")),
        ("sessions", of("KV cache", "pooled", "recurrent", "RoPE", "tables", "checkpoints", "conversations")),
        ("draft layer and head", of("draft")),
        ("left to the system", of("system floor")),
    )
    return ", ".join(f"{name} {mib:,.0f} MiB" for name, mib in parts if mib)


def price_gpu(m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, context: int) -> Priced:
    """The configuration on a GPU, with its RAM side. Where VRAM holds every expert, nothing is shared with the CPU."""
    if m.split is None:
        return _price_gpu(m, machine, gpu, o, context, None)
    if o.slots is None or o.slots >= m.n_pairs:
        every = _price_gpu(m, machine, gpu, all_experts(m, o), context, None)
        if o.slots is not None or not any(s.device == "vram" for s in every.shortfalls):
            return every
    held, link = o.slots != 0, uses_link(machine, o)
    priced = _price_linked(m, machine, gpu, o, context, held, link)
    if priced.experts == "resident":
        made = _price_linked(m, machine, gpu, o, context, held, link, m.split.swap)
        if o.experts == "resident" or (made.experts == "resident" and not made.shortfalls):
            return made
        o = replace(o, experts="mapped")  # RAM holds what VRAM does not, but not what moves it besides
        priced = _price_linked(m, machine, gpu, o, context, held, link)
    if priced.experts == "mapped" and o.experts == "auto" and o.pcie_share and priced.shortfalls:
        least = _price_gpu(m, machine, gpu, replace(o, experts="resident"), context, (held, link), m.split.swap)
        return min(priced, least, key=lambda p: p.missing_bytes)
    if link and priced.experts == "mapped" and not o.pcie_share:  # what is not locked does not go over the link
        return _price_gpu(m, machine, gpu, o, context, (held, False))
    return priced


def _price_linked(
    m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, context: int, held: bool, link: bool,
    swap: tuple[int, int] = (0, 0),
) -> Priced:  # fmt: skip
    """With room for experts over the link, or without where only that fits, or lacks less, and nobody asked for a
    share."""
    made = _price_gpu(m, machine, gpu, o, context, (held, link), swap)
    if not link or o.pcie_share is not None or [s.device for s in made.shortfalls] != ["vram"]:
        return made

    def alone(m: ModelFacts, machine: Machine, gpu: Gpu | None, o: PlanOptions, context: int) -> Priced:
        return _price_gpu(m, machine, gpu, o, context, (held, False), swap)

    least = alone(m, machine, gpu, o, context)
    if least.shortfalls:
        return min(made, least, key=lambda p: p.missing_bytes)
    spare = _fixed_vram(made) - _fixed_vram(least) - made.missing_bytes
    least = as_on_smaller_card(alone, m, machine, gpu, o, least, spare)
    note = f"no share goes over PCIe: {-(-made.missing_bytes // MIB):,} MiB of VRAM are missing for its staging"
    return replace(least, notes=(*least.notes, note))


def _fixed_vram(p: Priced) -> int:
    return sum(x.n_bytes for x in p.lines if x.device == "vram" and x.line not in ("reserve", "expert cache"))


def all_experts(m: ModelFacts, o: PlanOptions) -> PlanOptions:
    """Every expert in VRAM: then nothing is shared."""
    return replace(o, slots=m.n_pairs, experts="auto", pcie_share=None, profile=None)


def uses_link(machine: Machine, o: PlanOptions) -> bool:
    """Whether a load that shares experts makes room for a share over PCIe."""
    if o.experts == "mapped" or machine.wsl:
        return bool(o.pcie_share)
    return o.pcie_share != 0


def _price_gpu(
    m: ModelFacts,
    machine: Machine,
    gpu: Gpu,
    o: PlanOptions,
    context: int,
    form: tuple[bool, bool] | None,
    swap: tuple[int, int] = (0, 0),
) -> Priced:
    """form: see `vram_bytes.private_bytes`; swap: VRAM and RAM of an expert on its way back."""
    g, kv = m.geometry, kv_format(o.kv, context, m.geometry.dh)
    free = vram_free_bytes(gpu, o)
    held = _held(m, machine, gpu, o)
    lines = needs.gpu_fixed_lines(m, gpu, context, kv, o.sessions, held.draft, form)
    sizes = m.slot_bytes
    queue = admission_queue(sizes, g.E, o.profile)
    fixed = sum(line.held_bytes for line in lines)
    cache = size_cache(m, o, free - fixed - swap[0], context, sizes, queue)
    shortfalls = []
    if cache.shortfall is not None:
        name, n_bytes = cache.shortfall
        limiting = name if fixed + cache.reserve_bytes + cache.own_bytes <= free else _first_over(lines, free)
        limiting = limiting if fixed > free or limiting == name else "reserve"
        detail = _sums(lines) + f", reserve {cache.reserve_bytes / MIB:,.0f} MiB, {name} {n_bytes / MIB:,.0f} MiB"
        if name == "expert cache":
            detail += f", {o.slots if o.slots is not None else 1:,} slots"
        needed = fixed + swap[0] + cache.reserve_bytes + cache.own_bytes + n_bytes
        shortfalls.append(Shortfall("vram", limiting, needed, free, detail))
    if cache.own_bytes:
        lines.append(PlanLine("prefill buffers", "vram", cache.own_bytes, f"chunks of {cache.prefill_rows:,} rows"))
    lines.append(
        PlanLine(
            "reserve", "vram", cache.reserve_bytes, "left free: the display, fragmentation, the driver", kind="reserve"
        )
    )
    if cache.allotment.n_slots:
        spread = f"{min(cache.allotment.slots)} to {max(cache.allotment.slots)} of {g.E} a layer"
        how = "by profile, hottest first" if o.profile is not None else "every layer in turn (no profile)"
        lines.append(
            PlanLine(
                "expert cache", "vram", cache.allotment.n_bytes, f"{cache.allotment.n_slots:,} slots, {spread}, {how}"
            )
        )
    ngram_rows = _ngram_rows(o, NGRAM_ROWS_GPU)
    host = needs.gpu_host_lines(
        m, context, ngram_rows, replace(held, prompt_rows=max(CELL_ROWS, cache.prefill_rows)), form is None
    )
    if swap[0]:
        what = "an expert on its way back to RAM"
        lines.append(PlanLine("swap staging", "vram", swap[0], what))
        host.append(PlanLine("swap staging", "ram", swap[1], "pinned: " + what))
    ram = _ram_beside_gpu(m, machine, o, host, cache.allotment)
    return Priced(
        context=context,
        kv=kv,
        lines=(*lines, *ram.lines),
        free_bytes={"vram": free, "ram": ram_free_bytes(machine, o)},
        experts=ram.mode,
        prefill_rows=cache.prefill_rows,
        ngram_rows=ngram_rows,
        allotment=cache.allotment,
        slot_bytes=sizes,
        shortfalls=(*shortfalls, *ram.shortfalls),
        notes=(*cache.notes, *ram.notes),
        ram_expert_bytes=ram.expert_bytes,
        spare_ram_bytes=ram.spare,
        needs_disk=ram.needs_disk,
    )


@dataclass(frozen=True)
class _Ram:
    lines: tuple[PlanLine, ...]
    mode: str
    expert_bytes: int
    spare: int
    needs_disk: bool
    shortfalls: tuple[Shortfall, ...] = ()
    notes: tuple[str, ...] = ()


def _ram_beside_gpu(m: ModelFacts, machine: Machine, o: PlanOptions, host: list[PlanLine], held: Allotment) -> _Ram:
    """Where RAM holds experts beside a GPU: all of them pinned, what VRAM does not hold, or file pages."""
    free = ram_free_bytes(machine, o)
    floor = ram_floor_bytes(machine.ram_total_bytes, free)
    lines = [*host, PlanLine("system floor", "ram", floor, "left to the system and Python", kind="reserve")]
    room = free - sum(line.held_bytes for line in lines)
    places = m.split.places if m.split is not None else m.expert_bytes
    every, file_bytes = m.geometry.E * sum(places), m.experts_bytes
    complement = every - sum(s * b for s, b in zip(held.slots, places, strict=True))
    lockable = WSL_PINNED_BYTES if machine.wsl else room
    wanted = {mode: -(-n // PAGE_BYTES) * PAGE_BYTES for mode, n in (("pinned", every), ("resident", complement))}
    notes, mode = [], o.experts
    if mode == "auto":
        mode = (
            "resident" if complement == 0 else next((k for k in wanted if wanted[k] <= min(room, lockable)), "mapped")
        )
        if mode == "mapped" and machine.wsl:
            notes.append("WSL locks about 1 GiB for a GPU: experts stay file pages and no share goes over PCIe")
        elif mode == "resident" and complement:
            notes.append(
                f"RAM holds the {amount(complement)} that VRAM does not hold; all need {amount(every)}"
            )
    if mode == "mapped":
        in_ram = max(0, min(complement, room))
        lines.append(
            PlanLine(
                "experts (mapped)",
                "ram",
                file_bytes,
                "pages of the file, cached by the system",
                kind="map",
                held=in_ram,
            )
        )
        short, locked = complement - in_ram, every if o.pcie_share else 0
        if not locked and short > 0 and room >= 0:
            notes.append(
                f"RAM lacks {amount(short)} for experts that VRAM does not hold: disk is read again and again"
            )
        what = "a share over PCIe locks all experts"
        shortfalls = _ram_shortfalls(machine, lines[:-1], lines[-1].line, locked, free, what)
        return _Ram(tuple(lines), mode, in_ram, max(room - in_ram, 0), short > 0, shortfalls, tuple(notes))
    n_bytes = wanted[mode]
    reason = (
        "all experts, locked, so that the GPU reads them too"
        if mode == "pinned"
        else "experts that VRAM does not hold, locked"
    )
    shortfalls = _ram_shortfalls(machine, lines, f"experts ({mode})", n_bytes, free)
    lines.append(PlanLine(f"experts ({mode})", "ram", n_bytes, reason))
    return _Ram(tuple(lines), mode, n_bytes, max(room - n_bytes, 0), False, shortfalls, tuple(notes))


def _ram_shortfalls(
    machine: Machine, lines: list[PlanLine], name: str, locked: int, free: int, what: str = ""
) -> tuple[Shortfall, ...]:
    """What does not fit beside a GPU: lines that end with the floor, and locked experts, of a line of that name."""
    others = sum(line.held_bytes for line in lines[:-1])
    if machine.wsl and locked > WSL_PINNED_BYTES:
        return (Shortfall("ram", name, locked, WSL_PINNED_BYTES, "WSL locks about 1 GiB"),)
    used = others + lines[-1].held_bytes
    if used + locked > free:
        needed = ram_needed_bytes(machine, others + locked)
        of = f"{(needed - locked) / MIB:,.0f} MiB of other RAM lines" if locked else ""
        limiting = _first_over(lines, free) if used > free else name
        return (Shortfall("ram", limiting, needed, free, ", ".join(x for x in (of, what if locked else "") if x)),)
    return ()


def price_cpu(m: ModelFacts, machine: Machine, o: PlanOptions, context: int) -> Priced:
    """The configuration on the CPU backend: weights stay pages of the file."""
    kv = kv_format(o.kv, context, m.geometry.dh)
    chunk = 0 if o.prefill == "windows" else CELL_ROWS
    free = ram_free_bytes(machine, o)
    floor = ram_floor_bytes(machine.ram_total_bytes, free)
    ngram_rows = _ngram_rows(o, NGRAM_ROWS_CPU)
    host = _held(m, machine, None, o)
    draft = host.draft
    other = needs.cpu_lines(m, context, kv, ngram_rows, host)
    other.append(PlanLine("system floor", "ram", floor, "left to the system and Python", kind="reserve"))
    taken = sum(line.held_bytes for line in other)
    every_token = m.dense_bytes + (draft.in_model_bytes if draft else 0)
    room = free - taken - every_token
    shortfalls = []
    if room < 0:
        dense = PlanLine("weights (mapped)", "ram", every_token, "", kind="map")
        limiting = _first_over([dense, *other], free)
        needed = ram_needed_bytes(machine, taken - floor + every_token)
        grown = replace(other[-1], n_bytes=needed - (taken - floor) - every_token)
        shortfalls.append(Shortfall("ram", limiting, needed, free, _sums([dense, *other[:-1], grown])))
    in_ram = max(0, min(m.experts_bytes, room))
    spare = max(room - in_ram, 0)
    table = 0 if o.ngram == "direct" else min(spare, m.ngram_table_bytes)
    held = min(every_token, max(free - taken, 0)) + in_ram + table
    text = "used in place, as in the file"
    if m.ngram_table_bytes:
        text += f"; {m.ngram_table_bytes / MIB:,.0f} MiB of it the n-gram table, read row by row"
    lines = [PlanLine("weights (mapped)", "ram", m.mapped_bytes, text, kind="map", held=held)]
    notes = []
    if in_ram < m.experts_bytes and room >= 0:
        notes.append(
            f"RAM lacks {amount(m.experts_bytes - in_ram)} for the experts: disk is read again and again"
        )
    return Priced(
        context=context,
        kv=kv,
        lines=(*lines, *other),
        free_bytes={"ram": free},
        experts="mapped",
        prefill_rows=chunk,
        ngram_rows=ngram_rows,
        allotment=Allotment((), 0),
        slot_bytes=(),
        shortfalls=tuple(shortfalls),
        notes=tuple(notes),
        ram_expert_bytes=in_ram,
        spare_ram_bytes=spare,
        needs_disk=in_ram < m.experts_bytes,
    )


def price(m: ModelFacts, machine: Machine, gpu: Gpu | None, o: PlanOptions, context: int) -> Priced:
    """The configuration on `gpu`, or on the CPU when that is None. `context` in cells."""
    if o.kv == "auto":
        return with_kv(price, m, machine, gpu, o, context)
    if o.ngram == "auto":
        return with_ngram(price, m, machine, gpu, o, context)
    priced = price_cpu(m, machine, o, context) if gpu is None else price_gpu(m, machine, gpu, o, context)
    return replace(priced, ngram=o.ngram)
