"""The n-gram table read past the page cache: same rows as through the mapping, faults, order, and an end without
traces. Skips where the file system of temporary files refuses unbuffered reads."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument, Closed, FileError, StrataError
from strata.pack import ngram_reader
from strata.pack.formats import FORMATS
from strata.pack.gguf_file import GgufFile
from strata.pack.ngram import TABLE_NAME, NgramTable
from strata.pack.ngram_jobs import READ_BYTES, pages_of_row, plan_pages
from strata.pack.ngram_reader import direct_problem, reader_bytes
from strata.pack.ngram_speed import measure, write_table
from strata.pack.ngram_ticket import Buffers, ticket_bytes
from tests.test_ngram import SMALL, table_file

ROWS = 20_000
GEOMETRY = replace(SMALL, moduli=(ROWS - 49, 13, 17, 19), offsets=(0, ROWS - 49, ROWS - 36, ROWS - 19))


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("strata-ngram")}


BOTH = pytest.mark.parametrize("queued", [True, False], ids=["queue", "workers"])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    made = table_file(tmp_path_factory.mktemp("table") / "t.gguf", 20, ROWS, 64)  # 36 bytes a row: some cross pages
    problem = direct_problem(made, TABLE_NAME)
    if problem is not None:
        pytest.skip(problem)
    return made


@pytest.fixture(scope="module")
def wanted(file):
    return file.values(TABLE_NAME)


@pytest.fixture(scope="module", params=[True, False], ids=["queue", "workers"])
def table(request, file):
    """A direct table whose cache is far smaller than it, with the system's queue for reads or with workers."""
    before = threads()
    made = NgramTable(file, GEOMETRY, cache_rows=64, mode="direct", depth=16, queued=request.param)
    if made.reader.queued < request.param:
        made.close()
        pytest.skip("the system has no queue for reads")
    assert len(threads() - before) == (1 if request.param else 17)
    yield made
    made.close()
    assert threads() == before


class Deliveries:
    """Windows of one backend: one place for rows and one pair of words, used again and again."""

    def __init__(self, table: NgramTable, most: int = 8):
        self.table, self.rows, self.words = table, np.empty((most, 256), np.float32), np.zeros(2, np.int64)

    def start(self, ids: np.ndarray) -> None:
        self.words[0] += 1
        self.table.deliver(ids, self.rows[: len(ids)], self.words)

    def wait(self, limit_s: float = 10.0) -> bool:
        """Whether the rows of the last start came, by the rule of op ngram_wait."""
        end = time.monotonic() + limit_s
        while abs(int(self.words[1])) != self.words[0]:
            assert time.monotonic() < end, "the done word never came"
        return bool(self.words[1] == self.words[0])

    def fetch(self, ids: np.ndarray) -> np.ndarray:
        self.start(ids)
        assert self.wait()
        return self.rows[: len(ids)]


def crossing_rows(table: NgramTable, file: GgufFile) -> np.ndarray:
    """Rows that lie on two pages of the file."""
    start = file.info(TABLE_NAME).offset + np.arange(ROWS) * table.row_bytes
    return np.flatnonzero(start // READ_BYTES != (start + table.row_bytes - 1) // READ_BYTES)


def test_rows_that_cross_pages_and_the_ends_of_the_table(table, file, wanted):
    crossing = crossing_rows(table, file)
    assert len(crossing) > 50
    ids = np.concatenate([crossing, [0, 1, ROWS - 1, ROWS - 2]])
    ids = np.resize(ids, (len(ids) // 4 + 1, 4))
    assert table.fetch(ids).tobytes() == wanted[ids].tobytes()
    deliveries = Deliveries(table, len(ids))
    assert deliveries.fetch(ids[::-1]).tobytes() == wanted[ids[::-1]].tobytes()


ANY_ROW = st.one_of(st.integers(0, ROWS - 1), st.sampled_from([0, ROWS - 1]), st.integers(100, 130))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.lists(ANY_ROW, min_size=4, max_size=32), st.integers(0, 2)), min_size=1, max_size=12))
def test_any_rows_in_any_order(table, wanted, steps):
    """Tickets collected late, tickets dropped and deliveries, mixed: always the rows of the table."""
    deliveries, late = Deliveries(table), []
    for flat, how in steps:
        ids = np.array(flat[: len(flat) // 4 * 4]).reshape(-1, 4)
        if how == 0:
            assert deliveries.fetch(ids).tobytes() == wanted[ids].tobytes()
            continue
        late.append((table.issue(ids), ids))
        if how == 2 and len(late) > 1:
            table.drop(late.pop(0)[0])
    for ticket, ids in late:
        out = np.empty((len(ids), 256), np.float32)
        table.collect(ticket, out)
        assert out.tobytes() == wanted[ids].tobytes()
    s = table.stats
    assert s.requests == s.dedup + s.hits + s.reads and s.errors <= s.requests


@pytest.mark.parametrize("name", ["IQ4_NL", "Q8_0", "F16", "BF16", "F32", "Q4_0"])
def test_every_row_type(tmp_path, name):
    """Q4_0 has no compiled dequantiser: its rows are there when `deliver` returns."""
    block = next(b for b in FORMATS.values() if b.name == name)
    file = table_file(tmp_path / "t.gguf", block.ggml_id, 60, 64)
    if direct_problem(file, TABLE_NAME):
        pytest.skip("no unbuffered reads here")
    table, values = NgramTable(file, SMALL, mode="direct", depth=4), file.values(TABLE_NAME)
    ids = np.arange(60).reshape(15, 4)
    deliveries = Deliveries(table, 15)
    assert deliveries.fetch(ids).tobytes() == values[ids].tobytes() == table.fetch(ids).tobytes()
    table.close()


@settings(max_examples=80)
@given(st.lists(st.integers(0, 500), max_size=60), st.integers(1, 9000), st.integers(0, 5000), st.integers(0, 3))
def test_page_lists(rows, row_bytes, offset, landed_every):
    """Each page once, ascending; every page of every row that is missing is there, and nothing else."""
    unique = np.array(sorted(set(rows), key=lambda r: r * 7919 % 503), np.int64)
    n = len(unique)
    landed = np.array([landed_every > 0 and i % (landed_every + 1) == 0 for i in range(n)], np.uint8)
    most = max(1, n * pages_of_row(row_bytes))
    order, pages = np.empty(max(n, 1), np.int64), np.empty(most, np.int64)
    first, entries = np.empty(most + 1, np.int32), np.empty(most, np.int32)
    n_pages, n_entries = plan_pages(n, unique, landed, offset, row_bytes, order, pages, first, entries)
    found = {}
    for p in range(n_pages):
        found[int(pages[p])] = sorted(int(unique[e]) for e in entries[first[p] : first[p + 1]])
    needed: dict[int, list[int]] = {}
    for row in sorted(int(r) for r, there in zip(unique, landed, strict=True) if not there):
        start = offset + row * row_bytes
        for page in range(start // READ_BYTES, (start + row_bytes - 1) // READ_BYTES + 1):
            needed.setdefault(page, []).append(row)
    assert found == needed and pages[:n_pages].tolist() == sorted(needed)
    assert n_entries == sum(map(len, needed.values()))


def test_pages_are_read_once_and_rows_kept(file, wanted):
    table = NgramTable(file, GEOMETRY, cache_rows=ROWS, mode="direct", depth=4)
    assert table.stats == replace(table.stats, requests=0, reads=0, pages=0, errors=0), "opening counts nothing"
    ids = np.arange(200, 240).reshape(10, 4)
    deliveries = Deliveries(table, 10)
    deliveries.fetch(ids)
    s = table.stats
    assert s.mode == "direct" and s.reads == 40 and s.pages <= 2 and s.pages + s.page_dedup in (40, 41)
    assert s.read_us >= s.read_us_max > 0 and s.read_bytes == 40 * 36
    pages = s.pages
    assert deliveries.fetch(ids).tobytes() == wanted[ids].tobytes()
    assert table.stats.hits == 40 and table.stats.pages == pages, "the second time from the cache"
    table.fetch(np.concatenate([ids, ids + 4000]))
    assert table.stats.wait_us >= table.stats.wait_us_max > 0
    assert table.cache_bytes == NgramTable(file, GEOMETRY, cache_rows=ROWS).cache_bytes + reader_bytes(4)
    table.close()


def test_deliver_does_not_wait(table, wanted):
    """The rows land while the caller does other things; issue returns at once, too."""
    table.reader.put_faults(latency_us=300_000)
    try:
        deliveries, ids = Deliveries(table), np.array([[3, 5003, 9003, 14003]])
        began = time.monotonic()
        deliveries.start(ids)
        ticket = table.issue(ids + 1)
        assert time.monotonic() - began < 0.29 and deliveries.words[1] == 0
        assert deliveries.wait() and time.monotonic() - began >= 0.3
        assert deliveries.rows[:1].tobytes() == wanted[ids].tobytes()
        out = np.empty((1, 256), np.float32)
        table.collect(ticket, out)
        assert out.tobytes() == wanted[ids + 1].tobytes()
    finally:
        table.reader.put_faults()


@BOTH
def test_many_reads_are_in_flight(file, queued):
    """64 pages at 50 ms each take little longer than one of them."""
    table = NgramTable(file, GEOMETRY, cache_rows=0, mode="direct", queued=queued)
    table.reader.put_faults(latency_us=50_000)
    ids = (np.arange(64) * 300).reshape(16, 4)
    began = time.monotonic()
    table.fetch(ids)
    assert table.stats.pages >= 64 and time.monotonic() - began < 64 * 0.05 / 4
    table.close()


@pytest.mark.parametrize("fault", ["fail_at", "short_at"])
def test_a_failing_read_100_times(table, file, wanted, fault):
    """Any read of a window may fail: the error names file and offset, the next window has its rows."""
    rng, deliveries, errors = np.random.default_rng(3), Deliveries(table), table.stats.errors
    start, end = file.info(TABLE_NAME).offset // READ_BYTES * READ_BYTES, file.shards[0].file_bytes
    for i in range(100):
        ids = rng.choice(ROWS, (2, 4), replace=False)
        misses = ids[np.isin(ids, table._keys, invert=True)]
        table.reader.put_faults(**{fault: 1 + i % max(1, len(np.unique(misses)) // 2)})
        if i % 2:
            deliveries.start(ids)
            assert not deliveries.wait()
            error = table.failed("window at position 7 stopped")
        else:
            with pytest.raises(FileError) as caught:
                table.fetch(ids)
            error = caught.value
        at = int(str(error.found).split("at byte ")[1].split()[0])
        assert start <= at < end and at % READ_BYTES == 0 and str(file.path) in str(error)
        assert (os.strerror(errno.EIO) if fault == "fail_at" else "2048 bytes at") in str(error)
        assert isinstance(error, FileError)
        table.reader.put_faults()
        assert deliveries.fetch(ids[::-1]).tobytes() == wanted[ids[::-1]].tobytes()
    assert table.stats.errors == errors + 100


def test_a_late_delivery_does_not_disturb_the_next_one(table, wanted):
    """A window that gave up leaves its reads behind; they end before those of the next window, in the same place."""
    rng, deliveries, were_late = np.random.default_rng(4), Deliveries(table), 0
    for _ in range(100):
        late, ids = rng.choice(ROWS, (8, 4), replace=False), rng.choice(ROWS, (8, 4), replace=False)
        table.reader.put_faults(latency_us=2000)
        deliveries.start(late)
        were_late += int(deliveries.words[1] != deliveries.words[0])
        table.reader.put_faults()
        assert deliveries.fetch(ids).tobytes() == wanted[ids].tobytes()
        assert deliveries.fetch(late).tobytes() == wanted[late].tobytes()
    assert were_late > 50
    deliveries.start(late)
    hits = np.tile(ids[-1:], (8, 1))  # all of them cached: they must wait for the one before all the same
    table.reader.put_faults(latency_us=2000)
    deliveries.start(rng.choice(ROWS, (8, 4), replace=False))
    assert deliveries.fetch(hits).tobytes() == wanted[hits].tobytes()
    table.reader.put_faults()


def test_collect_gives_up(table, wanted):
    table.reader.put_faults(latency_us=400_000)
    table.limit_s = 0.1
    try:
        with pytest.raises(StrataError, match=r"0 of 4 pages of '.*' after 0.1 s.*Check the disk"):
            table.fetch(np.array([[11, 5011, 9011, 14011]]))
    finally:
        table.reader.put_faults()
        table.limit_s = 30.0
    ids = np.array([[12, 5012, 9012, 14012]])
    assert table.fetch(ids).tobytes() == wanted[ids].tobytes()


def test_a_file_that_was_cut(tmp_path):
    file = table_file(tmp_path / "t.gguf", 20, ROWS, 64)
    if direct_problem(file, TABLE_NAME):
        pytest.skip("no unbuffered reads here")
    values = file.values(TABLE_NAME)
    table = NgramTable(file, GEOMETRY, mode="direct", depth=4)
    n_bytes = file.shards[0].file_bytes
    os.truncate(tmp_path / "t.gguf", n_bytes // 2)
    with pytest.raises(FileError, match=r"bytes at byte \d+ of .*cut short"):
        table.fetch(np.array([[1, 2, 3, ROWS - 1]]))
    ids = np.array([[1, 2, 3, 4]])
    assert table.fetch(ids).tobytes() == values[ids].tobytes(), "what is left of the file is still read"
    assert "no longer the file" in direct_problem(file, TABLE_NAME)
    with pytest.raises(StrataError, match=r'no longer the file.*ngram="mapped"'):
        NgramTable(file, GEOMETRY, mode="direct")
    table.close()


def test_threads_share_a_table(table, wanted):
    """Several threads at once, each with its own tickets and one of them with deliveries."""
    wrong = []

    def work(seed: int) -> None:
        rng, deliveries = np.random.default_rng(seed), Deliveries(table)
        for _ in range(60):
            ids = rng.integers(0, ROWS, (1 + seed, 4))
            rows = deliveries.fetch(ids) if seed == 0 else table.fetch(ids)
            if rows.tobytes() != wanted[ids].tobytes():
                wrong.append(ids)

    several = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    assert not wrong


def test_a_chunk_of_rows(table, wanted):
    """What prefill asks for: thousands of rows at once, while a window's ticket is open, too."""
    ids = np.random.default_rng(5).integers(0, ROWS, (3000, 4))
    ticket, deliveries = table.issue(ids), Deliveries(table)
    assert deliveries.fetch(ids[:2]).tobytes() == wanted[ids[:2]].tobytes()
    out = np.empty((3000, 256), np.float32)
    table.collect(ticket, out)
    assert out.tobytes() == wanted[ids].tobytes()


def test_a_dropped_chunk_makes_room(table):
    """Reads of a dropped ticket that have not begun are left out."""
    table.reader.put_faults(latency_us=2000)
    errors, pages = table.stats.errors, table.stats.pages
    try:
        ticket = table.issue((np.arange(160) * 120).reshape(40, 4))
        table.drop(ticket)
        table.fetch(np.array([[1, 2, 3, 4]]))
    finally:
        table.reader.put_faults()
    assert table.stats.errors == errors + 1 and table.stats.pages - pages < 100
    with pytest.raises(BadArgument, match="collected"):
        table.collect(ticket, np.empty((40, 256), np.float32))


@BOTH
def test_closing_while_reading(file, queued):
    """Open tickets fail, deliveries end with their negative word, no thread and no file stays."""
    for i in range(20):
        before, fds = threads(), len(os.listdir("/proc/self/fd"))
        table = NgramTable(file, GEOMETRY, cache_rows=0, mode="direct", depth=4, queued=queued)
        assert len(threads() - before) == (1 if table.reader.queued else 5)
        table.reader.put_faults(latency_us=1000)
        deliveries = Deliveries(table)
        ticket = table.issue((np.arange(80) * 200).reshape(20, 4))
        deliveries.start(np.array([[1, 2, 3, 4]]))
        if i % 2:
            time.sleep(0.002)
        table.close()
        table.close()
        assert deliveries.words[1] == -1 and threads() == before and len(os.listdir("/proc/self/fd")) == fds
        with pytest.raises(Closed):
            table.collect(ticket, np.empty((20, 256), np.float32))
        with pytest.raises(Closed):
            table.issue(np.array([[1, 2, 3, 4]]))
        with pytest.raises(Closed):
            raise table.failed("a window")


def test_a_forgotten_table_ends_its_threads(file):
    before = threads()
    table = NgramTable(file, GEOMETRY, mode="direct", depth=2)
    assert threads() > before
    del table
    assert threads() == before


def test_refusals(file, monkeypatch):
    before = threads()
    with pytest.raises(BadArgument, match="mode of the n-gram table"):
        NgramTable(file, GEOMETRY, mode="ram")
    for depth in (0, 129):
        with pytest.raises(BadArgument, match="reads in flight"):
            NgramTable(file, GEOMETRY, mode="direct", depth=depth)
    mapped = NgramTable(file, GEOMETRY)
    mapped.close()
    deliveries = Deliveries(mapped)
    assert deliveries.fetch(np.array([[1, 2, 3, 4]])).shape == (1, 256), "closing means nothing to a mapped table"
    refuse = OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def no_direct(path):
        raise refuse

    monkeypatch.setattr(ngram_reader, "_open", no_direct)
    with pytest.raises(StrataError, match="cannot be opened for unbuffered reads: Invalid argument"):
        NgramTable(file, GEOMETRY, mode="direct")
    monkeypatch.delattr(os, "O_DIRECT")
    assert "O_DIRECT" in direct_problem(file, TABLE_NAME)
    assert threads() == before


def test_a_disk_that_fails_at_once(file, monkeypatch):
    """A first read that fails is an error of the load, and leaves no threads."""
    real, before = ngram_reader.PageReader.__init__, threads()

    def broken(self, *a, **k):
        real(self, *a, **k)
        self.put_faults(fail_at=1)

    monkeypatch.setattr(ngram_reader.PageReader, "__init__", broken)
    with pytest.raises(FileError, match="at byte"):
        NgramTable(file, GEOMETRY, mode="direct", depth=2)
    assert threads() == before


@pytest.mark.parametrize("direct", [False, True])
def test_bytes_of_a_ticket(direct):
    for n_ids, row_bytes in ((1, 36), (128, 90), (5000, 90)):
        b = Buffers(1 << max(4, (n_ids - 1).bit_length()), row_bytes, direct)
        own = [b.places, b.index, b.unique, b.landed, b.staging, *b.pages] + ([b.job] if direct else [])
        assert ticket_bytes(n_ids, row_bytes, direct) == sum(a.nbytes for a in own)
    assert mmap.PAGESIZE % READ_BYTES == 0


def test_a_system_without_queues_takes_workers(file, wanted, monkeypatch):
    """Where the queue is refused, as by a limit of the system, threads read instead."""
    monkeypatch.setattr(ngram_reader, "open_queue", lambda n, address: errno.EAGAIN)
    before = threads()
    table = NgramTable(file, GEOMETRY, mode="direct", depth=3)
    assert not table.reader.queued and len(threads() - before) == 4
    ids = np.arange(40, 80).reshape(10, 4)
    assert table.fetch(ids).tobytes() == wanted[ids].tobytes()
    table.close()


def test_the_bench_reads_what_it_wrote(tmp_path):
    path = tmp_path / "table.gguf"
    write_table(path, 4 << 20)
    with GgufFile(path) as gguf:
        if direct_problem(gguf, TABLE_NAME):
            pytest.skip("no unbuffered reads here")
    found = list(measure(path, [1, 8], [16, 40], 0.02))
    assert [(r.mode, r.depth, r.rows) for r in found] == [
        ("direct", 1, 16), ("direct", 1, 40), ("direct", 8, 16), ("direct", 8, 40), ("mapped", 0, 16), ("mapped", 0, 40)
    ]  # fmt: skip
    assert all(r.windows >= 3 and 0 < r.caller_us <= r.p99_us and r.median_us <= r.p99_us for r in found)
