"""Where the host keeps the bytes of experts: modes, what is pinned, and exchanges with the device."""

import shutil

import numpy as np
import pytest

from strata.base.errors import BadArgument, Closed, DoesNotFit, FileError, StrataError
from strata.gpu.download import download_bytes
from strata.gpu.expert_store import PAGE, ExpertStore, arena_bytes, place_bytes
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.test_gpu_slots import E, L, Made, experts, gguf, new_device

__all__ = ["experts", "gguf"]  # fixtures

pytestmark = needs_compiler


@pytest.mark.parametrize("mode", ["file", "mapped", "pinned"])
def test_where_the_host_keeps_experts(gguf, experts, mode):
    device = new_device()
    if mode == "mapped" and not device.registers_read_only:
        pytest.skip("the device does not register read-only memory")
    store = ExpertStore(experts, gguf, device, mode, threads=2)
    for layer, e, part, name in ((0, 0, 0, "gate"), (4, 17, 1, "up"), (7, 31, 2, "down")):
        raw = store.raw(layer, e, part)
        np.testing.assert_array_equal(raw, experts.raw(layer, e, name))
        assert store.addresses[layer, e, part] == raw.ctypes.data
        assert device.is_registered(raw.ctypes.data, raw.nbytes) == (mode != "file")
    table = store.device_table()
    if mode == "file":
        assert table is None and store.pinned_bytes == 0
    else:
        assert table.dtype == np.uint64 and (table == store.addresses).all()
        assert store.pinned_bytes >= experts.total_bytes and store.pinned_bytes % PAGE == 0
    if mode == "mapped":
        np.testing.assert_array_equal(store.addresses, experts.addresses)
    if mode == "pinned":
        assert store.pinned_bytes == arena_bytes(experts, np.ones((L, E), bool))
        assert (store.addresses % 64 == 0).all()
    if mode != "file" and not ON_DEVICE:
        assert {read_only for _, read_only in device.registered.values()} == {mode == "mapped"}
    del raw
    store.close()
    store.close()
    assert not device.is_registered(int(experts.addresses[0, 0, 0]), 1)
    if not ON_DEVICE:
        assert not device.registered
    with pytest.raises(Closed):
        store.device_table()
    device.close()


def test_uploads_from_pinned_experts(gguf, experts):
    for mode in ("mapped", "pinned"):
        made = Made(gguf, experts, mode=mode, device=HostDevice())
        made.slots.fill([(7, 4), (7, 2), (0, 31)])
        made.assert_holds(7, 0, 4)
        made.assert_holds(7, 1, 2)
        made.close()


def test_a_device_that_cannot_read_the_host(gguf, experts):
    device = HostDevice(can_read_host=False)
    with pytest.raises(BadArgument, match="mapped"):
        ExpertStore(experts, gguf, device, "mapped")
    with pytest.raises(BadArgument, match="where experts lie"):
        ExpertStore(experts, gguf, device, "swap")
    store = ExpertStore(experts, gguf, device, "pinned", threads=1)
    assert store.device_table() is None and not device.registered
    np.testing.assert_array_equal(store.raw(3, 3, 1), experts.raw(3, 3, "up"))
    store.close()


def test_memory_that_is_refused(gguf, experts):
    class Refusing(HostDevice):
        def register(self, address, n_bytes, read_only=False):
            if self.registered:
                raise DoesNotFit("the system does not pin this memory for the device", needed=f"{n_bytes} bytes")
            super().register(address, n_bytes, read_only)

    device = Refusing()
    first = ExpertStore(experts, gguf, device, "pinned", threads=1)
    for mode in ("pinned", "mapped"):
        with pytest.raises(DoesNotFit, match="pin"):
            ExpertStore(experts, gguf, device, mode, threads=1)
    assert len(device.registered) == 1, "what a failed store had pinned is given back"
    first.close()


def test_a_device_that_is_closed_first(gguf, experts):
    device = new_device()
    store = ExpertStore(experts, gguf, device, "pinned", threads=1)
    device.close()
    store.close()
    assert store.pinned_bytes == 0


def test_a_file_that_changes_is_named(tiny_path, tmp_path):
    for shard in sorted(tiny_path.parent.glob("tiny-flash-next-IQ3_XXS-*.gguf")):
        shutil.copy(shard, tmp_path / shard.name)
    with GgufFile(tmp_path / tiny_path.name) as gguf:
        store = ExpertStore(expert_layout(gguf, L), gguf, HostDevice())
        store.check_file()
        second = gguf.shards[1].path
        with second.open("r+b") as file:
            file.truncate(gguf.shards[1].file_bytes - 1)
        with pytest.raises(FileError, match=second.name) as raised:
            store.check_file()
        assert str(gguf.shards[1].file_bytes) in str(raised.value)
        store.close()


# ---- bytes in one place only


def test_exchange(gguf, experts):
    made = Made(gguf, experts, mode="resident")
    slots, store = made.slots, made.store
    with pytest.raises(BadArgument, match="settled"):
        store.exchange(slots, 0, 9, 0)
    slots.fill([(0, 3), (0, 5), (7, 1)])
    assert store.device_table() is None
    taken = 0 if ON_DEVICE else made.device.taken_bytes
    store.settle(slots)
    if not ON_DEVICE:
        assert made.device.taken_bytes - taken == download_bytes(experts)
    assert store.pinned_bytes == -(-sum(place_bytes(experts, l) * (E - int(slots.resident(l).sum())) for l in range(L))
                                   // PAGE) * PAGE  # fmt: skip
    rng = np.random.default_rng(0)
    for _ in range(25):
        layer = int(rng.choice([0, 7]))
        slot = int(rng.integers(2 if layer == 0 else 1))
        incoming = int(rng.choice(np.flatnonzero(~slots.resident(layer))))
        victim, version = int(slots.expert_of[layer][slot]), store.version
        assert store.exchange(slots, layer, incoming, slot) == victim
        slots.publish()
        assert store.version != version and slots.expert_of[layer][slot] == incoming
    table = store.device_table()
    for layer in (0, 7):
        for e in range(E):
            on_device, in_memory = slots.resident(layer)[e], bool(table[layer, e].all())
            assert on_device != in_memory
            if on_device:
                made.assert_holds(layer, slots.slot_of(layer, e), e)
            for part, name in enumerate(("gate", "up", "down")):
                np.testing.assert_array_equal(store.raw(layer, e, part), experts.raw(layer, e, name))
    assert len(set(table[7][table[7] != 0].tolist())) == 3 * (E - 1), "every place is used once"
    np.testing.assert_array_equal(made.device_table(), slots.table)
    out = int(np.flatnonzero(slots.resident(0))[0])
    for layer, incoming, slot in ((0, out, 0), (7, 4, 3), (0, int(slots.expert_of[0][1]), 0)):
        with pytest.raises(BadArgument):
            store.exchange(slots, layer, incoming, slot)
    slots.place(2, 0, 0)
    with pytest.raises(BadArgument, match="on their way"):
        store.exchange(slots, 0, int(np.flatnonzero(~slots.resident(0))[0]), 0)
    slots.wait_landed()
    made.close()


def test_no_exchange_loses_a_copy(gguf, experts):
    """If the device fails before the incoming expert has arrived, its bytes in memory are as they were."""
    made = Made(gguf, experts, mode="resident", device=HostDevice())
    made.slots.fill([(0, 3)])
    made.store.settle(made.slots)

    def fails(mark):
        raise StrataError("the device is lost")

    made.uploader.wait = fails
    with pytest.raises(StrataError, match="lost"):
        made.store.exchange(made.slots, 0, 9, 0)
    for part, name in enumerate(("gate", "up", "down")):
        np.testing.assert_array_equal(made.store.raw(0, 9, part), experts.raw(0, 9, name))
    del made.uploader.wait
    made.close()
