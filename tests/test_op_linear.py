"""Products of one input with several matrices: how their rows are cut, and that cuts do not matter."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.base.arithmetic import dot_float
from strata.cpu.gemv.table import kernel_table
from strata.cpu.linear import (
    CHUNK_BYTES,
    PAIRED_BYTES,
    SMALL_BYTES,
    linear_chunk,
    split_rows,
    split_tiles,
    tile_chunk,
)
from strata.pack.formats import by_name
from tests.canonical.call import Call, assert_same, plain, room

SHAPES = st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 20000)), min_size=1, max_size=6)


@given(SHAPES, st.integers(1, 64))
def test_every_row_is_in_exactly_one_piece(shapes, threads):
    rows, row_bytes = [r for r, _ in shapes], [b for _, b in shapes]
    starts, pieces = split_rows(rows, row_bytes, threads)
    assert starts.dtype == pieces.dtype == np.int64 and pieces.shape[1] == 3
    assert starts[0] == 0 and starts[-1] == len(pieces) and (np.diff(starts) >= 0).all()
    assert (pieces[:, 2] > pieces[:, 1]).all()
    for index, count in enumerate(rows):
        mine = pieces[pieces[:, 0] == index]
        assert mine[0, 1] == 0 and mine[-1, 2] == count and (mine[1:, 1] == mine[:-1, 2]).all()
    assert (np.diff(pieces[:, 0]) >= 0).all()


@given(SHAPES, st.integers(1, 64))
def test_chunks_are_of_about_equal_bytes(shapes, threads):
    rows, row_bytes = [r for r, _ in shapes], [b for _, b in shapes]
    starts, pieces = split_rows(rows, row_bytes, threads)
    total, widest = sum(r * b for r, b in shapes), max(row_bytes)
    n_chunks = len(starts) - 1
    if threads == 1 or total <= SMALL_BYTES:
        assert n_chunks == 1
        return
    piece_bytes = (pieces[:, 2] - pieces[:, 1]) * np.array(row_bytes)[pieces[:, 0]]
    chunk_bytes = [piece_bytes[a:b].sum() for a, b in pairwise(starts)]
    assert n_chunks <= max(2 * threads, -(-total // CHUNK_BYTES))
    unit = 2 if widest > PAIRED_BYTES else 1  # rows that stay together
    assert max(chunk_bytes) <= CHUNK_BYTES + (1 + unit) * widest


def test_long_rows_are_handed_out_in_pairs():
    starts, pieces = split_rows([324, 7], [20480, 40960], 2)
    assert ((pieces[:, 2] - pieces[:, 1]) % 2 == 0)[:-1].all() and len(starts) > 80


@given(SHAPES, st.integers(9, 300), st.integers(1, 64), st.sampled_from((0, 64, 4096, 1 << 20)))
def test_every_product_is_in_exactly_one_tile(shapes, T, threads, record_bytes):
    rows, row_bytes = [r for r, _ in shapes], [b for _, b in shapes]
    tiles = split_tiles(rows, row_bytes, T, threads, [record_bytes * (i % 2) for i in range(len(rows))])
    assert tiles.dtype == np.int64 and tiles.shape[1] == 5
    assert (tiles[:, 2] > tiles[:, 1]).all() and (tiles[:, 4] > tiles[:, 3]).all()
    for index, count in enumerate(rows):
        seen = np.zeros((count, T), np.int8)
        for _, first, last, low, high in tiles[tiles[:, 0] == index]:
            assert last <= count and high <= T
            seen[first:last, low:high] += 1
        assert (seen == 1).all()


def matrices(rng, T, K, names, rows):
    """x (T, K), outputs, the words of matrices for a record, what they keep alive, the matrices as float32."""
    x = plain(rng, T, K)
    weights, wide = [], []
    for name, n in zip(names, rows, strict=True):
        w = plain(rng, n, K)
        if name == "BF16":
            w = w.view(np.uint32) >> 16
            weights.append(w.astype(np.uint16))
            wide.append((w << 16).astype(np.uint32).view(np.float32))
        else:
            weights.append(w.astype(np.float16 if name == "F16" else np.float32))
            wide.append(weights[-1].astype(np.float32))
    kernels = {name: kernel_table(by_name(name)) for name in names}
    out = [room(T, n) for n in rows]
    words = []
    for name, n, w, y in zip(names, rows, weights, out, strict=True):
        matrix = (w.ctypes.data, w.itemsize * K, n, K, kernels[name].ctypes.data)
        words.append((*matrix, x.ctypes.data, 4 * K, y.ctypes.data, 4 * n))
    return x, out, np.array(words, np.int64), (weights, kernels), wide


NAMES, ROWS, K = ["F32", "BF16", "F32", "F16"], [70, 1, 40, 129], 300
ROW_BYTES = [4 * K, 2 * K, 4 * K, 2 * K]


@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("threads", [1, 2, 16])
def test_product_does_not_depend_on_the_cut(T, threads):
    rng = np.random.default_rng(T)
    x, out, words, _kept, wide = matrices(rng, T, K, NAMES, ROWS)
    starts, pieces = split_rows(ROWS, ROW_BYTES, threads)
    n_chunks = len(starts) - 1
    assert n_chunks == (1 if threads == 1 else 2 * threads)
    call = Call(linear_chunk, starts, pieces, words, T, *out)  # outputs only for their guards
    call.run(n_chunks, order=rng.permutation(n_chunks))
    for w, y in zip(wide, out, strict=True):
        assert_same(y, dot_float(w, x[:, None, :]))


@pytest.mark.parametrize("T", [9, 33, 70])
@pytest.mark.parametrize("threads", [1, 2, 16])
def test_product_of_many_rows_does_not_depend_on_the_tiles(T, threads):
    rng = np.random.default_rng(T)
    x, out, words, _kept, wide = matrices(rng, T, K, NAMES, ROWS)
    tiles = split_tiles(ROWS, ROW_BYTES, T, threads)
    call = Call(tile_chunk, tiles, words, *out)
    call.run(len(tiles), order=rng.permutation(len(tiles)))
    for w, y in zip(wide, out, strict=True):
        assert_same(y, dot_float(w, x[:, None, :]))
