"""Times the doorbell, the fetch over the link and whole shared layers at full size: python -m tests.gpu.time_doorbell

Weights are random ones of one expert, at as many places as a model wants; a thread answers requests at once, or after
some us, with zeros. Shown are medians, in us a layer, of a graph of 48 layers.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass

import numpy as np

from strata.base import doorbell as mail
from strata.base.compiled import cached_njit
from strata.base.program import Buffer, Op, Program
from strata.cpu.machine_code import clock_ns, ld_acquire64, pause, st64, st_seq_cst64
from strata.gpu import doorbell as bells
from strata.gpu.device import CupyDevice, Device
from strata.gpu.experts_op import lower_experts
from strata.gpu.gemv import Place
from strata.gpu.hybrid import Hybrid
from strata.gpu.launch import Launch
from strata.gpu.link_fetch import link_fetch
from strata.gpu.lower import Lowering
from strata.gpu.mailbox import copy_values, inbox
from strata.gpu.memory import MADE_UP, Memory
from strata.gpu.relayout import relayout
from strata.gpu.split_experts import layer_parts
from strata.gpu.weights import Matrix
from strata.pack.formats import by_name
from tests.block_data import random_rows

BLOCKS = (32, 64, 96, 132, 264, 396, 528)
ANSWER_US, STOPPED, MAILBOX = 0, 8, 16


@cached_njit
def _serve(s):
    """Words: us before an answer, whether to end, the mailbox. Answers every request with what is there."""
    m = np.int64(ld_acquire64(s + 16))
    seen = ld_acquire64(m)
    while ld_acquire64(s + 8) == 0:
        request = ld_acquire64(m)
        if request > seen:
            until = clock_ns() + 1000 * ld_acquire64(s)
            while clock_ns() < until:
                pause()
            seen = request
            st64(m + 136, 0)
            st_seq_cst64(m + 128, request)
        else:
            pause()


class Answering:
    """A service that answers after `us`; it spins from start to end."""

    def __init__(self, box: mail.Mailbox, address: int, memory: object):
        assert (mail.REQUEST, mail.REPLY, mail.STATUS) == (0, 128, 136)
        self.memory, self.words = memory, np.array([0, 0, address], np.int64)
        _serve.compile("(int64,)")
        self.thread = threading.Thread(target=_serve, args=(self.words.ctypes.data,), daemon=True)
        self.thread.start()

    def begin_window(self) -> None: ...

    def end_window(self) -> None: ...

    def close(self) -> None:
        self.words[STOPPED // 8] = 1
        self.thread.join()


@dataclass
class _Projection:
    format: object
    rows: int
    columns: int


@dataclass
class _Layer:
    projections: tuple[_Projection, ...]


class Experts:
    """What an ExpertLayout tells, of layers that are all alike."""

    def __init__(self, names: tuple[str, str, str], L: int, E: int, F: int, D: int):
        self.formats = tuple(by_name(n) for n in names)
        self.n_layers, self.E, self.F, self.D = L, E, F, D
        self.shapes = ((F, D), (F, D), (D, F))
        layer = _Layer(tuple(_Projection(f, *s) for f, s in zip(self.formats, self.shapes, strict=True)))
        self.layers = (layer,) * L
        self.raw = [random_rows(f, *s, seed=i) for i, (f, s) in enumerate(zip(self.formats, self.shapes, strict=True))]

    def blob_bytes(self, layer: int) -> int:
        return sum(r.nbytes for r in self.raw)


class Stand:
    """Weights, slots and memory of a program of experts ops, and its graph."""

    def __init__(self, device: Device, experts: Experts, K: int, wanted: int):
        self.device, self.experts, self.K, self.by_table = device, experts, K, True
        E, L = experts.E, experts.n_layers
        self.slots, self.counts = self, (E,) * L
        self._arrays: dict[str, int] = {}
        relaid = [relayout(f, r) for f, r in zip(experts.formats, experts.raw, strict=True)]
        ends = np.cumsum([0, *(-(-r.size // 256) * 256 for r in relaid)])
        self.one = np.zeros(ends[3], np.uint8)
        for at, r in zip(ends, relaid, strict=False):
            self.one[at : at + r.size] = r
        self.places = device.alloc(self.one.size * L * wanted)
        device.upload(self.places, self.one)
        for i in range(1, L * wanted):
            device.run(copy_values(self.places, self.places + i * self.one.size, self.one.size // 4))
        self.shared = device.alloc(self.one.size)
        device.upload(self.shared, self.one)
        self.offsets = [int(e) for e in ends[:3]]
        self.wanted, self.table_at = wanted, device.alloc(24 * E * L)
        raw_bytes = sum(-(-r.nbytes // 64) * 64 for r in experts.raw)
        self.host = device.host(raw_bytes * L * wanted)
        one = np.concatenate([np.pad(r.reshape(-1), (0, -r.nbytes % 64)) for r in experts.raw])
        self.host.reshape(-1, raw_bytes)[:] = one
        starts = np.cumsum([0, *(-(-r.nbytes // 64) * 64 for r in experts.raw)])[:3]
        self.raws = np.zeros((L, E, 3), np.uint64)
        for layer in range(L):
            for e in range(wanted):
                at = self.host.ctypes.data + (layer * wanted + e) * raw_bytes
                self.raws[layer, e] = at + starts
        self.hybrid = Hybrid(device, experts, K, Answering, self.raws)
        device.synchronize()

    # what Lowering asks weights and slots for

    def table_address(self, layer: int) -> int:
        return self.table_at + 24 * self.experts.E * layer

    def expert_place(self, layer: int, part: int, *shape: int) -> Place:
        return Place(self.places + layer * self.wanted * self.one.size + self.offsets[part], self.one.size)

    def expert_format(self, layer: int, part: int):
        return self.experts.formats[part]

    def expert_scales(self, layer: int) -> tuple[int, int, int]:
        return 0, 0, 0

    def matrix(self, name: str) -> Matrix:
        part = int(name)
        f, (rows, columns) = self.experts.formats[part], self.experts.shapes[part]
        return Matrix(name, f, rows, columns, f.row_bytes(columns), self.shared + self.offsets[part])

    def array(self, name: str, kind: str, array: np.ndarray) -> int:
        if name not in self._arrays:
            self._arrays[name] = self.device.alloc(array.nbytes)
            self.device.upload(self._arrays[name], np.ascontiguousarray(array))
        return self._arrays[name]

    # programs

    def hold(self, hits: int) -> None:
        """The first `hits` of the wanted experts are resident."""
        table = np.zeros((self.experts.n_layers, self.experts.E, 3), np.uint64)
        for layer in range(self.experts.n_layers):
            for e in range(hits):
                at = self.places + (layer * self.wanted + e) * self.one.size
                table[layer, e] = [at + o for o in self.offsets]
        self.device.upload(self.table_at, table)

    def lowering(self, T: int, split) -> tuple[Lowering, list[Launch]]:
        """Experts ops of all layers for T rows that want the same K experts, and the launches that begin a window."""
        e, K = self.experts, self.K
        shapes = {"x": (T, e.D), "y": (T, e.D), "weights": (T, K), "shared_gate": (T,)}
        buffers = {n: Buffer(n, s, "float32", "scratch") for n, s in shapes.items()}
        buffers["ids"] = Buffer("ids", (T, K), "int32", "scratch")
        ports = {n: n for n in buffers} | {f"shared_{p}_w": str(i) for i, p in enumerate(("gate", "up", "down"))}
        consts = {"D": e.D, "K": K, "E": e.E, "F": e.F, "shared_width": e.F}
        ops = tuple(Op("experts", layer, ports, consts) for layer in range(e.n_layers))
        program = Program("trunk", T, ops, buffers)
        memory = Memory([program])
        for _ in range(2):
            low = Lowering(program, memory, self, 256, split=split).run({"experts": lower_experts})
            if memory.measuring:
                memory.allocate(self.device)
        rng = np.random.default_rng(0)
        up = self.device.upload
        up(memory.address("x"), rng.standard_normal((T, e.D)).astype(np.float32))
        up(memory.address("weights"), np.full((T, K), 0.1, np.float32))
        up(memory.address("ids"), np.tile(np.arange(K, dtype=np.int32), (T, 1)))
        assert memory.address("x") != MADE_UP
        return low, inbox(self.hybrid._host.ctypes.data, memory.address("inbox"), 0, low.error)

    def us(self, launches: list[Launch], error: int = 0, rounds: int = 30) -> float:
        """Median us a layer of a graph."""
        graph, times = self.device.graph(launches), []
        for _ in range(rounds):
            start = time.perf_counter()
            graph()
            self.device.synchronize()
            times.append(1e6 * (time.perf_counter() - start))
        if error:
            word = np.zeros(1, np.uint64)
            self.device.download(error, word)
            assert word[0] == 2**64 - 1, hex(int(word[0]))
        return float(np.median(times[len(times) // 4 :])) / self.experts.n_layers

    def bells(self, T: int, cpu: int, copy: bool = True) -> float:
        """post and wait alone, `cpu` of the K experts missing."""
        low, first = self.lowering(T, self.hybrid.split)
        self.hold(self.K - cpu)
        self.hybrid.set_share(0)
        d, m, launches = self.hybrid.split.doorbell, low.memory, list(first)
        sums = self.device.alloc(8 * T * self.experts.D) if copy else 0
        for layer in range(self.experts.n_layers):
            at = self.hybrid.split.stamps + 8 * bells.STAMP_WORDS * layer
            launches += bells.post(d, m.address("ids"), m.address("weights"), m.address("x"), self.table_address(layer),
                                   0, 0, bells.Blob(0, 0, 0), T, layer, m.error, at)  # fmt: skip
            launches += bells.wait_reply(d, sums, T, m.error, np.uint64(0), at)
        return self.us(launches, m.error)

    def fetch(self, n: int, blocks: int) -> float:
        """GB/s of n experts over the link in every layer."""
        work = self.device.alloc(4 * (bells.EXPERTS + n))
        self.device.upload(work, np.array([0, n, 0, *range(n)], np.int32))
        launches = []
        for layer in range(self.experts.n_layers):
            raws = self.hybrid.split.raws(layer)
            launches += link_fetch(work, raws, self.hybrid.split.staging, layer_parts(self, layer), blocks)
        return n * self.experts.blob_bytes(0) / self.us(launches, rounds=8) / 1e3

    def resident(self, T: int) -> float:
        """us of a layer whose experts are all on the device, without a doorbell."""
        self.by_table = False
        low, first = self.lowering(T, None)
        self.by_table = True
        return self.us([*first, *low.launches], low.error)

    def layer(self, T: int, hits: int, linked: int, answer_us: int, **form: bool) -> str:
        """A whole layer: `hits` of the K experts resident, `linked` over the link, the rest by the CPU."""
        split = self.hybrid.split
        for name, value in form.items():
            split = type(split)(**{**split.__dict__, name: value})
        low, first = self.lowering(T, split)
        self.hold(hits)
        missing = self.K - hits
        self.hybrid.set_share(0 if not linked else min(1.0, (-(-linked * 256 // missing)) / 256))
        self.hybrid.server.words[ANSWER_US // 8] = answer_us
        took = self.us([*first, *low.launches, *self.hybrid.launches(low.T)], low.error)
        self.hybrid.server.words[ANSWER_US // 8] = 0
        t = self.hybrid.telemetry()
        assert all(x.link_experts == linked and x.cpu_entries == T * (missing - linked) for x in t)
        parts = [float(np.median([getattr(x, n) for x in t])) for n in
                 ("post_us", "hits_us", "link_us", "cpu_us", "join_us")]  # fmt: skip
        return f"{took:7.1f} us   " + "  ".join(f"{p:6.1f}" for p in parts)


def run(device: Device, L: int, E: int, F: int, D: int, K: int, rows: tuple[int, ...]) -> None:
    stand = Stand(device, Experts(("IQ3_XXS", "IQ3_XXS", "IQ4_NL"), L, E, F, D), K, K)
    try:
        print(f"{device.name}: {L} layers, K {K}, experts of {stand.experts.blob_bytes(0)} bytes")
        print("post + wait, us a layer: nobody rings; 1 expert of the CPU; the same, sums left in the mailbox")
        for T in rows:
            print(f"  T={T}  {stand.bells(T, 0):6.2f}  {stand.bells(T, 1):6.2f}  {stand.bells(T, 1, copy=False):6.2f}")
        print(f"link fetch, GB/s, by blocks {BLOCKS}")
        for n in (1, 2, 4, 10):
            print(f"  {n:2} experts  " + "  ".join(f"{stand.fetch(n, b):5.1f}" for b in BLOCKS))
        print("layer, us: all; after the start of post: post, then to the end of hits, link, CPU, join")
        for T in rows:
            print(f"  T={T} all resident, no doorbell        {stand.resident(T):7.1f} us")
            for hits, linked, answer in ((K, 0, 0), (K - 2, 0, 0), (K - 2, 0, 20), (K - 2, 1, 20), (K - 2, 2, 0),
                                         (K - 4, 2, 40), (0, 0, 0), (0, K // 2, 100), (0, K, 0)):  # fmt: skip
                name = f"T={T} hits {hits:2} link {linked:2} CPU {K - hits - linked:2} ({answer:3} us)"
                print(f"  {name}  {stand.layer(T, hits, linked, answer)}")
        print("other forms where the CPU is last (2 experts, 120 us): as above, sums in place, no stamps, no link")
        for T in rows:
            for form in ({}, {"copy_sums": False}, {"stamp_branches": False}, {"staging": 0}):
                print(f"  T={T}  {stand.layer(T, K - 2, 0, 120, **form)}")
    finally:
        stand.hybrid.close()
        device.close()


if __name__ == "__main__":
    run(CupyDevice(), 48, 512, 640, 2560, 10, tuple(map(int, sys.argv[1:])) or (1, 4, 8))
