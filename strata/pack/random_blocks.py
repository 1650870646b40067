"""Random weights in every block format: any bytes as codes, scales set so that values have a wanted spread and mean 0.

A mean would add up over a row of thousands of values and drown what differs between inputs. So the scale's sign is
random where the format has one, and formats with minima get the minimum that centres their codes.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from strata.base.errors import need
from strata.pack.formats import BlockFormat

SCALE_AT = {"Q3_K": 108, "Q6_K": 208}
"""Where a block holds its float16 scale, if not at 0."""

CENTRE = {"Q4_1": -7.5, "Q5_1": -15.5, "Q4_K": 7.5, "Q5_K": 15.5, "Q2_K": 1.5}
"""Second scale as a multiple of the first that makes the mean of random codes 0."""

_CODE = np.array([0] * 6 + [1] * 6 + [2] * 2 + [3] * 2, np.uint8)
_TWO_CODES = (_CODE[:, None] | _CODE << 2).reshape(-1)
"""Two 2-bit codes of Q2_0 (value + 1) for each byte; their values have mean 0."""


def random_rows(format: BlockFormat, rows: int, values: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """uint8 (rows, row_bytes): weights of mean 0 and, but for rounding of the scale, standard deviation `std`."""
    need(0 < std < 100, "the spread of random weights is out of range", found=std, needed="above 0, below 100")
    if format.activation == "float":
        return _floats(format, (rng.standard_normal((rows, values), np.float32) * np.float32(std)))
    return _blocks(format, rows * values // format.block_values, std / _unit(format), rng).reshape(
        rows, format.row_bytes(values)
    )


def _floats(format: BlockFormat, x: np.ndarray) -> np.ndarray:
    if format.name == "F32":
        return x.view(np.uint8)
    if format.name == "F16":
        return x.astype(np.float16).view(np.uint8)
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


@cache
def _unit(format: BlockFormat) -> float:
    """Standard deviation of values whose scale is 1."""
    raw = _blocks(format, 1 << 13, 1.0, np.random.default_rng(1))
    return float(format.dequantise(raw).std(dtype=np.float64))


def _blocks(format: BlockFormat, n: int, scale: float, rng: np.random.Generator) -> np.ndarray:
    n_bytes = n * format.block_bytes
    words = rng.bit_generator.random_raw(-(-n_bytes // 8))
    raw = words.view(np.uint8)[:n_bytes].reshape(n, format.block_bytes)
    name = format.name
    if name == "MXFP4":
        raw[:, 0] = round(127 + np.log2(scale))
        return raw
    if name == "NVFP4":
        raw[:, :4] = _e4m3(scale)
        return raw
    if name == "IQ1_M":  # four nibbles, the top ones of bytes 49, 51, 53 and 55, lowest first
        bits = int(np.float16(scale).view(np.uint16))
        for k in range(4):
            raw[:, 49 + 2 * k] = (raw[:, 49 + 2 * k] & 15) | (((bits >> 4 * k) & 15) << 4)
        return raw
    # The top bit of a random byte is the sign, taken before the scale is written over it.
    at = SCALE_AT.get(name, 0)
    d = np.where(raw[:, at] & 128, scale, -scale).astype(np.float16)
    if name in ("Q4_K", "Q5_K"):  # the scale of each sub-block equals its minimum
        raw[:, 8:12] = raw[:, 4:8]
        raw[:, 12:16] = (raw[:, 12:16] & 15) * 17
    if name == "Q2_K":
        raw[:, :16] = (raw[:, :16] & 15) * 17
        at = 80
    if name == "Q2_0":  # its four codes are not symmetric: -1 and 0 are drawn three times as often as 1 and 2
        more = rng.bit_generator.random_raw(2 * n).view(np.uint8).reshape(n, 16)
        raw[:, 2:] = _TWO_CODES[raw[:, 2:]] | _TWO_CODES[more] << 4
    raw[:, at : at + 2] = d[:, None].view(np.uint8)
    if name in CENTRE:
        second = (d.astype(np.float32) * np.float32(CENTRE[name])).astype(np.float16)
        raw[:, at + 2 : at + 4] = second[:, None].view(np.uint8)
    return raw


def _e4m3(scale: float) -> int:
    """The unsigned E4M3 byte nearest to `scale`."""
    codes = np.arange(1, 0x7F)
    exponent, fraction = codes >> 3, (codes & 7) / 8
    values = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - 7), fraction * 2.0**-6)
    return int(codes[np.argmin(np.abs(values - scale))])
