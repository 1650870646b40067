"""The loan of a prefill chunk: slots whose memory its buffers use while it is read."""

from __future__ import annotations

import numpy as np

from strata.runtime.tiers import ExpertTiers


class Loan:
    """Lends `tail`, (n, 2) int64 rows (layer, slot), to chunks, and takes it back before a window.

    Whatever ends a chunk, an error or an interrupt among them, slots stay empty until `take_back`: the table never
    leads a window to memory that a chunk wrote.
    """

    def __init__(self, tiers: ExpertTiers, tail: np.ndarray):
        self._tiers, self._tail, self._lent = tiers, tail, False

    def lend(self) -> None:
        """Before a chunk: the slots are empty from now on. Nothing if they are already."""
        if self._tiers.lent == len(self._tail):
            return
        self.take_back()  # a part of it, that an interrupt left
        self._lent = True
        self._tiers.lend(self._tail)

    def take_back(self) -> None:
        """Before a window: the slots hold what they held; waits for the copies. Nothing if they are not lent."""
        if self._lent:
            self._tiers.give_back()
            self._tiers.settle()
            self._lent = False
