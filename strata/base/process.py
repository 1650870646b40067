"""Which process an object belongs to: what has threads and locks does not survive a fork."""

from __future__ import annotations

import os

from strata.base.errors import StrataError


class OwnProcess:
    """The process in which it was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def need(self, what: str) -> None:
        """StrataError in every other process. what: as "the model"."""
        if not self.is_here:
            raise StrataError(f"{what} was made in another process", found=f"process {os.getpid()}",
                              needed=f"process {self._pid}",
                              advice="Load the model here: its threads and locks do not survive a fork.")  # fmt: skip
