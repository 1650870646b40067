"""How quantised matrices lie in device memory: the bytes of the file in an order that suits the products.

Rows are cut into row blocks of four. Along a row, a step is the work of eight threads, 64 bytes of codes in most formats:
four or two blocks of 32 and 64 values, or a super-block. A chunk is one or two steps. Inside a chunk the bytes are sorted
into sections; a section has, for each of the four rows, some items (one for each thread, or one for 2, 4 or 8 of them),
and an item holds its bytes of all steps side by side. So a warp reads its codes as one run of 16-byte words and every
scale from a place that is aligned for it:

    row block  = chunk, chunk, .., steps that are left over, each alone; rounded up to 16 bytes
    chunk      = section, section, ..            section = [row][item][step][bytes]

Nothing is lost, and nothing added but that rounding and zero rows up to a multiple of four. `gemv/core.cuh` reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.pack.formats import BlockFormat

ROWS = 4
"""Rows of a row block."""

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Layout:
    """Steps of a chunk, blocks of a step, and (items, bytes) of the sections of a step.

    split  raw blocks uint8 (rows, steps, blocks of a step, block_bytes) -> sections uint8 (rows, steps, items, bytes)
    join   the inverse
    """

    steps: int
    blocks: int
    sections: tuple[tuple[int, int], ...]
    split: Callable[[np.ndarray], Arrays]
    join: Callable[[Arrays], np.ndarray]


# ---- rearranging bits: every pair is an inverse of the other


def _fields(x: np.ndarray, bits: int) -> np.ndarray:
    """uint8 (.., n) -> (.., n, 8 / bits): the fields of each byte, low ones first."""
    return (x[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)) & np.uint8((1 << bits) - 1)


def _bytes(fields: np.ndarray, bits: int) -> np.ndarray:
    """Inverse of _fields."""
    return np.bitwise_or.reduce(fields << np.arange(0, 8, bits, dtype=np.uint8), axis=-1).astype(np.uint8)


def _transposed(x: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...], bits: int) -> np.ndarray:
    """The fields of the last axis seen as `shape`, with its axes in another order, as bytes again."""
    lead = x.shape[:-1]
    fields = _fields(x, bits).reshape(*lead, *shape)
    order = (*range(len(lead)), *(len(lead) + a for a in axes))
    return _bytes(fields.transpose(order).reshape(*lead, -1, 8 // bits), bits)


def _back(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argsort(axes))


def _permuted(shape: tuple[int, ...], axes: tuple[int, ...], bits: int) -> tuple[Callable, Callable]:
    """(there, back) of _transposed."""
    there_shape = tuple(shape[a] for a in axes)
    return (lambda x: _transposed(x, shape, axes, bits)), (lambda x: _transposed(x, there_shape, _back(axes), bits))


# Words of four bytes whose nibbles are (byte, half): first all low ones, then all high ones.
_halves, _halves_back = _permuted((4, 2), (1, 0), 4)
# Q2_0: 16 codes of a word (value // 4, value % 4) to (value % 4, value // 4).
_quads, _quads_back = _permuted((4, 4), (1, 0), 2)
# Q5_0, Q5_1: 32 bits (half, thread, lane, byte) to (thread, byte, lane, half).
_fifths, _fifths_back = _permuted((2, 2, 2, 4), (1, 3, 2, 0), 1)
# Q5_K: bytes (thread, lane, byte) of bits (i // 2, h, i % 2) to words (h, thread) of bytes of bits (lane, i).
_fifths_k, _fifths_k_back = _permuted((4, 2, 4, 2, 2, 2), (4, 0, 2, 1, 3, 5), 1)
# Q3_K: bytes (thread, lane, byte) of bits (h, i) to words (h, thread) of bytes of bits (lane, i).
_thirds, _thirds_back = _permuted((4, 2, 4, 2, 4), (3, 0, 2, 1, 4), 1)
# Q6_K: bytes (half, thread % 4, lane, byte) of fields (nibble, thread // 4) to words (thread, lane) of bytes of fields
# (half, nibble).
_tops, _tops_back = _permuted((2, 4, 2, 4, 2, 2), (5, 1, 2, 3, 0, 4), 2)
# Q2_K: 16 bytes (h, i, u) of nibbles (scale, minimum) to nibbles (h, u) x i of the scales.
_scales_2, _scales_2_back = _permuted((2, 4, 2), (0, 2, 1), 4)
# Minima of Q2_K: (h, j, u) to j x (h, u).
_minima_2, _minima_2_back = _permuted((2, 4, 2), (1, 0, 2), 4)
# Q3_K: low nibbles, bytes (i, u) of nibbles h, to (h, u) x i; top fields, bytes (i % 2, u) of fields (h, i // 2), to
# (h, u) x i.
_lows_3, _lows_3_back = _permuted((4, 2, 2), (2, 1, 0), 4)
_tops_3, _tops_3_back = _permuted((2, 2, 2, 2), (2, 1, 3, 0), 2)


def _words(function: Callable, size: int) -> Callable:
    """Apply a rearrangement to pieces of `size` bytes of the last axis."""
    return lambda x: function(x.reshape(*x.shape[:-1], -1, size)).reshape(x.shape)


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _inverted(x: np.ndarray) -> np.ndarray:
    return ~x


# ---- formats by their parts


@dataclass(frozen=True)
class _Part:
    """A run of bytes of each block that becomes a section of `items` for a step of `blocks` blocks."""

    start: int
    stop: int
    items: int
    there: Callable = _same
    back: Callable = _same


def _by_parts(steps: int, blocks: int, parts: tuple[_Part, ...]) -> Layout:
    """A layout whose sections are runs of a block's bytes, rearranged inside the run."""

    def split(raw: np.ndarray) -> Arrays:
        lead = raw.shape[:2]
        return [p.there(raw[..., p.start : p.stop]).reshape(*lead, p.items, -1) for p in parts]

    def join(sections: Arrays) -> np.ndarray:
        raw = np.empty((*sections[0].shape[:2], blocks, max(p.stop for p in parts)), np.uint8)
        for p, s in zip(parts, sections, strict=True):
            raw[..., p.start : p.stop] = p.back(s.reshape(*raw.shape[:3], -1))
        return raw

    sections = tuple((p.items, blocks * (p.stop - p.start) // p.items) for p in parts)
    return Layout(steps, blocks, sections, split, join)


def _then(first: Callable, second: Callable) -> Callable:
    return lambda x: second(first(x))


def _interleave(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[Callable, Callable]:
    """Reorder whole bytes of the last axis, seen as `shape`."""
    return _permuted(shape, axes, 8)


_PAIR_ROWS = _interleave((2, 8, 8), (1, 0, 2))
"""Two runs of 64 bytes to eight threads: eight bytes of each."""
_FOUR_RUNS = _interleave((2, 2, 4, 8), (1, 2, 0, 3))
"""Q4_K: bytes (i // 2, h, thread % 4, 8) to threads (h, thread % 4) of (i // 2, 8)."""
_SUB_SCALES_6 = _interleave((4, 4), (1, 0))


def _k_scales(raw: np.ndarray) -> Arrays:
    """Q2_K: 16 bytes of (scale, minimum) nibbles to four items of two bytes of scales and two of minima."""
    s = raw[..., :16]
    scales = _scales_2(_bytes((s & 15).reshape(*s.shape[:-1], 8, 2), 4))
    minima = _minima_2(_bytes((s >> 4).reshape(*s.shape[:-1], 8, 2), 4))
    return np.concatenate([scales.reshape(*s.shape[:2], 4, 2), minima.reshape(*s.shape[:2], 4, 2)], -1)


def _k_scales_back(item: np.ndarray) -> np.ndarray:
    lead = item.shape[:2]
    scales = _fields(_scales_2_back(item[..., :2].reshape(*lead, 8)), 4).reshape(*lead, 16)
    minima = _fields(_minima_2_back(item[..., 2:].reshape(*lead, 8)), 4).reshape(*lead, 16)
    return scales | minima << 4


def _q2_k() -> Layout:
    def split(raw: np.ndarray) -> Arrays:
        lead = raw.shape[:2]
        return [raw[..., 16:80].reshape(*lead, 8, 8), _k_scales(raw), raw[..., 80:].reshape(*lead, 1, 4)]

    def join(s: Arrays) -> np.ndarray:
        lead = s[0].shape[:2]
        parts = (_k_scales_back(s[1]), s[0].reshape(*lead, 64), s[2].reshape(*lead, 4))
        return np.concatenate(parts, -1).reshape(*lead, 1, 84)

    return Layout(2, 1, ((8, 8), (4, 4), (1, 4)), split, join)


def _pairs_of(first: tuple[int, int], second: tuple[int, int], rest: tuple[_Part, ...]) -> Layout:
    """A layout whose first section takes eight items from two runs of a block; the rest by parts."""
    base = _by_parts(2, 1, rest)
    widths = [(b - a) // 8 for a, b in (first, second)]

    def split(raw: np.ndarray) -> Arrays:
        lead = raw.shape[:2]
        runs = [raw[..., a:b].reshape(*lead, 8, -1) for a, b in (first, second)]
        return [np.concatenate(runs, -1), *base.split(raw)]

    def join(sections: Arrays) -> np.ndarray:
        raw = base.join(sections[1:])
        lead = raw.shape[:3]
        raw[..., first[0] : first[1]] = sections[0][..., : widths[0]].reshape(*lead, -1)
        raw[..., second[0] : second[1]] = sections[0][..., widths[0] :].reshape(*lead, -1)
        return raw

    return Layout(2, 1, ((8, sum(widths)), *base.sections), split, join)


def _small(
    blocks: int, code_bytes: int, head: tuple[_Part, ...], codes: tuple[Callable, Callable] = (_same, _same)
) -> Layout:
    """Blocks of 32 and 64 values: `head` before `code_bytes` of codes, a step of `blocks` blocks."""
    start = max(p.stop for p in head)
    return _by_parts(2, blocks, (_Part(start, start + code_bytes, 8, *codes), *head))


_CODEBOOK = (_words(_halves, 4), _words(_halves_back, 4))
_Q5_BITS = (_fifths, _fifths_back)
_Q5_BITS_INVERTED = (_then(_inverted, _fifths), _then(_fifths_back, _inverted))

LAYOUTS: dict[str, Layout] = {
    "Q4_0": _small(4, 16, (_Part(0, 2, 4),)),
    "Q4_1": _small(4, 16, (_Part(0, 4, 4),)),
    "IQ4_NL": _small(4, 16, (_Part(0, 2, 4),), _CODEBOOK),
    "MXFP4": _small(4, 16, (_Part(0, 1, 4),), _CODEBOOK),
    "NVFP4": _small(2, 32, (_Part(0, 4, 8),), (_words(_halves, 4), _words(_halves_back, 4))),
    "Q5_0": _by_parts(2, 4, (_Part(6, 22, 8), _Part(2, 6, 8, *_Q5_BITS_INVERTED), _Part(0, 2, 4))),
    "Q5_1": _by_parts(2, 4, (_Part(8, 24, 8), _Part(4, 8, 8, *_Q5_BITS), _Part(0, 4, 4))),
    "Q8_0": _small(2, 32, (_Part(0, 2, 2),)),
    "Q2_0": _small(4, 16, (_Part(0, 2, 4),), (_words(_quads, 4), _words(_quads_back, 4))),
    "Q2_K": _q2_k(),
    "Q3_K": _by_parts(
        2,
        1,
        (
            _Part(32, 96, 8),
            _Part(0, 32, 8, _then(_inverted, _thirds), _then(_thirds_back, _inverted)),
            _Part(96, 104, 4, _lows_3, _lows_3_back),
            _Part(104, 108, 4, _tops_3, _tops_3_back),
            _Part(108, 110, 1),
        ),
    ),
    "Q4_K": _by_parts(1, 1, (_Part(16, 144, 8, *_FOUR_RUNS), _Part(0, 16, 1))),
    "Q5_K": _by_parts(
        1, 1, (_Part(48, 176, 8, *_FOUR_RUNS), _Part(16, 48, 8, _fifths_k, _fifths_k_back), _Part(0, 16, 1))
    ),
    "Q6_K": _by_parts(
        2,
        1,
        (
            _Part(0, 64, 8),
            _Part(64, 128, 8),
            _Part(128, 192, 8, _tops, _tops_back),
            _Part(192, 208, 4, *_SUB_SCALES_6),
            _Part(208, 210, 1),
        ),
    ),
    "IQ4_XS": _by_parts(
        1,
        1,
        (
            _Part(8, 136, 8, _then(_words(_halves, 4), _PAIR_ROWS[0]), _then(_PAIR_ROWS[1], _words(_halves_back, 4))),
            _Part(0, 8, 1),
        ),
    ),
    "IQ2_XXS": _by_parts(2, 1, (_Part(2, 66, 8), _Part(0, 2, 1))),
    "IQ2_XS": _by_parts(2, 1, (_Part(2, 66, 8), _Part(66, 74, 8), _Part(0, 2, 1))),
    "IQ3_XXS": _by_parts(2, 1, (_Part(2, 66, 8), _Part(66, 98, 8), _Part(0, 2, 1))),
    "IQ3_S": _by_parts(
        2, 1, (_Part(2, 66, 8), _Part(74, 106, 8), _Part(66, 74, 8), _Part(106, 110, 1), _Part(0, 2, 1))
    ),
    "IQ1_S": _by_parts(2, 1, (_Part(2, 34, 8), _Part(34, 50, 8), _Part(0, 2, 1))),
    "IQ1_M": _by_parts(2, 1, (_Part(0, 32, 8), _Part(32, 48, 8), _Part(48, 56, 1))),
}


def _iq2_s() -> Layout:
    """Indices with their signs, high bits with their scales."""
    codes = _pairs_of((2, 34), (34, 66), (_Part(0, 2, 1),))
    bits = _pairs_of((66, 74), (74, 82), (_Part(0, 2, 1),))

    def split(raw: np.ndarray) -> Arrays:
        first, d = codes.split(raw)
        return [first, bits.split(raw)[0], d]

    def join(s: Arrays) -> np.ndarray:
        raw = np.concatenate([codes.join([s[0], s[2]]), np.empty((*s[0].shape[:2], 1, 16), np.uint8)], -1)
        raw[..., 66:74] = s[1][..., None, :, 0]
        raw[..., 74:82] = s[1][..., None, :, 1]
        return raw

    return Layout(2, 1, ((8, 8), (8, 2), (1, 2)), split, join)


LAYOUTS["IQ2_S"] = _iq2_s()
