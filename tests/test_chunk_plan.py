"""Bytes of prefill chunks and the choice of their size; places in the arena."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.base.errors import BadArgument
from strata.gpu.chunk_memory import Area, lives, place
from strata.gpu.chunk_plan import CHUNKS, chunk_bytes, largest_chunk
from strata.gpu.memory import aligned
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors

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


def test_bytes_grow_with_the_rows_and_the_arena_saves_most(bundled):
    gguf, g = bundled
    found = {}
    for rows in (256, 512, 1024):
        programs = build_programs(g, 2048, "int8", chunk_rows=rows)
        found[rows] = chunk_bytes(programs, Tensors(gguf), expert_layout(gguf, g.L))
        buffers = [b for b in programs.chunk.buffers.values() if b.role == "scratch" and b.name != "streams"]
        assert found[rows].arena < 0.75 * sum(b.n_bytes for b in buffers)
        assert found[rows].streams == rows * g.CD * 4 and found[rows].staging == rows * g.ngram.width * 4
    assert found[256].device_bytes < found[512].device_bytes < found[1024].device_bytes
    assert found[1024].arena < 4 * found[256].arena


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
