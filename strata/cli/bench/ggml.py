"""strata bench cpu-kernels --ggml: kernels of a tier beside ggml's `vec_dot`, in turn, on one core.

ggml comes as a shared object with its CPU functions (ggml_vec_dot_*, quantize_row_*, ggml_cpu_init): libggml-cpu.so of
a build for this machine, or the extension module of the package xllamacpp, which is built for AVX2. It is called by
address from compiled code, 16 matrix rows a tile, for every activation row in turn. Both results are compared: ggml
rounds activations to a scale of their own, so they differ by 1e-3 of the spread at most in 32-value blocks.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit

from strata.base.errors import BadArgument, FileError, StrataError, need
from strata.kernel_speed import KernelBench, Product, activation_records, core_seconds, kernels_of, multiplying, reading
from strata.pack.formats import BlockFormat

TILE_ROWS = 16
MOST_DIFFERENCE = 5e-3
RECORDS = {"q8_0": (32, 34), "q8_1": (32, 36), "q8_K": (256, 292)}
"""ggml's activations: values and bytes of a block."""

_VEC_DOT = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_size_t, ctypes.c_int,
)  # fmt: skip


def open_library(path: Path) -> ctypes.CDLL:
    """ggml's functions. FileError if the file is not there or has none."""
    try:
        library = ctypes.CDLL(str(path))
        library.ggml_cpu_init()
    except (OSError, AttributeError) as error:
        raise FileError(
            "ggml's functions cannot be loaded",
            found=str(error),
            needed="a shared object with ggml_vec_dot_* and ggml_cpu_init",
            advice="Take libggml-cpu.so of a build, or the extension module of xllamacpp.",
        ) from error
    return library


def records_of(name: str) -> str:
    """ggml's activation format for a weight format."""
    if name in ("Q4_1", "Q5_1"):
        return "q8_1"
    return "q8_K" if name.endswith("_K") or (name.startswith("IQ") and name != "IQ4_NL") else "q8_0"


def _product(library: ctypes.CDLL, name: str) -> Callable[..., None]:
    """ggml's product of a matrix and R activation rows."""
    own = name[0].lower() + name[1:] if name.endswith("_K") else name.lower()
    try:
        vec_dot = _VEC_DOT((f"ggml_vec_dot_{own}_{records_of(name)}", library))
    except AttributeError as error:
        raise BadArgument(f"this library of ggml has no product with {name}", found=str(error),
                          needed="one it has", advice="Leave the format out with --types.") from error  # fmt: skip

    @njit(nogil=True)
    def rows(w, w_stride, n_rows, x, x_stride, R, K, out, out_stride):
        for first in range(0, n_rows, TILE_ROWS):
            for r in range(R):
                for i in range(first, min(first + TILE_ROWS, n_rows)):
                    vec_dot(K, out + r * out_stride + 4 * i, 0, w + i * w_stride, 0, x + r * x_stride, 0, 1)

    return rows


def _quantised(library: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    """Float rows as ggml's activations, bytes."""
    records = records_of(name)
    values, n_bytes = RECORDS[records]
    quantise = getattr(library, f"quantize_row_{records}")
    quantise.argtypes, quantise.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    rows = np.zeros((len(x), x.shape[1] // values * n_bytes), np.uint8)
    for source, row in zip(x, rows, strict=True):
        quantise(source.ctypes.data, row.ctypes.data, x.shape[1])
    return rows


def compare(library: ctypes.CDLL, bench: KernelBench, format: BlockFormat, R: int, repeats: int) -> dict[str, Any]:
    """Rates of both on the area of `bench`, and the ratio of each repeat. StrataError if the results differ."""
    need(format.activation.startswith("q8"), f"ggml has no products with {format.name} to compare with",
         found=format.name, needed="a quantised format")  # fmt: skip
    area, K, row_bytes = bench.fill(format), bench.columns, format.row_bytes(bench.columns)
    n = area.size // row_bytes
    x = np.random.default_rng(R).standard_normal((R, K)).astype(np.float32)  # as activation_records
    ours, theirs = np.zeros((R, n), np.float32), np.zeros((R, n), np.float32)
    records, kernels = activation_records(format, K, R, bench.tier), kernels_of(format, bench.tier)
    job = multiplying([Product(area.ctypes.data, row_bytes, n, K, kernels, records, ours)], R)
    rows, activations = _product(library, format.name), _quantised(library, format.name, x)
    read, pool = reading(area), bench.one_thread

    def theirs_s() -> float:
        began = time.thread_time()
        rows(area.ctypes.data, row_bytes, n, activations.ctypes.data, activations.strides[0], R, K, theirs.ctypes.data,
             4 * n)  # fmt: skip
        return time.thread_time() - began

    theirs_s()
    job.run(pool)
    difference = float(np.abs(ours - theirs).max() / ours.std())
    if not difference < MOST_DIFFERENCE:
        raise StrataError(f"products with {format.name} differ from ggml's", found=f"{difference:.1e} of their spread",
                          needed=f"less than {MOST_DIFFERENCE:g}")  # fmt: skip
    turns = [(core_seconds(read, pool), core_seconds(job, pool), theirs_s()) for _ in range(repeats)]
    streams, own, other = np.array(turns).T
    ratio = other / own
    return {
        "type": format.name, "rows": R, "gbps": round(statistics.median(n * row_bytes / own / 1e9), 2),
        "ggml_gbps": round(statistics.median(n * row_bytes / other / 1e9), 3),
        "ratio": {"median": round(statistics.median(ratio), 3), "min": round(ratio.min(), 3),
                  "max": round(ratio.max(), 3)},
        "share": round(statistics.median((streams / read.n_bytes) / (own / job.n_bytes)), 3),
        "difference": difference,
    }  # fmt: skip


def line(found: dict[str, Any]) -> str:
    """Of `compare`, for people."""
    times = found["ratio"]
    return (
        f"{found['type']:<9}rows {found['rows']}: {found['gbps']:5.1f} GB/s, ggml {found['ggml_gbps']:5.1f}, "
        f"{times['median']:.2f} times ({times['min']:.2f} to {times['max']:.2f}), share of reading {found['share']:.2f}"
    )
