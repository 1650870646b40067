"""What the super-block kernels of both tiers share: float scales of a block."""

from __future__ import annotations

from strata.cpu.simd import Simd, Value, f32, i16, i32, i64, vector


def halves_at(s: Simd, w: Value, at: int) -> Value:
    """Four float16 of the block as float32: one instruction, where a single one takes two."""
    return s.widen_half(s.load(w, at, i16, 4))


def times_x(s: Simd, halves: Value, x: Value, scale_at: int) -> Value:
    """Four scales of the block times the scale of the activations."""
    return s.b.fmul(halves, s.spread(s.load(x, scale_at, f32), 4))


def part_scales(s: Simd, half: Value, index: Value, offset: float, factor: float) -> Value:
    """Exact float32 (index + offset) * (factor * half): index n x i32, half one float32."""
    n = index.type.count
    scale = s.spread(s.b.fmul(half, s.const(f32, factor)), n)
    return s.b.fmul(s.b.fadd(s.to_float(index), s.splat(f32, n, offset)), scale)


def first_half(s: Simd, w: Value) -> Value:
    """The float16 at 0 of the block as float32."""
    return s.element(halves_at(s, w, 0), 0)


def scattered_half(s: Simd, words: Value) -> Value:
    """IQ1_M: the float16 whose four nibbles are the upper ones of four 16-bit words (an int64), as float32."""
    half = s.const(i64, 0)
    for k in range(4):
        nibble = s.b.and_(s.b.lshr(words, s.const(i64, 12 + 12 * k)), s.const(i64, 15 << (4 * k)))
        half = s.b.or_(half, nibble)
    return s.widen_half(s.b.trunc(half, i16))


def scattered_halves(s: Simd, words: list[Value]) -> Value:
    """The same for many rows: words (two i32 (n,)) -> f32 (n,)."""
    n = words[0].type.count
    bits = s.zero(i32, n)
    for k in range(4):
        word = words[k // 2]
        start = 16 * (k % 2) + 12  # of the nibble, which goes to bit 4 k
        moved = s.shr(word, start - 4 * k) if start >= 4 * k else s.shl(word, 4 * k - start)
        bits = s.b.or_(bits, s.and_(moved, 15 << (4 * k)))
    return s.widen_half(s.b.trunc(bits, vector(i16, n)))
