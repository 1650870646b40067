"""Bytes of prefill chunks and the choice of their size; places in the arena."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.program import trunk_program
from strata.arch.flash_next.programs import build_programs
from strata.base.errors import BadArgument
from strata.base.plan import MIB
from strata.gpu import chunk_memory, chunk_plan
from strata.gpu.chunk_lower import ChunkLowering
from strata.gpu.chunk_memory import Area, lives, place
from strata.gpu.chunk_plan import CHUNKS, ChunkPrices, arena_of, chunk_problem
from strata.gpu.layer_kinds import one_of_each
from strata.gpu.memory import MADE_UP, Memory, aligned
from strata.gpu.prefill_ops import CHUNK_LOWERING
from strata.gpu.slots import ExpertSlots
from strata.gpu.weights import Weights
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.planner.chunk_facts import ChunkFacts
from strata.planner.chunks import KEPT_SLOTS, LASTING_SHARE, LENT_SHARE, SLOT_SHARE, lendable_bytes, price_load
from strata.planner.machine import Machine
from strata.planner.memory import facts_of, plan
from strata.planner.of_load import plan_of_load
from strata.planner.options import PlanOptions
from tests.header_maker import make_release
from tests.model_maker import make_wide_model

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 6)), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.integers(1, 5000), spans), min_size=1, max_size=12))
def test_areas_that_live_together_do_not_overlap(made):
    areas = []
    for i, (n_bytes, stretches) in enumerate(made):
        ends, at = [], 0
        for gap, length in stretches:
            ends.append((at + gap, at + gap + length))
            at += gap + length + 1
        areas.append(Area(str(i), n_bytes, ends))
    end = place(areas)
    assert end <= sum(aligned(a.n_bytes) for a in areas)
    assert end >= max(aligned(a.n_bytes) for a in areas)
    for i, a in enumerate(areas):
        assert a.start % 256 == 0 and a.start + a.n_bytes <= end
        for b in areas[:i]:
            together = any(x[0] <= y[1] and y[0] <= x[1] for x in a.spans for y in b.spans)
            assert a.meets(b) == b.meets(a) == together
            assert not together or a.start + a.n_bytes <= b.start or b.start + b.n_bytes <= a.start


@pytest.fixture(scope="module")
def bundled(tiny_path):
    gguf = GgufFile(tiny_path)
    return gguf, read_geometry(gguf)


def prices_of(gguf, g):
    experts = expert_layout(gguf, g.L)
    return ChunkPrices(lambda rows: trunk_program(g, rows, 2048, "int8", advance=True), Tensors(gguf), experts)


def test_bytes_grow_with_the_rows_and_the_arena_saves_most(bundled):
    gguf, g = bundled
    prices, found = prices_of(gguf, g), {}
    for rows in (256, 512, 1024):
        found[rows] = prices.of(rows)
        programs = build_programs(g, 2048, "int8", chunk_rows=rows)
        memory = Memory(programs.windows.values(), [programs.chunk.buffers["streams"]])
        for name in ("rope", "ngram.ticket"):
            memory.add_table(name, MADE_UP)
        weights = Weights(Tensors(gguf), expert_layout(gguf, g.L))
        assert found[rows].arena == arena_of(programs.chunk, memory, weights, 2048).n_bytes
        buffers = [b for b in programs.chunk.buffers.values() if b.role == "scratch" and b.name != "streams"]
        assert found[rows].arena < 0.75 * sum(b.n_bytes for b in buffers)
        assert found[rows].streams == rows * g.CD * 4 and found[rows].staging == 2 * rows * g.ngram.width * 4
    assert found[256].device_bytes < found[512].device_bytes < found[1024].device_bytes
    assert found[1024].arena < 4 * found[256].arena


def test_prices_place_nothing_before_a_size_is_asked_for(bundled, monkeypatch):
    """What programs ask for is enough: their own places are nobody's, and each takes as long as a price."""
    calls = []
    monkeypatch.setattr(chunk_memory, "place", lambda *a: calls.append(a) or 0)
    prices = prices_of(*bundled)
    monkeypatch.undo()
    assert not calls and prices.of(256).arena > 0


@pytest.mark.parametrize(
    ("change", "text"),
    [({"gdn_key_dim": 48}, "keys of 48"), ({"gdn_value_dim": 48}, "values of 48"), ({"dh": 32}, "heads of 32"),
     ({"indexer_dim": 16}, "indexer heads of 16")],
)  # fmt: skip
def test_what_chunks_do_not_take_is_read_by_windows(bundled, change, text):
    gguf, g = bundled
    other = replace(g, **change)
    assert chunk_problem(g) is None and text in chunk_problem(other)
    assert text in ChunkFacts(gguf, other, expert_layout(gguf, g.L)).problem
    facts = replace(facts_of(gguf, g, None), chunks=ChunkFacts(gguf, other, expert_layout(gguf, g.L)))
    machine = Machine.describe(gpu="RTX 4090")
    made = price_load(facts, machine, machine.gpus[0], PlanOptions(context=2048), 2048)
    assert made.prefill_rows == 0 and made.notes[-1].startswith("prompts are read by windows: chunks do not take")
    assert text in made.notes[-1]
    with pytest.raises(BadArgument, match=text):
        price_load(facts, machine, machine.gpus[0], PlanOptions(context=2048, prefill=512), 2048)


def test_a_buffer_lives_from_its_writer_to_its_last_reader(bundled):
    _, g = bundled
    program = build_programs(g, 512, "f16", chunk_rows=256).chunk
    found = lives(program, ["u", "hc.normed", "qsa.q", "tokens", "streams"])
    assert found["tokens"] == [(0, 0)] and found["streams"] == [(0, len(program.ops) - 1)]
    assert len(found["u"]) == len(found["hc.normed"]) == 2 * g.L and len(found["qsa.q"]) == len(g.qsa_layers)
    for name in ("u", "hc.normed", "qsa.q"):
        for first, last in found[name]:
            ops = program.ops
            assert name in ops[first].buffers.values() and name in ops[last].buffers.values() and first < last


def test_chunks_are_whole_cells(bundled):
    _, g = bundled
    with pytest.raises(BadArgument, match="rows of a prefill chunk"):
        build_programs(g, 512, "f16", chunk_rows=300)
    assert build_programs(g, 512, "f16").chunk is None


def test_a_plan_gets_the_largest_chunk_that_fits(bundled):
    """Every expert in VRAM: to the byte, in VRAM and in RAM."""
    gguf, g = bundled
    facts, o = facts_of(gguf, g, None), PlanOptions(context=2048)
    machine = Machine.describe(gpu="RTX 4090", ram_gib=16)

    def made(vram: int, ram: int):
        gpu = replace(machine.gpus[0], free_bytes=vram)
        return price_load(facts, replace(machine, ram_available_bytes=ram), gpu, o, 2048)

    free = machine.gpus[0].free_bytes, machine.ram_available_bytes
    whole = made(*free)
    chunk = facts.chunks.of(2048, 2048, shared=False)
    assert whole.prefill_rows == 2048 and sum(whole.allotment.slots) == facts.n_pairs and chunk.ring == 0
    lines = {x.line: x.n_bytes for x in whole.lines}
    assert (lines["prefill buffers"], lines["prefill staging"]) == (chunk.device_bytes, chunk.staging)
    taken = sum(x.held_bytes for x in whole.lines if x.device == "vram")
    assert made(taken, free[1]).prefill_rows == 2048
    assert made(taken - 1, free[1]).prefill_rows == 1536
    rows = []
    for ram in range(1 << 28, 0, -(2 << 20)):
        p = made(free[0], ram)
        if not p.shortfalls:
            rows.append(p.prefill_rows)
            assert sum(x.held_bytes for x in p.lines if x.device == "ram") <= ram
    assert rows[0] == 2048 and len(set(rows)) > 2 and rows == sorted(rows, reverse=True)
    few = facts.chunks.of(2048, 2048, shared=True)
    assert few.ring > 0 and few.arena == chunk.arena


@pytest.mark.parametrize("release", ["Q2_0", "IQ2_XS", "UD-Q4_K_XL", "bundled"])
def test_a_chunk_is_priced_by_one_branch_of_every_kind(bundled, tmp_path, monkeypatch, release):
    """As by all of them, at any context, with experts that come over the link and without."""
    gguf = bundled[0] if release == "bundled" else GgufFile(make_release(tmp_path, release, vocabulary=False))
    g = read_geometry(gguf)
    experts = expert_layout(gguf, g.L)
    found = ChunkFacts(gguf, g, experts)
    whole = trunk_program(g, 256, 256, "f16", advance=True)
    assert len(one_of_each(whole, Weights(Tensors(gguf), experts)).ops) < len(whole.ops)
    found.of(256, 256, True)
    monkeypatch.setattr(chunk_plan, "one_of_each", lambda program, weights: program)
    for context, slots in ((512, None), (32768, ExpertSlots(experts, by_table=True))):
        program_of = lambda rows: trunk_program(g, rows, context, "f16", advance=True)  # noqa: B023, E731
        prices = ChunkPrices(program_of, Tensors(gguf), experts, slots)
        for rows in CHUNKS:
            assert found.of(rows, context, slots is not None) == prices.of(rows), (rows, context)


def test_grids_of_the_largest_chunk_are_within_what_devices_take(tmp_path):
    gguf = GgufFile(make_wide_model(tmp_path, layers=4, experts=512, period=4))
    g = read_geometry(gguf)
    programs = build_programs(g, 32768, "int8", chunk_rows=8192)
    weights = Weights(Tensors(gguf), expert_layout(gguf, 4))
    memory = Memory(programs.windows.values(), [programs.chunk.buffers["streams"]])
    for name in ("rope", "ngram.ticket"):
        memory.add_table(name, MADE_UP)
    arena = arena_of(programs.chunk, memory, weights, 32768)
    arena.lie_at(1 << 40)
    launches = ChunkLowering(programs.chunk, arena, weights, 32768, 8192).run(CHUNK_LOWERING).launches
    assert len(launches) > 300
    for one in launches:
        assert max(one.grid[1:]) <= 65_535 and one.grid[0] < 2**31, one.kernel
    assert arena.n_bytes < 2 << 30


def _released(tmp_path, release="IQ3_XXS"):
    gguf = GgufFile(make_release(tmp_path, release))
    g = read_geometry(gguf)
    return gguf, g, facts_of(gguf, g, None)


def test_a_chunk_is_paid_with_slots(tmp_path):
    """RAM holds what VRAM does not: fewer slots, the same reserve, and more experts in RAM."""
    _, _, facts = _released(tmp_path)
    machine = Machine.describe(gpu="RTX 4090", ram_gib=36)
    o = PlanOptions(device="cuda:0", context=16384)
    windows = plan(facts, machine, replace(o, prefill="windows"))
    made = plan_of_load(facts, machine, o)
    assert made.fits and made.experts == windows.experts == "resident"
    assert made.prefill_rows >= 2048 and windows.prefill_rows == 0
    chunk, before = made.line("prefill buffers").n_bytes, windows.line("expert cache").n_bytes
    assert chunk <= SLOT_SHARE * (before + max(made.slot_bytes)) and made.n_slots < windows.n_slots
    assert abs(before - made.line("expert cache").n_bytes - chunk) <= 2 * max(made.slot_bytes)
    assert made.line("reserve").n_bytes == windows.line("reserve").n_bytes
    assert made.line("experts (resident)").n_bytes > windows.line("experts (resident)").n_bytes
    assert made.total_bytes("vram") <= made.free_bytes["vram"]
    alone = plan_of_load(facts, machine, replace(o, prefill="windows"))
    assert [(x.line, x.n_bytes) for x in alone.lines] == [(x.line, x.n_bytes) for x in windows.lines]


CARDS = [("RTX 5070", None), ("RTX 4060", None), ("RTX 5070", 3000), ("RTX 5070", 100)]


@pytest.mark.parametrize(("card", "slots"), CARDS)
def test_a_chunk_borrows_slots(tmp_path, card, slots):
    """Slots need not stay: a chunk's buffers lie in them, few of which it takes for good; some are never lent."""
    gguf, g, facts = _released(tmp_path)
    machine = Machine.describe(gpu=card)
    o = PlanOptions(device="cuda:0", context=16384, slots=slots)
    windows = plan(facts, machine, replace(o, prefill="windows"))
    made = plan_of_load(facts, machine, o)
    assert windows.experts == made.experts == "mapped" and made.fits
    lendable = lendable_bytes(made.slots, made.slot_bytes, made.experts)
    if slots == 100:
        assert lendable == 0 and not any(line.kind == "lent" for line in made.lines)
        return
    loan, own = made.line("prefill loan"), made.line("prefill buffers")
    cache = sum(n * size for n, size in zip(made.slots, made.slot_bytes, strict=True))
    assert made.prefill_rows >= 2048 and (loan.kind, loan.held_bytes) == ("lent", 0)
    assert own.n_bytes < loan.n_bytes <= lendable <= min(LENT_SHARE * cache, cache - KEPT_SLOTS)
    assert made.n_slots == slots if slots else made.n_slots > (1 - 2 * LASTING_SHARE) * windows.n_slots
    assert made.total_bytes("vram") <= made.free_bytes["vram"]
    of = facts.chunks.of(made.prefill_rows, 16384, shared=True)
    assert (of.lendable, of.lasting) == (loan.n_bytes, own.n_bytes)
    held = ExpertSlots(expert_layout(gguf, g.L), made.slots, by_table=True)
    held.join_tail(loan.n_bytes)
    assert loan.n_bytes <= held.tail_bytes <= loan.n_bytes + 2 * sum(made.slot_bytes)


def test_a_small_card_gives_up_a_part_of_the_reserve_for_a_chunk(tmp_path):
    """Not below 300 MiB, and not one that was given."""
    _, _, facts = _released(tmp_path, "Q2_0")
    seen = set()
    for tenth in range(48, 66):
        machine = Machine.describe(vram_gib=tenth / 10, ram_gib=64)
        p, fixed = (plan_of_load(facts, machine, context=4096, device="cuda", reserve_mib=r) for r in (None, 700))
        reserve = p.line("reserve").n_bytes / MIB
        assert 300 <= reserve <= 700 and fixed.line("reserve").n_bytes == 700 * MIB
        if p.fits and reserve < 700:
            seen.add("chunk" if p.prefill_rows else "slot")
            assert any("reserve" in note for note in p.notes)
        assert not fixed.fits or p.n_slots >= fixed.n_slots
    assert seen == {"chunk", "slot"}


@pytest.mark.parametrize(("rows", "vram", "fits"), [(512, 8, True), (8192, 8, True), (8192, 6.2, False)])
def test_a_chunk_that_is_asked_for_is_there_or_lacks(tmp_path, rows, vram, fits):
    _, _, facts = _released(tmp_path, "Q2_0")
    machine = Machine.describe(vram_gib=vram, ram_gib=64)
    made = plan_of_load(facts, machine, context=4096, prefill=rows)
    assert made.device == "cuda:0" and made.fits == fits
    if fits:
        assert made.prefill_rows == rows
    else:
        assert made.shortfalls[0].line == f"prefill chunk of {rows:,} rows" and made.remedies[0].startswith("prefill=")
        enough = Machine.describe(vram_gib=vram + made.shortfalls[0].missing_bytes / 2**30 + 0.01, ram_gib=64)
        assert plan_of_load(facts, enough, context=4096, prefill=rows).prefill_rows == rows
