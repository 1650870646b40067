"""Kernels of the sampling chain: which tokens stay, their weights, and the draw.

Tokens are ordered by logit, equal ones by lowest id; every filter keeps a prefix of that order:
    top_k   the first k
    top_p   the shortest prefix with mass >= top_p of the list that top_k left, at least one token
    min_p   tokens with l - l_max >= log min_p
A kept token's weight is exp((l - l_max) / temperature), and the draw walks the kept tokens by ascending id.

Masses and weights are integers, floor(exp64(.) * 2^s), so sums do not depend on the order of adding and the short way
(64 candidates) and the long way (the whole row) decide and draw the same. With n tokens in a list s = 62 - bits(n);
masses of the whole vocabulary are floor(exp64(l - logsumexp) * 2^60).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from strata.base.compiled import cached_njit
from strata.cpu.exp64 import exp64, log64
from strata.cpu.head_rows import order_key

_WHOLE = 2.0**60
_BLOCK = 1024
_BINS = 2048


@njit(error_model="numpy")
def _scale(n):
    """2^(62 - bits of n): n weights of at most this sum to less than 2^62."""
    s = 62
    while n > 0:
        n >>= 1
        s -= 1
    return np.float64(np.int64(1) << np.int64(s))


@njit(error_model="numpy")
def _needed(top_p, total):
    return max(np.int64(1), np.int64(np.ceil(top_p * total)))


@cached_njit
def candidates_kept(logits, log_sum, top_k, top_p, min_p):
    """How many of the candidates the filters keep, or -1 when the candidates do not tell.

    logits  (n,) float32, the n largest, in order      log_sum  log-sum-exp of the whole row, NaN if not known
    top_k 0, top_p 1 and min_p 0 are off.
    """
    n = logits.size
    while n > 1 and logits[n - 1] == -np.inf:
        n -= 1
    largest, lowest = np.float64(logits[0]), log64(min_p)
    by_min = 0
    while by_min < n and np.float64(logits[by_min]) - largest >= lowest:
        by_min += 1
    complete = n < logits.size  # a list that ends in banned tokens is all there is
    if 0 < top_k <= logits.size:
        k = min(n, top_k)
        kept = min(k, by_min)
        if top_p < 1.0:
            scale, total = _scale(k), np.int64(0)
            for i in range(k):
                total += np.int64(exp64(np.float64(logits[i]) - largest) * scale)
            needed, mass, i = _needed(top_p, total), np.int64(0), 0
            while i < kept and mass < needed:
                mass += np.int64(exp64(np.float64(logits[i]) - largest) * scale)
                i += 1
            kept = i
        return kept
    if top_p < 1.0:
        if top_k > 0 or np.isnan(log_sum):
            return -1
        needed, mass, i = _needed(top_p, _WHOLE), np.int64(0), 0
        while i < by_min and mass < needed:
            mass += np.int64(exp64(np.float64(logits[i]) - log_sum) * _WHOLE)
            i += 1
        if mass >= needed or by_min < n or complete:
            return i
        return -1
    return by_min if by_min < n or complete else -1


class Scratch(NamedTuple):
    """Room for one row of V logits: lists of kept tokens and what `_cut` needs."""

    ids: np.ndarray  # (V,) int32
    values: np.ndarray  # (V,) float32
    masses: np.ndarray  # (V,) int64
    keys: np.ndarray  # (V,) int32, of the tokens around a cut
    key_masses: np.ndarray  # (V,) int64
    tally: np.ndarray  # (_BINS,) int64


def scratch(V: int) -> Scratch:
    """28 bytes per logit, reused by every long draw of a thread."""
    return Scratch(np.empty(V, np.int32), np.empty(V, np.float32), np.empty(V, np.int64), np.empty(V, np.int32),
                   np.empty(V, np.int64), np.empty(_BINS, np.int64))  # fmt: skip


@njit(error_model="numpy")
def _gather(row, base, cutoff, ids, values):
    """Ids (ascending) and logits with l - base >= cutoff, banned tokens left out; returns how many."""
    n = 0
    for i in range(row.size):
        ids[n], values[n] = i, row[i]
        n += np.int64((np.float64(row[i]) - base >= cutoff) & (row[i] > -np.inf))
    return n


@njit(error_model="numpy")
def _cut(values, needed, largest, room):
    """Shortest prefix of the order with a mass (room.masses) of at least `needed`.

    Returns (key, n): every larger key stays, and the first n of this key. If the whole mass is less, all stay.
    First equal bins of the logits' range find the neighbourhood of the cut, then the digits of its keys the key.
    """
    masses, keys, key_masses, tally = room.masses, room.keys, room.key_masses, room.tally
    lowest = np.float64(largest)
    for i in range(values.size):
        lowest = min(lowest, np.float64(values[i]))
    per_unit = (_BINS - 1) / (largest - lowest) if lowest < largest else 0.0
    tally[:] = 0
    for i in range(values.size):
        tally[np.int64((largest - np.float64(values[i])) * per_unit)] += masses[i]
    above, place = np.int64(0), 0
    while place < _BINS and above + tally[place] < needed:
        above += tally[place]
        place += 1
    if place == _BINS:
        return np.int64(-(2**31)), np.int64(values.size)
    n = 0
    for i in range(values.size):
        if np.int64((largest - np.float64(values[i])) * per_unit) == place:
            keys[n], key_masses[n] = order_key(values[i]), masses[i]
            n += 1
    prefix, prefix_shift = np.int64(0), 32
    for shift in (21, 10, 0):
        tally[:] = 0
        for i in range(n):
            key = np.int64(keys[i]) + np.int64(2**31)
            if key >> prefix_shift == prefix:
                tally[(key >> shift) & ((1 << (prefix_shift - shift)) - 1)] += key_masses[i]
        digit = np.int64(_BINS - 1)
        while above + tally[digit] < needed:
            above += tally[digit]
            digit -= 1
        prefix = (prefix << (prefix_shift - shift)) | digit
        prefix_shift = shift
    i, key_of_cut = 0, prefix - np.int64(2**31)
    while keys[i] != key_of_cut:
        i += 1
    return key_of_cut, (needed - above + key_masses[i] - 1) // key_masses[i]


@njit(error_model="numpy")
def _apply_cut(n, key, n_equal, ids, values):
    """Drop what a cut drops from the first n of a list; returns how many are left."""
    left = 0
    for i in range(n):
        own = np.int64(order_key(values[i]))
        equal = np.int64(own == key)
        ids[left], values[left] = ids[i], values[i]
        left += np.int64((own > key) | ((equal == 1) & (n_equal > 0)))
        n_equal -= equal
    return left


@njit(error_model="numpy")
def _fill_masses(values, base, scale, masses):
    total = np.int64(0)
    for i in range(values.size):
        masses[i] = np.int64(exp64(np.float64(values[i]) - base) * scale)
        total += masses[i]
    return total


@cached_njit
def row_kept(row, largest, log_sum, top_k, top_p, min_p, room):
    """How many tokens of a whole row the filters keep: that many of room.ids (ascending) and room.values.

    Arguments as above; largest is the row's maximum, log_sum matters without top_k only.
    """
    ids, values = room.ids, room.values
    if top_k > 0 or top_p >= 1.0:
        n = _gather(row, largest, log64(min_p) if top_k == 0 else -np.inf, ids, values)
        if top_k == 0:
            return n
        if top_k < n:
            room.masses[:n] = 1
            key, n_equal = _cut(values[:n], np.int64(top_k), largest, room)
            n = _apply_cut(n, key, n_equal, ids, values)
        if top_p < 1.0:
            needed = _needed(top_p, _fill_masses(values[:n], largest, _scale(n), room.masses))
    else:
        # a prefix of mass top_p never reaches tokens that all together have less than half of the rest
        needed = _needed(top_p, _WHOLE)
        n = _gather(row, log_sum, log64((1.0 - top_p) / (2.0 * row.size)), ids, values)
        if _fill_masses(values[:n], log_sum, _WHOLE, room.masses) < needed:
            n = _gather(row, largest, -np.inf, ids, values)
            _fill_masses(values[:n], log_sum, _WHOLE, room.masses)
    if top_p < 1.0:
        key, n_equal = _cut(values[:n], needed, largest, room)
        n = _apply_cut(n, key, n_equal, ids, values)
    if min_p <= 0.0:
        return n
    lowest, left = log64(min_p), 0
    for i in range(n):
        ids[left], values[left] = ids[i], values[i]
        left += np.int64(np.float64(values[i]) - largest >= lowest)
    return left


@cached_njit
def weights(values, largest, temperature):
    """(n,) int64 weights of kept logits; divided by their sum they are the probabilities of the draw."""
    scale, out = _scale(values.size), np.empty(values.size, np.int64)
    for i in range(values.size):
        out[i] = np.int64(exp64((np.float64(values[i]) - largest) / temperature) * scale)
    return out


@njit(error_model="numpy")
def _target(u, total):
    return min(np.int64(u * np.float64(total)), total - 1)


@cached_njit
def draw_candidates(ids, logits, n, temperature, u):
    """Draw among the first n candidates (in order of logits)."""
    largest, scale = np.float64(logits[0]), _scale(n)
    packed = np.empty(n, np.int64)
    for i in range(n):  # sorts by id, the place in the list below it
        entry, at = (np.int64(ids[i]) << np.int64(32)) | i, i
        while at > 0 and packed[at - 1] > entry:
            packed[at] = packed[at - 1]
            at -= 1
        packed[at] = entry
    mass, total = np.empty(n, np.int64), np.int64(0)
    for i in range(n):
        place = packed[i] & np.int64(0xFFFFFFFF)
        total += np.int64(exp64((np.float64(logits[place]) - largest) / temperature) * scale)
        mass[i] = total
    target, i = _target(u, total), 0
    while mass[i] <= target:
        i += 1
    return packed[i] >> np.int64(32)


@njit(error_model="numpy")
def _draw(values, largest, temperature, scale, u):
    """Place of the drawn logit: block sums first, then one block again."""
    n_blocks = (values.size + _BLOCK - 1) // _BLOCK
    sums, total = np.empty(n_blocks, np.int64), np.int64(0)
    for b in range(n_blocks):
        mass = np.int64(0)
        for i in range(b * _BLOCK, min(values.size, (b + 1) * _BLOCK)):
            mass += np.int64(exp64((np.float64(values[i]) - largest) / temperature) * scale)
        sums[b] = mass
        total += mass
    target, b = _target(u, total), 0
    while sums[b] <= target:
        target -= sums[b]
        b += 1
    i = b * _BLOCK
    while True:
        target -= np.int64(exp64((np.float64(values[i]) - largest) / temperature) * scale)
        if target < 0:
            return i
        i += 1


@cached_njit
def draw_kept(ids, values, largest, temperature, u):
    """Draw among kept tokens (ids ascending)."""
    return np.int64(ids[_draw(values, largest, temperature, _scale(values.size), u)])


@cached_njit
def draw_row(row, largest, temperature, u):
    """Draw from a whole row without any filter: what `draw_kept` gives for all tokens that are not banned."""
    n = 0
    for i in range(row.size):
        n += np.int64(row[i] > -np.inf)
    return _draw(row, largest, temperature, _scale(n), u)
