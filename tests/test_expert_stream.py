"""Experts on their way to a chunk: at every stage all of its experts are where the table says, however memory lies."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.base.errors import BadArgument
from strata.gpu.expert_stream import PLACES, ExpertStream, Stage
from strata.gpu.memory import aligned
from strata.gpu.relayout import relayout, relayout_bytes
from strata.gpu.slots import ExpertSlots
from strata.gpu.upload import Uploader
from strata.pack.experts import ExpertLayout, LayerExperts, Projection
from strata.pack.formats import by_name
from strata.pack.gguf_header import TensorInfo
from tests.gpu.run_on_cpu import needs_compiler
from tests.test_gpu_backend import new_device

pytestmark = needs_compiler
D, F = 256, 64
FORMATS = ("Q4_K", "IQ4_NL", "Q2_0")


def layout_of(E: int, formats: list[tuple[str, str, str]], rows: int, more: int = 2) -> ExpertLayout:
    """Layers of experts that no file has. more: rows of the down matrix beyond those of the others; what is no whole
    number of four rows is not laid out in place."""
    layers = []
    for names in formats:
        parts = []
        shapes = ((rows, D), (rows, D), (rows + more, F))
        for part, name, (n, columns) in zip(("gate", "up", "down"), names, shapes, strict=True):
            format = by_name(name)
            one = n * format.row_bytes(columns)
            info = TensorInfo(f"blk.0.ffn_{part}_exps.weight", (E, n, columns), format.ggml_id, 0, 0, E * one)
            parts.append(Projection(info, n, columns, 0, one, one, None))
        layers.append(LayerExperts(*parts))
    return ExpertLayout(None, tuple(layers), E, F, D)


class Source:
    """Random experts in one piece of memory: tensor by tensor as in a file, or expert by expert as in an arena. Pages
    from its start on are registered, in pieces of `pinned` pages."""

    def __init__(self, experts: ExpertLayout, device, by_tensor: bool, pinned: list[int], seed: int):
        self.experts, self.version, rng = experts, 0, np.random.default_rng(seed)
        self.addresses = np.zeros((experts.n_layers, experts.E, 3), np.int64)
        at = 0
        for l, layer in enumerate(experts.layers):
            sizes = [p.n_bytes for p in layer.projections]
            if by_tensor:
                for part, n in enumerate(sizes):
                    self.addresses[l, :, part] = at + n * np.arange(experts.E)
                    at += n * experts.E
            else:
                for e in range(experts.E):
                    for part, n in enumerate(sizes):
                        self.addresses[l, e, part] = at
                        at += -(-n // 64) * 64
        pages = -(-at // mmap.PAGESIZE)
        self.memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.bytes[:] = rng.integers(0, 256, self.bytes.size, dtype=np.uint8)
        self.base = self.bytes.ctypes.data
        self.addresses += self.base
        self.registered, start = [], 0
        for n in pinned:
            n = min(n, pages - start)
            if n:
                device.register(self.base + start * mmap.PAGESIZE, n * mmap.PAGESIZE)
                self.registered.append(self.base + start * mmap.PAGESIZE)
            start += n

    def pinned(self, layer: int, e: int) -> None:
        return None

    def raw(self, layer: int, e: int, part: int) -> np.ndarray:
        p, at = self.experts.layers[layer].projections[part], int(self.addresses[layer, e, part]) - self.base
        return self.bytes[at : at + p.n_bytes].reshape(p.rows, -1)


def stages_of(stream: ExpertStream, experts: ExpertLayout) -> list[Stage]:
    out = []
    for layer in range(experts.n_layers):
        for parts in ((0, 1), (2,)):
            n = stream.experts_a_stage(layer, parts)
            out += [Stage(layer, parts, first, min(n, experts.E - first)) for first in range(0, experts.E, n)]
    return out


def read_through(stream: ExpertStream, device, source: Source, stages: list[Stage], early: bool) -> None:
    """Walk through the stages; early: copies are done as soon as they are queued, otherwise when something waits."""
    experts, slots = source.experts, stream.slots
    stream.begin(stages)
    for i, stage in enumerate(stages):
        if early and hasattr(device, "land"):
            device.land()
        stream.arrive(i)
        table = np.empty(slots.table.shape, np.uint64)
        device.download(stream._table, table)
        for e in range(stage.first, stage.first + stage.n):
            for part in stage.parts:
                p = experts.layers[stage.layer].projections[part]
                found = np.empty(relayout_bytes(p.format, p.rows, p.columns), np.uint8)
                device.download(int(table[stage.layer, e, part]), found)
                np.testing.assert_array_equal(found, relayout(p.format, source.raw(stage.layer, e, part)))
        stream.leave(i)


CASES = st.fixed_dictionaries(
    {
        "formats": st.lists(
            st.tuples(*[st.sampled_from(FORMATS)] * 2, st.sampled_from(("IQ4_NL", "Q8_0"))), min_size=1, max_size=3
        ),
        "E": st.integers(1, 9),
        "rows": st.sampled_from((4, 6, 8)),
        "by_tensor": st.booleans(),
        "pinned": st.lists(st.integers(0, 6), max_size=3),
        "held": st.integers(0, 3),
        "room": st.integers(1, 4),
        "early": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


@settings(max_examples=80, deadline=None)
@given(CASES)
def test_every_stage_finds_its_experts(c):
    device = new_device()
    experts = layout_of(c["E"], c["formats"], c["rows"])
    source = Source(experts, device, c["by_tensor"], c["pinned"], c["seed"])
    uploader = Uploader(device, ring_bytes=64 << 10, threads=1)
    slots = ExpertSlots(experts, [min(c["held"], c["E"])] * experts.n_layers, by_table=True)
    slots.allocate(device, uploader, source)
    slots.fill((l, e) for l in range(experts.n_layers) for e in reversed(range(c["E"])))
    largest = max(aligned(relayout_bytes(p.format, p.rows, p.columns)) for y in experts.layers for p in y.projections)
    stream = ExpertStream(slots, stage_bytes=2 * largest * c["room"])
    before = device.taken_bytes
    stream.allocate(device, uploader, source)
    assert device.taken_bytes - before == stream.ring_bytes + stream.list_bytes
    stages = stages_of(stream, experts)
    for _ in range(2):  # the second time by the plan of the first one
        read_through(stream, device, source, stages, c["early"])
    if 0 < c["held"] < c["E"]:  # an expert loses its slot to another one
        slots.place(0, 0, slots.evict(0, c["E"] - 1))
        slots.wait_landed()
        read_through(stream, device, source, stages, c["early"])
    if c["E"] > c["held"] + 1:  # two experts change places in memory
        a, b = source.addresses[0, 0].copy(), source.addresses[0, 1].copy()
        data = [source.raw(0, e, part).copy() for e in (0, 1) for part in range(3)]
        source.addresses[0, 0], source.addresses[0, 1] = b, a
        for (e, part), one in zip([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)], data, strict=True):
            source.raw(0, e, part)[:] = one
        source.version += 1
        read_through(stream, device, source, stages, c["early"])
    uploader.close()
    for address in source.registered:
        device.unregister(address)
    device.close()


def made(E: int, device, *, by_tensor: bool, stage_experts: int, layers: int = 2, pinned: bool = True):
    """A stream of experts none of which has a slot."""
    experts = layout_of(E, [("Q4_K", "Q4_K", "IQ4_NL")] * layers, 8, more=0)
    source = Source(experts, device, by_tensor, [1 << 20] if pinned else [], 1)
    uploader = Uploader(device, ring_bytes=64 << 10, threads=1)
    slots = ExpertSlots(experts, [0] * layers)
    slots.allocate(device, uploader, source)
    gate = relayout_bytes(by_name("Q4_K"), 8, D)
    stream = ExpertStream(slots, stage_bytes=2 * aligned(gate) * stage_experts)
    stream.allocate(device, uploader, source)
    return stream, source


def test_neighbours_are_copied_as_one():
    """As in a file, a stage of gate and up is two copies; as in an arena, one for each expert. Pinned or not."""
    for by_tensor, copies, pinned in ((True, 2, True), (False, 4, True), (True, 2, False)):
        device = new_device()
        stream, source = made(8, device, by_tensor=by_tensor, stage_experts=4, pinned=pinned)
        stages = stages_of(stream, stream.slots.experts)
        stream.begin(stages)
        for coming in stream._coming:
            assert not coming.others and len(coming.launches) == 1
        coming = stream._coming[0]
        assert (len(coming.copies), len(coming.bounced)) == ((copies, 0) if pinned else (0, copies))
        assert stream.coming_bytes >= sum(p.n_bytes for y in source.experts.layers for p in y.projections) * 8
        read_through(stream, device, source, stages, early=False)
        device.close()


def test_the_ring_is_full_ahead_and_never_overtakes():
    """PLACES stages are queued before the first one is read, and one more whenever one was left; watch hears of all."""
    device = new_device()
    stream, _ = made(8, device, by_tensor=True, stage_experts=2, layers=3)
    heard = []
    stream.watch = lambda point, number: heard.append((point, number))
    stages = stages_of(stream, stream.slots.experts)
    stream.begin(stages)
    assert heard == [(point, i) for i in range(PLACES) for point in ("copies", "copied")]
    for i in range(len(stages)):
        heard.clear()
        stream.arrive(i)
        assert heard == [("waits", i), ("arrived", i)]
        heard.clear()
        stream.leave(i)
        later = i + PLACES
        assert heard == ([("copies", later), ("copied", later)] if later < len(stages) else [])
    device.close()


def test_a_place_holds_at_least_one_expert():
    experts = layout_of(2, [("Q4_K", "Q4_K", "IQ4_NL")], 8)
    with pytest.raises(BadArgument, match="a place for experts"):
        ExpertStream(ExpertSlots(experts, [0]), stage_bytes=1024)
