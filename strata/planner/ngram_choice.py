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
    reads past the cache. That one has buffers to read into: where it does not fit, the one that lacks less, since a
    mapped table fits into any RAM. price_of: prices a configuration whose table and KV format are given."""
    mapped = price_of(m, machine, gpu, replace(o, ngram="mapped"), context)
    if mapped.spare_ram_bytes >= m.ngram_table_bytes:
        return mapped
    direct = price_of(m, machine, gpu, replace(o, ngram="direct"), context)
    return min(direct, mapped, key=lambda p: p.missing_bytes)
