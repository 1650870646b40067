"""Compiled parts of the n-gram table: hash, look-up in the row cache, reading of rows, dequantisation.

The row cache is set-associative: row r may lie in any of the WAYS places of set r mod sets, and each set evicts by
CLOCK (second chance). Exactness does not depend on it: a place holds the row's own bytes or is not taken.
"""

from __future__ import annotations

import mmap

import numpy as np
from numba import types

from strata.base.compiled import cached_njit

WAYS = 8

# What `look_up` counts.
HITS, MISSES = range(2)

PAGE_BYTES = mmap.PAGESIZE
WILL_NEED = getattr(mmap, "MADV_WILLNEED", -1)
"""-1 where the system has no such advice."""

# The C library's: int madvise(void *address, size_t n_bytes, int advice).
_madvise = types.ExternalFunction("madvise", types.int32(types.int64, types.uint64, types.int32))


@cached_njit
def hash_rows(tokens, prev1, prev2, reset, multipliers, moduli, offsets, heads_per_order, limit, out):
    """Row ids of a window; returns -1, or the index of the first token that is not in [0, limit).

    tokens (T,) int64; prev1, prev2 the two tokens before, negative before the start of the sequence; multipliers (2 or
    3,), moduli and offsets (heads,) uint64; out (T, heads) int64. `limit` keeps every product below 2^63.
    """
    p1, p2 = prev1, prev2
    three = multipliers.size > 2
    for t in range(tokens.size):
        token = tokens[t]
        if token < 0 or token >= limit:
            return t
        c1 = p1 if p1 >= 0 else reset
        c2 = p2 if p2 >= 0 else reset
        if c1 == reset:
            c2 = reset
        mix = np.uint64(token) * multipliers[0] ^ np.uint64(c1) * multipliers[1]
        for h in range(heads_per_order):
            out[t, h] = np.int64(mix % moduli[h] + offsets[h])
        if three:
            mix ^= np.uint64(c2) * multipliers[2]
            for h in range(heads_per_order, 2 * heads_per_order):
                out[t, h] = np.int64(mix % moduli[h] + offsets[h])
        p2, p1 = p1, token
    return -1


@cached_njit
def look_up(ids, n_rows, places, index, unique, landed, keys, used, cached, staging, counts):
    """De-duplicates `ids` and copies the rows that the cache holds into `staging`.

    ids     (n,) int64
    places  (2^k >= 2n,) int32 scratch: a hash set over `unique`
    index   (n,) int32 out: where in `unique` and `staging` each id lies
    unique  (>= n,) int64 out; landed (>= n,) uint8 out: 1 where the row is in `staging`
    keys    (sets, WAYS) int64 row of each place or -1; used (sets, WAYS) uint8 second-chance bits
    cached  (sets, WAYS, row_bytes) and staging (>= n, row_bytes) uint8; counts (2,) int64 out
    Returns the number of unique ids, or -1 - i for an ids[i] outside [0, n_rows).
    """
    for i in range(ids.size):
        if ids[i] < 0 or ids[i] >= n_rows:
            return -1 - i
    places[:] = -1
    mask = np.int64(places.size - 1)
    sets = keys.shape[0]
    row_bytes = staging.shape[1]
    n = 0
    hits = 0
    for i in range(ids.size):
        row = ids[i]
        at = (row * np.int64(0x9E3779B97F4A7C1) >> 20) & mask
        while places[at] >= 0 and unique[places[at]] != row:
            at = (at + 1) & mask
        if places[at] >= 0:
            index[i] = places[at]
            continue
        places[at] = n
        index[i] = n
        unique[n] = row
        landed[n] = 0
        if sets:
            s = row % sets
            for w in range(WAYS):
                if keys[s, w] == row:
                    used[s, w] = 1
                    for b in range(row_bytes):
                        staging[n, b] = cached[s, w, b]
                    landed[n] = 1
                    hits += 1
                    break
        n += 1
    counts[HITS] = hits
    counts[MISSES] = n - hits
    return n


@cached_njit
def prefetch_rows(n, unique, landed, address, row_bytes):
    """Asks the system to read the pages of the rows that have not landed; returns without waiting.

    address  of row 0. Page faults would read one row after the other; this way the disk has all of them at once.
    """
    for i in range(n):
        if not landed[i]:
            start = address + unique[i] * row_bytes
            page = start & -PAGE_BYTES
            _madvise(page, start + row_bytes - page, WILL_NEED)


@cached_njit
def _keep(row, i, keys, used, hands, cached, staging):
    """Puts row `row`, which lies in staging[i], into the cache."""
    sets = keys.shape[0]
    if sets == 0:
        return
    s = row % sets
    for w in range(WAYS):
        if keys[s, w] == row:
            return  # another ticket read the same row meanwhile
    w = np.int64(hands[s])
    while keys[s, w] >= 0 and used[s, w]:
        used[s, w] = 0
        w = (w + 1) % WAYS
    keys[s, w] = row
    used[s, w] = 0
    hands[s] = (w + 1) % WAYS
    for b in range(staging.shape[1]):
        cached[s, w, b] = staging[i, b]


@cached_njit
def read_rows(n, unique, landed, table, keys, used, hands, cached, staging):
    """Reads the rows that have not landed from `table` (rows, row_bytes) into `staging` and into the cache."""
    for i in range(n):
        if not landed[i]:
            for b in range(staging.shape[1]):
                staging[i, b] = table[unique[i], b]
            landed[i] = 1
            _keep(unique[i], i, keys, used, hands, cached, staging)


@cached_njit
def keep_rows(n, unique, landed, keys, used, hands, cached, staging):
    """Puts the rows of `staging` that did not come from the cache into it."""
    for i in range(n):
        if not landed[i]:
            landed[i] = 1
            _keep(unique[i], i, keys, used, hands, cached, staging)


@cached_njit
def spread_iq4_nl(staging, index, half, levels, out):
    """Rows of IQ4_NL blocks -> out (n, row_width) float32; half (65536,) float32 of every f16, levels (16,) float32."""
    for i in range(index.size):
        row = index[i]
        for block in range(staging.shape[1] // 18):
            at = block * 18
            d = half[np.int64(staging[row, at]) | np.int64(staging[row, at + 1]) << 8]
            for j in range(16):
                code = np.int64(staging[row, at + 2 + j])
                out[i, block * 32 + j] = d * levels[code & 15]
                out[i, block * 32 + 16 + j] = d * levels[code >> 4]


@cached_njit
def spread_q8_0(staging, index, half, levels, out):
    """Rows of Q8_0 blocks -> out (n, row_width) float32."""
    for i in range(index.size):
        row = index[i]
        for block in range(staging.shape[1] // 34):
            at = block * 34
            d = half[np.int64(staging[row, at]) | np.int64(staging[row, at + 1]) << 8]
            for j in range(32):
                out[i, block * 32 + j] = d * np.float32(np.int8(staging[row, at + 2 + j]))


@cached_njit
def spread_f16(staging, index, half, levels, out):
    """Rows of F16 -> out (n, row_width) float32."""
    for i in range(index.size):
        row = index[i]
        for j in range(out.shape[1]):
            out[i, j] = half[np.int64(staging[row, 2 * j]) | np.int64(staging[row, 2 * j + 1]) << 8]


@cached_njit
def spread_bytes(staging, index, width, skip, out):
    """Rows of BF16 (width 2) or F32 (width 4) -> the bytes of float32, out (n, 4 row_width) uint8; skip = 4 - width."""
    for i in range(index.size):
        row = index[i]
        for j in range(out.shape[1] // 4):
            for b in range(skip):
                out[i, 4 * j + b] = 0
            for b in range(width):
                out[i, 4 * j + skip + b] = staging[row, width * j + b]
