"""IQ4_XS in the tier 512.

A permute turns nibbles into codebook values + XS_BIAS. Both halves of a run of 32 meet in the same lanes, so the dots
of a run are ready before its sub-scale comes: one multiplication of int32 lanes a half block.
"""

from __future__ import annotations

from strata.cpu.gemv.frame import Lanes, Step
from strata.cpu.gemv.prefetch import asks_far
from strata.cpu.gemv.records256 import LANE_SUMS, STEP, XS, XS_BIAS
from strata.cpu.gemv.super_parts import halves_at, times_x
from strata.cpu.simd import Simd, Value, i8, i32, i64, vector
from strata.pack.grids import CODEBOOK


def _unpack(s: Simd, w: Value, part: int, left: Value | None) -> tuple:
    values = [int(v) + XS_BIAS for v in CODEBOOK["IQ4_XS"]]
    table = s.constant(i8, [(v + 128) % 256 - 128 for v in values] * 4)
    packed = [s.load(w, at, i8, 64) for at in (8, 72)]
    # d, 2 bits of every sub-scale from bit 16 on, 4 bits from bit 32 on; sub-scale k // 4 for the lanes of a half block
    head = s.cast(s.spread(s.load(w, 0, i64), 2), i8, 16)
    sub_scales = []
    for first in (0, 4):
        low = s.multishift(s.constant(i8, [32 + 4 * (first + k // 4) for k in range(16)]), head)
        top = s.multishift(s.constant(i8, [12 + 2 * (first + k // 4) for k in range(16)]), head)
        unsigned = s.b.or_(s.and_(low, 15), s.and_(top, 0x30))
        sub_scales.append(s.b.sext(s.b.sub(unsigned, s.splat(i8, 16, 32)), vector(i32, 16)))
    weights = [[s.permb(table, p), s.permb(table, s.shr_bytes(p, 4))] for p in packed]
    return weights, sub_scales, halves_at(s, w, 0)


def _multiply(s: Simd, unpacked: tuple, x: Value, part: int, lanes: Lanes) -> None:
    weights, sub_scales, halves = unpacked
    total = None
    for half in range(2):
        dots = s.load(x, LANE_SUMS + 64 * half, i32, 16)
        for k, weight in enumerate(weights[half]):
            dots = s.dpbusd(dots, weight, s.load(x, 128 * half + 64 * k, i8, 64))
        scaled = s.b.mul(dots, sub_scales[half])
        total = scaled if total is None else s.b.add(total, scaled)
    lanes.add(0, total, s.pick(times_x(s, halves, x, XS.scale_at), [0] * 16))


STEPS: dict[str, Step] = {"IQ4_XS": Step(STEP, 1, 136, XS.step_bytes, _unpack, _multiply, far=asks_far("IQ4_XS"))}
