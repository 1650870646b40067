"""The n-gram table against plain Python integers and the formats' own dequantisers."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument, FileError, ModelError
from strata.base.geometry import NgramGeometry
from strata.pack.formats import FORMATS
from strata.pack.gguf_file import GgufFile
from strata.pack.ngram import TABLE_NAME, NgramTable
from tests.gguf_maker import Made, MadeTensor

REAL = NgramGeometry(
    layer=1, order=3, heads_per_order=8, row_width=160, conv_taps=4, reset_token=248044, image_token=248056,
    multipliers=(23703573157769, 20109073645365, 8052911324071),
    moduli=(20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
            20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171),
    offsets=(0, 20000003, 40000026, 60000059, 80000106, 100000165, 120000228, 140000297,
             160000374, 180000455, 200000548, 220000655, 240000802, 260000955, 280001114, 300001275),
)  # fmt: skip
SMALL = NgramGeometry(
    layer=1, order=3, heads_per_order=2, row_width=64, conv_taps=4, reset_token=7, image_token=8,
    multipliers=(2**55 + 1, 2**54 + 3, 2**53 + 5), moduli=(11, 13, 17, 19), offsets=(0, 11, 24, 41),
)  # fmt: skip


def naive_ids(tokens: list[int], prev1: int, prev2: int, g: NgramGeometry) -> list[list[int]]:
    """Row ids by the written rule, in Python integers; negative previous tokens lie before the start."""
    history = [prev2, prev1, *tokens]
    rows = []
    for t, token in enumerate(tokens):
        context = [token]
        cut = False
        for back in range(1, g.order):
            before = history[t + 2 - back]
            cut = cut or before < 0 or before == g.reset_token
            context.append(g.reset_token if cut else before)
        row, mix = [], context[0] * g.multipliers[0]
        for n in range(1, g.order):
            mix ^= context[n] * g.multipliers[n]
            for h in range((n - 1) * g.heads_per_order, n * g.heads_per_order):
                row.append(mix % g.moduli[h] + g.offsets[h])
        assert mix < 2**64
        rows.append(row)
    return rows


def table_file(path, ggml_type: int, rows: int, width: int, seed: int = 0) -> GgufFile:
    block = FORMATS[ggml_type]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows, width // block.block_values * block.block_bytes), np.uint8)
    if block.name == "F32":
        data = rng.standard_normal((rows, width)).astype(np.float32).view(np.uint8)
    elif block.name == "BF16":
        data = (rng.standard_normal((rows, width)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif block.name == "F16":
        data = rng.standard_normal((rows, width)).astype(np.float16)
    else:  # scales lie in the first two bytes of these blocks: make them finite, of any sign and size
        scales = (10.0 ** rng.uniform(-7, 4, (rows, width // block.block_values))).astype(np.float16)
        scales *= rng.choice([-1, 1], scales.shape).astype(np.float16)
        data.reshape(rows, -1, block.block_bytes)[:, :, :2] = scales[..., None].view(np.uint8)
    return GgufFile(Made(tensors=[MadeTensor(TABLE_NAME, (rows, width), ggml_type, data.tobytes())]).write(path))


@pytest.fixture(scope="module")
def real_table(tmp_path_factory):
    """A table of the real size, 28.8 GB of hole."""
    path = tmp_path_factory.mktemp("real") / "t.gguf"
    made = Made(tensors=[MadeTensor(TABLE_NAME, (320001536, 160), 20, b"")])
    content = made.content()
    path.write_bytes(content)
    with path.open("r+b") as file:
        file.truncate(len(content) + 64 + 320001536 * 90)
    return NgramTable(GgufFile(path), REAL, cache_rows=4096)


TOKENS = st.one_of(st.integers(0, 248319), st.sampled_from([0, 248319, 248044, 248044, 248056]))
BEFORE = st.one_of(TOKENS, st.just(-1))


@settings(max_examples=60)
@given(st.lists(TOKENS, max_size=12), BEFORE, BEFORE)
def test_hash_of_the_real_constants(real_table, tokens, prev1, prev2):
    ids = real_table.row_ids(np.array(tokens, np.int32), prev1, prev2)
    assert ids.shape == (len(tokens), 16) and ids.dtype == np.int64
    assert ids.tolist() == naive_ids(tokens, prev1, prev2, REAL)
    assert ids.size == 0 or ids.max() < 320001446
    real_table.fetch(ids)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 63), max_size=10), st.integers(-1, 63), st.integers(-1, 63), st.integers(0, 10))
def test_windows_join(small_table, tokens, prev1, prev2, cut):
    """Any split of a sequence into windows gives the same ids."""
    whole = small_table.row_ids(np.array(tokens), prev1, prev2)
    assert whole.tolist() == naive_ids(tokens, prev1, prev2, SMALL)
    head, rest = tokens[:cut], tokens[cut:]
    before = [prev2, prev1, *head]
    parts = [small_table.row_ids(np.array(head, int), prev1, prev2),
             small_table.row_ids(np.array(rest, int), before[-1], before[-2])]  # fmt: skip
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.fixture(scope="module")
def small_table(tmp_path_factory):
    return NgramTable(table_file(tmp_path_factory.mktemp("small") / "t.gguf", 20, 60, 64), SMALL)


def test_bigrams_only(tmp_path):
    g = replace(SMALL, order=2, multipliers=SMALL.multipliers[:2], moduli=(11, 13), offsets=(0, 11))
    table = NgramTable(table_file(tmp_path / "t.gguf", 20, 24, 64), g)
    tokens = [3, 7, 9, 9, 1]
    assert table.row_ids(np.array(tokens), 5, 6).tolist() == naive_ids(tokens, 5, 6, g)


@pytest.mark.parametrize("name", ["IQ4_NL", "Q8_0", "F16", "BF16", "F32", "Q4_0", "Q5_0", "Q2_0"])
@pytest.mark.parametrize("cache_rows", [0, 3, 64])
def test_rows_have_the_bits_of_the_format(tmp_path, name, cache_rows):
    block = next(b for b in FORMATS.values() if b.name == name)
    file = table_file(tmp_path / "t.gguf", block.ggml_id, 60, 64)
    table = NgramTable(file, SMALL, cache_rows)
    wanted = block.dequantise(file.raw(TABLE_NAME))
    rng = np.random.default_rng(1)
    for T in (1, 1, 3, 8, 70, 2):
        ids = rng.integers(0, 60, (T, 4))
        out = np.full((T, 256), np.nan, np.float32)
        table.collect(table.issue(ids), out)
        assert out.tobytes() == wanted[ids].tobytes()
    if name in ("IQ4_NL", "Q8_0", "F16"):  # every half, also Inf and subnormal ones
        halves = np.arange(65536, dtype=np.uint16)
        raw = np.zeros((65536, block.block_bytes), np.uint8)
        raw[:, :2] = halves[:, None].view(np.uint8)
        raw[:, 2:] = rng.integers(0, 256, (65536, block.block_bytes - 2))
        data = np.repeat(raw, 64 // block.block_values, axis=1) if name == "F16" else np.concatenate([raw, raw], axis=1)
        if name == "F16":
            data = np.repeat(halves[:, None], 64, axis=1).view(np.uint8)
        made = Made(tensors=[MadeTensor(TABLE_NAME, (65536, 64), block.ggml_id, data.tobytes())])
        table = NgramTable(GgufFile(made.write(tmp_path / "h.gguf")), SMALL, cache_rows)
        wanted = block.dequantise(data)
        got = table.fetch(np.arange(65536).reshape(-1, 4)).reshape(65536, 64)
        nan = np.isnan(wanted)
        np.testing.assert_array_equal(np.isnan(got), nan)
        assert got[~nan].tobytes() == wanted[~nan].tobytes()


@settings(max_examples=40)
@given(
    st.integers(0, 40),
    st.sampled_from([None, True, False]),
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 2**31)), min_size=1, max_size=25),
)
def test_cache_and_tickets_are_exact_in_any_order(cached_tables, cache_rows, prefetch, steps):
    """Several tickets open at once, collected in any order, over caches of every size down to none."""
    file, wanted = cached_tables
    table = NgramTable(file, SMALL, cache_rows, prefetch)
    assert cache_rows <= table.cache_rows < cache_rows + 8
    open_tickets = []
    for T, collect_now, seed in steps:
        ids = np.random.default_rng(seed).integers(0, 60, (T, 4)) % (1 + seed % 60)
        open_tickets.append((table.issue(ids), ids))
        if collect_now:
            take(table, wanted, *open_tickets.pop(seed % len(open_tickets)))
    while open_tickets:
        take(table, wanted, *open_tickets.pop(0))
    s = table.stats
    assert s.requests == 4 * sum(T for T, _, _ in steps) == s.dedup + s.hits + s.reads
    assert s.read_bytes == s.reads * table.row_bytes and (cache_rows or s.hits == 0)


@pytest.fixture(scope="module")
def cached_tables(tmp_path_factory):
    file = table_file(tmp_path_factory.mktemp("cached") / "t.gguf", 20, 60, 64)
    return file, file.values(TABLE_NAME)


def take(table, wanted, ticket, ids):
    out = np.empty((len(ids), 256), np.float32)
    table.collect(ticket, out)
    assert out.tobytes() == wanted[ids].tobytes()


def test_counters(cached_tables):
    table = NgramTable(cached_tables[0], SMALL, cache_rows=60)
    table.fetch(np.array([[1, 2, 3, 1], [2, 2, 5, 6]]))
    s = table.stats
    assert (s.requests, s.dedup, s.hits, s.reads, s.read_bytes) == (8, 3, 0, 5, 5 * 36) and s.wait_us > 0
    table.fetch(np.array([[1, 2, 3, 9]]))
    assert (s.requests, s.dedup, s.hits, s.reads) == (12, 3, 3, 6)
    assert table.cache_bytes >= 60 * 36


def test_prefetch_brings_pages_in(tmp_path):
    """Pages of missing rows are in the page cache soon after `issue`, before anything touched them."""
    path = tmp_path / "t.gguf"
    g = replace(SMALL, moduli=(1 << 20, 13, 17, 19), offsets=(0, 1 << 20, (1 << 20) + 13, (1 << 20) + 30))
    made = Made(tensors=[MadeTensor(TABLE_NAME, (g.offsets[-1] + 19, 64), 20, bytes(36 * (g.offsets[-1] + 19)))])
    file = GgufFile(made.write(path))
    table = NgramTable(file, g, prefetch=True)
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    rows = np.arange(200_000, 1_000_000, 200_000)
    if in_page_cache(table, rows).any():
        pytest.skip("the system keeps the file in memory (a file system without a disk)")
    ticket = table.issue(rows.reshape(1, 4))
    until = time.monotonic() + 5
    while not in_page_cache(table, rows).all():
        assert time.monotonic() < until, "the pages never came"
        time.sleep(0.001)
    table.collect(ticket, np.empty((1, 256), np.float32))


def in_page_cache(table: NgramTable, rows: np.ndarray) -> np.ndarray:
    """bool per row: whether the page of its first byte is in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = np.zeros(len(rows), np.uint8)
    for i, row in enumerate(rows):
        page = (table._address + int(row) * table.row_bytes) & -mmap.PAGESIZE
        assert libc.mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), found[i:].ctypes.data_as(ctypes.c_void_p)) == 0
    return (found & 1).astype(bool)


def test_hot_rows_survive_a_stream_of_cold_ones(tmp_path):
    """Second chance: rows asked for again and again stay, though 1,000 others pass through the cache."""
    g = replace(SMALL, moduli=(1000, 13, 17, 19), offsets=(0, 1000, 1013, 1030))
    table = NgramTable(table_file(tmp_path / "t.gguf", 20, 1049, 64), g, cache_rows=64)
    hot = np.array([[0, 1, 2, 3]])
    for cold in range(100, 1000, 4):
        table.fetch(hot)
        table.fetch(np.arange(cold, cold + 4).reshape(1, 4))
    assert table.stats.hits >= 0.9 * 4 * 224, table.stats


def test_refuses_ids_outside_the_table(small_table):
    before = replace(small_table.stats)
    for bad in (60, -1, 2**62):
        with pytest.raises(FileError, match=rf"row {bad};.*60 rows"):
            small_table.issue(np.array([[0, 1, bad, 2]]))
    assert small_table.stats == before
    small_table.fetch(np.array([[0, 1, 59, 2]]))


def test_refuses_wrong_arguments(small_table):
    out = np.empty((1, 256), np.float32)
    ticket = small_table.issue(np.array([[0, 1, 2, 3]]))
    for bad in (np.empty((1, 255), np.float32), np.empty((1, 256)), np.empty((256, 1), np.float32).T[:, ::-1]):
        with pytest.raises(BadArgument, match="n-gram output"):
            small_table.collect(ticket, bad)
    small_table.collect(ticket, out)
    later = small_table.issue(np.array([[4, 5, 6, 7]]))
    with pytest.raises(BadArgument, match="collected"):
        small_table.collect(ticket, out)
    small_table.collect(later, out)
    for ids in (np.zeros((1, 4)), np.zeros(4, int)):
        with pytest.raises(BadArgument, match="row ids"):
            small_table.issue(ids)
    limit = (2**63 - 1) // SMALL.multipliers[0] + 1
    for tokens, prev1, prev2 in (([-1], 0, 0), ([1, limit], 0, 0), ([1], limit, 0), ([1], 0, limit)):
        with pytest.raises(BadArgument, match=str(limit - 1) if tokens != [1] else str(limit)):
            small_table.row_ids(np.array(tokens), prev1, prev2)
    for tokens in (np.array([1.5]), np.array([[1]])):
        with pytest.raises(BadArgument, match="tokens"):
            small_table.row_ids(tokens, 0, 0)
    small_table.row_ids(np.array([limit - 1]), limit - 1, limit - 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"moduli": (11, 13, 17, 20)}, ("rows", "found 60", "at least 61")),
        ({"offsets": (0, 11, 24, 42)}, ("rows", "at least 61")),
        ({"row_width": 32}, ("row width", "found 64", "needed 32")),
        ({"order": 4}, ("order", "found 4", "2 or 3")),
        ({"multipliers": (1, 3)}, ("multipliers", "found 2", "needed 3")),
        ({"multipliers": (1, 3, 2**63)}, ("multipliers", "below 2^63")),
        ({"moduli": (11, 13, 17)}, ("moduli", "found 3", "needed 4")),
        ({"offsets": (0, 11)}, ("offsets", "found 2", "needed 4")),
        ({"moduli": (11, 13, 17, 0)}, ("moduli", "above 0")),
        ({"offsets": (0, 11, 24, -1)}, ("offsets", "0 or more")),
        ({"heads_per_order": 0}, ("heads", "at least 1")),
        ({"reset_token": 2**40}, ("reset token",)),
    ],
)
def test_refuses_a_geometry_that_does_not_fit(cached_tables, change, words):
    with pytest.raises(ModelError) as caught:
        NgramTable(cached_tables[0], replace(SMALL, **change))
    assert all(word in str(caught.value) for word in (TABLE_NAME, *words)), str(caught.value)


def test_refuses_other_tables(tmp_path):
    for shape, kind, word in (((4, 15, 64), 0, "shape"), ((60, 64), 24, "I8")):
        made = Made(tensors=[MadeTensor(TABLE_NAME, shape, kind)])
        with pytest.raises(ModelError, match=word):
            NgramTable(GgufFile(made.write(tmp_path / "t.gguf")), SMALL)
    with pytest.raises(ModelError, match=TABLE_NAME):
        NgramTable(GgufFile(Made().write(tmp_path / "t.gguf")), SMALL)


def test_bundled_model(tiny_path):
    file = GgufFile(tiny_path)
    m = file.metadata
    arrays = [m.need_ints(f"qwen4exp.ple.{key}") for key in ("layer_multipliers", "head_vocab_sizes", "head_offsets")]
    table = NgramTable(file, NgramGeometry(1, 3, 4, 32, 4, 4082, 4088, *arrays), cache_rows=100)
    file.close()
    tokens = np.random.default_rng(2).integers(0, 4096, 300)
    ids = table.row_ids(tokens, -1, -1)
    assert ids.tolist() == naive_ids(tokens.tolist(), -1, -1, table.geometry)
    wanted = table.format.dequantise(GgufFile(tiny_path).raw(TABLE_NAME))
    assert table.fetch(ids).tobytes() == wanted[ids].tobytes()
