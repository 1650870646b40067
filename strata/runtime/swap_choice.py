"""The compiled part of adaptations: scores and their ageing, and the swaps that `swaps.plan_swaps` tells of.

In a layer the candidates that may win are those that exceed its coldest resident by the margin. They make a heap, and
so do the residents that the hottest of them exceeds; the layers' first pairs then compete for each swap.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from strata.base.compiled import c_function
from strata.base.heap import sift_down
from strata.cpu.machine_code import f32_view, i32_view, i64_view, u8_view

# Words of the argument record.
(LAYERS, E_, MOST, SCORES, RESIDENT, EMPTY, BYTES, LIMITS, KEYS, CURSORS, FOUND, OUT_LAYERS, OUT_INCOMING, OUT_VICTIMS,
 OUT_GAINS, SPARE, WORDS) = range(17)  # fmt: skip
# Words of a layer's cursors: keys in its heap of candidates and in that of residents, empty slots.
CANDIDATES, COLD, FREE, CURSOR_WORDS = range(4)

F = np.float32
NONE = np.int32(0x7FFFFFFF)


@c_function(6)
def score(n, fresh, short, long, weight, out):
    """out = short + fresh + (long + fresh) weight for n float32 each; weight: address of one. All are addresses."""
    a, b, c, to = f32_view(fresh, n), f32_view(short, n), f32_view(long, n), f32_view(out, n)
    w = f32_view(weight, 1)[0]
    for i in range(n):
        to[i] = (b[i] + a[i]) + (c[i] + a[i]) * w


@c_function(5)
def age(n, fresh, short, long, numbers):
    """Take n counts into both memories, let these fade, and clear the counts. numbers: float32 factors of short and
    long, and below what a memory is 0."""
    counts, f = f32_view(fresh, n), f32_view(numbers, 3)
    for which in range(2):
        memory, factor = f32_view(short if which == 0 else long, n), f[which]
        for i in range(n):
            v = (memory[i] + counts[i]) * factor
            memory[i] = v if v >= f[2] else F(0)
    for i in range(n):
        counts[i] = F(0)


@njit(error_model="numpy")
def _heap(keys, n):
    """Make a heap, least key first."""
    for root in range(n // 2 - 1, -1, -1):
        sift_down(keys, root, n)


@njit(error_model="numpy")
def _pop(keys, n):
    """Take the least of n keys away; the index of its expert."""
    least = keys[0]
    keys[0] = keys[n - 1]
    sift_down(keys, 0, n - 1)
    return least & 0xFFFF


@njit(error_model="numpy")
def _ends(bits, resident):
    """Bits of the least used resident (NONE without one), and of the most used other (-1 without one)."""
    lowest, highest = NONE, np.int32(-1)
    for e in range(bits.size):
        held = resident[e] != 0
        lowest = min(lowest, bits[e] if held else NONE)
        highest = max(highest, np.int32(-1) if held else bits[e])
    return lowest, highest


@njit(error_model="numpy")
def _float(p, bits):
    """The float32 of bits."""
    i32_view(p.ctypes.data + 8 * SPARE, 1)[0] = bits
    return f32_view(p.ctypes.data + 8 * SPARE, 1)[0]


@njit(error_model="numpy")
def _gather(p, layer):
    """Heaps of a layer's candidates and residents that a swap may be about."""
    E, at = p[E_], layer * p[E_]
    # Of floats from 0 on, the order of the bits is that of the values.
    score, bits = f32_view(p[SCORES] + 4 * at, E), i32_view(p[SCORES] + 4 * at, E)
    resident = u8_view(p[RESIDENT] + at, E)
    limits = f32_view(p[LIMITS], 2)
    least, margin = limits[0], limits[1]
    cursor = i64_view(p[CURSORS] + 8 * CURSOR_WORDS * layer, CURSOR_WORDS)
    empty = i64_view(p[EMPTY], p[LAYERS])[layer]
    lowest, highest = _ends(bits, resident)
    floor = least
    if empty <= 0:
        floor = max(least, _float(p, lowest) + margin) if lowest != NONE else F(np.inf)
    hottest = _float(p, highest) if highest >= 0 else F(-1)
    candidates = i64_view(p[KEYS] + 16 * at, E)
    cold = i64_view(p[KEYS] + 16 * at + 8 * E, E)
    n_candidates = n_cold = 0
    if hottest >= floor:
        for e in range(E):  # without branches: which way they go is not to be foreseen
            order = np.int64(bits[e]) << 16
            candidates[n_candidates] = e - order
            cold[n_cold] = e + order
            n_candidates += np.int64(resident[e] == 0) & np.int64(score[e] >= floor)
            n_cold += np.int64(resident[e] != 0) & np.int64(score[e] + margin <= hottest)
        _heap(candidates, n_candidates)
        _heap(cold, n_cold)
    cursor[CANDIDATES], cursor[COLD], cursor[FREE] = n_candidates, n_cold, empty


@njit(error_model="numpy")
def _gain(p, layer):
    """Gain of the layer's next swap, below 0 if there is none."""
    E, at = p[E_], layer * p[E_]
    cursor = i64_view(p[CURSORS] + 8 * CURSOR_WORDS * layer, CURSOR_WORDS)
    if cursor[CANDIDATES] == 0:
        return F(-1)
    score = f32_view(p[SCORES] + 4 * at, E)
    comes = score[i64_view(p[KEYS] + 16 * at, E)[0] & 0xFFFF]
    if cursor[FREE] > 0:
        return comes
    if cursor[COLD] == 0:
        return F(-1)
    goes = score[i64_view(p[KEYS] + 16 * at + 8 * E, E)[0] & 0xFFFF]
    return comes - goes if comes >= goes + f32_view(p[LIMITS], 2)[1] else F(-1)


@c_function(1)
def choose(a):
    """Choose the swaps of the record at `a`; FOUND then says how many there are."""
    p = i64_view(a, WORDS)
    L, E = p[LAYERS], p[E_]
    budget = i64_view(p[LIMITS], 2)[1]
    gains = f32_view(p[CURSORS] + 8 * CURSOR_WORDS * L, L)
    for layer in range(L):
        _gather(p, layer)
        gains[layer] = _gain(p, layer)
    n, spent = 0, np.int64(0)
    while n < p[MOST]:
        best = 0
        for layer in range(1, L):
            if gains[layer] > gains[best]:
                best = layer
        if gains[best] < F(0):
            break
        spent += i64_view(p[BYTES], L)[best]
        if spent > budget:
            break
        cursor = i64_view(p[CURSORS] + 8 * CURSOR_WORDS * best, CURSOR_WORDS)
        i64_view(p[OUT_LAYERS], p[MOST])[n] = best
        incoming = _pop(i64_view(p[KEYS] + 16 * best * E, E), cursor[CANDIDATES])
        cursor[CANDIDATES] -= 1
        i64_view(p[OUT_INCOMING], p[MOST])[n] = incoming
        victim = np.int64(-1)
        if cursor[FREE] > 0:
            cursor[FREE] -= 1
        else:
            victim = _pop(i64_view(p[KEYS] + 16 * best * E + 8 * E, E), cursor[COLD])
            cursor[COLD] -= 1
        i64_view(p[OUT_VICTIMS], p[MOST])[n] = victim
        f32_view(p[OUT_GAINS], p[MOST])[n] = gains[best]
        gains[best] = _gain(p, best)
        n += 1
    p[FOUND] = n
