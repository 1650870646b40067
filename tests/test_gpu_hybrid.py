"""Experts shared between device, link and CPU: whatever is resident and goes where, the bits of the CPU backend.

Kernels run on the CPU through the shim, or on a GPU with STRATA_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from strata.arch.flash_next.geometry import read_geometry
from strata.arch.flash_next.programs import build_programs
from strata.base import arithmetic
from strata.base import doorbell as mail
from strata.base.doorbell import CPU
from strata.base.errors import BadArgument, NotFinite, StrataError
from strata.base.program import EXPERTS_FAILED, NOT_FINITE
from strata.cpu.backend import CpuBackend
from strata.cpu.miss_server import MissServer
from strata.cpu.pool import Pool
from strata.gpu import doorbell as bells
from strata.gpu import hybrid as hybrids
from strata.gpu.backend import GpuBackend
from strata.gpu.expert_store import ExpertStore
from strata.gpu.hybrid import Hybrid, needs
from strata.gpu.slots import ExpertSlots
from strata.pack.experts import PARTS, expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.runtime.expert_stats import BRANCHES, ExpertStats
from tests.canonical import experts as reference
from tests.canonical.call import assert_same
from tests.gpu.run_on_cpu import ON_DEVICE, needs_compiler
from tests.test_gpu_backend import TOKENS, Pair, new_device
from tests.test_gpu_experts import quantised

pytestmark = needs_compiler
COUNTS = (0, 1, 4, 12, 32, 31, 8, 16)
"""Slots of the layers of the bundled model, which has 32 experts in each."""


class NumpyServer:
    """A stand-in for the CPU's service: a Python thread and the definition. `fault` may upset the next requests."""

    def __init__(self, experts, box, address, memory):
        self.experts, self.m, self.memory = experts, box, memory
        self.words = memory[: mail.PAYLOAD].view(np.int64)
        self.requests, self.windows, self.fault, self.stopped = [], 0, None, False
        assert memory.ctypes.data == address
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def begin_window(self):
        self.windows += 1

    def end_window(self):
        pass

    def close(self):
        self.stopped = True
        self.thread.join()

    def _view(self, at, dtype, *shape):
        return self.memory[at:][: int(np.prod(shape)) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

    def _serve(self):
        seen = 0
        while not self.stopped:
            request = int(self.words[mail.REQUEST // 8])
            if request == seen:
                time.sleep(1e-4)
                continue
            seen = request
            status = self._compute()
            if self.fault is not None:
                status = self.fault(self)
            if status is not None:
                self.words[mail.STATUS // 8] = status
                self.words[mail.REPLY // 8] = request

    def _compute(self):
        header = self.words[mail.HEADER // 8 :][:6].tolist()
        layer, T, n_cpu = header[:3]
        decisions = self._view(self.m.decisions, "uint8", T, self.m.K)
        assert (decisions == CPU).sum() == n_cpu > 0
        self.requests.append(layer)
        ids, weights = self._view(self.m.ids, "int32", T, self.m.K), self._view(self.m.weights, "float32", T, self.m.K)
        x, sums = self._view(self.m.x, "float32", T, self.m.D), self._view(self.m.sums, "int64", T, self.m.D)
        products = [quantised(p.format) for p in self.experts.layers[layer].projections]
        for t in range(T):
            total = np.zeros(self.m.D, np.int64)
            for j in np.flatnonzero(decisions[t] == CPU):
                raw = [self.experts.raw(layer, int(ids[t, j]), part) for part in PARTS]
                total += arithmetic.combine_terms(weights[t, j], reference.expert(x[t], raw, products))[0]
            if (decisions[t] == CPU).any():
                sums[t] = total
        return 0


class HybridPair(Pair):
    """The CPU backend, and a GPU backend with few slots; `server` answers for its misses."""

    def __init__(self, cpu, gguf, programs, experts, serve, counts=COUNTS, *, store_mode="pinned", **options):
        device = new_device()
        tensors = Tensors(gguf, {})
        self.store = ExpertStore(experts, gguf, device, store_mode, threads=1)
        self.slots = ExpertSlots(experts, counts, by_table=True)
        self.hybrid = Hybrid(device, experts, cpu.geometry.K, serve, self.store.device_table(), **options)
        gpu = GpuBackend(tensors, cpu.geometry, experts, programs, device, hybrid=self.hybrid, slots=self.slots,
                         store=self.store, fill_order=np.argwhere(np.ones((8, 32))).tolist())  # fmt: skip
        super().__init__(cpu, gpu)

    @property
    def server(self):
        return self.hybrid.server

    def hold(self, layer, wanted):
        """Let the slots of a layer hold these experts and no others."""
        for e in np.flatnonzero(self.slots.resident(layer)):
            self.slots.evict(layer, int(e))
        for slot, e in enumerate(wanted):
            self.slots.place(layer, int(e), slot)
        self.slots.wait_landed()
        self.slots.publish()

    def close(self):
        self.gpu.close()


@pytest.fixture(scope="module")
def model(tiny_path):
    gguf = GgufFile(tiny_path)
    g = read_geometry(gguf)
    programs, experts = build_programs(g, 256, "f16"), expert_layout(gguf, g.L)
    cpu = CpuBackend(Tensors(gguf, {}), g, experts, programs, threads=1)
    yield cpu, gguf, programs, experts
    cpu.close()


@pytest.fixture(scope="module")
def stand_in(model):
    """With the numpy service, and experts read where the file is mapped."""
    experts = model[3]
    pair = HybridPair(*model, lambda m, at, memory: NumpyServer(experts, m, at, memory), store_mode="mapped",
                      staging_blobs=6, limit_s=20)  # fmt: skip
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def real(model):
    """With the CPU's own service."""
    cpu = model[0]
    pool = Pool(1, pin=False, reserve_cores=0)
    pair = HybridPair(*model, lambda m, at, memory: MissServer(cpu.weights, m, at, pool, memory), staging_blobs=16)
    yield pair
    pair.close()
    pool.close()


def counts_of(pair):
    """(hit, link, CPU) entries of the layers of the last window."""
    return [(t.hit_entries, t.link_entries, t.cpu_entries) for t in pair.hybrid.telemetry()]


def test_the_stand_in_service(stand_in):
    pair = stand_in.fresh()
    for T, share in ((1, 0), (2, 0.5)):
        pair.hybrid.set_share(share)
        pair.server.requests.clear()
        pair.window(T)
        pair.commit(T)
        assert pair.gs.digest() == pair.cs.digest()
        counts = counts_of(pair)
        assert all(sum(c) == 4 * T for c in counts)
        assert pair.server.requests == [l for l, c in enumerate(counts) if c[2]], "asks only for what the CPU has"
    assert pair.server.windows == 2


SHARES = (0, 0.5, 1)
LENGTHS = [(T, s) for T in range(1, 9) for s in SHARES] if ON_DEVICE else [(1, 0), (2, 1), (8, 0.5)]


@pytest.mark.parametrize(("T", "share"), LENGTHS)
def test_every_share_and_length(real, T, share):
    pair = real.fresh()
    pair.hybrid.set_share(share)
    pair.window(1)
    pair.commit(1)
    pair.window(T)
    found = pair.hybrid.telemetry()
    assert [t.layer for t in found] == list(range(8)) and all(t.rows == T for t in found)
    for t, n in zip(found, COUNTS, strict=True):
        misses = t.link_experts + t.cpu_experts
        assert t.link_experts == min(int((misses + 1) * share), misses, 16)
        assert t.hit_entries + t.link_entries + t.cpu_entries == 4 * T
        assert (t.hit_entries == 0) if n == 0 else (t.hit_entries == 4 * T or n < 32)
        assert t.link_bytes == t.link_experts * pair.hybrid.experts.blob_bytes(t.layer)
        assert t.waited_for in ("hits", "link", "cpu") and t.join_us >= t.cpu_us >= 0
        assert t.join_us >= max(t.hits_us, t.link_us)


def test_any_residency_between_windows(real):
    pair, rng = real.fresh(), np.random.default_rng(5)
    for T in (2, 1, 4) if not ON_DEVICE else (2, 1, 8, 5, 3, 7, 4, 6) * 3:
        for layer in range(8):
            n = int(rng.choice([0, COUNTS[layer], rng.integers(0, COUNTS[layer] + 1)]))
            pair.hold(layer, rng.permutation(32)[:n])
        pair.hybrid.set_share(rng.uniform(), int(rng.integers(0, 17)))
        pair.window(T)
        pair.commit(T)
    assert pair.gs.digest() == pair.cs.digest()


def test_a_layer_whose_hits_are_all_there_asks_nobody(real):
    pair = real.fresh()
    pair.hybrid.set_share(0)
    pair.hold(4, range(32))
    before = pair.server.stats()["requests"]
    pair.window(2)
    counts = counts_of(pair)
    assert counts[4] == (8, 0, 0) and counts[0] == (0, 0, 8)
    assert pair.server.stats()["requests"] - before == sum(c[2] > 0 for c in counts)


def test_op_by_op(real):
    pair = real.fresh()
    pair.hybrid.set_share(0.5)
    wanted = []
    pair.cpu.window(pair.cs, TOKENS[:2], (-1, -1),
                    after_op=lambda op: wanted.append(pair.cpu.memory.arrays["streams"][:2].copy()))  # fmt: skip
    steps = iter(wanted)
    pair.gpu.window(pair.gs, TOKENS[:2], (-1, -1),
                    after_op=lambda op: assert_same(pair.gpu.read("streams")[:2], next(steps), str(op)))  # fmt: skip


def test_no_answer_ends_the_window_soon_and_leaves_the_session(stand_in):
    pair = stand_in.fresh()
    pair.hybrid.set_share(0)
    pair.window(2)
    pair.commit(2)
    before = pair.gs.digest()
    pair.hybrid.set_limit(0.4)
    let_go = threading.Event()

    def late(server):
        let_go.wait()
        return 0

    pair.server.fault = late
    requests = len(pair.server.requests)
    with pytest.raises(StrataError, match=r"position 2 stopped: no answer.* in layer 0, experts [0-9]+, ") as raised:
        pair.gpu.window(pair.gs, TOKENS[2:4], pair.previous())
    assert not isinstance(raised.value, NotFinite) and "0.4 s" in str(raised.value)
    waits = [t.cpu_us >= 0.4e6 for t in pair.hybrid.telemetry()]
    assert waits == [True] + [False] * 7 and len(pair.server.requests) == requests + 1, "later layers do not ring"
    pair.server.fault = None
    pair.hybrid.set_limit(20)
    assert pair.gs.digest() == before
    threading.Timer(0.2, let_go.set).start()
    pair.window(2)  # the late answer comes meanwhile
    pair.commit(1)
    assert pair.gs.digest() == pair.cs.digest()


@pytest.mark.parametrize(("status", "error", "text"), [
    (EXPERTS_FAILED | 4 << 8, StrataError, "a failure of the CPU's experts in layer 0, experts .*detail 4"),
    (NOT_FINITE | 17 << 8, NotFinite, "a non-finite value in op experts, layer 0.*row or expert 17"),
])  # fmt: skip
def test_a_status_is_an_error_of_the_window(stand_in, status, error, text):
    pair = stand_in.fresh()
    pair.server.fault = lambda server: status
    with pytest.raises(error, match=text):
        pair.gpu.window(pair.gs, TOKENS[:1], (-1, -1))
    pair.server.fault = None
    pair.window(1)


def test_an_earlier_error_rings_no_more(real):
    """A window that has failed asks nobody: its rows may be anything."""
    pair = real.fresh()
    pair.window(1)
    pair.commit(1)
    host = pair.gs.export()
    host.arrays["gdn.4.state"][0, 1, 2] = np.nan
    pair.gs.recurrent[:] = host.recurrent
    before = pair.server.stats()["requests"]
    with pytest.raises(NotFinite, match="gdn_heads, layer 4"):
        pair.gpu.window(pair.gs, TOKENS[1:2], pair.previous())
    assert pair.server.stats()["requests"] - before <= 4
    pair.gs.recurrent[:] = pair.cs.recurrent
    pair.window(2)


def test_without_a_link_and_with_sums_read_in_place(model):
    """The other forms of the graph: the device cannot read the host, the combine reads the mailbox, no stamps."""
    cpu, experts = model[0], model[3]
    pool = Pool(1, pin=False, reserve_cores=0)
    pair = HybridPair(*model, lambda m, at, memory: MissServer(cpu.weights, m, at, pool, memory),
                      store_mode="file", share=1.0, copy_sums=False, stamp_branches=False).fresh()  # fmt: skip
    pair.window(2)
    pair.commit(1)
    pair.window(3)
    assert all(t.link_experts == 0 and t.hits_us == 0 for t in pair.hybrid.telemetry())
    assert {a.line for a in needs(experts, 4, 0)} == {"expert exchange", "exchange"}
    with pytest.raises(BadArgument, match="places"):
        pair.hybrid.set_raws(np.zeros((8, 32, 3), np.uint64))
    pair.close()
    assert pair.server.closed
    pool.close()


def test_memory_is_what_is_planned(model):
    device, experts = new_device(), model[3]
    before = device.taken_bytes
    quiet = Hybrid(device, experts, 4, lambda *a: NumpyServer(experts, *a), np.zeros((8, 32, 3), np.uint64),
                   staging_blobs=3)  # fmt: skip
    taken = sum(a.n_bytes for a in needs(experts, 4, 3) if a.device == "vram")
    assert device.taken_bytes - before == taken and quiet.allocations() == needs(experts, 4, 3)
    with pytest.raises(BadArgument, match="share"):
        quiet.set_share(1.1)
    with pytest.raises(BadArgument, match="over the link"):
        quiet.set_share(1, 4)
    with pytest.raises(BadArgument, match="seconds"):
        quiet.set_limit(0)
    with pytest.raises(BadArgument, match="table"):
        quiet.set_raws(np.zeros((8, 32, 2), np.uint64))
    quiet.close()
    device.close()


def test_too_few_slots_need_the_cpu(model):
    cpu, gguf, programs, experts = model
    with pytest.raises(BadArgument, match="layer 0 on the device"):
        GpuBackend(Tensors(gguf, {}), cpu.geometry, experts, programs, new_device(), slots=ExpertSlots(experts, COUNTS))


def test_times_name_the_branch_that_was_last():
    one = hybrids.LayerTimes(0, 1, 2, 1, 1, 1, 1, 100, 1.0, 5.0, 9.0, 7.0, 9.5)
    assert one.waited_for == "link"
    assert hybrids.LayerTimes(0, 1, 2, 0, 1, 0, 1, 0, 1.0, 5.0, 9.0, 7.0, 9.5).waited_for == "cpu"
    assert hybrids.LayerTimes(0, 1, 2, 0, 0, 0, 0, 0, 1.0, 5.0, 9.0, 7.0, 9.5).waited_for == "hits"


@pytest.mark.parametrize(("ends", "times", "last"), [
    ((18, 0, 0), (11, 0, 0), "hits"),  # only they were there
    ((18, 0, 10), (11, 0, 10), "cpu"),
    ((18, 0, 4), (11, 0, 4), "hits"),
    ((11, 0, 4), (11, 0, 4), "hits"),
    ((4, 10, 18), (4, 10, 11), "cpu"),
    ((18, 19, 4), (11, 11, 4), "link"),
    ((18, 10, 3), (11, 10, 3), "link"),
    ((9, 10, 8), (9, 10, 8), "link"),
    ((10, 9, 8), (10, 9, 8), "hits"),
])  # fmt: skip
def test_a_stamp_after_the_join_is_no_later_than_the_join(model, ends, times, last):
    """Its branch has ended by then. Records and sums say the same."""
    experts, stamps = model[3], np.zeros((8, bells.STAMP_WORDS), np.int64)
    began = 10**15
    for word, us in ((bells.BEGAN, -2), (bells.POSTED, 0), (bells.JOINED, 11)):
        stamps[:, word] = began + us * 1000
    counted = (bells.N_HIT, bells.N_LINK_EXPERTS, bells.N_CPU)
    for word, n, us in zip((bells.HITS_END, bells.LINK_END, bells.WAIT_END), counted, ends, strict=True):
        stamps[:, word], stamps[:, n] = us and began + us * 1000, us > 0
    found = hybrids.decode_telemetry(stamps.reshape(-1), experts)
    assert [(t.hits_us, t.link_us, t.cpu_us) for t in found] == [times] * 8
    assert {t.waited_for for t in found} == {last} and {t.join_us for t in found} == {11.0}
    stats = ExpertStats(8, np.ones(8, np.int64))
    stats.add(stamps, 100.0)
    r = stats.record()
    assert r["waited_for"] == {"hits": 0, "link": 0, "cpu": 0} | {last: 8}
    assert r["us_per_window"] == {"post": 16, "join": 88} | {b: 8 * us for b, us in zip(BRANCHES, times, strict=True)}
    until = times[BRANCHES.index(last)]
    assert r["window_parts_us"][f"wait for {last}"] == 8 * until and r["window_parts_us"]["join"] == 88 - 8 * until
    assert sum(r["window_parts_us"].values()) == 16 + 88
