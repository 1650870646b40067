"""Memory of slots that prefill chunks borrow: no table leads into it meanwhile, and it holds again what it held."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strata
from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.base.errors import BadArgument
from strata.gpu import chunk_products, expert_stream
from strata.gpu.backend import GpuBackend
from strata.gpu.expert_store import ExpertStore
from strata.gpu.slots import ExpertSlots
from strata.gpu.upload import Uploader
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.planner import chunks
from strata.runtime.loan import Loan
from strata.runtime.orchestrator import Orchestrator, TieredBackend, TierSetup
from strata.runtime.swaps import SwapRules
from strata.runtime.tiers import ExpertTiers
from tests.canonical.call import assert_same
from tests.gpu.loaded import lend_gpu
from tests.gpu.run_on_cpu import needs_compiler
from tests.test_gpu_backend import new_device

pytestmark = needs_compiler
LAYERS, E = 3, 32


def experts_of(path, layers: int = LAYERS):
    gguf = GgufFile(path)
    return gguf, expert_layout(gguf, layers)


def outside(slots: ExpertSlots, device) -> bool:
    """Whether no word of the device's table leads into the tail."""
    table = np.empty_like(slots.table)
    device.download(slots.table_address(0), table)
    inside = (table >= slots.tail_address) & (table < slots.tail_address + slots.tail_bytes)
    return not inside.any()


def holds_its_experts(slots: ExpertSlots, tiers: ExpertTiers, device) -> None:
    table = np.empty_like(slots.table)
    device.download(slots.table_address(0), table)
    np.testing.assert_array_equal(table[:, :, 0] != 0, tiers.resident)
    for layer, expert in np.argwhere(tiers.resident):
        slot = slots.slot_of(layer, expert)
        for found, part in zip(slots.read_back(layer, slot), ("gate", "up", "down"), strict=True):
            np.testing.assert_array_equal(found, slots.experts.raw(layer, expert, part))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_the_tail_is_one_piece_with_the_last_slots_of_every_layer(tiny_path, counts, data):
    _, experts = experts_of(tiny_path, len(counts))
    slots = ExpertSlots(experts, counts, by_table=True)
    sizes = [slots.slot_bytes(l) for l in range(len(counts))]
    total = sum(n * size for n, size in zip(counts, sizes, strict=True))
    for wrong in (0, total + 1):
        with pytest.raises(BadArgument, match="joined slots"):
            slots.join_tail(wrong)
    before = slots.n_bytes
    if total:
        n_bytes = data.draw(st.integers(1, total))
        slots.join_tail(n_bytes)
        assert n_bytes <= slots.tail_bytes < n_bytes + 2 * sum(sizes), "hardly more than asked for"
    assert slots.n_bytes == before
    device = new_device()
    slots.allocate(device, Uploader(device, threads=1), None)
    tail = {tuple(row) for row in slots.tail.tolist()}
    spans, ends = [], {}
    for layer, n in enumerate(counts):
        for slot in range(n):
            at, inside = slots.address(layer, slot, 0), (layer, slot) in tail
            assert inside == (slots.tail_address <= at < slots.tail_address + slots.tail_bytes and bool(tail))
            spans.append((at, at + sizes[layer]))
            assert not (ends.get(layer) and not inside), "a tail of the layer"
            ends[layer] = inside
    spans.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    device.close()


STEPS = ("lend", "window", "swap", "profile", "interrupt", "interrupt move", "interrupt back")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=9), st.integers(0, 99), st.booleans())
def test_any_sequence_of_loans_windows_and_interrupts(tiny_path, steps, seed, early):
    """A chunk fills what it borrowed with other bytes; whatever happens, windows find experts or misses."""
    gguf, experts = experts_of(tiny_path)
    rng, device = np.random.default_rng(seed), new_device()
    store, uploader = ExpertStore(experts, gguf, device, "mapped", threads=1), Uploader(device, threads=1)
    slots = ExpertSlots(experts, (4, 2, 3), by_table=True)
    slots.join_tail(4 * slots.slot_bytes(0))
    slots.allocate(device, uploader, store)
    slots.fill([(l, e) for l in range(LAYERS) for e in range(3)])
    tiers = ExpertTiers(slots, n_experts=E, expert_bytes=[experts.blob_bytes(l) for l in range(LAYERS)],
                        rules=SwapRules(every=1, least=0.1, margin=0.0))  # fmt: skip
    loan = Loan(tiers, slots.tail)
    garbage = rng.integers(0, 256, slots.tail_bytes, dtype=np.uint8)

    class Stop(BaseException):
        pass

    def stopped(name: str, after: int, call) -> None:
        """The call, ended by an interrupt in front of its `after`-th call of a method of the slots."""
        inner, left = getattr(slots, name), [after]

        def counted(*arguments):
            left[0] -= 1
            if left[0] < 0:
                raise Stop
            return inner(*arguments)

        setattr(slots, name, counted)
        try:
            call()
        except Stop:
            pass
        finally:
            delattr(slots, name)

    for step in steps:
        if step == "lend":
            fresh = tiers.lent == 0
            tiers.observe(rng.integers(0, 4, (LAYERS, 4, 4)).astype(np.int32), 4)  # what is in slots, unevenly
            tiers.settle()
            held, heat = tiers.resident, tiers.usage.score().copy()
            loan.lend()
            assert tiers.lent == len(slots.tail) and outside(slots, device)
            for layer in range(LAYERS) if fresh else ():
                stays, goes = tiers.resident[layer], held[layer] & ~tiers.resident[layer]
                assert not (goes.any() and stays.any()) or heat[layer, goes].max() <= heat[layer, stays].min()
            device.upload(slots.tail_address, garbage)
            holds_its_experts(slots, tiers, device)
        elif step == "window":
            loan.take_back()
            assert tiers.lent == 0
            holds_its_experts(slots, tiers, device)
        elif step == "swap":
            tiers.observe(rng.integers(0, E, (LAYERS, 2, 4)).astype(np.int32), 2)
            loan.take_back()
            tiers.between_windows()
            if early:
                tiers.settle()
        elif step == "profile":
            tiers.learned_profile()
        elif step.startswith("interrupt") and step != "interrupt back":
            stopped("move" if step == "interrupt move" else "evict", int(rng.integers(0, 4)), loan.lend)
        else:
            stopped("place", int(rng.integers(0, 4)), loan.take_back)
    loan.take_back()
    tiers.settle()
    assert tiers.lent == 0
    holds_its_experts(slots, tiers, device)
    loan.lend()
    assert outside(slots, device)
    uploader.close()
    store.close()
    device.close()


ROWS, CELLS = 256, 768




def test_a_chunk_whose_buffers_lie_in_slots(tiny_path, val, monkeypatch):
    """The bits of a chunk with memory of its own, and of the window behind it; the same after an interrupt."""
    monkeypatch.setattr(expert_stream, "STAGE_BYTES", 3 * 41 * 1024)
    monkeypatch.setattr(chunk_products, "EXPANDED_BYTES", 1 << 18)
    gguf = GgufFile(tiny_path)
    whole = read_geometry(gguf)
    g = replace(whole, L=3, kinds=whole.kinds[:3])
    tensors, experts = Tensors(gguf), expert_layout(gguf, g.L)
    programs = build_programs(g, CELLS, "f16", chunk_rows=ROWS)
    tokens = val["code"][: ROWS + 3].astype(np.int32)
    previous = (int(tokens[ROWS - 1]), int(tokens[ROWS - 2]))

    plain = GpuBackend(tensors, g, experts, programs, new_device())
    state = plain.new_state()
    plain.prefill(state, tokens[:ROWS], (-1, -1))
    wanted = [plain.streams[:ROWS]]
    digest = state.digest()
    plain.window(state, tokens[ROWS:], previous)
    wanted.append(plain.streams[:3])
    plain.close()

    device = new_device()
    setup = TierSetup(slots=(32, 32, 26), mode="pinned", link=False, share=0.0, threads=1)
    o = Orchestrator(device, tensors, experts, g.K, setup)
    gpu = TieredBackend(tensors, g, programs, o, lends=True)
    arena = gpu._chunks.arena
    assert o.slots.tail_bytes >= arena.n_bytes + gpu._chunks.stream.ring_bytes
    own = {a.line: a.n_bytes for a in gpu.allocations([])}["prefill buffers"]
    assert own < arena.n_bytes
    state = gpu.new_state()
    clean = state.digest()

    def window() -> np.ndarray:
        gpu.window(state, tokens[ROWS:], previous)
        assert o.tiers.lent == 0
        return gpu.streams[:3]

    gpu.prefill(state, tokens[:ROWS], (-1, -1))
    assert o.tiers.lent == len(o.slots.tail) and outside(o.slots, device)
    assert (o.tiers.counts.sum(axis=1) == ROWS * g.K).all() and (o.tiers.counts > 0).sum() > g.L * g.K
    assert_same(gpu.streams[:ROWS], wanted[0])
    assert state.digest() == digest
    assert_same(window(), wanted[1])
    holds_its_experts(o.slots, o.tiers, device)

    run, other = device.run, gpu.new_state()

    def stop(launches, stream=0):
        raise KeyboardInterrupt

    monkeypatch.setattr(device, "run", lambda some, stream=0: (stop if len(some) > 8 else run)(some, stream))
    with pytest.raises(KeyboardInterrupt):
        gpu.prefill(other, tokens[:ROWS], (-1, -1))
    monkeypatch.setattr(device, "run", run)
    assert other.rows == 0 and other.digest() == clean and outside(o.slots, device)
    assert_same(window(), wanted[1])
    holds_its_experts(o.slots, o.tiers, device)
    gpu.close()


def test_a_load_lends_what_the_plan_says(tiny_path, monkeypatch):
    """A model that has slots for most experts: the chunk's buffers are in the plan as a loan, and what is taken is what
    was planned. Where RAM has no copy of what slots hold nothing is lent, nor with few slots (test_bench_prefill)."""
    monkeypatch.setattr(chunks, "KEPT_SLOTS", 0)
    lend_gpu(monkeypatch)
    options = {"context": 512, "device": "cuda", "threads": 1, "checkpoints": 0}
    with strata.load(tiny_path, slots=240, **options) as model:
        loan, o = model.plan.line("prefill loan"), model._backend.orchestrator
        assert model.mismatches == [] and model.plan.prefill_rows == model._backend.chunk_rows >= 256
        assert (loan.kind, loan.held_bytes) == ("lent", 0) and loan.n_bytes <= o.slots.tail_bytes
        assert "prefill loan" in model.plan.table() and "while a chunk is read (lent)" in model.plan.table()
    with strata.load(tiny_path, slots=240, experts="resident", **options) as model:
        assert_own_buffers(model)


def assert_own_buffers(model: strata.Model) -> None:
    """A model whose chunks borrow nothing."""
    assert model.plan.prefill_rows >= 256 and not any(line.kind == "lent" for line in model.plan.lines)
    assert model.mismatches == [] and not len(model._backend.orchestrator.slots.tail)
