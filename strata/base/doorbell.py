"""The mailbox between a window on the device and the CPU that computes experts for it: one layout for both sides.

The device decides where every routed entry is computed, writes a request (ids, weights, decisions, rows of x) and
rings by storing the sequence number into REQUEST with release order. The CPU answers with exact sums of its entries,
(T, D) int64 in units of 2^-32, and stores the same number into REPLY with release order. Numbers only grow, both sides
compare with >=, so nothing is ever reset within a session of the mailbox. One request is under way at a time: the
layer that rang waits for its reply before the next one rings.
"""

from __future__ import annotations

from dataclasses import dataclass

CPU, HIT, LINK = 0, 1, 2
"""Decisions, one byte an entry: computed by the CPU, from a slot in device memory, or from a copy over the link."""

# Byte offsets of words (64 bit); words written by different sides lie 128 bytes apart.
REQUEST = 0  # device writes: number of the request that is complete
REPLY = 128  # CPU writes: number of the last request answered
STATUS = 136  # CPU writes before REPLY: 0, or the error code of base/program.py | detail << 8
STOP = 256  # host writes: not 0 ends the service
HEADER = 384  # device writes before REQUEST: the words below
LAYER, ROWS, CPU_ENTRIES, LINK_EXPERTS, HIT_ENTRIES, MISSES = range(6)
"""Header: layer; rows T; entries for the CPU; distinct experts over the link; entries of hits; distinct experts that no
slot holds."""
PAYLOAD = 512


def _up(n: int) -> int:
    return -(-n // 128) * 128


@dataclass(frozen=True)
class Mailbox:
    """Offsets of a mailbox for windows of up to `rows` rows, K entries a row, D values a row.

    decisions  uint8 (T * K)      ids    int32 (T * K)      weights  float32 (T * K)
    x          float32 (T, D), the rows as they are: each side quantises them by the same arithmetic
    sums       int64 (T, D), written by the CPU; rows without an entry of the CPU are not written and not read
    All are packed for the T of the request: row t of x starts at x + 4 t D.
    """

    rows: int
    K: int
    D: int

    @property
    def decisions(self) -> int:
        return PAYLOAD

    @property
    def ids(self) -> int:
        return self.decisions + _up(self.rows * self.K)

    @property
    def weights(self) -> int:
        return self.ids + _up(4 * self.rows * self.K)

    @property
    def x(self) -> int:
        return self.weights + _up(4 * self.rows * self.K)

    @property
    def sums(self) -> int:
        return self.x + _up(4 * self.rows * self.D)

    @property
    def n_bytes(self) -> int:
        return self.sums + _up(8 * self.rows * self.D)
