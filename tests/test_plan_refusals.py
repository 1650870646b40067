"""What a plan says when something does not fit or comes from disk: the amounts are those it takes, remedies help."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.plan import DOES_NOT_FIT, FITS, GIB, MIB, NEEDS_DISK, Plan
from strata.planner.machine import Machine
from strata.planner.memory import read_facts
from strata.planner.of_load import plan_of_load
from strata.planner.ram_room import amount, ram_floor_bytes, ram_needed_bytes
from tests.header_maker import FactsByRelease, make_release
from tests.test_plan import adds_up

NAMES = ("Q2_0", "Coder-IQ1_M")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("releases")
    return FactsByRelease({name: read_facts(make_release(folder, name, vocabulary=False)) for name in NAMES})


def with_more(machine: Machine, vram: int = 0, ram: int = 0) -> Machine:
    """The machine with so many bytes more of either."""
    gpus = [replace(g, free_bytes=g.free_bytes + vram, total_bytes=g.total_bytes + vram) for g in machine.gpus]
    return replace(machine, gpus=tuple(gpus), ram_total_bytes=machine.ram_total_bytes + ram,
                   ram_available_bytes=machine.ram_available_bytes + ram)  # fmt: skip


def missing(p: Plan, device: str) -> int:
    found = [s.missing_bytes for s in p.shortfalls if s.device == device]
    assert len(found) <= 1, "one shortfall says it all"
    return found[0] if found else 0


def bought(text: str) -> tuple[int, int, dict[str, object]]:
    """(VRAM, RAM, options) of the remedy that is an amount of memory."""
    vram = ram = 0
    options: dict[str, object] = {}
    for part in text.split(", or a")[0].split(" and "):
        amount = re.fullmatch(r"([\d,.]+) ([GM]iB) more (V?RAM)(?: \((?:of [^;)]+)?(?:; )?(?:no (\w+))?\))?", part)
        cap = re.fullmatch(r"(vram_gib|ram_gib)=([\d.]+) or no cap", part)
        if amount:
            n_bytes = int(float(amount[1].replace(",", "")) * (GIB if amount[2] == "GiB" else MIB))
            vram, ram = (n_bytes, ram) if amount[3] == "VRAM" else (vram, n_bytes)
            options |= {amount[4]: None} if amount[4] else {}
        elif cap:
            options[cap[1]] = float(cap[2])
        else:
            name, value = part.split("=")
            options[name] = {"0": 0, '"auto"': "auto"}[value]
    return vram, ram, options


machines = st.one_of(st.none(), st.floats(4, 6.5), st.floats(6.5, 16), st.floats(16, 48))
ram = st.one_of(st.floats(3, 12), st.floats(8, 64))
asked_for = st.fixed_dictionaries(
    {
        "context": st.sampled_from([256, 4096, 8192, 32_768, 262_144]),
        "kv": st.sampled_from(["auto", "f16", "int8"]),
        "sessions": st.integers(1, 3),
        "checkpoints": st.sampled_from([0, 6, 20]),
    }
)
of_cards = st.fixed_dictionaries(
    {
        "experts": st.sampled_from(["auto", "mapped", "pinned", "resident"]),
        "slots": st.sampled_from([None, None, 0, 300, 4000, 10**6]),
        "pcie_share": st.sampled_from([None, None, 0.3]),
        "prefill": st.sampled_from(["auto", "auto", "windows", 512]),
    }
)


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(NAMES), vram=machines, gib=ram, asked=asked_for, more=of_cards)
def test_with_what_is_missing_it_fits_and_with_less_it_does_not(facts, name, vram, gib, asked, more):
    machine = Machine.describe(vram_gib=vram, ram_gib=gib)
    options = {**asked, "device": "cpu"} if vram is None else {**asked, **more, "device": "cuda"}
    p = plan_of_load(facts[name], machine, **options)
    adds_up(p)
    lacks = missing(p, "vram"), missing(p, "ram")
    if p.fits:
        return
    assert plan_of_load(facts[name], with_more(machine, *lacks), **options).fits, p.shortfalls
    if 0 in lacks and more["prefill"] != 512:
        less = with_more(machine, *(max(n - 8192, 0) for n in lacks))
        assert not plan_of_load(facts[name], less, **options).fits, p.shortfalls


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(NAMES), vram=machines, gib=ram, asked=asked_for, more=of_cards,
       caps=st.tuples(*[st.one_of(st.none(), st.floats(2, 12))] * 2))  # fmt: skip
def test_the_amount_of_memory_that_a_remedy_names_helps(facts, name, vram, gib, asked, more, caps):
    machine = Machine.describe(vram_gib=vram, ram_gib=gib)
    options = {**asked, "device": "cpu"} if vram is None else {**asked, **more, "device": "cuda", "vram_gib": caps[0]}
    options["ram_gib"] = caps[1]
    p = plan_of_load(facts[name], machine, **options)
    if p.verdict == FITS:
        assert not p.remedies
        return
    more_vram, more_ram, changed = bought(p.remedies[-1])
    q = plan_of_load(facts[name], with_more(machine, more_vram, more_ram), **{**options, **changed})
    assert q.fits and (p.verdict == DOES_NOT_FIT or q.verdict == FITS), (p.remedies, q.shortfalls)


@settings(deadline=None, max_examples=12)
@given(name=st.sampled_from(NAMES), gib=st.floats(0.5, 4), vram=st.one_of(st.none(), st.floats(0.01, 1.5)),
       asked=asked_for, rows=st.sampled_from(["auto", 512]))  # fmt: skip
def test_a_remedy_of_a_small_described_machine_is_a_size_to_describe(facts, name, gib, vram, asked, rows):
    """Of little RAM half is taken to be in use, so that a half of what is added is free."""
    options = {**asked, "device": "cpu"} if vram is None else {**asked, "device": "cuda", "prefill": rows}
    p = plan_of_load(facts[name], Machine.describe(vram_gib=vram, ram_gib=gib), **options)
    if p.verdict == FITS:
        return
    more_vram, more_ram, changed = bought(p.remedies[-1])
    assert not changed
    larger = Machine.describe(vram_gib=None if vram is None else vram + more_vram / GIB, ram_gib=gib + more_ram / GIB)
    q = plan_of_load(facts[name], larger, **options)
    assert q.fits and (p.verdict == DOES_NOT_FIT or q.verdict == FITS), (p.remedies, q.shortfalls)


@pytest.mark.parametrize(("name", "vram", "gib", "asked"), [
    ("tiny", 1.084, 1.1, {"prefill": 512}),
    ("tiny", 0.6, 0.06, {"prefill": 256, "experts": "mapped"}),
    ("tiny", 0.7, 3, {"prefill": 4096, "context": 32_768}),
    ("Q2_0", 1.4, 0.01, {"prefill": 512, "context": 32_768, "experts": "pinned", "reserve_mib": 300}),
    ("Q2_0", 4.1, 0.07, {"prefill": 4096, "context": 256, "experts": "pinned", "reserve_mib": 3000}),
    ("Q2_0", 9.7, 9.76, {"prefill": 4096, "context": 100_000, "slots": 100, "reserve_mib": 0}),
    ("Q2_0", 18.28, 20.17, {"prefill": 4096, "slots": 100}),
])  # fmt: skip
def test_memory_for_a_chunk_that_was_asked_for_is_enough(facts, tiny_path, name, vram, gib, asked):
    """What such a chunk needs is known only once everything else fits: a shrunk reserve grows first."""
    m, asked = read_facts(tiny_path) if name == "tiny" else facts[name], {**asked, "device": "cuda"}
    p = plan_of_load(m, Machine.describe(vram_gib=vram, ram_gib=gib), **asked)
    assert p.verdict != FITS and all(s.missing_bytes > 0 for s in p.shortfalls)
    more_vram, more_ram, changed = bought(p.remedies[-1])
    larger = Machine.describe(vram_gib=vram + more_vram / GIB, ram_gib=gib + more_ram / GIB)
    q = plan_of_load(m, larger, **asked)
    assert not changed and q.fits and (p.verdict == DOES_NOT_FIT or q.verdict == FITS), (p.remedies, q.shortfalls)
    assert q.prefill_rows == asked["prefill"]


def test_why_more_is_to_be_added_than_lacks_is_said(facts):
    p = plan_of_load(facts["Q2_0"], Machine.describe(ram_gib=1), context=256, device="cpu")
    (lacks,), text = p.shortfalls, p.remedies[-1]
    assert 0 <= bought(text)[1] - (lacks.missing_bytes + GIB) < MIB, "1.5 GiB are taken to be in use, not a half of one"
    assert re.search(r"MiB more RAM \(of [\d.]+ GiB, [\d.]+ GiB are taken to be free\)", text), text
    p = plan_of_load(facts["Q2_0"], Machine.describe(ram_gib=4), context=262_144, device="cpu")
    assert "MiB more RAM, or a smaller" in p.remedies[-1], p.remedies


def test_the_floor_of_the_system_grows_with_ram():
    for total, used, n_bytes in ((4, 0.5, 3), (6, 1, 5), (32, 2, 28), (32, 20, 11), (8, 1, 40)):
        machine = Machine.describe(ram_gib=total)
        machine = replace(machine, ram_total_bytes=total * GIB, ram_available_bytes=int((total - used) * GIB))
        needed = ram_needed_bytes(machine, n_bytes * GIB)
        for free, enough in ((needed, True), (needed - 64, False)):
            grown = with_more(machine, ram=max(free - machine.ram_available_bytes, 0))
            left = free - ram_floor_bytes(grown.ram_total_bytes, free)
            assert (left >= n_bytes * GIB) == enough, (total, used, n_bytes)


def test_without_room_for_a_share_over_pcie_the_cpu_computes_all_of_it(facts):
    """More RAM locks experts, and then a share could use the link: that must not end in a refusal."""
    m, asked = facts["Q2_0"], {"context": 131_072, "device": "cuda"}
    machine = Machine.describe(vram_gib=3, ram_gib=64)
    edge = missing(plan_of_load(m, machine, **asked, pcie_share=0.5), "vram")
    tight = with_more(machine, edge - 4 * MIB)
    p, linked = plan_of_load(m, tight, **asked), plan_of_load(m, with_more(tight, 4 * MIB), **asked)
    assert p.fits and p.experts == "pinned" and p.pcie_share == 0 and not p.times_share
    assert any(n.startswith("no share goes over PCIe: 4 MiB of VRAM are missing") for n in p.notes)
    assert any(x.line == "link staging" for x in linked.lines) and linked.n_slots >= p.n_slots == 1
    assert not plan_of_load(m, tight, **asked, pcie_share=0.5).fits, "what is asked for is not left out"
    adds_up(p)
    same = {**asked, "reserve_mib": 300}
    few, more = (plan_of_load(m, machine, **same) for machine in (tight, with_more(tight, 4 * MIB)))
    assert few.fits and more.n_slots >= few.n_slots


@settings(deadline=None, max_examples=25)
@given(name=st.sampled_from(NAMES), vram=st.floats(4, 12), gib=ram, more=st.floats(0, 40), asked=asked_for,
       reserve=st.sampled_from([None, 300]))  # fmt: skip
def test_more_ram_never_ends_in_a_refusal(facts, name, vram, gib, more, asked, reserve):
    machine, options = Machine.describe(vram_gib=vram, ram_gib=gib), {**asked, "reserve_mib": reserve, "device": "cuda"}
    few, many = (plan_of_load(facts[name], with_more(machine, ram=int(n * GIB)), **options) for n in (0, more))
    assert many.fits or not few.fits, many.shortfalls
    assert many.verdict == FITS or few.verdict != FITS
    adds_up(many)


def disk_bytes(p: Plan) -> float:
    return sum(d.bytes_per_token for d in p.disk if d.what == "experts")


@settings(deadline=None, max_examples=12)
@given(name=st.sampled_from(NAMES), vram=st.one_of(st.none(), st.floats(6.5, 10)), gib=st.floats(6, 34),
       sessions=st.integers(2, 3))  # fmt: skip
def test_a_remedy_after_which_experts_come_from_disk_says_so(facts, name, vram, gib, sessions):
    machine = Machine.describe(vram_gib=vram, ram_gib=gib)
    asked = {"context": 131_072, "sessions": sessions, "device": "cpu" if vram is None else "cuda"}
    p = plan_of_load(facts[name], machine, **asked)
    if p.verdict != DOES_NOT_FIT:
        return
    told = [" from disk a token)" in text for text in p.remedies[:-1]]
    assert told == sorted(told), "those that cure come first"
    for text, reads in zip(p.remedies, told, strict=False):
        option, _, value = text.split(" (")[0].partition("=")
        value = value.strip('"')
        q = plan_of_load(facts[name], machine, **{**asked, option: int(value) if value.isdigit() else value})
        assert q.fits and (q.verdict == NEEDS_DISK) == reads, (text, q.verdict)
        if reads:
            assert f"reads {amount(int(disk_bytes(q)))} of experts from disk a token)" in text


def test_a_remedy_that_cures_stands_before_a_cheaper_one_that_does_not(facts):
    """A smaller KV cache leaves too little RAM for the experts, a session less enough of it."""
    asked = {"context": 65_536, "kv": "f16", "sessions": 2, "device": "cuda"}
    p = plan_of_load(facts["Q2_0"], Machine.describe(vram_gib=6.6, ram_gib=36.75), **asked)
    assert p.verdict == DOES_NOT_FIT and p.remedies[0] == "sessions=1"
    assert re.fullmatch(r'kv="int8" \(half the KV cache, reads \d+ MiB of experts from disk a token\)', p.remedies[1])


def test_a_table_is_mapped_where_only_that_fits(facts):
    """Reading past the page cache takes buffers; a mapped table takes what is left."""
    m, machine, asked = facts["Q2_0"], Machine.describe(ram_gib=5), {"context": 4096, "device": "cpu"}
    plans = {mode: plan_of_load(m, machine, ngram=mode, **asked) for mode in ("mapped", "direct", "auto")}
    lacks = {mode: missing(p, "ram") for mode, p in plans.items()}
    assert 0 < lacks["mapped"] == lacks["auto"] < lacks["direct"], "the less of both is what is missing"
    for more, mode, fits in ((lacks["mapped"] - 8192, "mapped", False), (lacks["mapped"], "mapped", True),
                             (lacks["direct"] - 8192, "mapped", True), (lacks["direct"], "direct", True),
                             (128 * GIB, "mapped", True)):  # fmt: skip
        p = plan_of_load(m, with_more(machine, ram=more), **asked)
        assert (p.ngram, p.fits) == (mode, fits), more


def test_where_both_memories_are_short_one_remedy_names_both(facts):
    machine, options = Machine.describe(vram_gib=5, ram_gib=8), {"context": 4096, "experts": "pinned", "slots": 4000}
    p = plan_of_load(facts["Q2_0"], machine, **options)
    assert [s.device for s in p.shortfalls] == ["vram", "ram"]
    assert "MiB more VRAM and " in p.remedies[-1] and "MiB more RAM" in p.remedies[-1]
    vram, ram_bytes, _ = bought(p.remedies[-1])
    assert not plan_of_load(facts["Q2_0"], with_more(machine, vram), **options).fits
    assert plan_of_load(facts["Q2_0"], with_more(machine, vram, ram_bytes), **options).fits


@pytest.mark.parametrize("options", [{"experts": "pinned"}, {"experts": "resident"}, {"pcie_share": 0.5}])
def test_what_wsl_does_not_lock_is_no_question_of_memory(facts, options):
    machine = Machine.describe(vram_gib=12, ram_gib=128, wsl=True)
    p = plan_of_load(facts["Q2_0"], machine, context=4096, **options)
    (lacks,) = p.shortfalls
    assert lacks.free_bytes == GIB and "WSL" in str(lacks) and not any("more" in text for text in p.remedies)
    lifts = [text for text in p.remedies if text in ('experts="auto"', "pcie_share=0")]
    assert plan_of_load(facts["Q2_0"], machine, **{"context": 4096, **options, **bought(lifts[0])[2]}).fits


def test_remedies_of_a_plan_for_all_experts_keep_what_was_asked(facts):
    """A share over PCIe means nothing there, but it does with the slots that a remedy leaves."""
    machine = Machine.describe(vram_gib=8, ram_gib=16)
    asked = {"context": 4096, "slots": 10**6, "pcie_share": 1.0}
    p = plan_of_load(facts["Q2_0"], machine, **asked)
    assert not p.fits and not any(text.startswith("slots=None") for text in p.remedies)
    assert not plan_of_load(facts["Q2_0"], machine, **{**asked, "slots": None}).fits


def test_the_cpu_as_a_remedy_says_what_goes_with_it(facts):
    machine, asked = Machine.describe(vram_gib=4, ram_gib=64), {"context": 4096, "slots": 8, "vram_gib": 3.0}
    p = plan_of_load(facts["Q2_0"], machine, **asked)
    (text,) = [x for x in p.remedies if x.startswith('device="cpu"')]
    assert text == 'device="cpu" (slower, without slots and vram_gib)'
    assert plan_of_load(facts["Q2_0"], machine, context=4096, device="cpu").fits


def test_a_longer_context_than_all_experts_leave_room_for_is_told(facts):
    """With a part of the experts it fits, and that is what a load with it would do."""
    m, machine = facts["Q2_0"], Machine.describe(vram_gib=38, ram_gib=64)
    p = plan_of_load(m, machine)
    assert p.n_slots == m.n_pairs and p.context < p.trained_context == p.largest_context
    note = f"context {p.context:,} of the trained {p.trained_context:,}: the largest that fits beside all experts"
    assert note in p.notes
    assert not plan_of_load(m, machine, context=p.context + 256, slots=m.n_pairs).fits
    longer = plan_of_load(m, machine, context=p.largest_context)
    assert longer.verdict == FITS and longer.n_slots < m.n_pairs


def test_ram_for_experts_but_not_for_what_moves_them_is_used_as_pages(facts):
    """The CPU's experts are then the file's pages: nothing is moved to RAM, and no line says so."""
    m, machine = facts["Q2_0"], Machine.describe(vram_gib=16, ram_gib=40)
    asked = {"context": 32_768, "prefill": "windows"}
    moved = plan_of_load(m, machine, experts="resident", **asked)
    tight = with_more(machine, ram=moved.total_bytes("ram") - 1 - machine.ram_available_bytes)
    assert plan_of_load(m, with_more(tight, ram=1), **asked).experts == "resident"
    p = plan_of_load(m, tight, **asked)
    assert p.verdict == FITS and p.experts == "mapped" and not any(x.line == "swap staging" for x in p.lines)
    adds_up(p)


def test_a_chunk_that_was_asked_for_is_part_of_what_is_needed(facts):
    machine = Machine.describe(vram_gib=5, ram_gib=64)
    plain = plan_of_load(facts["Q2_0"], machine, context=8192, slots=300, prefill="windows", device="cuda")
    chunk = plan_of_load(facts["Q2_0"], machine, context=8192, slots=300, prefill=2048, device="cuda")
    assert missing(chunk, "vram") > missing(plain, "vram") + 16 * MIB
    fitting = with_more(machine, missing(chunk, "vram"))
    assert plan_of_load(facts["Q2_0"], fitting, context=8192, slots=300, prefill=2048).prefill_rows == 2048


def test_a_chunk_where_all_experts_leave_no_room_for_it_takes_the_place_of_some(facts):
    m = facts["Q2_0"]
    machine = Machine.describe(vram_gib=30, ram_gib=64)
    asked = {"context": 8192, "kv": "f16"}
    machine = with_more(machine, missing(plan_of_load(m, machine, slots=m.n_pairs, prefill="windows", **asked), "vram"))
    assert plan_of_load(m, machine, prefill="windows", **asked).n_slots == m.n_pairs
    p = plan_of_load(m, machine, prefill=8192, **asked)
    assert p.fits and p.prefill_rows == 8192 and 0 < p.n_slots < m.n_pairs
    adds_up(p)


def test_little_that_is_lacking_is_told_in_mib(facts):
    m, machine = facts["Q2_0"], Machine.describe(ram_gib=48)
    whole = plan_of_load(m, machine, context=4096, ngram="direct")
    assert whole.verdict == FITS
    tight = with_more(machine, ram=whole.total_bytes("ram") - machine.ram_available_bytes - 5 * MIB)
    p = plan_of_load(m, tight, context=4096, ngram="direct")
    assert p.verdict == NEEDS_DISK and any(n.startswith("RAM lacks 5 MiB for the experts") for n in p.notes)
