"""RAM that a plan may count on, and what is left to the system and to Python. Pure."""

from __future__ import annotations

from strata.base.plan import GIB, MIB
from strata.planner.machine import Machine
from strata.planner.options import PlanOptions

FLOOR_BYTES, FLOOR_SHARE, FREE_SHARE = 2560 * MIB, 8, 4
"""RAM left to the system and to Python: 2.5 GiB, on small machines an eighth of all, on busy ones a quarter of what is
free."""


def amount(n_bytes: int) -> str:
    """In GiB, or in MiB where that would be none."""
    return f"{n_bytes / GIB:,.1f} GiB" if n_bytes >= GIB // 10 else f"{-(-n_bytes // MIB):,} MiB"


def ram_free_bytes(machine: Machine, o: PlanOptions) -> int:
    free = machine.ram_available_bytes
    return free if o.ram_gib is None else min(free, int(o.ram_gib * GIB))


def ram_floor_bytes(total_bytes: int, free_bytes: int) -> int:
    return min(FLOOR_BYTES, total_bytes // FLOOR_SHARE, free_bytes // FREE_SHARE)


def ram_needed_bytes(machine: Machine, n_bytes: int) -> int:
    """Free RAM beside whose floor `n_bytes` fit. The floor grows with it: where the machine has less, its RAM is taken
    to grow by what it lacks."""
    needed = n_bytes
    while True:  # the floor grows by a quarter of what is added at most, so this ends after some twenty rounds
        larger = n_bytes + ram_floor_bytes(machine.ram_total_with(needed), needed)
        if larger == needed:
            return needed
        needed = larger
