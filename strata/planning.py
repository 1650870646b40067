"""strata.plan: price a load before it happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strata.base.plan import Plan
from strata.planner.machine import Machine
from strata.planner.of_load import plan_file


def plan(path: str | Path, *, machine: Machine | None = None, measure: bool = False, **options: Any) -> Plan:
    """Say what loading a GGUF file (any one shard of it) takes, whether it fits, and what bounds its speed.

    It is the plan that `strata.load` executes, here or on the machine described. Reads headers only, in well under a
    second: a partly downloaded file will do. Takes the arguments of `strata.load` (`pin` and `on_progress` change
    nothing here), and besides:

    machine           what to plan for; None: this machine. `Machine.describe(gpu="RTX 5070", ram_gib=64)` from
                      `strata.planner` makes one that is not here
    measure           time this machine's CPU kernels on the file's types instead of taking listed rates
    device            "auto" (the first GPU, else the CPU), "cpu", "cuda" (the first) or "cuda:N"
    experts           where RAM holds experts: "auto", "mapped", "pinned" or "resident"
    slots             experts held in VRAM; None: what fits; "all"
    pcie_share        share of the others that the GPU reads over PCIe; None: by cost
    profile           which experts are held first: an ExpertProfile or the path of one
    hit_rate          share of routed experts found in VRAM, when it is known
    draft             also "mtp": price a draft layer in its usual form when none is here
    draft_vocabulary  head rows that drafts are scored on
    ngram_cache_rows  rows of the n-gram row cache
    ngram             "auto", "mapped" or "direct": how rows of the n-gram table are read
    reserve_mib       VRAM left free
    vram_gib, ram_gib caps on what may be taken

    Whether it fits is in the plan (`fits`, `verdict`, `shortfalls`, `remedies`); `Plan.require()` raises DoesNotFit.
    Raises FileError, ModelError or BadArgument for a file or options that cannot be planned, NoDevice for a GPU that is
    asked for and not there.
    """
    for unused in ("pin", "on_progress"):
        options.pop(unused, None)
    return plan_file(path, machine=machine, measure=measure, **options)
