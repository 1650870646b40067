"""Accidents that planning must never repeat; each test fails if its lesson is unlearned."""

from dataclasses import replace

import numpy as np
import pytest

from strata.arch.flash_next import session_buffers
from strata.arch.flash_next.geometry import read_geometry
from strata.base.errors import DoesNotFit
from strata.base.plan import MIB
from strata.pack.gguf_file import GgufFile
from strata.pack.ngram import TABLE_NAME, NgramTable
from strata.pack.ngram_reader import direct_problem
from strata.pack.profile import ExpertProfile
from strata.planner import needs, state_bytes
from strata.planner.machine import Machine
from strata.planner.memory import plan, read_facts
from strata.planner.slots import admission_queue, allot, slot_sizes
from strata.planner.vram_bytes import ALIGNMENT
from tests.header_maker import RELEASES, make_release

ROOMY = Machine.describe(vram_gib=16, ram_gib=64)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lessons")
    return {
        name: read_facts(make_release(folder, name, vocabulary=False)) for name in ("Q2_0", "IQ3_XXS", "UD-Q4_K_XL")
    }


def _vram(p):
    return [line for line in p.lines if line.device == "vram"]


def test_indexer_cache_is_sized_by_its_one_key_head(facts):
    """Sized by the four query heads it is four times too large, and no check fires because the budget only gets
    tighter."""
    g = facts["Q2_0"].geometry
    more_queries = replace(g, indexer_heads=4 * g.indexer_heads)
    assert state_bytes.pooled_key_bytes(g, 262144) == state_bytes.pooled_key_bytes(more_queries, 262144) == 402_653_184
    keys = [b for b in session_buffers(g, 262144, "int8", False) if b.name.endswith("block_keys")]
    assert plan(facts["Q2_0"], ROOMY, context=262144).line("pooled keys").n_bytes == sum(b.n_bytes for b in keys)


def test_scales_have_two_bytes(facts):
    """Counted as four, every int8 cell and every quantised row is too large."""
    g = facts["Q2_0"].geometry
    assert state_bytes.kv_cell_bytes(g, "int8") == 2 * g.Hkv * g.dh + 2 * g.Hkv * (g.dh // 64) * 2 == 1056
    assert state_bytes.kv_cell_bytes(g, "f16") == 2048
    assert facts["Q2_0"].expert_bytes == (1_382_400,) * 48, (
        "3 x 640 x 2560 values in blocks of 16 code bytes and one f16"
    )


def test_dense_weights_keep_their_size_in_vram(facts):
    """Nothing is widened on the way: BF16 stays BF16, block scales stay f16; only alignment is added, and no tensor
    takes more of it than its own."""
    for m in facts.values():
        lines = [
            x
            for x in _vram(plan(m, Machine.describe(vram_gib=48, ram_gib=128), context=4096))
            if x.line.startswith(("weights", "LM head"))
        ]
        tensors = sum(c.n_tensors for c in (*m.dense, m.embedding, m.head))
        assert 0 <= sum(x.n_bytes for x in lines) - m.dense_bytes < tensors * ALIGNMENT


def test_no_blob_size_is_a_constant_of_the_model(facts):
    """Priced by the largest blob the cache holds fewer experts than fit, priced by the first layer's it does not
    fit."""
    m = facts["IQ3_XXS"]
    p = plan(m, ROOMY, context=4096)
    assert len(set(m.expert_bytes)) > 2 and p.slot_bytes == slot_sizes(m.expert_bytes)
    cache = p.line("expert cache").n_bytes
    assert cache == sum(n * b for n, b in zip(p.slots, p.slot_bytes, strict=True))
    room = p.free_bytes["vram"] - p.total_bytes("vram") + cache
    assert p.n_slots > room // max(p.slot_bytes), "by bytes more fit than by the largest blob"
    assert p.n_slots < room // min(p.slot_bytes)
    assert m.experts_bytes == 512 * sum(m.expert_bytes) != 48 * 512 * m.expert_bytes[0]


def test_slots_stop_at_the_first_pair_that_would_pass(facts):
    sizes = slot_sizes(facts["IQ3_XXS"].expert_bytes)
    queue = admission_queue(sizes, 512, None)
    for room in (0, sizes[0] - 1, sizes[0], sum(sizes), 10**9 + 12345, int(queue.ends[-1]), 1 << 50):
        a = allot(queue, room)
        assert a.n_bytes == sum(n * b for n, b in zip(a.slots, sizes, strict=True)) <= room
        if a.n_slots < len(queue):
            assert a.n_bytes + sizes[int(queue.layers[a.n_slots])] > room


def test_the_head_comes_before_the_cache_and_the_cache_comes_last(facts):
    """A head loaded after a cache that took everything leaves a card full, and the error appears three steps later."""
    for draft in ("off", "mtp"):
        names = [x.line for x in _vram(plan(facts["Q2_0"], ROOMY, context=32768, draft=draft))]
        assert names[-1] == "expert cache" and names[-2] == "reserve"
        assert (
            names.index("LM head")
            < names.index("logits")
            < names.index("graphs and kernels")
            < names.index("expert cache")
        )


@pytest.mark.parametrize("mode", ["mapped", "direct"])
def test_tickets_of_prompts_of_all_lengths_are_priced(mode, tiny_path):
    """Rows of a chunk on their way take tens of MB, and a table keeps what it once took."""
    with GgufFile(tiny_path) as gguf:
        if mode == "direct" and (problem := direct_problem(gguf, TABLE_NAME)):
            pytest.skip(problem)
        g = read_geometry(gguf)
        table = NgramTable(gguf, g.ngram, 0, mode=mode)
        try:
            rng = np.random.default_rng(0)
            ids = 0
            for rows in (1, 3, 8, 256, 511, 2048, 8192):
                asked = table.row_ids(rng.integers(0, g.V, rows), -1, -1)
                table.fetch(asked)
                ids = asked.nbytes
            buffers = [b for of_size in table._free.values() for b in of_size]
            arrays = [a for b in buffers for a in (b.places, b.index, b.unique, b.landed, b.staging, *b.pages, b.job)]
            taken = ids + sum(a.nbytes for a in arrays if a is not None)
            priced = needs.ticket_line(g, table.row_bytes, 8192, mode == "direct").n_bytes
        finally:
            table.close()
    assert 0.5 * priced < taken <= priced
    few = needs.ticket_line(g, table.row_bytes, 256, mode == "direct").n_bytes
    assert few < priced / 16


def test_everything_that_is_allocated_later_is_priced(facts):
    """The cache is what is left after all else, so each further allocation costs its bytes in slots, not in a full
    card."""
    m = facts["Q2_0"]
    plain, drafted = (plan(m, ROOMY, context=32768, draft=d) for d in ("off", "mtp"))
    names = {x.line for x in plain.lines}
    assert {
        "CUDA context",
        "graphs and kernels",
        "window scratch",
        "logits",
        "RoPE table",
        "reserve",
        "checkpoints",
        "conversations",
        "workers",
        "n-gram cache",
        "n-gram tickets",
        "exchange",
        "system floor",
    } <= names
    more = sum(x.n_bytes for x in drafted.lines if x.line.startswith("draft"))
    assert more > 900 * MIB
    lost = (plain.n_slots - drafted.n_slots) * max(plain.slot_bytes)
    assert more <= lost + max(plain.slot_bytes) and lost - more < 2 * MIB + drafted.line("logits").n_bytes
    for p in (plain, drafted):
        assert 0 <= p.free_bytes["vram"] - p.total_bytes("vram") < max(p.slot_bytes), (
            "the cache takes exactly what is left"
        )


def test_a_larger_draft_head_is_paid_by_the_cache(facts):
    """A draft head that grew by 110 MiB once pushed 16 GB cards below the point where they stall."""
    small, large = (
        plan(facts["Q2_0"], ROOMY, context=32768, draft="mtp", draft_vocabulary=n) for n in (40_525, 106_299)
    )
    assert large.line("draft head").n_bytes - small.line("draft head").n_bytes > 110 * MIB
    assert large.n_slots < small.n_slots and large.line("reserve") == small.line("reserve")


def test_a_refusal_says_needed_free_and_short_and_what_takes_it(facts):
    p = plan(facts["Q2_0"], Machine.describe(vram_gib=5, ram_gib=64), context=131072, draft="mtp")
    (s,) = p.shortfalls
    with pytest.raises(DoesNotFit) as refused:
        p.require()
    text = str(refused.value)
    for mib in (s.needed_bytes, s.free_bytes, s.missing_bytes):
        assert f"{mib / MIB:,.0f} MiB" in text
    session = sum(x.n_bytes for x in p.lines if x.line in ("KV cache", "pooled keys", "recurrent state", "RoPE table"))
    draft = sum(x.n_bytes for x in p.lines if x.line.startswith("draft"))
    assert f"sessions {session / MIB:,.0f} MiB" in text and f"draft layer and head {draft / MIB:,.0f} MiB" in text
    assert "slots" in text and refused.value.advice and refused.value.found and refused.value.needed
    assert s.needed_bytes == sum(x.n_bytes for x in _vram(p)) + max(p.slot_bytes), "one slot beyond every priced line"


def test_what_was_asked_for_is_never_made_smaller(facts):
    m = facts["Q2_0"]
    p = plan(m, Machine.describe(vram_gib=8, ram_gib=64), context=4096, slots=9000)
    assert not p.fits and "expert cache" in str(p.shortfalls[0])
    assert p.shortfalls[0].needed_bytes >= 9000 * 1_382_400
    assert p.n_slots == 0 and any("slots" in r for r in p.remedies)
    assert not plan(m, Machine.describe(vram_gib=5, ram_gib=64), context=262144).fits
    assert not plan(m, Machine.describe(vram_gib=12, ram_gib=24), context=4096, experts="pinned").fits
    assert not plan(m, Machine.describe(vram_gib=6, ram_gib=64), context=4096, prefill=8192).fits
    assert not plan(m, Machine.describe(vram_gib=6, ram_gib=64), context=4096, reserve_mib=4000).fits
    exact = plan(m, ROOMY, context=4096, slots=1000)
    assert exact.fits and exact.n_slots == 1000


def test_what_is_chosen_automatically_may_shrink_and_says_so(facts):
    p = plan(facts["Q2_0"], Machine.describe(vram_gib=6, ram_gib=64), draft="mtp")
    assert p.fits and p.context < p.trained_context
    assert any(f"context {p.context:,}" in n for n in p.notes)
    if not p.prefill_rows:
        assert any("by windows" in n for n in p.notes)
    if p.line("reserve").n_bytes < 700 * MIB:
        assert any("reserve" in n for n in p.notes)


def test_slots_never_exceed_the_ranked_pairs(facts):
    m = facts["Q2_0"]
    pairs = np.array([(l, e) for e in range(20) for l in range(48)], np.uint16)
    profile = ExpertProfile(48, 512, len(pairs), pairs)
    p = plan(m, ROOMY, context=4096, profile=profile, slots=5000)
    assert p.n_slots == 960 and p.ranked and any("960 pairs are ranked" in n for n in p.notes)
    assert plan(m, ROOMY, context=4096, profile=profile).n_slots == 960
    everything = plan(m, Machine.describe(vram_gib=80, ram_gib=64), context=4096)
    assert everything.n_slots == m.n_pairs, "no slot beyond the last expert"


def test_a_skewed_profile_gives_layers_different_slots_and_the_same_bytes(facts):
    m = facts["IQ3_XXS"]
    rng = np.random.default_rng(5)
    order = rng.permutation(48 * 512)
    order = order[np.argsort(order // 512 * rng.random(len(order)), kind="stable")]
    pairs = np.stack([order // 512, order % 512], 1).astype(np.uint16)
    p = plan(m, ROOMY, context=4096, profile=ExpertProfile(48, 512, len(pairs), pairs))
    assert max(p.slots) > 2 * min(p.slots) + 1
    taken = np.bincount(pairs[: p.n_slots, 0], minlength=48)
    assert p.slots == tuple(taken.tolist()), "exactly the hottest pairs"
    assert 0 <= p.free_bytes["vram"] - p.total_bytes("vram") < max(p.slot_bytes)


def test_cost_follows_the_configured_context(facts):
    """KV is allocated at load for every cell; a context that is never used costs the same slots."""
    m = facts["Q2_0"]
    for context in (4096, 32768, 262144):
        p = plan(m, Machine.describe(vram_gib=24, ram_gib=64), context=context, kv="int8")
        assert p.line("KV cache").n_bytes == 12 * context * 1056


def test_an_estimate_never_counts_an_expert_twice(facts):
    """Hits, RAM and disk are shares of one token's routed experts; bytes follow from them."""
    for ram in (12, 20, 40, 80):
        for vram in (8, 16, 32):
            p = plan(facts["Q2_0"], Machine.describe(vram_gib=vram, ram_gib=ram), context=4096)
            e = p.estimate
            assert e.hit_rate + e.ram_rate + e.disk_rate == pytest.approx(1)
            routed = facts["Q2_0"].routed_bytes_per_token
            from_disk = next((d.bytes_per_token for d in p.disk if d.what == "experts"), 0)
            assert e.ram_bytes + from_disk == pytest.approx((1 - e.hit_rate) * routed)


def test_releases_of_the_tests_are_the_released_ones():
    assert {"Q2_0", "IQ2_XS", "IQ3_XXS", "IQ3_S", "Coder-IQ1_M"} <= set(RELEASES)
