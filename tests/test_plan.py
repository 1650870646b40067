"""The plan: all numbers add up on machines one does not have, for every released size, or it refuses with numbers."""

import os
import re
from itertools import cycle, islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.arch.flash_next import session_buffers
from strata.base.errors import BadArgument, DoesNotFit, NoDevice
from strata.base.plan import DOES_NOT_FIT, FITS, MIB, NEEDS_DISK, Plan
from strata.planner import cache_size, estimate, needs, rates, state_bytes
from strata.planner.draft import standard_facts
from strata.planner.facts import classify
from strata.planner.machine import Machine
from strata.planner.memory import plan, read_facts
from tests.header_maker import RELEASES, FactsByRelease, make_release

TINY = Path(__file__).parents[1] / "examples/models/tiny-flash-next/tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("releases")
    return {name: make_release(folder, name, vocabulary=name == "Q2_0") for name in RELEASES}


@pytest.fixture(scope="module")
def facts(files):
    return FactsByRelease({name: read_facts(path) for name, path in files.items()})


# ---- the files that plans are made of


@pytest.mark.parametrize("name", [n for n, r in RELEASES.items() if r.bytes1 is not None])
def test_made_headers_have_the_published_sizes(files, name):
    shard1, shard2 = files[name], Path(str(files[name]).replace("00001-of", "00002-of"))
    assert os.path.getsize(shard1) == pytest.approx(RELEASES[name].bytes1, rel=0.03)
    assert os.path.getsize(shard2) == pytest.approx(RELEASES[name].bytes2, rel=1e-6)
    assert os.stat(shard1).st_blocks * 512 < 64 * MIB, "the data is a hole"


def test_facts_add_up_to_the_file(facts, files):
    for name, m in facts.items():
        g = m.geometry
        assert m.dense_bytes + m.experts_bytes + m.ngram_table_bytes == m.mapped_bytes, name
        assert m.missing_bytes == 0 and m.n_shards == RELEASES[name].shards
        assert (g.L, g.E, g.K, g.D) == (48, RELEASES[name].shape.E, 10, 2560)
    assert facts["Q2_0"].experts_bytes == 33_973_862_400
    assert facts["IQ3_XXS"].experts_bytes == pytest.approx(42_912_972_800, rel=0.005)
    assert {c.name for c in facts["Q2_0"].dense} == {
        "hyper-connections",
        "GDN",
        "attention",
        "indexer",
        "router",
        "shared experts",
        "n-gram block",
    }


def test_every_tensor_of_the_contract_has_a_class(facts):
    from strata.arch.flash_next.contract import required_tensors

    assert all(classify(n.name) != "other" for n in required_tensors(facts["Q2_0"].geometry))


def test_state_prices_are_the_buffers_that_are_allocated(facts):
    for m in (facts["Q2_0"], read_facts(TINY)):
        g = m.geometry
        for context in (256, 4096, 32768):
            for kv in state_bytes.KV_FORMATS:
                buffers = session_buffers(g, context, kv, False)
                keys = sum(b.n_bytes for b in buffers if b.name.endswith("block_keys"))
                cells = sum(b.n_bytes for b in buffers if b.role == "cells") - keys
                assert state_bytes.kv_bytes(g, context, kv) == cells
                assert state_bytes.pooled_key_bytes(g, context) == keys
                assert state_bytes.recurrent_bytes(g) == sum(b.n_bytes for b in buffers if b.role == "recurrent")


# ---- simulated machines


def adds_up(p: Plan) -> None:
    """Everything that must hold of a plan that fits, and of one that does not."""
    for device, free in p.free_bytes.items():
        lines = [line for line in p.lines if line.device == device]
        assert all(0 <= line.held_bytes <= line.n_bytes for line in lines)
        if p.fits:
            assert sum(line.held_bytes for line in lines) == p.total_bytes(device) <= free
    if p.slots:
        cache = sum(s * b for s, b in zip(p.slots, p.slot_bytes, strict=True))
        assert cache == sum(line.n_bytes for line in p.lines if line.line == "expert cache")
        assert all(b % 256 == 0 for b in p.slot_bytes)
    e = p.estimate
    assert e.hit_rate + e.ram_rate + e.disk_rate == pytest.approx(1)
    assert e.decode_ms > 0 and e.limit in e.terms and all(ms >= 0 for ms in e.terms.values())
    assert (p.verdict == DOES_NOT_FIT) == (not p.fits) == bool(p.shortfalls)
    for s in p.shortfalls:
        assert s.needed_bytes > s.free_bytes >= 0
        assert f"{s.needed_bytes / MIB:,.0f} MiB needed" in str(s) and f"{s.free_bytes / MIB:,.0f} MiB free" in str(s)
    if p.verdict != FITS:
        assert 1 <= len(p.remedies) <= 3
    if p.fits:
        assert p.largest_context >= min(p.context, p.trained_context)
        p.require()
    else:
        with pytest.raises(DoesNotFit, match="MiB needed"):
            p.require()


@pytest.mark.parametrize("contexts", [1, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", RELEASES)
def test_every_simulated_machine_starts_or_refuses_with_numbers(facts, name, contexts):
    """Each machine with so many of three contexts, in turn."""
    verdicts, turn = set(), cycle((4096, 32768, 262144))
    for vram in (None, 6, 8, 12, 16, 24, 32):
        for ram in (16, 32, 64, 128):
            machine = Machine.describe(vram_gib=vram, ram_gib=ram)
            for context in islice(turn, contexts):
                p = plan(facts[name], machine, context=context, draft="mtp")
                adds_up(p)
                verdicts.add(p.verdict)
                if vram == 32 and ram == 128:
                    assert p.verdict == FITS
                if name == "UD-Q4_K_XL" and vram == 6:
                    assert p.verdict == DOES_NOT_FIT, "5.5 GB of dense weights and the context do not fit into 6 GiB"
    assert FITS in verdicts and NEEDS_DISK in verdicts


memory = st.floats(4, 48)
contexts = st.sampled_from([256, 1000, 4096, 8192, 8448, 32768, 65536, 131072, 262144])
names = st.sampled_from(sorted(RELEASES))
choices = st.fixed_dictionaries(
    {
        "kv": st.sampled_from(["f16", "int8"]),
        "draft": st.sampled_from(["off", "mtp"]),
        "sessions": st.integers(1, 3),
        "prefill": st.sampled_from(["auto", "windows", 512, 2048]),
    }
)


@settings(deadline=None, max_examples=25)
@given(name=names, vram=memory, more=st.floats(0, 8), context=contexts, options=choices)
def test_more_vram_never_gives_fewer_slots(facts, name, vram, more, context, options):
    small = plan(facts[name], Machine.describe(vram_gib=vram, ram_gib=64), context=context, **options)
    large = plan(facts[name], Machine.describe(vram_gib=vram + more, ram_gib=64), context=context, **options)
    assert large.n_slots >= small.n_slots
    assert large.fits or not small.fits
    adds_up(small)
    adds_up(large)


@settings(deadline=None, max_examples=25)
@given(name=names, vram=memory, a=contexts, b=contexts, options=choices)
def test_longer_context_never_gives_more_slots(facts, name, vram, a, b, options):
    machine = Machine.describe(vram_gib=vram, ram_gib=64)
    short = plan(facts[name], machine, context=min(a, b), **options)
    long = plan(facts[name], machine, context=max(a, b), **options)
    assert long.n_slots <= short.n_slots
    assert short.fits or not long.fits


@settings(deadline=None, max_examples=20)
@given(name=names, ram=st.floats(4, 160), more=st.floats(0, 32), vram=st.one_of(st.none(), memory), context=contexts)
def test_more_ram_never_reads_more_from_disk(facts, name, ram, more, vram, context):
    few = plan(facts[name], Machine.describe(vram_gib=vram, ram_gib=ram), context=context, kv="int8")
    many = plan(facts[name], Machine.describe(vram_gib=vram, ram_gib=ram + more), context=context, kv="int8")
    assert many.estimate.disk_rate <= few.estimate.disk_rate + 1e-12
    assert many.fits or not few.fits
    adds_up(few)


@settings(deadline=None, max_examples=20)
@given(name=names, vram=memory, ram=st.floats(8, 128), kv=st.sampled_from(["auto", "int8", "f16"]))
def test_the_largest_context_fits_and_the_next_does_not(facts, name, vram, ram, kv):
    machine = Machine.describe(vram_gib=vram, ram_gib=ram)
    p = plan(facts[name], machine, context=256, kv=kv)
    top = p.largest_context
    if top:
        assert plan(facts[name], machine, context=top, kv=kv).fits
    if 0 < top < p.trained_context:
        assert not plan(facts[name], machine, context=top + 256, kv=kv).fits
    if not top:
        assert not p.fits


@settings(deadline=None, max_examples=20)
@given(name=names, vram=memory, ram=st.floats(8, 128), context=contexts)
def test_remedies_that_name_an_option_work(facts, name, vram, ram, context):
    machine = Machine.describe(vram_gib=vram, ram_gib=ram)
    p = plan(facts[name], machine, context=context, draft="mtp", sessions=2)
    tried = 0
    for text in p.remedies:
        option, _, value = text.split(" (")[0].partition("=")
        if option in ("kv", "context", "sessions", "draft", "prefill", "checkpoints", "draft_vocabulary", "device"):
            value = value.strip('"')
            changed = {
                "context": context,
                "draft": "mtp",
                "sessions": 2,
                option: int(value) if value.isdigit() else value,
            }
            q = plan(facts[name], machine, **changed)
            assert q.fits and (p.verdict != NEEDS_DISK or q.verdict == FITS), text
            tried += 1
    assert tried <= 3


# ---- published figures


def test_slot_differences_match_the_published_ones(facts):
    published = {4096: 4464, 32768: 4174, 65536: 3809, 131072: 3079, 262144: 1588}
    machine = Machine.describe(vram_gib=12, ram_gib=64)
    ours = {c: plan(facts["Q2_0"], machine, context=c, kv="int8", draft="mtp").n_slots for c in published}
    for a, b in pairwise(published):
        found, stated = ours[a] - ours[b], published[a] - published[b]
        assert found == pytest.approx(stated, rel=0.12 if a == 4096 else 0.03), (a, b, found, stated)
    # The zero point depends on what driver, display and buffers of another program take; ours must be near, not equal.
    assert ours[4096] == pytest.approx(published[4096], rel=0.08), ours
    text = (Path(__file__).parents[1] / "docs/planning.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| \+(\d+) \|$", text, re.M)
    told = [tuple(int(cell.replace(",", "")) for cell in row) for row in rows]
    assert [row[:2] for row in told] == list(published.items())
    for context, stated, planned, zero in told:  # bytes move a little when programs do
        assert planned - stated == zero and ours[context] == pytest.approx(planned, abs=20)


def test_draft_layer_in_its_standard_form_has_the_published_size(facts):
    g = facts["Q2_0"].geometry
    d = standard_facts(g, head_row_bytes=1360)
    indexer = (g.indexer_heads + 1) * g.indexer_dim * g.D // 32 * 34  # in the published files, and not read
    assert (d.dense_bytes + indexer) / MIB == pytest.approx(111, rel=0.01)
    assert d.experts_bytes == 707_788_800
    assert d.head_bytes / MIB == pytest.approx(138, rel=0.01)
    assert d.memory_bytes + d.mapped_bytes == d.dense_bytes + d.experts_bytes


# ---- choices


def test_context_is_the_smaller_of_trained_and_fitting(facts):
    roomy = plan(facts["Q2_0"], Machine.describe(vram_gib=24, ram_gib=64))
    assert roomy.context == roomy.trained_context == 262144 and any("costs" in n for n in roomy.notes)
    tight = plan(facts["Q2_0"], Machine.describe(vram_gib=6, ram_gib=64))
    assert 0 < tight.context < 262144 and any("largest that fits" in n for n in tight.notes) and tight.fits


def test_kv_is_f16_to_8k_and_int8_above(facts):
    machine = Machine.describe(vram_gib=12, ram_gib=64)
    assert plan(facts["Q2_0"], machine, context=8192).kv == "f16"
    assert plan(facts["Q2_0"], machine, context=8193).kv == "int8"


def test_expert_modes(facts):
    m = facts["Q2_0"]
    assert plan(m, Machine.describe(vram_gib=12, ram_gib=64), context=4096).experts == "pinned"
    complement = plan(m, Machine.describe(vram_gib=24, ram_gib=32), context=4096)
    assert complement.experts == "resident" and complement.verdict == FITS
    held = sum(s * b for s, b in zip(complement.slots, m.expert_bytes, strict=True))
    assert 0 <= complement.line("experts (resident)").n_bytes - (m.experts_bytes - held) < 4096, "whole pages"
    little = plan(m, Machine.describe(vram_gib=12, ram_gib=16), context=4096)
    assert little.experts == "mapped" and little.verdict == NEEDS_DISK
    assert little.estimate.disk_rate > 0 and any("disk-bound" in n and "tokens/s" in n for n in little.notes)
    assert any(d.what == "experts" and d.bytes_per_token > 0 for d in little.disk)
    asked = plan(m, Machine.describe(vram_gib=12, ram_gib=32), context=4096, experts="pinned")
    assert not asked.fits and asked.shortfalls[0].device == "ram" and "experts (pinned)" in str(asked.shortfalls[0])
    wsl = plan(m, Machine.describe(vram_gib=12, ram_gib=64, wsl=True), context=4096)
    assert wsl.experts == "mapped" and wsl.estimate.pcie_share == 0 and any("WSL" in n for n in wsl.notes)
    with pytest.raises(NoDevice, match="GPU"):
        plan(m, Machine.describe(ram_gib=64), experts="pinned")


def test_all_experts_in_vram_need_no_ram(facts):
    p = plan(facts["Q2_0"], Machine.describe(vram_gib=80, ram_gib=8), context=4096)
    assert p.verdict == FITS and p.n_slots == 48 * 512 and p.estimate.hit_rate == 1 and p.estimate.ram_rate == 0


def test_sessions_are_priced_each(facts):
    machine = Machine.describe(vram_gib=16, ram_gib=64)
    one, three = (plan(facts["Q2_0"], machine, context=32768, sessions=n) for n in (1, 3))
    for name in ("KV cache", "pooled keys", "recurrent state"):
        assert three.line(name).n_bytes == 3 * one.line(name).n_bytes
    assert three.n_slots < one.n_slots


def test_cpu_only_plans(facts):
    p = plan(facts["Q2_0"], Machine.describe(ram_gib=64), context=4096)
    assert p.device == "cpu" and p.verdict == FITS and p.slots == () and p.n_slots == 0
    assert p.line("weights (mapped)").n_bytes == facts["Q2_0"].mapped_bytes
    assert plan(facts["Q2_0"], Machine.describe(vram_gib=12, ram_gib=64), context=4096, device="cpu").device == "cpu"
    small = plan(facts["Q2_0"], Machine.describe(ram_gib=5), context=4096)
    assert small.verdict == DOES_NOT_FIT
    with pytest.raises(NoDevice, match="cuda:1"):
        plan(facts["Q2_0"], Machine.describe(vram_gib=12), device="cuda:1")
    with pytest.raises(NoDevice, match="slots"):
        plan(facts["Q2_0"], Machine.describe(ram_gib=64), slots=5)


def test_small_card_reserve_rule(facts):
    """Where the full reserve leaves no cache that can lend a prefill chunk, the reserve shrinks, but not below 300 MiB
    and not when the user gave it."""
    m = facts["Q2_0"]
    seen = set()
    for tenth in range(45, 80):
        machine = Machine.describe(vram_gib=tenth / 10, ram_gib=64)
        p, fixed = (plan(m, machine, context=4096, reserve_mib=r) for r in (None, 700))
        reserve = p.line("reserve").n_bytes / MIB
        assert 300 <= reserve <= 700
        assert fixed.line("reserve").n_bytes == 700 * MIB
        if p.fits:
            seen.add("full" if reserve == 700 else "small" if p.prefill_rows else "least")
            if reserve < 700:
                assert any("reserve" in n for n in p.notes)
    assert {"full", "small"} <= seen


def test_prefill_borrows_only_what_the_cache_can_lend(facts):
    for vram in (8, 12, 16, 24, 32):
        p = plan(facts["IQ3_XXS"], Machine.describe(vram_gib=vram, ram_gib=64), context=32768)
        if p.prefill_rows:
            loan = -(
                -needs.prefill_bytes(facts["IQ3_XXS"].geometry, p.prefill_rows, max(p.slot_bytes)) // max(p.slot_bytes)
            )
            assert loan + cache_size.LOAN_KEEP_SLOTS <= p.n_slots and loan <= 0.9 * p.n_slots
            assert any("borrow" in n for n in p.notes) and not any(x.line == "prefill buffers" for x in p.lines)


def test_threads_leave_a_core_beside_a_gpu(facts):
    m = facts["Q2_0"]
    assert plan(m, Machine.describe(ram_gib=64, cores=8), context=4096).threads == 8
    assert plan(m, Machine.describe(vram_gib=12, ram_gib=64, cores=8), context=4096).threads == 7
    crowded = plan(m, Machine.describe(ram_gib=64, cores=8), context=4096, threads=20)
    assert crowded.threads == 20 and any("20 threads" in n for n in crowded.notes)


@pytest.mark.parametrize(
    "bad",
    [
        {"kv": "q4"},
        {"context": 0},
        {"sessions": 0},
        {"device": "gpu"},
        {"experts": "ram"},
        {"slots": -1},
        {"prefill": 100},
        {"prefill": True},
        {"draft": "yes"},
        {"hit_rate": 1.5},
        {"threads": 0},
        {"vram_gib": 0},
        {"reserve_mib": -1},
        {"checkpoints": -1},
        {"context": "4k"},
        {"context": True},
        {"threads": 2.0},
        {"ram_gib": "16"},
        {"device": 0},
    ],
)
def test_options_out_of_range_are_refused(facts, bad):
    with pytest.raises(BadArgument):
        plan(facts["Q2_0"], Machine.describe(vram_gib=12), **bad)


def test_an_unknown_option_names_the_closest(facts):
    with pytest.raises(BadArgument, match="'context'"):
        plan(facts["Q2_0"], Machine.describe(vram_gib=12), contxt=4096)


# ---- estimates


def test_estimate_terms_follow_bandwidths(facts):
    m = facts["Q2_0"]
    many = {"ram_gib": 64, "cores": 64, "cpu_tier": "avx512"}
    slow, fast = (plan(m, Machine.describe(**many, ram_gbps=r), context=4096).estimate for r in (20, 40))
    assert slow.terms["dense weights from RAM"] == pytest.approx(2 * fast.terms["dense weights from RAM"], rel=0.05)
    gpu = Machine.describe(gpu="RTX 5070", ram_gib=64, ram_gbps=60, cpu_tier="avx512")
    none, some, most = (plan(m, gpu, context=4096, hit_rate=h).estimate for h in (0.0, 0.6, 0.95))
    assert none.decode_ms > some.decode_ms > most.decode_ms
    assert some.hit_rate == 0.6 and some.hit_source == "given"
    dense = sum(c.read_bytes for c in (*m.dense, m.head)) / 672e6
    assert some.terms["dense weights from VRAM"] == pytest.approx(dense, rel=0.25), "weights, state and attention"


@settings(deadline=None, max_examples=100)
@given(cpu=st.floats(1, 200), link=st.floats(0.5, 60), ram=st.floats(10, 200))
def test_pcie_split_ends_both_sides_together_and_is_used_only_if_it_pays(cpu, link, ram):
    cpu = min(cpu, ram)
    share = estimate.pcie_split(cpu, link, ram)
    scale = min(1.0, ram / (cpu + link))
    if share:
        assert (1 - share) / (cpu * scale) == pytest.approx(share / (link * scale))
        assert share / (link * scale) <= 0.9 / cpu + 1e-12
    else:
        assert 1 / (scale * (cpu + link)) > 0.9 / cpu - 1e-12


def test_every_type_a_file_may_have_has_a_rate():
    from strata.pack.formats import FORMATS

    for f in FORMATS.values():
        if f.activation != "none":
            assert f.name in rates.CORE_GBPS, f.name
    for by_tier in rates.CORE_GBPS.values():
        assert by_tier[0] <= by_tier[1] <= by_tier[2]
