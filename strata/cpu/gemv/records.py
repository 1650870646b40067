"""Activation records of the tiers 512 and 256 for formats of 32 and 64 values, and their quantisers.

A record is a row of steps, each: codes in the order in which the kernel meets them, 16 float32 scales (one a lane)
and, where the kernel wants them, 16 int32 corrections, or the sums and scales of four blocks. The last step is filled
up with zeros. All parts are multiples of 64 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.arithmetic import INF_BITS, TINY_BITS
from strata.base.compiled import CFunction
from strata.base.program import NOT_FINITE
from strata.cpu.simd import Simd, Value, f32, i8, i32, i64, kernel_intrinsic, vector

GROUP = 32
SCALE_BYTES = 64
EXTRA_BYTES = 64


@dataclass(frozen=True)
class Records:
    """One layout.

    name     layouts of the same name hold the same bytes
    order    code of the step that byte k of the record holds
    groups   for each lane, the group of 32 values of the step that its scale comes from
    bias     corrections of lane l: -bias times the sum of its codes; 0: no corrections
    flip     codes are stored as unsigned bytes, code + 128
    blocks   instead of corrections: float32 sums of the codes of four groups, then their scales
    """

    name: str
    order: tuple[int, ...]
    groups: tuple[int, ...]
    bias: int = 0
    flip: bool = False
    blocks: bool = False

    @property
    def values(self) -> int:
        return len(self.order)

    @property
    def step_bytes(self) -> int:
        return self.values + SCALE_BYTES + (EXTRA_BYTES if self.bias or self.blocks else 0)

    def record_bytes(self, K: int) -> int:
        return -(-K // self.values) * self.step_bytes


def _tuple(x: np.ndarray) -> tuple[int, ...]:
    return tuple(int(v) for v in x.ravel())


_FOUR_BLOCKS = tuple(l // 4 for l in range(16))
_HALVES = _tuple(np.arange(128).reshape(4, 2, 16).transpose(1, 0, 2))
_HALVES_OF_16 = _tuple(np.arange(128).reshape(8, 2, 8).transpose(1, 0, 2))
_TWOS = _tuple(np.arange(256).reshape(64, 4).T)

_ALL = (
    Records("halves8", _HALVES, _FOUR_BLOCKS, bias=8),
    Records("halves16", _HALVES, _FOUR_BLOCKS, bias=16),
    Records("halves128", _HALVES, _FOUR_BLOCKS, bias=128),
    Records("halves_sums", _HALVES, _FOUR_BLOCKS, blocks=True),
    Records("sub16", _HALVES_OF_16, _FOUR_BLOCKS, bias=16),
    Records("twos", _TWOS, tuple(l // 2 for l in range(16)), bias=1),
    Records("bytes", _tuple(np.arange(64)), tuple(l // 8 for l in range(16))),
    Records("bytes128", _tuple(np.arange(64)), tuple(l // 8 for l in range(16)), flip=True),
)
RECORDS: dict[str, Records] = {r.name: r for r in _ALL}

_BY_FORMAT = {
    "Q4_0": "halves8", "Q4_1": "halves_sums", "Q5_0": "halves16", "Q5_1": "halves_sums", "IQ4_NL": "halves128",
    "MXFP4": "halves16", "NVFP4": "sub16", "Q2_0": "twos",
}  # fmt: skip


def records_for(format_name: str, tier: int) -> Records:
    """The layout that kernels of (format, tier) read."""
    if format_name == "Q8_0":  # vpdpbusd takes the weights as its signed side, AVX2 takes the signs apart
        return RECORDS["bytes128" if tier == 512 else "bytes"]
    return RECORDS[_BY_FORMAT[format_name]]


# ---- quantiser ---------------------------------------------------------------------------------------------------


def _sums_of_4(s: Simd, tier: int, factor: int, codes: Value) -> Value:
    """factor (1..128) times the sums of four signed bytes, as int32."""
    n = codes.type.count
    factors = s.splat(i8, n, factor)
    if tier == 512:
        return s.dpbusd(s.zero(i32, n // 4), factors, codes)
    return s.pairs(s.maddubs(factors, codes))


def _group(s: Simd, tier: int, x: Value) -> tuple[list[Value], Value]:
    """32 float32 at x: as vectors, and the bits of the largest magnitude."""
    n = tier // 32
    parts = [s.load(x, 4 * k, f32, n) for k in range(0, GROUP, n)]
    magnitudes = [s.and_(s.cast(p, i32, n), 0x7FFFFFFF) for p in parts]
    while len(magnitudes) > 1:
        magnitudes = [s.umax(a, b) for a, b in zip(magnitudes[::2], magnitudes[1::2], strict=True)]
    return parts, s.largest(magnitudes[0])


def _step(s: Simd, layout: Records, tier: int, groups: list[Value], record: Value, largest: Value) -> None:
    """One step: `groups` point at 32 float32 each. `largest`: variable, grows."""
    b, n_groups, wide = s.b, len(groups), tier // 8
    parts, bits = zip(*(_group(s, tier, x) for x in groups), strict=True)
    n = max(4, n_groups)
    bits = s.gather([*bits, *[s.const(i32, 0)] * (n - n_groups)])
    s.set(largest, s.umax(s.get(largest), s.pick(bits, [k % n for k in range(8)])))
    fine = b.and_(
        b.icmp_unsigned(">=", bits, s.splat(i32, n, int(TINY_BITS))),
        b.icmp_unsigned("<", bits, s.splat(i32, n, int(INF_BITS))),
    )
    amax, limit, zero = s.cast(bits, f32, n), s.splat(f32, n, 127.0), s.zero(f32, n)
    scales = b.select(fine, b.fdiv(amax, limit), zero)
    inverse = b.select(fine, b.fdiv(limit, amax), zero)
    codes = []
    for g in range(n_groups):
        factor = s.pick(inverse, [g] * (tier // 32))
        rounded = [s.round_to_int(b.fmul(x, factor)) for x in parts[g]]  # NaN and Inf times 0: a multiple of 256
        codes.append(b.trunc(s.join(*rounded), vector(i8, GROUP)))
    natural = s.join(*codes)
    ordered = [s.pick(natural, layout.order[k : k + wide]) for k in range(0, layout.values, wide)]
    for k, part in enumerate(ordered):
        stored = b.xor(part, s.splat(i8, wide, -128)) if layout.flip else part
        s.store(stored, record, wide * k)
    lanes = s.pick(scales, layout.groups)
    s.store(lanes, record, layout.values)
    planes = 64 // wide  # vectors of a plane
    if layout.bias or layout.blocks:
        for k in range(planes):
            total = None
            for part in ordered[k::planes]:
                four = _sums_of_4(s, tier, layout.bias or 1, part)
                total = four if total is None else b.add(total, four)
            if layout.bias:
                s.store(s.negate(total), record, layout.values + SCALE_BYTES + wide * k)
            else:
                for _ in range(2):
                    half = range(0, total.type.count, 2)
                    total = b.add(s.pick(total, half), s.pick(total, [i + 1 for i in half]))
                s.store(s.to_float(total), record, layout.values + SCALE_BYTES + 4 * total.type.count * k)
    if layout.blocks:
        s.store(s.part(scales, 0, 4), record, layout.values + SCALE_BYTES + 16)
        s.store(s.zero(i8, 32), record, layout.values + SCALE_BYTES + 32)


def _emit(s: Simd, name: str, tier: int) -> None:
    layout, b = RECORDS[name], s.b
    x, K, R, x_stride, records, error_word = s.args
    n_groups = layout.values // GROUP
    shift = layout.values.bit_length() - 1
    full = b.lshr(K, s.const(i64, shift))
    left = b.and_(b.lshr(K, s.const(i64, 5)), s.const(i64, n_groups - 1))
    short = b.icmp_unsigned("!=", left, s.const(i64, 0))
    record_bytes = s.times(b.add(full, b.zext(short, i64)), layout.step_bytes)
    largest = s.variable(vector(i32, 8))
    s.set(largest, s.zero(i32, 8))
    with s.loop(R) as r:
        row = s.pointer(b.add(x, b.mul(r, x_stride)))
        record = s.pointer(b.add(records, b.mul(r, record_bytes)))
        with s.loop(full) as u:
            start = s.at(row, s.times(u, 4 * layout.values))
            groups = [s.at(start, 4 * GROUP * g) for g in range(n_groups)]
            _step(s, layout, tier, groups, s.at(record, s.times(u, layout.step_bytes)), largest)
        with b.if_then(short):
            start, groups = s.at(row, s.times(full, 4 * layout.values)), []
            for g in range(n_groups):
                there = b.icmp_unsigned(">", left, s.const(i64, g))
                groups.append(b.select(there, s.at(start, 4 * GROUP * g), s.zero_bytes(4 * GROUP)))
            _step(s, layout, tier, groups, s.at(record, s.times(full, layout.step_bytes)), largest)
    word = s.pointer(error_word)
    bad = b.icmp_unsigned(">=", s.largest(s.get(largest)), s.const(i32, int(INF_BITS)))
    clean = b.icmp_unsigned("==", s.load(word, 0, i64), s.const(i64, 0))
    with b.if_then(b.and_(bad, clean)):
        s.store(s.const(i64, NOT_FINITE), word)


_quantise = kernel_intrinsic("quantise", _emit, 6)


def quantiser(name: str, tier: int) -> CFunction:
    """The quantiser of a layout: (x, K, R, x_stride, records, error_word)."""

    def quantise(x, K, R, x_stride, records, error_word):
        _quantise(name, tier, x, K, R, x_stride, records, error_word)

    quantise.__qualname__ = f"quantise_{name}_{tier}"
    return CFunction(quantise, 6)
