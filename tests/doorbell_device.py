"""A stand-in for the device side of the doorbell: posts prepared requests, waits for replies, compares every sum.

Expected sums come from the CPU op: its outputs of single entries, weighted and summed with numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from strata.base import arithmetic
from strata.base.compiled import cached_njit
from strata.base.doorbell import (
    CPU,
    CPU_ENTRIES,
    HEADER,
    HIT_ENTRIES,
    LAYER,
    LINK,
    MISSES,
    PAYLOAD,
    REPLY,
    REQUEST,
    ROWS,
    STATUS,
    Mailbox,
)
from strata.base.program import ERROR_WORDS, Buffer, Op, Program
from strata.cpu.lower import Lowering, Memory, aligned_bytes
from strata.cpu.machine_code import (
    clock_ns,
    copy_bytes,
    ld8,
    ld64,
    ld_acquire64,
    pause,
    st64,
    st_seq_cst64,
    yield_cpu,
)
from strata.cpu.weights import Weights
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors

POISON = -0x5A5A5A5A5A5A5A5B
POOL_ROWS = 16

ASKED, REPLIED, WRONG, TIMEOUTS, STATUSES, LAST, ALL_NS, MOST_NS = range(8)


@cached_njit
def play(mailbox, x_at, sums_at, images, image_bytes, expected, mask, shapes, n_images, n_requests, first, limit_ns,
         seed, result):  # fmt: skip
    """Ask n_requests times, each an image by chance: header and payload, then what its rows (mask) must sum up to.

    shapes (n_images, 2): values of a request, values a row. Rows without an entry must stay as they were. result: the
    words ASKED to MOST_NS; the first request has the number `first`. Stops at a request without a reply in limit_ns.
    """
    state = np.uint64(seed)
    for number in range(first, first + n_requests):
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        i = np.int64(state >> np.uint64(33)) % n_images
        n_values, D = ld64(shapes + 16 * i), ld64(shapes + 16 * i + 8)
        for k in range(n_values):
            st64(mailbox + sums_at + 8 * k, POISON)
        copy_bytes(mailbox + HEADER, images + i * image_bytes, image_bytes)
        began = clock_ns()
        st64(result + 8 * ASKED, ld64(result + 8 * ASKED) + 1)
        st64(result + 8 * LAST, number)
        st_seq_cst64(mailbox + REQUEST, number)
        turns = 0
        while ld_acquire64(mailbox + REPLY) < number:
            pause()
            turns += 1
            if turns & 255 == 0:
                yield_cpu()
                if clock_ns() - began > limit_ns:
                    st64(result + 8 * TIMEOUTS, ld64(result + 8 * TIMEOUTS) + 1)
                    return
        took = clock_ns() - began
        st64(result + 8 * REPLIED, ld64(result + 8 * REPLIED) + 1)
        st64(result + 8 * ALL_NS, ld64(result + 8 * ALL_NS) + took)
        st64(result + 8 * MOST_NS, max(ld64(result + 8 * MOST_NS), took))
        if ld64(mailbox + STATUS) != 0:
            st64(result + 8 * STATUSES, ld64(result + 8 * STATUSES) + 1)
            continue
        wrong = 0
        for k in range(n_values):
            want = ld64(expected + 8 * (i * ld64(shapes + 16 * n_images) + k))
            if ld8(mask + i * ld64(shapes + 16 * n_images + 8) + k // D) == 0:
                want = np.int64(POISON)
            if ld64(mailbox + sums_at + 8 * k) != want:
                wrong += 1
        if wrong:
            st64(result + 8 * WRONG, ld64(result + 8 * WRONG) + 1)


@dataclass
class Request:
    """decisions uint8, ids int32, weights float32 (T, K); x float32 (T, D); sums int64 (T, D)."""

    layer: int
    decisions: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    x: np.ndarray
    sums: np.ndarray

    def header(self) -> np.ndarray:
        words = np.zeros(PAYLOAD // 8 - HEADER // 8, np.int64)
        here = self.decisions == CPU
        words[LAYER], words[ROWS], words[CPU_ENTRIES] = self.layer, len(self.ids), here.sum()
        words[HIT_ENTRIES], words[MISSES] = (~here).sum(), len(set(self.ids[here].tolist()))
        return words

    def write(self, mailbox: Mailbox, area: np.ndarray) -> None:
        """Header and payload into the bytes of a mailbox."""
        area[HEADER:PAYLOAD] = self.header().view(np.uint8)
        for at, values in ((mailbox.decisions, self.decisions), (mailbox.ids, self.ids),
                           (mailbox.weights, self.weights), (mailbox.x, self.x)):  # fmt: skip
            area[at : at + values.nbytes] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)


@dataclass
class Told:
    asked: int
    replied: int
    wrong: int
    timeouts: int
    statuses: int
    last: int
    mean_us: float
    most_us: float


class Model:
    """Experts of a file, and what single entries of them give."""

    def __init__(self, path: Path, layers: int, K: int):
        self.gguf = GgufFile(path)
        self.weights = Weights(Tensors(self.gguf), expert_layout(self.gguf, layers))
        self.K, self.L = K, layers
        self.E, self.F, self.D = self.weights.experts.E, self.weights.experts.F, self.weights.experts.D
        self.x = np.random.default_rng(5).standard_normal((POOL_ROWS, self.D)).astype(np.float32)
        self.outputs = cache(self._outputs)

    def _outputs(self, layer: int) -> np.ndarray:
        """(rows of x, E, D) float32: outputs of single experts before their weights, as the CPU op leaves them."""
        T, K = POOL_ROWS, self.K
        shared = [f"blk.{layer}.ffn_{part}_shexp.weight" for part in ("gate", "up", "down")]
        shapes = {"u": ((T, self.D), "float32"), "ids": ((T, K), "int32"), "w": ((T, K), "float32"),
                  "sg": ((T, 1), "float32"), "y": ((T, self.D), "float32")}  # fmt: skip
        buffers = {n: Buffer(n, shape, dtype, "scratch") for n, (shape, dtype) in shapes.items()}
        consts = {"E": self.E, "K": K, "F": self.F, "D": self.D,
                  "shared_width": self.gguf.info(shared[0]).shape[0]}  # fmt: skip
        ports = {"x": "u", "ids": "ids", "weights": "w", "shared_gate": "sg", "y": "y"}
        ports |= {f"shared_{part}_w": name for part, name in zip(("gate", "up", "down"), shared, strict=True)}
        program = Program("trunk", T, (Op("experts", layer, ports, consts),), buffers)
        memory, error = Memory([program], {}), np.zeros(ERROR_WORDS, np.int64)
        Lowering(program, memory, self.weights, 0, 1, error.ctypes.data).run()
        memory.allocate()
        walk = Lowering(program, memory, self.weights, 0, 1, error.ctypes.data).run()
        memory.arrays["u"][:] = self.x
        out = np.empty((T, self.E, self.D), np.float32)
        for first in range(0, self.E, K):
            ids = np.arange(first, first + K) % self.E
            memory.arrays["ids"][:] = ids
            assert walk.run() < 0
            entry_of = memory.private["experts.entry_of"].view(np.int32)[: T * K]
            entries = memory.private["experts.routed.out"].view(np.float32)[: T * K * self.D].reshape(-1, self.D)
            out[:, ids] = entries[entry_of].reshape(T, K, self.D)
        return out

    def sums(self, layer: int, rows: np.ndarray, ids: np.ndarray, weights: np.ndarray, here: np.ndarray) -> np.ndarray:
        """(T, D) int64: the exact sums of the entries `here`."""
        total = np.zeros((len(rows), self.D), np.int64)
        scales = self.weights.expert_scales(layer)
        for t, j in np.argwhere(here):
            y = self.outputs(layer)[rows[t], ids[t, j]]
            if scales is not None:
                y = y * scales[2][ids[t, j]]
            terms, overflow = arithmetic.combine_terms(weights[t, j], y)
            assert not overflow
            total[t] += terms
        return total

    def request(self, rng: np.random.Generator, T: int | None = None, layer: int | None = None,
                misses: float | None = None) -> Request:  # fmt: skip
        """A request by chance; `misses`: chance of an entry to be the CPU's."""
        T = int(rng.integers(1, 9)) if T is None else T
        layer = int(rng.integers(self.L)) if layer is None else layer
        rows = rng.permutation(POOL_ROWS)[:T]
        few = int(rng.integers(self.K, self.E + 1))  # rows share experts, more or less
        ids = np.stack([rng.permutation(few)[: self.K] for _ in range(T)]).astype(np.int32)
        weights = rng.uniform(0, 1, (T, self.K)).astype(np.float32)
        chance = rng.uniform(0, 1) if misses is None else misses
        decisions = np.where(rng.uniform(0, 1, ids.shape) < chance, CPU, rng.integers(1, LINK + 1, ids.shape))
        here = decisions == CPU
        return Request(layer, decisions.astype(np.uint8), ids, weights, self.x[rows],
                       self.sums(layer, rows, ids, weights, here))  # fmt: skip


class Device:
    """A mailbox and the device beside it. `number`: of the last request."""

    def __init__(self, mailbox: Mailbox):
        self.mailbox, self.number = mailbox, 0
        self.area = aligned_bytes(mailbox.n_bytes + 64)
        self.area = self.area[-self.area.ctypes.data % 128 :][: mailbox.n_bytes]
        self.words = self.area[:PAYLOAD].view(np.int64)
        self._images: tuple[np.ndarray, ...] = ()

    @property
    def address(self) -> int:
        return self.area.ctypes.data

    def prepare(self, requests: Sequence[Request], images: tuple[np.ndarray, ...] | None = None) -> tuple:
        """What `ask` chooses from: requests, or what an earlier call returned."""
        m = self.mailbox
        if images is not None:
            self._images = images
            return images
        images = np.zeros((len(requests), m.sums), np.uint8)
        expected = np.zeros((len(requests), m.rows * m.D), np.int64)
        mask = np.zeros((len(requests), m.rows), np.uint8)
        shapes = np.zeros((len(requests) + 1, 2), np.int64)
        for i, r in enumerate(requests):
            r.write(m, images[i])
            expected[i, : r.sums.size] = r.sums.reshape(-1)
            mask[i, : len(r.ids)] = (r.decisions == CPU).any(axis=1)
            shapes[i] = r.sums.size, m.D
        shapes[-1] = m.rows * m.D, m.rows
        self._images = np.ascontiguousarray(images[:, HEADER:]), expected, mask, shapes
        return self._images

    def ask(self, n: int, limit_s: float = 20.0, seed: int = 1) -> Told:
        """Post n requests, one after the other."""
        images, expected, mask, shapes = self._images
        result = np.zeros(8, np.int64)
        play(self.address, self.mailbox.x, self.mailbox.sums, images.ctypes.data, images.shape[1], expected.ctypes.data,
             mask.ctypes.data, shapes.ctypes.data, len(images), n, self.number + 1, int(limit_s * 1e9), seed,
             result.ctypes.data)  # fmt: skip
        self.number = int(result[LAST]) or self.number
        asked, replied, wrong, timeouts, statuses, last, ns, most = (int(v) for v in result)
        return Told(asked, replied, wrong, timeouts, statuses, last, ns / 1e3 / max(replied, 1), most / 1e3)

    @property
    def status(self) -> int:
        return int(self.words[STATUS // 8])

    @property
    def reply(self) -> int:
        return int(self.words[REPLY // 8])
