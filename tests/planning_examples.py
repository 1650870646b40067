"""The plans that docs/planning.md shows. `python -m tests.planning_examples` prints them anew."""

from __future__ import annotations

import tempfile
from pathlib import Path

from strata.base.plan import Plan
from strata.planner.machine import Machine
from strata.planner.memory import read_facts
from strata.planner.of_load import plan_of_load
from tests.header_maker import make_release

EXAMPLES = (
    ("Q2_0", {"gpu": "RTX 5070", "ram_gib": 64, "ram_gbps": 60, "cores": 8, "cpu_tier": "avx512"}, {"context": 32768}),
    ("IQ3_XXS", {"gpu": "RTX 4060", "ram_gib": 32, "cores": 8}, {"context": 16384}),
    ("IQ2_XS", {"ram_gib": 64, "cores": 8}, {"context": 8192}),
)
"""(release, machine, options)"""


def example_plans() -> list[Plan]:
    with tempfile.TemporaryDirectory() as folder:
        found = {name: read_facts(make_release(Path(folder), name, vocabulary=False)) for name, _, _ in EXAMPLES}
    return [plan_of_load(found[name], Machine.describe(**machine), **options) for name, machine, options in EXAMPLES]


if __name__ == "__main__":
    print("\n\n".join(p.table() for p in example_plans()))
