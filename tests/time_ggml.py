"""Times kernels of the tier in force beside ggml's `vec_dot`, in turn, on one core: python -m tests.time_ggml LIBRARY

    --types Q4_K,Q3_K   --rows 1,4   --repeat 9   --mb 160

LIBRARY is a shared object with ggml's CPU functions (ggml_vec_dot_*, quantize_row_*, ggml_cpu_init): libggml-cpu.so of
a build for this machine, or the extension module of the package xllamacpp, which is built for AVX2. ggml is called by
address from compiled code, 16 matrix rows a tile, for every activation row in turn. Both results are compared: ggml
rounds activations to a scale of their own, so they differ by 1e-3 of the spread at most in 32-value blocks.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import numpy as np
from numba import njit

from strata.cpu.tiers import best_tier
from strata.kernel_speed import (
    COLUMNS,
    KernelBench,
    Product,
    activation_records,
    core_seconds,
    kernels_of,
    multiplying,
    reading,
)
from strata.pack.formats import FORMATS, BlockFormat, by_name

TILE_ROWS = 16
MOST_DIFFERENCE = 5e-3
RECORDS = {"q8_0": (32, 34), "q8_1": (32, 36), "q8_K": (256, 292)}
"""ggml's activations: values and bytes of a block."""

_VEC_DOT = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_size_t, ctypes.c_int,
)  # fmt: skip


def records_of(name: str) -> str:
    """ggml's activation format for a weight format."""
    if name in ("Q4_1", "Q5_1"):
        return "q8_1"
    return "q8_K" if name.endswith("_K") or (name.startswith("IQ") and name != "IQ4_NL") else "q8_0"


def product(library: ctypes.CDLL, name: str) -> Callable[..., None]:
    """ggml's product of a matrix and R activation rows."""
    own = name[0].lower() + name[1:] if name.endswith("_K") else name.lower()
    vec_dot = _VEC_DOT((f"ggml_vec_dot_{own}_{records_of(name)}", library))

    @njit(nogil=True)
    def rows(w, w_stride, n_rows, x, x_stride, R, K, out, out_stride):
        for first in range(0, n_rows, TILE_ROWS):
            for r in range(R):
                for i in range(first, min(first + TILE_ROWS, n_rows)):
                    vec_dot(K, out + r * out_stride + 4 * i, 0, w + i * w_stride, 0, x + r * x_stride, 0, 1)

    return rows


def quantised(library: ctypes.CDLL, name: str, x: np.ndarray) -> np.ndarray:
    """Float rows as ggml's activations, bytes."""
    records = records_of(name)
    values, n_bytes = RECORDS[records]
    quantise = getattr(library, f"quantize_row_{records}")
    quantise.argtypes, quantise.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    rows = np.zeros((len(x), x.shape[1] // values * n_bytes), np.uint8)
    for source, row in zip(x, rows, strict=True):
        quantise(source.ctypes.data, row.ctypes.data, x.shape[1])
    return rows


def compare(
    library: ctypes.CDLL, format: BlockFormat, R: int, repeat: int, area: np.ndarray, bench: KernelBench
) -> str:
    """One line of figures; `area` holds rows of the format from end to end."""
    K, row_bytes = COLUMNS, format.row_bytes(COLUMNS)
    n = area.size // row_bytes
    x = np.random.default_rng(R).standard_normal((R, K)).astype(np.float32)  # as activation_records
    ours, theirs = np.zeros((R, n), np.float32), np.zeros((R, n), np.float32)
    records = activation_records(format, K, R, bench.tier)
    kernels = kernels_of(format, bench.tier)
    job = multiplying([Product(area.ctypes.data, row_bytes, n, K, kernels, records, ours)], R)
    rows, activations = product(library, format.name), quantised(library, format.name, x)
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
        raise SystemExit(f"{format.name}: the results differ by {difference:.1e} of their spread")
    streams, own, other = np.array(
        [(core_seconds(read, pool), core_seconds(job, pool), theirs_s()) for _ in range(repeat)]
    ).T  # fmt: skip
    rate = [statistics.median(n * row_bytes / s / 1e9) for s in (own, other)]
    share = statistics.median((streams / read.n_bytes) / (own / job.n_bytes))
    ratio = other / own
    times = f"{statistics.median(ratio):.2f} times ({ratio.min():.2f} to {ratio.max():.2f})"
    return (
        f"{format.name:<8} rows {R}: {rate[0]:5.1f} GB/s, ggml {rate[1]:5.1f}, {times}, share of reading {share:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    quantised_names = ",".join(f.name for f in FORMATS.values() if f.activation.startswith("q8"))
    parser.add_argument("--types", default=quantised_names)
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--mb", type=int, default=160)
    options = parser.parse_args()
    library = ctypes.CDLL(options.library)
    library.ggml_cpu_init()
    with KernelBench(best_tier(), 1, options.mb << 20) as bench:
        for name in options.types.split(","):
            format = by_name(name)
            area = bench.fill(format)
            for R in map(int, options.rows.split(",")):
                print(compare(library, format, R, options.repeat, area, bench), flush=True)


if __name__ == "__main__":
    main()
