"""What threads and link read from memory: the rates, and that all copies come from the pinned buffer."""

from __future__ import annotations

import pytest

from strata.base.errors import BadArgument
from strata.memory_speed import PIECE_BYTES, MemoryRates, memory_rates
from tests.gpu.host_device import HostDevice


class Counting(HostDevice):
    copied = 0

    def copy_in(self, address, source, n_bytes, stream=0):
        self.copied += n_bytes
        super().copy_in(address, source, n_bytes, stream)


def test_each_alone_and_both_at_once():
    device = Counting()
    r = memory_rates(device, 2, n_bytes=1 << 20, link_bytes=2 * PIECE_BYTES, seconds=0.03)
    assert min(r.threads_gbps, r.link_gbps, r.threads_beside_gbps, r.link_beside_gbps) > 0
    assert device.copied % PIECE_BYTES == 0 and device.copied >= 6 * PIECE_BYTES, "three are under way, twice"
    device.close()


def test_the_most_that_memory_gave():
    r = MemoryRates(90.0, 50.0, 80.0, 40.0)
    assert r.both_gbps == 120 and r.most_gbps == 120
    assert MemoryRates(90.0, 50.0, 40.0, 40.0).most_gbps == 90


def test_bad_sizes_are_refused():
    for threads, more in ((0, {}), (1, {"link_bytes": PIECE_BYTES + 1}), (1, {"link_bytes": 0})):
        with pytest.raises(BadArgument):
            memory_rates(HostDevice(), threads, **more)
