"""`strata.plan` is the plan that a load executes, on machines one does not have, for every released size."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strata
from strata import loading
from strata.arch.flash_next.geometry import read_geometry
from strata.base.errors import BadArgument, DoesNotFit, FileError
from strata.base.plan import DOES_NOT_FIT, FITS, NEEDS_DISK, Plan
from strata.loading import LoadOptions, plan_load
from strata.pack.gguf_file import GgufFile, shard_paths
from strata.planner import chunks, link_share
from strata.planner.cards import card_by_name
from strata.planner.machine import Machine
from strata.planner.memory import plan, read_facts
from strata.planner.of_load import ON_CPU, plan_file, plan_of_load
from strata.planner.remembered import Settings
from tests.gpu.loaded import lend_gpu
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.header_maker import RELEASES, FactsByRelease, make_release
from tests.test_plan import adds_up

shimmed = pytest.mark.skipif(ON_DEVICE, reason="describes a machine that is not here")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("releases")
    return {name: make_release(folder, name, vocabulary=False) for name in RELEASES}


@pytest.fixture(scope="module")
def facts(files):
    return FactsByRelease({name: read_facts(path) for name, path in files.items()})


def executes(monkeypatch, machine: Machine) -> None:
    """Let loading find that machine, with cards that work."""
    monkeypatch.setattr(loading.Machine, "here", classmethod(lambda cls, *a, **k: machine))
    monkeypatch.setattr(loading, "device_problem", lambda gpu: None)
    monkeypatch.setattr(loading, "direct_problem", lambda gguf, name: None)


def chunk_bytes(p: Plan) -> int:
    return sum(x.n_bytes for x in p.lines if x.line == "prefill buffers")


# ---- the same plan


@pytest.mark.parametrize("card", ["RTX 4060", "RTX 5070", "RTX 4090", "H200"])
@pytest.mark.parametrize("release", ["Q2_0", "UD-Q4_K_XL"])
def test_a_load_plans_as_strata_plan_does(files, monkeypatch, release, card):
    """On simulated cards and RAM: fits and is equal, or is refused with the plan's own shortfalls and remedies."""
    with GgufFile(files[release], headers_only=True) as gguf:
        g = read_geometry(gguf)
        for ram, options in ((16, {"device": "cuda"}), (32, {"context": 8192}), (32, {}), (64, {})):
            machine = Machine.describe(gpu=card, ram_gib=ram)
            executes(monkeypatch, machine)
            told = strata.plan(files[release], machine=machine, **options)
            try:
                done = plan_load(gguf, g, LoadOptions(**options), None)
            except DoesNotFit as refused:
                assert told.verdict == DOES_NOT_FIT and told.remedies
                assert all(str(s) in refused.message for s in told.shortfalls)
                assert refused.advice == "Try: " + "; ".join(told.remedies)
            else:
                assert told == done and told.fits
            adds_up(told)


@shimmed
@needs_compiler
@pytest.mark.parametrize(
    ("card", "options", "lines"),
    [
        ({"gpu": "RTX 4090"}, {}, {"prefill buffers"}),
        ({"vram_gib": 1.35}, {}, set()),
        ({"vram_gib": 1.1}, {"draft": "lookup"}, {"link staging"}),
        ({"gpu": "RTX 4060"}, {"slots": 240, "kv": "int8"}, {"link staging", "prefill loan"}),
        ({"gpu": "RTX 4060"}, {"slots": 240, "experts": "mapped"}, {"prefill loan"}),
        ({"gpu": "RTX 4060"}, {"slots": 200, "experts": "resident", "sessions": 2}, {"swap staging"}),
        ({"gpu": "RTX 4060"}, {"slots": 0, "prefill": "windows"}, {"expert exchange"}),
        ({"vram_gib": 0.5}, {}, {"window scratch"}),
    ],
)  # fmt: skip
def test_a_load_takes_what_strata_plan_says(tiny_path, monkeypatch, card, options, lines):
    """A whole load on the device of the tests."""
    monkeypatch.setattr(chunks, "KEPT_SLOTS", 0)
    machine = replace(Machine.here(tiny_path), gpus=Machine.describe(**card).gpus)
    lend_gpu(monkeypatch, **card)
    monkeypatch.setattr(loading.Machine, "here", classmethod(lambda cls, *a, **k: machine))
    options = {"context": 512, "threads": 1, "checkpoints": 1, **options}
    told = strata.plan(tiny_path, machine=machine, **options)
    with strata.load(tiny_path, device="auto", **options) as model:
        assert model.plan == told and model.mismatches == []
        found = told.compared(model.taken)
        for line in [x for x in ("window scratch", "logits") if told.device != "cpu"]:
            assert found[line, "vram"][0] == found[line, "vram"][1] > 0, line
        assert lines <= {x.line for x in told.lines} and (told.device == "cpu") == (card == {"vram_gib": 0.5})
        assert (told.prefill_rows > 0) == any(x.line == "prefill staging" for x in told.lines) or told.device == "cpu"
        backend = model._backend
        if "prefill loan" in lines:
            assert backend.chunk_rows == told.prefill_rows
            assert told.line("prefill loan").n_bytes <= backend.orchestrator.slots.tail_bytes


def test_the_share_is_the_one_that_a_load_begins_with(files, monkeypatch):
    """As a calibration kept it for the machine and the file, else by cost; the estimate is for it."""
    machine = Machine.describe(gpu="RTX 5070", ram_gib=64)
    by_cost = plan_file(files["Q2_0"], machine=machine, context=4096)
    assert 0 < by_cost.pcie_share == by_cost.estimate.pcie_share < 1
    monkeypatch.setattr(link_share, "remembered", lambda machine, path: Settings(pcie_num=32))
    kept = plan_file(files["Q2_0"], machine=machine, context=4096)
    assert kept.pcie_share == kept.estimate.pcie_share == 32 / 256 and kept.lines == by_cost.lines
    assert kept.estimate.decode_ms > by_cost.estimate.decode_ms
    for options in ({"pcie_share": 0}, {"experts": "mapped"}):
        assert plan_file(files["Q2_0"], machine=machine, context=4096, **options).pcie_share == 0


def test_a_chunk_costs_the_slots_that_the_docs_say(facts):
    machine = Machine.describe(vram_gib=12, ram_gib=64)
    text = (Path(__file__).parents[1] / "docs/planning.md").read_text(encoding="utf-8")
    told = re.search(r"with chunks of ([\d,]+) to ([\d,]+)\s+rows there are (\d+) to (\d+) slots fewer", text)
    rows, fewer = [], []
    for context in (4096, 32768, 65536, 131072, 262144):
        options = {"context": context, "kv": "int8", "draft": "mtp"}
        whole, alone = (plan_of_load(facts["Q2_0"], machine, prefill=p, **options) for p in ("auto", "windows"))
        assert alone.n_slots == plan(facts["Q2_0"], machine, **options).n_slots, "as in the table of published slots"
        rows.append(whole.prefill_rows)
        fewer.append(alone.n_slots - whole.n_slots)
    found = (min(rows), max(rows), min(fewer), max(fewer))
    assert found[:2] == tuple(int(x.replace(",", "")) for x in told.groups()[:2])
    assert found[2:] == pytest.approx([int(x) for x in told.groups()[2:]], abs=4)


def test_a_file_without_a_shard_has_no_share_to_remember(tmp_path):
    path = make_release(tmp_path, "Q2_0", vocabulary=False)
    shard_paths(path)[1].unlink()
    p = plan_file(path, machine=Machine.describe(gpu="RTX 5070", ram_gib=64), context=4096)
    assert p.fits and p.pcie_share > 0 and any("assumed" in note for note in p.notes)
    with pytest.raises(FileError, match="shard 2 of 2"):
        strata.load(path)


# ---- what a card does not do


def test_a_card_without_room_becomes_the_cpu_and_says_so(facts):
    machine = Machine.describe(vram_gib=4, ram_gib=64)
    p = plan_of_load(facts["Q2_0"], machine, context=4096)
    assert (p.device, p.verdict, p.n_slots) == ("cpu", FITS, 0)
    assert ON_CPU in p.notes[0] and "MiB needed" in p.notes[0]
    same = plan(facts["Q2_0"], machine, context=4096, device="cpu")
    assert p.lines == same.lines and p.notes[1:] == same.notes


@pytest.mark.parametrize(
    "asked", [{"device": "cuda"}, {"vram_gib": 3.5}, {"slots": 8}, {"slots": 10**6}, {"experts": "pinned"},
              {"pcie_share": 0.5}, {"prefill": 512}],
)  # fmt: skip
def test_what_only_a_card_has_is_reported_as_not_fitting(facts, asked):
    p = plan_of_load(facts["Q2_0"], Machine.describe(vram_gib=4, ram_gib=64), context=4096, **asked)
    assert p.device == "cuda:0" and p.verdict == DOES_NOT_FIT and p.shortfalls[0].device == "vram" and p.remedies
    with pytest.raises(DoesNotFit, match="MiB needed"):
        p.require()


def test_float_experts_are_not_shared(facts):
    m = replace(facts["Q2_0"], split=None)
    whole = plan_of_load(m, Machine.describe(vram_gib=96, ram_gib=64), context=4096)
    assert whole.n_slots == m.n_pairs
    small = Machine.describe(vram_gib=12, ram_gib=64)
    assert "float experts" in plan_of_load(m, small, context=4096).notes[0]
    with pytest.raises(BadArgument, match="float experts"):
        plan_of_load(m, small, context=4096, device="cuda")


def test_every_expert_counts_with_a_context_worth_having(facts):
    """Not where all of them leave room for a short context alone, unless that is what was asked for."""
    m = facts["Q2_0"]
    for i in range(40):
        machine = Machine.describe(vram_gib=36 + i / 10, ram_gib=64)
        free, short = plan_of_load(m, machine), plan_of_load(m, machine, context=4096)
        assert free.context >= 32_768
        assert short.n_slots == m.n_pairs or free.n_slots < m.n_pairs
        if short.n_slots == m.n_pairs and free.n_slots < m.n_pairs:
            break
    else:
        raise AssertionError("no card between the two")
    assert plan_of_load(m, machine, slots=m.n_pairs).n_slots == m.n_pairs


# ---- what must hold of every plan


memory = st.floats(4, 48)
contexts = st.sampled_from([256, 1000, 4096, 8192, 8448, 32768, 65536, 131072, 262144])
names = st.sampled_from(sorted(RELEASES))
choices = st.fixed_dictionaries(
    {
        "kv": st.sampled_from(["f16", "int8"]),
        "draft": st.sampled_from(["off", "mtp"]),
        "sessions": st.integers(1, 3),
        "prefill": st.sampled_from(["auto", "windows"]),
        "experts": st.sampled_from(["mapped", "pinned"]),
    }
)


@settings(deadline=None, max_examples=15)
@given(name=names, vram=memory, more=st.one_of(st.floats(0, 8), st.floats(0, 0.1)), context=contexts, options=choices)
def test_more_vram_never_gives_fewer_slots(facts, name, vram, more, context, options):
    small, large = (
        plan_of_load(facts[name], Machine.describe(vram_gib=v, ram_gib=96), context=context, device="cuda", **options)
        for v in (vram, vram + more)
    )
    assert large.n_slots >= small.n_slots
    assert large.prefill_rows >= small.prefill_rows or large.n_slots == facts[name].n_pairs
    assert large.fits or not small.fits
    adds_up(small)
    adds_up(large)


@settings(deadline=None, max_examples=15)
@given(name=names, vram=memory, a=contexts, b=contexts, options=choices)
def test_longer_context_never_gives_more_slots(facts, name, vram, a, b, options):
    machine = Machine.describe(vram_gib=vram, ram_gib=96)
    short, long = (
        plan_of_load(facts[name], machine, context=c, device="cuda", **options) for c in (min(a, b), max(a, b))
    )
    assert long.n_slots <= short.n_slots
    assert short.fits or not long.fits


@pytest.mark.parametrize("name", ["Q2_0", "UD-Q4_K_XL"])
def test_a_step_of_vram_never_takes_a_slot(facts, name):
    """Where a larger chunk comes in, its share has been saved up."""
    gib = 7.0 if name == "Q2_0" else 9.0
    before, sizes, left = 0, set(), 0
    for i in range(120):
        machine = Machine.describe(vram_gib=gib + i / 25, ram_gib=96)
        p = plan_of_load(facts[name], machine, context=32768, experts="pinned")
        assert p.n_slots >= before
        before, spare = p.n_slots, p.free_bytes["vram"] - p.total_bytes("vram")
        left = max(left, spare)
        sizes.add(p.prefill_rows)
    assert len(sizes) >= 4 and left < 90 << 20, "no more is saved than the next chunk takes"


@settings(deadline=None, max_examples=10)
@given(name=names, vram=memory, more=st.floats(0, 4), ram=st.floats(8, 64), context=contexts)
def test_where_slots_cannot_be_lent_slots_and_chunk_grow_together(facts, name, vram, more, ram, context):
    """A larger chunk costs slots there, and both together never shrink."""
    small, large = (
        plan_of_load(facts[name], Machine.describe(vram_gib=v, ram_gib=ram), context=context, experts="resident")
        for v in (vram, vram + more)
    )
    adds_up(small)
    adds_up(large)
    slot = max(small.slot_bytes)
    held = [sum(n * b for n, b in zip(p.slots, p.slot_bytes, strict=True)) + chunk_bytes(p) for p in (small, large)]
    if small.fits and large.n_slots < facts[name].n_pairs:
        assert held[1] >= held[0] - slot
        windows = plan_of_load(facts[name], Machine.describe(vram_gib=vram, ram_gib=ram), context=context,
                               experts="resident", prefill="windows")  # fmt: skip
        assert small.n_slots >= (1 - chunks.SLOT_SHARE) * windows.n_slots - 1


@settings(deadline=None, max_examples=15)
@given(name=names, vram=st.floats(4, 96), ram=st.floats(8, 128), draft=st.sampled_from(["off", "mtp"]))
def test_any_machine_starts_or_is_refused_with_numbers(facts, name, vram, ram, draft):
    """With an automatic context too. The largest context is one that fits."""
    machine = Machine.describe(vram_gib=vram, ram_gib=ram)
    p = plan_of_load(facts[name], machine, draft=draft)
    adds_up(p)
    assert p.slots_per_gib >= 0
    if p.fits:
        at = plan_of_load(facts[name], machine, draft=draft, context=p.largest_context)
        assert at.fits and at.device == p.device
    if p.verdict == NEEDS_DISK:
        assert p.context <= 4096, "a longer context would read more from disk"


@settings(deadline=None, max_examples=10)
@given(name=names, vram=memory, ram=st.floats(8, 96), context=contexts)
def test_remedies_that_name_an_option_work(facts, name, vram, ram, context):
    machine = Machine.describe(vram_gib=vram, ram_gib=ram)
    asked = {"context": context, "draft": "mtp", "sessions": 2, "device": "cuda"}
    p = plan_of_load(facts[name], machine, **asked)
    for text in p.remedies:
        option, _, value = text.split(" (")[0].partition("=")
        if option in ("kv", "context", "sessions", "draft", "prefill", "checkpoints", "draft_vocabulary", "device"):
            value = value.strip('"')
            q = plan_of_load(facts[name], machine, **{**asked, option: int(value) if value.isdigit() else value})
            assert q.fits and (p.verdict != NEEDS_DISK or q.verdict == FITS), text


def test_cards_are_known():
    assert all(card_by_name(name) for name in ("RTX 4060", "RTX 5070", "RTX 4090", "H200"))
