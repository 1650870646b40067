"""A stand-in for the device side of the doorbell: posts prepared requests, waits for replies, compares every sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata.base.compiled import cached_njit
from strata.base.doorbell import (
    CPU,
    CPU_ENTRIES,
    HEADER,
    HIT_ENTRIES,
    LAYER,
    MISSES,
    PAYLOAD,
    REPLY,
    REQUEST,
    ROWS,
    STATUS,
    Mailbox,
)
from strata.cpu.lower import aligned_bytes
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

POISON = -0x5A5A5A5A5A5A5A5B

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
