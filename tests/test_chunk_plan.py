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
from strata.gpu.chunk_lower import ChunkLowering
from strata.gpu.chunk_memory import Area, lives, place
from strata.gpu.chunk_plan import CHUNKS, ChunkPrices, arena_of, chunk_problem, largest_chunk
from strata.gpu.memory import MADE_UP, Memory, aligned
from strata.gpu.prefill_ops import CHUNK_LOWERING
from strata.gpu.slots import ExpertSlots
from strata.gpu.weights import Weights
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.planner.chunks import (
    KEPT_SLOTS,
    LASTING_SHARE,
    LENT_SHARE,
    SLOT_SHARE,
    largest_for,
    lendable_bytes,
    paid_with_slots,
)
from strata.planner.machine import Machine
from strata.planner.memory import facts_of, plan
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


@given(st.integers(0, 10_000), st.integers(256, 20_000), st.integers(0, 200))
def test_the_largest_chunk_that_fits(budget, context, fixed):
    asked = []

    def bytes_of(rows: int) -> int:
        asked.append(rows)
        return fixed + rows

    found = largest_chunk(bytes_of, budget, context)
    fitting = [rows for rows in CHUNKS if rows <= context and fixed + rows <= budget]
    assert found == (max(fitting) if fitting else 0)
    assert len(asked) <= 4


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


@pytest.mark.parametrize(
    ("change", "text"),
    [({"gdn_key_dim": 48}, "keys of 48"), ({"gdn_value_dim": 48}, "values of 48"), ({"dh": 32}, "heads of 32"),
     ({"indexer_dim": 16}, "indexer heads of 16")],
)  # fmt: skip
def test_what_chunks_do_not_take_is_read_by_windows(bundled, change, text):
    gguf, g = bundled
    other = replace(g, **change)
    assert chunk_problem(g) is None and text in chunk_problem(other)
    assert largest_for(gguf, other, 2048, "f16", {"vram": 1 << 40, "ram": 1 << 40}) is None


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
    gguf, g = bundled
    plenty = {"vram": 1 << 34, "ram": 1 << 34}
    whole = largest_for(gguf, g, 2048, "f16", plenty)
    assert whole.rows == 2048 and whole.ring == 0
    exact = {"vram": whole.device_bytes, "ram": whole.staging}
    assert largest_for(gguf, g, 2048, "f16", exact) == whole
    for device in ("vram", "ram"):
        less = largest_for(gguf, g, 2048, "f16", exact | {device: exact[device] - 1})
        assert less.rows == 1536
    assert largest_for(gguf, g, 2048, "f16", plenty | {"vram": 1 << 20}) is None
    few = largest_for(gguf, g, 2048, "f16", plenty, [4] * g.L)
    assert few.rows == 2048 and few.ring > 0 and few.arena == whole.arena


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


def test_a_chunk_is_paid_with_slots(tmp_path):
    """A card that holds a part of the experts: fewer slots, the same reserve, a chunk that fits to the byte."""
    gguf = GgufFile(make_release(tmp_path, "IQ3_XXS"))
    g = read_geometry(gguf)
    facts, machine = facts_of(gguf, g, None), Machine.describe(gpu="RTX 4090")
    o = PlanOptions(device="cuda:0", context=16384)
    windows = plan(facts, machine, replace(o, prefill="windows"))
    made = paid_with_slots(lambda options: plan(facts, machine, options), o, gguf, g)
    assert made.fits and made.prefill_rows >= 2048 and windows.prefill_rows == 0
    chunk, before = made.line("prefill buffers").n_bytes, windows.line("expert cache").n_bytes
    assert chunk <= SLOT_SHARE * before and made.n_slots < windows.n_slots
    assert abs(before - made.line("expert cache").n_bytes - chunk) <= 2 * max(made.slot_bytes)
    assert made.line("reserve").n_bytes == windows.line("reserve").n_bytes
    assert made.total_bytes("vram") <= made.free_bytes["vram"]
    o = replace(o, prefill="windows")
    assert paid_with_slots(lambda options: plan(facts, machine, options), o, gguf, g) == windows


CARDS = [("RTX 5070", None), ("RTX 4060", None), ("RTX 5070", 3000), ("RTX 5070", 100)]


@pytest.mark.parametrize(("card", "slots"), CARDS)
def test_a_chunk_borrows_slots(tmp_path, card, slots):
    """All experts are in RAM: a chunk's buffers lie in slots, few of which it takes for good; some are never lent."""
    gguf = GgufFile(make_release(tmp_path, "IQ3_XXS"))
    g = read_geometry(gguf)
    facts, machine = facts_of(gguf, g, None), Machine.describe(gpu=card)
    o = PlanOptions(device="cuda:0", context=16384, slots=slots)
    windows = plan(facts, machine, replace(o, prefill="windows"))
    made = paid_with_slots(lambda options: plan(facts, machine, options), o, gguf, g)
    assert windows.experts == made.experts == "mapped" and made.fits
    if slots == 100:
        assert lendable_bytes(windows) == 0 and not any(line.kind == "lent" for line in made.lines)
        return
    loan, own = made.line("prefill loan"), made.line("prefill buffers")
    cache = sum(n * size for n, size in zip(made.slots, made.slot_bytes, strict=True))
    assert made.prefill_rows >= 2048 and (loan.kind, loan.held_bytes) == ("lent", 0)
    assert own.n_bytes < loan.n_bytes <= lendable_bytes(made) <= min(LENT_SHARE * cache, cache - KEPT_SLOTS)
    assert made.n_slots == slots if slots else made.n_slots > (1 - 2 * LASTING_SHARE) * windows.n_slots
    assert made.total_bytes("vram") <= made.free_bytes["vram"]
    spare = {"vram": 1 << 40, "ram": 1 << 40, "lent": loan.n_bytes}
    of = largest_for(gguf, g, made.context, made.kv, spare, made.slots)
    assert (of.rows, of.lendable, of.lasting) == (made.prefill_rows, loan.n_bytes, own.n_bytes)
    held = ExpertSlots(expert_layout(gguf, g.L), made.slots, by_table=True)
    held.join_tail(loan.n_bytes)
    assert loan.n_bytes <= held.tail_bytes <= loan.n_bytes + 2 * sum(made.slot_bytes)
