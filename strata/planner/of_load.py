"""The plan that `strata.load` executes, on this machine or on one that is not here; the same from a file's path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from strata.base.errors import BadArgument, StrataError, need
from strata.base.numbers import one_of, shown
from strata.base.plan import Plan
from strata.pack.profile import read_profile
from strata.planner.calibrate import measure_costs, types_of
from strata.planner.chunks import all_experts, price_load, price_windows
from strata.planner.facts import ModelFacts
from strata.planner.fitting import fits_at
from strata.planner.link_share import kept_share, planned_share
from strata.planner.machine import Gpu, Machine
from strata.planner.memory import MODEST_CONTEXT, Pricing, choose_device, make_plan, read_facts
from strata.planner.options import DRAFTS, PlanOptions, make_options
from strata.planner.rates import CpuCosts
from strata.planner.state_bytes import kv_format

ON_CPU = "is here, but this load computes on the CPU"
"""What a note says of a card that device="auto" passes over."""


def plan_of_load(
    model: ModelFacts,
    machine: Machine,
    options: PlanOptions | None = None,
    *,
    costs: CpuCosts | None = None,
    share: float | None = None,
    problem_of: Callable[[Gpu], StrataError | None] | None = None,
    **given: object,
) -> Plan:
    """The plan that a load of `model` executes on `machine`. Pure: nothing is read or taken.

    options     or the same as keyword arguments
    costs       of the CPU's kernels; None: listed ones
    share       of the missing experts for the link, where it is used and not asked for; None: by cost
    problem_of  why a card cannot be used by this process, or None if it can

    VRAM holds every expert if that fits with a context of MODEST_CONTEXT or what was asked for, else a part of them and
    the CPU computes the others. With device="auto", what a card cannot do becomes the CPU and a note, unless an option
    was given that only a card has. A plan that does not fit is returned all the same; BadArgument is raised for options
    that contradict each other or the model, NoDevice for a card that is not there, and what `problem_of` says for one
    that was asked for.
    """
    if options is not None and given:
        raise BadArgument("options are given twice", found=f"options= and {', '.join(given)}",
                          needed="a PlanOptions, or keyword arguments")  # fmt: skip
    o = options or make_options(**given)
    gpu = choose_device(machine, o)
    if gpu is None:
        return make_plan(model, machine, None, _alone(o), costs)
    try:
        problem = problem_of(gpu) if problem_of is not None else None
        if problem is not None:
            raise problem
        made = _on_gpu(model, machine, gpu, o, costs, share)
        if made.fits or _means_gpu(o):
            return made
        made.require()
    except StrataError as error:
        if _means_gpu(o):
            raise
        on_cpu = make_plan(model, machine, None, _alone(o), costs)
        return replace(on_cpu, notes=(f"{gpu.name} {ON_CPU}: {error}", *on_cpu.notes))
    return made


def _means_gpu(o: PlanOptions) -> bool:
    """Whether the options ask for a card: what was asked for must not get lost on the way to the CPU."""
    of_gpu = o.vram_gib is not None or o.slots or o.pcie_share or o.experts in ("pinned", "resident")
    return bool(o.device != "auto" or of_gpu or isinstance(o.prefill, int))


def _alone(o: PlanOptions) -> PlanOptions:
    """The options without those of a GPU."""
    return replace(o, device="cpu", vram_gib=None, slots=None, experts="auto", pcie_share=None)


def _on_gpu(
    m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, costs: CpuCosts | None, share: float | None
) -> Plan:
    def share_of(*facts: object) -> float:
        return planned_share(*facts) if share is None else share

    by = Pricing(price_load, price_windows, share_of)
    if o.slots is not None and o.slots >= m.n_pairs:
        made = make_plan(m, machine, gpu, all_experts(m, o), costs, by, o)
        more = f"{o.slots:,} slots asked for, the model has {m.n_pairs:,} experts: more would stay empty"
        return replace(made, notes=(*made.notes, more)) if o.slots > m.n_pairs else made
    if o.slots is None and _has_room_for_all(m, machine, gpu, all_experts(m, o)):
        return make_plan(m, machine, gpu, all_experts(m, o), costs, by, o)
    if m.split is None:
        raise BadArgument(
            f"{m.name} has float experts, which cannot be shared with the CPU",
            found=m.types_text,
            needed="quantised experts, or room for all of them in VRAM",
            advice='Use device="cpu", or a release with quantised experts.',
        )
    made = make_plan(m, machine, gpu, o, costs, by)
    links = any(line.line == "link staging" for line in made.lines)
    return replace(made, times_share=links and share is None and o.pcie_share is None)


def _has_room_for_all(m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions) -> bool:
    """Whether every expert fits, and not only with a short context that nobody asked for, nor with a smaller KV format
    than the usual one where a part of the experts is enough."""
    context = min(m.geometry.trained_context, MODEST_CONTEXT) if o.context is None else o.context
    kv = o.kv if m.split is None else kv_format(o.kv, context, m.geometry.dh)
    return fits_at(m, machine, gpu, replace(o, kv=kv), context, price_of=price_windows)


def plan_file(path: str | Path, *, machine: Machine | None = None, measure: bool = False, **options: object) -> Plan:
    """The plan that a load of a GGUF file (any shard) executes on `machine`, this one by default. Reads headers only.

    measure  time the CPU kernels of the file's types on this machine instead of taking listed rates
    options  those of PlanOptions; besides, `slots` may be "all", `draft` what a load takes (a path, None, an object
             that drafts by itself) and `profile` the path of a profile file

    Raises FileError or ModelError for a file that cannot be planned, BadArgument for options, NoDevice for a
    card that is not there.
    """
    need(isinstance(path, str | Path), "path is no path", found=shown(path), needed="str or Path")
    known = machine is None or isinstance(machine, Machine)
    need(known, "machine is no Machine", found=shown(machine), needed="Machine.here or Machine.describe")
    draft = options.get("draft", "off")
    for name in ("draft", "profile"):
        need(not one_of(options.get(name), ("",)), f"{name} is empty", found="''", needed="a path, or None")
    if draft is None or callable(getattr(draft, "propose", None)):
        options = {**options, "draft": "off" if draft is None else "lookup"}
    elif isinstance(draft, str | Path) and draft not in DRAFTS:
        options = {**options, "draft": "auto"}
    profile = options.get("profile")
    everything = one_of(options.get("slots"), ("all",))
    make_options(**{**options, "profile": None, **({"slots": None} if everything else {})})
    facts = read_facts(path, draft)
    if everything:
        options = {**options, "slots": facts.n_pairs}
    if isinstance(profile, str | Path):
        options = {**options, "profile": read_profile(profile, facts.geometry.L, facts.geometry.E)}
    costs = measure_costs(types_of(facts)) if measure else None
    machine = machine or Machine.here(path, measure=True)
    return plan_of_load(facts, machine, make_options(**options), costs=costs, share=kept_share(machine, path))
