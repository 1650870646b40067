"""Wide products of float32 rows with BF16, F16 and F32 matrices, as sums of bfloat16 parts on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

from strata.base.errors import need
from strata.gpu.float_gemv import KINDS
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer

SOURCE = Source("gemm/floats.cu", ("split_weights", "split_rows", "wide_float<1>", "wide_float<2>"))
TILE_ROWS, TILE_WEIGHTS = 128, 64
"""Of a block."""


def _aligned(n: int) -> int:
    return -(-n // 256) * 256


@dataclass(frozen=True)
class FloatRows:
    """T rows of K values as two bfloat16 parts, in pairs of rows: addresses of the high parts and of the low ones."""

    T: int
    K: int
    high: int
    low: int

    @staticmethod
    def n_bytes(T: int, K: int) -> int:
        return 2 * _aligned(4 * -(-T // 2) * K)

    @classmethod
    def at(cls, address: int, T: int, K: int) -> FloatRows:
        """In n_bytes(T, K) bytes at `address`; K is a multiple of 8."""
        need(T > 0 and K > 0 and K % 8 == 0, "float rows", found=(T, K), needed="rows of a multiple of 8 values")
        need(address % 256 == 0, "address of float rows", found=address, needed="a multiple of 256")
        return cls(T, K, address, address + _aligned(4 * -(-T // 2) * K))


def split_rows(x: int, out: FloatRows) -> list[Launch]:
    """Float32 rows (T, K) at address x, 16-byte aligned, into `out`. Once for all products with x."""
    need(x % 16 == 0, "address of float rows", found=x, needed="a multiple of 16")
    args = (pointer(x), i32(out.T), i32(out.K), pointer(out.high), pointer(out.low))
    return [launch(SOURCE, "split_rows", -(-(-(-out.T // 2) * out.K) // 1024), 256, *args)]


def float_scratch_bytes(format_name: str, rows: int, K: int) -> int:
    """Bytes of scratch that `float_gemm` needs, 256-byte aligned: 0 for BF16."""
    return 0 if format_name == "BF16" else 2 * _aligned(2 * rows * K)


def float_gemm(
    format_name: str, weights: int, rows: int, x: FloatRows, y: int, scratch: int = 0, y_stride: int = 0
) -> list[Launch]:
    """y (x.T, rows) float32, y_stride values from row to row (0: rows) = a matrix (rows, K) at `weights` times x.

    format_name  BF16, F16 or F32, as in the file, 16-byte aligned
    scratch      float_scratch_bytes(..) bytes, free again afterwards
    Errors of a term are at most 2^-16 of it, of a sum those of float32. BadArgument if something does not fit.
    """
    need(format_name in KINDS, "a float matrix", found=format_name, needed=" or ".join(KINDS))
    need(weights % 16 == 0 and y != 0 and rows > 0, "a float product", found=(weights, y, rows))
    need(scratch != 0 or format_name == "BF16", f"scratch of a product with {format_name}")
    out: list[Launch] = []
    high, low, parts = weights, 0, 1
    if format_name != "BF16":
        high, low, parts = scratch, scratch + _aligned(2 * rows * x.K), 2
        n = rows * x.K
        split = (pointer(weights), i32(KINDS[format_name]), i64(n // 4), pointer(high), pointer(low))
        out.append(launch(SOURCE, "split_weights", -(-n // 1024), 256, *split))
    args = (pointer(high), pointer(low), pointer(x.high), pointer(x.low), i32(x.K), i32(x.T), i32(rows), pointer(y),
            i64(y_stride or rows))  # fmt: skip
    grid = (-(-x.T // TILE_ROWS), -(-rows // TILE_WEIGHTS))
    shared_bytes = (4 - parts) * 64 * (2 * TILE_ROWS + parts * TILE_WEIGHTS)  # stages of 64 bytes of every row
    return [*out, launch(SOURCE, f"wide_float<{parts}>", grid, 256, *args, shared_bytes=shared_bytes)]
