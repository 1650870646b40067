"""A list of launches as it is queued while a graph is captured: branches of a fork on streams of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.gpu.launch import Launch


class Capture:
    """Streams for the branches of graphs, and what was queued on them.

    cupy    the module       stream  the one that is captured
    events  that captured graphs still name are kept for the life of this
    """

    def __init__(self, cupy: Any, stream: Any):
        self._cupy, self._stream = cupy, stream
        self._branches: dict[int, Any] = {}
        self._asides: dict[int, Any] = {}
        self._aheads: dict[int, Any] = {}
        self._events: list[Any] = []

    def open_streams(self, launches: Sequence[Launch]) -> None:
        """Make the streams that launches need; not while a stream is captured."""
        wanted = [(self._branches, one.branch) for one in launches if one.branch]
        wanted += [(self._asides, one.branch) for one in launches if one.aside]
        wanted += [(self._aheads, 0) for one in launches if one.ahead]
        for streams, branch in wanted:
            if branch not in streams:
                streams[branch] = self._cupy.cuda.Stream(non_blocking=True)

    def queue(self, prepared: list[tuple[Any, Launch]]) -> None:
        """Queue (function, launch) pairs."""
        fork, waiting, asides, aheads, start = 0, set(), set(), set(), None
        for function, launch in prepared:
            if launch.ahead:
                stream = self._aheads[0]
                if not aheads:
                    stream.wait_event(self._event(self._stream))
                    aheads.add(0)
                function(launch.grid, launch.block, launch.args, launch.shared_bytes, stream)
                continue
            if launch.fork != fork:
                self._join(self._branches, waiting)
                fork, start = launch.fork, None
                if fork:
                    start = self._event(self._stream)
            stream = self._stream
            if launch.branch:
                stream = self._branches[launch.branch]
                if launch.branch not in waiting:
                    stream.wait_event(start)
                    waiting.add(launch.branch)
            if launch.aside:
                before, stream = self._event(stream), self._asides[launch.branch]
                stream.wait_event(before)
                asides.add(launch.branch)
            elif launch.gathers:
                self._join(self._asides, asides)
            if launch.meets:
                self._join(self._aheads, aheads)
            function(launch.grid, launch.block, launch.args, launch.shared_bytes, stream)
        self._join(self._branches, waiting)
        self._join(self._asides, asides)
        self._join(self._aheads, aheads)

    def _event(self, stream: Any) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        self._events.append(event)
        return event

    def _join(self, streams: dict[int, Any], waiting: set[int]) -> None:
        """The captured stream waits for others."""
        for branch in sorted(waiting):
            self._stream.wait_event(self._event(streams[branch]))
        waiting.clear()

    def close(self) -> None:
        """Drop streams and events; graphs that name them are gone."""
        self._events.clear()
        self._branches.clear()
        self._asides.clear()
        self._aheads.clear()
