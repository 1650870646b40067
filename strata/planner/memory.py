"""A plan out of priced configurations: a pure function of file facts, machine facts and options. Facts of a file.

`plan` sizes an expert cache without regard to what a load's prefill chunks take for good; `of_load.plan_of_load` is
the plan that a load executes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from strata.arch import architecture_of
from strata.base.errors import BadArgument, NoDevice, need
from strata.base.geometry import CELL_ROWS, Geometry
from strata.base.plan import Plan
from strata.cpu.lower import Lowering, Memory
from strata.cpu.weights import Weights
from strata.pack.experts import ExpertLayout, expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.planner.chunk_facts import ChunkFacts
from strata.planner.draft import (
    DRAFT_VOCABULARY,
    MODEL,
    STANDARD,
    DraftTensor,
    draft_source,
    draft_tensors,
    facts_of_tensors,
    standard_tensors,
    vocabulary_rows,
)
from strata.planner.estimate import disk_reads, estimate_cpu, estimate_gpu, residency
from strata.planner.facts import ModelFacts, model_facts
from strata.planner.fitting import PriceOf, largest_context
from strata.planner.machine import Gpu, Machine
from strata.planner.missing import assume_table
from strata.planner.needs import PREFILL, priced_programs
from strata.planner.options import PlanOptions, make_options
from strata.planner.pricing import Priced, default_threads, draft_of, price
from strata.planner.rates import CpuCosts
from strata.planner.remedies import remedies, slots_per_gib
from strata.planner.split_bytes import FORMS, SplitFacts, split_facts
from strata.planner.vram_bytes import private_bytes

SHOWN_CONTEXT = 4096
"""Context of a plan for which no context fits: something must be shown."""

MODEST_CONTEXT = 32_768


def choose_device(machine: Machine, o: PlanOptions) -> Gpu | None:
    """The card to plan for, or None for the CPU. Raises NoDevice for a card that is not there, and for options
    that need one where there is none; BadArgument for those beside device="cpu"."""
    if o.device == "cpu" or (o.device == "auto" and not machine.gpus):
        _check_cpu(machine, o)
        return None
    index = int(o.device.partition(":")[2] or 0)
    if index >= len(machine.gpus):
        raise NoDevice(
            f"device {o.device!r} is not there",
            found=f"GPUs: {len(machine.gpus)}",
            needed=" or ".join(["auto", "cpu", *(f"cuda:{gpu.index}" for gpu in machine.gpus)]),
            advice=why_no_gpu(machine),
        )
    return machine.gpus[index]


def why_no_gpu(machine: Machine) -> str | None:
    """Why this machine has no GPU, where that is known, and who says more."""
    if machine.described and not machine.gpus:
        return "The machine is described without a card; gpu or vram_gib describes one."
    problem = None if machine.gpus else machine.gpu_problem
    return f"{problem[0].upper()}{problem[1:]}: `strata doctor` shows devices and driver." if problem else None


def _check_cpu(machine: Machine, o: PlanOptions) -> None:
    """Refuse options that mean nothing without a GPU."""
    kind, advice = (BadArgument, None) if o.device == "cpu" else (NoDevice, why_no_gpu(machine))
    found = f"GPUs: {len(machine.gpus)}, device={o.device!r}"
    # Neither slots nor a share is what the CPU has.
    given = {"slots": o.slots or None, "pcie_share": o.pcie_share or None, "vram_gib": o.vram_gib}
    asked = [f"{name}={value}" for name, value in given.items() if value is not None]
    if asked:
        raise kind(f"{', '.join(asked)}: this needs a GPU", found=found, needed="a GPU, or a load without this",
                   advice=advice)  # fmt: skip
    if o.experts not in ("auto", "mapped"):
        raise kind(
            f"experts={o.experts!r} needs a GPU",
            found=found,
            needed="a GPU, or mapped or auto",
            advice=advice or "The CPU backend computes experts in place, in the mapped file.",
        )
    if isinstance(o.prefill, int) and o.prefill != CELL_ROWS:
        raise kind(f"prefill={o.prefill}: a chunk of more than one cell of {CELL_ROWS} rows needs a GPU", found=found,
                   needed=f"a GPU, or {CELL_ROWS}, auto or windows", advice=advice)  # fmt: skip


@dataclass(frozen=True)
class Pricing:
    """How configurations of a plan are priced.

    quick   fits where price_of fits, disk reads aside
    share   (facts, machine, card, threads, hit rate, costs) -> share of the missing experts for the link, where a load
            may use it; None: by the rates of the estimate
    """

    price_of: PriceOf = price
    quick: PriceOf = price
    share: Callable[[ModelFacts, Machine, Gpu, int, float, CpuCosts], float] | None = None


def plan(
    model: ModelFacts,
    machine: Machine,
    options: PlanOptions | None = None,
    *,
    costs: CpuCosts | None = None,
    **given: object,
) -> Plan:
    """Price one configuration of `model` on `machine`. Pure: nothing is read or taken.

    options, or the same as keyword arguments. A plan that does not fit is returned all the same (`fits`, `shortfalls`,
    `remedies`); `Plan.require()` turns it into the error a load raises. Raises BadArgument for options that contradict
    each other or the model, NoDevice for a card that is not there.
    """
    if options is not None and given:
        raise BadArgument("options are given twice", found=f"options= and {', '.join(given)}",
                          needed="a PlanOptions, or keyword arguments")  # fmt: skip
    o = options or make_options(**given)
    return make_plan(model, machine, choose_device(machine, o), o, costs)


def make_plan(
    model: ModelFacts,
    machine: Machine,
    gpu: Gpu | None,
    o: PlanOptions,
    costs: CpuCosts | None = None,
    by: Pricing | None = None,
    asked: PlanOptions | None = None,
) -> Plan:
    """The plan on `gpu`, or on the CPU when that is None. asked: options that remedies change and for which the largest
    context is, where `o` has choices of its own."""
    by, g, asked = by or Pricing(), model.geometry, asked or o
    if o.profile is not None and (o.profile.n_layers, o.profile.n_experts) != (g.L, g.E):
        raise BadArgument(
            "the profile is of another model",
            found=f"{o.profile.n_layers} layers x {o.profile.n_experts} experts",
            needed=f"{g.L} x {g.E}",
            advice="Make one for this model with `strata profile`, or leave the profile out.",
        )
    draft = draft_of(model, o)
    need((o.draft_vocabulary or 1) <= g.V, "draft_vocabulary is larger than the model's vocabulary",
         found=f"{o.draft_vocabulary:,}" if o.draft_vocabulary else None, needed=f"at most {g.V:,}")  # fmt: skip
    notes = list(model.notes)
    largest = largest_context(model, machine, gpu, o, price_of=by.quick)
    context, why = _context(model, machine, gpu, o, largest, by)
    notes += why
    priced = by.price_of(model, machine, gpu, o, context)
    if gpu is not None and o.context is None and context > MODEST_CONTEXT and not priced.shortfalls:
        notes += _context_cost(model, machine, gpu, o, context, priced, by)
    threads = default_threads(machine, gpu, o)
    if o.threads is not None and o.threads > machine.usable_cores:
        notes.append(
            f"{o.threads} threads on {machine.usable_cores} usable cores: more threads than cores stall every layer"
        )
    where = residency(model, priced.allotment.slots, priced.ram_expert_bytes, o.hit_rate, o.profile is not None)
    cached = min(1.0, priced.spare_ram_bytes / model.ngram_table_bytes) if model.ngram_table_bytes else 1.0
    reads = disk_reads(model, machine, where, cached if priced.ngram == "mapped" else 0.0)
    costs = costs or CpuCosts(machine.kernel_tier)
    if gpu is None:
        estimate = estimate_cpu(model, machine, threads, context, priced.kv, where, reads, count_ops(g), costs)
    else:
        share, link = o.pcie_share, any(x.line == "link staging" for x in priced.lines)
        if share is None and by.share is not None and link:
            share = by.share(model, machine, gpu, threads, where.vram, costs)
        estimate = estimate_gpu(model, machine, gpu, threads, context, priced.kv, where, reads, link, costs, share)
    notes += _idle(model, gpu, o, asked, priced)
    if where.disk > 0:
        notes.append(
            f"disk-bound: {where.disk:.0%} of the routed experts come from disk, at most "
            f"{1000 / sum(r.ms_per_token for r in reads if r.what == 'experts'):.2f} tokens/s"
        )
    return Plan(
        model=model.name,
        path=model.path,
        machine=machine.name,
        device="cpu" if gpu is None else f"cuda:{gpu.index}",
        context=context,
        trained_context=g.trained_context,
        sessions=o.sessions,
        kv=priced.kv,
        experts=priced.experts,
        prefill_rows=priced.prefill_rows,
        draft=draft.source if draft is not None else "off" if o.draft == "off" else "lookup",
        checkpoints=o.checkpoints,
        ngram_cache_rows=min(priced.ngram_rows, model.ngram_rows),
        ngram=priced.ngram,
        threads=threads,
        lines=priced.lines,
        free_bytes=priced.free_bytes,
        slots=priced.allotment.slots,
        slot_bytes=priced.slot_bytes,
        ranked=o.profile is not None,
        disk=tuple(reads),
        estimate=estimate,
        shortfalls=priced.shortfalls,
        notes=(*notes, *priced.notes),
        remedies=remedies(model, machine, gpu, asked, context, priced, by.price_of),
        largest_context=largest if asked is o else largest_context(model, machine, gpu, asked, price_of=by.quick),
        slots_per_gib=slots_per_gib(model, machine, gpu, o, context, priced, by.price_of),
        pcie_share=estimate.pcie_share,
        link_gbps=None if gpu is None else gpu.link_gbps,
        missing_bytes=model.missing_bytes,
        missing_shards=model.missing_shards,
        expert_types=model.types_text,
        file_bytes=model.file_bytes,
    )


def _idle(m: ModelFacts, gpu: Gpu | None, o: PlanOptions, asked: PlanOptions, priced: Priced) -> list[str]:
    """Notes on options that turn out to do nothing in this plan. asked: see `make_plan`."""
    notes, n_slots = [], priced.allotment.n_slots
    if o.draft == "auto" and draft_of(m, o) is None:
        notes.append(f"no draft layer beside {m.name}: drafting by lookup alone")
    if o.draft_vocabulary is not None and draft_of(m, o) is None:
        notes.append("draft_vocabulary does nothing here: no draft layer")
    if o.profile is not None and gpu is None:
        notes.append("the profile does nothing here: no GPU holds experts")
    if o.reserve_mib is not None and gpu is None:
        notes.append("reserve_mib does nothing here: no VRAM is used")
    for name in ("experts", "pcie_share", "profile"):
        if getattr(asked, name) and getattr(asked, name) != getattr(o, name) and not priced.shortfalls:
            notes.append(f"{name} does nothing here: VRAM holds every expert")
    if o.hit_rate is not None and (gpu is None or (n_slots in (0, m.n_pairs) and not priced.shortfalls)):
        notes.append(f"hit_rate does nothing here: VRAM holds {'every expert' if n_slots else 'no expert'}")
    return notes


def _context(
    m: ModelFacts, machine: Machine, gpu: Gpu | None, o: PlanOptions, largest: int, by: Pricing
) -> tuple[int, list[str]]:
    """(context, notes): as asked, else the smaller of the trained one and what fits, without disk reads if that can
    be."""
    trained = m.geometry.trained_context
    if o.context is not None:
        note = (
            [f"context {o.context:,} is beyond the {trained:,} the model was trained for"]
            if o.context > trained
            else []
        )
        return o.context, note
    quick = largest_context(m, machine, gpu, o, no_disk=True, price_of=by.quick)
    if quick and by.price_of(m, machine, gpu, o, quick).needs_disk:
        quick = largest_context(m, machine, gpu, o, no_disk=True, price_of=by.price_of)
    if quick:
        beside = " beside all experts" if m.split is not None and o.slots is not None and o.slots >= m.n_pairs else ""
        text = f"context {quick:,} of the trained {trained:,}: the largest that fits{beside}"
        return quick, [] if quick == trained else [text]
    if largest:
        context = min(largest, SHOWN_CONTEXT)
        return context, [f"context {context:,}: experts do not fit into RAM, so none of it goes to a longer context"]
    return min(trained, SHOWN_CONTEXT), []


def _context_cost(
    m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, context: int, priced: Priced, by: Pricing
) -> list[str]:
    """A note on what the automatic context costs in slots: the cache follows the configured context, not the used
    one."""
    modest = by.price_of(m, machine, gpu, replace(o, context=MODEST_CONTEXT), MODEST_CONTEXT)
    gain = modest.allotment.n_slots - priced.allotment.n_slots
    if gain <= 0:
        return []
    return [f"context {context:,} costs {gain:,} of the {modest.allotment.n_slots:,} slots of context={MODEST_CONTEXT}"]


def count_ops(g: Geometry) -> int:
    """Ops that one window runs: trunk, head and commit."""
    return sum(len(p.ops) for p in priced_programs(g)[:3])


def read_facts(path: str | Path, draft: object = "off") -> ModelFacts:
    """Facts of a model from its headers; a truncated file with whole headers will do.

    draft  which draft layer belongs to it: "off", "lookup" or None for none, "auto" for the one beside it if any, "mtp"
           for that one or the standard form, or a path

    Raises FileError or ModelError naming what is wrong.
    """
    with GgufFile(path, headers_only=True) as gguf:
        assumed = assume_table(gguf)
        arch = architecture_of(gguf)
        geometry = arch.read_geometry(gguf)
        arch.check_contract(gguf, geometry)
        facts = facts_of(gguf, geometry, draft_source(gguf, draft))
    return facts if assumed is None else replace(facts, notes=(*facts.notes, assumed))


def facts_of(gguf: GgufFile, geometry: Geometry, draft: Path | str | None = None) -> ModelFacts:
    """Facts of an opened and checked file. draft: source of its draft layer, STANDARD for one that is not here."""
    layout = expert_layout(gguf, geometry.L)
    on_cpu, on_gpu = cpu_private_bytes(gguf, geometry, layout), gpu_private_bytes(gguf, geometry, layout)
    split, chunks = _split(gguf, geometry, layout), ChunkFacts(gguf, geometry, layout)
    if draft is None:
        return replace(model_facts(gguf, geometry, on_cpu, on_gpu), split=split, chunks=chunks)
    if draft == STANDARD:
        tensors, rows = standard_tensors(geometry), min(DRAFT_VOCABULARY, geometry.V)
    else:
        tensors, rows = draft_tensors(Path(draft), gguf, geometry), vocabulary_rows(Path(draft), geometry)
    head = gguf.info("output.weight")
    scored = DraftTensor("mtp.output.weight", (rows, geometry.D), head.format, MODEL)
    held = {t.name: t for t in (*tensors, scored)}
    private = cpu_private_bytes(gguf, geometry, layout, held, rows)
    with_gpu = gpu_private_bytes(gguf, geometry, layout, held, rows)
    found = facts_of_tensors(geometry, tensors, head.row_bytes, rows, private, str(draft), with_gpu)
    split = _split(gguf, geometry, layout, held, rows)
    return replace(model_facts(gguf, geometry, on_cpu, on_gpu, found), split=split, chunks=chunks)


def _split(
    gguf: GgufFile,
    geometry: Geometry,
    layout: ExpertLayout,
    held: Mapping[str, DraftTensor] | None = None,
    draft_rows: int = 0,
) -> SplitFacts | None:
    """What sharing the trunk's experts with the CPU takes, with and without the draft layer; None for float ones."""
    if not all(p.format.group for layer in layout.layers for p in layer.projections):
        return None
    plain = {form: gpu_private_bytes(gguf, geometry, layout, form=form) for form in FORMS}
    drafted = plain
    if held is not None:
        drafted = {form: gpu_private_bytes(gguf, geometry, layout, held, draft_rows, form) for form in FORMS}
    return split_facts(Tensors(gguf), layout, geometry.K, plain, drafted)


def cpu_private_bytes(
    gguf: GgufFile,
    geometry: Geometry,
    layout: ExpertLayout,
    held: Mapping[str, DraftTensor] | None = None,
    draft_rows: int = 0,
) -> int:
    """Bytes that the CPU backend's ops ask for besides the programs' buffers: the same walk that the backend makes."""
    programs = priced_programs(geometry, draft_rows)
    memory, weights = Memory(programs, {}), Weights(Tensors(gguf, held), layout)
    for program in programs:
        Lowering(program, memory, weights, 0, 1, 0).run()
    return sum(memory.private_bytes.values())


def gpu_private_bytes(
    gguf: GgufFile,
    geometry: Geometry,
    layout: ExpertLayout,
    held: Mapping[str, DraftTensor] | None = None,
    draft_rows: int = 0,
    form: tuple[bool, bool] | None = None,
) -> int:
    """The same of the GPU backend, without what grows with the context. form: see `vram_bytes.private_bytes`."""
    tensors, programs = Tensors(gguf, held), priced_programs(geometry, draft_rows)
    windows = [p for i, p in enumerate(programs) if i != PREFILL]
    return private_bytes(windows, lambda name: tensors.info(name).format, layout, form)
