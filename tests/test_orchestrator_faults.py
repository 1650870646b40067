"""Faults of shared experts: a window may fail; sessions and the process stay as they were, and nothing is left."""

from __future__ import annotations

import gc
import os
import time

import numpy as np
import psutil
import pytest

import strata
from strata import loading
from strata.base.errors import DoesNotFit, FileError, NotFinite, StrataError
from strata.base.program import EXPERTS_FAILED
from strata.runtime import orchestrator as orchestrators
from strata.runtime.swaps import SwapRules
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.gpu.shared_model import PROMPT, answer, load, names, nothing_is_left, patch, path, shared

__all__ = ["nothing_is_left", "patch", "path"]
pytestmark = needs_compiler
TURNS = int(os.environ.get("STRATA_SOAK_TURNS", 100))
shimmed = pytest.mark.skipif(ON_DEVICE, reason="needs a device that refuses and reports")


def broken_window(model, match, kind=StrataError):
    """A request that fails, and one that works, with the tokens of a session that never failed."""
    session = model._default
    before = session.tokens
    with pytest.raises(kind, match=match):
        session.generate([*before, 5], max_tokens=1, ignore_eos=True)
    assert np.array_equal(session.tokens, before)
    return session.generate([*before, 5], max_tokens=2, ignore_eos=True).tokens


@pytest.fixture(scope="module")
def continued(path):
    with strata.load(path, context=256, device="cpu", threads=1) as model:
        answer(model, 2)
        session = model._default
        return session.generate([*session.tokens, 5], max_tokens=2, ignore_eos=True).tokens


@pytest.mark.parametrize("fault", ["silence", "status", "not finite", "late"])
def test_a_fault_ends_the_window_and_nothing_else(path, patch, continued, fault):
    with load(path, slots=4, pcie_share=0.5) as model:
        server, hybrid = shared(model).server, shared(model).hybrid
        answer(model, 2)
        hybrid.set_limit(0.2)
        if fault == "silence":
            server.inject("silence")
            found = broken_window(model, rf"position {len(PROMPT) + 1} stopped: no answer.* in layer 0, experts [0-9]+")
        elif fault == "late":
            server.inject("delay", 400_000, after=1)
            found = broken_window(model, r"no answer.* in layer 1, experts [0-9]+")
        elif fault == "status":
            server.inject("status", EXPERTS_FAILED | 3 << 8, after=1)
            found = broken_window(model, r"failure of the CPU's experts in layer 1, experts .*detail 3")
        else:
            server.inject("status", 1 | 7 << 8)
            found = broken_window(model, "non-finite value in op experts, layer 0", NotFinite)
        hybrid.set_limit(10)
        assert found == continued
        assert model.stats()["experts"]["service"]["failures"] == (fault in ("status", "not finite"))


def test_a_service_that_ended_is_an_error_not_a_hang(path, patch):
    with load(path, slots=4) as model:
        answer(model, 1)
        shared(model).server.close()
        began = time.monotonic()
        with pytest.raises(StrataError, match="service"):
            answer(model, 1)
        assert time.monotonic() - began < 5


def test_a_truncated_file_is_named_before_anything_runs(path, patch, tmp_path):
    copy = tmp_path / "m.gguf"
    copy.write_bytes(path.read_bytes())
    with load(copy, slots=4, experts="mapped") as model:
        answer(model, 1)
        whole = copy.stat().st_size
        os.truncate(copy, whole - 1)
        for call in (lambda: answer(model, 1), lambda: model.logits(PROMPT)):
            with pytest.raises(FileError, match="changed while it was in use"):
                call()
        os.truncate(copy, whole)
        answer(model, 1)


def test_an_interrupted_exchange_is_told_before_it_is_felt(path, patch):
    with load(path, slots=8, experts="resident") as model:
        o = shared(model)

        def interrupted(*place):
            raise KeyboardInterrupt

        o.tiers.rules = SwapRules(every=1, least=0.1, margin=0.0)
        o.tiers._exchange = interrupted
        with pytest.raises(KeyboardInterrupt):
            answer(model, 2)
        with pytest.raises(StrataError, match=r"interrupted.*Load the model again"):
            answer(model, 1)


class Refusing(HostDevice):
    """Refuses its n-th allocation, host area or registration."""

    calls = refuse_at = 0

    def _ask(self):
        self.calls += 1
        if self.calls == self.refuse_at:
            raise DoesNotFit("refused", found="a test", needed="nothing")

    def alloc(self, n_bytes):
        self._ask()
        return super().alloc(n_bytes)

    def host(self, n_bytes):
        self._ask()
        return super().host(n_bytes)

    def register(self, *a, **k):
        self._ask()
        return super().register(*a, **k)


def refused_loads(path, monkeypatch, experts, points):
    """Loads whose device refuses at a point each; returns the points that a load has."""
    devices, options = [], {"slots": 8, "experts": experts, "pcie_share": 0.5}
    before = names()  # of models that other files hold

    def open_device(index, limit_bytes, after=0):
        devices.append(Refusing(limit_bytes=limit_bytes))
        devices[-1].refuse_at = after
        return devices[-1]

    monkeypatch.setattr(loading, "open_device", open_device)
    with load(path, **options):
        n = devices[-1].calls
    for after in points(n):
        monkeypatch.setattr(loading, "open_device", lambda i, limit, after=after: open_device(i, limit, after))
        with pytest.raises(DoesNotFit, match="refused"):
            load(path, **options)
    gc.collect()
    assert all(d._kept == [] and d.registered == {} for d in devices)
    assert names() <= before
    return n


@shimmed
@pytest.mark.parametrize("experts", ["pinned", "resident"])
def test_a_refused_allocation_leaves_nothing(path, patch, monkeypatch, experts):
    n = refused_loads(path, monkeypatch, experts, lambda n: [1, 2, 3, n // 2, n - 1, n])
    assert n > 20


@shimmed
@pytest.mark.parametrize("what", ["Pool", "MissServer", "ExpertTiers"])
def test_a_part_that_does_not_start_leaves_nothing(path, patch, monkeypatch, what):
    def refuse(*a, **k):
        raise StrataError("not now")

    monkeypatch.setattr(orchestrators, what, refuse)
    with pytest.raises(StrataError, match="not now"):
        load(path, slots=8, experts="pinned")
    (device,) = patch.opened[-1:]
    assert device._kept == [] and device.registered == {}


def test_closing_twice_and_while_an_answer_is_read(path, patch):
    model = load(path, slots=8, experts="pinned", threads=3)
    stream = model.stream(PROMPT, max_tokens=8, ignore_eos=True)
    next(stream)
    o = shared(model)
    model.close()
    model.close()
    assert o.server.closed and o.pool.closed and o.store._arena is None and not o.store._registered


# ---- long


@pytest.mark.soak
@shimmed
def test_soak_every_refusal_a_hundred_times(path, patch, monkeypatch):
    process, before = psutil.Process(), 0
    for turn in range(4):
        for experts in ("pinned", "resident"):
            refused_loads(path, monkeypatch, experts, lambda n: range(1, n + 1))
        if turn == 0:
            before = process.memory_info().rss
    assert process.memory_info().rss - before < 64 << 20


def held(process):
    gc.collect()
    return len(names()), process.num_fds(), process.memory_info().rss


@pytest.mark.soak
def test_soak_faults(path, patch, continued):
    """Each fault a hundred times; after each the same session answers as if nothing had been, and in the end threads,
    files and memory are as they were."""
    process = psutil.Process()
    with load(path, slots=4, pcie_share=0.5) as model:
        server, hybrid = shared(model).server, shared(model).hybrid
        for turn in range(TURNS):
            for fault in ("silence", "status"):
                answer(model, 2)
                session = model._default
                before = session.tokens
                hybrid.set_limit(0.03 if ON_DEVICE else 0.2)
                server.inject(fault, after=turn % 2)
                with pytest.raises(StrataError, match="no answer" if fault == "silence" else "a failure|no answer"):
                    session.generate([*before, 5], max_tokens=1, ignore_eos=True)
                hybrid.set_limit(10)
                assert np.array_equal(session.tokens, before)
                assert session.generate([*before, 5], max_tokens=2, ignore_eos=True).tokens == continued
            stream = model._default.stream([*model._default.tokens, 5], max_tokens=8, ignore_eos=True)
            next(stream)
            stream.close()  # in the middle of an answer
            if turn == TURNS // 10:
                least = held(process)
        most = held(process)
    assert most[:2] == least[:2] and most[2] - least[2] < 8 << 20


@pytest.mark.soak
def test_soak_services_that_return(path, patch):
    """A service that has ended is an error, a hundred times, and closing leaves nothing."""
    process = psutil.Process()
    for turn in range(TURNS):
        with load(path, slots=4) as model:
            shared(model).server.close()
            with pytest.raises(StrataError, match="service"):
                answer(model, 1)
        if turn == TURNS // 10:
            before = held(process)
    after = held(process)
    assert after[:2] == before[:2] and after[2] - before[2] < 32 << 20


def test_a_recorded_window_is_a_window_that_is_not_counted(path, patch):
    """It gives the bits of one that is served, leaves no routing to count, and no gap below zero; and it is refused
    where an exchange was torn."""
    tokens = np.arange(5, 8, dtype=np.int32)
    with load(path, slots=9, experts="resident") as model:
        backend, o = model._backend, shared(model)
        state = backend.new_state()

        def recorded() -> list[np.ndarray]:
            found = backend.recorded(state, tokens[:2], (-1, -1), lambda index: ("streams",))
            return [buffers["streams"] for _, buffers in found]

        backend.window(state, tokens, (-1, -1))
        backend.window(state, tokens[:2], (-1, -1))
        wanted = backend.streams[:2].copy()
        backend.window(state, tokens, (-1, -1))  # of which nothing is committed
        counted, rows = o.tiers.counts.copy(), o.tiers.stats()["lookups"]
        assert np.array_equal(recorded()[-1].view(np.int32), wanted.view(np.int32))
        backend.commit(state, 2)
        assert np.array_equal(o.tiers.counts, counted) and o.tiers.stats()["lookups"] == rows
        o._gap_ms = None
        backend.window(state, tokens, (7, 6))
        assert o._gap_ms is None, "the window before did not end as a served one"
        backend.window(state, tokens, (7, 6))
        assert o._gap_ms >= 0
        o._torn = True
        with pytest.raises(StrataError, match="was interrupted"):
            recorded()
        o._torn = False
