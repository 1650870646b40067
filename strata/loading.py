"""Loading: options, the context that fits, the draft layer, the backend."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from strata.base.errors import DoesNotFit, need
from strata.base.geometry import CELL_ROWS, CONTEXT_RESERVE, Geometry
from strata.cpu.backend import CpuBackend
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp_files import DraftLayer, find_draft, read_draft
from strata.pack.tensors import Tensors
from strata.runtime.session import AUTOMATIC_CHECKPOINTS

log = logging.getLogger("strata")

KV_FORMATS = ("auto", "f16", "int8")
F16_CONTEXT = 8192
"""Up to this context "auto" stores K and V as float16, above as int8."""

RAM_SHARE = 0.8
"""Share of the available memory that an automatic context may take."""


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
        for name, least in (("sessions", 1), ("context", 1), ("checkpoints", 0)):
            value = getattr(self, name)
            if value is not None or name != "context":
                good = isinstance(value, int) and not isinstance(value, bool) and value >= least
                need(good, f"{name} is out of range", found=repr(value), needed=f"an integer >= {least}")
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


def kv_format(kv: str, context: int, geometry: Geometry) -> str:
    """The format "auto" stands for; refuses int8 for heads that its groups of 64 values do not divide."""
    whole = geometry.dh % 64 == 0
    if kv == "auto":
        return "int8" if context > F16_CONTEXT and whole else "f16"
    if kv == "int8":
        found = f"heads of {geometry.dh}"
        need(whole, "kv=int8 needs groups of 64 values", found=found, needed="a multiple of 64", advice='Use kv="f16".')
    return kv


def cells_of(context: int) -> int:
    """Cells allocated for a context: whole prefill cells."""
    return -(-context // CELL_ROWS) * CELL_ROWS


def session_bytes(arch: ModuleType, g: Geometry, o: LoadOptions, context: int, draft: bool) -> int:
    """Bytes of all sessions, their checkpoints and the rotary table at a context."""
    buffers = arch.session_buffers(g, cells_of(context), kv_format(o.kv, context, g), draft)
    recurrent = sum(b.n_bytes for b in buffers if b.role == "recurrent")
    return o.sessions * (sum(b.n_bytes for b in buffers) + o.checkpoints * recurrent) + 4 * g.rotary_dims * context


def fit_context(arch: ModuleType, g: Geometry, o: LoadOptions, draft: bool) -> int:
    """The context to use; an automatic one shrinks until it fits (logged), an explicit one is refused instead."""
    available = int(psutil.virtual_memory().available * RAM_SHARE)

    def needed(context: int) -> int:
        return session_bytes(arch, g, o, context, draft)

    if o.context is not None:
        least = CONTEXT_RESERVE + 2
        need(o.context >= least, "the context is too small", found=o.context, needed=f">= {least}")
        if needed(o.context) > available:
            raise DoesNotFit(
                f"a context of {o.context} with {o.sessions} sessions does not fit in memory",
                found=f"{available >> 20} MiB available",
                needed=f"{needed(o.context) >> 20} MiB",
                advice='Use a smaller context=, kv="int8", or fewer sessions.',
            )
        if o.context > g.trained_context:
            log.warning("context %d is beyond the trained context of %d", o.context, g.trained_context)
        return o.context
    fit = g.trained_context
    while needed(fit) > available and fit > CELL_ROWS:
        fit //= 2
    if needed(fit) > available:
        found, wanted = f"{available >> 20} MiB available", f"{needed(fit) >> 20} MiB"
        raise DoesNotFit("no context fits in memory", found=found, needed=wanted, advice="Free memory or use fewer sessions.")
    if fit < g.trained_context:
        log.warning("context reduced from %d to %d: %d MiB available", g.trained_context, fit, available >> 20)
    return fit


def load_draft_layer(gguf: GgufFile, arch: ModuleType, g: Geometry, draft: Any) -> DraftLayer | None:
    """The draft layer that the option asks for, checked against the model; None if there is none to use."""
    if draft in (None, "off", "lookup") or not isinstance(draft, str | Path):
        return None
    if draft == "auto":
        source = find_draft(gguf)
        if source is None:
            log.warning("no draft layer beside %s: drafting by lookup alone", gguf.path.name)
            return None
    else:
        source = Path(draft)
    layer = read_draft(source, gguf, g)
    arch.check_draft(layer.tensors, g)
    return layer


def make_backend(
    gguf: GgufFile, arch: ModuleType, g: Geometry, o: LoadOptions, context: int, layer: DraftLayer | None
) -> CpuBackend:
    """Allocate everything and compile what the file's types need."""
    kv = kv_format(o.kv, context, g)
    programs = arch.build_programs(g, cells_of(context), kv, layer.head_rows if layer else 0)
    held: Mapping[str, Any] = layer.tensors if layer else {}
    return CpuBackend(Tensors(gguf, held), g, expert_layout(gguf, g.L), programs, threads=o.threads, pin=o.pin)


