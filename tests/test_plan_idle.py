"""Options of a plan that do nothing: refused where that is known beforehand, else a note; what the heading says."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from strata.base.errors import BadArgument, NoDevice
from strata.cli import FAILED, app
from strata.pack.profile import ExpertProfile
from strata.planner.machine import Machine
from strata.planner.of_load import plan_file, plan_of_load
from tests.header_maker import make_release
from tests.planning_examples import read_facts

SMALL_CARD = Machine.describe(vram_gib=0.5, ram_gib=64)
CPU = Machine.describe(ram_gib=64)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return read_facts(make_release(tmp_path_factory.mktemp("releases"), "Q2_0", vocabulary=False))


def heading(p):
    (line,) = [line for line in p.table().splitlines() if line.startswith("context ")]
    return line


def test_the_heading_says_where_drafts_come_from(facts, tiny_path):
    source = tiny_path.parent / "mtp.safetensors"
    for draft, said in (("off", "off"), ("lookup", "lookup"), ("auto", str(source)), (str(source), str(source))):
        p = plan_file(tiny_path, machine=CPU, draft=draft)
        assert p.draft == said and heading(p).endswith(f", draft {said}")
    p = plan_of_load(facts, CPU, draft="auto", context=4096)
    assert heading(p).endswith(", draft lookup")
    assert [n for n in p.notes if n.startswith("no draft layer beside")] == [
        f"no draft layer beside {facts.name}: drafting by lookup alone"
    ]
    lookup = plan_of_load(facts, CPU, draft="lookup", context=4096)
    assert lookup.lines == p.lines and not any("draft layer" in n for n in lookup.notes)


@pytest.mark.parametrize("draft", ["off", "lookup", "auto"])
def test_a_head_for_drafts_does_nothing_without_a_draft_layer(facts, draft):
    told = "draft_vocabulary does nothing here: no draft layer"
    assert told in plan_of_load(facts, CPU, draft=draft, draft_vocabulary=500, context=4096).notes
    p = plan_of_load(facts, CPU, draft="mtp", draft_vocabulary=500, context=4096)
    assert p.fits and told not in p.notes


@pytest.mark.parametrize("option", ["reserve_mib", "hit_rate"])
def test_what_a_cpu_has_no_use_for_is_said(facts, option):
    """Loads have no such options: with them, a plan goes to the device that a load goes to."""
    for value in (0, 0.5):
        with_card = replace(CPU, gpus=SMALL_CARD.gpus)
        for machine, device in ((CPU, "auto"), (with_card, "cpu"), (SMALL_CARD, "auto")):
            p = plan_of_load(facts, machine, device=device, context=4096, **{option: value})
            assert p.device == "cpu" and any(n.startswith(f"{option} does nothing here: ") for n in p.notes)
        asked = plan_of_load(facts, SMALL_CARD, device="cuda", context=4096, **{option: value})
        assert not asked.fits and f'device="cpu" (slower, without {option})' in asked.remedies
    assert not any("does nothing" in n for n in plan_of_load(facts, SMALL_CARD, context=4096).notes)


def test_a_chunk_of_several_cells_needs_a_card(facts):
    with pytest.raises(NoDevice, match="prefill=512: a chunk of more than one cell of 256 rows needs a GPU"):
        plan_of_load(facts, CPU, prefill=512)
    assert plan_of_load(facts, CPU, prefill=256, context=4096).prefill_rows == 256
    for rows in (8448, 100_000_000, 1 << 40):
        with pytest.raises(BadArgument, match=r"prefill is out of range; found .*; needed .* rows up to 8,192"):
            plan_of_load(facts, SMALL_CARD, prefill=rows)


def test_a_profile_beside_the_cpu_is_no_secret(facts):
    pairs = np.stack(np.divmod(np.arange(9, dtype=np.uint16), 512), axis=1)
    profile = ExpertProfile(48, 512, 9, pairs)
    for machine, device in ((CPU, "auto"), (SMALL_CARD, "auto"), (CPU, "cpu"), (SMALL_CARD, "cpu")):
        p = plan_of_load(facts, machine, profile=profile, device=device, context=4096)
        assert p.device == "cpu" and "the profile does nothing here: no GPU holds experts" in p.notes


def test_a_hit_rate_that_cannot_be_is_not_taken(tiny_path):
    machine = Machine.describe(vram_gib=8, ram_gib=64)
    for slots, rate, what in (("all", 1.0, "every"), (None, 1.0, "every"), (0, 0.0, "no")):
        p = plan_file(tiny_path, machine=machine, slots=slots, hit_rate=0.5)
        assert p.estimate.hit_rate == rate and f"hit_rate does nothing here: VRAM holds {what} expert" in p.notes
    p = plan_file(tiny_path, machine=machine, slots=100, hit_rate=0.5)
    assert p.estimate.hit_rate == 0.5 and not any("hit_rate" in n for n in p.notes)
    p = plan_file(tiny_path, machine=machine, slots="all")
    assert "routed experts: 100.0% in VRAM (all of them)" in p.table(), "nothing is left for a profile to do better"


def test_what_has_no_use_where_vram_holds_every_expert_is_said(tiny_path):
    pairs = np.stack(np.divmod(np.arange(256, dtype=np.uint16), 32), axis=1)
    machine = Machine.describe(vram_gib=8, ram_gib=64)
    asked = {"experts": "pinned", "pcie_share": 0.5, "profile": ExpertProfile(8, 32, 256, pairs)}
    for more in ({}, {"slots": "all"}):
        notes = plan_file(tiny_path, machine=machine, **asked, **more).notes
        assert [f"{name} does nothing here: VRAM holds every expert" in notes for name in asked] == [True] * 3
    notes = plan_file(tiny_path, machine=machine, slots=100, **asked).notes
    notes += plan_file(tiny_path, machine=machine, pcie_share=0, experts="auto").notes
    assert not any("does nothing" in n for n in notes)


def test_a_remedy_does_not_leave_an_option_that_is_refused_then(facts):
    """Without drafts nobody scores them."""
    tight, asked = Machine.describe(ram_gib=1), {"context": 4096, "checkpoints": 0, "prefill": "windows"}
    (lacks,) = plan_of_load(facts, tight, **asked).shortfalls
    enough = replace(tight, ram_total_bytes=tight.ram_total_with(lacks.needed_bytes),
                     ram_available_bytes=lacks.needed_bytes)  # fmt: skip
    p = plan_of_load(facts, enough, draft="mtp", draft_vocabulary=1000, kv="int8", **asked)
    assert not p.fits and p.remedies[0].startswith('draft="off", without draft_vocabulary (reads '), p.remedies
    assert plan_of_load(facts, enough, kv="int8", **asked).fits


def test_shared_experts_on_a_machine_without_a_gpu_are_not_offered_a_cpu(monkeypatch):
    here = Machine.here
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *a, **k: replace(here(*a, **k), gpus=())))
    monkeypatch.setitem(sys.modules, "cupy", None)
    for words in ([], ["--device", "auto"], ["--device", "cuda:1"]):
        done = CliRunner().invoke(app, ["bench", "experts", *words])
        assert done.exit_code == FAILED and "needs a GPU; found GPUs: 0; needed one" in done.stderr, done.output
        assert "cpu" not in done.stderr and "auto" not in done.stderr
