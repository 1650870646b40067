"""Block formats of GGUF tensors: ids, sizes, activation format, lane rule, dequantiser.

The lane rule of a format says how a matrix product with it is summed (docs/arithmetic.md): which values meet in one
exact integer, which float32 lane takes it, and which exact float32 scale goes with it. Every tier keeps to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType, quants

from strata.base.errors import BadArgument, ModelError


@dataclass(frozen=True)
class BlockFormat:
    """One ggml tensor type.

    name          ggml's name, as "IQ3_XXS"
    ggml_id       the number in the file
    block_values  values of one block along a row
    block_bytes   bytes of one block
    activation    what the other operand of a product is: "q8x32" and "q8x256" int8 codes with a float32 scale per 32 or
                  256 values, "float" the float32 row itself, "none" where the format has no products
    lane_rule     how a product is summed, in words
    """

    name: str
    ggml_id: int
    block_values: int
    block_bytes: int
    activation: str
    lane_rule: str

    @property
    def group(self) -> int:
        """Values that share one activation scale; 0 without quantised products."""
        return {"q8x32": 32, "q8x256": 256}.get(self.activation, 0)

    def row_bytes(self, values: int) -> int:
        """Bytes of a row of `values` values; ModelError unless that is a whole number of blocks."""
        if values % self.block_values:
            raise ModelError(
                f"a row of {values} values cannot be stored as {self.name}",
                found=f"{values} values",
                needed=f"a multiple of the block of {self.block_values} values",
            )
        return values // self.block_values * self.block_bytes

    def dequantise(self, raw: np.ndarray) -> np.ndarray:
        """raw uint8 (..., row_bytes), whole blocks -> float32 (..., values)."""
        raw = np.ascontiguousarray(raw)
        if raw.dtype != np.uint8 or raw.ndim == 0 or raw.shape[-1] % self.block_bytes:
            raise BadArgument(
                f"not rows of {self.name} blocks",
                found=f"{raw.dtype} {raw.shape}",
                needed=f"uint8 with a multiple of {self.block_bytes} bytes on the last axis",
            )
        shape = (*raw.shape[:-1], raw.shape[-1] // self.block_bytes * self.block_values)
        if raw.size == 0:
            return np.zeros(shape, np.float32)
        own = _OWN_DEQUANTISERS.get(self.name)
        if own is not None:
            return own(raw.reshape(-1, self.block_bytes)).reshape(shape)
        with np.errstate(all="ignore"):  # scales may be any bits; Inf and NaN are the caller's to judge
            return quants.dequantize(raw.reshape(-1, raw.shape[-1]), GGMLQuantizationType(self.ggml_id)).reshape(shape)


def _q2_0(blocks: np.ndarray) -> np.ndarray:
    """f16 d, then 16 bytes of four 2-bit codes each, low bits first; value = (code - 1) d."""
    d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    codes = (blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    with np.errstate(all="ignore"):
        return d * (codes.reshape(len(blocks), 64).astype(np.float32) - np.float32(1))


def _i8(blocks: np.ndarray) -> np.ndarray:
    return blocks.view(np.int8).astype(np.float32)


_OWN_DEQUANTISERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"Q2_0": _q2_0, "I8": _i8}

_FLOAT = "lane = index mod 256 (for shorter rows the largest power of two <= K), ascending fma, halving tree"
_HALVES = (
    "block b feeds lanes 4(b mod 4)+j, j = 0..3: values 4j..4j+3 and 16+4j..16+4j+3 of the block, as integers {what}; "
    "weight scale {scale}"
)
_PLUS_MIN = (
    "; 4 extra lanes, block b to lane b mod 4: the sum of its 32 activation codes, weight scale f16 m, added at the end"
)
_K4 = (
    "lane 8h+g, g = 0..7: sum over sub-blocks s of 32 ({{0,1,4,5}} for h = 0, {{2,3,6,7}} for h = 1) of scale_s times "
    "values 32s+4g..+3 ({what}); weight scale f16 d; 4 extra lanes j: min_s * (sum of codes of s) over s = 2j, 2j+1, "
    "weight scale f16 dmin, subtracted at the end"
)
_K2 = (
    "lane 8h+g, g = 0..7, h = 0, 1: sum over i = 0..3 of scale_(8h+2i+g/4) times values 128h+32i+4g..+3 ({what}); "
    "weight scale f16 d"
)
_GRID = "lane l = 0..15: values 16l..16l+15 ({what}); weight scale {scale}"
_S16 = "d(s+1/2)/4, s the scale of l"

_ALL = (
    BlockFormat("F32", 0, 1, 4, "float", _FLOAT),
    BlockFormat("F16", 1, 1, 2, "float", _FLOAT),
    BlockFormat("BF16", 30, 1, 2, "float", _FLOAT),
    BlockFormat("Q4_0", 2, 32, 18, "q8x32", _HALVES.format(what="code - 8", scale="f16 d")),
    BlockFormat("Q4_1", 3, 32, 20, "q8x32", _HALVES.format(what="code", scale="f16 d") + _PLUS_MIN),
    BlockFormat("Q5_0", 6, 32, 22, "q8x32", _HALVES.format(what="code - 16", scale="f16 d")),
    BlockFormat("Q5_1", 7, 32, 24, "q8x32", _HALVES.format(what="code", scale="f16 d") + _PLUS_MIN),
    BlockFormat(
        "Q8_0",
        8,
        32,
        34,
        "q8x32",
        "block b feeds lanes 8(b mod 2)+j, j = 0..7: values 4j..4j+3 of the block; weight scale f16 d",
    ),
    BlockFormat(
        "Q2_K",
        10,
        256,
        84,
        "q8x256",
        _K2.format(what="code") + "; 4 extra lanes j: min_s * (sum of the 16 codes of s) over s = 2j, 2j+1, 8+2j, "
        "8+2j+1, weight scale f16 dmin, subtracted at the end",
    ),
    BlockFormat("Q3_K", 11, 256, 110, "q8x256", _K2.format(what="code - 4, scale - 32")),
    BlockFormat("Q4_K", 12, 256, 144, "q8x256", _K4.format(what="code")),
    BlockFormat("Q5_K", 13, 256, 176, "q8x256", _K4.format(what="code")),
    BlockFormat(
        "Q6_K",
        14,
        256,
        210,
        "q8x256",
        "lane l = 0..15: sum over i = 0..3 of scale_(4i+l/4) times values 64i+4l..+3 (code - 32); weight scale f16 d",
    ),
    BlockFormat(
        "IQ2_XXS",
        16,
        256,
        66,
        "q8x256",
        _GRID.format(what="signed grid", scale="d(s+1/2)/4, s the scale of the 32 values of l/2"),
    ),
    BlockFormat("IQ2_XS", 17, 256, 74, "q8x256", _GRID.format(what="signed grid", scale=_S16)),
    BlockFormat("IQ2_S", 22, 256, 82, "q8x256", _GRID.format(what="signed grid", scale=_S16)),
    BlockFormat(
        "IQ3_XXS",
        18,
        256,
        98,
        "q8x256",
        _GRID.format(what="signed grid", scale="d(s+1/2)/2, s the scale of the 32 values of l/2"),
    ),
    BlockFormat(
        "IQ3_S",
        21,
        256,
        110,
        "q8x256",
        _GRID.format(what="signed grid", scale="d(2s+1), s the scale of the 32 values of l/2"),
    ),
    BlockFormat(
        "IQ1_S",
        19,
        256,
        50,
        "q8x256",
        _GRID.format(what="8 grid + 1 or - 1", scale="(d/8)(2s+1), s the scale of the 32 values of l/2"),
    ),
    BlockFormat(
        "IQ1_M",
        29,
        256,
        56,
        "q8x256",
        _GRID.format(what="8 grid + 1 or - 1", scale="(d/8)(2s+1), s the scale of l"),
    ),
    BlockFormat("IQ4_NL", 20, 32, 18, "q8x32", _HALVES.format(what="codebook integer", scale="f16 d")),
    BlockFormat(
        "IQ4_XS",
        23,
        256,
        136,
        "q8x256",
        "lane 4i+j, i, j = 0..3: sum over sub-blocks s = i, i+4 of (scale_s - 32) times values 32s+4j..+3 and "
        "32s+16+4j..+3 (codebook integer); weight scale f16 d",
    ),
    BlockFormat("MXFP4", 39, 32, 17, "q8x32", _HALVES.format(what="doubled E2M1", scale="2^(e-128)")),
    BlockFormat(
        "NVFP4",
        40,
        64,
        36,
        "q8x32",
        "block b feeds lanes 8(b mod 2)+2s+j, s = 0..3, j = 0, 1: values 16s+4j..+3 and 16s+8+4j..+3 of the block "
        "(doubled E2M1); weight scale half the E4M3 scale of s; activation scale of chunk 2b+s/2",
    ),
    BlockFormat(
        "Q2_0",
        42,
        64,
        18,
        "q8x32",
        "block b feeds lanes 4(b mod 4)+j, j = 0..3: values 16j..16j+15 of the block (code - 1); weight scale f16 d; "
        "activation scale of chunk 2b+j/2",
    ),
    BlockFormat("I8", 24, 1, 1, "none", "no products"),
)

FORMATS: dict[int, BlockFormat] = {f.ggml_id: f for f in _ALL}
"""Every format strata reads, by ggml id."""

_BY_NAME = {f.name: f for f in _ALL}


def by_name(name: str) -> BlockFormat:
    """The format called `name`, as "Q4_K"; BadArgument otherwise."""
    found = _BY_NAME.get(name)
    if found is None:
        needed = "one of " + ", ".join(sorted(_BY_NAME))
        raise BadArgument(f"no block format is called {name!r}", found=repr(name), needed=needed)
    return found


def format_of(ggml_id: int, what: str = "") -> BlockFormat:
    """The format with this id; ModelError, naming the tensor `what`, where strata cannot read it."""
    found = FORMATS.get(ggml_id)
    if found is None:
        raise ModelError(
            f"tensor type {ggml_id} is not supported" + (f" ({what})" if what else ""),
            found=f"ggml type {ggml_id}",
            needed="one of " + ", ".join(f"{f.name} ({f.ggml_id})" for f in _ALL),
            advice="Take a release of the model in these types; if this file should be one, download it again.",
        )
    return found
