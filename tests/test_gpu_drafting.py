"""Drafting on the GPU backend: the CPU's proposals and probabilities, no change of an answer, and nothing through the
host while nothing is drafted.

Kernels run on the CPU through the shim, or on a GPU with STRATA_TEST_DEVICE=cuda.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import strata
from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.base.errors import NotFinite
from strata.base.geometry import DRAFT_RING_ROWS, WINDOW_ROWS
from strata.cpu.backend import CpuBackend
from strata.cpu.head_rows import most_likely
from strata.gpu import draft_rows
from strata.gpu.backend import GpuBackend
from strata.gpu.head_rows import lane_bytes, runs_of
from strata.gpu_speed import replayed
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp_files import read_draft
from strata.pack.tensors import Tensors
from strata.replay import skewed_ids
from strata.runtime.session import SessionState
from strata.runtime.transfer import Identity, export_session, import_session
from strata.spec.mtp import MtpDrafter
from tests.canonical.call import Slot, assert_same, check_guards, room
from tests.drafters import (
    Digests,
    Oracle,
    PlantedError,
    RandomTokens,
    Told,
    drafting_session,
    equal_answers,
    random_lengths,
)
from tests.gpu.loaded import lend_gpu
from tests.gpu.run_on_cpu import ON_DEVICE, address, needs_compiler, run_all
from tests.test_gpu_backend import new_device

pytestmark = needs_compiler
CELLS = 512
TEXT = np.random.default_rng(3).integers(0, 4000, 400).astype(np.int32)
GREEDY = {"ignore_eos": True, "logprobs": True, "top_logprobs": 2, "seed": 0}


# ---- kernels


def filled(seed: int, *shape: int) -> np.ndarray:
    out = room(*shape)
    out[:] = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return out


@pytest.mark.parametrize(("position", "n", "values"), [(0, 1, 512), (3, 8, 1100), (62, 8, 4096), (65 * 7 + 60, 5, 1024),
                                                       (12, 0, 512)])  # fmt: skip
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_go_into_the_ring_and_out_of_it(position, n, values, reverse):
    streams, ring = filled(1, 8, values), filled(2, DRAFT_RING_ROWS, values)
    words, pos, x = room(4, dtype="int64"), room(1, dtype="int64"), filled(3, 8, values)
    words[:2], pos[0] = (position, n), position
    wanted, slot = ring.copy(), Slot(ring)
    for j in range(n):
        wanted[(position + j) % DRAFT_RING_ROWS] = streams[j]
    run_all(draft_rows.keep(address(words), address(streams), address(slot), DRAFT_RING_ROWS, values), reverse=reverse)
    assert_same(ring, wanted)
    rows = max(n, 1)
    run_all(draft_rows.rows(address(slot), DRAFT_RING_ROWS, address(pos), address(x), rows, values), reverse=reverse)
    assert_same(x[:rows], wanted[np.arange(position, position + rows) % DRAFT_RING_ROWS])
    for a in (ring, x):
        check_guards(a)


class Chain:
    """The arrays of a chain of steps."""

    def __init__(self, V: int, values: int = 768, ids: np.ndarray | None = None):
        self.V, self.values, self.ids = V, values, ids
        self.ring, self.streams, self.x = filled(1, DRAFT_RING_ROWS, values), filled(2, 1, values), filled(3, 1, values)
        self.words, self.pos, self.first = (room(n, dtype="int64") for n in (3, 1, 1))
        self.token, self.chain = room(1, dtype="int32"), room(draft_rows.CHAIN_BYTES, dtype="uint8")
        self.slot = Slot(self.ring)
        self.logits, self.tops = room(1, V), room(runs_of(V), dtype="uint32")
        self.lanes = room(lane_bytes(1) // 8, dtype="float64")

    def start(self, goes_on: bool, reverse: bool = False) -> None:
        run_all(draft_rows.start(address(self.words), address(self.slot), DRAFT_RING_ROWS, address(self.streams),
                                 address(self.chain), address(self.x), address(self.token), address(self.pos),
                                 address(self.first), self.values, goes_on=goes_on), reverse=reverse)  # fmt: skip

    def choose(self, logits: np.ndarray, reverse: bool = False) -> None:
        self.logits[0] = logits
        run_all(draft_rows.choice(address(self.logits), address(self.tops), address(self.lanes), address(self.chain),
                                  address(self.ids), self.V), reverse=reverse)  # fmt: skip
        for a in (self.chain, self.lanes, self.x, self.token, self.pos, self.first):
            check_guards(a)

    def records(self, n: int) -> list[tuple[int, float]]:
        return self.chain[: 16 * n].view(draft_rows.RECORD).tolist()


@pytest.mark.parametrize("V", [1, 63, 300, 4999])
@pytest.mark.parametrize("subset", [False, True])
def test_a_chain_of_choices(V, subset):
    rng = np.random.default_rng(V)
    ids = None
    if subset:
        ids = room(V, dtype="int32")
        ids[:] = rng.permutation(3 * V)[:V]
    made, wanted = Chain(V, ids=ids), []
    made.words[:] = 77, DRAFT_RING_ROWS + 5, 3
    for j in range(5):
        made.start(j > 0, reverse=V == 300)
        assert made.pos[0] == DRAFT_RING_ROWS + 5 + j and made.first[0] == 3
        assert made.token[0] == (wanted[-1][0] if j else 77)
        assert_same(made.x, made.streams if j else made.ring[5:6])
        logits = (rng.standard_normal(V) * 10**j / 10).astype(np.float32)
        if j == 2:
            logits[:] = np.round(logits)  # ties
        made.choose(logits, reverse=V == 300)
        best, probability = most_likely(logits)
        wanted.append((best if ids is None else int(ids[best]), probability))
    assert made.records(5) == wanted
    made.words[1] = 2
    made.start(False)
    made.choose(logits)
    assert made.records(5) == [wanted[4], *wanted[1:]], "a new chain begins with the first record"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite(bad):
    made, logits = Chain(300), np.zeros(300, np.float32)
    made.start(False)
    logits[170] = bad
    made.choose(logits)
    assert made.records(1) == [(-1, 0.0)]


# ---- both backends


class Both:
    """Sessions with drafters on both backends; drafts are a part of the vocabulary if `subset`."""

    def __init__(self, tiny_path, mtp_path):
        gguf = GgufFile(tiny_path)
        g = read_geometry(gguf)
        layer = read_draft(mtp_path, gguf, g)
        self.ids = np.random.default_rng(0).permutation(g.V)[: layer.head_rows].astype(np.int32)
        programs = build_programs(g, CELLS, "f16", layer.head_rows)
        tensors, experts = Tensors(gguf, layer.tensors), expert_layout(gguf, g.L)
        self.cpu = CpuBackend(tensors, g, experts, programs, threads=1, draft_ids=self.ids)
        self.device = new_device()
        self.gpu = GpuBackend(tensors, g, experts, programs, self.device, draft_ids=self.ids)

    def sessions(self, checkpoints: int = 0) -> list[SessionState]:
        return [SessionState(b, CELLS, checkpoints, MtpDrafter(b.draft)) for b in (self.cpu, self.gpu)]

    def close(self) -> None:
        self.cpu.close()
        self.gpu.close()


@pytest.fixture(scope="module")
def both(tiny_path, mtp_path):
    made = Both(tiny_path, mtp_path)
    yield made
    made.close()


def step(session: SessionState, tokens: np.ndarray, n_keep: int | None = None) -> None:
    session.window(tokens)
    session.commit(tokens, len(tokens) if n_keep is None else n_keep)


def proposals(session: SessionState, token: int, k: int, at_once: int = 1, stop_at: int = 9):
    return session.mtp.propose(session.state, int(token), k, lambda p: len(p) < stop_at, at_once)


def test_proposals_have_the_bits_of_the_cpu(both):
    rng, made = np.random.default_rng(5), []
    script = [(2, 3, 1), (3, 2, 2)]
    if ON_DEVICE:
        script = [tuple(int(v) for v in rng.integers(1, WINDOW_ROWS, 3)) for _ in range(60)]
    for session in both.sessions():
        session.read(TEXT[:3])
        found = []
        for T, k, at_once in script:
            at = session.rows
            drafts = proposals(session, TEXT[at], k, at_once, stop_at=max(1, k - 1))
            assert len(drafts[0]) == len(drafts[1]) >= min(k, at_once)
            assert set(drafts[0]) <= set(both.ids.tolist()) and all(0 < p <= 1 for p in drafts[1])
            step(session, TEXT[at : at + T], max(1, T - 1))
            found.append((drafts, session.state.digest()))
        made.append(found)
    assert made[0] == made[1]


def test_a_chain_at_once_is_the_chain_step_by_step(both):
    for session in both.sessions():
        session.read(TEXT[:2])
        one = proposals(session, TEXT[2], 3)
        assert proposals(session, TEXT[2], 3, 2) == proposals(session, TEXT[2], 3, 3) == one
        assert proposals(session, TEXT[2], 3, 2, stop_at=2) == (one[0][:2], one[1][:2])


def test_checkpoints_and_exports(both):
    cpu, gpu = both.sessions()
    made = []
    for session in (cpu, gpu):
        session.read(TEXT[:2])
        step(session, TEXT[2:4])
        before = session.checkpoint()
        first = proposals(session, TEXT[4], 2)
        step(session, TEXT[4:6])
        session.restore(before)
        assert proposals(session, TEXT[4], 2, 2) == first
        step(session, TEXT[4:5])
        made.append((first, proposals(session, TEXT[5], 1)))
    assert made[0] == made[1]
    who = Identity("model", "f16")
    blobs = [export_session(session, who) for session in (cpu, gpu)]
    moved, back = both.sessions()
    import_session(moved, blobs[1], who)
    import_session(back, blobs[0], who)
    wanted = proposals(gpu, TEXT[5], 1)
    assert proposals(moved, TEXT[5], 1) == proposals(back, TEXT[5], 1) == wanted
    # A conversation read without a drafter: drafts begin with the rows that come.
    alone = SessionState(both.cpu, CELLS, 0)
    alone.read(TEXT[:4])
    import_session(back, export_session(alone, who), who)
    assert proposals(back, TEXT[4], 2) == ([], [])
    step(back, TEXT[4:6])
    assert len(proposals(back, TEXT[6], 1)[0]) == 1


def test_a_stretch_without_drafts_moves_nothing_through_the_host(both, monkeypatch):
    _, session = both.sessions()
    session.read(TEXT[:2])
    calls: Counter[str] = Counter()
    for name in ("upload", "download", "synchronize", "run"):
        plain = getattr(both.device, name)
        counted = lambda *a, name=name, plain=plain, **k: calls.update([name]) or plain(*a, **k)  # noqa: E731
        monkeypatch.setattr(both.device, name, counted)
    step(session, TEXT[3:4])
    first = dict(calls)
    calls.clear()
    step(session, TEXT[4:5])
    graphs = 0 if ON_DEVICE else 2  # on the host, launching a graph is a run
    assert calls == {"synchronize": 1} | ({"run": graphs} if graphs else {}), (first, calls)
    calls.clear()
    session.mtp.propose(session.state, int(TEXT[5]), 2, at_once=2)
    assert calls["download"] == calls["upload"] == 0 and calls["synchronize"] == 1


def test_a_cell_read_as_windows_leaves_the_rows_that_wait(both, monkeypatch):
    """Its rows would go over one that waits for its token; the driver keeps what it needs of them afterwards."""
    backend, session = both.gpu, both.sessions()[1]
    state, mark = session.state, np.full(backend.geometry.CD, 7, np.float32)
    for position in (0, 3):
        backend.draft.set_row(state, position, mark)
    backend.prefill(state, TEXT[:4], (-1, -1))
    assert state.rows == 4 and all((backend.draft.row(state, position) == mark).all() for position in (0, 3))
    backend.draft.keep(state, 2, 2, 2)
    assert_same(np.array([backend.draft.row(state, position) for position in (2, 3)]), backend.streams[2:4])
    monkeypatch.setattr(backend, "window", lambda *_: (_ for _ in ()).throw(NotFinite("broken")))
    with pytest.raises(NotFinite):
        backend.prefill(state, TEXT[4:8], (1, 1))
    assert backend.draft.keeping and state.rows == 4


def test_a_row_that_is_not_finite_is_reported(both):
    _, session = both.sessions()
    session.read(TEXT[:2])
    right = both.gpu.draft.row(session.state, 1)
    wrong = right.copy()
    wrong[5] = np.nan
    both.gpu.draft.set_row(session.state, 1, wrong)
    with pytest.raises(NotFinite):
        proposals(session, TEXT[2], 2, 2)
    both.gpu.draft.set_row(session.state, 1, right)
    assert len(proposals(session, TEXT[2], 1)[0]) == 1
    # In a cell that is only stored, the next call that waits reports it.
    both.gpu.draft.set_row(session.state, 1, wrong)
    step(session, TEXT[2:3])
    session.mtp._done = 1
    session.mtp.catch_up(session.state)
    with pytest.raises(NotFinite):
        session.mtp.snapshot(session.state)
    session.mtp.snapshot(session.state)


def test_experts_replayed_by_position(both):
    """What the bench of drafting relies on: a row's experts do not depend on the windows before."""
    backend, session = both.gpu, both.sessions()[1]
    g = backend.geometry
    table = skewed_ids(7, g.L, g.E, g.K)
    with replayed(backend, table, (1, 2), by_position=True):
        for T, keep in ((2, 1), (2, 2), (1, 1)):
            at = session.rows
            session.window(TEXT[at : at + T])
            assert_same(backend.read("moe.ids")[:T], table[np.arange(at, at + T) % 7, g.L - 1])
            session.commit(TEXT[at : at + T], keep)


# ---- answers


@pytest.fixture(scope="module")
def model(tiny_path, mtp_path):
    with pytest.MonkeyPatch.context() as patch:
        lend_gpu(patch)
        with strata.load(tiny_path, context=CELLS, draft=mtp_path, device="cuda", checkpoints=0) as loaded:
            yield loaded


KINDS = {
    "mtp": lambda text: (Told(random_lengths(1)), None),
    "chain": lambda text: (Told(lambda: 2, lookup=0.3, chain=True), None),
    "planted error": lambda text: (Told(random_lengths(2)), PlantedError(text)),
    "random": lambda text: (Told(random_lengths(3)), RandomTokens()),
    "oracle": lambda text: (Told(), Oracle(text, 0.8)),
}


def check_answers(model: strata.Model, prompt: np.ndarray, n_tokens: int, kinds) -> None:
    digests = Digests()
    plain = digests.follow(drafting_session(model, None), prompt, max_tokens=n_tokens, **GREEDY)
    text = [*prompt.tolist(), *plain.tokens]
    for kind in kinds:
        policy, drafter = KINDS[kind](text)
        session = drafting_session(model, policy, drafter, draft_layer=drafter is None)
        equal_answers(digests.follow(session, prompt, max_tokens=n_tokens, **GREEDY), plain)


def test_drafts_change_no_answer(model, val):
    check_answers(model, val["code"][7000:7003].astype(np.int32), 5, ("chain",))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_answer_on_the_device(model, val, kind):
    if not ON_DEVICE:
        pytest.skip("minutes in the shim: STRATA_TEST_DEVICE=cuda")
    many = {"code": 4, "doc": 4, "chat": 2}
    for text, n in many.items():
        for i in range(1, n + 1):
            check_answers(model, val[text][7000 * i :][:48].astype(np.int32), 64, (kind,))


def test_the_draft_layer_is_where_the_plan_says(model):
    memory = model.stats()["memory_bytes"]
    g = model.geometry
    assert model.mismatches == []
    assert memory["draft rows"] == DRAFT_RING_ROWS * g.CD * 4
