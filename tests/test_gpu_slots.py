"""Experts in slots: fill, swaps between windows, and the table that kernels read."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.base.errors import BadArgument, DoesNotFit, StrataError
from strata.cpu.backend import CpuBackend
from strata.gpu.backend import GpuBackend
from strata.gpu.expert_store import ExpertStore
from strata.gpu.gemv import Place
from strata.gpu.slots import ExpertSlots
from strata.gpu.upload import Uploader
from strata.pack.experts import ExpertLayout, expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from tests.canonical.call import assert_same
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler

pytestmark = needs_compiler
L, E, SMALL_RING = 8, 32, 256 << 10
FEW = (2, 0, 3, 1, 2, 1, 1, 4)


def new_device():
    if ON_DEVICE:
        from strata.gpu.device import CupyDevice

        return CupyDevice()
    return HostDevice()


@pytest.fixture(scope="module")
def gguf(tiny_path):
    with GgufFile(tiny_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def experts(gguf):
    return expert_layout(gguf, L)


class Made:
    """Slots on a device, with everything they need."""

    def __init__(self, gguf, experts, counts=FEW, mode="file", by_table=False, device=None):
        self.device = device or new_device()
        self.store = ExpertStore(experts, gguf, self.device, mode, threads=2)
        self.uploader = Uploader(self.device, ring_bytes=SMALL_RING, threads=1)
        self.slots = ExpertSlots(experts, counts, by_table=by_table)
        self.slots.allocate(self.device, self.uploader, self.store)
        self.experts = experts

    def device_table(self) -> np.ndarray:
        out = np.empty_like(self.slots.table)
        self.device.download(self.slots.table_address(0), out)
        return out

    def assert_holds(self, layer: int, slot: int, expert: int) -> None:
        for found, part in zip(self.slots.read_back(layer, slot), ("gate", "up", "down"), strict=True):
            np.testing.assert_array_equal(found, self.experts.raw(layer, expert, part))

    def close(self) -> None:
        self.uploader.close()
        self.store.close()
        self.device.close()


@pytest.fixture
def made(gguf, experts):
    one = Made(gguf, experts)
    yield one
    one.close()


# ---- sizes and filling


def test_sizes_are_known_before_a_device(gguf, experts):
    slots = ExpertSlots(experts, FEW)
    assert slots.slot_bytes(0) % 256 == 0 and slots.area_bytes(1) == 0
    assert 0 <= slots.slot_bytes(0) - experts.blob_bytes(0) < 3 * 256
    device = HostDevice()
    before = Uploader(device)
    taken = device.taken_bytes
    slots.allocate(device, before, ExpertStore(experts, gguf, device))
    assert device.taken_bytes - taken == slots.n_bytes
    before.close()
    with pytest.raises(DoesNotFit, match="too little"):
        tight = HostDevice(limit_bytes=taken + slots.n_bytes - 1)
        ExpertSlots(experts, FEW).allocate(tight, Uploader(tight), ExpertStore(experts, gguf, tight))
    for wrong in ((1,) * 7, (33,) + (1,) * 7, (-1,) + (1,) * 7):
        with pytest.raises(BadArgument, match="slots"):
            ExpertSlots(experts, wrong)


def test_all_experts_lie_in_their_own_slots(gguf, experts):
    made = Made(gguf, experts, None)
    assert made.slots.fill([(0, 5), (0, 4)]) == L * E
    for layer in (0, 4, 7):
        assert made.slots.resident(layer).all() and made.slots.expert_of[layer].tolist() == list(range(E))
        for part in range(3):
            place = made.slots.matrices(layer, part)
            assert not place.table
            np.testing.assert_array_equal(made.slots.table[layer, :, part], place.address + place.stride * np.arange(E))
        for e in (0, 1, 31):
            made.assert_holds(layer, e, e)
    np.testing.assert_array_equal(made.device_table(), made.slots.table)
    with pytest.raises(BadArgument, match="swap"):
        made.slots.evict(0, 3)
    made.close()


pairs = st.lists(st.tuples(st.integers(0, L - 1), st.integers(0, E - 1)), max_size=60)


@settings(max_examples=10, deadline=None)
@given(order=pairs, counts=st.lists(st.integers(0, 3), min_size=L, max_size=L))
def test_fill_takes_the_best_that_have_room(gguf, experts, order, counts):
    made = Made(gguf, experts, counts)
    wanted: list[list[int]] = [[] for _ in range(L)]
    for layer, e in order:
        if e not in wanted[layer] and len(wanted[layer]) < counts[layer]:
            wanted[layer].append(e)
    assert made.slots.fill(order) == sum(map(len, wanted))
    for layer in range(L):
        assert made.slots.expert_of[layer].tolist()[: len(wanted[layer])] == wanted[layer]
        assert (made.slots.expert_of[layer][len(wanted[layer]) :] == -1).all()
        assert np.flatnonzero(made.slots.resident(layer)).tolist() == sorted(wanted[layer])
        for slot, e in enumerate(wanted[layer]):
            made.assert_holds(layer, slot, e)
    np.testing.assert_array_equal(made.device_table(), made.slots.table)
    made.slots.fill()
    assert [len(made.slots.free_slots(layer)) for layer in range(L)] == [0] * L
    with pytest.raises(BadArgument, match="fill order"):
        made.slots.fill([(L, 0)])
    made.close()


def test_a_fill_that_arrives_otherwise_is_an_error(gguf, experts):
    class Faulty(HostDevice):
        def download(self, address, array):
            super().download(address, array)
            if array.nbytes > 8192:
                array.reshape(-1).view(np.uint8)[100] ^= 1

    made = Made(gguf, experts, device=Faulty())
    with pytest.raises(StrataError, match="slot 0 of layer 0 does not hold") as raised:
        made.slots.fill()
    assert "gate of expert 0" in str(raised.value)
    made.close()


def test_float_experts_are_not_swapped(gguf, experts):
    p = experts.layers[2].down
    as_floats = replace(p, tensor=replace(p.tensor, ggml_type=1), n_bytes=2 * p.rows * p.columns)
    layers = (*experts.layers[:2], replace(experts.layers[2], down=as_floats), *experts.layers[3:])
    other = ExpertLayout(gguf, layers, experts.E, experts.F, experts.D)
    assert ExpertSlots(other).slot_bytes(2) > ExpertSlots(experts).slot_bytes(2)
    for arguments in ((FEW, False), (None, True)):
        with pytest.raises(BadArgument, match=r"blk\.2\.ffn_down_exps"):
            ExpertSlots(other, arguments[0], by_table=arguments[1])


# ---- swaps


def test_a_swap_step_by_step(gguf, experts):
    made = Made(gguf, experts, device=HostDevice())
    slots, device = made.slots, made.device
    slots.fill([(0, 3), (0, 9), (7, 1)])
    assert not slots.dirty and not slots.publish()
    before = made.device_table()

    assert slots.evict(0, 3) == 0
    assert not slots.resident(0)[3] and slots.resident(0)[9] and slots.free_slots(0) == [0] and slots.dirty
    np.testing.assert_array_equal(made.device_table(), before, "the device learns of it with publish")
    assert slots.publish() and not slots.dirty
    assert not made.device_table()[0, 3].any() and made.device_table()[0, 9].all()

    device.hold = True
    slots.place(0, 20, 0)
    assert not slots.publish()  # the copy leaves
    slots.place(7, 30, 1)
    assert slots.coming == [(0, 20), (7, 30)] and slots.free_slots(0) == [] and slots.landed() == []
    assert not slots.resident(0)[20] and not slots.dirty
    made.assert_holds(0, 0, 3)  # nothing was copied yet
    for wrong in ((0, 21, 0), (0, 21, 2), (0, 20, 1), (0, 9, 0), (7, 30, 2), (7, 40, 2)):
        with pytest.raises(BadArgument):
            slots.place(*wrong)
    for wrong in (20, 3):
        with pytest.raises(BadArgument, match="evict"):
            slots.evict(0, wrong)

    device.wait(made.uploader._under_way[0][1])
    assert slots.landed() == [(0, 20)] and slots.coming == [(7, 30)]
    assert not slots.resident(7)[30]
    device.land()
    assert slots.landed() == [(7, 30)] and slots.coming == []
    made.assert_holds(7, 1, 30)
    assert slots.resident(0)[20] and not made.device_table()[0, 20].any()
    made.assert_holds(0, 0, 20)
    slots.publish()
    np.testing.assert_array_equal(made.device_table(), slots.table)
    made.close()


def test_waiting_for_what_is_coming(made):
    made.slots.place(2, 7, 1)
    made.slots.place(3, 8, 0)
    assert made.slots.wait_landed() == [(2, 7), (3, 8)] and made.slots.landed() == []
    made.assert_holds(2, 1, 7)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 2, 7]), st.integers(0, E - 1), st.booleans()), max_size=40))
def test_any_schedule_leaves_a_true_table(gguf, experts, steps):
    """Whatever is evicted and placed, polled or not: a word of the table is the place of that expert's bytes."""
    made = Made(gguf, experts)
    slots = made.slots
    slots.fill()
    for layer, e, polls in steps:
        if slots.resident(layer)[e]:
            slots.evict(layer, e)
        elif slots.slot_of(layer, e) < 0 and slots.free_slots(layer):
            slots.place(layer, e, slots.free_slots(layer)[-1])
        if polls:
            slots.landed()
            slots.publish()
    slots.wait_landed()
    slots.publish()
    table = made.device_table()
    np.testing.assert_array_equal(table, slots.table)
    for layer, e in np.argwhere(table[:, :, 0]):
        slot = slots.slot_of(layer, e)
        assert table[layer, e].tolist() == [slots.address(layer, slot, part) for part in range(3)]
        made.assert_holds(layer, slot, e)
    made.close()


# ---- windows


TOKENS = np.random.default_rng(0).integers(0, 4000, 12).astype(np.int32)


def test_windows_through_the_table(gguf, experts):
    """All experts resident, in other slots than their own, then swapped: windows have the bits of the CPU backend."""
    g = read_geometry(gguf)
    programs = build_programs(g, 256, "f16")
    tensors, rng = Tensors(gguf), np.random.default_rng(1)
    cpu = CpuBackend(tensors, g, experts, programs, threads=1)
    slots = ExpertSlots(experts, by_table=True)
    order = [(layer, int(e)) for layer in range(L) for e in rng.permutation(E)]
    gpu = GpuBackend(tensors, g, experts, programs, new_device(), slots=slots, fill_order=order)
    assert gpu.slots is slots and slots.matrices(3, 2) == Place(table=slots.table_address(3), part=2)
    assert all((slots.expert_of[layer] != np.arange(E)).any() for layer in range(L))
    assert gpu.weights.bytes_by_kind()["experts"] == sum(slots.area_bytes(layer) for layer in range(L))
    cs, gs = cpu.new_state(), gpu.new_state()

    def window(tokens):
        n = cs.rows
        previous = (int(TOKENS[n - 1]) if n else -1, int(TOKENS[n - 2]) if n > 1 else -1)
        for backend, state in ((cpu, cs), (gpu, gs)):
            backend.window(state, tokens, previous)
        assert_same(gpu.streams[: len(tokens)], np.array(cpu.streams[: len(tokens)]), f"streams at {n}")
        for backend, state in ((cpu, cs), (gpu, gs)):
            backend.commit(state, len(tokens))

    window(TOKENS[:2])
    for layer in range(L):  # every slot gets the expert of the next one
        held = slots.expert_of[layer].copy()
        for e in held:
            slots.evict(layer, int(e))
        for slot, e in enumerate(np.roll(held, 1)):
            slots.place(layer, int(e), slot)
    slots.wait_landed()
    assert slots.dirty, "the backend publishes before a window"
    window(TOKENS[2:3])
    assert not slots.dirty
    assert gs.digest() == cs.digest()
    cpu.close()
    gpu.close()
