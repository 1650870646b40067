"""Loading: options, the plan that a load executes, the draft layer, the backend."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from strata.base.errors import StrataError, need
from strata.base.geometry import LEAST_CONTEXT, Geometry
from strata.base.numbers import one_of, plain, real_number, shown, whole_number
from strata.base.plan import Plan
from strata.base.program import ProgramSet
from strata.cpu.backend import CpuBackend
from strata.gpu.backend import GpuBackend
from strata.gpu.device import CupyDevice, Device
from strata.gpu.presence import cuda_problem
from strata.pack.experts import ExpertLayout, expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp_files import DraftLayer, read_draft
from strata.pack.ngram import TABLE_NAME
from strata.pack.ngram_reader import direct_problem
from strata.pack.profile import ExpertProfile, read_profile
from strata.pack.tensors import Tensors
from strata.planner.draft import draft_source
from strata.planner.link_share import kept_share
from strata.planner.machine import Gpu, Machine
from strata.planner.memory import facts_of
from strata.planner.of_load import ON_CPU, plan_of_load
from strata.planner.options import (
    EXPERT_MODES,
    INSTEAD,
    LEAST_GIB,
    MOST_GIB,
    MOST_OF_ANY,
    NGRAM_MODES,
    PlanOptions,
    check_device_name,
    check_name,
    check_real,
    check_whole,
)
from strata.planner.state_bytes import round_context
from strata.runtime.orchestrator import Orchestrator, TieredBackend, TierSetup
from strata.runtime.session import AUTOMATIC_CHECKPOINTS

log = logging.getLogger("strata")

KV_FORMATS = ("auto", "f16", "int8")
PREFILL_MODES = ("auto", "windows")


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
    ngram: str = "auto"
    slots: int | str | None = None
    experts: str = "auto"
    pcie_share: float | None = None
    profile: Any = None

    def __post_init__(self) -> None:
        # Values of other libraries become Python's own; what is none stays, to be refused by its name.
        for name in ("pin", "kv", "prefill", "draft", "device", "ngram", "slots", "experts", "profile"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        for names, number_of in ((("context", "sessions", "threads", "checkpoints", "slots"), whole_number),
                                 (("vram_gib", "pcie_share"), real_number)):  # fmt: skip
            for name in names:
                number = number_of(getattr(self, name))
                if number is not None:
                    object.__setattr__(self, name, number)

    def validate(self) -> None:
        """Raise BadArgument for the first option out of its range."""
        need(isinstance(self.pin, bool), "pin is no truth value", found=shown(self.pin), needed="True or False")
        for name, names in (("kv", KV_FORMATS), ("prefill", PREFILL_MODES), ("ngram", NGRAM_MODES),
                            ("experts", EXPERT_MODES)):  # fmt: skip
            check_name(name, getattr(self, name), names)
        check_device_name(self.device)
        for name, least in (("sessions", 1), ("context", LEAST_CONTEXT), ("threads", 1), ("checkpoints", 0)):
            check_whole(name, getattr(self, name), least, optional=name in ("context", "threads"))
        some = whole_number(self.slots)
        named = self.slots is None or one_of(self.slots, ("all",))
        need(named or (some is not None and 0 <= some <= MOST_OF_ANY), "slots is out of range", found=shown(self.slots),
             needed='None, "all" or an integer >= 0', advice=INSTEAD["slots"])  # fmt: skip
        check_real("pcie_share", self.pcie_share, 0, 1)
        check_real("vram_gib", self.vram_gib, LEAST_GIB, MOST_GIB)
        need(not one_of(self.profile, ("",)), "profile is empty", found="''", needed="a path, or None")
        known = self.profile is None or isinstance(self.profile, str | Path | ExpertProfile)
        need(known, "profile is unusable", found=shown(self.profile), needed="a path or an ExpertProfile")
        need(not one_of(self.draft, ("",)), "draft is empty", found="''", needed='a path, or "off" for none')
        proposes = callable(getattr(self.draft, "propose", None)) and not isinstance(self.draft, type)
        need(
            self.draft is None or isinstance(self.draft, str | Path) or proposes,
            "draft is unusable",
            found=shown(self.draft),
            needed='"off", "auto", "lookup", a path, or an object with propose(tokens, k)',
        )

    @property
    def drafting(self) -> bool:
        return self.draft is not None and not one_of(self.draft, ("off",))

    def ranking(self, g: Geometry) -> ExpertProfile | None:
        """The profile, read and checked against the model."""
        if isinstance(self.profile, str | Path):
            return read_profile(self.profile, g.L, g.E)
        return self.profile


def find_draft_layer(gguf: GgufFile, draft: Any) -> Path | None:
    """The draft layer's file or folder that the option means, or None if there is none to use."""
    # "mtp" prices a layer that is not there; to load one, its name is that of a file.
    source = draft_source(gguf, Path(draft) if one_of(draft, ("mtp",)) else draft)
    if source is None and one_of(draft, ("auto",)):
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
        ngram=o.ngram,
        slots=g.L * g.E if o.slots == "all" else o.slots,
        experts=o.experts,
        pcie_share=o.pcie_share,
        profile=o.ranking(g),
    )
    made = plan_of_load(facts_of(gguf, g, source), machine, options, share=kept_share(machine, gguf.path),
                        problem_of=device_problem)  # fmt: skip
    if o.ngram == "auto" and made.ngram == "direct" and (problem := direct_problem(gguf, TABLE_NAME)):
        _warn_once(f"the n-gram table is read through the page cache: {problem}")
        return plan_load(gguf, g, replace(o, ngram="mapped"), source)
    made.require()
    for note in made.notes:
        if ON_CPU in note:
            _warn_once(note)
        else:
            log.warning("%s", note)
    return made


def _has_line(p: Plan, name: str) -> bool:
    return any(line.line == name for line in p.lines)


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
    gguf: GgufFile,
    arch: ModuleType,
    g: Geometry,
    p: Plan,
    pin: bool,
    layer: DraftLayer | None,
    profile: ExpertProfile | None = None,
) -> CpuBackend | GpuBackend:
    """Allocate what the plan says, but for the sessions, and compile what the file's types need."""
    chunk_rows = p.prefill_rows if p.device != "cpu" else 0
    programs = arch.build_programs(g, round_context(p.context), p.kv, layer.head_rows if layer else 0, chunk_rows)
    held: Mapping[str, Any] = layer.tensors if layer else {}
    tensors, experts = Tensors(gguf, held), expert_layout(gguf, g.L)
    ids = layer.vocabulary if layer else None
    if p.device == "cpu":
        return CpuBackend(
            tensors, g, experts, programs, threads=p.threads, pin=pin, ngram_cache_rows=p.ngram_cache_rows,
            ngram=p.ngram, draft_ids=ids,
        )  # fmt: skip
    of_driver = sum(line.held_bytes for line in p.lines if line.kind == "driver")
    device = open_device(int(p.device.partition(":")[2]), p.free_bytes["vram"] - of_driver)
    try:
        with device.current():
            if p.n_slots < g.L * g.E:
                return _tiered(tensors, g, experts, programs, device, p, pin, profile, ids)
            return GpuBackend(tensors, g, experts, programs, device, ngram_cache_rows=p.ngram_cache_rows,
                              ngram=p.ngram, draft_ids=ids)  # fmt: skip
    except BaseException:
        device.close()
        raise


def _tiered(
    tensors: Tensors, g: Geometry, experts: ExpertLayout, programs: ProgramSet, device: Device, p: Plan, pin: bool,
    profile: ExpertProfile | None, draft_ids: np.ndarray | None,
) -> TieredBackend:  # fmt: skip
    """A backend for a plan with fewer slots than experts."""
    link = _has_line(p, "link staging")
    mode = p.experts if p.experts != "mapped" or link else "file"
    hit_rate = p.estimate.hit_rate if p.times_share and p.estimate is not None else None
    setup = TierSetup(p.slots, mode, link, p.pcie_share, p.threads, pin, profile, p.link_gbps, hit_rate=hit_rate)
    shared = Orchestrator(device, tensors, experts, g.K, setup)
    try:
        return TieredBackend(tensors, g, programs, shared, ngram_cache_rows=p.ngram_cache_rows, ngram=p.ngram,
                             draft_ids=draft_ids, lends=any(line.kind == "lent" for line in p.lines))  # fmt: skip
    except BaseException:
        shared.quiet()
        device.close()  # before what it reads
        shared.close()
        raise
