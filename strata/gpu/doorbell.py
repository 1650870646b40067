"""Launchers of the doorbell: who computes every routed entry of a layer, the request to the CPU, the wait for its sums.

`base/doorbell.py` lays out the mailbox in host memory; here are the areas on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.doorbell import Mailbox
from strata.base.errors import need
from strata.gpu.gemv import columns_of
from strata.gpu.launch import Launch, Source, i32, i64, launch, pointer

SOURCE = Source("doorbell.cu", ("post", "wait_reply", "stamp"))

COUNTER, LIMIT_NS, SHARE, STAGING, CONTROL_WORDS = range(5)
"""Control, int64 words. The first belongs to the device: the number of the last request. The others may change
between windows: ns to wait, share of missing experts for the link in 1/256, most experts over the link."""

RANG, STAGED, CPU_ROWS, EXPERTS = range(4)
"""Work, int32 words that `post` leaves for the rest of the layer: whether it rang, places to fill over the link, a bit
for each row with entries of the CPU; from EXPERTS on the expert of every place, -1 for none."""

BEGAN, POSTED, HITS_END, LINK_END, WAIT_END, JOINED = range(6)
N_ROWS, N_CPU, N_HIT, N_LINK, N_CPU_EXPERTS, N_LINK_EXPERTS = range(6, 12)
STAMP_WORDS = 12
"""Stamps of a layer, int64 words: times of the device in ns, then rows, entries by decision, and distinct experts."""

START_NS = 2000
"""A combine begins at most this long after the last branch has ended. Ends of hits and link are stamped by nodes for
which nothing waits, so such a stamp may come after the combine's: it then counts as the last only if no other branch is
known to have ended within this time."""

MOST_ENTRIES = 1024


@dataclass(frozen=True)
class Doorbell:
    """Addresses: the mailbox in host memory, and areas on the device.

    control    int64 (CONTROL_WORDS)       work       int32 (EXPERTS + places)
    decisions  uint8 (rows * K)            staged     uint64 (E, 3), matrices that came over the link
    jobs       int32 (2, 1 + rows * K), jobs of products for hits and for the link
    """

    mailbox: Mailbox
    host: int
    control: int
    work: int
    decisions: int
    staged: int
    jobs: int

    def __post_init__(self) -> None:
        m = self.mailbox
        need(m.rows * m.K <= MOST_ENTRIES, "entries of a window", found=m.rows * m.K, needed=f"at most {MOST_ENTRIES}")
        need(m.D % 4 == 0, "values of a row in the mailbox", found=m.D, needed="a multiple of 4")
        need(self.host % 128 == 0, "alignment of the mailbox", found=self.host, needed="128 bytes")

    @property
    def job_words(self) -> int:
        """Words of one list of jobs."""
        return 1 + self.mailbox.rows * self.mailbox.K

    @property
    def link_jobs(self) -> int:
        """Address of the jobs of the link; those of hits lie at `jobs`."""
        return self.jobs + 4 * self.job_words


@dataclass(frozen=True)
class Blob:
    """An expert in the device layout: gate at 0, up and down behind it; bytes from place to place."""

    up_at: int
    down_at: int
    n_bytes: int


def post(
    d: Doorbell, ids: int, weights: int, x: int, slots: int, raws: int, staging: int, blob: Blob, T: int, layer: int,
    error: int, stamps: int, log: int = 0,
) -> list[Launch]:  # fmt: skip
    """Decide where every entry is computed, and ring if the CPU has a share.

    ids int32 and weights float32 (T, K), x float32 (T, D); slots uint64 (E, 3), addresses in device memory, 0 where an
    expert is not; raws uint64 (E, 3), addresses in host memory that the device can read, or 0 for none at all; staging:
    room for as many blobs as control says; stamps int64 (STAMP_WORDS);
    log int32 (T, K), which gets a copy of the ids, or 0.
    """
    m = d.mailbox
    need(0 < T <= m.rows and x % 16 == 0, "rows of a window", found=T, needed=f"1..{m.rows}")
    args = (pointer(ids), pointer(weights), pointer(x), pointer(slots), pointer(raws), pointer(d.control),
            pointer(d.work), pointer(d.decisions), pointer(d.staged), pointer(d.jobs), i32(d.job_words),
            i32(columns_of(T)), pointer(staging), i64(blob.n_bytes),
            i64(blob.up_at), i64(blob.down_at), pointer(d.host), i32(m.ids), i32(m.weights), i32(m.decisions), i32(m.x),
            i32(T), i32(m.K), i32(m.D), i32(layer), pointer(error), pointer(stamps),
            pointer(log))  # fmt: skip
    return [launch(SOURCE, "post", 1, 1024, *args)]


def wait_reply(d: Doorbell, sums: int, T: int, error: int, where: np.uint64, stamps: int) -> list[Launch]:
    """Wait for the reply, if `post` rang, and copy int64 (T, D) to `sums` (0: leave them in the mailbox)."""
    m = d.mailbox
    args = (pointer(d.control), pointer(d.work), pointer(d.host), i32(m.sums), pointer(sums), i32(T), i32(m.D),
            pointer(error), where, pointer(stamps))  # fmt: skip
    return [launch(SOURCE, "wait_reply", 1, 1024, *args)]


def stamp(at: int) -> list[Launch]:
    """Write the device's time, int64 ns."""
    return [launch(SOURCE, "stamp", 1, 32, pointer(at))]
