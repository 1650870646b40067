"""Facts about the formats of 32 and 64 values that the tiers 512 and 256 share.

All of them meet their activations in the same way: a step holds 16 lanes; the codes of a step are planes of 64 bytes,
byte 4l..4l+3 of every plane belongs to lane l, and the record holds the activation codes in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.cpu.simd import Simd, Value, f32, i8, i16, i32
from strata.cpu.tiers import target_features
from strata.pack.formats import by_name
from strata.pack.grids import CODEBOOK

E2M1_BIAS = 16
"""Added to the doubled E2M1 values (-12..12) so that they are unsigned."""

NL_BIAS = 128
"""The same for the codebook of IQ4_NL (-127..113)."""


@dataclass(frozen=True)
class Small:
    """A format of 32 or 64 values a block.

    codes    offset of the packed codes in a block; they are `code_bytes` long
    scale    "half" float16 at 0, "e8m0" or "e4m3": a byte, or four
    planes   "nibbles", "fives" (nibbles and a fifth bit at `fifth`), "table" (nibbles into `table`), "twos"
    bias     what the unsigned weights are too large by; the record holds -bias times the sums of the codes
    minimum  offset of a float16 minimum, or 0
    """

    name: str
    codes: int
    code_bytes: int
    planes: str
    bias: int
    scale: str = "half"
    table: tuple[int, ...] = ()
    fifth: int = 0
    minimum: int = 0

    @property
    def block_bytes(self) -> int:
        return by_name(self.name).block_bytes

    @property
    def block_values(self) -> int:
        return by_name(self.name).block_values

    @property
    def blocks(self) -> int:
        """Blocks of a step: 16 lanes, 64 bytes of packed codes."""
        return 64 // self.code_bytes

    @property
    def n_planes(self) -> int:
        return self.blocks * self.block_values // 64

    @property
    def values(self) -> int:
        return self.blocks * self.block_values


def _table(name: str, bias: int) -> tuple[int, ...]:
    return tuple(int(v) + bias for v in CODEBOOK[name])


SMALL: dict[str, Small] = {
    f.name: f
    for f in (
        Small("Q4_0", 2, 16, "nibbles", 8),
        Small("Q4_1", 4, 16, "nibbles", 0, minimum=2),
        Small("Q5_0", 6, 16, "fives", 16, fifth=2),
        Small("Q5_1", 8, 16, "fives", 0, fifth=4, minimum=2),
        Small("IQ4_NL", 2, 16, "table", NL_BIAS, table=_table("IQ4_NL", NL_BIAS)),
        Small("MXFP4", 1, 16, "table", E2M1_BIAS, "e8m0", _table("MXFP4", E2M1_BIAS)),
        Small("NVFP4", 4, 32, "table", E2M1_BIAS, "e4m3", _table("NVFP4", E2M1_BIAS)),
        Small("Q2_0", 2, 16, "twos", 1),
    )
}
"""Every format of the family but Q8_0, whose codes need no unpacking."""


def e8m0_scales(s: Simd, top: Value) -> Value:
    """2^(e - 128) from words that hold e in their top byte and 0 below.

    From bits: (e - 1) << 23 for e >= 2, else 0x00200000 << e. The first is the larger of the two from e = 2 on, if the
    second is written as (e << 21) + 0x00200000.
    """
    n = top.type.count
    normal = s.b.sub(s.shr(top, 1), s.splat(i32, n, 0x00800000))
    small = s.b.add(s.shr(top, 3), s.splat(i32, n, 0x00200000))
    return s.cast(s.smax(normal, small), f32, n)


def e4m3_scales(s: Simd, top: Value) -> Value:
    """Half the value of unsigned E4M3, from 16-bit words that hold the code in their top byte and 0 below.

    The seven bits are the middle of a float16 that is 2^-7 times the value wanted, subnormal numbers included.
    """
    n = top.type.count
    halves = s.and_(s.shr(top, 1), 0x3F80)
    halves = s.b.select(s.b.icmp_unsigned("==", top, s.splat(i16, n, 0x7F00)), s.zero(i16, n), halves)
    return s.b.fmul(s.widen_half(halves), s.splat(f32, n, 128.0))


def twos(s: Simd, packed: Value) -> list[Value]:
    """Four planes of 2-bit codes, low bits first.

    A product of bit matrices, where there are any, shifts and masks at once: the kernel of one row is at the limit of
    its instructions.
    """
    planes = [s.and_(packed, 3)]
    for k in range(1, 4):
        if "gfni" in target_features():
            rows = [0] * 6 + [_signed(1 << 2 * k + i) for i in (1, 0)]  # of the matrix: which bit becomes bit 7, 6, ..
            planes.append(s.affine(packed, s.constant(i8, rows * (packed.type.count // 8))))
        else:
            planes.append(s.and_(s.shr_bytes(packed, 2 * k), 3))
    return planes


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def nibbles(s: Simd, packed: Value) -> list[Value]:
    """Low and high 4-bit codes."""
    return [s.and_(packed, 15), s.and_(s.shr_bytes(packed, 4), 15)]


def bytes_of(s: Simd, values: tuple[int, ...], times: int) -> Value:
    """A table of unsigned bytes, repeated."""
    return s.constant(i8, [v & 255 for v in values] * times)
