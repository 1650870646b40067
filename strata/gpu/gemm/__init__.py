"""Products of many rows with matrices on tensor cores: what prefill uses where windows use `gemv` and `float_gemv`.

Quantised matrices are expanded into scratch, int8 codes with a float32 scale (and minimum) for every group of values,
and meet rows quantised as for windows. One output is, for the groups of its row in ascending order,

    acc = fma(exact integer dot, fl(weight scale * row scale), acc);  acc = fma(weight minimum, row sum, acc)

whatever the tile, the number of rows, the experts beside it and the device: only the order of float32 sums differs from
a window. Float matrices meet float32 rows as sums of bfloat16 parts (relative error of a term at most 2^-16).

    x = Activations.at(..)                                      # quantise(..) as for windows, any number of rows
    rows = Rows.at(memory, x, group_of(format))                 # memory: Rows.n_bytes(T, K, group)
    prepare(rows)                                               # once for each x and group
    gemm(format, address, N, rows, y, scratch)                  # scratch: scratch_bytes(format, N, K)

    order = Order.at(memory, n, E)                              # memory: Order.n_bytes(n, E)
    sort_entries(ids, order)                                    # once a layer
    grouped(format, place, F, rows, g, scratch, order, first, experts)     # the same for up; batches of experts
    grouped_packed(format, place, F, rows, g, order, first, experts)       # if takes_packed(format, K): no scratch
    swiglu(g, u, n, F, h, error, where, ids=ids, ..)            # experts_ends: as in windows
    grouped(down, place, D, Rows of h, out, scratch, order, first, experts)
    combine(out, ids, weights, ..)                              # experts_ends: as in windows

    parts = FloatRows.at(memory, T, K); split_rows(x, parts)    # x float32 rows
    float_gemm("BF16", address, N, parts, y, scratch)           # scratch: float_scratch_bytes(name, N, K), may be 0
"""

from __future__ import annotations

from strata.gpu.gemm.experts import Order, grouped, grouped_packed, sort_entries, takes_packed
from strata.gpu.gemm.floats import FloatRows, float_gemm, float_scratch_bytes, split_rows
from strata.gpu.gemm.quantised import Rows, expand, gemm, group_of, prepare, scratch_bytes

__all__ = [
    "FloatRows",
    "Order",
    "Rows",
    "expand",
    "float_gemm",
    "float_scratch_bytes",
    "gemm",
    "group_of",
    "grouped",
    "grouped_packed",
    "prepare",
    "scratch_bytes",
    "sort_entries",
    "split_rows",
    "takes_packed",
]
