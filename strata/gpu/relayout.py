"""How quantised matrices lie in device memory: the bytes of the file in an order that suits the products.

Rows are cut into row blocks of four. Along a row, a step is the work of eight threads, 64 bytes of codes in most
formats: four or two blocks of 32 and 64 values, or a super-block. A chunk is one or two steps. Inside a chunk the bytes
are sorted into sections; a section has, for each of the four rows, some items (one for each thread, or one for 2, 4 or
8 of them), and an item holds its bytes of all steps side by side. So a warp reads its codes as one run of 16-byte words
(8-byte ones in formats of few bits) and every scale from a place that is aligned for it:

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


def _by_word(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """A function of uint32 words, on the bytes of the last axis."""
    return lambda x: function(np.ascontiguousarray(x).view("<u4")).view(np.uint8)


def _exchange(w: np.ndarray, shift: int, mask: int) -> np.ndarray:
    """Swap the bits of `mask` with those `shift` places above them."""
    t = (w ^ (w >> np.uint32(shift))) & np.uint32(mask)
    return w ^ t ^ (t << np.uint32(shift))


@_by_word
def _halves(w: np.ndarray) -> np.ndarray:
    """Words whose nibbles are (byte, half): first all low ones, then all high ones."""
    return _exchange(_exchange(w, 4, 0x00F000F0), 8, 0x0000FF00)


@_by_word
def _halves_back(w: np.ndarray) -> np.ndarray:
    return _exchange(_exchange(w, 8, 0x0000FF00), 4, 0x00F000F0)


@_by_word
def _quads(w: np.ndarray) -> np.ndarray:
    """Q2_0: 16 codes of a word (value // 4, value % 4) to (value % 4, value // 4); its own inverse."""
    return _exchange(_exchange(w, 6, 0x00CC00CC), 12, 0x0000F0F0)


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

    return Layout(1, 1, ((8, 8), (4, 4), (1, 4)), split, join)


def _iq2_s() -> Layout:
    """Indices beside their signs, high bits beside their scales."""

    def split(raw: np.ndarray) -> Arrays:
        lead = raw.shape[:2]
        runs = [raw[..., a : a + n].reshape(*lead, 8, -1) for a, n in ((2, 32), (34, 32), (66, 8), (74, 8))]
        return [np.concatenate(runs[:2], -1), np.concatenate(runs[2:], -1), raw[..., :2].reshape(*lead, 1, 2)]

    def join(s: Arrays) -> np.ndarray:
        lead = s[0].shape[:2]
        parts = (s[2], s[0][..., :4], s[0][..., 4:], s[1][..., :1], s[1][..., 1:])
        return np.concatenate([p.reshape(*lead, -1) for p in parts], -1).reshape(*lead, 1, 82)

    return Layout(2, 1, ((8, 8), (8, 2), (1, 2)), split, join)


def _small(
    blocks: int, code_bytes: int, head: tuple[_Part, ...], codes: tuple[Callable, Callable] = (_same, _same)
) -> Layout:
    """Blocks of 32 and 64 values: `head` before `code_bytes` of codes, a step of `blocks` blocks."""
    start = max(p.stop for p in head)
    return _by_parts(2, blocks, (_Part(start, start + code_bytes, 8, *codes), *head))


_CODEBOOK = (_halves, _halves_back)
_Q5_BITS = (_fifths, _fifths_back)
_Q5_BITS_INVERTED = (_then(_inverted, _fifths), _then(_fifths_back, _inverted))

LAYOUTS: dict[str, Layout] = {
    "Q4_0": _small(4, 16, (_Part(0, 2, 4),)),
    "Q4_1": _small(4, 16, (_Part(0, 4, 4),)),
    "IQ4_NL": _small(4, 16, (_Part(0, 2, 4),), _CODEBOOK),
    "MXFP4": _small(4, 16, (_Part(0, 1, 4),), _CODEBOOK),
    "NVFP4": _small(2, 32, (_Part(0, 4, 8),), _CODEBOOK),
    "Q5_0": _by_parts(2, 4, (_Part(6, 22, 8), _Part(2, 6, 8, *_Q5_BITS_INVERTED), _Part(0, 2, 4))),
    "Q5_1": _by_parts(2, 4, (_Part(8, 24, 8), _Part(4, 8, 8, *_Q5_BITS), _Part(0, 4, 4))),
    "Q8_0": _small(2, 32, (_Part(0, 2, 2),)),
    "Q2_0": _small(4, 16, (_Part(0, 2, 4),), (_quads, _quads)),
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
            _Part(8, 136, 8, _then(_halves, _PAIR_ROWS[0]), _then(_PAIR_ROWS[1], _halves_back)),
            _Part(0, 8, 1),
        ),
    ),
    "IQ2_XXS": _by_parts(2, 1, (_Part(2, 66, 8), _Part(0, 2, 1))),
    "IQ2_XS": _by_parts(2, 1, (_Part(2, 66, 8), _Part(66, 74, 8), _Part(0, 2, 1))),
    "IQ3_XXS": _by_parts(2, 1, (_Part(2, 66, 8), _Part(66, 98, 8), _Part(0, 2, 1))),
    "IQ3_S": _by_parts(
        1, 1, (_Part(2, 66, 8), _Part(74, 106, 8), _Part(66, 74, 8), _Part(106, 110, 1), _Part(0, 2, 1))
    ),
    "IQ1_S": _by_parts(2, 1, (_Part(2, 34, 8), _Part(34, 50, 8), _Part(0, 2, 1))),
    "IQ2_S": _iq2_s(),
    "IQ1_M": _by_parts(1, 1, (_Part(0, 32, 8), _Part(32, 48, 8), _Part(48, 56, 1))),
}


# ---- whole matrices


def row_block_bytes(format: BlockFormat, K: int) -> int:
    """Device bytes of four rows of K values."""
    return -(-ROWS * format.row_bytes(K) // 16) * 16


def relayout_bytes(format: BlockFormat, rows: int, K: int) -> int:
    """Device bytes of a (rows, K) matrix."""
    _layout(format)
    return -(-rows // ROWS) * row_block_bytes(format, K)


def _layout(format: BlockFormat) -> Layout:
    layout = LAYOUTS.get(format.name)
    need(
        layout is not None, f"{format.name} has no device layout", needed="a quantised format", advice="use float_gemv"
    )
    return layout


def _pieces(layout: Layout, n_blocks: int) -> list[tuple[int, int, int]]:
    """(first step, steps, blocks of a step) of the chunks together and of every step left over."""
    chunks = n_blocks // (layout.steps * layout.blocks)
    out = [(0, chunks * layout.steps, layout.blocks)] if chunks else []
    for step in range(chunks * layout.steps, -(-n_blocks // layout.blocks)):
        out.append((step, 1, min(layout.blocks, n_blocks - step * layout.blocks)))
    return out


def relayout(format: BlockFormat, raw: np.ndarray) -> np.ndarray:
    """raw uint8 (rows, row_bytes) as in the file -> uint8 (relayout_bytes,) as on the device."""
    layout = _layout(format)
    need(
        raw.dtype == np.uint8 and raw.ndim == 2 and raw.shape[1] % format.block_bytes == 0 and raw.size > 0,
        f"not rows of {format.name} blocks",
        found=f"{raw.dtype} {raw.shape}",
        needed=f"uint8 (rows, n * {format.block_bytes})",
    )
    rows, n_blocks = raw.shape[0], raw.shape[1] // format.block_bytes
    steps, quads = -(-n_blocks // layout.blocks), -(-rows // ROWS)
    whole = raw
    if rows % ROWS or n_blocks % layout.blocks:
        whole = np.zeros((quads * ROWS, steps * layout.blocks * format.block_bytes), np.uint8)
        whole[:rows, : raw.shape[1]] = raw
    sections = layout.split(whole.reshape(quads * ROWS, steps, layout.blocks, format.block_bytes))
    out = np.zeros((quads, row_block_bytes(format, n_blocks * format.block_values)), np.uint8)
    at = 0
    for first, n, blocks in _pieces(layout, n_blocks):
        side = layout.steps if first == 0 and n > 1 else 1  # steps side by side in an item
        parts = []
        for (items, n_bytes), s in zip(layout.sections, sections, strict=True):
            used = items * blocks // layout.blocks
            piece = s[:, first : first + n, :used].reshape(quads, ROWS, n // side, side, used, n_bytes)
            parts.append(piece.transpose(0, 2, 1, 4, 3, 5).reshape(quads, n // side, -1))
        piece = np.concatenate(parts, -1).reshape(quads, -1)
        out[:, at : at + piece.shape[1]] = piece
        at += piece.shape[1]
    return out.reshape(-1)


def restore(format: BlockFormat, relaid: np.ndarray, rows: int, K: int) -> np.ndarray:
    """Inverse of relayout: uint8 (relayout_bytes,) -> (rows, row_bytes)."""
    layout = _layout(format)
    need(relaid.dtype == np.uint8 and relaid.size == relayout_bytes(format, rows, K), f"not a {format.name} matrix",
         found=f"{relaid.dtype} {relaid.shape}", needed=f"uint8, {relayout_bytes(format, rows, K)} bytes")  # fmt: skip
    n_blocks = K // format.block_values
    steps, quads = -(-n_blocks // layout.blocks), -(-rows // ROWS)
    data = relaid.reshape(quads, -1)
    sections = [np.zeros((quads * ROWS, steps, *shape), np.uint8) for shape in layout.sections]
    at = 0
    for first, n, blocks in _pieces(layout, n_blocks):
        side = layout.steps if first == 0 and n > 1 else 1
        sizes = [ROWS * side * items * blocks // layout.blocks * n_bytes for items, n_bytes in layout.sections]
        whole = data[:, at : at + n // side * sum(sizes)].reshape(quads, n // side, sum(sizes))
        at += n // side * sum(sizes)
        start = 0
        for (items, n_bytes), size, s in zip(layout.sections, sizes, sections, strict=True):
            used = items * blocks // layout.blocks
            piece = whole[..., start : start + size].reshape(quads, n // side, ROWS, used, side, n_bytes)
            piece = piece.transpose(0, 2, 1, 4, 3, 5).reshape(quads * ROWS, n, used, n_bytes)
            s[:, first : first + n, :used] = piece
            start += size
    raw = layout.join(sections).reshape(quads * ROWS, -1)
    return np.ascontiguousarray(raw[:rows, : format.row_bytes(K)])
