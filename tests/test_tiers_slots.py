"""Expert tiers over the slots of a device: what they decide is what its table shows and what the slots hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from strata.gpu.expert_store import ExpertStore
from strata.gpu.slots import ExpertSlots
from strata.gpu.upload import Uploader
from strata.pack.experts import ExpertLayout, expert_layout
from strata.pack.gguf_file import GgufFile
from strata.runtime.swaps import SwapRules, counted_profile
from strata.runtime.tiers import ExpertTiers
from tests.gpu.host_device import HostDevice
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler

pytestmark = needs_compiler

L, E = 8, 32
COUNTS = (3, 0, 2, 1, 4, 2, 1, 3)


@pytest.fixture(scope="module")
def gguf(tiny_path) -> Iterator[GgufFile]:
    with GgufFile(tiny_path) as opened:
        yield opened


@pytest.fixture(scope="module")
def experts(gguf) -> ExpertLayout:
    return expert_layout(gguf, L)


@contextlib.contextmanager
def slots_of(gguf: GgufFile, experts: ExpertLayout, mode: str):
    """(slots, store, device)"""
    if ON_DEVICE:
        from strata.gpu.device import CupyDevice

        device = CupyDevice()
    else:
        device = HostDevice()
    store, uploader = ExpertStore(experts, gguf, device, mode, threads=1), Uploader(device, threads=1)
    slots = ExpertSlots(experts, COUNTS, by_table=True)
    slots.allocate(device, uploader, store)
    yield slots, store, device
    uploader.close()
    store.close()
    device.close()


def assert_in_step(tiers: ExpertTiers, slots: ExpertSlots, device) -> None:
    """The device's table shows what the tiers call resident, where the slots hold those experts' bytes."""
    table = np.empty_like(slots.table)
    device.download(slots.table_address(0), table)
    np.testing.assert_array_equal(table[:, :, 0] != 0, tiers.resident)
    for layer, expert in np.argwhere(tiers.resident)[::3]:
        slot = slots.slot_of(layer, expert)
        assert table[layer, expert, 2] == slots.address(layer, slot, 2)
        for found, part in zip(slots.read_back(layer, slot), ("gate", "up", "down"), strict=True):
            np.testing.assert_array_equal(found, slots.experts.raw(layer, expert, part))


def sizes(experts: ExpertLayout) -> list[int]:
    return [experts.blob_bytes(layer) for layer in range(L)]


@pytest.mark.parametrize("ranked", [True, False])
def test_swaps_and_loans_on_a_device(gguf, experts, ranked):
    rng = np.random.default_rng(5)
    profile = counted_profile(rng.integers(0, 50, (L, E))) if ranked else None
    with slots_of(gguf, experts, "file") as (slots, _, device):
        tiers = ExpertTiers(slots, profile, n_experts=E, expert_bytes=sizes(experts), rules=SwapRules(every=2))
        assert tiers.fill() == (sum(COUNTS) if ranked else 0)
        assert_in_step(tiers, slots, device)
        favourites = np.arange(6)
        for window in range(12):
            if window % 4 == 0:
                favourites = rng.permutation(E)[:6]
            tiers.observe(rng.choice(favourites, (L, 4, 4)).astype(np.int32), 4)
            tiers.between_windows()
            if window == 7:
                lent = tiers.lend(9)
                assert all(slots.expert_of[layer][slot] == -1 for layer, slot in lent)
            if window == 8:
                tiers.give_back()
            if window % 3 == 2:
                tiers.settle()
                assert_in_step(tiers, slots, device)
        assert tiers.stats()["copies"] > 10 and tiers.stats()["hits"] > 0
        tiers.settle()
        assert_in_step(tiers, slots, device)


def test_exchanges_on_a_device(gguf, experts):
    """RAM holds only what no slot holds: swaps take turns, and no expert is ever without a place."""
    rng = np.random.default_rng(6)
    profile = counted_profile(rng.integers(0, 50, (L, E)))
    with slots_of(gguf, experts, "resident") as (slots, store, device):
        slots.fill(profile.ranked.tolist())
        store.settle(slots)

        def exchange(layer: int, incoming: int, slot: int) -> int:
            return store.exchange(slots, layer, incoming, slot)

        tiers = ExpertTiers(slots, profile, n_experts=E, expert_bytes=sizes(experts), rules=SwapRules(every=1),
                            exchange=exchange)  # fmt: skip
        before = tiers.resident
        for _ in range(3):
            tiers.observe(rng.choice([3, 9, 11], (L, 4, 4)).astype(np.int32), 4)
            tiers.between_windows()
            assert_in_step(tiers, slots, device)
            np.testing.assert_array_equal(store.addresses[:, :, 0] != 0, ~tiers.resident)
        assert (before != tiers.resident).any() and tiers.stats()["in_flight"] == 0
        for layer, expert in np.argwhere(~tiers.resident)[::11]:
            for part, name in enumerate(("gate", "up", "down")):
                np.testing.assert_array_equal(store.raw(layer, expert, part), experts.raw(layer, expert, name))
