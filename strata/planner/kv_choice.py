"""What kv="auto" means in a configuration: the usual format, or the smaller one where only that fits. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from strata.base.plan import MIB
from strata.planner.facts import ModelFacts
from strata.planner.machine import Gpu, Machine
from strata.planner.options import PlanOptions
from strata.planner.state_bytes import KV_GROUP, kv_format

if TYPE_CHECKING:
    from strata.planner.fitting import PriceOf
    from strata.planner.pricing import Priced

CELLS = ("KV cache", "draft KV cache")
"""Lines whose bytes depend on the format."""

FEW_SLOTS = 4
"""Where RAM is short of experts that VRAM does not hold, what it lacks is not to the byte what a card lacks."""


def _cell_bytes(p: Priced) -> int:
    return sum(x.n_bytes for x in p.lines if x.line in CELLS)


def as_on_smaller_card(
    price_of: PriceOf, m: ModelFacts, machine: Machine, gpu: Gpu, o: PlanOptions, p: Priced, spare_bytes: int
) -> Priced:
    """A configuration that fits, as it is on a card with `spare_bytes` less, or a few slots more than that. So what an
    automatic choice saves where memory is short does not become slots that a little more memory would take away."""
    for spare in (spare_bytes, spare_bytes - FEW_SLOTS * max(p.slot_bytes)):
        if spare > 0:
            least = price_of(m, machine, replace(gpu, free_bytes=p.free_bytes["vram"] - spare), o, p.context)
            if not least.shortfalls:
                return replace(least, free_bytes=p.free_bytes)
    return p


def with_kv(
    price_of: PriceOf, m: ModelFacts, machine: Machine, gpu: Gpu | None, o: PlanOptions, context: int
) -> Priced:
    """The configuration with the format that kv="auto" means: the usual one at this context, or int8 where f16 does not
    fit with everything else and int8 does, or lacks less. price_of: prices a configuration whose format is given.

    int8 is never taken for more expert slots: there are as many as on the smallest card on which f16 fits, so that more
    VRAM, and with it f16 again, never gives fewer.
    """
    usual = kv_format(o.kv, context, m.geometry.dh)
    wide = price_of(m, machine, gpu, replace(o, kv=usual), context)
    if usual == "int8" or not wide.shortfalls or m.geometry.dh % KV_GROUP:
        return wide
    options = replace(o, kv="int8")
    narrow = price_of(m, machine, gpu, options, context)
    if narrow.missing_bytes >= wide.missing_bytes:
        return wide
    of_cells = [s for s in wide.shortfalls if s.device == ("ram" if gpu is None else "vram")]
    short = (of_cells or wide.shortfalls)[0]
    spare = _cell_bytes(wide) - _cell_bytes(narrow) - short.missing_bytes
    if gpu is not None and not narrow.shortfalls:
        narrow = as_on_smaller_card(price_of, m, machine, gpu, options, narrow, spare)
    where = {"vram": "VRAM", "ram": "RAM"}[short.device]
    note = f"KV int8 instead of f16, for which {-(-short.missing_bytes // MIB):,} MiB of {where} are missing"
    return replace(narrow, notes=(*narrow.notes, note))
