"""The float ops of a window at the released geometry, as walk lists over random data, each with its argued floor.

A case repeats one op over as many places as make it find its big operand where a window would find it: recurrent
states, KV cells and pooled keys of other layers push each other out of the caches, rows of a window do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strata.base.compiled import CFunction, step
from strata.base.rotary import rotary_table
from strata.cpu.gated_delta import conv_chunks, gdn_commit, gdn_conv, gdn_heads, head_chunks
from strata.cpu.gemv.table import swiglu_address
from strata.cpu.hyper_connection import hc_add, hc_mix, hc_norm, mix_pieces
from strata.cpu.lower import aligned_bytes, parallel
from strata.cpu.machine_code import call4, i64_view
from strata.cpu.ngram_mix import ngram_mix
from strata.cpu.qsa_append import qsa_append, qsa_index
from strata.cpu.qsa_attend import attend_splits, qsa_attend
from strata.cpu.qsa_select import qsa_select
from strata.cpu.router import router
from strata.cpu.walker import WalkList, float_argument

D, C, EPS = 2560, 4, 1e-6
HK, HV, DK, TAPS = 16, 48, 128, 4
H, HKV, DH, ROTARY = 24, 2, 256, 64
BLOCK, BUDGET, CONTEXT = 4, 512, 16384
INDEX_HEADS, INDEX_DIM, RING = 4, 128, 16
E, K, F = 512, 10, 640
CHANNELS = 2 * HK * DK + HV * DK
COLD_BYTES = 96 << 20
"""Operands of all places together: more than a core finds in its caches."""

SIGMOID_STEPS = 27
"""Vector instructions of a sigmoid: 17 and a division, which takes as long as 10."""


@dataclass
class Case:
    """One op for T rows.

    stream_bytes  read or written beyond the caches     cache_bytes  read or written within them
    steps         vector multiply-adds and the like, a value each; all three for one run of the op
    walk, places  a walk list that runs it `places` times
    """

    name: str
    T: int
    stream_bytes: int
    cache_bytes: int
    steps: int
    walk: WalkList
    places: int


@dataclass
class Builder:
    """Makes walk lists of one pool's chunks from random data."""

    pool: int
    threads: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    error: np.ndarray = field(default_factory=lambda: np.zeros(4, np.int64))
    rope: np.ndarray = field(default_factory=lambda: rotary_table(1 << 14, ROTARY, 1e7))

    def floats(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, np.float32)

    def case(
        self,
        name: str,
        T: int,
        function: CFunction,
        n_chunks: int,
        records: list[tuple],
        *,
        stream_bytes: int = 0,
        cache_bytes: int = 0,
        steps: int = 0,
        keep: Any = None,
    ) -> Case:
        """records: the words of each place; an array stands for its address, a float for its float32 bits."""
        walk = WalkList()
        for record in records:
            words = [float_argument(w) if isinstance(w, float) else w for w in record]
            if function.n_args == 1:
                walk.add(function, *words, keep=keep)
            else:
                pool = self.pool if n_chunks > 1 else 0
                walk.add(parallel, pool, n_chunks, function.address, *words, keep=keep)
        return Case(name, T, stream_bytes, cache_bytes, steps, walk, len(records))


def _slot(array: np.ndarray) -> np.ndarray:
    """A word that holds the array's address; the caller keeps the array."""
    return np.array([array.ctypes.data], np.int64)


def hyper_connection(b: Builder, T: int) -> Iterator[Case]:
    x, w, normed, gate = b.floats(T, C, D), b.floats(C, D), b.floats(T, C, D), b.floats(T, C, D)
    u, y, inject, a = b.floats(T, D), b.floats(T, D), b.floats(T, C), b.floats(T, C)
    values, row_bytes = T * C * D, 4 * T * D
    norm = (x, w, normed, C, D, EPS, 0, b.error, 0)
    yield b.case("hc_norm", T, hc_norm, T * C, [norm] * 50, cache_bytes=8 * values + 4 * C * D, steps=3 * values)
    pieces = mix_pieces(D)
    mix = (normed, gate, u, C, D, inject, a, b.error, 0, pieces)
    steps = (SIGMOID_STEPS + 1) * values
    yield b.case("hc_mix", T, hc_mix, T * pieces, [mix] * 50, cache_bytes=8 * values + row_bytes, steps=steps)
    add = (x, y, np.zeros((T, C), np.float32), C, D)
    yield b.case("hc_add", T, hc_add, T, [add] * 50, cache_bytes=8 * values + row_bytes, steps=values)


def gated_delta(b: Builder, T: int) -> Iterator[Case]:
    history, w = b.floats(TAPS - 1, CHANNELS), b.floats(TAPS, CHANNELS)
    qkv, conv = b.floats(T, CHANNELS), b.floats(T, CHANNELS)
    record = (qkv, conv, w, _slot(history), T, CHANNELS, TAPS, 0, b.error, 0)
    row_bytes = 4 * CHANNELS
    yield b.case("gdn_conv", T, gdn_conv, conv_chunks(CHANNELS, T), [record] * 20, keep=history,
                 cache_bytes=row_bytes * (2 * TAPS - 1 + 2 * T),
                 steps=T * CHANNELS * (TAPS + SIGMOID_STEPS))  # fmt: skip
    values, n = HV * DK * DK, head_chunks(HV, b.threads)
    # One aligned block, as in a session's state; that it gets huge pages is part of the speed.
    places = -(-COLD_BYTES // (4 * values))
    states = aligned_bytes(4 * values * places).view(np.float32).reshape(places, HV, DK, DK)
    b.rng.standard_normal(out=states, dtype=np.float32)
    mixed, z, y = b.floats(T, CHANNELS), b.floats(T, HV, DK), b.floats(T, HV, DK)
    decay, beta, a, dt, norm = b.floats(T, HV), b.floats(T, HV), -abs(b.floats(HV)), b.floats(HV), b.floats(DK)
    rows = [(mixed, decay, beta, z, a, dt, norm, _slot(s), y, T, HK, DK, DK, CHANNELS, 0, EPS, DK**-0.5, b.error, 0)
            for s in states]  # fmt: skip
    yield b.case("gdn_heads", T, gdn_heads, n, rows, stream_bytes=4 * values, steps=4 * T * values, keep=states)
    gates, n_keep = np.full((T, HV), 0.5, np.float32), np.array([T], np.int64)
    rows = [(mixed, gates, gates, _slot(s), n_keep, HK, DK, DK, CHANNELS) for s in states]
    yield b.case("gdn_commit", T, gdn_commit, n, rows, stream_bytes=8 * values, steps=3 * T * values, keep=states)


def attend(b: Builder, T: int, int8: bool) -> Case:
    entries, places = BUDGET * BLOCK + 3, 8
    pos = np.array([CONTEXT - 1 - T - (CONTEXT - T - 3) % BLOCK], np.int64)
    shape = (CONTEXT, HKV, DH)
    cells, scales, slots = [], [], []
    for _ in range(2):
        cells.append(b.rng.integers(-127, 128, shape, np.int8) if int8 else b.floats(*shape).astype(np.float16))
        scales.append(np.full((CONTEXT, HKV, DH // 64), 0.01, np.float16) if int8 else None)
        slots += [_slot(cells[-1]), _slot(scales[-1]) if int8 else 0]
    q, q_gate, y = b.floats(T, H, DH), b.floats(T, H, 2, DH), b.floats(T, H, DH)
    splits, records = attend_splits(T, H, HKV, b.threads), []
    for _ in range(places):
        chosen = np.sort(b.rng.permutation(int(pos[0] + 1) // BLOCK)[:BUDGET]).astype(np.int32)
        records.append((q, q_gate, y, pos, *slots, np.tile(chosen, (T, 1)), H, HKV, DH, BLOCK, BUDGET, DH**-0.5,
                        b.error, 0, splits, 0))  # fmt: skip
    cell_bytes = DH + DH // 32 if int8 else 2 * DH
    return b.case("qsa_attend int8" if int8 else "qsa_attend f16", T, qsa_attend, T * HKV * splits, records,
                  stream_bytes=2 * entries * HKV * cell_bytes, steps=2 * T * entries * H * DH,
                  keep=(cells, scales))  # fmt: skip


def select(b: Builder, T: int, n_blocks: int) -> Case:
    n_bytes = n_blocks * INDEX_DIM * 4
    keys = [b.floats(n_blocks + 2, INDEX_DIM) for _ in range(-(-COLD_BYTES // n_bytes))]
    iq, out, pos = b.floats(T, INDEX_HEADS, INDEX_DIM), np.zeros((T, BUDGET), np.int32), n_blocks * BLOCK - 1
    records = [(iq, _slot(k), np.array([pos]), out, INDEX_HEADS, INDEX_DIM, BLOCK, BUDGET, b.error, 0) for k in keys]
    return b.case(f"qsa_select {n_blocks >> 10}K", T, qsa_select, T, records, stream_bytes=n_bytes,
                  steps=T * n_blocks * INDEX_HEADS * INDEX_DIM, keep=keys)  # fmt: skip


def small(b: Builder, T: int) -> Iterator[Case]:
    """Ops of few values: cache rate and instruction counts hardly bound them, starting does."""
    logits, ids, weights = b.floats(T, E), np.zeros((T, K), np.int32), b.floats(T, K)
    yield b.case("router", T, router, T, [(logits, ids, weights, E, K, 1.0, b.error, 0)] * 50, cache_bytes=4 * T * E)
    x, key, value = b.floats(T, C, D), b.floats(T, C, D), b.floats(T, D)
    norms, conv = b.floats(3, C, D), b.floats(TAPS, C * D)
    history, rows = b.floats((TAPS - 1) * 3, C * D), b.floats(T, C * D)
    values = T * C * D
    record = (x, key, value, norms[0], norms[1], norms[2], conv, _slot(history), rows, T, C, D, TAPS, 3, 0, EPS,
              b.error, 0)  # fmt: skip
    yield b.case("ngram_mix", T, ngram_mix, 1, [record] * 10, keep=history,
                 cache_bytes=4 * (5 + TAPS) * values + 4 * (3 + TAPS) * C * D,
                 steps=(SIGMOID_STEPS + 16) * values)  # fmt: skip
    q, k, v, q_out = b.floats(T, H, 2, DH), b.floats(T, HKV, DH), b.floats(T, HKV, DH), b.floats(T, H, DH)
    cells, pos, norm = np.zeros((2, 64, HKV, DH), np.float16), np.array([16]), b.floats(DH)
    record = (q, k, v, norm, norm, q_out, pos, b.rope, _slot(cells[0]), 0, _slot(cells[1]), 0, H, HKV, DH, ROTARY, EPS,
              b.error, 0)  # fmt: skip
    yield b.case("qsa_append", T, qsa_append, T, [record] * 50, keep=cells, cache_bytes=8 * T * (H + 2 * HKV) * DH)
    iq, ik, norm = b.floats(T, INDEX_HEADS, INDEX_DIM), b.floats(T, INDEX_DIM), b.floats(INDEX_DIM)
    keys, ring = b.floats(64, INDEX_DIM), b.floats(RING, INDEX_DIM)
    record = (iq, ik, norm, norm, _slot(keys), _slot(ring), pos, b.rope, T, INDEX_HEADS, INDEX_DIM, BLOCK, RING, ROTARY,
              EPS, b.error, 0)  # fmt: skip
    yield b.case("qsa_index", T, qsa_index, 1, [record] * 50, keep=(keys, ring),
                 cache_bytes=8 * T * (INDEX_HEADS + 1) * INDEX_DIM)  # fmt: skip


@step
def swiglu(a):
    """Record: g, u, h, values, address of the function that every layer of experts calls."""
    p = i64_view(a, 5)
    call4(p[4], p[0], p[1], p[2], p[3])


def activation(b: Builder, T: int) -> Case:
    """h = silu(g) u of K experts a row."""
    g, u, h = (b.floats(T, K, F) for _ in range(3))
    return b.case("swiglu", T, swiglu, 1, [(g, u, h, T * K * F, swiglu_address())] * 50, cache_bytes=12 * T * K * F,
                  steps=(SIGMOID_STEPS + 2) * T * K * F)  # fmt: skip


def cases(b: Builder, T: int, only: str = "") -> Iterator[Case]:
    """The ops for T rows whose name holds `only`. Data are made as a case is asked for."""
    makers: dict[str, Callable[[], Iterable[Case]]] = {
        "hc_norm hc_mix hc_add": lambda: hyper_connection(b, T),
        "gdn_conv gdn_heads gdn_commit": lambda: gated_delta(b, T),
        "qsa_attend f16": lambda: [attend(b, T, False)],
        "qsa_attend int8": lambda: [attend(b, T, True)],
        "qsa_select 8K": lambda: [select(b, T, 8192)],
        "qsa_select 32K": lambda: [select(b, T, 32768)],
        "swiglu": lambda: [activation(b, T)],
        "router ngram_mix qsa_append qsa_index": lambda: small(b, T),
    }
    for names, make in makers.items():
        if only in names:
            yield from (case for case in make() if only in case.name)
