"""Steps of a window's n-gram rows, which take microseconds and so keep the interpreter's lock (see `held_njit`)."""

from __future__ import annotations

from strata.base.compiled import held_njit
from strata.pack.ngram_jobs import spread_rows
from strata.pack.ngram_rows import hash_rows, keep_rows, look_up

MOST_IDS = 512
"""Row ids up to which a call counts as a window's."""


@held_njit
def hash_few(tokens, prev1, prev2, reset, multipliers, moduli, offsets, heads_per_order, limit, out):
    return hash_rows(tokens, prev1, prev2, reset, multipliers, moduli, offsets, heads_per_order, limit, out)


@held_njit
def look_up_few(ids, n_rows, places, index, unique, landed, keys, used, cached, staging, counts):
    return look_up(ids, n_rows, places, index, unique, landed, keys, used, cached, staging, counts)


@held_njit
def keep_few(n, unique, landed, keys, used, hands, cached, staging):
    keep_rows(n, unique, landed, keys, used, hands, cached, staging)


@held_njit
def spread_few(kind, staging, index, half, levels, out):
    spread_rows(kind, staging, index, half, levels, out)
