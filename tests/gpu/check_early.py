"""Whether windows of real widths keep their bits when kernels start early: python -m tests.gpu.check_early [ROWS ...]

Rows are read and committed one window after the other, with replayed routing, once with plain launches and then with
early ones; streams of every window must be the same. Fails if one is not, or if the driver refuses.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from strata.gpu import early_launch
from strata.gpu.device import Device
from strata.gpu_speed import open_backend, replayed
from strata.replay import skewed_ids
from strata.synth import SynthSpec, memory_model

LEVELS = ("OFF", "MAIN_CHAIN", "CHAINS", "FORKS", "JOINS")
POSITION = 1024


def differing(
    spec: SynthSpec, rows: list[int], windows: int, device: Device | None = None
) -> dict[str, dict[int, list[int]]]:
    """By level and rows: which windows have other streams than with plain launches."""
    rng = np.random.default_rng(spec.seed)
    tokens = rng.integers(0, spec.vocabulary, (windows, max(rows))).astype(np.int32)
    before = early_launch.START_EARLY, early_launch.REFUSAL_IS_ERROR
    found: dict[str, dict[int, list[int]]] = {}
    wanted: dict[int, list[bytes]] = {}
    early_launch.REFUSAL_IS_ERROR = True
    try:
        with memory_model(spec) as path, open_backend(path, 4096, "f16", device) as backend:
            g = backend.geometry
            table = skewed_ids(1024, g.L, g.E, g.K, spec.seed)
            for name in LEVELS:
                early_launch.START_EARLY = getattr(early_launch, name)
                found[name] = {}
                with replayed(backend, table, rows) as rewind:
                    for T in rows:
                        rewind()
                        state, streams = backend.new_state(), []
                        state.rows = POSITION
                        for i in range(windows):
                            backend.window(state, tokens[i, :T], (1, 2))
                            streams.append(backend.streams[:T].tobytes())
                            backend.commit(state, T)
                        wanted.setdefault(T, streams)
                        found[name][T] = [i for i in range(windows) if streams[i] != wanted[T][i]]
    finally:
        early_launch.START_EARLY, early_launch.REFUSAL_IS_ERROR = before
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--windows", type=int, default=60)
    options = parser.parse_args()
    spec = SynthSpec(layers=options.layers, experts=64, distinct_pieces=8)
    began, wrong = time.monotonic(), 0
    for name, by_rows in differing(spec, options.rows, options.windows).items():
        for T, windows in by_rows.items():
            wrong += len(windows)
            print(f"{name:<12} T={T}: {len(windows)} of {options.windows} windows differ {windows[:8] or ''}")
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
