"""Times windows of the bundled model, experts at fixed places and by table: python -m tests.gpu.time_tables"""

from __future__ import annotations

import time

import numpy as np

from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.gpu.backend import GpuBackend
from strata.gpu.device import CupyDevice
from strata.gpu.slots import ExpertSlots
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from tests.conftest import TINY

WINDOWS = 400


def main() -> None:
    gguf = GgufFile(TINY / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf")
    g = read_geometry(gguf)
    experts, programs = expert_layout(gguf, g.L), build_programs(g, 256, "f16")
    times: dict[tuple[bool, int], list[float]] = {}
    for by_table in (False, True, False, True):
        order = [(layer, e) for layer in range(g.L) for e in range(g.E)]
        slots = ExpertSlots(experts, by_table=by_table)
        backend = GpuBackend(Tensors(gguf), g, experts, programs, CupyDevice(), slots=slots, fill_order=order)
        state = backend.new_state()
        for T in (1, 4):
            tokens = np.arange(5, 5 + T, dtype=np.int32)
            for _ in range(WINDOWS):
                start = time.perf_counter()
                backend.window(state, tokens, (-1, -1))
                times.setdefault((by_table, T), []).append(time.perf_counter() - start)
        backend.close()
    for (by_table, T), taken in sorted(times.items()):
        print(f"T={T} {'table' if by_table else 'fixed'}: {1e6 * float(np.median(taken)):.1f} us a window")


if __name__ == "__main__":
    main()
