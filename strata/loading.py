"""Loading: options, the plan that a load executes, the draft layer, the backend."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from strata.base.errors import DoesNotFit, StrataError, need
from strata.base.geometry import CONTEXT_RESERVE, Geometry
from strata.base.plan import MIB, Plan
from strata.cpu.backend import CpuBackend
from strata.gpu.backend import GpuBackend
from strata.gpu.device import CupyDevice, Device, cuda_problem
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp_files import DraftLayer, read_draft
from strata.pack.tensors import Tensors
from strata.planner.chunks import with_chunk
from strata.planner.draft import draft_source
from strata.planner.facts import ModelFacts
from strata.planner.machine import Gpu, Machine
from strata.planner.memory import choose_device, facts_of, plan
from strata.planner.options import PlanOptions, check_device_name
from strata.planner.state_bytes import round_context
from strata.runtime.session import AUTOMATIC_CHECKPOINTS

log = logging.getLogger("strata")

KV_FORMATS = ("auto", "f16", "int8")
LEAST_CONTEXT = CONTEXT_RESERVE + 2


@dataclass(frozen=True)
class LoadOptions:
    """Arguments of `strata.load`; see there."""

    context: int | None = None
    sessions: int = 1
    threads: int | None = None
    pin: bool = False
    kv: str = "auto"
    prefill: str = "auto"
    draft: Any = "off"
    checkpoints: int = AUTOMATIC_CHECKPOINTS
    device: str = "auto"
    vram_gib: float | None = None

    def validate(self) -> None:
        """Raise BadArgument for the first option out of its range."""
        need(self.kv in KV_FORMATS, "kv is unknown", found=repr(self.kv), needed=", ".join(KV_FORMATS))
        known = self.prefill in ("auto", "windows")
        need(known, "prefill is unknown", found=repr(self.prefill), needed='"auto" or "windows"')
        for name, least in (("sessions", 1), ("context", 1), ("threads", 1), ("checkpoints", 0)):
            value = getattr(self, name)
            if value is not None or name not in ("context", "threads"):
                good = isinstance(value, int) and not isinstance(value, bool) and value >= least
                need(good, f"{name} is out of range", found=repr(value), needed=f"an integer >= {least}")
        check_device_name(self.device)
        small = self.context is not None and self.context < LEAST_CONTEXT
        need(not small, "the context is too small", found=self.context, needed=f">= {LEAST_CONTEXT}")
        proposes = callable(getattr(self.draft, "propose", None))
        need(
            self.draft is None or isinstance(self.draft, str | Path) or proposes,
            "draft is unusable",
            found=repr(self.draft),
            needed='"off", "auto", "lookup", a path, or an object with propose(tokens, k)',
        )

    @property
    def drafting(self) -> bool:
        return self.draft not in (None, "off")


def find_draft_layer(gguf: GgufFile, draft: Any) -> Path | None:
    """The draft layer's file or folder that the option means, or None if there is none to use."""
    # "mtp" prices a layer that is not there; to load one, its name is that of a file.
    source = draft_source(gguf, Path(draft) if draft == "mtp" else draft)
    if source is None and draft == "auto":
        log.warning("no draft layer beside %s: drafting by lookup alone", gguf.path.name)
    return None if source is None else Path(source)


def plan_load(gguf: GgufFile, g: Geometry, o: LoadOptions, source: Path | None) -> Plan:
    """The plan that this load executes, on this machine. Its notes are logged.

    DoesNotFit with found, needed and remedies for what does not fit, BadArgument for what the model cannot have.
    """
    machine = Machine.here(gguf.path)
    options = PlanOptions(
        context=o.context,
        sessions=o.sessions,
        kv=o.kv,
        device=o.device,
        prefill=o.prefill,
        draft="auto" if source is not None else "lookup" if o.drafting else "off",
        checkpoints=o.checkpoints,
        threads=o.threads,
        vram_gib=o.vram_gib,
    )
    facts, gpu = facts_of(gguf, g, source), choose_device(machine, options)
    made = None if gpu is None else _plan_gpu(facts, machine, gpu, options)
    if made is not None and o.prefill == "auto":
        made = with_chunk(made, gguf, g)
    if made is None:
        made = plan(facts, machine, replace(options, device="cpu", vram_gib=None))
    made.require()
    for note in made.notes:
        log.warning("%s", note)
    return made


def _plan_gpu(facts: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions) -> Plan | None:
    """The plan on a card. What device="auto" cannot have is said once and becomes None; otherwise it raises."""
    try:
        problem = device_problem(gpu)
        if problem is not None:
            raise problem
        made = plan(facts, machine, all_experts(o, facts.geometry))
        need_all_experts(made, gpu)
    except StrataError as error:
        if o.device != "auto":
            raise
        _warn_once(f"{gpu.name} is here, but this load computes on the CPU: {error}")
        return None
    return made


def all_experts(o: PlanOptions, g: Geometry) -> PlanOptions:
    """What a load on a GPU executes: every expert in VRAM. Prefill chunks get what that leaves: `with_chunk`."""
    return replace(o, slots=g.L * g.E, prefill="windows")


def need_all_experts(made: Plan, gpu: Gpu) -> None:
    """Raise DoesNotFit unless the plan fits."""
    if made.fits:
        return
    other = [r for r in made.remedies if not r.startswith(("slots=", "device="))]
    raise DoesNotFit(
        f"{made.model} does not fit on {gpu.name} with every expert: " + "; ".join(str(s) for s in made.shortfalls),
        found=", ".join(f"{s.free_bytes / MIB:,.0f} MiB free ({s.device})" for s in made.shortfalls),
        needed=", ".join(f"{s.needed_bytes / MIB:,.0f} MiB" for s in made.shortfalls),
        advice="Try: " + "; ".join(['device="cpu" (slower)', *other]),
    )


def device_problem(gpu: Gpu) -> StrataError | None:
    """Why this process cannot compute on a card, or None. Makes no context on it."""
    return cuda_problem(gpu.index, gpu.capability)


def open_device(index: int, limit_bytes: int) -> Device:
    """The device that a GPU backend computes on, of which it takes at most `limit_bytes`."""
    return CupyDevice(index, limit_bytes)


@functools.cache
def _warn_once(text: str) -> None:
    """Once a process, since every load would say the same."""
    log.warning("%s", text)


def load_draft_layer(source: Path | None, gguf: GgufFile, arch: ModuleType, g: Geometry) -> DraftLayer | None:
    """Read the draft layer and check it against the model; None without a source."""
    if source is None:
        return None
    layer = read_draft(source, gguf, g)
    arch.check_draft(layer.tensors, g)
    return layer


def make_backend(
    gguf: GgufFile, arch: ModuleType, g: Geometry, p: Plan, pin: bool, layer: DraftLayer | None
) -> CpuBackend | GpuBackend:
    """Allocate what the plan says, but for the sessions, and compile what the file's types need."""
    chunk_rows = p.prefill_rows if p.device != "cpu" else 0
    programs = arch.build_programs(g, round_context(p.context), p.kv, layer.head_rows if layer else 0, chunk_rows)
    held: Mapping[str, Any] = layer.tensors if layer else {}
    tensors, experts = Tensors(gguf, held), expert_layout(gguf, g.L)
    if p.device == "cpu":
        return CpuBackend(
            tensors, g, experts, programs, threads=p.threads, pin=pin, ngram_cache_rows=p.ngram_cache_rows
        )
    of_driver = sum(line.held_bytes for line in p.lines if line.kind == "driver")
    device = open_device(int(p.device.partition(":")[2]), p.free_bytes["vram"] - of_driver)
    try:
        with device.current():
            return GpuBackend(tensors, g, experts, programs, device, ngram_cache_rows=p.ngram_cache_rows)
    except BaseException:
        device.close()
        raise
