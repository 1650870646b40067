"""Loading: options, the plan that a load executes, the draft layer, the backend."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from strata.base.errors import need
from strata.base.geometry import CONTEXT_RESERVE, Geometry
from strata.base.plan import Plan
from strata.cpu.backend import CpuBackend
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp_files import DraftLayer, read_draft
from strata.pack.tensors import Tensors
from strata.planner.draft import draft_source
from strata.planner.machine import Machine
from strata.planner.memory import facts_of, plan
from strata.planner.options import PlanOptions
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
    if machine.gpus:
        _say_cpu_alone(machine.gpus[0].name)
    options = PlanOptions(
        context=o.context,
        sessions=o.sessions,
        kv=o.kv,
        device="cpu",
        prefill=o.prefill,
        draft="auto" if source is not None else "lookup" if o.drafting else "off",
        checkpoints=o.checkpoints,
        threads=o.threads,
    )
    made = plan(facts_of(gguf, g, source), machine, options)
    made.require()
    for note in made.notes:
        log.warning("%s", note)
    return made


@functools.cache
def _say_cpu_alone(gpu: str) -> None:
    """Once a process, since every load would say the same."""
    log.warning("%s is here, but this version computes on the CPU alone", gpu)


def load_draft_layer(source: Path | None, gguf: GgufFile, arch: ModuleType, g: Geometry) -> DraftLayer | None:
    """Read the draft layer and check it against the model; None without a source."""
    if source is None:
        return None
    layer = read_draft(source, gguf, g)
    arch.check_draft(layer.tensors, g)
    return layer


def make_backend(
    gguf: GgufFile, arch: ModuleType, g: Geometry, p: Plan, pin: bool, layer: DraftLayer | None
) -> CpuBackend:
    """Allocate what the plan says, but for the sessions, and compile what the file's types need."""
    programs = arch.build_programs(g, round_context(p.context), p.kv, layer.head_rows if layer else 0)
    held: Mapping[str, Any] = layer.tensors if layer else {}
    return CpuBackend(
        Tensors(gguf, held),
        g,
        expert_layout(gguf, g.L),
        programs,
        threads=p.threads,
        pin=pin,
        ngram_cache_rows=p.ngram_cache_rows,
    )
