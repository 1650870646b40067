"""Suffix lookup: drafts copied from where the text's last tokens occurred before.

The history (prompt and accepted tokens) is indexed by trigrams: a table gives the latest end of a trigram, a chain the
ends before it. Both are undone in the order opposite to their growth, so a truncated lookup is in exactly the state of
one that never saw the removed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from strata.base.compiled import cached_njit
from strata.base.errors import BadArgument, need

GRAM = 3
_FIRST_CAPACITY = 1024
_NONE = -1


class Proposal(NamedTuple):
    """What followed an earlier occurrence of the last tokens.

    tokens        drafts, at most as many as asked for; empty: nothing matches
    match_length  tokens before the drafts that both places share, counted up to max_extend; 0 if nothing matches
    """

    tokens: tuple[int, ...] = ()
    match_length: int = 0


NOTHING = Proposal()


@njit(error_model="numpy")
def _slot(tokens, table, end):
    """Slot of the trigram that ends at `end`: the one that holds it, or the free one where it belongs."""
    a, b, c = tokens[end - 2], tokens[end - 1], tokens[end]
    word = np.uint64(a) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(b) * np.uint64(0xC2B2AE3D27D4EB4F)
    word = (word ^ (word >> np.uint64(29)) ^ np.uint64(c)) * np.uint64(0x165667B19E3779F9)
    mask = table.size - 1
    slot = np.int64(word >> np.uint64(33)) & mask
    while True:
        at = table[slot]
        if at < 0 or (tokens[at] == c and tokens[at - 1] == b and tokens[at - 2] == a):
            return slot
        slot = (slot + 1) & mask


@njit(error_model="numpy")
def _index(tokens, before, table, start, stop):
    for end in range(max(start, 2), stop):
        slot = _slot(tokens, table, end)
        before[end] = table[slot]
        table[slot] = end


@cached_njit
def _build(tokens, before, table, n):
    table[:] = -1
    _index(tokens, before, table, 0, n)


@cached_njit
def _append(tokens, before, table, n, new):
    """Append `new`; returns the place of the first value that is no int32 token id, or -1. Then nothing changed."""
    for i in range(new.size):
        if new[i] < 0 or new[i] > 0x7FFFFFFF:
            return i
    for i in range(new.size):
        tokens[n + i] = new[i]
    _index(tokens, before, table, n, n + new.size)
    return -1


@cached_njit
def _undo(tokens, before, table, n, kept):
    """Remove the trigrams that end at or behind `kept`, latest first: every slot gets back what it held."""
    for end in range(n - 1, max(kept, 2) - 1, -1):
        table[_slot(tokens, table, end)] = before[end]


@cached_njit
def _find(tokens, before, table, n, min_match, max_candidates, max_extend):
    """(end of the best earlier occurrence, tokens shared); (-1, 0) if none is long enough."""
    best, best_length = -1, 0
    end = before[n - 1]  # the last trigram is indexed: its chain leads to the earlier ones
    for _ in range(max_candidates):
        if end < 0:
            break
        length = 3
        while length < max_extend and length <= end and tokens[end - length] == tokens[n - 1 - length]:
            length += 1
        if length > best_length:
            best, best_length = end, length
        end = before[end]
    return (best, best_length) if best_length >= min_match else (-1, 0)


class SuffixLookup:
    """Drafts by lookup over one sequence of tokens.

    min_match       shortest match that proposes anything, at least 3
    max_candidates  the most recent earlier occurrences that are compared; the longest match wins, ties go to the latest
    max_extend      matches are measured up to this many tokens
    max_tokens      tokens remembered. Memory grows with the history to at most 24 x max_tokens bytes. Past the limit
                    the older half is forgotten, which rebuilds the index; positions stay absolute

    Depends on the tokens alone: no clock, no randomness. Not thread-safe.
    """

    def __init__(self, min_match: int = 3, max_candidates: int = 16, max_extend: int = 32, max_tokens: int = 1 << 18):
        need(min_match >= GRAM, "a lookup cannot match less than a trigram", found=min_match, needed=f">= {GRAM}")
        need(max_extend >= min_match, "max_extend is below min_match", found=max_extend, needed=f">= {min_match}")
        need(max_candidates >= 1, "a lookup needs a candidate", found=max_candidates, needed=">= 1")
        need(16 <= max_tokens <= 1 << 28, "max_tokens is out of range", found=max_tokens, needed=f"16..{1 << 28}")
        self.min_match, self.max_candidates, self.max_extend = min_match, max_candidates, max_extend
        self.max_tokens = max_tokens
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._first = 0  # absolute position of tokens[0]
        self._n = 0  # tokens held
        self._room(min(_FIRST_CAPACITY, self.max_tokens))

    def __len__(self) -> int:
        """Tokens of the sequence, forgotten ones included."""
        return self._first + self._n

    @property
    def n_bytes(self) -> int:
        """Memory of the index."""
        return self._tokens.nbytes + self._before.nbytes + self._table.nbytes

    def _room(self, capacity: int, kept: np.ndarray | None = None) -> None:
        """Arrays for `capacity` tokens, filled with `kept`; the table is at most half full."""
        self._tokens = np.empty(capacity, np.int32)
        self._before = np.full(capacity, _NONE, np.int32)
        self._table = np.full(1 << (2 * capacity - 1).bit_length(), _NONE, np.int32)
        self._n = 0
        if kept is not None:
            self._n = len(kept)
            self._tokens[: self._n] = kept
            _build(self._tokens, self._before, self._table, self._n)

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append token ids (integers, 0 to 2^31 - 1) to the sequence."""
        new = np.ascontiguousarray(tokens)
        if new.size == 0:
            return
        if new.ndim != 1 or new.dtype.kind not in "iu":
            raise BadArgument("tokens must be one row of integers", found=f"{new.dtype} of shape {new.shape}",
                              needed="integers (n,)")  # fmt: skip
        if new.dtype != np.int32 and new.dtype != np.int64:
            new = new.astype(np.int64)
        if self._n + new.size > self._tokens.size:
            self._grow(new)
            new = new[max(0, new.size - (self.max_tokens - self._n)) :]
        wrong = _append(self._tokens, self._before, self._table, self._n, new)
        if wrong >= 0:
            raise BadArgument("this is no token id", found=int(new[wrong]), needed="0..2^31 - 1")
        self._n += new.size

    def _grow(self, new: np.ndarray) -> None:
        """Make room for `new`: larger arrays, or, at the limit, without the oldest tokens."""
        wanted = self._n + new.size
        held = self._tokens[: self._n]
        if wanted <= self.max_tokens:
            self._room(min(self.max_tokens, max(2 * self._tokens.size, wanted)), held)
            return
        outside = [int(t) for t in (new.min(), new.max()) if not 0 <= t < 1 << 31]
        if outside:
            raise BadArgument("this is no token id", found=outside[0], needed="0..2^31 - 1")
        kept = min(self._n, max(0, self.max_tokens // 2 - new.size))
        left_out = max(0, new.size - self.max_tokens)
        self._first += self._n - kept + left_out
        self._room(self.max_tokens, held[self._n - kept :])

    def truncate(self, n: int) -> None:
        """Go back to the first n tokens, 0 <= n <= len(self); costs no more than the tokens removed (or kept).

        If the limit has made it forget all of them, the lookup is empty until tokens follow.
        """
        need(0 <= n <= len(self), "a lookup is truncated to a prefix of itself", found=n, needed=f"0..{len(self)}")
        kept = n - self._first
        if kept <= 0:
            self._first, self._n = n, 0
            self._table[:] = _NONE
            return
        if kept < self._n // 4:
            _build(self._tokens, self._before, self._table, kept)
        else:
            _undo(self._tokens, self._before, self._table, self._n, kept)
        self._n = kept

    def propose(self, k: int, after: Sequence[int] = ()) -> Proposal:
        """At most k drafts for the tokens that come next; what is proposed was in the history, in this order.

        after  drafts not accepted yet, taken as the sequence's last tokens for this call
        """
        if len(after):
            n = len(self)
            self.extend(after)
            found = self.propose(k)
            self.truncate(n)
            return found
        if k <= 0 or self._n <= GRAM:
            return NOTHING
        end, length = _find(self._tokens, self._before, self._table, self._n,
                            self.min_match, self.max_candidates, self.max_extend)  # fmt: skip
        if end < 0:
            return NOTHING
        return Proposal(tuple(self._tokens[end + 1 : min(end + 1 + k, self._n)].tolist()), length)
