"""Times single kernels at full geometry on a CUDA device: python -m tests.gpu.time_ops [T ...] [part ...]

Every op runs in a graph over many copies of its weights, so that nothing stays in L2. Shown: us a launch, bytes of
weights and state, GB/s, and percent of the rate of a device-to-device copy in the same run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from strata.gpu import gated_delta, head_rows, hyper_connection, qsa_append, qsa_attend, qsa_select, router
from strata.gpu.activations import Activations, quantise
from strata.gpu.device import CupyDevice
from strata.gpu.experts_ends import combine, swiglu
from strata.gpu.float_gemv import FloatMatrix, float_gemv
from strata.gpu.launch import Launch

D, C, RANK, V, F, K, E = 2560, 4, 320, 248_320, 640, 10, 512
HK, HV, DK, TAPS = 16, 48, 128, 4
H, HKV, DH, CONTEXT, BUDGET, BLOCK = 24, 2, 256, 131_072, 512, 4
LAUNCHES = 40
KEY_COPIES, CELL_COPIES = 5, LAUNCHES
"""Copies of a layer's pooled keys, and of its K and V, so that what a launch reads is not in L2."""
WHERE = np.uint64(0)


@dataclass
class Timer:
    device: CupyDevice
    copy_gbps: float = 0.0

    def floats(self, n: int, scale: float = 1.0) -> int:
        """Address of n random float32."""
        cp = self.device._cupy
        at = self.device.alloc(4 * n)
        view = cp.ndarray((n,), np.float32, cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(at, 4 * n, self), 0))
        view[...] = cp.random.standard_normal(n, dtype=np.float32) * np.float32(scale)
        cp.cuda.runtime.deviceSynchronize()
        return at

    def halves(self, n: int) -> int:
        """Address of n float16 between 0.5 and 1."""
        cp = self.device._cupy
        at = self.device.alloc(2 * n)
        view = cp.ndarray((n,), np.uint16, cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(at, 2 * n, self), 0))
        view[...] = cp.random.randint(0x3800, 0x3C00, n, dtype=np.uint16)
        cp.cuda.runtime.deviceSynchronize()
        return at

    def words(self, *values: int) -> int:
        at = self.device.alloc(8 * len(values))
        self.device.upload(at, np.array(values, np.uint64))
        return at

    def us(self, launches: list[Launch], rounds: int = 9) -> float:
        """Median us of one graph of all launches."""
        cp, stream = self.device._cupy, self.device.stream
        graph = self.device.graph(launches)
        times = []
        for _ in range(rounds):
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record(stream)
            graph()
            stop.record(stream)
            stop.synchronize()
            times.append(1e3 * cp.cuda.get_elapsed_time(start, stop))
        return float(np.median(times[2:]))

    def measure_copy(self) -> None:
        cp, n = self.device._cupy, 1 << 30
        a, b = self.device.alloc(n), self.device.alloc(n)
        times = []
        for _ in range(9):
            start, stop = cp.cuda.Event(), cp.cuda.Event()
            start.record(self.device.stream)
            cp.cuda.runtime.memcpyAsync(b, a, n, 3, self.device.stream.ptr)
            stop.record(self.device.stream)
            stop.synchronize()
            times.append(cp.cuda.get_elapsed_time(start, stop))
        self.copy_gbps = 2 * n / np.median(times) / 1e6
        print(f"copy, read and written: {self.copy_gbps:.0f} GB/s")

    def show(self, name: str, make: Callable[[int], list[Launch]], n_bytes: int, copies: int) -> None:
        """make(i): the launches of copy i."""
        each = [make(i) for i in range(copies)]
        launches = [one for k in range(LAUNCHES) for one in each[k % copies]]
        us = self.us(launches) / LAUNCHES
        rate = n_bytes / us / 1e3
        print(f"{name:<44} {us:8.2f} us {n_bytes / 1e6:9.2f} MB {rate:7.0f} GB/s {100 * rate / self.copy_gbps:5.1f} %")


def float_products(t: Timer, T: int) -> None:
    shapes = (
        ("hc down + inject", C * D, (RANK, C), 20),
        ("hc up", RANK, (C * D,), 20),
        ("alpha, beta", D, (HV, HV), 100),
        ("router, shared gate", D, (E, 1), 60),
    )
    for name, columns, rows, copies in shapes:
        x = t.floats(T * columns)
        weights = [[t.device.alloc(2 * n * columns) for n in rows] for _ in range(copies)]
        y = [t.device.alloc(4 * T * n) for n in rows]

        def make(i: int, x=x, columns=columns, rows=rows, weights=weights, y=y) -> list[Launch]:
            places = zip(weights[i], rows, y, strict=True)
            return float_gemv(x, T, columns, [FloatMatrix("BF16", w, n, out) for w, n, out in places])

        t.show(f"{name} BF16 T={T}", make, 2 * sum(rows) * columns, copies)


def small_ops(t: Timer, T: int) -> None:
    error = t.words(2**64 - 1)
    streams, w, out, y, a = (t.floats(n) for n in (T * C * D, C * D, T * C * D, T * D, T * C))
    t.show(
        f"hc_norm with add T={T}",
        lambda i: hyper_connection.hc_norm(streams, w, out, T, C, D, 1e-6, error, WHERE, y=y, a=a),
        12 * T * C * D,
        1,
    )
    q = [Activations.at(t.device.alloc(Activations.n_bytes(T, D, g)), T, D, g) for g in (32, 256)]
    u, inject = t.floats(T * D), t.floats(T * C)
    t.show(f"hc_mix with both quantisers T={T}", lambda i: hyper_connection.hc_mix(
        streams, out, u, T, C, D, error, WHERE, inject=inject, a=a, quantised=tuple(q)), 8 * T * C * D, 1)  # fmt: skip
    t.show(
        f"quantise 6144 T={T}",
        lambda i: quantise(streams, Activations.at(out, T, 6144, 256), error, WHERE),
        T * 6144 * 4,
        1,
    )
    logits, ids, weights = t.floats(T * E), t.device.alloc(4 * T * K), t.device.alloc(4 * T * K)
    t.show(f"router T={T}", lambda i: router.router(logits, ids, weights, T, E, K, 1.0, error, WHERE), 4 * T * E, 1)
    g, h = t.floats(T * K * F), Activations.at(t.device.alloc(Activations.n_bytes(T * K, F, 32)), T * K, F, 32)
    t.show(f"swiglu of {K} experts T={T}", lambda i: swiglu(g, g, T * K, F, h, error, WHERE), 8 * T * K * F, 1)
    outputs, gate = t.floats(T * K * D), t.floats(T)
    t.show(
        f"combine T={T}", lambda i: combine(outputs, ids, weights, y, gate, u, T, K, D, error, WHERE), 4 * T * K * D, 1
    )


def gated_delta_ops(t: Timer, T: int) -> None:
    channels, error = 2 * HK * DK + HV * DK, t.words(2**64 - 1)
    qkv, conv, taps, z, y = (
        t.floats(n) for n in (T * channels, T * channels, TAPS * channels, T * HV * DK, T * HV * DK)
    )
    decay, beta, a, dt, norm = (t.floats(n) for n in (T * HV, T * HV, HV, HV, DK))
    history = t.words(t.floats((TAPS - 1) * channels))
    states = [t.words(t.floats(HV * DK * DK, 0.01)) for _ in range(36)]
    shape = (HK, HV, DK, DK, channels)
    t.show(f"gdn_window T={T}", lambda i: gated_delta.gdn_window(
        qkv, taps, history, TAPS, conv, decay, beta, z, a, dt, norm, states[i], y, T, *shape, 1e-6, error, WHERE),
        4 * HV * DK * DK, 36)  # fmt: skip
    keep = t.words(T)
    t.show(f"gdn_commit of {T}", lambda i: gated_delta.gdn_commit(conv, decay, beta, states[i], keep, *shape),
           8 * HV * DK * DK, 36)  # fmt: skip


def cells_of(t: Timer, int8: bool) -> qsa_append.KvSlots:
    """K and V of a context."""
    n = CONTEXT * HKV * DH
    if int8:
        k, v = (t.words(t.halves(n // 2)) for _ in range(2))  # any bytes
        return qsa_append.KvSlots(k, v, *(t.words(t.halves(n // 64)) for _ in range(2)))
    return qsa_append.KvSlots(*(t.words(t.halves(n)) for _ in range(2)))


def attention(t: Timer, T: int, cells: int) -> None:
    error, pos = t.words(2**64 - 1), t.words(cells - T)
    q_gate, q, y, kv = t.floats(2 * T * H * DH), t.floats(T * H * DH), t.floats(T * H * DH), t.floats(T * HKV * DH)
    norm, rope = t.floats(DH), t.floats(CONTEXT * 64)
    iq, keys = t.floats(T * 4 * 128), [t.words(t.floats(CONTEXT // BLOCK * 128)) for _ in range(KEY_COPIES)]
    ring, ik = t.words(t.floats(16 * 128)), t.floats(T * 128)
    index = qsa_append.Index(iq, ik, norm, norm, keys[0], ring, 4, 128, BLOCK, 16, 64, 1e-6)
    t.show(f"qsa_index T={T}", lambda i: qsa_append.qsa_index(index, pos, rope, T, error, WHERE), T * 4 * 128 * 4, 1)
    blocks, scores = t.device.alloc(4 * T * BUDGET), t.device.alloc(qsa_select.score_bytes(T, CONTEXT, BLOCK))

    def select(i: int) -> list[Launch]:
        return qsa_select.qsa_select(iq, keys[i % KEY_COPIES], pos, blocks, scores, T, 4, 128, BLOCK, BUDGET, CONTEXT,
                                     error, WHERE)  # fmt: skip

    key_bytes = cells // BLOCK * 512
    t.show(f"qsa_scores at {cells} T={T}", lambda i: select(i)[:1], key_bytes, KEY_COPIES)
    t.show(f"qsa_scores at {cells} T={T}, keys in L2", lambda i: select(0)[:1], key_bytes, 1)
    t.show(f"qsa_select at {cells} T={T}", lambda i: select(0)[1:], 4 * T * cells // BLOCK, 1)
    parts = t.device.alloc(qsa_attend.part_bytes(T, H, DH, CONTEXT, BLOCK, BUDGET))
    for int8 in (False, True):
        form, slots = "int8" if int8 else "float16", [cells_of(t, int8) for _ in range(CELL_COPIES)]
        appends = [qsa_append.Append(q_gate, kv, kv, norm, norm, q, one, H, HKV, DH, 64, 1e-6) for one in slots]
        t.show(f"qsa_append {form} T={T}", lambda i, appends=appends: qsa_append.qsa_append(
            appends[i], pos, rope, T, error, WHERE), T * H * DH * 8, CELL_COPIES)  # fmt: skip
        t.show(f"qsa_store {form} T={T}", lambda i, appends=appends: qsa_append.qsa_store(
            appends[i], index, pos, rope, T, error, WHERE, WHERE), T * H * DH * 8, CELL_COPIES)  # fmt: skip

        def attend(i: int, slots=slots) -> list[Launch]:
            return qsa_attend.attend_rows(q, q_gate, y, pos, slots[i], blocks, 0, parts, T, H, HKV, DH, BLOCK, BUDGET,
                                          CONTEXT, error, WHERE)  # fmt: skip

        cell_bytes = T * BUDGET * BLOCK * HKV * DH * (2 if int8 else 4)
        name = attend(0)[0].kernel
        t.show(f"{name} {form} at {cells} T={T}", lambda i: attend(i)[:1], cell_bytes, CELL_COPIES)
        t.show(f"qsa_merge at {cells} T={T}", lambda i: attend(i)[1:], 4 * T * H * 33 * DH, 1)
        t.show(f"scores to merge {form} at {cells} T={T}", lambda i: [*select(i), *attend(i)], key_bytes + cell_bytes,
               CELL_COPIES)  # fmt: skip


def head(t: Timer, T: int) -> None:
    logits, tops = t.floats(T * V), t.device.alloc(4 * T * head_rows.runs_of(V))
    ids, values, status = (t.device.alloc(4 * 8 * 64) for _ in range(3))
    terms, sums = t.device.alloc(head_rows.term_bytes(T, V)), t.device.alloc(64)
    for n in (1, 20, 64):
        for launch in head_rows.top(logits, tops, ids, values, status, T, V, n):
            t.show(f"{launch.kernel} n={n} T={T}", lambda i, one=launch: [one], 4 * T * V, 1)
    for launch in head_rows.log_sum_exp(logits, values, terms, sums, T, V):
        t.show(f"{launch.kernel} T={T}", lambda i, one=launch: [one], 8 * T * V, 1)


def attention_at_full_context(t: Timer, T: int) -> None:
    attention(t, T, CONTEXT)


PARTS = {
    "floats": float_products,
    "small": small_ops,
    "delta": gated_delta_ops,
    "head": head,
    "attention": attention_at_full_context,
}


def main(arguments: list[str]) -> None:
    """Numbers of rows and names of parts; none of a kind: all of them."""
    names = [a for a in arguments if a in PARTS] or list(PARTS)
    for T in [int(a) for a in arguments if a not in PARTS] or [1, 4]:
        for name in names:
            timer = Timer(CupyDevice())
            timer.measure_copy()
            PARTS[name](timer, T)
            timer.device.close()


if __name__ == "__main__":
    main(sys.argv[1:])
