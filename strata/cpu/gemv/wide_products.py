"""How a unit of a tile (`wide`) meets activations: sums of four lanes of 16 matrix rows for a few activation rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from strata.cpu.gemv.wide import LANES, LINE, WIDTH
from strata.cpu.simd import Kind, Simd, Value, f32, i8, i16, i32, vector

Lanes = list[list[Value]]
Multiply = Callable[[Simd, Value, list[Value], Value, Lanes], None]
MultiplyLowest = Callable[[Simd, Value, list[Value], Lanes], None]


def line(s: Simd, w: Value, k: int, kind: Kind = i32, n: int = WIDTH) -> Value:
    """Vector k of a tile."""
    return s.load(w, LINE * k, kind, n, align=LINE)


def spread_word(s: Simd, x: Value, at: int | Value) -> Value:
    return s.spread(s.load(x, at, i32), WIDTH)


def spread_float(s: Simd, x: Value, at: int | Value) -> Value:
    return s.spread(s.load(x, at, f32), WIDTH)


def pinned(s: Simd, value: Value) -> Value:
    """The same value, made before any load behind this: the compiler would start more lanes at a time than there are
    registers, and store most of them."""
    return s.b.asm(ir.FunctionType(value.type, [value.type]), "", "=v,0,~{memory}", [value], True)


def _opaque(s: Simd, value: Value) -> Value:
    """The same value; the compiler does not see what it is made of."""
    return s.b.asm(ir.FunctionType(value.type, [value.type]), "", "=v,0", [value], False)


def add(s: Simd, place: Value, integers: Value, scales: Value) -> None:
    """lane = fma(float(integer), scale, lane)."""
    floats = integers if integers.type.element == f32 else s.to_float(integers)
    s.set(place, pinned(s, s.fma(floats, scales, s.get(place))))


@dataclass(frozen=True)
class XScale:
    """Where a record has the scales of a unit's lanes.

    at    of lane 0 in unit 0
    unit  bytes more for each unit, besides the 16 that `xs` are further on: -16 for a scale that all units share
    lane  bytes more for each lane, of which two share a scale; 0: the unit has one
    """

    at: int
    unit: int = 0
    lane: int = 0


def _scales(s: Simd, w: Value, first: int, n: int, where: XScale, xs: list[Value], q: Value) -> list[list[Value]]:
    """[activation row][lane] products of scales. first: in the unit, of n vectors of weight scales."""
    made = []
    for x in xs:
        x, factors = s.at(x, s.times(q, where.unit)) if where.unit else x, []
        for j in range(LANES):
            if j % (LANES // n) == 0 or (where.lane and j % 2 == 0):
                weight = line(s, w, first + j * n // LANES, f32)
                factors.append(s.b.fmul(weight, spread_float(s, x, where.at + where.lane * j)))
            else:
                factors.append(factors[-1])
        made.append(factors)
    return made


def dots(planes: int, x_scale: XScale, scales: int, correction: int | None = None) -> Multiply:
    """Unsigned weights, scales with floats. Unit: [lane][plane] codes, then `scales` vectors float32. correction: of
    the record, int32 of lane 0, or None."""

    def multiply(s: Simd, w: Value, xs: list[Value], q: Value, lanes: Lanes) -> None:
        factors = _scales(s, w, LANES * planes, scales, x_scale, xs, q)
        for j in range(LANES):
            at = 4 * j
            totals = [s.zero(i32, WIDTH) if correction is None else spread_word(s, x, correction + at) for x in xs]
            for o in range(planes):
                codes = line(s, w, planes * j + o, i8, LINE)
                totals = [s.dpbusd(t, codes, spread_word(s, x, LINE * o + at)) for t, x in zip(totals, xs, strict=True)]
            for r, total in enumerate(totals):
                add(s, lanes[r][j], total, factors[r][j])

    return multiply


def scaled_pairs(x_scale: XScale, corrections: int | None = None) -> Multiply:
    """Integer sub-scales of dots that fit into 16 bits: two dots share a word, so one multiplication serves both. Unit:
    [lane][4 operands] codes, int16 pairs of sub-scales for operands 0 and 1 and for 2 and 3, the float32 scale.
    corrections: of the record, int16 pairs for lane 0 that are added to dots, those of operands 2 and 3 a line on."""

    def multiply(s: Simd, w: Value, xs: list[Value], q: Value, lanes: Lanes) -> None:
        first = LANES * 4
        factors = _scales(s, w, first + 2, 1, x_scale, xs, q)
        for j in range(LANES):
            totals = [s.zero(i32, WIDTH) for _ in xs]
            for pair in range(2):
                codes = [line(s, w, 4 * j + 2 * pair + k, i8, LINE) for k in range(2)]
                scales = line(s, w, first + pair)
                for r, x in enumerate(xs):
                    even, odd = (
                        s.dpbusd(s.zero(i32, WIDTH), codes[k], spread_word(s, x, LINE * (2 * pair + k) + 4 * j))
                        for k in range(2)
                    )
                    # One shuffle would do both, on a unit that multiplies.
                    odd = _opaque(s, s.shl(odd, 16))
                    even, odd = (s.cast(v, i16, 2 * WIDTH) for v in (even, odd))
                    both = s.pick(even, [k + 2 * WIDTH * (k % 2) for k in range(2 * WIDTH)], odd)
                    if corrections is not None:
                        less = spread_word(s, x, corrections + LINE * pair + 4 * j)
                        both = s.b.add(both, s.cast(less, i16, 2 * WIDTH))
                    totals[r] = s.dpwssd(totals[r], both, scales)
            for r, total in enumerate(totals):
                add(s, lanes[r][j], total, factors[r][j])

    return multiply


def scaled_halves(x_scale: XScale, correction: int) -> Multiply:
    """IQ4_XS. Unit: [lane][4 operands] codes, int32 sub-scales of the halves of a block, the float32 scale."""

    def multiply(s: Simd, w: Value, xs: list[Value], q: Value, lanes: Lanes) -> None:
        first = LANES * 4
        factors = _scales(s, w, first + 2, 1, x_scale, xs, q)
        for j in range(LANES):
            totals: list[Value | None] = [None] * len(xs)
            for half in range(2):
                sums = [spread_word(s, x, correction + LINE * half + 4 * j) for x in xs]
                for o in (2 * half, 2 * half + 1):
                    codes, at = line(s, w, 4 * j + o, i8, LINE), LINE * o + 4 * j
                    sums = [s.dpbusd(t, codes, spread_word(s, x, at)) for t, x in zip(sums, xs, strict=True)]
                scale = line(s, w, first + half)
                for r, part in enumerate(sums):
                    part = s.b.mul(part, scale)
                    totals[r] = part if totals[r] is None else s.b.add(totals[r], part)
            for r, total in enumerate(totals):
                add(s, lanes[r][j], total, factors[r][j])

    return multiply


def lowest_pairs(x_scale_at: int, terms: tuple[int, ...]) -> MultiplyLowest:
    """Minima of super-blocks: [lane][term] int16 pairs, then the float32 scale. terms: of the records, the sums of
    codes that lane 0 meets."""

    def multiply(s: Simd, w: Value, xs: list[Value], lanes: Lanes) -> None:
        scale = line(s, w, LANES * len(terms), f32)
        factors = [s.b.fmul(scale, spread_float(s, x, x_scale_at)) for x in xs]
        for j in range(LANES):
            for r, x in enumerate(xs):
                total = s.zero(i32, WIDTH)
                for k, at in enumerate(terms):
                    total = s.dpwssd(total, line(s, w, len(terms) * j + k), spread_word(s, x, at + 4 * j))
                add(s, lanes[r][j], total, factors[r])

    return multiply


def lowest_blocks(sums: int, scales: int) -> MultiplyLowest:
    """Minima of blocks of 32: a lane is a block; a float32 sum of codes and a scale of each."""

    def multiply(s: Simd, w: Value, xs: list[Value], lanes: Lanes) -> None:
        for j in range(LANES):
            minimum = line(s, w, j, f32)
            for r, x in enumerate(xs):
                factor = s.b.fmul(minimum, spread_float(s, x, scales + 4 * j))
                add(s, lanes[r][j], spread_float(s, x, sums + 4 * j), factor)

    return multiply


def store_lines(s: Simd, to: Value, vectors: list[Value], first: int = 0) -> None:
    for k, v in enumerate(vectors):
        s.store(v, to, LINE * (first + k), align=LINE)


def pairs_of_bytes(s: Simd, words: Value, low: int, high: int) -> Value:
    """Two unsigned bytes of every word as an int16 pair in it."""
    picked = [k for r in range(WIDTH) for k in (4 * r + low, 64, 4 * r + high, 64)]
    return s.cast(s.pick(s.cast(words, i8, LINE), picked, s.zero(i8, LINE)), i32, WIDTH)


def shifted(s: Simd, words: Value, count: Value) -> Value:
    """Logical shift of i32 (16,) to the right by an int64."""
    return s.b.lshr(words, s.spread(s.b.trunc(count, i32), WIDTH))


def low_half(s: Simd, words: Value, upper: bool = False) -> Value:
    """float16 in one half of every word, as f32 (16,)."""
    if upper:
        words = s.shr(words, 16)
    return s.widen_half(s.b.trunc(words, vector(i16, WIDTH)))
