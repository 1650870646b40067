"""What a load may choose, as one record with the checks that need no file."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields

from strata.base.errors import BadArgument, need
from strata.base.geometry import CELL_ROWS, LEAST_CONTEXT
from strata.base.numbers import one_of, plain, real_number, shown, whole_number
from strata.cpu.cores import MOST_THREADS
from strata.gpu.chunk_plan import CHUNKS
from strata.pack.profile import ExpertProfile
from strata.planner.state_bytes import kv_format

EXPERT_MODES = ("auto", "mapped", "pinned", "resident")
DRAFTS = ("off", "lookup", "auto", "mtp")
NGRAM_MODES = ("auto", "mapped", "direct")

MOST = {"threads": MOST_THREADS}
MOST_OF_ANY = (1 << 31) - 1
"""Largest value of a whole number among the options, by name and otherwise: positions and ids are int32."""
LEAST_GIB, MOST_GIB = 0.001, 1e9

INSTEAD = {
    "context": "None is the trained context, or what fits.",
    "threads": "None is one thread per usable core.",
    "slots": "None is as many as fit.",
    "vram_gib": "None is what is free.",
    "ram_gib": "None is what is available.",
    "pcie_share": "None chooses by cost.",
}
"""Advice for options that choose by themselves."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan; every default is the automatic choice.

    context      cells per session; None = the smaller of trained context and what fits
    sessions     session states allocated at load
    kv           "auto" (f16 up to 8K of context where it fits, int8 above), "f16" or "int8"
    device       "auto" (the first GPU, else the CPU), "cpu", "cuda" (the first) or "cuda:N"
    experts      what RAM holds: "mapped" (file pages), "pinned" (all, locked for the GPU), "resident" (what VRAM
                 does not hold), "auto" (the fastest that fits)
    slots        experts held in VRAM: None = what fits, 0 = none, else exactly so many
    prefill      "auto", "windows" (no chunk buffers) or rows of a chunk (a multiple of 256 up to 8,192)
    draft        "off", "lookup" (in earlier text alone), "auto" (with the draft layer, when the file or folder has one)
                 or "mtp" (priced in its standard form if need be)
    draft_vocabulary   head rows that drafts are scored on; None = as the draft layer's files say, else the usual subset
    checkpoints  recurrent states a session keeps in RAM for reuse of prefixes
    ngram_cache_rows   rows of the n-gram row cache; None = 65,536 on the CPU, 1,048,576 beside a GPU
    ngram        how rows of the n-gram table are read: "mapped" (through the page cache), "direct" (past it), "auto"
                 (mapped where free RAM holds the whole table beside everything else, or where nothing else fits; else
                 direct)
    reserve_mib  VRAM left free; None = 700, less on small cards
    hit_rate     share of routed experts found in VRAM, when it is known; None = from profile or uniform
    profile      ranking of (layer, expert) pairs
    pcie_share   share of the experts that VRAM lacks for the GPU to read over PCIe: None = by cost where RAM holds
                 experts locked; 0 = none; above 0 with "mapped" locks the file's pages in place
    threads      CPU workers; None = one per usable core, one less beside a GPU
    vram_gib, ram_gib   caps on what may be taken
    """

    context: int | None = None
    sessions: int = 1
    kv: str = "auto"
    device: str = "auto"
    experts: str = "auto"
    slots: int | None = None
    prefill: str | int = "auto"
    draft: str = "off"
    draft_vocabulary: int | None = None
    checkpoints: int = 6
    ngram_cache_rows: int | None = None
    ngram: str = "auto"
    reserve_mib: float | None = None
    hit_rate: float | None = None
    profile: ExpertProfile | None = None
    pcie_share: float | None = None
    threads: int | None = None
    vram_gib: float | None = None
    ram_gib: float | None = None

    def __post_init__(self) -> None:
        for name in ("kv", "device", "experts", "prefill", "draft", "ngram"):
            self._set(name, plain(getattr(self, name)))
        for name, least in (("sessions", 1), ("checkpoints", 0)):
            self._set(name, check_whole(name, getattr(self, name), least, optional=False))
        for name, least in (("context", LEAST_CONTEXT), ("slots", 0), ("ngram_cache_rows", 0), ("threads", 1),
                            ("draft_vocabulary", 1)):  # fmt: skip
            self._set(name, check_whole(name, getattr(self, name), least))
        known = self.profile is None or isinstance(self.profile, ExpertProfile)
        need(known, "profile is unusable", found=shown(self.profile), needed="a path or an ExpertProfile")
        kv_format(self.kv, 1)
        check_name("ngram", self.ngram, NGRAM_MODES)
        check_device_name(self.device)
        check_name("experts", self.experts, EXPERT_MODES)
        check_name("draft", self.draft, DRAFTS)
        if not isinstance(self.prefill, str):
            rows = whole_number(self.prefill)
            self._set("prefill", self.prefill if rows is None else rows)
        chunk = self.prefill
        whole = type(chunk) is int and 0 < chunk <= CHUNKS[0] and chunk % CELL_ROWS == 0
        need(
            whole or one_of(chunk, ("auto", "windows")),
            "prefill is out of range",
            found=shown(chunk),
            needed=f"auto, windows or a multiple of {CELL_ROWS} rows up to {CHUNKS[0]:,}",
        )
        for name, least, most in (("reserve_mib", 0.0, 1e9), ("hit_rate", 0.0, 1.0), ("pcie_share", 0.0, 1.0),
                                  ("vram_gib", LEAST_GIB, MOST_GIB), ("ram_gib", LEAST_GIB, MOST_GIB)):  # fmt: skip
            self._set(name, check_real(name, getattr(self, name), least, most))

    def _set(self, name: str, value: object) -> None:
        """While the record is made: numbers of other libraries become Python's own."""
        object.__setattr__(self, name, value)


def check_device_name(device: object) -> None:
    """BadArgument unless it is "auto", "cpu", "cuda" or "cuda:N"."""
    text = device if isinstance(device, str) else ""
    need(text in ("auto", "cpu", "cuda") or re.fullmatch(r"cuda:[0-9]{1,9}", text) is not None, "unknown device",
         found=shown(device), needed="auto, cpu, cuda or cuda:N")  # fmt: skip


def check_name(name: str, value: object, names: tuple[str, ...]) -> None:
    """BadArgument unless the option's value is one of the names."""
    need(one_of(value, names), f"{name} is unknown", found=shown(value), needed=", ".join(names))


def check_whole(name: str, value: object, least: int, optional: bool = True) -> int | None:
    """The int that the option's value stands for, or None for None. BadArgument if it is none or out of range."""
    number, most = whole_number(value), MOST.get(name, MOST_OF_ANY)
    good = number is not None and least <= number <= most
    need(good or (optional and value is None), f"{name} is out of range", found=shown(value),
         needed=f"an integer in {least:,}..{most:,}" if name in MOST or (number or 0) > most else
         f"an integer >= {least}", advice=INSTEAD.get(name))  # fmt: skip
    return number


def check_real(name: str, value: object, least: float, most: float) -> float | None:
    """The same for numbers that need not be whole."""
    number = real_number(value)
    good = number is not None and least <= number <= most
    need(good or value is None, f"{name} is out of range", found=shown(value),
         needed=f"a number in {least:,g}..{most:,.0f}", advice=INSTEAD.get(name))  # fmt: skip
    return number


def make_options(**given: object) -> PlanOptions:
    """Options from keyword arguments; an unknown one is refused naming the closest."""
    known = [f.name for f in fields(PlanOptions)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise BadArgument("unknown option", found=repr(name), needed=", ".join(known),
                              advice=f"Did you mean {near[0]!r}?")  # fmt: skip
    return PlanOptions(**given)
