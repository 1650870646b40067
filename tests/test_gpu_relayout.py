"""The device layout of quantised matrices: nothing lost, nothing added, aligned for 16-byte loads."""

import numpy as np
import pytest

from strata.base.errors import BadArgument
from strata.gpu.gemv import tables
from strata.gpu.relayout import LAYOUTS, _pieces, relayout, relayout_bytes, restore, row_block_bytes
from strata.gpu.relayout_kernel import bit_map, relayout_launches
from strata.pack.formats import FORMATS, by_name
from tests.gpu.run_on_cpu import address, needs_compiler, run_all
from tests.test_gpu_gemv import aligned

QUANTISED = [f for f in FORMATS.values() if f.group]


@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
@pytest.mark.parametrize("rows", [1, 4, 11])
def test_round_trip(format, rows):
    rng = np.random.default_rng(rows)
    for blocks in range(1, 20):
        raw = rng.integers(0, 256, (rows, blocks * format.block_bytes), dtype=np.uint8)
        K = blocks * format.block_values
        relaid = relayout(format, raw)
        assert relaid.dtype == np.uint8 and relaid.shape == (relayout_bytes(format, rows, K),)
        np.testing.assert_array_equal(restore(format, relaid, rows, K), raw)


@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
def test_size_is_that_of_the_file(format):
    """At widths of models, up to 15 bytes for four rows; a row block can be cut off anywhere."""
    for K in (2560, 10240) if format.group == 256 else (640, 2560, 10240):
        size = row_block_bytes(format, K)
        assert 0 <= size - 4 * format.row_bytes(K) < 16 and size % 16 == 0
        raw = np.random.default_rng(K).integers(0, 256, (12, format.row_bytes(K)), dtype=np.uint8)
        np.testing.assert_array_equal(relayout(format, raw)[size : 2 * size], relayout(format, raw[4:8]))


@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
def test_every_bit_has_one_place(format):
    """A single bit of the file is a single bit of the layout: a chunk is a permutation of bits (some inverted)."""
    layout = LAYOUTS[format.name]
    blocks = layout.steps * layout.blocks
    nothing = relayout(format, np.zeros((4, blocks * format.block_bytes), np.uint8))
    places = set()
    for byte in range(0, blocks * format.block_bytes, 3):
        for bit in range(8):
            raw = np.zeros((4, blocks * format.block_bytes), np.uint8)
            raw[1, byte] = 1 << bit
            changed = np.unpackbits(relayout(format, raw) ^ nothing).nonzero()[0]
            assert len(changed) == 1
            places.add(int(changed[0]))
    assert len(places) == 8 * len(range(0, blocks * format.block_bytes, 3))


def test_sections_are_whole_steps():
    for name, layout in LAYOUTS.items():
        assert sum(items * n for items, n in layout.sections) == layout.blocks * by_name(name).block_bytes


@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
def test_every_load_is_aligned(format):
    """A thread loads what an item holds of a chunk, or of a lone step, at once: the device insists on alignment."""
    layout = LAYOUTS[format.name]
    for n_blocks in range(1, 25):
        at = 0
        for first, n, blocks in _pieces(layout, n_blocks):
            side = layout.steps if first == 0 and n > 1 else 1
            for _ in range(n // side):
                for items, n_bytes in layout.sections:
                    assert side * n_bytes in (1, 2, 4, 8, 16) and at % (side * n_bytes) == 0, (n_blocks, items, n_bytes)
                    at += 4 * side * n_bytes * (items * blocks // layout.blocks)
        assert at == 4 * n_blocks * format.block_bytes
    assert row_block_bytes(format, format.block_values) % 16 == 0


def test_grid_tables_are_those_of_the_formats():
    assert tables.FILE.read_text(encoding="utf-8") == tables.text()
    for name in tables.NAMES:
        bits = tables.BITS[tables.GRID[name].shape[1]]
        fields = tables.packed(name)[:, None] >> (bits * np.arange(tables.GRID[name].shape[1])) & (1 << bits) - 1
        np.testing.assert_array_equal(tables.levels(name)[fields], tables.GRID[name])


def test_refusals():
    with pytest.raises(BadArgument, match="F32"):
        relayout_bytes(by_name("F32"), 4, 64)
    with pytest.raises(BadArgument, match="blocks"):
        relayout(by_name("Q8_0"), np.zeros((4, 35), np.uint8))
    with pytest.raises(BadArgument, match="bytes"):
        restore(by_name("Q8_0"), np.zeros(34, np.uint8), 4, 64)


@needs_compiler
@pytest.mark.parametrize("format", QUANTISED, ids=lambda f: f.name)
def test_the_device_makes_the_same_layout(format):
    rng = np.random.default_rng(format.ggml_id)
    for rows, blocks in ((1, 1), (9, 3), (4, 8), (6, 11), (5, 20)):
        K = blocks * format.block_values
        raw = np.ascontiguousarray(rng.integers(0, 256, (rows, blocks * format.block_bytes), dtype=np.uint8))
        bits, out = (
            aligned(bit_map(format, K).view(np.uint8)),
            aligned(np.full(relayout_bytes(format, rows, K), 7, np.uint8)),
        )
        run_all(relayout_launches(format, address(raw), address(out), rows, K, address(bits)), reverse=rows == 9)
        np.testing.assert_array_equal(out, relayout(format, raw))
        assert (np.lib.stride_tricks.as_strided(out[-1:], (17,))[1:] == 0xA5).all(), "written behind the matrix"
