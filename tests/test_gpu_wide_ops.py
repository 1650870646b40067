"""Kernels of prefill chunks: against the numpy references of windows, and alike however rows are cut into chunks."""

import numpy as np
import pytest

from strata.base.program import NOT_FINITE
from strata.gpu import gated_delta_wide, qsa_wide
from strata.gpu.error_word import where
from strata.gpu.float_narrow import float_narrow
from strata.gpu.gated_delta import history_commit
from strata.gpu.qsa_append import KvSlots
from tests.canonical import gated_delta as delta_reference
from tests.canonical.call import LAYER, Slot, assert_accurate, assert_same, check_guards, guarded, plain, room
from tests.canonical.gated_delta import Sizes
from tests.canonical.kv_cells import load_int8, store_int8
from tests.canonical.qsa_attend import visible_cells
from tests.canonical.qsa_select import best, block_scores
from tests.gpu.run_on_cpu import ErrorWord, address, needs_compiler, run_all
from tests.test_op_gated_delta import EPS, Window

pytestmark = needs_compiler
AT = where(5, LAYER)
SIZES = [Sizes(1, 3, 32, 32, 3), Sizes(2, 6, 64, 64, 4), Sizes(1, 2, 128, 128, 4)]
NAMES = [f"Hk{s.Hk}-Hv{s.Hv}-dk{s.dk}-dv{s.dv}" for s in SIZES]


def convolve(history, qkv, w, reverse=False):
    """Outputs and the history afterwards."""
    T, channels = qkv.shape
    out, past, error, n = room(T, channels), Slot(guarded(history)), ErrorWord(), np.array([T], np.int64)
    run_all(
        [
            *gated_delta_wide.gdn_wide_conv(address(qkv), address(out), address(w), address(past), T, channels, len(w),
                                            error.address, AT),
            *history_commit(address(past), address(qkv), address(n), len(w) - 1, channels),
        ],
        reverse=reverse,
    )  # fmt: skip
    check_guards(out)
    check_guards(past.array)
    return out, past.array, error


def delta(w: Window, reverse=False):
    """y, the state afterwards, the error word."""
    s, T = w.s, len(w.mixed)
    conv, decay, beta, state = guarded(w.mixed), guarded(w.alpha), guarded(w.beta), Slot(guarded(w.state))
    y, error = room(T, s.Hv, s.dv), ErrorWord()
    inputs = [address(x) for x in (conv, decay, beta, w.z, w.a, w.dt, w.norm, state, y)]
    run_all(
        gated_delta_wide.gdn_wide_heads(*inputs, T, s.Hk, s.Hv, s.dk, s.dv, s.channels, EPS, error.address, AT),
        reverse=reverse,
    )
    for array in (conv, decay, beta, state.array, y):
        check_guards(array)
    return y, state.array, error


@pytest.mark.parametrize("T", [8, 19])
def test_the_convolution_has_the_bits_of_windows(T):
    rng = np.random.default_rng(T)
    s = SIZES[T % 2]
    history, qkv, w = plain(rng, s.taps - 1, s.channels), plain(rng, T, s.channels), plain(rng, s.taps, s.channels)
    out, past, error = convolve(history, qkv, w, reverse=T > 8)
    assert error.reported is None
    assert_same(out, delta_reference.conv(history, qkv, w))
    assert_same(past, delta_reference.shifted(history, qkv, T))


@pytest.mark.parametrize("s", SIZES, ids=NAMES)
def test_delta_rule(s):
    w = Window.make(np.random.default_rng(s.dk), s, 24, draw=plain)
    wanted, state, _ = w.reference()
    y, after, error = delta(w)
    assert error.reported is None
    assert_accurate(y, wanted, 2e-5, "y")
    assert_accurate(after, state, 2e-5, "state")
    again, after_again, _ = delta(w, reverse=True)
    assert_same(again, y)
    assert_same(after_again, after)


def test_the_delta_rule_does_not_depend_on_how_rows_are_cut():
    w = Window.make(np.random.default_rng(1), SIZES[1], 40, draw=plain)
    y, state, _ = delta(w)
    first, between, _ = delta(w.rows(0, 16, w.state))
    rest, after, _ = delta(w.rows(16, 40, between))
    assert_same(np.concatenate([first, rest]), y)
    assert_same(after, state)


@pytest.mark.parametrize("what", ["alpha", "beta", "z", "mixed"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_delta_rule_reports_what_is_not_finite(what, bad):
    w = Window.make(np.random.default_rng(2), SIZES[0], 8, draw=plain)
    getattr(w, what)[5].flat[0] = bad
    assert delta(w)[2].reported == (NOT_FINITE, LAYER, 5)


def select(q: np.ndarray, keys: np.ndarray, pos: int, block: int, budget: int, context: int, reverse=False):
    T, heads, dim = q.shape
    out, error = room(T, budget, dtype="int32"), ErrorWord()
    positions = np.arange(pos, pos + T, qsa_wide.POSITION_ROWS, dtype=np.int64)
    scores = np.full(qsa_wide.score_bytes(T, context, block) // 4, np.nan, np.float32)
    slot = Slot(keys)
    run_all(
        qsa_wide.qsa_wide_select(address(q), address(slot), address(positions), address(out), address(scores), T, heads,
                                 dim, block, budget, context, error.address, AT),
        reverse=reverse,
    )  # fmt: skip
    check_guards(out)
    return out, error


@pytest.mark.parametrize(("pos", "budget"), [(0, 20), (256, 70), (300, 5)])
def test_blocks_of_a_chunk(pos, budget):
    """Rows on both sides of the budget, more than one slab, tiles that are not full; scores are integers, so exact."""
    rng = np.random.default_rng(pos)
    T, block, context = (288, 4, 640) if pos == 256 else (70, 4, 384)
    q = rng.integers(-3, 4, (T, 2, 32)).astype(np.float32)
    keys = rng.integers(-3, 4, (context // block, 32)).astype(np.float32)
    found, error = select(q, keys, pos, block, budget, context, reverse=pos == 300)
    assert error.reported is None
    for t in range(0, T, 7):
        n = (pos + t + 1) // block
        wanted = best(block_scores(q[t], keys[:n]), budget)
        assert_same(found[t, : len(wanted)], wanted, f"blocks of row {t}")


def test_scores_that_are_not_finite_are_reported_with_their_row():
    rng = np.random.default_rng(3)
    q, keys = abs(plain(rng, 70, 2, 32)), abs(plain(rng, 96, 32))
    q[66, 1, 31] = np.nan
    found, error = select(q, keys, 300, 4, 5, 384)
    assert error.reported == (NOT_FINITE, LAYER, 66)
    assert ((found >= 0) & (found < 96)).all()


def cells_of(rng, n: int, Hkv: int, dh: int, int8: bool) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Stored cells, their scales or None, and the values that kernels read."""
    values = plain(rng, n, Hkv, dh)
    if not int8:
        half = values.astype(np.float16)
        return half, None, half.astype(np.float64)
    codes, scales = store_int8(values)
    return codes, scales, load_int8(codes, scales).astype(np.float64)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("H", "Hkv", "dh", "block"), [(4, 2, 64, 4), (20, 1, 64, 4), (2, 1, 256, 4), (3, 1, 128, 0)])
def test_attention_of_a_chunk(H, Hkv, dh, block, int8):
    """Rows before and after the budget, several tiles, more heads than a block takes, dense attention."""
    rng = np.random.default_rng(H + int8)
    T, pos, budget, context = 3, 98, 17, 104
    k, k_scales, keys = cells_of(rng, context, Hkv, dh, int8)
    v, v_scales, values = cells_of(rng, context, Hkv, dh, int8)
    q, q_gate = plain(rng, T, H, dh), plain(rng, T, H, 2, dh)
    blocks = np.stack([np.sort(rng.permutation(24)[:budget]) for _ in range(T)]).astype(np.int32)
    y, error, position = room(T, H, dh), ErrorWord(), np.array([pos], np.int64)
    slots = [Slot(a) if a is not None else None for a in (k, v, k_scales, v_scales)]
    run_all(
        qsa_wide.qsa_wide_attend(address(q), address(q_gate), address(y), address(position),
                                 KvSlots(*map(address, slots)), address(blocks) if block else 0, T, H, Hkv, dh, block,
                                 budget, error.address, AT),
        reverse=int8,
    )  # fmt: skip
    check_guards(y)
    assert error.reported is None
    for t in range(T):
        seen = visible_cells(pos + t + 1, block, 0 if block == 0 else budget, blocks[t] if block else None)
        for h in range(H):
            kv = h // (H // Hkv)
            s = keys[seen, kv] @ q[t, h].astype(np.float64) / np.sqrt(dh)
            p = np.exp(s - s.max())
            wanted = p @ values[seen, kv] / p.sum() / (1 + np.exp(-q_gate[t, h, 1].astype(np.float64)))
            assert_accurate(y[t, h], wanted, 1e-3, f"row {t}, head {h}")


@pytest.mark.parametrize("what", ["q", "gate", "k", "v"])
def test_attention_reports_what_is_not_finite(what):
    rng = np.random.default_rng(1)
    q, q_gate, position = plain(rng, 2, 2, 64), plain(rng, 2, 2, 2, 64), np.array([40], np.int64)
    k, v = plain(rng, 48, 1, 64).astype(np.float16), plain(rng, 48, 1, 64).astype(np.float16)
    bad = {"q": q[1], "gate": q_gate[1, :, 1], "k": k[41], "v": v[41]}[what]
    bad.flat[5] = np.nan if what != "gate" else np.inf
    y, error, slots = room(2, 2, 64), ErrorWord(), [Slot(k), Slot(v)]
    cells = KvSlots(*map(address, slots))
    run_all(qsa_wide.qsa_wide_attend(address(q), address(q_gate), address(y), address(position), cells, 0, 2, 2, 1, 64,
                                     0, 0, error.address, AT))  # fmt: skip
    assert error.reported == (NOT_FINITE, LAYER, 1)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("rows", [1, 4])
def test_products_with_a_few_rows(name, rows):
    rng = np.random.default_rng(rows)
    T, K = 13, 200
    w, x, y = plain(rng, rows, K), plain(rng, T, K), room(T, rows)
    stored = {"F32": w, "F16": w.astype(np.float16), "BF16": (w.view(np.uint32) >> 16).astype(np.uint16)}[name]
    exact = (stored.astype(np.uint32) << 16).view(np.float32) if name == "BF16" else stored
    x, stored = np.ascontiguousarray(x), np.ascontiguousarray(stored)
    run_all(float_narrow(name, address(stored), rows, address(x), T, K, address(y)), reverse=rows == 4)
    check_guards(y)
    assert_accurate(y, x.astype(np.float64) @ exact.astype(np.float64).T, 1e-6, "narrow product")


@pytest.mark.parametrize("seed", range(4))
def test_int8_cells_are_read_as_windows_read_them(seed):
    """A row that sees one cell gives its values: every code, steps of all sizes."""
    rng = np.random.default_rng(seed)
    codes = rng.permutation(np.arange(-128, 128)).astype(np.int8).reshape(1, 1, 256)
    codes = np.maximum(codes, -127)
    v_scales = np.exp2(rng.uniform(-24, 9, (1, 1, 4))).astype(np.float16)
    k, k_scales = np.zeros((1, 1, 256), np.int8), np.ones((1, 1, 4), np.float16)
    q, q_gate, y = plain(rng, 1, 1, 256), np.full((1, 1, 2, 256), 100, np.float32), room(1, 1, 256)
    error, position, slots = ErrorWord(), np.zeros(1, np.int64), [Slot(a) for a in (k, codes, k_scales, v_scales)]
    cells = KvSlots(*map(address, slots))
    run_all(qsa_wide.qsa_wide_attend(address(q), address(q_gate), address(y), address(position), cells, 0, 1, 1, 1, 256,
                                     0, 0, error.address, AT))  # fmt: skip
    assert error.reported is None
    assert_same(y[0, 0] + np.float32(0), load_int8(codes, v_scales)[0, 0] + np.float32(0))
