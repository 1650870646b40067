"""kv="auto": f16 where it fits, int8 where only that fits, never for more expert slots; the same in plan and load."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import strata
from strata import loading
from strata.base.plan import FITS, MIB, Plan
from strata.loading import LoadOptions, plan_load
from strata.pack.gguf_file import GgufFile
from strata.planner.machine import Machine
from strata.planner.memory import plan, read_facts
from strata.planner.of_load import plan_of_load
from tests.header_maker import FactsByRelease, make_release
from tests.test_plan import adds_up
from tests.test_plan_of_load import executes

NOTE = "KV int8 instead of f16"
NAMES = ("Q2_0", "Coder-IQ1_M")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("releases")
    return {name: make_release(folder, name, vocabulary=False) for name in NAMES}


@pytest.fixture(scope="module")
def facts(files, tiny_path):
    return FactsByRelease({"tiny": read_facts(tiny_path), **{name: read_facts(path) for name, path in files.items()}})


def with_vram(machine: Machine, n_bytes: int) -> Machine:
    return replace(machine, gpus=(replace(machine.gpus[0], free_bytes=n_bytes, total_bytes=n_bytes),))


def with_ram(machine: Machine, free_bytes: int) -> Machine:
    """Other programs take what they did."""
    total = machine.ram_total_bytes + free_bytes - machine.ram_available_bytes
    return replace(machine, ram_total_bytes=total, ram_available_bytes=free_bytes)


def needed(made: Plan, device: str) -> int:
    (lacks,) = made.shortfalls
    assert lacks.device == device
    return lacks.needed_bytes


def noted(made: Plan) -> bool:
    return any(NOTE in note for note in made.notes)


# ---- the concrete case


@pytest.mark.parametrize("sessions", [1, 3])
def test_a_card_too_small_for_f16_takes_int8_and_says_so(facts, sessions):
    m, machine = facts["Q2_0"], Machine.describe(vram_gib=4, ram_gib=64)
    asked = {"context": 8192, "sessions": sessions, "device": "cuda"}
    least = needed(plan_of_load(m, machine, kv="f16", **asked), "vram")
    small, large = with_vram(machine, least - 20 * MIB), with_vram(machine, least)
    assert not plan_of_load(m, small, kv="f16", **asked).fits
    made = plan_of_load(m, small, **asked)
    assert made.fits and made.kv == "int8" and f"{NOTE}, for which 20 MiB of VRAM are missing" in made.notes
    assert "int8" in made.line("KV cache").reason and made.largest_context >= 12_288
    assert plan_of_load(m, small, **{**asked, "context": 12_288}).fits, "a longer context would fit"
    usual = plan_of_load(m, large, **asked)
    assert usual.kv == "f16" and not noted(usual) and usual.n_slots == made.n_slots == 1
    assert plan_of_load(m, large, kv="int8", **asked).n_slots >= 1
    assert not plan_of_load(m, with_vram(machine, least - 1), kv="f16", **asked).fits, "to the byte"
    automatic = plan_of_load(m, small, sessions=sessions, device="cuda")
    assert automatic.fits and automatic.context == automatic.largest_context >= 12_288


def test_many_sessions_give_no_slots_that_f16_would_take_away(facts):
    """int8 saves more here than the reserve can take up."""
    m, machine = facts["Q2_0"], Machine.describe(vram_gib=4, ram_gib=64)
    asked = {"context": 8192, "sessions": 8, "device": "cuda"}
    least = needed(plan_of_load(m, machine, kv="f16", **asked), "vram")
    small = with_vram(machine, least - 8 * MIB)
    made, roomy = plan_of_load(m, small, **asked), plan_of_load(m, small, kv="int8", **asked)
    assert made.kv == "int8" and made.n_slots == plan_of_load(m, with_vram(machine, least), **asked).n_slots == 1
    assert roomy.n_slots > 100, "what is asked for is taken"
    adds_up(made)


def test_all_experts_in_vram_are_no_reason_for_int8(facts):
    m, machine = facts["Q2_0"], Machine.describe(vram_gib=30, ram_gib=64)
    asked = {"context": 8192, "sessions": 3}
    every = needed(plan_of_load(m, machine, kv="f16", slots=m.n_pairs, **asked), "vram")
    short = with_vram(machine, every - 50 * MIB)
    assert plan_of_load(m, short, kv="int8", **asked).n_slots == m.n_pairs
    made = plan_of_load(m, short, **asked)
    assert made.kv == "f16" and made.n_slots < m.n_pairs and not noted(made)
    alone = plan_of_load(replace(m, split=None), short, **asked)
    assert alone.kv == "int8" and alone.n_slots == m.n_pairs, "float experts cannot be shared"


def test_the_cpu_takes_int8_too(facts):
    m, machine = facts["Q2_0"], Machine.describe(ram_gib=5)
    least = needed(plan_of_load(m, machine, kv="f16", context=8192, sessions=2), "ram")
    made = plan_of_load(m, with_ram(machine, least - 30 * MIB), context=8192, sessions=2)
    assert made.fits and made.kv == "int8" and noted(made)
    assert plan_of_load(m, with_ram(machine, least), context=8192, sessions=2).kv == "f16"
    assert plan(m, with_ram(machine, least - 30 * MIB), context=8192, sessions=2).kv == "int8"


# ---- a load does what its plan says


def test_a_load_plans_the_same_format(files, facts, monkeypatch):
    machine = Machine.describe(vram_gib=4, ram_gib=64)
    least = needed(plan_of_load(facts["Q2_0"], machine, kv="f16", context=8192, device="cuda"), "vram")
    small = with_vram(machine, least - 20 * MIB)
    executes(monkeypatch, small)
    told = strata.plan(files["Q2_0"], machine=small, context=8192, device="cuda")
    with GgufFile(files["Q2_0"], headers_only=True) as gguf:
        done = plan_load(gguf, facts["Q2_0"].geometry, LoadOptions(context=8192, device="cuda"), None)
    assert told == done and told.kv == "int8"


def test_a_load_takes_int8_and_says_so(tiny_path, facts, monkeypatch, caplog):
    asked = {"context": 8192, "sessions": 2, "checkpoints": 1, "threads": 1}
    machine = replace(Machine.here(tiny_path), gpus=(), ram_total_bytes=64 * MIB, ram_available_bytes=24 * MIB)
    least = needed(plan_of_load(facts["tiny"], machine, kv="f16", **asked), "ram")
    machine = with_ram(machine, least - MIB)
    monkeypatch.setattr(loading.Machine, "here", classmethod(lambda cls, *a, **k: machine))
    with caplog.at_level(logging.WARNING, "strata"), strata.load(tiny_path, **asked) as model:
        assert model.kv == model.plan.kv == "int8" and model.mismatches == []
        assert len(model.generate("def f(x):", max_tokens=2).tokens) == 2
    assert any(NOTE in r.getMessage() for r in caplog.records)


# ---- what must hold of every plan

machines = st.one_of(
    st.none(), st.floats(4.2, 6.5), st.floats(4.2, 6.5), st.floats(6.5, 16), st.floats(30, 48)
)  # GiB of VRAM
contexts = st.one_of(st.integers(256, 12_288), st.sampled_from([8192, 8193, 32_768, 131_072]))
kinds = {"name": st.sampled_from(NAMES), "kv": st.sampled_from(["auto", "auto", "int8", "f16"]),
         "sessions": st.integers(1, 3)}  # fmt: skip


@settings(deadline=None, max_examples=30)
@given(vram=machines, ram=st.floats(4, 64), context=contexts, part=st.floats(0, 1), **kinds)
def test_if_a_context_fits_every_shorter_one_does(facts, name, vram, ram, context, part, kv, sessions):
    m, machine = facts[name], Machine.describe(vram_gib=vram, ram_gib=ram)
    asked = {"kv": kv, "sessions": sessions, "device": "cpu" if vram is None else "cuda"}
    long = plan_of_load(m, machine, context=context, **asked)
    adds_up(long)
    short = plan_of_load(m, machine, context=256 + int(part * (context - 256)), **asked)
    assert short.fits or not long.fits
    assert (short.kv, noted(short)) == ("int8", False) or kv != "int8"
    if short.fits and short.context <= 8192 and kv == "auto":
        assert (short.kv == "f16") == plan_of_load(m, machine, context=short.context, **{**asked, "kv": "f16"}).fits
        assert noted(short) == (short.kv == "int8")


@settings(deadline=None, max_examples=25)
@given(below=st.floats(0, 300), more=st.floats(0, 500), context=st.sampled_from([256, 1000, 4096, 8192, 8193]),
       prefill=st.sampled_from(["auto", "windows"]), **kinds)  # fmt: skip
def test_more_vram_never_gives_fewer_slots_where_formats_change(
    facts, name, below, more, context, prefill, kv, sessions
):
    """Cards around the smallest on which f16 fits. Amounts in MiB."""
    m, machine = facts[name], Machine.describe(vram_gib=3, ram_gib=64)
    asked = {"context": context, "sessions": sessions, "device": "cuda", "prefill": prefill}
    edge = needed(plan_of_load(m, machine, kv="f16", **asked), "vram") - int(below * MIB)
    small, large = (plan_of_load(m, with_vram(machine, edge + int(n * MIB)), kv=kv, **asked) for n in (0, more))
    assert large.n_slots >= small.n_slots and (large.fits or not small.fits)
    adds_up(small)
    adds_up(large)
    assert kv != "auto" or large.kv == small.kv or (small.kv, large.kv) == ("int8", "f16")


@settings(deadline=None, max_examples=8)
@given(vram=st.floats(4.2, 6.0), sessions=st.integers(1, 3), kv=st.sampled_from(["auto", "int8", "f16"]))
def test_the_largest_context_is_the_largest_and_slots_per_gib_are_what_a_gib_buys(facts, vram, sessions, kv):
    m, machine = facts["Q2_0"], Machine.describe(vram_gib=vram, ram_gib=64)
    asked = {"kv": kv, "sessions": sessions, "device": "cuda"}
    made = plan_of_load(m, machine, context=256, **asked)
    top = made.largest_context
    assert not top or plan_of_load(m, machine, context=top, **asked).verdict == FITS
    assert top == made.trained_context or not plan_of_load(m, machine, context=top + 256, **asked).fits
    if made.fits:
        larger = with_vram(machine, machine.gpus[0].free_bytes + (1 << 30))
        assert made.slots_per_gib == plan_of_load(m, larger, context=256, **asked).n_slots - made.n_slots
