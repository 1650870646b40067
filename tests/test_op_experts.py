"""Experts of a window: grouping, products, activation, exact combine."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest

from strata.base.arithmetic import combine_terms
from strata.base.doorbell import CPU, HIT, LINK
from strata.base.program import COMBINE_OVERFLOW, NOT_FINITE
from strata.cpu import expert_record as op
from strata.cpu.expert_jobs import experts_chunk
from strata.cpu.experts import experts as step
from strata.cpu.gemv.table import kernel_table, layout_of, swiglu_address
from strata.cpu.lower import quantise
from strata.cpu.pool import Pool
from strata.pack.formats import by_name
from tests.canonical import experts as reference
from tests.canonical.call import ERROR, LAYER, Call, assert_accurate, assert_same, plain, room
from tests.reference.hyper_connection import sigmoid, silu

PRODUCTS = {"F32": reference.product_f32, "Q8_0": reference.product_q8_0}


@cache
def kernels(name: str) -> np.ndarray:
    return kernel_table(by_name(name))


@cache
def pool() -> Pool:
    return Pool(2)


def matrix(rng: np.random.Generator, name: str, rows: int, K: int) -> np.ndarray:
    """Random weights of about 1 / sqrt(K): float32 (rows, K) or Q8_0 blocks uint8 (rows, bytes)."""
    if name == "F32":
        return plain(rng, rows, K) / np.float32(np.sqrt(K))
    blocks = np.empty((rows, K // 32, 34), np.uint8)
    d = (rng.uniform(0.5, 2, (rows, K // 32, 1)) / 64 / np.sqrt(K)).astype(np.float16)
    blocks[:, :, :2] = d.view(np.uint8).reshape(rows, K // 32, 2)
    blocks[:, :, 2:] = rng.integers(-127, 128, (rows, K // 32, 32), dtype=np.int8).view(np.uint8)
    return blocks.reshape(rows, -1)


def widened(name: str, w: np.ndarray) -> np.ndarray:
    return by_name(name).dequantise(w.view(np.uint8)).astype(np.float64).reshape(len(w), -1)


@dataclass
class Layer:
    """E routed experts and the shared one; formats of (gate, up, down) in both."""

    E: int
    D: int
    F: int
    shared_width: int
    formats: tuple[str, str, str]
    scaled: bool = False
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self):
        self.routed = [self._expert(self.F) for _ in range(self.E)]
        self.shared = self._expert(self.shared_width)
        self.scales = self.rng.uniform(0.5, 2, (3, self.E)).astype(np.float32) if self.scaled else None

    def _expert(self, width: int) -> list[np.ndarray]:
        shapes = ((width, self.D), (width, self.D), (self.D, width))
        return [matrix(self.rng, f, *shape) for f, shape in zip(self.formats, shapes, strict=True)]

    def draw(self, T: int, K: int) -> tuple[np.ndarray, ...]:
        """x (T, D), ids (T, K), weights (T, K), shared_gate (T, 1)."""
        ids = np.stack([self.rng.permutation(self.E)[:K] for _ in range(T)]).astype(np.int32)
        weights = self.rng.uniform(0, 1, (T, K)).astype(np.float32)
        return plain(self.rng, T, self.D), ids, weights, plain(self.rng, T, 1)

    def run(
        self, x, ids, weights, shared_gate, pieces=1, workers: Pool | None = None, decisions: np.ndarray | None = None,
        sums: bool = False,
    ) -> tuple[np.ndarray, Call]:  # fmt: skip
        """Output (T, D) float32, or with `sums` the int64 sums of the routed entries alone. pieces: about how many
        chunks a matrix is cut into."""
        T, K = ids.shape
        entries, words, kept = T * K, [0] * op.WORDS, []

        def place(n_bytes: int) -> np.ndarray:
            kept.append(np.full(n_bytes + 64, 0x5A, np.uint8))
            return kept[-1]

        y = room(T, self.D, dtype="int64" if sums else "float32")
        words[op.IDS], words[op.WEIGHTS], words[op.DECISIONS] = ids, weights, decisions
        words[op.T_], words[op.E_], words[op.K_], words[op.D_] = T, self.E, K, self.D
        words[op.ERROR], words[op.LAYER], words[op.POOL] = ERROR, LAYER, workers.address if workers else 0
        inputs = {f: self._records(x, f, place) for f in set(self.formats[:2])}
        sides = [(op.ROUTED, self.routed, self.F, entries)]
        if sums:
            words[op.TOTAL] = y
        else:
            words[op.Y], words[op.SHARED_GATE], words[op.TOTAL] = y, shared_gate, place(8 * T * self.D)
            sides.append((op.SHARED, [self.shared], self.shared_width, T))
        for side, experts, width, rows in sides:
            addresses = [[m.ctypes.data for m in e] for e in experts]
            kept.append(np.array(addresses, np.int64))
            words[side + op.TABLE], words[side + op.WIDTH] = kept[-1], width
            for i, at in enumerate((op.GATE, op.UP, op.DOWN)):
                name, values = self.formats[i], width if at == op.DOWN else self.D
                act, n_bytes = (None, layout_of(by_name(name)).record_bytes(width)) if at == op.DOWN else inputs[name]
                scales = self.scales[i] if self.scaled and side == op.ROUTED else None
                row_bytes = by_name(name).row_bytes(values)
                words[side + at : side + at + 5] = row_bytes, kernels(name), act, n_bytes, scales
            layout = layout_of(by_name(self.formats[2]))
            for word in (op.G, op.U):
                words[side + word] = place(4 * rows * width)
            words[side + op.OUT] = place(4 * rows * self.D)
            words[side + op.H] = place(rows * layout.record_bytes(width)) if layout.group else words[side + op.G]
            words[side + op.QUANTISE] = layout.quantise_address if layout.group else 0
        records = words[op.ROUTED + op.GATE + 3] + words[op.ROUTED + op.UP + 3]
        words[op.ROUTED + op.GATHER] = place(entries * records)
        words[op.THREADS] = 1 if pieces == 1 else 2
        words[op.LEAST] = words[op.MOST] = max(1, self.D * words[op.ROUTED + op.DOWN] // pieces)
        words[op.JOBS], words[op.ENTRY_OF] = place((entries + 1) * op.JOB_WORDS * 8), place(4 * entries)
        words[op.ROW_OF], words[op.COUNTERS] = place(4 * entries), place(op.counter_bytes(entries))
        words[op.DOWN_STARTS] = place(op.starts_bytes(entries, self.E))
        words[op.SEEN], words[op.SWIGLU], words[op.CHUNK] = place(4 * self.E), swiglu_address(), experts_chunk.address
        call = Call(step, *words).run()
        scratch = [array for array in kept if array.dtype == np.uint8]
        assert all((array[-64:] == 0x5A).all() for array in scratch), "written behind the end of scratch"
        return y, call

    def _records(self, x: np.ndarray, name: str, place) -> tuple[np.ndarray, int]:
        layout, T = layout_of(by_name(name)), len(x)
        n_bytes = layout.record_bytes(self.D)
        if layout.group == 0:
            return x, n_bytes
        area = place(T * n_bytes)
        Call(quantise, layout.quantise_address, x, self.D, T, 4 * self.D, area, ERROR, LAYER, NOT_FINITE).run()
        return area, n_bytes

    def wanted(self, x, ids, weights, shared_gate) -> np.ndarray:
        products = [PRODUCTS[f] for f in self.formats]
        y = np.empty_like(x)
        for t in range(len(x)):
            own = [self.scales[:, e] if self.scaled else (1, 1, 1) for e in ids[t]]
            outputs = [reference.expert(x[t], self.routed[e], products, s) for e, s in zip(ids[t], own, strict=True)]
            shared = reference.expert(x[t], self.shared, products)
            y[t], overflow = reference.combine(weights[t], outputs, [s[2] for s in own], shared_gate[t, 0], shared)
            assert not overflow
        return y


ALL_FORMATS = [("F32", "F32", "F32"), ("Q8_0", "Q8_0", "Q8_0"), ("Q8_0", "Q8_0", "F32"), ("F32", "Q8_0", "Q8_0")]


@pytest.mark.parametrize("formats", ALL_FORMATS, ids="-".join)
@pytest.mark.parametrize("T", [1, 3, 8])
@pytest.mark.parametrize("scaled", [False, True])
def test_same_bits(formats, T, scaled):
    """Six experts for three choices: rows share experts in every window of several rows."""
    layer = Layer(6, 96, 64, 32, formats, scaled)
    given = layer.draw(T, 3)
    wanted = layer.wanted(*given)
    for pieces in (1, 3):
        y, call = layer.run(*given, pieces=pieces)
        assert call.reported is None
        assert_same(y, wanted, f"{pieces} pieces")
    assert_same(layer.run(*given, pieces=3, workers=pool())[0], wanted, "two threads")


@pytest.mark.parametrize("formats", ALL_FORMATS[:2] + ALL_FORMATS[3:], ids="-".join)
@pytest.mark.parametrize("E", [2, 5, 40])
def test_rows_do_not_see_each_other(formats, E):
    """From all rows asking for the same experts to hardly any sharing."""
    layer = Layer(E, 64, 32, 64, formats)
    x, ids, weights, gate = layer.draw(8, 2)
    whole, _ = layer.run(x, ids, weights, gate)
    for t in range(8):
        one, _ = layer.run(*(np.ascontiguousarray(a[t : t + 1]) for a in (x, ids, weights, gate)))
        assert_same(one[0], whole[t], f"row {t} alone")
    order = layer.rng.permutation(8)
    mixed, _ = layer.run(*(np.ascontiguousarray(a[order]) for a in (x, ids, weights, gate)))
    assert_same(mixed, whole[order], "other order of rows")
    flipped, _ = layer.run(x, np.ascontiguousarray(ids[:, ::-1]), np.ascontiguousarray(weights[:, ::-1]), gate)
    assert_same(flipped, whole, "other order of choices")


def test_a_value_that_is_not_finite_before_the_down_product():
    layer = Layer(4, 64, 32, 32, ("F32", "F32", "Q8_0"))
    x, _, weights, gate = layer.draw(2, 2)
    ids = np.array([[3, 1], [1, 2]], np.int32)
    layer.routed[2][0][5] = layer.routed[2][1][5] = 1e30 * np.sign(x[1])  # silu(g) u overflows for the row that asks
    assert layer.run(x, ids, weights, gate)[1].reported == (NOT_FINITE, LAYER, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("which", ["routed", "shared"])
def test_an_output_beyond_the_limit(bad, which):
    layer = Layer(4, 64, 32, 32, ("F32", "F32", "F32"))
    x, _, weights, gate = layer.draw(3, 2)
    ids = np.array([[0, 1], [1, 2], [0, 1]], np.int32)
    (layer.routed[2] if which == "routed" else layer.shared)[2][63] = bad
    y, call = layer.run(x, ids, weights, gate)
    assert call.reported == (COMBINE_OVERFLOW, LAYER, 1 if which == "routed" else 0)
    assert np.isfinite(y).all()  # a bad term counts as 0


@pytest.mark.parametrize("formats", ALL_FORMATS[:2], ids="-".join)
def test_accuracy(formats):
    layer = Layer(6, 256, 128, 128, formats)
    x, ids, weights, gate = layer.draw(4, 3)

    def exact(row, matrices):
        gate, up, down = (widened(f, m) for f, m in zip(formats, matrices, strict=True))
        return down @ (silu(gate @ row) * (up @ row))

    rows = x.astype(np.float64)
    wanted = [sum(weights[t, j] * exact(rows[t], layer.routed[e]) for j, e in enumerate(ids[t]))
              + sigmoid(gate[t, 0].astype(np.float64)) * exact(rows[t], layer.shared) for t in range(4)]  # fmt: skip
    bound = 3e-7 if formats[0] == "F32" else 2e-2  # int8 activations twice
    assert_accurate(layer.run(x, ids, weights, gate)[0], np.stack(wanted), bound, "experts")


@pytest.mark.parametrize("formats", ALL_FORMATS, ids="-".join)
@pytest.mark.parametrize("scaled", [False, True])
def test_sums_of_some_entries(formats, scaled):
    """Exact sums of the entries that fall to the CPU, without the shared expert; rows without one stay as they were."""
    layer = Layer(6, 96, 64, 32, formats, scaled)
    x, ids, weights, gate = layer.draw(8, 3)
    decisions = layer.rng.choice([CPU, HIT, LINK], ids.shape).astype(np.uint8)
    decisions[2] = HIT
    products = [PRODUCTS[f] for f in formats]
    wanted = room(8, 96, dtype="int64")
    for t in range(8):
        if (decisions[t] == CPU).any():
            wanted[t] = 0
        for j in np.flatnonzero(decisions[t] == CPU):
            e = ids[t, j]
            own = layer.scales[:, e] if scaled else np.ones(3, np.float32)
            y = reference.expert(x[t], layer.routed[e], products, own)
            wanted[t] += combine_terms(weights[t, j], y * own[2])[0]
    for pieces, workers in ((1, None), (3, None), (5, pool())):
        sums, call = layer.run(x, ids, weights, gate, pieces, workers, decisions, sums=True)
        assert call.reported is None
        assert_same(sums, wanted, f"{pieces} pieces")


def test_no_entries_at_all():
    layer = Layer(4, 64, 32, 32, ("F32", "F32", "F32"))
    given = layer.draw(2, 2)
    sums, call = layer.run(*given, decisions=np.full((2, 2), HIT, np.uint8), sums=True)
    assert call.reported is None
    assert_same(sums, room(2, 64, dtype="int64"))


@pytest.mark.parametrize("threads", [2, 4, 7])
def test_chunks_wait_for_each_other(threads):
    """Many small chunks on more threads than there are CPUs, sleeping ones included; every row order of an expert."""
    layer = Layer(9, 64, 64, 64, ("Q8_0", "F32", "Q8_0"))
    with Pool(threads, spin_us=20) as workers:
        for i in range(60):
            given = layer.draw(1 + i % 8, 3)
            wanted, _ = layer.run(*given)
            assert_same(layer.run(*given, pieces=1 + i % 32, workers=workers)[0], wanted)
