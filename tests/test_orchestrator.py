"""Models whose experts do not all fit into VRAM: whatever is held, shared and swapped, the bits of the CPU backend.

Kernels run on the CPU through the shim, or on a GPU with STRATA_TEST_DEVICE=cuda. The model has two layers, so that
a window takes a tenth of a second there.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from itertools import pairwise

import numpy as np
import psutil
import pytest

import strata
from strata import loading
from strata.base.errors import BadArgument, DoesNotFit, FileError, NotFinite, StrataError
from strata.base.program import EXPERTS_FAILED
from strata.pack.profile import ExpertProfile
from strata.runtime import orchestrator as orchestrators
from strata.runtime.expert_stats import ExpertStats
from strata.runtime.orchestrator import TieredBackend
from strata.runtime.remembered import Settings
from strata.runtime.swaps import SwapRules
from tests.gpu.host_device import HostDevice
from tests.gpu.loaded import lend_gpu
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.tiny_models import TinyModel, ngram, small

pytestmark = needs_compiler
shimmed = pytest.mark.skipif(ON_DEVICE, reason="needs a device that refuses and reports")

L, E, K = 2, 16, 4
TYPES = {"*": "Q8_0", "*norm*": "F32", "*_exps.weight": "Q4_0", "*down_exps.weight": "Q8_0", "*indexer*": "BF16",
         "*ffn_gate_inp*": "BF16", "*hc*": "BF16"}  # fmt: skip
PROMPT = np.arange(3, 8, dtype=np.int32)
TOKENS = 4
ALWAYS = SwapRules(every=1, least=0.1, margin=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    geometry = small(L=L, kinds=("gdn", "qsa"), E=E, K=K, ngram=ngram(0))
    return TinyModel(geometry, types=TYPES).write(tmp_path_factory.mktemp("shared") / "m.gguf")


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as made:
        made.opened = lend_gpu(made)
        yield made


@pytest.fixture(scope="module")
def wanted(path):
    """(tokens of the answer, logits of the prompt) of the CPU."""
    with strata.load(path, context=256, device="cpu", threads=1) as model:
        return answer(model), model.logits(PROMPT)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = names()
    yield
    gc.collect()
    assert names() <= before


def names():
    return {t for t in threading.enumerate() if t.name.startswith("strata") and t.is_alive()}


def load(path, **options):
    options = {"context": 256, "threads": 1, "prefill": "windows", "checkpoints": 1} | options
    return strata.load(path, device="cuda", **options)


def answer(model, max_tokens=TOKENS):
    return model.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True).tokens


def same(model, wanted):
    return answer(model) == wanted[0] and np.array_equal(model.logits(PROMPT).view(np.int32), wanted[1].view(np.int32))


def shared(model):
    return model._backend.orchestrator


# ---- the same bits


FORMS = [
    (0, "pinned", 0.0, 1), (0, "mapped", None, 2), (1, "pinned", 1.0, 1), (3, "resident", 0.5, 3), (16, "pinned", 0.5, 4),
    (16, "mapped", 0.5, 1), (31, "resident", 1.0, 2),
]  # fmt: skip


@pytest.mark.parametrize(("slots", "experts", "share", "threads"), FORMS)
def test_tokens_and_logits_are_those_of_the_cpu(path, patch, wanted, slots, experts, share, threads):
    with load(path, slots=slots, experts=experts, pcie_share=share, threads=threads) as model:
        assert isinstance(model._backend, TieredBackend) and model.plan.n_slots == slots
        assert model.mismatches == [], "what is taken is what was planned"
        assert same(model, wanted)
        facts = model.stats()["experts"]
        assert facts["threads"] == threads and json.dumps(model.stats())
        entries = facts["entries"]
        assert sum(entries.values()) == K * L * facts["rows"]
        assert (entries["hits"] > 0) == (slots > 1) or slots == 1
        assert (entries["link"] > 0) == bool(share)
        assert facts["link_bytes"] == facts["experts"]["link"] * shared(model).layout.blob_bytes(0)
        assert facts["service"]["entries"] == entries["cpu"] and facts["service"]["failures"] == 0
        assert facts["tiers"]["lookups"] == sum(entries.values())


def test_all_experts_in_vram_build_nothing_of_this(path, patch, wanted):
    for options in ({}, {"slots": "all", "experts": "pinned", "pcie_share": 0.5}, {"slots": L * E}):
        with load(path, **options) as model:
            assert not isinstance(model._backend, TieredBackend) and model.stats()["experts"] is None
            assert model.plan.n_slots == L * E and model.mismatches == []


def test_a_bound_on_vram_decides_the_slots(path, patch, wanted):
    """As many slots as fit; with the bytes that one more would take, one more."""
    whole = strata.plan(path, context=256, slots=L * E, prefill="windows", reserve_mib=0,
                        machine=loading.Machine.here(path)).total_bytes("vram")  # fmt: skip
    with load(path, vram_gib=(whole + (300 << 20) - (9 << 10)) / (1 << 30)) as model:
        assert 0 < model.plan.n_slots < L * E and model.mismatches == []
        assert model.plan.total_bytes("vram") <= model.plan.free_bytes["vram"]
        assert same(model, wanted)


def test_random_swaps_at_every_window(path, patch, wanted):
    rng = np.random.default_rng(4)
    for experts in ("pinned", "resident"):
        with load(path, slots=9, experts=experts, pcie_share=0.5) as model:
            o = shared(model)
            o.tiers.rules = ALWAYS
            seen = []
            between = o.tiers.between_windows

            def shuffled(tiers=o.tiers, between=between, seen=seen):
                tiers.usage.fresh[:] = rng.random(tiers.usage.fresh.shape) * 9
                seen.append(tiers.resident.copy())
                o.hybrid.set_share(rng.random())
                return between()

            o.tiers.between_windows = shuffled
            assert same(model, wanted)
            assert sum(not np.array_equal(a, b) for a, b in pairwise(seen)) >= len(seen) // 2
            assert o.tiers.stats()["copies"] >= len(seen)
            if experts == "resident":
                held = np.array([o.slots.resident(l) for l in range(L)])
                assert np.array_equal(held, o.store.addresses[:, :, 0] == 0), "every expert has one place"


def test_a_profile_says_what_is_held(path, patch, wanted, tmp_path):
    ranked = [(1, 7), (0, 3), (1, 2), (1, 9), (0, 0)]
    profile = ExpertProfile(L, E, L * E, np.array(ranked, np.uint16))
    with load(path, slots=4, profile=profile) as model:
        o = shared(model)
        assert [np.flatnonzero(o.slots.resident(l)).tolist() for l in range(L)] == [[3], [2, 7, 9]]
        assert model.plan.ranked and same(model, wanted)
        o.tiers.save_profile(tmp_path / "learnt.strp")
    with load(path, slots=4, profile=tmp_path / "learnt.strp") as model:
        assert model.plan.n_slots == 4
    wrong = ExpertProfile(L, E + 1, 4, np.array([(0, 1)], np.uint16))
    with pytest.raises(BadArgument, match="another model"):
        load(path, slots=4, profile=wrong)


def test_what_is_asked_for_moves_in(path, patch):
    """Without a profile slots are filled in the plan's order, and follow the routing."""
    with load(path, slots=8, pcie_share=0) as model:
        o = shared(model)
        assert [o.slots.resident(l).sum() for l in range(L)] == [4, 4] and o.slots.resident(0)[:4].all()
        o.tiers.rules = ALWAYS
        answer(model, 6)
        counts, held = o.tiers.counts, o.tiers.resident
        assert counts.sum() == K * L * (len(PROMPT) - 1 + 6)
        assert sum(counts[l][held[l]].sum() for l in range(L)) > sum(counts[l][:4].sum() for l in range(L))


def test_drafts_and_the_bundled_model(tiny_path, patch):
    with strata.load(tiny_path, context=256, device="cpu", threads=1) as model:
        expected = model.generate("def f(x):", max_tokens=2).tokens
    with load(tiny_path, slots=60, draft="auto", pcie_share=0.5) as model:
        assert model.mismatches == []
        assert model.generate("def f(x):", max_tokens=2).tokens == expected


# ---- choices


def test_where_the_share_comes_from(path, patch, monkeypatch):
    with load(path, slots=4, pcie_share=0.25) as model:
        assert shared(model).hybrid.share == 0.25
    monkeypatch.setattr("strata.runtime.link_share.remembered", lambda machine, path: Settings(pcie_num=32))
    with load(path, slots=4) as model:
        assert shared(model).hybrid.share == 32 / 256
    monkeypatch.setattr("strata.runtime.link_share.remembered", lambda machine, path: None)
    with load(path, slots=4) as model:
        assert 0 <= shared(model).hybrid.share < 1
    with load(path, slots=4, experts="mapped") as model:
        assert shared(model).hybrid.share == 0 and shared(model).setup.mode == "file"


@pytest.mark.parametrize("bad", [{"slots": -1}, {"slots": "some"}, {"slots": True}, {"experts": "file"}, {"pcie_share": 1.5},
                                 {"pcie_share": "a"}, {"profile": 3}])  # fmt: skip
def test_bad_options_are_refused(path, bad):
    with pytest.raises(BadArgument):
        strata.load(path, **bad)


def test_options_of_a_gpu_need_one(path):
    for options in ({"slots": 3}, {"pcie_share": 0.5}, {"experts": "pinned"}):
        with pytest.raises(BadArgument, match="GPU"):
            strata.load(path, device="cpu", **options)


@shimmed
def test_more_slots_than_fit_are_refused(path, patch):
    with pytest.raises(DoesNotFit, match="every expert"):
        load(path, slots="all", vram_gib=0.43)
    with pytest.raises(DoesNotFit, match="VRAM"):
        load(path, slots=4, vram_gib=0.43)


# ---- faults


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
    assert names() == set()
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


# ---- counters


def test_stats_summarise_windows():
    stats = ExpertStats(2, np.array([10, 20]))
    stamps = np.array([[100, 1100, 3100, 6100, 5100, 7100, 2, 3, 4, 1, 2, 1],
                       [100, 2100, 5100, 0, 3000, 6100, 2, 0, 8, 0, 0, 0]])  # fmt: skip
    stats.add(stamps, 50.0)
    stats.add(stamps, 70.0)
    r = stats.record()
    assert (r["windows"], r["rows"], r["window_us"]) == (2, 4, 60.0)
    assert r["entries"] == {"hits": 24, "link": 2, "cpu": 6} and r["experts"] == {"link": 2, "cpu": 4}
    assert r["hit_rate"] == 24 / 32 and r["hit_rate_without_share"] == 24 / 30
    assert (r["link_bytes"], r["cpu_bytes"]) == (20, 40)
    assert r["waited_for"] == {"hits": 2, "link": 2, "cpu": 0}
    assert r["us_per_window"] == {"post": 3.0, "hits": 5.0, "link": 5.0, "cpu": 4.0, "join": 10.0}
    assert r["window_parts_us"] == {"post": 3.0, "wait for hits": 3.0, "wait for link": 5.0, "wait for cpu": 0.0, "join": 2.0}
    assert r["layers"]["hit_rate"] == {"min": 0.5, "mean": 0.75, "max": 1.0, "max_layer": 1}
    before = stats.copy()
    stats.add(stamps, 10.0)
    stats -= before
    assert (stats.windows, stats.window_us, stats.rows) == (1, 10.0, 2) and stats.counts[0, 2] == 4


# ---- long


@pytest.mark.soak
def test_soak_random_swaps(tiny_path, patch):
    """Windows in lock-step with the CPU under random swaps and shares, until there are STRATA_SOAK_WINDOWS of them or
    STRATA_SOAK_S seconds are over."""
    most, seconds = int(os.environ.get("STRATA_SOAK_WINDOWS", 60)), float(os.environ.get("STRATA_SOAK_S", 150))
    rng, began, windows = np.random.default_rng(6), time.monotonic(), 0
    from strata.runtime.session import SessionState

    with strata.load(tiny_path, context=512, device="cpu", threads=4) as cpu, load(
        tiny_path, context=512, slots=60, pcie_share=0.5, threads=8 if ON_DEVICE else 1
    ) as gpu:  # fmt: skip
        o = shared(gpu)
        o.tiers.rules = ALWAYS
        with cpu.turn(), gpu.turn():
            a, b = (SessionState(m._backend, 512, checkpoints=0) for m in (cpu, gpu))
            while windows < most and time.monotonic() - began < seconds:
                T = int(rng.integers(1, 9))
                if a.rows + T > 500:
                    assert a.state.digest() == b.state.digest(), f"after {windows} windows"
                    a.clear()
                    b.clear()
                tokens, keep = rng.integers(0, cpu.geometry.V, T).astype(np.int32), int(rng.integers(0, T + 1))
                o.tiers.usage.fresh[:] = rng.random(o.tiers.usage.fresh.shape) * 9
                o.hybrid.set_share(rng.random())
                for s in (a, b):
                    s.window(tokens)
                    s.commit(tokens, keep)
                windows += 1
            assert a.state.digest() == b.state.digest()
        took, facts = time.monotonic() - began, o.record()
        print(f"{windows} windows in {took:.1f} s, {facts['tiers']['copies']} copies, {facts['entries']}")


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


@pytest.mark.soak
def test_soak_faults(path, patch, continued):
    for turn in range(100):
        with load(path, slots=4, pcie_share=0.5) as model:
            answer(model, 2)
            shared(model).hybrid.set_limit(0.05 if ON_DEVICE else 0.2)
            shared(model).server.inject(("silence", "status")[turn % 2], after=turn % 3)
            with pytest.raises(StrataError):
                model._default.generate([*model._default.tokens, 5], max_tokens=3, ignore_eos=True)


