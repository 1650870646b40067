"""The doorbell and the fetch over the link on the GPU's code, run on the CPU, against their rules in Python."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base import doorbell as mail
from strata.base.doorbell import CPU, HIT, LINK, Mailbox
from strata.base.errors import BadArgument
from strata.base.program import EXPERTS_TIMEOUT, NOT_FINITE
from strata.gpu import doorbell as bells
from strata.gpu.doorbell import Blob, Doorbell, post, stamp, wait_reply
from strata.gpu.error_word import where
from strata.gpu.experts_ends import swiglu
from strata.gpu.gemv import Entries, Hidden, product
from strata.gpu.link_fetch import Part, blob_of, field_map, link_fetch
from strata.gpu.relayout import relayout
from strata.pack.formats import by_name
from tests.block_data import random_rows
from tests.canonical.call import LAYER, assert_same, check_guards, guarded, plain, room
from tests.gpu.run_on_cpu import ON_DEVICE, ActivationArea, ErrorWord, address, needs_compiler, run_all
from tests.test_gpu_experts import Layer as Products
from tests.test_gpu_gemv import area_of

pytestmark = needs_compiler
WHERE = where(3, LAYER)
BLOB = Blob(256, 512, 1024)
NS = 1_000_000


def area(n_bytes: int) -> np.ndarray:
    """uint8, at a multiple of 256."""
    raw = np.full(n_bytes + 768, 0x5A, np.uint8)
    start = 256 + -(raw.ctypes.data + 256) % 256
    return raw[start : start + n_bytes]


@dataclass
class Layer:
    """Areas of one doorbell; residents and readable experts of one layer."""

    K: int = 4
    E: int = 16
    D: int = 64
    staging: int = 4
    share: int = 0
    limit_ns: int = 50 * NS

    def __post_init__(self):
        self.m = Mailbox(8, self.K, self.D)
        self.mailbox = area(self.m.n_bytes)
        self.mailbox[: mail.PAYLOAD] = 0
        self.control = np.array([6, self.limit_ns, self.share, self.staging], np.int64)
        self.work = room(bells.EXPERTS + self.staging, dtype="int32")
        self.decisions = room(8 * self.K, dtype="uint8")
        self.jobs = room(2, 1 + 8 * self.K, dtype="int32")
        self.staged, self.stamps = room(self.E, 3, dtype="uint64"), room(bells.STAMP_WORDS, dtype="int64")
        self.slots, self.raws = np.zeros((self.E, 3), np.uint64), np.ones((self.E, 3), np.uint64)
        self.error = ErrorWord()

    def bell(self) -> Doorbell:
        return Doorbell(self.m, *(address(a) for a in (self.mailbox, self.control, self.work, self.decisions,
                                                        self.staged, self.jobs)))  # fmt: skip

    def word(self, at: int) -> int:
        return int(self.mailbox[at : at + 8].view(np.int64)[0])

    def set_word(self, at: int, value: int) -> None:
        self.mailbox[at : at + 8].view(np.int64)[0] = value

    def payload(self, at: int, dtype: str, *shape: int) -> np.ndarray:
        n = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.mailbox[at : at + n].view(dtype).reshape(shape)

    def post(self, ids: np.ndarray, weights: np.ndarray, x: np.ndarray, *, readable=True, reverse=False):
        run_all(
            post(self.bell(), address(ids), address(weights), address(x), address(self.slots),
                 address(self.raws) if readable else 0, 1 << 40, BLOB, len(ids), LAYER, self.error.address,
                 address(self.stamps)),
            reverse=reverse,
        )  # fmt: skip
        for a in (self.work, self.decisions, self.staged, self.stamps, self.jobs):
            check_guards(a)

    def wait(self, T: int, sums: np.ndarray | None, reverse=False):
        to = 0 if sums is None else address(sums)
        run_all(wait_reply(self.bell(), to, T, self.error.address, WHERE, address(self.stamps)), reverse=reverse)


def decide(ids, resident, readable, share: int, staging: int):
    """Decisions (T, K) and the experts of the places: of distinct misses in order, the last ones over the link."""
    misses = [e for e in dict.fromkeys(ids.reshape(-1).tolist()) if not resident[e]]
    m = min((len(misses) + 1) * share >> 8, len(misses), staging) if readable is not None else 0
    last = misses[len(misses) - m :]
    places = [e if readable[e] else -1 for e in last] if m else []
    how = {e: HIT if resident[e] else LINK if e in places else CPU for e in set(ids.reshape(-1).tolist())}
    return np.vectorize(how.__getitem__)(ids).astype(np.uint8), places, misses


def jobs_of(ids: np.ndarray, decisions: np.ndarray, wanted: int) -> list[int]:
    """Jobs of the entries with one decision, sorted: a word for up to four rows (one, if there is one) of an expert."""
    flat, most = ids.reshape(-1).tolist(), 1 if len(ids) == 1 else 4
    chosen = dict.fromkeys(e for e, d in zip(flat, decisions.reshape(-1), strict=True) if d == wanted)
    return sorted(flat.index(e) | n << 16 for e in chosen for n in range(0, flat.count(e), most))


def routed(rng, T, K, E):
    return np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)


@given(st.integers(0, 2**31), st.integers(1, 8), st.sampled_from([0, 64, 128, 200, 256]), st.integers(0, 4),
       st.sampled_from([0, 0.3, 0.7, 1]))  # fmt: skip
@settings(max_examples=25)
def test_decisions_and_request(seed, T, share, staging, held):
    rng = np.random.default_rng(seed)
    K, E = (4, 16) if seed % 2 else (10, 40)
    a = Layer(K, E, share=share)
    a.control[bells.STAGING] = staging
    resident, readable = rng.uniform(size=E) < held, rng.uniform(size=E) < 0.8
    a.slots[resident], a.raws[~readable] = 4096, 0
    ids, weights, x = routed(rng, T, K, E), plain(rng, T, K), plain(rng, T, 64)
    a.post(ids, weights, x, readable=seed % 5 != 0, reverse=seed % 3 == 0)
    wanted, places, misses = decide(ids, resident, readable if seed % 5 else None, share, staging)
    assert_same(a.decisions[: T * K].reshape(T, K), wanted)
    cpu = wanted == CPU
    assert a.work[bells.RANG] == cpu.any() and a.work[bells.STAGED] == len(places)
    assert a.work[bells.CPU_ROWS] == sum(1 << t for t in range(T) if cpu[t].any())
    assert a.work[bells.EXPERTS :][: len(places)].tolist() == places
    for jobs, how in zip(a.jobs, (HIT, LINK), strict=True):
        assert sorted(jobs[1 : 1 + jobs[0]].tolist()) == jobs_of(ids, wanted, how)
    for s, e in enumerate(places):
        if e >= 0:
            at = (1 << 40) + s * BLOB.n_bytes
            assert a.staged[e].tolist() == [at, at + BLOB.up_at, at + BLOB.down_at]
    linked = [e for e in places if e >= 0]
    counts = a.stamps[bells.N_ROWS :].tolist()
    entries = [int((wanted == d).sum()) for d in (CPU, HIT, LINK)]
    assert counts == [T, *entries, len(misses) - len(linked), len(linked)]
    assert a.word(mail.REQUEST) == (7 if cpu.any() else 0), "rings only if the CPU has a share"
    assert a.control[bells.COUNTER] == (7 if cpu.any() else 6)
    if cpu.any():
        m = a.m
        assert_same(a.payload(m.decisions, "uint8", T, K), wanted)
        assert_same(a.payload(m.ids, "int32", T, K), ids)
        assert_same(a.payload(m.weights, "float32", T, K), weights)
        assert_same(a.payload(m.x, "float32", T, 64), x)
        header = [a.word(mail.HEADER + 8 * i) for i in range(6)]
        assert header == [LAYER, T, cpu.sum(), len(linked), (wanted == HIT).sum(), len(misses)]


def test_a_wide_row_and_many_entries():
    """More values than threads, as many entries as fit."""
    rng = np.random.default_rng(1)
    a = Layer(128, 512, 2560, staging=16, share=256)
    a.slots[::3] = 64
    ids, weights, x = routed(rng, 8, 128, 512), plain(rng, 8, 128), plain(rng, 8, 2560)
    a.post(ids, weights, x)
    wanted, places, _ = decide(ids, a.slots[:, 0] != 0, a.raws[:, 0] != 0, 256, 16)
    assert len(places) == 16
    assert_same(a.decisions.reshape(8, 128), wanted)
    assert_same(a.payload(a.m.x, "float32", 8, 2560), x)
    assert_same(a.payload(a.m.weights, "float32", 8, 128), weights)


def test_nobody_rings_after_an_error():
    a = Layer(share=256)
    a.error.word[0] = 5
    ids = routed(np.random.default_rng(0), 2, 4, 16)
    a.post(ids, plain(np.random.default_rng(0), 2, 4), plain(np.random.default_rng(1), 2, 64))
    assert (a.decisions[:8] == CPU).all() and not a.work[bells.RANG] and not a.work[bells.STAGED]
    assert not a.jobs[:, 0].any()
    assert a.word(mail.REQUEST) == 0
    sums = room(2, 64, dtype="int64")
    a.wait(2, sums)
    assert not sums.any() and a.control[bells.COUNTER] == 6 and int(a.error.word[0]) == 5


def rung(rows: int, T: int, D: int = 64) -> Layer:
    a = Layer(D=D)
    a.work[:3], a.control[bells.COUNTER] = (1, 0, rows), 7
    a.payload(a.m.sums, "int64", 8, D)[:] = np.random.default_rng(rows).integers(-(2**60), 2**60, (8, D))
    return a


@pytest.mark.parametrize(("rows", "T", "D"), [(1, 1, 64), (0b10110, 5, 64), (0b11111111, 8, 2560), (0b101, 3, 2564)])
def test_wait_copies_rows_of_the_cpu(rows, T, D):
    a = rung(rows, T, D)
    a.set_word(mail.REPLY, 7)
    sums = room(T, D, dtype="int64")
    untouched = sums[0, 0]
    a.wait(T, sums, reverse=T == 5)
    check_guards(sums)
    for t in range(T):
        wanted = a.payload(a.m.sums, "int64", 8, D)[t] if rows >> t & 1 else np.full(D, untouched)
        assert_same(sums[t], wanted, f"row {t}")
    assert a.control[bells.COUNTER] == 7 and a.error.reported is None and a.stamps[bells.WAIT_END] > 0


def test_wait_without_a_copy_or_a_request():
    a = rung(3, 2)
    a.set_word(mail.REPLY, 9)
    a.wait(2, None)
    assert a.control[bells.COUNTER] == 7 and a.error.reported is None
    a.work[:3] = 0
    sums = room(2, 64, dtype="int64")
    before = sums.copy()
    a.wait(2, sums)
    assert_same(sums, before)
    assert a.control[bells.COUNTER] == 7


def test_wait_ends_at_its_limit():
    a = rung(3, 2)
    a.set_word(mail.REPLY, 6)  # the answer to the request before
    sums = room(2, 64, dtype="int64")
    start = time.monotonic()
    a.wait(2, sums)
    assert time.monotonic() - start >= (0 if ON_DEVICE else 0.05)
    assert a.error.reported == (EXPERTS_TIMEOUT, LAYER, 50) and not sums.any() and a.control[bells.COUNTER] == 7


@pytest.mark.skipif(ON_DEVICE, reason="arrays are mirrored there: tests of the backend have a service")
def test_wait_for_an_answer_that_comes_later():
    a = rung(1, 1)
    a.control[bells.LIMIT_NS] = 20_000 * NS
    sums = room(1, 64, dtype="int64")

    def answer():
        time.sleep(0.02)
        a.payload(a.m.sums, "int64", 8, 64)[:] = 77
        a.set_word(mail.REPLY, 7)

    thread = threading.Thread(target=answer)
    thread.start()
    a.wait(1, sums)
    thread.join()
    assert (sums == 77).all() and a.error.reported is None


def test_a_status_is_reported():
    a = rung(1, 1)
    a.set_word(mail.REPLY, 7)
    a.set_word(mail.STATUS, NOT_FINITE | 345 << 8)
    a.wait(1, room(1, 64, dtype="int64"))
    assert a.error.reported == (NOT_FINITE, LAYER, 345)


def test_stamp():
    at = room(3, dtype="int64")
    run_all(stamp(address(at[1:2])))
    check_guards(at)
    assert at[1] > 0 and at[0] == at[2]


def test_refusals():
    with pytest.raises(BadArgument, match="entries"):
        Doorbell(Mailbox(8, 129, 64), 0, 1, 1, 1, 1, 1)
    with pytest.raises(BadArgument, match="multiple of 4"):
        Doorbell(Mailbox(8, 4, 66), 0, 1, 1, 1, 1, 1)
    with pytest.raises(BadArgument, match="alignment"):
        Doorbell(Mailbox(8, 4, 64), 64, 1, 1, 1, 1, 1)


@pytest.mark.parametrize("names", [("Q8_0", "Q8_0", "Q4_0"), ("Q4_K", "Q5_K", "Q4_K")], ids="-".join)
@pytest.mark.parametrize("T", [1, 3, 8])
def test_products_by_jobs(names, T):
    """Only entries with a job are computed, together or in steps; what others have in memory is not looked at."""
    layer, rng = Products(names, E=6, F=256), np.random.default_rng(T)
    x, ids = plain(rng, T, layer.D), routed(rng, T, 3, 6)
    decisions = np.where(ids % 3 == 0, CPU, np.where(ids % 3 == 1, HIT, LINK)).astype(np.uint8)
    words = jobs_of(ids, decisions, LINK)
    jobs, n = np.array([len(words), *words, *[-1] * 9], np.int32), ids.size
    entries = Entries(address(ids), n, T, jobs=address(jobs), most_jobs=len(words) + 2)
    gate, up, down = layer.formats
    areas = {f.group: area_of(x, f.group) for f in (gate, up)}
    h, out, error = ActivationArea(n, layer.F, down.group), room(n, layer.D), ErrorWord()
    before = out.copy()
    if gate == up and down.group == 32:
        hidden = Hidden(layer.place(1), h.places, error.address, WHERE)
        launches = product(gate, layer.place(0), layer.F, areas[gate.group].places, entries=entries, hidden=hidden)
    else:
        g, u = (np.full((n, layer.F), np.nan, np.float32) for _ in range(2))
        launches = []
        for part, side in ((0, g), (1, u)):
            f = layer.formats[part]
            launches += product(f, layer.place(part), layer.F, areas[f.group].places, address(side), entries=entries)
        launches += swiglu(address(g), address(u), n, layer.F, h.places, error.address, WHERE, ids=address(ids),
                           decisions=address(decisions), take=1 << LINK)  # fmt: skip
    launches += product(down, layer.place(2), layer.D, h.places, address(out), entries=entries)
    run_all(launches, reverse=T == 3)
    check_guards(out)
    wanted = layer.wanted(x, ids).reshape(n, -1)
    assert_same(out, np.where(decisions.reshape(-1, 1) == LINK, wanted, before))
    assert error.reported is None


FORMATS = [("IQ3_XXS", "IQ3_XXS", "Q2_0"), ("Q4_K", "Q5_K", "Q8_0"), ("Q5_1", "Q4_0", "IQ4_NL"),
           ("NVFP4", "NVFP4", "MXFP4"), ("Q6_K", "Q3_K", "IQ1_M")]  # fmt: skip


@pytest.mark.parametrize("names", FORMATS, ids="-".join)
@pytest.mark.parametrize("shift", [0, 8, 4, 2, 1])
def test_fetch(names, shift):
    """Whatever the alignment of an expert's bytes in host memory, the places hold its device layout."""
    E, F, D = 4, 256, 512
    shapes = ((F, D), (F, D), (D, F))
    formats = [by_name(n) for n in names]
    raw = [[random_rows(f, *shapes[p], "plain", seed=7 * p + e) for e in range(E)] for p, f in enumerate(formats)]
    memory, raws = [], np.zeros((E, 3), np.uint64)
    for e in range(E):
        for p in range(3):
            data = area(raw[p][e].size + 16)
            data[shift : shift + raw[p][e].size] = raw[p][e].reshape(-1)
            raws[e, p] = address(data) + shift
            memory.append(data)
    maps = [field_map(f, s[1]) for f, s in zip(formats, shapes, strict=True)]
    tables = [guarded(table) for _, table in maps]
    parts = tuple(Part(f, *s, address(t), m[0]) for f, s, t, m in zip(formats, shapes, tables, maps, strict=True))
    blob = blob_of(parts)
    staging = area(4 * blob.n_bytes)
    work = np.array([1, 3, 1, 2, -1, 0, 7], np.int32)  # three places, the second one empty
    run_all(link_fetch(address(work), address(raws), address(staging), parts, blocks=3), reverse=shift == 8)
    for s, e in ((0, 2), (2, 0)):
        for p, at in enumerate((0, blob.up_at, blob.down_at)):
            wanted = relayout(formats[p], raw[p][e])
            assert_same(staging[s * blob.n_bytes + at :][: wanted.size], wanted, f"place {s}, part {p}")
    assert (staging[blob.n_bytes : 2 * blob.n_bytes] == 0x5A).all() and (staging[3 * blob.n_bytes :] == 0x5A).all()


def test_fetch_of_rows_that_do_not_fill_a_block():
    """A number of rows that four does not divide, and blocks of the format that do not fill a chunk."""
    f, e = by_name("Q8_0"), random_rows(by_name("Q8_0"), 6, 96, "plain", seed=1)
    data, raws = guarded(e), np.zeros((1, 3), np.uint64)
    raws[:] = address(data)
    field, table = field_map(f, 96)
    table = guarded(table)
    part = Part(f, 6, 96, address(table), field)
    blob = blob_of((part, part, part))
    staging, work = area(blob.n_bytes), np.array([0, 1, 0, 0], np.int32)
    run_all(link_fetch(address(work), address(raws), address(staging), (part, part, part)))
    for at in (0, blob.up_at, blob.down_at):
        assert_same(staging[at:][: relayout(f, e).size], relayout(f, e))
