"""Whether a configuration fits, and the largest context at which it does."""

from __future__ import annotations

from collections.abc import Callable

from strata.planner.facts import ModelFacts
from strata.planner.machine import Gpu, Machine
from strata.planner.options import PlanOptions
from strata.planner.pricing import Priced, price
from strata.planner.state_bytes import F16_CONTEXT, round_context

PriceOf = Callable[[ModelFacts, Machine, Gpu | None, PlanOptions, int], Priced]
"""What prices a configuration: `price`, or `chunks.price_load`."""


def fits_at(
    m: ModelFacts,
    machine: Machine,
    gpu: Gpu | None,
    o: PlanOptions,
    context: int,
    *,
    no_disk: bool = False,
    price_of: PriceOf = price,
) -> bool:
    priced = price_of(m, machine, gpu, o, context)
    return not priced.shortfalls and not (no_disk and priced.needs_disk)


def largest_context(
    m: ModelFacts,
    machine: Machine,
    gpu: Gpu | None,
    o: PlanOptions,
    *,
    no_disk: bool = False,
    price_of: PriceOf = price,
) -> int:
    """Largest context in whole cells, up to the trained one, that fits with everything else unchanged; 0 if none.

    With kv="auto" the format changes on the way, and a longer context may read less from disk: the two ranges are
    searched one after the other, the longer first.
    """

    def fits(cells: int) -> bool:
        return fits_at(m, machine, gpu, o, cells * 256, no_disk=no_disk, price_of=price_of)

    top = round_context(m.geometry.trained_context) // 256
    ranges = [(1, top)]
    if o.kv == "auto" and top > F16_CONTEXT // 256:
        ranges = [(F16_CONTEXT // 256 + 1, top), (1, F16_CONTEXT // 256)]
    for low, high in ranges:
        if not fits(low):
            continue
        if fits(high):
            low = high
        while low < high:
            middle = (low + high + 1) // 2
            if fits(middle):
                low = middle
            else:
                high = middle - 1
        return min(low * 256, m.geometry.trained_context)
    return 0
