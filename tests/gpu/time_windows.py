"""Times whole windows under different choices of the lowering: python -m tests.gpu.time_windows [--layers N] [ROWS ...]

One model of the real widths is made in memory and loaded once; for every choice windows of 1, 2, 4 and 8 rows are
captured again and timed with replayed routing. Rounds alternate between the choices, so that drift meets all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from strata.gpu import early_launch, gemv, hc_ops, ops
from strata.gpu.device import Device
from strata.gpu_speed import DEFAULT_EFFORT, Effort, open_backend, replayed
from strata.gpu_speed import _window_us as window_us
from strata.replay import skewed_ids
from strata.synth import SynthSpec, memory_model

PLACES = {
    "norm": (hc_ops, "NORM_DOWN_ROWS"),
    "mixed": (ops, "MIXED_ROWS"),
    "early": (early_launch, "START_EARLY"),
    "tensor": (gemv, "MMA_FROM"),
    "shared out": (gemv, "MMA_SPLIT_FROM"),
}
CHOICES: dict[str, dict[str, int]] = {
    "as it is": {},
    "norms alone": {"norm": 0},
    "norms in products, all rows": {"norm": 8},
    "products in branches": {"mixed": 0},
    "tensor cores: nowhere": {"tensor": 99, "shared out": 99},
    "tensor cores: experts from 2 rows": {"tensor": 2},
    "tensor cores: no experts": {"tensor": 99},
    "early: off": {"early": early_launch.OFF},
    "early: main chain": {"early": early_launch.MAIN_CHAIN},
    "early: side chains too": {"early": early_launch.CHAINS},
    "early: behind forks too": {"early": early_launch.FORKS},
    "early: behind joins too": {"early": early_launch.JOINS},
    "early: joins, norms alone": {"early": early_launch.JOINS, "norm": 0},
    "all off": {"norm": 0, "mixed": 0, "early": early_launch.OFF},
}
POSITION = 1024


@contextmanager
def chosen(values: dict[str, int]) -> Iterator[None]:
    """The lowering's constants with these values while the block runs."""
    before = {name: getattr(*PLACES[name]) for name in values}
    for name, value in values.items():
        setattr(*PLACES[name], value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(*PLACES[name], value)


def measure(
    spec: SynthSpec,
    rows: list[int],
    rounds: int = 3,
    effort: Effort = DEFAULT_EFFORT,
    device: Device | None = None,
    choices: dict[str, dict[str, int]] = CHOICES,
) -> dict[str, dict[int, tuple[float, int]]]:
    """us and nodes of a window by choice and rows."""
    times: dict[str, dict[int, list[float]]] = {name: {T: [] for T in rows} for name in choices}
    nodes: dict[str, dict[int, int]] = {name: {} for name in choices}
    with memory_model(spec) as path, open_backend(path, 4096, "f16", device) as backend:
        g = backend.geometry
        table = skewed_ids(1024, g.L, g.E, g.K, spec.seed)
        state = backend.new_state()
        state.rows = POSITION
        for _ in range(rounds):
            for name, values in choices.items():
                with chosen(values), replayed(backend, table, rows) as rewind:
                    for T in rows:
                        times[name][T].append(window_us(backend, state, T, rewind, effort)[0])
                        graph = backend._graphs[id(backend.programs.windows[T])]
                        nodes[name][T] = len(graph.lowering.launches) + 2
    return {n: {T: (float(np.median(times[n][T])), nodes[n][T]) for T in rows} for n in choices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--n-experts", type=int, default=512)
    parser.add_argument("--only", nargs="*", default=[""], help="choices whose names contain one of these, and none")
    options = parser.parse_args()
    choices = {
        name: values for name, values in CHOICES.items() if not values or any(part in name for part in options.only)
    }
    spec = SynthSpec(layers=options.layers, experts=options.n_experts, distinct_pieces=8)
    for name, found in measure(spec, options.rows, choices=choices).items():
        print(f"{name:<30}" + "".join(f"  T={T}: {us:8.1f} us {n:4d} nodes" for T, (us, n) in found.items()))


if __name__ == "__main__":
    main()
