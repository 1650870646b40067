"""What ngram="auto" means in a configuration: the table through the page cache, or past it. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from strata.planner.facts import ModelFacts
from strata.planner.machine import Gpu, Machine
from strata.planner.options import PlanOptions

if TYPE_CHECKING:
    from strata.planner.fitting import PriceOf
    from strata.planner.pricing import Priced


def with_ngram(
    price_of: PriceOf, m: ModelFacts, machine: Machine, gpu: Gpu | None, o: PlanOptions, context: int
) -> Priced:
    """The configuration that maps the table where RAM holds all of its pages besides everything else, else the one that
    reads past the cache. price_of: prices a configuration whose table and KV format are given."""
    mapped = price_of(m, machine, gpu, replace(o, ngram="mapped"), context)
    if mapped.spare_ram_bytes >= m.ngram_table_bytes:
        return mapped
    direct = price_of(m, machine, gpu, replace(o, ngram="direct"), context)
    return mapped if _mapped_lacks_less(price_of, m, machine, gpu, o, mapped, direct) else direct


def _mapped_lacks_less(
    price_of: PriceOf, m: ModelFacts, machine: Machine, gpu: Gpu | None, o: PlanOptions, mapped: Priced, direct: Priced
) -> bool:
    """Whether less RAM makes the configuration with a mapped table fit, and then holds the table: it does where experts
    are to be locked that VRAM holds as well, so that none of their pages is read besides."""
    lacks = mapped.shortfalls
    if not direct.shortfalls or [s.device for s in lacks] != ["ram"] or mapped.missing_bytes >= direct.missing_bytes:
        return False
    larger, options = machine.with_free_ram(lacks[0].needed_bytes), replace(o, ngram="mapped", ram_gib=None)
    found = price_of(m, larger, gpu, options, mapped.context)
    return not found.shortfalls and found.spare_ram_bytes >= m.ngram_table_bytes
