"""What products are told beside their sizes: where matrices lie, who wants them, what becomes of the outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.errors import need
from strata.gpu.activations import Activations


@dataclass(frozen=True)
class Place:
    """Where relaid matrices lie on the device, 16-byte aligned: a dense one at `address`; that of expert e at
    `address` + e * `stride`, or at the address in word 3 e + `part` of the uint64 `table`."""

    address: int = 0
    stride: int = 0
    table: int = 0
    part: int = 0


@dataclass(frozen=True)
class Entries:
    """Which expert every entry of a window wants, and which entries count. Addresses.

    ids        int32 (n,)
    T          most entries that want the same expert: the rows of the window. 1 says that all experts are different
    decisions  uint8 (n,) or 0 for all: an entry counts if bit decisions[i] of `take` is set; others get zeros
    jobs       instead of decisions: int32, how many jobs there are, then for each the first entry of an expert, and how
               many entries of it to pass over << 16. Up to `columns_of` entries a job; others are left as they are
    most_jobs  there are at most so many; the list has room for them, whatever stands there
    experts    how many there are: ids may be looked at before they are final; 0: they are not
    """

    ids: int
    n: int
    T: int
    decisions: int = 0
    take: int = 2
    jobs: int = 0
    most_jobs: int = 0
    experts: int = 0

    def __post_init__(self) -> None:
        need(not self.jobs or (self.most_jobs > 0 and not self.decisions), "jobs of a product", found=self)


@dataclass(frozen=True)
class Hidden:
    """What gate and up together write: `h`, a row for every entry (dense: for every column), in groups of 32.

    up       where the up matrices lie (with a table: one word behind gate)
    factors  float32 (3, experts) on the outputs of gate, up and down by expert, or 0
    """

    up: Place
    h: Activations
    error: int
    where: np.uint64
    factors: int = 0
    experts: int = 0


@dataclass(frozen=True)
class Combine:
    """What the down product of routed experts makes of its outputs in a window of one row, where its y (rows,) is the
    op's result. Addresses.

    sums     int64 (rows,): zeros that are zeros again afterwards
    arrived  uint32, one for eight rows, the same
    weights  float32, one for each entry
    shared   float32 (rows,), outputs of the shared expert, which are there before
    gate     float32, of the shared expert
    factors  float32 by expert on the outputs, or 0
    """

    sums: int
    arrived: int
    weights: int
    shared: int
    gate: int
    error: int
    where: np.uint64
    factors: int = 0


def combine_bytes(rows: int) -> tuple[int, int]:
    """Bytes of the sums and the counters of a `Combine`."""
    return 8 * rows, 4 * -(-rows // 8)
