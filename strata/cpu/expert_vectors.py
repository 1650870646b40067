"""What the compiler does not write for experts: the terms of the exact sum as vectors (its own code for them is five
times slower), and prefetches."""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.base.arithmetic import COMBINE_LIMIT, COMBINE_SCALE
from strata.cpu.expert_record import LINE_BYTES
from strata.cpu.float_bits import rint32
from strata.cpu.float_vectors import LANES, load, splat
from strata.cpu.gemv.words import long, real, set_long, set_real, set_word, stack, word
from strata.cpu.simd import Simd, f32, i1, i32, i64, kernel_intrinsic, vector

F, I = np.float32, np.int32


def _emit_terms(s: Simd) -> None:
    """(total, y, groups of 16 values, weight and scale, fine): see `add_terms`."""
    total, y, factors, fine = (s.pointer(s.args[k]) for k in (0, 1, 3, 4))
    w, scale = (s.spread(s.load(factors, 4 * k, f32), LANES) for k in range(2))
    good = s.variable(vector(i1, LANES))
    s.set(good, s.splat(i1, LANES, 1))
    with s.loop(s.args[2]) as i:
        t = s.b.fmul(w, s.b.fmul(load(s, y, s.times(i, 4 * LANES)), scale))
        size = s.cast(s.and_(s.cast(t, i32, LANES), 0x7FFFFFFF), f32, LANES)
        small = s.b.fcmp_ordered("<", size, splat(s, COMBINE_LIMIT))  # false for NaN
        s.set(good, s.b.and_(s.get(good), small))
        # A term of at least 2^-9 is a whole number times 2^-32; below, rint makes one: the conversion is exact.
        scaled = s.b.fmul(s.b.select(small, t, splat(s, 0.0)), splat(s, COMBINE_SCALE))
        whole = s.call("llvm.rint.v16f32", t.type, scaled)
        at = s.times(i, 8 * LANES)
        units = s.b.fptosi(whole, vector(i64, LANES))
        s.store(s.b.add(s.load(total, at, i64, LANES), units), total, at)
    all_good = s.call("llvm.vector.reduce.and.v16i1", i1, s.get(good))
    s.store(s.b.and_(s.load(fine, 0, i32), s.b.zext(all_good, i32)), fine)


_terms = kernel_intrinsic("terms", _emit_terms, 5)


@njit(error_model="numpy")
def add_terms(total, y, n, w, s):
    """Add rint(fl(w fl(s y)) 2^32) to each of n int64 at `total`; y: address of n float32, w and s float32.

    Returns whether all terms are below 2^24 in magnitude; the others count as 0.
    """
    factors = stack(16)
    set_real(factors, 0, w)
    set_real(factors, 4, s)
    set_word(factors, 8, I(1))
    whole = n // LANES
    _terms(total, y, whole, factors, factors + 8)
    fine = word(factors, 8) != 0
    for i in range(LANES * whole, n):
        t = w * (real(y, 4 * i) * s)
        ok = abs(t) < COMBINE_LIMIT
        fine = fine and ok
        units = rint32((t if ok else F(0)) * COMBINE_SCALE)
        set_long(total, 8 * i, long(total, 8 * i) + np.int64(units))
    return fine


def _emit_ask(s: Simd) -> None:
    """(address, lines)."""
    start = s.pointer(s.args[0])
    with s.loop(s.args[1]) as i:
        s.prefetch(start, s.times(i, LINE_BYTES), level=2)


_ask = kernel_intrinsic("ask", _emit_ask, 2)


@njit(error_model="numpy")
def ask_for(address, n_lines):
    """Get cache lines under way from an address on; any address will do."""
    _ask(address, n_lines)
