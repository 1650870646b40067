"""Gated DeltaNet: convolution, delta rule, commit against numpy, bit by bit."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from strata.base.program import NOT_FINITE
from strata.cpu.gated_delta import gdn_commit, gdn_conv, gdn_heads, history_commit
from tests.canonical import gated_delta as reference
from tests.canonical.call import ERROR, LAYER, Call, Slot, assert_accurate, assert_same, guarded, plain, room, spiked
from tests.canonical.gated_delta import Sizes
from tests.reference.gated_delta import causal_conv, delta_rule, l2_normalise, softplus
from tests.reference.hyper_connection import rms, sigmoid, silu

EPS = 1e-6
SIZES = [Sizes(1, 1, 32, 32, 2), Sizes(2, 6, 64, 48, 4), Sizes(2, 4, 36, 64, 3), Sizes(1, 3, 128, 128, 5)]
NAMES = [f"Hk{s.Hk}-Hv{s.Hv}-dk{s.dk}-dv{s.dv}-taps{s.taps}" for s in SIZES]


def conv(history, qkv, w, advance=False, n_chunks=1) -> tuple[np.ndarray, np.ndarray, Call]:
    """Outputs, the history afterwards, and the call."""
    T, channels = qkv.shape
    out, past = room(T, channels), guarded(history)
    words = (np.ascontiguousarray(qkv), out, w, Slot(past), T, channels, len(w), int(advance), ERROR, LAYER)
    call = Call(gdn_conv, *words)
    return out, past, call.run(n_chunks, order=reversed(range(n_chunks)))


@dataclass
class Window:
    """Inputs of the delta rule for T rows; `alpha` and `beta` as the products leave them."""

    s: Sizes
    mixed: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray
    z: np.ndarray
    a: np.ndarray
    dt: np.ndarray
    norm: np.ndarray
    state: np.ndarray

    @staticmethod
    def make(rng: np.random.Generator, s: Sizes, T: int, draw=spiked) -> "Window":
        return Window(
            s, draw(rng, T, s.channels), draw(rng, T, s.Hv), draw(rng, T, s.Hv), draw(rng, T, s.Hv, s.dv),
            -np.exp(plain(rng, s.Hv)), plain(rng, s.Hv), plain(rng, s.dv), draw(rng, s.Hv, s.dk, s.dv),
        )  # fmt: skip

    def rows(self, first: int, last: int, state: np.ndarray) -> "Window":
        cut = (np.ascontiguousarray(x[first:last]) for x in (self.mixed, self.alpha, self.beta, self.z))
        return Window(self.s, *cut, self.a, self.dt, self.norm, state)

    def run(self, advance: bool = False) -> "Ran":
        s, T = self.s, len(self.mixed)
        decay, beta, state = guarded(self.alpha), guarded(self.beta), guarded(self.state)
        y = room(T, s.Hv, s.dv)
        call = Call(
            gdn_heads, self.mixed, decay, beta, self.z, self.a, self.dt, self.norm, Slot(state), y, T, s.Hk, s.dk, s.dv,
            s.channels, int(advance), EPS, np.float32(1) / np.sqrt(np.float32(s.dk)), ERROR, LAYER,
        )  # fmt: skip
        return Ran(y, decay, beta, state, call.run(s.Hv, order=reversed(range(s.Hv))))

    def reference(self) -> tuple[np.ndarray, np.ndarray, reference.Gates]:
        """y, state after the last row, gates."""
        g = reference.gates(self.alpha, self.beta, self.a, self.dt)
        with np.errstate(all="ignore"):
            return *reference.window(self.state, self.mixed, g, self.z, self.norm, EPS, self.s), g


@dataclass
class Ran:
    y: np.ndarray
    decay: np.ndarray
    beta: np.ndarray
    state: np.ndarray
    call: Call


def commit(w: Window, ran: Ran, n_keep: int) -> np.ndarray:
    """The state after the first n_keep rows of a window that ran."""
    s, state = w.s, guarded(ran.state)
    keep = np.array([n_keep], np.int64)
    Call(gdn_commit, w.mixed, ran.decay, ran.beta, Slot(state), keep, s.Hk, s.dk, s.dv, s.channels).run(s.Hv)
    return state


def commit_history(history: np.ndarray, rows: np.ndarray, n_keep: int) -> np.ndarray:
    past = guarded(history)
    Call(history_commit, Slot(past), rows, np.array([n_keep], np.int64), len(history), history.shape[1]).run()
    return past


@pytest.mark.parametrize("s", SIZES, ids=NAMES)
@pytest.mark.parametrize("T", [1, 3, 8])
def test_convolution(s, T):
    rng = np.random.default_rng(T)
    history, qkv, w = spiked(rng, s.taps - 1, s.channels), spiked(rng, T, s.channels), spiked(rng, s.taps, s.channels)
    out, past, call = conv(history, qkv, w)
    assert call.reported is None
    assert_same(out, reference.conv(history, qkv, w), "convolution")
    assert_same(past, history, "history of a window")
    assert_same(conv(history, qkv, w, n_chunks=5)[0], out, "five chunks")
    for n_chunks in (1, 7):
        out, past, _ = conv(history, qkv, w, advance=True, n_chunks=n_chunks)
        assert_same(out, reference.conv(history, qkv, w), "convolution of a chunk")
        assert_same(past, reference.shifted(history, qkv, T), "history of a chunk")


@pytest.mark.parametrize("taps", [2, 3, 4, 5])
@pytest.mark.parametrize("T", [1, 3, 8])
def test_history_keeps_the_last_rows(taps, T):
    rng = np.random.default_rng(taps)
    history, rows = plain(rng, taps - 1, 37), plain(rng, T, 37)
    for n_keep in range(T + 1):
        assert_same(commit_history(history, rows, n_keep), reference.shifted(history, rows, n_keep), f"keep {n_keep}")


@pytest.mark.parametrize("taps", [2, 4, 5])
def test_convolution_of_a_window_is_that_of_single_rows(taps):
    rng = np.random.default_rng(taps)
    history, qkv, w = plain(rng, taps - 1, 50), plain(rng, 8, 50), plain(rng, taps, 50)
    whole, past = conv(history, qkv, w)[0], history
    for t in range(8):
        row = np.ascontiguousarray(qkv[t : t + 1])
        assert_same(conv(past, row, w)[0][0], whole[t], f"row {t}")
        past = commit_history(past, row, 1)
        assert_same(past, commit_history(history, qkv, t + 1), f"history after row {t}")


def test_convolution_reports_non_finite_rows():
    qkv = np.ones((3, 70), np.float32)
    qkv[1, 69] = np.nan
    call = conv(np.ones((1, 70), np.float32), qkv, np.ones((2, 70), np.float32))[2]
    assert call.reported == (NOT_FINITE, LAYER, 1)


@pytest.mark.parametrize("s", SIZES, ids=NAMES)
@pytest.mark.parametrize("T", [1, 3, 8])
def test_delta_rule(s, T):
    w = Window.make(np.random.default_rng(T), s, T)
    y, state, g = w.reference()
    ran = w.run()
    assert ran.call.reported is None
    assert_same(ran.decay, g.decay, "decay")
    assert_same(ran.beta, g.beta, "beta")
    assert_same(ran.y, y, "y")
    assert_same(ran.state, w.state, "a window leaves the state")
    chunk = w.run(advance=True)
    assert_same(chunk.y, y, "y of a chunk")
    assert_same(chunk.state, state, "state of a chunk")
    for n_keep in range(T + 1):
        wanted = reference.committed(w.state, w.mixed, g, n_keep, s)
        assert_same(commit(w, ran, n_keep), wanted, f"commit of {n_keep}")
    assert_same(commit(w, ran, T), state, "commit of all rows")


@pytest.mark.parametrize("s", SIZES[1:3], ids=NAMES[1:3])
def test_a_window_is_its_rows_one_by_one(s):
    w = Window.make(np.random.default_rng(8), s, 8)
    whole, state = w.run(), w.state
    for t in range(8):
        one = w.rows(t, t + 1, state)
        ran = one.run()
        assert_same(ran.y[0], whole.y[t], f"row {t}")
        state = commit(one, ran, 1)
        assert_same(state, commit(w, whole, t + 1), f"state after row {t}")
        rest = w.rows(t + 1, 8, state).run() if t < 7 else None
        if rest:
            assert_same(rest.y, whole.y[t + 1 :], f"rows after {t}")


def test_a_rejected_window_leaves_no_trace():
    rng, s = np.random.default_rng(3), SIZES[1]
    w, other = Window.make(rng, s, 3), Window.make(rng, s, 8)
    wanted = w.run().y
    rejected = replace(other, state=w.state)
    ran = rejected.run()
    state = commit(rejected, ran, 0)
    assert_same(state, w.state)
    assert_same(w.rows(0, 3, state).run().y, wanted)


@pytest.mark.parametrize("where", ["mixed", "alpha", "beta", "z", "state"])
def test_delta_rule_reports_non_finite_values(where):
    w = Window.make(np.random.default_rng(4), SIZES[1], 3, plain)
    getattr(w, where)[1 if where != "state" else 0] = np.nan
    assert w.run().call.reported == (NOT_FINITE, LAYER, 0 if where == "state" else 1)


def test_a_decay_that_is_no_number_does_not_hide_behind_a_small_state():
    """exp32(NaN) is the finite e^88: neither a zero nor a small state would show it."""
    for size in (0.0, 1e-3):
        w = Window.make(np.random.default_rng(4), SIZES[1], 1, plain)
        w.state *= np.float32(size)
        w.alpha[0, 3] = np.nan
        assert w.run().call.reported == (NOT_FINITE, LAYER, 0)


def test_extreme_gates():
    w = Window.make(np.random.default_rng(5), SIZES[1], 3, plain)
    w.alpha[0], w.alpha[1], w.alpha[2] = 1000, -1000, 0
    w.beta[0], w.beta[1] = 500, -500
    y, _, g = w.reference()
    ran = w.run()
    assert ran.call.reported is None
    assert_same(ran.y, y)
    assert (g.decay[1] == 1).all() and (ran.decay[0] < 1e-30).all() and (ran.beta[0] == 1).all()


def test_accuracy_over_many_rows():
    """256 rows in one chunk: errors do not pile up, since the state decays."""
    rng, s = np.random.default_rng(6), Sizes(2, 4, 64, 64, 4)
    history, qkv, taps = plain(rng, 3, s.channels), plain(rng, 256, s.channels), plain(rng, 4, s.channels)
    mixed = conv(history, qkv, taps, advance=True, n_chunks=3)[0]
    exact_mixed = silu(causal_conv(*(x.astype(np.float64) for x in (history, qkv, taps.T))))
    assert_accurate(mixed, exact_mixed, 1.5e-7, "convolution")
    w = Window.make(rng, s, 256, plain)
    w.mixed = np.ascontiguousarray(mixed)
    ran = w.run(advance=True)
    q, k, v = np.split(mixed.astype(np.float64), [s.Hk * s.dk, 2 * s.Hk * s.dk], axis=1)
    head = np.arange(s.Hv) % s.Hk
    q = l2_normalise(q.reshape(256, s.Hk, s.dk))[:, head] / np.sqrt(s.dk)
    k = l2_normalise(k.reshape(256, s.Hk, s.dk))[:, head]
    decay = np.exp(w.a.astype(np.float64) * softplus(w.alpha.astype(np.float64) + w.dt))
    beta = sigmoid(w.beta.astype(np.float64))
    o, S = delta_rule(w.state.astype(np.float64), q, k, v.reshape(256, s.Hv, s.dv), decay, beta)
    assert_accurate(ran.state, S, 5e-7, "state after 256 rows")
    assert_accurate(ran.y, rms(o, w.norm, EPS) * sigmoid(w.z.astype(np.float64)), 1e-6, "outputs of 256 rows")
