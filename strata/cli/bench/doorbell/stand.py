"""What times the GPU's side of the doorbell: weights of one expert at many places, and a thread that answers."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import numpy as np

from strata.base import doorbell as mail
from strata.base.compiled import cached_njit
from strata.base.errors import need
from strata.base.program import Buffer, Op, Program
from strata.cpu.machine_code import clock_ns, ld_acquire64, pause, st64, st_seq_cst64
from strata.gpu.device import Device
from strata.gpu.experts_op import lower_experts
from strata.gpu.gemv import Place
from strata.gpu.hybrid import Hybrid
from strata.gpu.launch import Launch
from strata.gpu.lower import Lowering
from strata.gpu.mailbox import copy_values, inbox
from strata.gpu.memory import Memory
from strata.gpu.relayout import relayout
from strata.gpu.split_experts import Split
from strata.gpu.weights import Matrix
from strata.pack.formats import BlockFormat, by_name
from strata.pack.random_blocks import random_rows


@dataclass(frozen=True)
class Sizes:
    """Of an experts layer: D values of a row, experts of (F, D), K of them a row."""

    D: int = 2560
    F: int = 640
    K: int = 10


SIZES = Sizes()
"""Of the released geometry."""

ANSWER_US, STOPPED = 0, 1
"""Words of the thread that answers, in front of the mailbox's address."""


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
    """A service that answers after `words[ANSWER_US]`; it spins from start to end."""

    def __init__(self, box: mail.Mailbox, address: int, memory: object):
        assert (mail.REQUEST, mail.REPLY, mail.STATUS) == (0, 128, 136), "the words of a mailbox"
        self.memory, self.words = memory, np.array([0, 0, address], np.int64)
        _serve.compile("(int64,)")
        self.thread = threading.Thread(target=_serve, args=(self.words.ctypes.data,), daemon=True)
        self.thread.start()

    def begin_window(self) -> None: ...

    def end_window(self) -> None: ...

    def close(self) -> None:
        self.words[STOPPED] = 1
        self.thread.join()


@dataclass(frozen=True)
class _Projection:
    format: BlockFormat
    rows: int
    columns: int


@dataclass(frozen=True)
class _Layer:
    projections: tuple[_Projection, ...]


class Experts:
    """What an ExpertLayout tells, of L layers of E experts of (F, D) that are all alike."""

    def __init__(self, names: tuple[str, str, str], L: int, E: int, F: int, D: int):
        self.formats = tuple(by_name(n) for n in names)
        self.n_layers, self.E, self.F, self.D = L, E, F, D
        self.shapes = ((F, D), (F, D), (D, F))
        parts = list(zip(self.formats, self.shapes, strict=True))
        self.layers = (_Layer(tuple(_Projection(f, *shape) for f, shape in parts)),) * L
        self.raw = [random_rows(f, *shape, 0.02, np.random.default_rng(i)) for i, (f, shape) in enumerate(parts)]

    def blob_bytes(self, layer: int) -> int:
        """Bytes of an expert."""
        return sum(r.nbytes for r in self.raw)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


class Stand:
    """Weights, slots and memory of a program of experts ops. Every row wants the same K experts of each layer."""

    def __init__(self, device: Device, experts: Experts, K: int):
        self.device, self.experts, self.K, self.by_table = device, experts, K, True
        E, L = experts.E, experts.n_layers
        self.slots, self.counts = self, (E,) * L
        self._arrays: dict[str, int] = {}
        relaid = [relayout(f, r) for f, r in zip(experts.formats, experts.raw, strict=True)]
        ends = np.cumsum([0, *(_up(r.size, 256) for r in relaid)])
        one = np.zeros(ends[3], np.uint8)
        for at, r in zip(ends[:3], relaid, strict=True):
            one[at : at + r.size] = r
        self.offsets, self.place_bytes = [int(e) for e in ends[:3]], one.size
        self.places = device.alloc(one.size * L * K)
        device.upload(self.places, one)
        for i in range(1, L * K):
            device.run(copy_values(self.places, self.places + i * one.size, one.size // 4))
        self.shared = device.alloc(one.size)
        device.upload(self.shared, one)
        self.table_at = device.alloc(24 * E * L)
        self._host_copies()
        self.hybrid = Hybrid(device, experts, K, Answering, self.raws)
        device.synchronize()

    def _host_copies(self) -> None:
        """The same experts in pinned memory, and `raws`: where the device finds them."""
        L, K, raw = self.experts.n_layers, self.K, self.experts.raw
        starts = np.cumsum([0, *(_up(r.nbytes, 64) for r in raw)])
        host = self.device.host(int(starts[3]) * L * K)
        host.reshape(L * K, -1)[:] = np.concatenate([np.pad(r.reshape(-1), (0, -r.nbytes % 64)) for r in raw])
        self.raws = np.zeros((L, self.experts.E, 3), np.uint64)
        for layer in range(L):
            for e in range(K):
                self.raws[layer, e] = host.ctypes.data + (layer * K + e) * int(starts[3]) + starts[:3]
        self._host = host

    # ---- what a Lowering asks weights and slots for

    def table_address(self, layer: int) -> int:
        return self.table_at + 24 * self.experts.E * layer

    def expert_place(self, layer: int, part: int, *shape: int) -> Place:
        return Place(self.places + layer * self.K * self.place_bytes + self.offsets[part], self.place_bytes)

    def expert_format(self, layer: int, part: int) -> BlockFormat:
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

    # ---- programs

    def hold(self, hits: int) -> None:
        """The first `hits` of the wanted experts are resident from now on."""
        table = np.zeros((self.experts.n_layers, self.experts.E, 3), np.uint64)
        for layer in range(self.experts.n_layers):
            for e in range(hits):
                at = self.places + (layer * self.K + e) * self.place_bytes
                table[layer, e] = [at + o for o in self.offsets]
        self.device.upload(self.table_at, table)

    def answer_after(self, us: int) -> None:
        self.hybrid.server.words[ANSWER_US] = us

    def lowering(self, T: int, split: Split | None) -> tuple[Lowering, list[Launch]]:
        """Experts ops of all layers for T rows, and the launches that begin a window. None: all are resident."""
        e, K, self.by_table = self.experts, self.K, split is not None
        shapes = {"x": (T, e.D), "y": (T, e.D), "weights": (T, K), "shared_gate": (T,)}
        buffers = {n: Buffer(n, s, "float32", "scratch") for n, s in shapes.items()}
        buffers["ids"] = Buffer("ids", (T, K), "int32", "scratch")
        ports = {n: n for n in buffers} | {f"shared_{p}_w": str(i) for i, p in enumerate(("gate", "up", "down"))}
        consts = {"D": e.D, "K": K, "E": e.E, "F": e.F, "shared_width": e.F}
        program = Program("trunk", T, tuple(Op("experts", i, ports, consts) for i in range(e.n_layers)), buffers)
        memory = Memory([program])
        for _ in range(2):  # to measure, then with memory
            low = Lowering(program, memory, self, 256, split=split).run({"experts": lower_experts})
            if memory.measuring:
                memory.allocate(self.device)
        rng, up = np.random.default_rng(0), self.device.upload
        up(memory.address("x"), rng.standard_normal((T, e.D), np.float32))
        up(memory.address("weights"), np.full((T, K), 0.1, np.float32))
        up(memory.address("ids"), np.tile(np.arange(K, dtype=np.int32), (T, 1)))
        self.by_table = True
        return low, inbox(self.hybrid._host.ctypes.data, memory.address("inbox"), 0, low.error)

    def split(self, **form: int | bool) -> Split:
        """The model's split with some of its fields changed."""
        return replace(self.hybrid.split, **form)

    def check(self, error: int) -> None:
        """StrataError if launches have left an error in the word at this address."""
        word = np.zeros(1, np.uint64)
        self.device.download(error, word)
        need(word[0] == 2**64 - 1, "layers that are timed run without an error", found=hex(int(word[0])),
             needed="no error", advice="Please report this.")  # fmt: skip

    def close(self) -> None:
        self.hybrid.close()
