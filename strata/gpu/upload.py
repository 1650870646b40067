"""From host memory to the device at the speed of the link: raw bytes through staging, the device layout made there.

What is uploaded is cut into pieces of a few MiB. A piece is copied by many threads into pinned memory (registered
memory needs no such step), from there to raw staging on the device, and kernels relay it to its place. While threads
fill a piece, the one before crosses the link on a stream of its own, and kernels on another relay the one before that.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strata.base.errors import BadArgument, DoesNotFit, need
from strata.gpu.device import COPY_STREAMS, Device
from strata.gpu.driver_calls import HELD_BYTES, copy_held
from strata.gpu.launch import Launch
from strata.gpu.link_fetch import field_map
from strata.gpu.relayout import LAYOUTS, ROWS, row_block_bytes
from strata.gpu.relayout_stack import MOST_MATRICES, relayout_stack
from strata.pack.formats import BlockFormat

RING_BYTES = 32 << 20
"""Raw bytes on their way, once in pinned host memory and once on the device."""
TABLE_BYTES = 2 << 20
"""Tables of relayout (`field_map`), one for each format and length of a row's end."""
UPLOAD_STAGING_BYTES = RING_BYTES + TABLE_BYTES
"""Device memory of an `Uploader`."""
UPLOAD_HOST_BYTES = RING_BYTES
"""Pinned host memory of an `Uploader`."""
PIECES = 4
"""A piece is at most this part of the ring."""
ITEM_ALIGN = 16
PLACES_BYTES = 16
"""Where a matrix is and where it goes, two words of `relayout_stack`."""
SHARE_BYTES = 1 << 20
"""Less is not worth another thread."""
MOST_COPY_THREADS = 4
"""More are slower: what they do is short, and they take turns at the interpreter."""
STAGE, WORK = COPY_STREAMS
"""Copies into staging, which wait for nothing; kernels and copies that write where others may still read."""


@dataclass(frozen=True, eq=False)
class _Shape:
    """Matrices that one launch can relay, if their rows are as many.

    most_rows  that fit into a piece
    table      its device address
    field      bits of its fields
    """

    format: BlockFormat
    row_bytes: int
    K: int
    block_bytes: int
    most_rows: int
    table: int
    field: int


@dataclass
class _Piece:
    """Items that go to the device together. `at` to `end` is its part of the ring, in bytes ever taken."""

    at: int
    end: int
    bounced: list[tuple[np.ndarray, int]] = field(default_factory=list)
    """Arrays that threads copy into the ring, and where (bytes ever taken)."""
    staged: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(address in the device's ring, source address, bytes, 0)."""
    direct: list[tuple[int, int, int, int]] = field(default_factory=list)
    """The same for what goes to its target as it is, and the number of its `raw` call."""
    matrices: list[tuple[_Shape, int, int, int]] = field(default_factory=list)
    """(shape, rows, place in the ring, target)."""
    sources: list[np.ndarray] = field(default_factory=list)
    """What the copies read in place, kept until they are done."""
    launches: list[Launch] = field(default_factory=list)
    filled: list[Future] | None = None
    """Threads at work on `bounced`; None: not begun."""


class Uploader:
    """Queues uploads; what is queued may leave at once, and does with `send`.

    Sources are uint8 arrays of any kind of memory. They must stay as they are until `send`; registered memory until the
    upload has `arrived`. Nothing is written before work is over that was queued on the main stream before it was sent.
    """

    def __init__(self, device: Device, *, ring_bytes: int = RING_BYTES, threads: int | None = None):
        need(ring_bytes > 0 and ring_bytes % (PIECES * ITEM_ALIGN) == 0, "bytes of the ring", found=ring_bytes)
        self._device, self._ring_bytes, self._piece_bytes = device, ring_bytes, ring_bytes // PIECES
        self._raw, self._table_area = device.alloc(ring_bytes), device.alloc(TABLE_BYTES)
        self._bounce = device.host(ring_bytes)
        self._bounce_at = self._bounce.ctypes.data
        self._threads = threads or min(MOST_COPY_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, "strata-upload") if self._threads > 1 else None
        self._tables: dict[tuple[str, int], tuple[int, int]] = {}
        self._shapes: dict[tuple[str, int], _Shape] = {}
        self._table_end = 0
        self._taken = self._freed = 0
        self._open: _Piece | None = None
        self._filling: deque[_Piece] = deque()
        self._under_way: deque[tuple[int, Any, list[np.ndarray]]] = deque()
        """End, event and sources of what was sent."""
        self._n_sent = self._n_raw = 0
        device.after(STAGE, device.record())  # the ring's memory was zeroed on the main stream

    # ---- queueing

    def raw(self, target: int, data: np.ndarray) -> None:
        """Queue bytes as they are, to address `target`."""
        flat = _flat(data)
        self._n_raw += 1
        for start in range(0, flat.size, self._piece_bytes):
            self._add(flat[start : start + self._piece_bytes], target + start, None)

    def matrix(self, format: BlockFormat, target: int, data: np.ndarray) -> None:
        """Queue a quantised matrix, uint8 (rows, row_bytes) as in the file, into its device layout at `target`.

        `target` is a multiple of 16; relayout_bytes(format, rows, K) are written.
        """
        if data.dtype != np.uint8 or data.ndim != 2 or not data.size or target % ITEM_ALIGN:
            raise BadArgument("a matrix to upload", found=f"{data.dtype} {data.shape} to {target}",
                              needed=f"uint8 (rows, row_bytes), to a multiple of {ITEM_ALIGN}")  # fmt: skip
        rows, row_bytes = data.shape
        shape = self._shapes.get((format.name, row_bytes)) or self._shape(format, row_bytes)
        if rows <= shape.most_rows:
            self._add(_flat(data), target, shape)
            return
        for first in range(0, rows, shape.most_rows):
            part = data[first : first + shape.most_rows]
            self._add(_flat(part), target + first // ROWS * shape.block_bytes, shape)

    def pinned_matrix(self, format: BlockFormat, target: int, source: int, rows: int, row_bytes: int) -> None:
        """As `matrix`, of one at an address in memory that is registered until the upload has `arrived`. Swaps would
        spend half of their time looking at arrays."""
        shape = self._shapes.get((format.name, row_bytes)) or self._shape(format, row_bytes)
        for first in range(0, rows, shape.most_rows):
            n_rows = min(rows - first, shape.most_rows)
            n_bytes = n_rows * row_bytes
            place = self._take(n_bytes) % self._ring_bytes
            self._open.staged.append((self._raw + place, source + first * row_bytes, n_bytes, 0))
            self._open.matrices.append((shape, n_rows, place, target + first // ROWS * shape.block_bytes))

    def send(self) -> None:
        """Start everything queued. Waits only while the ring is full."""
        self._seal()
        while self._filling:
            self._issue()

    def mark(self) -> int:
        """A number for everything queued up to now."""
        return self._n_sent + len(self._filling) + (self._open is not None)

    def arrived(self, mark: int) -> bool:
        """Whether everything before a mark is on the device; sends it if need be, and does not wait."""
        if mark > self._n_sent:
            self.send()
        while self._under_way and self._device.done(self._under_way[0][1]):
            self._free_oldest()
        return mark <= self._n_sent - len(self._under_way)

    def wait(self, mark: int) -> None:
        """Wait until everything before a mark is on the device."""
        if mark > self._n_sent:
            self.send()
        while mark > self._n_sent - len(self._under_way):
            self._free_oldest()

    def finish(self) -> None:
        """Wait until everything that was ever queued is on the device."""
        self.wait(self.mark())

    def close(self) -> None:
        """Wait for what is under way and end the threads; what was queued but not sent is dropped."""
        self._open = None
        try:
            self.finish()
        finally:
            if self._pool is not None:
                self._pool.shutdown()

    # ---- the ring

    def _free_oldest(self) -> None:
        end, event, sources = self._under_way[0]
        self._device.wait(event)
        sources.clear()
        self._under_way.popleft()
        self._freed = end

    def _take(self, n_bytes: int) -> int:
        """Room for the next item of the open piece, in bytes ever taken; seals the piece when it is full."""
        n_bytes = _up(n_bytes)
        if self._open is not None and (
            self._open.end - self._open.at + n_bytes > self._piece_bytes or len(self._open.matrices) == MOST_MATRICES
        ):
            self._seal()
        # Behind its items a piece needs room for the list of its matrices.
        with_list = n_bytes + PLACES_BYTES * (1 + (len(self._open.matrices) if self._open else 0))
        if self._taken % self._ring_bytes + with_list > self._ring_bytes:  # nothing goes around the end
            self._seal()
            self._taken += -self._taken % self._ring_bytes
        at = self._taken
        while at + with_list - self._freed > self._ring_bytes:
            if self._under_way:
                self._free_oldest()
            elif self._filling:
                self._issue()
            else:
                self._freed = at  # only the end that was left out is in the way
        if self._open is None:
            self._open = _Piece(at, at)
        self._taken = self._open.end = at + n_bytes
        return at

    def _add(self, flat: np.ndarray, target: int, shape: _Shape | None) -> None:
        source = flat.__array_interface__["data"][0]  # .ctypes takes longer than all of the rest
        direct = self._device.is_registered(source, flat.size)
        at = self._take(flat.size)
        piece, place = self._open, at % self._ring_bytes
        if direct:
            piece.sources.append(flat)
        else:
            piece.bounced.append((flat, place))
            source = self._bounce_at + place
        if shape is None:
            piece.direct.append((target, source, flat.size, self._n_raw))
        else:
            piece.staged.append((self._raw + place, source, flat.size, 0))
            piece.matrices.append((shape, flat.size // shape.row_bytes, place, target))

    def _seal(self) -> None:
        """Close the open piece and have it filled; pieces before it leave."""
        piece = self._open
        if piece is None:
            return
        # An interrupt leaves the piece open, or in the queue, where what is missing is done again.
        piece.launches = self._relayouts(piece)
        self._filling.append(piece)
        self._open = None
        piece.filled = self._fill(piece.bounced)
        while self._filling and (len(self._filling) > 1 or not self._filling[0].filled):
            self._issue()

    def _issue(self) -> None:
        """Queue the oldest piece that is being filled on the device."""
        piece, device = self._filling[0], self._device  # an interrupt leaves it there, to be queued again
        if piece.filled is None:
            piece.filled = self._fill(piece.bounced)
        for part in piece.filled:
            part.result()
        for copy in self._joined(piece.staged):
            device.copy_in(*copy, STAGE)
        device.after(WORK, device.record(STAGE))
        device.after(WORK, device.record())
        for copy in self._joined(piece.direct):
            device.copy_in(*copy, WORK)
        device.run(piece.launches, WORK)
        self._under_way.append((piece.end, device.record(WORK), piece.sources))
        self._filling.popleft()
        self._n_sent += 1

    def _joined(self, copies: list[tuple[int, int, int, int]]) -> Iterator[tuple[int, int, int]]:
        """The copies, neighbours as one. A copy must not reach from one allocation or registration into the next, which
        may begin where it ends: then the device refuses it."""
        at = source = size = last = 0
        for to, origin, n_bytes, call in copies:
            if size and (to, origin, call) == (at + size, source + size, last) and self._one(source, size + n_bytes):
                size += n_bytes
                continue
            if size:
                yield at, source, size
            at, source, size, last = to, origin, n_bytes, call
        if size:
            yield at, source, size

    def _one(self, source: int, n_bytes: int) -> bool:
        """Whether bytes of the host lie in the ring, or in one registered piece."""
        inside = self._bounce_at <= source and source + n_bytes <= self._bounce_at + self._ring_bytes
        return inside or self._device.is_registered(source, n_bytes)

    def _relayouts(self, piece: _Piece) -> list[Launch]:
        """Launches for the piece's matrices, those of one shape together; a list of their places joins the piece."""
        groups: dict[tuple[_Shape, int], list[tuple[int, int]]] = {}
        for shape, rows, place, target in piece.matrices:
            groups.setdefault((shape, rows), []).append((self._raw + place, target))
        if not groups:
            return []
        places = np.array([pair for group in groups.values() for pair in group], np.uint64).reshape(-1).view(np.uint8)
        at = piece.end % self._ring_bytes
        launches, listed = [], self._raw + at
        for (shape, rows), group in groups.items():
            launches += relayout_stack(shape.format, listed, len(group), rows, shape.K, shape.table, shape.field)
            listed += PLACES_BYTES * len(group)
        self._taken = piece.end = piece.end + places.size
        piece.bounced.append((places, at))
        piece.staged.append((self._raw + at, self._bounce_at + at, places.size, 0))
        return launches

    def _fill(self, bounced: list[tuple[np.ndarray, int]]) -> list[Future]:
        """Copy arrays into the pinned ring, a share for each thread; at once if there is little."""
        total = sum(data.size for data, _ in bounced)
        if self._pool is None or total <= SHARE_BYTES:
            self._copy(bounced)
            return []
        share = max(SHARE_BYTES, -(-total // self._threads))
        shares: list[list[tuple[np.ndarray, int]]] = [[]]
        room = share
        for data, place in bounced:
            while data.size:
                if not room:
                    shares.append([])
                    room = share
                part = data[:room]
                shares[-1].append((part, place))
                data, place, room = data[part.size :], place + part.size, room - part.size
        return [self._pool.submit(self._copy, one) for one in shares]

    def _copy(self, parts: list[tuple[np.ndarray, int]]) -> None:
        for data, place in parts:
            copy = copy_held if data.size <= HELD_BYTES else np.copyto
            copy(self._bounce[place : place + data.size], data)

    # ---- tables

    def _shape(self, format: BlockFormat, row_bytes: int) -> _Shape:
        most = self._piece_bytes // row_bytes // ROWS * ROWS
        need(most > 0, "four rows of a matrix", found=f"{ROWS * row_bytes} bytes",
             needed=f"at most {self._piece_bytes}, a piece of the staging")  # fmt: skip
        K = row_bytes // format.block_bytes * format.block_values
        shape = _Shape(format, row_bytes, K, row_block_bytes(format, K), most, *self.table(format, K))
        return self._shapes.setdefault((format.name, row_bytes), shape)

    def table(self, format: BlockFormat, K: int) -> tuple[int, int]:
        """Device address of the `field_map` for rows of K values, and bits of its fields; uploaded on first use."""
        layout = LAYOUTS[format.name]
        key = (format.name, format.row_bytes(K) // format.block_bytes % (layout.steps * layout.blocks))
        if key not in self._tables:
            field, table = field_map(format, K)
            if self._table_end + table.nbytes > TABLE_BYTES:
                raise DoesNotFit("tables of matrix layouts", found=f"{TABLE_BYTES - self._table_end} bytes left",
                                 needed=f"{table.nbytes} bytes for {format.name}")  # fmt: skip
            place = self._table_area + self._table_end
            self._device.upload(place, table)
            self._tables[key] = place, field
            self._table_end += _up(table.nbytes)
        return self._tables[key]


def _up(n_bytes: int) -> int:
    return -(-n_bytes // ITEM_ALIGN) * ITEM_ALIGN


def _flat(data: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(data).reshape(-1)
    return flat if flat.dtype == np.uint8 else flat.view(np.uint8)
