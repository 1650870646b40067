"""A cell of a prompt read as windows, where a backend has no chunks: the bits of windows, at their speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.base.geometry import WINDOW_ROWS
from strata.gpu.mailbox import copy_values
from strata.gpu.state import DeviceState

if TYPE_CHECKING:
    from strata.gpu.backend import GpuBackend


def read_by_windows(
    b: GpuBackend, state: DeviceState, tokens: np.ndarray, previous: tuple[int, int], kept: int
) -> None:
    """Run and commit windows of the tokens; the streams of all rows are gathered at `kept` and left where windows leave
    theirs."""
    streams, width = b.memory.address("streams"), b.memory.buffer("streams").shape[1]
    for first in range(0, len(tokens), WINDOW_ROWS):
        part = tokens[first : first + WINDOW_ROWS]
        b.window(state, part, previous)
        b.device.run(copy_values(streams, kept + 4 * first * width, len(part) * width))
        b.commit(state, len(part))
        previous = (int(part[-1]), int(part[-2]) if len(part) > 1 else previous[0])
    b.device.run(copy_values(kept, streams, len(tokens) * width))
