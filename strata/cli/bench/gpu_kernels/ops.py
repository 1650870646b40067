"""strata bench gpu-kernels ops: the kernels of a window other than products with quantised matrices.

Every op runs in a graph over many copies of its weights or state, so that nothing stays in L2.
"""

from __future__ import annotations

from collections.abc import Callable

from strata.cli.bench.gpu_kernels.timer import WHERE, Timer
from strata.gpu import gated_delta, head_rows, hyper_connection, qsa_append, qsa_attend, qsa_select, router
from strata.gpu.activations import Activations, quantise
from strata.gpu.experts_ends import combine, swiglu
from strata.gpu.float_gemv import FloatMatrix, float_gemv
from strata.gpu.launch import Launch
from strata.gpu.route import Choice, route

D, C, RANK, V, F, K, E = 2560, 4, 320, 248_320, 640, 10, 512
HK, HV, DK, TAPS = 16, 48, 128, 4
H, HKV, DH, CONTEXT, BUDGET, BLOCK = 24, 2, 256, 131_072, 512, 4
LAUNCHES = 40
KEY_COPIES, CELL_COPIES, STATE_COPIES = 5, LAUNCHES, 36
"""Copies of a layer's pooled keys, of its K and V, and of its recurrent state, so that what a launch reads is not in
L2."""


def over(t: Timer, name: str, make: Callable[[int], list[Launch]], n_bytes: int, copies: int) -> None:
    t.over(name, make, n_bytes, copies, LAUNCHES)


def float_products(t: Timer, T: int) -> None:
    shapes = (
        ("hc down + inject", C * D, (RANK, C), 20),
        ("hc up", RANK, (C * D,), 20),
        ("alpha, beta", D, (HV, HV), 100),
        ("router, shared gate", D, (E, 1), 60),
        ("n-gram value", D, (D,), 20),
    )
    for name, columns, rows, copies in shapes:
        x = t.floats(T * columns)
        weights = [[t.device.alloc(2 * n * columns) for n in rows] for _ in range(copies)]
        y = [t.device.alloc(4 * T * n) for n in rows]

        def make(i: int, x=x, columns=columns, rows=rows, weights=weights, y=y) -> list[Launch]:
            places = zip(weights[i], rows, y, strict=True)
            return float_gemv(x, T, columns, [FloatMatrix("BF16", w, n, out) for w, n, out in places])

        over(t, f"{name} BF16 T={T}", make, 2 * sum(rows) * columns, copies)
    choices_of_experts(t, T)


def choices_of_experts(t: Timer, T: int) -> None:
    """The product of logits and the router behind it, as two kernels and, for one row, as one. They choose from other
    logits: the weights are zeros."""
    x, logits, ids, error = t.floats(T * D), t.floats(T * E), t.device.alloc(4 * T * K), t.words(2**64 - 1)
    weights, ys, arrived = t.device.alloc(4 * T * K), [t.device.alloc(4 * T * n) for n in (E, 1)], t.words(0)
    places = [[t.device.alloc(2 * n * D) for n in (E, 1)] for _ in range(60)]

    def matrices(i: int) -> list[FloatMatrix]:
        return [FloatMatrix("BF16", w, n, y) for w, n, y in zip(places[i], (E, 1), ys, strict=True)]

    def apart(i: int) -> list[Launch]:
        return [*float_gemv(x, T, D, matrices(i)), *router.router(logits, ids, weights, T, E, K, 1.0, error, WHERE)]

    def together(i: int) -> list[Launch]:
        return route(x, D, matrices(i), Choice(logits, ids, weights, K, 1.0, arrived), error, WHERE)

    n_bytes = 2 * (E + 1) * D
    over(t, f"logits, then router BF16 T={T}", apart, n_bytes, len(places))
    if T == 1:
        over(t, "logits with router BF16 T=1", together, n_bytes, len(places))


def small_ops(t: Timer, T: int) -> None:
    error = t.words(2**64 - 1)
    streams, w, out, y, a = (t.floats(n) for n in (T * C * D, C * D, T * C * D, T * D, T * C))
    over(
        t,
        f"hc_norm with add T={T}",
        lambda i: hyper_connection.hc_norm(streams, w, out, T, C, D, 1e-6, error, WHERE, y=y, a=a),
        12 * T * C * D,
        1,
    )
    q = [Activations.at(t.device.alloc(Activations.n_bytes(T, D, g)), T, D, g) for g in (32, 256)]
    u, inject = t.floats(T * D), t.floats(T * C)
    over(t, f"hc_mix with both quantisers T={T}", lambda i: hyper_connection.hc_mix(
        streams, out, u, T, C, D, error, WHERE, inject=inject, a=a, quantised=tuple(q)), 8 * T * C * D, 1)  # fmt: skip
    over(
        t,
        f"quantise {HV * DK} T={T}",
        lambda i: quantise(streams, Activations.at(out, T, HV * DK, 256), error, WHERE),
        T * HV * DK * 4,
        1,
    )
    logits, ids, weights = t.floats(T * E), t.device.alloc(4 * T * K), t.device.alloc(4 * T * K)
    over(t, f"router T={T}", lambda i: router.router(logits, ids, weights, T, E, K, 1.0, error, WHERE), 4 * T * E, 1)
    g, h = t.floats(T * K * F), Activations.at(t.device.alloc(Activations.n_bytes(T * K, F, 32)), T * K, F, 32)
    over(t, f"swiglu of {K} experts T={T}", lambda i: swiglu(g, g, T * K, F, h, error, WHERE), 8 * T * K * F, 1)
    outputs, gate = t.floats(T * K * D), t.floats(T)
    over(
        t,
        f"combine T={T}", lambda i: combine(outputs, ids, weights, y, gate, u, T, K, D, error, WHERE), 4 * T * K * D, 1
    )


def gated_delta_ops(t: Timer, T: int) -> None:
    channels, error = 2 * HK * DK + HV * DK, t.words(2**64 - 1)
    qkv, conv, taps, z, y = (
        t.floats(n) for n in (T * channels, T * channels, TAPS * channels, T * HV * DK, T * HV * DK)
    )
    decay, beta, a, dt, norm = (t.floats(n) for n in (T * HV, T * HV, HV, HV, DK))
    history = t.words(t.floats((TAPS - 1) * channels))
    states = [t.words(t.floats(HV * DK * DK, scale=0.01)) for _ in range(STATE_COPIES)]
    shape, wide = (HK, HV, DK, DK, channels), (T, HV * DK, 256)
    quantised = (Activations.at(t.device.alloc(Activations.n_bytes(*wide)), *wide),)
    arrived = t.words(*[0] * (gated_delta.arrived_bytes(HV, DK) // 8 + 1))
    over(t, f"gdn_window T={T}", lambda i: gated_delta.gdn_window(
        qkv, taps, history, TAPS, conv, decay, beta, z, a, dt, norm, states[i], y, T, *shape, 1e-6, error, WHERE,
        quantised, arrived), 4 * HV * DK * DK, STATE_COPIES)  # fmt: skip
    keep = t.words(T)
    over(t, f"gdn_commit T={T}", lambda i: gated_delta.gdn_commit(conv, decay, beta, states[i], keep, *shape),
           8 * HV * DK * DK, STATE_COPIES)  # fmt: skip


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
    over(t, f"qsa_index T={T}", lambda i: qsa_append.qsa_index(index, pos, rope, T, error, WHERE), T * 4 * 128 * 4, 1)
    blocks, scores = t.device.alloc(4 * T * BUDGET), t.device.alloc(qsa_select.score_bytes(T, CONTEXT, BLOCK))

    def select(i: int) -> list[Launch]:
        return qsa_select.qsa_select(iq, keys[i % KEY_COPIES], pos, blocks, scores, T, 4, 128, BLOCK, BUDGET, CONTEXT,
                                     error, WHERE)  # fmt: skip

    key_bytes = cells // BLOCK * 512
    over(t, f"qsa_scores at {cells} T={T}", lambda i: select(i)[:1], key_bytes, KEY_COPIES)
    over(t, f"qsa_scores at {cells} T={T}, keys in L2", lambda i: select(0)[:1], key_bytes, 1)
    over(t, f"qsa_select at {cells} T={T}", lambda i: select(0)[1:], 4 * T * cells // BLOCK, 1)
    parts = t.device.alloc(qsa_attend.part_bytes(T, H, DH, CONTEXT, BLOCK, BUDGET))
    for int8 in (False, True):
        form, slots = "int8" if int8 else "float16", [cells_of(t, int8) for _ in range(CELL_COPIES)]
        appends = [qsa_append.Append(q_gate, kv, kv, norm, norm, q, one, H, HKV, DH, 64, 1e-6) for one in slots]
        over(t, f"qsa_append {form} T={T}", lambda i, appends=appends: qsa_append.qsa_append(
            appends[i], pos, rope, T, error, WHERE), T * H * DH * 8, CELL_COPIES)  # fmt: skip
        over(t, f"qsa_store {form} T={T}", lambda i, appends=appends: qsa_append.qsa_store(
            appends[i], index, pos, rope, T, error, WHERE, WHERE), T * H * DH * 8, CELL_COPIES)  # fmt: skip

        def attend(i: int, slots=slots) -> list[Launch]:
            return qsa_attend.attend_rows(q, q_gate, y, pos, slots[i], blocks, 0, parts, T, H, HKV, DH, BLOCK, BUDGET,
                                          CONTEXT, error, WHERE)  # fmt: skip

        cell_bytes = T * BUDGET * BLOCK * HKV * DH * (2 if int8 else 4)
        name = attend(0)[0].kernel
        over(t, f"{name} {form} at {cells} T={T}", lambda i: attend(i)[:1], cell_bytes, CELL_COPIES)
        over(t, f"qsa_merge {form} at {cells} T={T}", lambda i: attend(i)[1:], 4 * T * H * 33 * DH, 1)
        over(t, f"tiles and merge {form} at {cells} T={T}", lambda i: attend(i), cell_bytes, CELL_COPIES)
        over(t, f"scores to merge {form} at {cells} T={T}", lambda i: [*select(i), *attend(i)], key_bytes + cell_bytes,
               CELL_COPIES)  # fmt: skip


def head(t: Timer, T: int) -> None:
    logits, tops = t.floats(T * V), t.device.alloc(4 * T * head_rows.runs_of(V))
    ids, values, status = (t.device.alloc(4 * 8 * 64) for _ in range(3))
    lanes, sums = t.device.alloc(head_rows.lane_bytes(T)), t.device.alloc(8 * T)
    for n in (1, 20, 64):
        for launch in head_rows.top(logits, tops, ids, values, status, T, V, n):
            over(t, f"{launch.kernel} n={n} T={T}", lambda i, one=launch: [one], 4 * T * V, 1)
    for launch in head_rows.log_sum_exp(logits, values, lanes, sums, T, V):
        over(t, f"{launch.kernel} T={T}", lambda i, one=launch: [one], 8 * T * V, 1)


def attention_at_full_context(t: Timer, T: int) -> None:
    attention(t, T, CONTEXT)


GROUPS = {
    "floats": float_products,
    "small": small_ops,
    "delta": gated_delta_ops,
    "head": head,
    "attention": attention_at_full_context,
}
"""Name -> what times these ops for a window of T rows."""
