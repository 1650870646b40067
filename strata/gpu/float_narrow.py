"""Products of many float32 rows with float matrices of one to four rows, where tiles would be nearly empty."""

from __future__ import annotations

from strata.base.errors import need
from strata.gpu.float_gemv import KINDS
from strata.gpu.launch import Launch, Source, i32, launch, pointer

MOST_ROWS = 4
SOURCE = Source("float_narrow.cu", tuple(f"float_narrow<{n}>" for n in range(1, MOST_ROWS + 1)))


def float_narrow(format_name: str, weights: int, rows: int, x: int, T: int, K: int, y: int) -> list[Launch]:
    """y (T, rows) float32 = a matrix (rows, K) at `weights` times float32 x (T, K); addresses, 16-byte aligned."""
    need(format_name in KINDS and 0 < rows <= MOST_ROWS, "a narrow float product", found=(format_name, rows),
         needed=f"a float matrix of up to {MOST_ROWS} rows")  # fmt: skip
    need(K % 8 == 0 and x % 16 == 0 and weights % 16 == 0, "rows of a narrow float product", found=K,
         needed="a multiple of 8 values, 16-byte aligned")  # fmt: skip
    args = (pointer(x), pointer(weights), i32(KINDS[format_name]), pointer(y), i32(T), i32(K))
    return [launch(SOURCE, f"float_narrow<{rows}>", -(-T // 8), 256, *args)]
