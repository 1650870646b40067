"""Activation records of the super-block formats in the tiers 512 and 256, and their quantisers.

A record is a row of steps of 256 values; step s of row r lies at records + r * record_bytes + s * step bytes. Three
arrangements, each with int8 codes at 0:

scaled   Q2_K to Q6_K and IQ4_XS, both tiers. Runs of 32 codes in the order RUN_ORDER, so that 64 bytes hold runs s and
         s + 2. Then sums: int16 of runs of 32 at SUMS_32 and of 16 at SUMS_16, the float32 scale at SCALED_SCALE, and
         at SUMS_4 the int16 sums of four neighbours as pairs (run s, run s + 2) for s = 0, 1, 4, 5.
bytes    grid formats, tier 512: byte c of every four neighbours, for c = 0..3.
words    grid formats, tier 256: for both halves of 128 values the four words (four neighbours) of 8 lanes: word 0 of
         all lanes, then word 1, and so on.
         Both: at LANE_SUMS int32, -GRID_BIAS times the sum of the 16 codes of every lane; the scale at GRID_SCALE.
"""

from __future__ import annotations

from strata.base.arithmetic import INF_BITS, TINY_BITS
from strata.base.program import NOT_FINITE
from strata.cpu.compiled import CFunction
from strata.cpu.simd import Simd, Value, f32, i8, i16, i32, i64, kernel_intrinsic, vector

STEP = 256
"""Values of a step and of a block."""

SCALED, BYTES, WORDS = "scaled", "bytes", "words"

RUN_ORDER = (0, 2, 1, 3, 4, 6, 5, 7)
"""Runs of 32 values as they lie in a scaled step."""

SUMS_32, SCALED_SCALE, SUMS_16, SUMS_4, SCALED_BYTES = 256, 272, 288, 320, 448
LANE_SUMS, GRID_SCALE, GRID_BYTES = 256, 320, 384

GRID_BIAS = 64
"""What grid kernels add to their signed weights, to have them unsigned."""

STEP_BYTES = {SCALED: SCALED_BYTES, BYTES: GRID_BYTES, WORDS: GRID_BYTES}


def record_bytes(arrangement: str, K: int) -> int:
    """Bytes of a record of K values, K a multiple of 256."""
    return K // STEP * STEP_BYTES[arrangement]


def _factor(s: Simd, row: Value, record: Value, scale_at: int, error_word: Value) -> Value:
    """Writes the scale of the 256 values at `row`; returns what to multiply them by."""
    largest = None
    for k in range(0, STEP, 32):
        magnitudes = s.and_(s.load(row, 4 * k, i32, 32), 0x7FFFFFFF)
        largest = magnitudes if largest is None else s.umax(largest, magnitudes)
    bits = s.largest(largest)
    infinite = s.b.icmp_unsigned(">=", bits, s.const(i32, INF_BITS))
    with s.b.if_then(infinite, likely=False):
        known = s.load(error_word, 0, i64)
        fresh = s.b.icmp_signed("==", known, s.const(i64, 0))
        s.store(s.b.select(fresh, s.const(i64, NOT_FINITE), known), error_word)
    dead = s.b.or_(infinite, s.b.icmp_unsigned("<", bits, s.const(i32, TINY_BITS)))
    amax, limit, zero = s.cast(bits, f32), s.const(f32, 127.0), s.const(f32, 0.0)
    s.store(s.b.select(dead, zero, s.b.fdiv(amax, limit)), record, scale_at)
    return s.b.select(dead, zero, s.b.fdiv(limit, amax))


def _codes(s: Simd, row: Value, first: int, factor: Value, lanes: int) -> Value:
    """64 values from `first` on -> their int8 codes. 0 times Inf or NaN becomes the integer -2^31, whose low byte is
    the 0 that a group without a finite scale has."""
    parts = []
    for k in range(first, first + 64, lanes):
        product = s.b.fmul(s.load(row, 4 * k, f32, lanes), s.spread(factor, lanes))
        parts.append(s.round_to_int(product))
    return s.b.trunc(s.join(*parts), vector(i8, 64))


def _sums_of_4(s: Simd, codes: Value) -> Value:
    """int8 (64,) -> int32 (16,)."""
    return s.join(*(s.pairs(s.maddubs(s.splat(i8, 32, 1), s.part(codes, k, 32))) for k in (0, 32)))


def _sums_of_two(s: Simd, values: Value) -> Value:
    n = values.type.count
    return s.b.add(s.pick(values, range(0, n, 2)), s.pick(values, range(1, n, 2)))


def _scaled_step(s: Simd, record: Value, codes: list[Value]) -> None:
    fours = [_sums_of_4(s, c) for c in codes]
    for v, c in enumerate(codes):
        for half in range(2):
            s.store(s.part(c, 32 * half, 32), record, 32 * RUN_ORDER.index(2 * v + half))
    for v in (0, 2):  # runs (0, 1) with (2, 3), then (4, 5) with (6, 7)
        low, high = s.and_(fours[v], 0xFFFF), s.shl(fours[v + 1], 16)
        s.store(s.b.or_(low, high), record, SUMS_4 + 32 * v)
    sixteens = s.join(*(_sums_of_two(s, _sums_of_two(s, f)) for f in fours))
    s.store(s.b.trunc(sixteens, vector(i16, 16)), record, SUMS_16)
    s.store(s.b.trunc(_sums_of_two(s, sixteens), vector(i16, 8)), record, SUMS_32)


def _grid_sums(s: Simd, record: Value, codes: list[Value]) -> None:
    for v, c in enumerate(codes):
        sums = _sums_of_two(s, _sums_of_two(s, _sums_of_4(s, c)))
        s.store(s.negate(s.shl(sums, GRID_BIAS.bit_length() - 1)), record, LANE_SUMS + 16 * v)


def _bytes_step(s: Simd, record: Value, codes: list[Value]) -> None:
    for v, c in enumerate(codes):
        apart = s.pick(c, [4 * j + k for k in range(4) for j in range(16)])
        for k in range(4):
            s.store(s.part(apart, 16 * k, 16), record, 64 * k + 16 * v)
    _grid_sums(s, record, codes)


def _words_step(s: Simd, record: Value, codes: list[Value]) -> None:
    for half in range(2):
        words = s.cast(s.join(*codes[2 * half : 2 * half + 2]), i32, 32)
        for k in range(4):
            s.store(s.pick(words, [4 * lane + k for lane in range(8)]), record, 128 * half + 32 * k)
    _grid_sums(s, record, codes)


_STEPS = {SCALED: (_scaled_step, SCALED_SCALE), BYTES: (_bytes_step, GRID_SCALE), WORDS: (_words_step, GRID_SCALE)}


def _emit(s: Simd, arrangement: str, tier: int) -> None:
    x, K, R, x_stride, records, error_word = s.args
    write, scale_at = _STEPS[arrangement]
    n_steps = s.b.lshr(K, s.const(i64, 8))
    step_bytes = STEP_BYTES[arrangement]
    with s.loop(R) as r:
        row = s.pointer(s.b.add(x, s.b.mul(r, x_stride)))
        first = s.pointer(s.b.add(records, s.b.mul(r, s.times(n_steps, step_bytes))))
        with s.loop(n_steps) as k:
            values, record = s.at(row, s.times(k, 4 * STEP)), s.at(first, s.times(k, step_bytes))
            factor = _factor(s, values, record, scale_at, s.pointer(error_word))
            write(s, record, [_codes(s, values, 64 * v, factor, tier // 32) for v in range(4)])


_quantise = kernel_intrinsic("quantise256", _emit, n_args=6)


def quantiser(arrangement: str, tier: int) -> CFunction:
    """quantise(x, K, R, x_stride, records, error_word) into records of an arrangement; K a multiple of 256."""

    def quantise(x, K, R, x_stride, records, error_word):
        _quantise(arrangement, tier, x, K, R, x_stride, records, error_word)

    quantise.__qualname__ = f"quantise256_{arrangement}_{tier}"
    return CFunction(quantise, 6)
