"""Test data for block formats: raw rows and activations in five modes.

plain  usual scales
mid    any finite float16 scale incl. 0, -0, subnormal and negative; activation groups over many magnitudes, zeros, -0,
       codes exactly half-way
tiny   scales and activations so small that products and results are subnormal
edge   extreme codes, constant blocks, every activation code +-127
wild   magnitudes that overflow to Inf and NaN on the way
"""

import numpy as np

from strata.pack.formats import BlockFormat

MODES = ("plain", "mid", "tiny", "edge", "wild")

F16_FIELDS = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "MXFP4": (), "NVFP4": (), "IQ1_M": (), "F32": (), "F16": (), "BF16": (), "I8": (),
}  # fmt: skip
"""Offsets of float16 scales in a block; every other format has one at 0."""


def _f16_bits(rng: np.random.Generator, shape: tuple[int, int], mode: str) -> np.ndarray:
    """uint16 (rows, blocks); in mode tiny every second row has only 0 and the smallest subnormal."""
    if mode in ("plain", "edge"):
        return (rng.random(shape) * 0.01 + 0.001).astype(np.float16).view(np.uint16)
    bits = rng.integers(0, 65536, shape).astype(np.uint16)
    bits = np.where(bits & 0x7C00 == 0x7C00, bits & 0x83FF, bits).astype(np.uint16)
    bits[rng.random(shape) < 0.1] = 0
    bits[rng.random(shape) < 0.1] = 0x8000
    if mode == "tiny":
        bits[rng.random(shape) < 0.5] &= 0x87FF
        bits[1::2] &= 0x8001
    return bits


def _float_matrix(format: BlockFormat, rng: np.random.Generator, shape: tuple[int, int], mode: str) -> np.ndarray:
    values = rng.standard_normal(shape).astype(np.float32)
    low, high = {"plain": (0, 1), "edge": (0, 1), "mid": (-20, 15), "tiny": (-140, -100), "wild": (-120, 126)}[mode]
    if format.name == "F16":
        low, high = (-24, -14) if mode == "tiny" else (max(low, -24), min(high, 15))
    with np.errstate(all="ignore"):
        values = np.ldexp(values, rng.integers(low, high, shape)).astype(np.float32)
        if format.name == "F32":
            return values.view(np.uint8)
        if format.name == "F16":
            return values.astype(np.float16).view(np.uint8)
    return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)


def random_rows(format: BlockFormat, n: int, K: int, mode: str = "plain", seed: int = 0) -> np.ndarray:
    """uint8 (n, row_bytes): n rows of K values."""
    rng = np.random.default_rng(seed)
    if format.activation == "float":
        return _float_matrix(format, rng, (n, K), mode)
    blocks = K // format.block_values
    raw = rng.integers(0, 256, (n, blocks, format.block_bytes), dtype=np.uint8)
    if mode == "edge":
        extremes = np.array([0, 255, 0x80, 0x7F, 0x88, 0x08, 0xF0], np.uint8)
        raw = extremes[rng.integers(0, 7, raw.shape)]
        raw[::2] = extremes[rng.integers(0, 7, (*raw[::2].shape[:2], 1))]
    for at in F16_FIELDS.get(format.name, (0,)):
        raw[..., at : at + 2] = _f16_bits(rng, (n, blocks), mode)[..., None].view(np.uint8)
    if format.name == "MXFP4":
        ranges = {"plain": (110, 125), "edge": (120, 130), "mid": (90, 160), "tiny": (0, 130), "wild": (0, 256)}
        raw[..., 0] = rng.integers(*ranges[mode], (n, blocks))
    if format.name == "NVFP4" and mode == "plain":
        raw[..., :4] = rng.integers(40, 90, (n, blocks, 4))
    if format.name == "IQ1_M":
        bits = _f16_bits(rng, (n, blocks), mode)
        for k in range(4):
            nibble = (bits >> (4 * k)) & 15
            raw[..., 49 + 2 * k] = (raw[..., 49 + 2 * k] & 15) | (nibble << 4).astype(np.uint8)
    return raw.reshape(n, -1)


def random_activations(R: int, K: int, mode: str = "plain", seed: int = 0) -> np.ndarray:
    """float32 (R, K), all finite."""
    rng = np.random.default_rng(seed + 1)
    x = rng.integers(-(2**23), 2**23, (R, K)).astype(np.float32) * np.float32(2.0**-21)
    if mode == "edge":
        x = np.where(x < 0, -1, 1).astype(np.float32)
        x[:, : K // 2] = x[:, :1]
    if mode in ("mid", "tiny", "wild"):
        low, high = {"mid": (-40, 30), "tiny": (-150, -109), "wild": (-140, 120)}[mode]
        groups = x.reshape(R, -1, 32)
        groups[:] = np.ldexp(groups, rng.integers(low, high, (R, K // 32, 1)))
        x[rng.random((R, K)) < 0.05] = 0
        x[rng.random((R, K)) < 0.05] = -0.0
        special = [np.zeros(32), np.full(32, -0.0), np.full(32, 1e-41), np.full(32, 2.0**-110)]
        if mode == "wild":
            special.append(np.full(32, 3e38))
        halves = rng.integers(-254, 255, 32) * 0.5
        halves[0] = 127
        special.append(halves * (2.0**-116 if mode == "tiny" else 1))
        for g, values in enumerate(special, start=1):
            if g < groups.shape[1]:
                groups[:, g] = values
    return x


def bits(x: np.ndarray) -> np.ndarray:
    """uint32 patterns with every NaN mapped to one: payload and sign of a NaN differ between machines."""
    x = np.ascontiguousarray(x, np.float32)
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))
