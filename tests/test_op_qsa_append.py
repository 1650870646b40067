"""Norm, rotation and append of q, k, v; indexer queries, pooled keys and the ring of raw keys."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.program import NOT_FINITE
from strata.base.rotary import rotary_table
from strata.cpu.qsa_append import qsa_append, qsa_index
from tests.canonical import kv_cells
from tests.canonical.call import ERROR, LAYER, Call, Slot, assert_accurate, assert_same, guarded, plain, room, spiked
from tests.canonical.qsa_append import pooled_keys
from tests.canonical.rotary import norm_rotate
from tests.reference import hyper_connection as exact
from tests.reference.qsa import rope

EPS = 1e-6
CONTEXT = 64


def cells_of(Hkv: int, dh: int, int8: bool) -> tuple[np.ndarray, np.ndarray | None]:
    cells = room(CONTEXT, Hkv, dh, dtype="int8" if int8 else "float16")
    return cells, room(CONTEXT, Hkv, dh // 64, dtype="float16") if int8 else None


@dataclass
class Append:
    """One call of qsa_append over T rows from position `pos`."""

    q_gate: np.ndarray
    k: np.ndarray
    v: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    pos: int
    rotary: int
    int8: bool

    @staticmethod
    def make(rng, T, H, Hkv, dh, rotary, int8, draw=spiked) -> "Append":
        return Append(draw(rng, T, H, 2, dh), draw(rng, T, Hkv, dh), draw(rng, T, Hkv, dh), plain(rng, dh),
                      plain(rng, dh), int(rng.integers(0, CONTEXT - T)), rotary, int8)  # fmt: skip

    def run(self, rows: slice = slice(None)):
        q_gate, k, v = (np.ascontiguousarray(x[rows]) for x in (self.q_gate, self.k, self.v))
        T, H, _, dh = q_gate.shape
        Hkv = k.shape[1]
        self.q = room(T, H, dh)
        self.k_cells, self.k_scales = cells_of(Hkv, dh, self.int8)
        self.v_cells, self.v_scales = cells_of(Hkv, dh, self.int8)
        slots = [None if x is None else Slot(x) for x in (self.k_cells, self.k_scales, self.v_cells, self.v_scales)]
        pos = np.array([self.pos + (rows.start or 0)], np.int64)
        table = rotary_table(CONTEXT, self.rotary, 1e7)
        call = Call(qsa_append, q_gate, k, v, self.q_norm, self.k_norm, self.q, pos, table, *slots, H, Hkv, dh,
                    self.rotary, EPS, ERROR, LAYER)  # fmt: skip
        return call.run(T, order=reversed(range(T)))

    def check_cells(self, cells, scales, wanted) -> None:
        """Cells pos .. pos + T hold `wanted` (T, Hkv, dh), and no other cell was touched."""
        T = len(wanted)
        mine = slice(self.pos, self.pos + T)
        if self.int8:
            codes, steps = kv_cells.store_int8(wanted)
            assert_same(cells[mine], codes)
            assert_same(scales[mine], steps)
        else:
            assert_same(cells[mine], kv_cells.store_f16(wanted)[0])
        for array in (cells,) if scales is None else (cells, scales):
            rest = np.delete(np.asarray(array), np.arange(CONTEXT)[mine], axis=0)
            assert (np.ascontiguousarray(rest).view(np.uint8) == 0x5A).all()


# query heads, KV heads, head size, rotated dims
HEADS = [(1, 1, 32, 32), (4, 2, 64, 16), (6, 2, 128, 64), (3, 3, 256, 64), (12, 1, 64, 62)]


@pytest.mark.parametrize(("H", "Hkv", "dh", "rotary"), HEADS)
@pytest.mark.parametrize("T", [1, 3, 8])
@pytest.mark.parametrize("int8", [False, True])
def test_append(H, Hkv, dh, rotary, T, int8):
    if int8 and dh < 64:
        dh = 64
    a = Append.make(np.random.default_rng(H * dh + T), T, H, Hkv, dh, rotary, int8)
    assert a.run().reported is None
    table = rotary_table(CONTEXT, rotary, 1e7)
    q = np.stack([norm_rotate(a.q_gate[t, :, 0], a.q_norm, EPS, table[a.pos + t]) for t in range(T)])
    k = np.stack([norm_rotate(a.k[t], a.k_norm, EPS, table[a.pos + t]) for t in range(T)])
    assert_same(a.q, q, "q")
    a.check_cells(a.k_cells, a.k_scales, k)
    a.check_cells(a.v_cells, a.v_scales, a.v)


@pytest.mark.parametrize("int8", [False, True])
def test_append_without_queries(int8):
    a = Append.make(np.random.default_rng(1), 3, 0, 2, 64, 16, int8)
    assert a.run().reported is None
    table = rotary_table(CONTEXT, 16, 1e7)
    a.check_cells(
        a.k_cells, a.k_scales, np.stack([norm_rotate(a.k[t], a.k_norm, EPS, table[a.pos + t]) for t in range(3)])
    )
    a.check_cells(a.v_cells, a.v_scales, a.v)


def test_append_of_a_row_alone():
    a = Append.make(np.random.default_rng(2), 8, 4, 2, 64, 16, True)
    a.run()
    whole, k_cells, v_scales = a.q, a.k_cells, a.v_scales
    for t in range(8):
        a.run(slice(t, t + 1))
        at = a.pos + t
        assert_same(a.q[0], whole[t])
        assert_same(a.k_cells[at], k_cells[at])
        assert_same(a.v_scales[at], v_scales[at])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("where", ["q_gate", "k", "v"])
def test_append_reports_what_is_not_finite_or_does_not_fit(int8, where):
    a = Append.make(np.random.default_rng(3), 3, 2, 1, 64, 16, int8, plain)
    getattr(a, where)[1, ..., 0, 63] = np.nan
    assert a.run().reported == (NOT_FINITE, LAYER, 1)
    a.v[:], a.q_gate[:], a.k[:] = 1, 1, 1
    assert a.run().reported is None
    a.v[2, 0, 5] = 1e6
    assert a.run().reported == (NOT_FINITE, LAYER, 2)


def test_a_gate_that_is_not_finite_is_left_to_attention():
    a = Append.make(np.random.default_rng(4), 1, 2, 1, 64, 16, False, plain)
    a.q_gate[0, 1, 1, 0] = np.nan
    assert a.run().reported is None


def test_accuracy():
    a = Append.make(np.random.default_rng(5), 8, 6, 2, 256, 64, False, plain)
    a.run()
    wanted = exact.rms(a.q_gate[:, :, 0].astype(np.float64), a.q_norm, EPS)
    positions = np.arange(a.pos, a.pos + 8)
    assert_accurate(a.q, rope(wanted, positions, 64, 1e7), 1e-7, "rotated queries")
    assert_accurate(a.v_cells[a.pos : a.pos + 8], a.v, 3e-4, "float16 values")


# ---- the indexer


@dataclass
class Indexer:
    """State of one indexer, and windows run on it."""

    dim: int
    block: int
    heads: int = 2
    rotary: int = 16
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    context: int = 600

    def __post_init__(self):
        self.ring_rows = 1 << (self.block + 6).bit_length()  # a power of two >= block - 1 + 8
        self.keys = room(self.context // self.block, self.dim)
        self.ring = room(self.ring_rows, self.dim)
        self.q_norm, self.k_norm = plain(self.rng, self.dim), plain(self.rng, self.dim)
        self.table = rotary_table(self.context, self.rotary, 1e7)
        self.committed = np.zeros((0, self.dim), np.float32)

    def run(self, raw: np.ndarray, queries: np.ndarray | None = None) -> Call:
        """A window of raw keys at the end of what is committed; leaves rotated queries in `queries`."""
        T = len(raw)
        self.given = plain(self.rng, T, self.heads, self.dim) if queries is None else queries
        self.queries = guarded(self.given)
        call = Call(qsa_index, self.queries, np.ascontiguousarray(raw), self.q_norm, self.k_norm, Slot(self.keys),
                    Slot(self.ring), np.array([len(self.committed)], np.int64), self.table, T, self.heads, self.dim,
                    self.block, self.ring_rows, self.rotary, EPS, ERROR, LAYER)  # fmt: skip
        return call.run()

    def check_keys(self, raw: np.ndarray) -> None:
        """All complete blocks of the committed keys followed by `raw`, and nothing after them, are in place."""
        wanted = pooled_keys(np.concatenate([self.committed, raw]), self.block, self.k_norm, EPS, self.table)
        assert_same(self.keys[: len(wanted)], wanted, "pooled keys")

    def commit(self, raw: np.ndarray) -> None:
        self.committed = np.concatenate([self.committed, raw])


@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("dim", [32, 48, 128])
def test_index_over_windows_of_all_sizes(block, dim):
    ix = Indexer(dim, block)
    for T in (1, 1, 3, 8, 2, 8, 1, 5, 8, 7, 8, 8):
        raw = spiked(ix.rng, T, dim)
        assert ix.run(raw).reported is None
        ix.check_keys(raw)
        n = len(ix.committed)
        queries = [norm_rotate(ix.given[t], ix.q_norm, EPS, ix.table[n + t]) for t in range(T)]
        assert_same(ix.queries, np.stack(queries), "queries")
        ix.commit(raw)
    complete = len(ix.committed) // block
    assert (ix.keys[complete:].view(np.uint8) == 0x5A).all()


def test_pooled_keys_do_not_depend_on_how_windows_cut_them():
    raw = spiked(np.random.default_rng(1), 40, 64)
    results = []
    for T in (1, 3, 5, 8):
        ix = Indexer(64, 8)
        for first in range(0, 40, T):
            ix.run(raw[first : first + T])
            ix.commit(raw[first : first + T])
        results.append(np.array(ix.keys[:5]))
    for other in results[1:]:
        assert_same(other, results[0])


@settings(max_examples=20)
@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=20))
def test_rejected_rows_leave_no_trace(block, windows):
    """Windows of T rows of which n are kept: keys of complete blocks are those of the kept rows alone."""
    ix = Indexer(32, block)
    for T, n_keep in windows:
        raw = plain(ix.rng, T, 32)
        assert ix.run(raw).reported is None
        ix.check_keys(raw)
        ix.commit(raw[:n_keep])
    last = plain(ix.rng, 8, 32)
    ix.run(last)
    ix.check_keys(last)


@pytest.mark.parametrize("T", [16, 40, 256])
def test_a_prefill_chunk_is_longer_than_the_ring(T):
    ix = Indexer(32, 4)
    for raw in (plain(ix.rng, T, 32), plain(ix.rng, 3, 32), plain(ix.rng, T, 32), plain(ix.rng, 8, 32)):
        assert ix.run(raw).reported is None
        ix.check_keys(raw)
        ix.commit(raw)
        n = len(ix.committed)
        for position in range(max(0, n - ix.ring_rows), n):
            assert_same(ix.ring[position % ix.ring_rows], ix.committed[position], f"ring entry of {position}")


def test_index_reports_non_finite_values():
    ix = Indexer(32, 4)
    raw = plain(ix.rng, 3, 32)
    raw[2, 31] = np.nan
    assert ix.run(raw).reported == (NOT_FINITE, LAYER, 2)
    queries = plain(ix.rng, 3, 2, 32)
    queries[1, 1, 0] = np.inf
    assert ix.run(np.nan_to_num(raw), queries).reported == (NOT_FINITE, LAYER, 1)
    raw[:] = 3e38  # finite keys whose sum is not
    ix.commit(plain(ix.rng, 1, 32))
    assert ix.run(raw).reported == (NOT_FINITE, LAYER, 2)


def test_accuracy_of_pooled_keys():
    ix = Indexer(128, 4, rotary=64)
    raw = plain(ix.rng, 256, 128)
    ix.run(raw)
    mean = raw.astype(np.float64).reshape(64, 4, 128).mean(1)
    wanted = rope(exact.rms(mean, ix.k_norm, EPS), np.arange(64) * 4, 64, 1e7)
    assert_accurate(ix.keys[:64], wanted, 1.2e-7, "pooled keys")
