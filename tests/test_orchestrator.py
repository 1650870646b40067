"""Models whose experts do not all fit into VRAM: whatever is held, shared and swapped, the bits of the CPU backend.

Kernels run on the CPU through the shim, or on a GPU with STRATA_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import psutil
import pytest

import strata
from strata import loading
from strata.base.errors import BadArgument, DoesNotFit
from strata.pack.profile import ExpertProfile
from strata.planner.remembered import Settings
from strata.runtime import orchestrator
from strata.runtime.expert_stats import ExpertStats
from strata.runtime.orchestrator import TieredBackend
from strata.runtime.session import SessionState
from strata.runtime.swaps import SwapRules
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.gpu.shared_model import PROMPT, E, K, L, answer, load, nothing_is_left, patch, path, shared

__all__ = ["nothing_is_left", "patch", "path"]
pytestmark = needs_compiler
ALWAYS = SwapRules(every=1, least=0.1, margin=0.0)


@pytest.fixture(scope="module")
def wanted(path):
    """(tokens of the answer, logits of the prompt) of the CPU."""
    with strata.load(path, context=256, device="cpu", threads=1) as model:
        return answer(model), model.logits(PROMPT)


def same(model, wanted):
    return answer(model) == wanted[0] and np.array_equal(model.logits(PROMPT).view(np.int32), wanted[1].view(np.int32))


# ---- the same bits


FORMS = [
    (0, "pinned", 0.0, 1), (0, "mapped", None, 2), (1, "pinned", 1.0, 1), (3, "resident", 0.5, 3),
    (16, "pinned", 0.5, 4), (16, "mapped", 0.5, 1), (31, "resident", 1.0, 2),
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


@pytest.fixture
def any_card(patch, monkeypatch):
    """The card here, as if 8 GiB were free, with the driver's share for this process not among them: plans are the same
    for any card."""
    before = loading.Machine.here

    def here(*args, **options):
        found = before(*args, **options)
        return replace(found, gpus=(replace(found.gpus[0], free_bytes=8 << 30, has_context=True),))

    monkeypatch.setattr(loading.Machine, "here", here)


def test_a_bound_on_vram_decides_the_slots(path, any_card, wanted):
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

            def shuffled(o=o, between=between, seen=seen):
                o.tiers.usage.fresh[:] = rng.random(o.tiers.usage.fresh.shape) * 9
                seen.append(o.tiers.resident.copy())
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


def test_the_host_queues_no_more_copies_than_a_window_hides(path, patch):
    with load(path, slots=8, pcie_share=0) as model:
        o = shared(model)
        o.tiers.rules = ALWAYS
        answer(model, 6)
        assert o.tiers.stats()["copies"] and np.isfinite(o.tiers.most_bytes)
        o._byte_us, n_bytes = 1e9, o.layout.blob_bytes(0)
        answer(model, 1)
        assert o.tiers.most_bytes == orchestrator.LEAST_COPIES * n_bytes, "however slow the host is"
        o._byte_us = 1e-9
        answer(model, 1)
        assert o.tiers.most_bytes > 2 * orchestrator.LEAST_COPIES * n_bytes


def test_drafts_and_the_bundled_model(tiny_path, patch):
    with strata.load(tiny_path, context=256, device="cpu", threads=1) as model:
        expected = model.generate("x =", max_tokens=2).tokens
    with load(tiny_path, slots=60, draft="auto", pcie_share=0.5) as model:
        assert model.mismatches == []
        assert model.generate("x =", max_tokens=2).tokens == expected


# ---- choices


def test_where_the_share_comes_from(path, patch, monkeypatch):
    with load(path, slots=4, pcie_share=0.25) as model:
        assert shared(model).hybrid.share == 0.25
    monkeypatch.setattr("strata.planner.link_share.remembered", lambda machine, path: Settings(pcie_num=32))
    with load(path, slots=4) as model:
        assert shared(model).hybrid.share == 32 / 256
    monkeypatch.setattr("strata.planner.link_share.remembered", lambda machine, path: None)
    with load(path, slots=4) as model:
        assert 0 <= shared(model).hybrid.share < 1
    with load(path, slots=4, experts="mapped") as model:
        assert shared(model).hybrid.share == 0 and shared(model).setup.mode == "file"


@pytest.mark.parametrize(
    "bad",
    [{"slots": -1}, {"slots": "some"}, {"slots": True}, {"experts": "file"}, {"pcie_share": 1.5}, {"pcie_share": "a"},
     {"profile": 3}],
)  # fmt: skip
def test_bad_options_are_refused(path, bad):
    with pytest.raises(BadArgument):
        strata.load(path, **bad)


def test_options_of_a_gpu_need_one(path):
    for options in ({"slots": 3}, {"pcie_share": 0.5}, {"experts": "pinned"}):
        with pytest.raises(BadArgument, match="GPU"):
            strata.load(path, device="cpu", **options)


def test_more_slots_than_fit_are_refused(path, any_card):
    with pytest.raises(DoesNotFit, match="VRAM"):
        load(path, slots="all", vram_gib=0.09)
    with pytest.raises(DoesNotFit, match="VRAM"):
        load(path, slots=4, vram_gib=0.09)


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
    parts = {"post": 3.0, "wait for hits": 3.0, "wait for link": 5.0, "wait for cpu": 0.0, "join": 2.0}
    assert r["window_parts_us"] == parts
    assert r["layers"]["hit_rate"] == {"min": 0.5, "mean": 0.75, "max": 1.0, "max_layer": 1}
    before = stats.copy()
    stats.add(stamps, 10.0)
    stats -= before
    assert (stats.windows, stats.window_us, stats.rows) == (1, 10.0, 2) and stats.counts[0, 2] == 4


@pytest.mark.gpu
def test_chunks_read_a_prompt_alike_for_any_slots(tiny_path, val):
    ids = val["code"][:700].astype(np.int32)
    found, texts = [], []
    for options in ({"slots": "all"}, {"slots": 60, "pcie_share": 0.5}, {"slots": 0, "experts": "mapped"},
                    {"slots": 100, "experts": "resident"}):  # fmt: skip
        with strata.load(tiny_path, context=1024, device="cuda", **options) as model:
            assert model.plan.prefill_rows >= 256 and model.mismatches == []
            found.append(model.logits(ids).view(np.int32))
            texts.append(model.generate(ids[:600], max_tokens=40).tokens)
    assert all(np.array_equal(f, found[0]) for f in found) and set(texts) == {texts[0]}


# ---- long


class Course:
    """Windows that fill a session, and what the CPU makes of them: bits of every row, and the session's state."""

    def __init__(self, model, seed, context):
        rng, self.windows, self.rows = np.random.default_rng(seed), [], []
        session = SessionState(model._backend, context, checkpoints=0)
        while session.rows + 8 <= context:
            T = int(rng.integers(1, 9))
            tokens, keep = rng.integers(0, model.geometry.V, T).astype(np.int32), int(rng.integers(0, T + 1))
            self.windows.append((tokens, keep))
            session.window(tokens)
            self.rows.append(bits(model, T))
            session.commit(tokens, keep)
        self.digest = session.state.digest()


def bits(model, T):
    return np.array(model._backend.streams[:T]).view(np.int32)


def left(process):
    """What a process holds, in a form that may be compared."""
    gc.collect()
    return threading.active_count(), process.num_fds(), process.memory_info().rss


@pytest.mark.soak
def test_soak_random_swaps(tiny_path, patch):
    """Windows under random swaps and shares against what the CPU made of the same ones, every bit of their rows, until
    there are STRATA_SOAK_WINDOWS of them or STRATA_SOAK_S seconds are over. Threads and memory stay as they are."""
    most, seconds = int(os.environ.get("STRATA_SOAK_WINDOWS", 60)), float(os.environ.get("STRATA_SOAK_S", 150))
    rng, windows, context = np.random.default_rng(6), 0, 256
    rules = SwapRules(every=1, least=0.1, margin=0.0, most=6)
    with strata.load(tiny_path, context=context, device="cpu", threads=4) as cpu, cpu.turn():
        courses = [Course(cpu, seed, context) for seed in range(max(1, min(6, most // 100)))]
    options = {"context": context, "slots": 60, "pcie_share": 0.5, "threads": 8 if ON_DEVICE else 1}
    with load(tiny_path, **options) as model, model.turn():
        o, process, before = shared(model), psutil.Process(), None
        o.tiers.rules = rules
        session, began = SessionState(model._backend, context, checkpoints=0), time.monotonic()
        while windows < most and time.monotonic() - began < seconds:
            course = courses[int(rng.integers(len(courses)))]
            session.clear()
            for (tokens, keep), wanted in zip(course.windows, course.rows, strict=True):
                o.tiers.usage.fresh[:] = rng.random(o.tiers.usage.fresh.shape, np.float32) * 9
                if windows % 4 == 0:
                    o.hybrid.set_share(max(0.0, rng.random() * 1.3 - 0.3))
                session.window(tokens)
                assert np.array_equal(bits(model, len(tokens)), wanted), f"window {windows}"
                session.commit(tokens, keep)
                windows += 1
                if windows >= most:
                    break
            else:
                assert session.state.digest() == course.digest, f"after {windows} windows"
            if windows >= 600 and before is None:
                before = left(process)
        took, facts = time.monotonic() - began, o.record()
        if before is not None:
            threads, files, rss = left(process)
            assert (threads, files) == before[:2] and rss - before[2] < 16 << 20
        print(f"{windows} windows in {took:.1f} s, {facts['tiers']['copies']} copies, {facts['entries']}")
    assert facts["tiers"]["copies"] >= windows // 2
