"""Integer weights of every quantised format, and the scales that go with them, read from raw blocks in plain numpy.

Each reader takes blocks uint8 (n, blocks, block_bytes) and returns `Weights`. The integer of a value times its scales
(minus or plus the minimum) is exactly the value that the format's dequantiser gives before rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strata.pack.formats import BlockFormat
from strata.pack.grids import CODEBOOK, E4M3_HALF, E8M0_HALF, GRID, SIGNS

f32 = np.float32


@dataclass(frozen=True)
class Weights:
    """What a row of blocks holds. n rows, nb blocks a row, B values a block.

    integers    int32 (n, nb, B), in value order
    scale       float32 (n, nb, parts): exact float32 scales; one, or one per equal part of the block
    sub_scales  int32 (n, nb, parts) integer scales of equal parts, folded into the integer sums; or None
    minima      int32 (n, nb, parts) integer minima of equal parts; or None
    min_scale   float32 (n, nb): scale of the minima, or the minimum itself where minima is None; or None
    """

    integers: np.ndarray
    scale: np.ndarray
    sub_scales: np.ndarray | None = None
    minima: np.ndarray | None = None
    min_scale: np.ndarray | None = None


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(f32)


def _words(blocks: np.ndarray, start: int, stop: int, dtype: type) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., start:stop]).view(dtype)


def _bits(values: np.ndarray, shifts: object, mask: int) -> np.ndarray:
    """int32 (..., len(shifts)): fields of every value."""
    return (values[..., None].astype(np.int64) >> np.asarray(shifts)).astype(np.int32) & mask


def _nibble_halves(q: np.ndarray) -> np.ndarray:
    """Low nibbles of all bytes, then high nibbles."""
    return np.concatenate([q & 15, q >> 4], -1).astype(np.int32)


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:2], -1)


# ---- blocks of 32 and 64 values ----------------------------------------------------------------------------------


def _q4_0(b: np.ndarray) -> Weights:
    return Weights(_nibble_halves(b[..., 2:]) - 8, _half(b, 0)[..., None])


def _q4_1(b: np.ndarray) -> Weights:
    return Weights(_nibble_halves(b[..., 4:]), _half(b, 0)[..., None], min_scale=_half(b, 2))


def _fifth_bits(b: np.ndarray, at: int) -> np.ndarray:
    return _bits(_words(b, at, at + 4, np.uint32)[..., 0], range(32), 1) << 4


def _q5_0(b: np.ndarray) -> Weights:
    return Weights((_nibble_halves(b[..., 6:]) | _fifth_bits(b, 2)) - 16, _half(b, 0)[..., None])


def _q5_1(b: np.ndarray) -> Weights:
    codes = _nibble_halves(b[..., 8:]) | _fifth_bits(b, 4)
    return Weights(codes, _half(b, 0)[..., None], min_scale=_half(b, 2))


def _q8_0(b: np.ndarray) -> Weights:
    return Weights(_words(b, 2, 34, np.int8).astype(np.int32), _half(b, 0)[..., None])


def _iq4_nl(b: np.ndarray) -> Weights:
    return Weights(CODEBOOK["IQ4_NL"].astype(np.int32)[_nibble_halves(b[..., 2:])], _half(b, 0)[..., None])


def _mxfp4(b: np.ndarray) -> Weights:
    return Weights(CODEBOOK["MXFP4"].astype(np.int32)[_nibble_halves(b[..., 1:])], E8M0_HALF[b[..., :1]])


def _nvfp4(b: np.ndarray) -> Weights:
    codes = _nibble_halves(b[..., 4:].reshape(*b.shape[:2], 4, 8))
    return Weights(_flat(CODEBOOK["NVFP4"].astype(np.int32)[codes]), E4M3_HALF[b[..., :4]])


def _q2_0(b: np.ndarray) -> Weights:
    return Weights(_flat(_bits(b[..., 2:], (0, 2, 4, 6), 3)) - 1, _half(b, 0)[..., None])


# ---- super-blocks of 256 values with integer sub-scales ----------------------------------------------------------


def _planes(q: np.ndarray, shifts: object, mask: int, width: int) -> np.ndarray:
    """Fields of byte runs of `width`: all low fields of a run first, then the next fields."""
    runs = q.reshape(*q.shape[:2], -1, 1, width)
    return (runs >> np.asarray(shifts, np.uint8)[:, None]).astype(np.int32) & mask


def _six_bit_scales(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes of Q4_K and Q5_K -> eight scales and eight minima of 6 bits."""
    s = s.astype(np.int32)
    a, b, c = s[..., :4], s[..., 4:8], s[..., 8:]
    scales = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], -1)
    minima = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], -1)
    return scales, minima


def _q2_k(b: np.ndarray) -> Weights:
    s = b[..., :16].astype(np.int32)
    codes = _flat(_planes(b[..., 16:80], (0, 2, 4, 6), 3, 32))
    return Weights(codes, _half(b, 80)[..., None], s & 15, s >> 4, _half(b, 82))


def _q3_k(b: np.ndarray) -> Weights:
    high = _planes(b[..., :32], range(8), 1, 32)
    codes = _flat(_planes(b[..., 32:96], (0, 2, 4, 6), 3, 32)) + 4 * _flat(high) - 4
    s = b[..., 96:108].astype(np.int32)
    low = np.concatenate([s[..., :8] & 15, s[..., :8] >> 4], -1)
    top = np.concatenate([(s[..., 8:] >> k) & 3 for k in (0, 2, 4, 6)], -1)
    return Weights(codes, _half(b, 108)[..., None], (low | top << 4) - 32)


def _q4_k(b: np.ndarray) -> Weights:
    scales, minima = _six_bit_scales(b[..., 4:16])
    codes = _flat(_planes(b[..., 16:], (0, 4), 15, 32))
    return Weights(codes, _half(b, 0)[..., None], scales, minima, _half(b, 2))


def _q5_k(b: np.ndarray) -> Weights:
    scales, minima = _six_bit_scales(b[..., 4:16])
    codes = _flat(_planes(b[..., 48:], (0, 4), 15, 32)) | _flat(_planes(b[..., 16:48], range(8), 1, 32)) << 4
    return Weights(codes, _half(b, 0)[..., None], scales, minima, _half(b, 2))


def _q6_k(b: np.ndarray) -> Weights:
    low = _flat(_planes(b[..., :128], (0, 4), 15, 64))
    high = _flat(_planes(b[..., 128:192], (0, 2, 4, 6), 3, 32))
    scales = _words(b, 192, 208, np.int8).astype(np.int32)
    return Weights((low | high << 4) - 32, _half(b, 208)[..., None], scales)


def _iq4_xs(b: np.ndarray) -> Weights:
    low = _flat(_bits(b[..., 4:8], (0, 4), 15))
    high = _bits(_words(b, 2, 4, np.uint16)[..., 0], range(0, 16, 2), 3)
    codes = _nibble_halves(b[..., 8:].reshape(*b.shape[:2], 8, 16))
    return Weights(_flat(CODEBOOK["IQ4_XS"].astype(np.int32)[codes]), _half(b, 0)[..., None], (low | high << 4) - 32)


# ---- grid formats ------------------------------------------------------------------------------------------------


def _signed(grid: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """grid (n, nb, indices, width); signs uint8 (n, nb, 32): one bit a value."""
    negative = _flat(_bits(signs, range(8), 1))
    values = _flat(grid.astype(np.int32))
    return np.where(negative != 0, -values, values)


def _nibbles(s: np.ndarray) -> np.ndarray:
    return _flat(_bits(s, (0, 4), 15))


def _part_scale(d: np.ndarray, s: np.ndarray, offset: float, factor: float) -> np.ndarray:
    """(s + offset) * (d * factor): exact, as d has 11 bits and s + offset at most 5."""
    with np.errstate(all="ignore"):
        return (s.astype(f32) + f32(offset)) * (d * f32(factor))[..., None]


def _iq2_xxs(b: np.ndarray) -> Weights:
    pairs = _words(b, 2, 66, np.uint32).reshape(*b.shape[:2], 8, 2)
    index = np.ascontiguousarray(pairs[..., 0]).view(np.uint8)
    signs = SIGNS[_flat(_bits(pairs[..., 1], (0, 7, 14, 21), 127))]
    scale = _part_scale(_half(b, 0), pairs[..., 1] >> 28, 0.5, 0.25)
    return Weights(_signed(GRID["IQ2_XXS"][index], signs), np.repeat(scale, 2, -1))


def _iq2_xs(b: np.ndarray) -> Weights:
    q = _words(b, 2, 66, np.uint16)
    scale = _part_scale(_half(b, 0), _nibbles(b[..., 66:]), 0.5, 0.25)
    return Weights(_signed(GRID["IQ2_XS"][q & 511], SIGNS[q >> 9]), scale)


def _iq2_s(b: np.ndarray) -> Weights:
    index = b[..., 2:34].astype(np.int32) | _flat(_bits(b[..., 66:74], (0, 2, 4, 6), 3)) << 8
    scale = _part_scale(_half(b, 0), _nibbles(b[..., 74:]), 0.5, 0.25)
    return Weights(_signed(GRID["IQ2_S"][index], b[..., 34:66]), scale)


def _iq3_xxs(b: np.ndarray) -> Weights:
    aux = _words(b, 66, 98, np.uint32)
    signs = SIGNS[_flat(_bits(aux, (0, 7, 14, 21), 127))]
    scale = _part_scale(_half(b, 0), aux >> 28, 0.5, 0.5)
    return Weights(_signed(GRID["IQ3_XXS"][b[..., 2:66]], signs), np.repeat(scale, 2, -1))


def _iq3_s(b: np.ndarray) -> Weights:
    index = b[..., 2:66].astype(np.int32) | _flat(_bits(b[..., 66:74], range(8), 1)) << 8
    scale = _part_scale(_half(b, 0), 2 * _nibbles(b[..., 106:]), 1, 1)
    return Weights(_signed(GRID["IQ3_S"][index], b[..., 74:106]), np.repeat(scale, 2, -1))


def _iq1_s(b: np.ndarray) -> Weights:
    h = _words(b, 34, 50, np.uint16)
    index = b[..., 2:34].astype(np.int32) | _flat(_bits(h, (0, 3, 6, 9), 7)) << 8
    delta = np.where(h & 0x8000, -1, 1)[..., None]
    values = 8 * GRID["IQ1_S"][index].astype(np.int32).reshape(*b.shape[:2], 8, 32) + delta
    scale = _part_scale(_half(b, 0), 2 * (h >> 12 & 7), 1, 0.125)
    return Weights(_flat(values), np.repeat(scale, 2, -1))


def _iq1_m(b: np.ndarray) -> Weights:
    h = _nibbles(b[..., 32:48])
    index = b[..., :32].astype(np.int32) | (h & 7) << 8
    delta = np.where(h & 8, -1, 1)[..., None]
    values = 8 * GRID["IQ1_M"][index].astype(np.int32) + delta
    s = _words(b, 48, 56, np.uint16)
    bits = (s[..., 0] >> 12) | (s[..., 1] >> 8 & 0xF0) | (s[..., 2] >> 4 & 0xF00) | (s[..., 3] & 0xF000)
    with np.errstate(all="ignore"):
        d = bits.astype(np.uint16).view(np.float16).astype(f32)
    return Weights(_flat(values), _part_scale(d, 2 * _flat(_bits(s, (0, 3, 6, 9), 7)), 1, 0.125))


_READERS: dict[str, Callable[[np.ndarray], Weights]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "IQ4_NL": _iq4_nl, "MXFP4": _mxfp4,
    "NVFP4": _nvfp4, "Q2_0": _q2_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s, "IQ1_M": _iq1_m,
}  # fmt: skip


def read_weights(format: BlockFormat, raw: np.ndarray) -> Weights:
    """raw uint8 (n, row_bytes) of a quantised format -> Weights."""
    return _READERS[format.name](raw.reshape(len(raw), -1, format.block_bytes))
