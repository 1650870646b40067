"""Windows whose n-gram rows are read from the disk while they run: bits, faults and plans, on both backends."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest

import strata
from strata import loading
from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.base.errors import BadArgument, FileError, StrataError
from strata.cpu import embed
from strata.cpu.backend import CpuBackend
from strata.gpu import ops
from strata.gpu.backend import GpuBackend
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.ngram import TABLE_NAME
from strata.pack.ngram_reader import direct_problem, reader_bytes
from strata.pack.tensors import Tensors
from strata.planner.machine import Machine
from strata.planner.memory import plan, read_facts
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.header_maker import make_release
from tests.session_probe import CONTEXT, GREEDY, PROMPT, Expected, write_model

TOKENS = np.random.default_rng(1).integers(0, 200, 4000).astype(np.int32)
LIMIT_MS = 400


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("strata-ngram")}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = write_model(tmp_path_factory.mktemp("model"))
    with GgufFile(made) as gguf:
        problem = direct_problem(gguf, TABLE_NAME)
    if problem is not None:
        pytest.skip(problem)
    return made


@pytest.fixture(scope="module")
def expected(path):
    answers = Expected(path)
    assert answers.model.plan.ngram == "mapped"
    yield answers
    answers.model.close()


# ---- models


def test_a_model_answers_the_same(path, expected):
    before = threads()
    with strata.load(path, context=CONTEXT, threads=1, ngram="direct") as model:
        assert model.plan.ngram == "direct" and not model.mismatches
        line = next(x for x in model.plan.lines if x.line == "n-gram cache")
        assert "past the system" in line.reason and line.n_bytes > reader_bytes()
        with model.session() as s:
            assert s.generate(PROMPT, **GREEDY).tokens == expected(PROMPT)
            again = PROMPT[::-1]
            assert s.generate(again, **GREEDY).tokens == expected(again)
        found = model.stats()["ngram"]
        assert found["mode"] == "direct" and found["pages"] > 0 and found["errors"] == 0
        assert found["requests"] == found["dedup"] + found["hits"] + found["reads"]
        assert threads() > before
    assert threads() == before


@pytest.mark.parametrize("fault", ["fail_at", "short_at"])
def test_a_session_survives_failed_reads(path, expected, fault):
    """At any read: the error names the file and the place in it, and the same request is answered afterwards."""
    with strata.load(path, context=CONTEXT, threads=1, ngram="direct") as model, model.session() as s:
        for n in (1, 2, 3, 4, 6, 8):
            model._backend.ngram._keys.fill(-1)
            model._backend.ngram.reader.put_faults(**{fault: n})
            with pytest.raises(FileError, match=r"rows in op ngram_wait, layer 1.*at byte \d+ of '.*model.gguf'"):
                s.generate(PROMPT[:2] if n < 4 else PROMPT, **GREEDY)
            assert s.generate(PROMPT, **GREEDY).tokens == expected(PROMPT)
        assert model.stats()["ngram"]["errors"] == 6


def test_closing_a_model_while_it_reads(path):
    for _ in range(5):
        before = threads()
        model = strata.load(path, context=CONTEXT, threads=1, ngram="direct")
        table = model._backend.ngram
        table.reader.put_faults(latency_us=3000)
        table.issue(np.arange(97).reshape(-1, 1))
        model.close()
        assert threads() == before


def test_a_file_system_without_unbuffered_reads(path, expected, monkeypatch, caplog):
    """auto says so and reads through the page cache; asking for direct reads is an error."""
    real = loading.plan_of_load
    directly = lambda o: replace(o, ngram="direct" if o.ngram == "auto" else o.ngram)  # noqa: E731
    monkeypatch.setattr(loading, "plan_of_load", lambda f, m, o, **k: real(f, m, directly(o), **k))
    monkeypatch.setattr(loading, "direct_problem", lambda gguf, name: "no such thing here")
    loading._warn_once.cache_clear()
    for _ in range(2):
        with strata.load(path, context=CONTEXT, threads=1) as model:
            assert model.plan.ngram == "mapped" == model.stats()["ngram"]["mode"] and not model.mismatches
    assert caplog.text.count("through the page cache: no such thing here") == 1
    monkeypatch.setattr("strata.pack.ngram_reader.direct_problem", lambda gguf, name: "no such thing here")
    with pytest.raises(StrataError, match=r'read directly; found no such thing here.*ngram="mapped"'):
        strata.load(path, context=CONTEXT, threads=1, ngram="direct")


def test_options(path):
    for bad in ("ram", None, True):
        with pytest.raises(BadArgument, match=r"ngram.*auto"):
            strata.load(path, ngram=bad)
    with pytest.raises(BadArgument, match="ngram"):
        strata.plan(path, ngram="ram")


def test_plans_read_directly_what_ram_does_not_hold(tmp_path):
    """auto follows free RAM; what the choice says about pages, disk reads and the reader's memory."""
    facts = read_facts(make_release(tmp_path, "IQ3_XXS", vocabulary=False))
    for gib, mode in ((256, "mapped"), (128, "mapped"), (64, "direct"), (32, "direct")):
        machine = Machine.describe(ram_gib=gib)
        p = plan(facts, machine, context=4096)
        other = plan(facts, machine, context=4096, ngram="direct" if mode == "mapped" else "mapped")
        assert p.ngram == mode != other.ngram
        direct, mapped = (p, other) if mode == "direct" else (other, p)
        cache = [next(x for x in q.lines if x.line == "n-gram cache").n_bytes for q in (direct, mapped)]
        assert cache[0] - cache[1] == reader_bytes() < 1 << 20
        reads = [sum(d.reads_per_token for d in q.disk if d.what == "n-gram rows") for q in (direct, mapped)]
        assert reads[0] == facts.geometry.ngram.heads / 2 and reads[1] <= reads[0]
        assert mode == "direct" or reads[1] == 0
        held = [next(x for x in q.lines if x.line == "weights (mapped)").held_bytes for q in (direct, mapped)]
        assert held[0] <= held[1]


# ---- windows


@dataclass
class Windows:
    """A backend that reads directly, its state, and the streams of a mapped CPU backend to compare with."""

    backend: CpuBackend | GpuBackend
    mapped: CpuBackend

    def __post_init__(self):
        self.state, self.wanted_state = self.backend.new_state(), self.mapped.new_state()
        self.at = 0

    def take(self, T: int) -> np.ndarray:
        """T tokens that no window had before, so that rows must be read."""
        self.at += T
        return TOKENS[self.at - T : self.at]

    def check(self, tokens: np.ndarray) -> None:
        """A window on both gives the same bits."""
        T, digest = len(tokens), self.state.digest()
        self.backend.window(self.state, tokens, (-1, -1))
        self.mapped.window(self.wanted_state, tokens, (-1, -1))
        assert np.array(self.backend.streams[:T]).tobytes() == np.array(self.mapped.streams[:T]).tobytes()
        assert self.state.digest() == digest, "a window leaves the state"

    def forget(self) -> None:
        """Empties the row cache."""
        self.backend.ngram._keys.fill(-1)


def make_windows(path, kind: str) -> Windows:
    gguf = GgufFile(path)
    g = read_geometry(gguf)
    programs, tensors, experts = build_programs(g, 256, "f16"), Tensors(gguf), expert_layout(gguf, g.L)
    mapped = CpuBackend(tensors, g, experts, programs, threads=1)
    if kind == "cpu":
        return Windows(CpuBackend(tensors, g, experts, programs, threads=1, ngram="direct"), mapped)
    return Windows(GpuBackend(tensors, g, experts, programs, new_device(), ngram="direct"), mapped)


def new_device():
    if ON_DEVICE:
        from strata.gpu.device import CupyDevice

        return CupyDevice()
    return HostDevice()


@pytest.fixture(scope="module", params=["cpu", pytest.param("gpu", marks=needs_compiler)])
def windows(request, path):
    before = threads()
    with pytest.MonkeyPatch.context() as patch:
        for module in (embed, ops):
            patch.setattr(module, "NGRAM_LIMIT_NS", LIMIT_MS * 1_000_000)
        made = make_windows(path, request.param)
    yield made
    made.backend.close()
    made.mapped.close()
    assert threads() == before


def test_windows_have_the_same_bits(windows):
    for T in range(1, 9):
        windows.check(windows.take(T))
    windows.backend.ngram.reader.put_faults(latency_us=5000)
    try:
        windows.forget()
        windows.check(windows.take(8))
    finally:
        windows.backend.ngram.reader.put_faults()


@pytest.mark.parametrize("fault", ["fail_at", "short_at"])
def test_failed_reads_again_and_again(windows, fault):
    times = 100 if windows.backend.name == "cpu" or ON_DEVICE else 8
    for i in range(times):
        tokens, digest = windows.take(1 + i % 4), windows.state.digest()
        windows.forget()
        windows.backend.ngram.reader.put_faults(**{fault: 1})
        with pytest.raises(FileError, match=r"position 0 stopped: an I/O error while reading n-gram rows.*at byte \d+"):
            windows.backend.window(windows.state, tokens, (-1, -1))
        assert windows.state.digest() == digest
        if i % 10 == 0:
            windows.check(tokens)


def test_windows_that_give_up(windows):
    """A read slower than the limit ends the window; its rows come while the next one waits, and disturb nobody."""
    reader = windows.backend.ngram.reader
    for _ in range(2):
        tokens, digest = windows.take(4), windows.state.digest()
        windows.forget()
        reader.put_faults(latency_us=60_000_000)
        try:
            with pytest.raises(StrataError, match=rf"no n-gram rows within.* 0 of \d+ pages of .* {LIMIT_MS} ms"):
                windows.backend.window(windows.state, tokens, (-1, -1))
            assert windows.state.digest() == digest
        finally:
            late = threading.Timer(0.1, reader.put_faults)
            late.start()
        windows.check(windows.take(4))
        late.join()
        windows.check(tokens)
