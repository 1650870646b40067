"""The kernels of the quantised formats, and what they are compiled for."""

from __future__ import annotations

from strata.base.errors import need
from strata.gpu.launch import Source
from strata.pack.formats import BlockFormat

COLUMNS = (1, 4)
"""Most columns of the two instances of a kernel; weights are read once for that many."""
SPLIT = ("Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS", "Q2_0")
"""Formats with kernels for matrices of few rows (split.py): those that dense tensors of releases have."""
SHORT_VALUES = {"IQ4_NL": 640}
"""Values of a row whose down products of experts have a kernel of their own, by format."""


def _source(file: str, *formats: str) -> Source:
    whole = tuple(f"product<{f}, {M}>" for f in formats for M in COLUMNS)
    shared_out = tuple(f"{kernel}>" for f in formats if f in SPLIT for kernel in (f"split<{f}, 4", f"spread<{f}"))
    return Source(f"gemv/{file}.cu", whole + shared_out)


SMALL4 = _source("small4", "Q4_0", "Q4_1", "IQ4_NL", "MXFP4", "NVFP4")
SMALL5 = _source("small5", "Q5_0", "Q5_1")
Q8_0 = _source("q8_0", "Q8_0")
Q2_0 = _source("q2_0", "Q2_0")
K_QUANTS = _source("k", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
IQ4_XS = _source("iq4_xs", "IQ4_XS")
GRIDS = _source("grids", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")
SHORT = Source(
    "gemv/short_rows.cu", tuple(f"short_rows<{f}, {K}, {M}>" for f, K in SHORT_VALUES.items() for M in COLUMNS)
)

_SOURCES = {
    instance[8:-4]: s
    for s in (SMALL4, SMALL5, Q8_0, Q2_0, K_QUANTS, IQ4_XS, GRIDS)
    for instance in s.instances
    if instance.startswith("product")
}


def source_of(format: BlockFormat) -> Source:
    """The source that has the kernels of a format."""
    found = _SOURCES.get(format.name)
    need(
        found is not None,
        f"{format.name} has no quantised products",
        needed="a quantised format",
        advice="use float_gemv",
    )
    return found
