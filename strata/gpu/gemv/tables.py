"""The tables of the grid formats as `grid_data.cuh` holds them, packed; this module writes and checks that file.

    python -m strata.gpu.gemv.tables      rewrite it

A grid has few different values, so an entry is a u16: field i of it is the number of value i among the sorted values of
the grid. Kernels widen the entries when they bring a table into shared memory.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from strata.pack.grids import GRID

FILE = Path(__file__).with_name("grid_data.cuh")
NAMES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")
BITS = {4: 3, 8: 2}
"""Bits of a field, by values of an entry."""


def levels(name: str) -> np.ndarray:
    """The different values of a grid, ascending."""
    return np.unique(GRID[name])


def packed(name: str) -> np.ndarray:
    """(n,) uint16."""
    grid = GRID[name]
    bits = BITS[grid.shape[1]]
    fields = np.searchsorted(levels(name), grid).astype(np.uint32)
    return (fields << (bits * np.arange(grid.shape[1], dtype=np.uint32))).sum(-1).astype(np.uint16)


def text() -> str:
    """The header."""
    lines = [
        "// Grids of the block formats, packed; written by tables.py, which says how.",
        "#pragma once",
        '#include "exact.cuh"',
        "",
    ]
    for name in NAMES:
        entries = packed(name)
        lines.append(f"// values {', '.join(map(str, levels(name)))}")
        lines.append(f"__device__ const u16 {name}_GRID[{len(entries)}] = {{")
        for i in range(0, len(entries), 16):
            lines.append("    " + " ".join(f"{e}," for e in entries[i : i + 16]))
        lines.append("};")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
