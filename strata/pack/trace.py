"""Routing traces: which experts each token of each layer was routed to, with tags between.

A record is i32 layer, i32 k, k x i32, k x f32, little-endian. A layer of 0 or more is a routing: expert ids and router
weights. A negative layer is a tag with k ints. Files without tags are an older form and read the same way.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from strata.base.errors import BadArgument, Closed, FileError

VERSION = 2
PROMPT, DECODE = range(2)
COMMIT, FORMAT, REQUEST, GPU_EXPERTS, RAM_EXPERTS = -1, -2, -3, -4, -6
TAG_NAMES = {
    COMMIT: "commit",
    FORMAT: "format version",
    REQUEST: "request",
    GPU_EXPERTS: "experts on the GPU at open",
    RAM_EXPERTS: "experts in RAM at start",
}
_FIXED_INTS = {COMMIT: 4, FORMAT: 1, REQUEST: 1}
_HEAD = struct.Struct("<ii")
AGAIN = "Record the trace again."
OTHER = "Record a trace with this model."


@dataclass(frozen=True, eq=False)
class Routing:
    """One token in one layer: experts (k,) int32 and weights (k,) float32, all 0 where they were not recorded."""

    layer: int
    experts: np.ndarray
    weights: np.ndarray

    @property
    def has_weights(self) -> bool:
        return bool(self.weights.any())


@dataclass(frozen=True, eq=False)
class Tag:
    """A remark between routings. kind is COMMIT, FORMAT, REQUEST, GPU_EXPERTS, RAM_EXPERTS or a later negative number.

    ints (k,) int32: GPU_EXPERTS and RAM_EXPERTS hold layer * E + expert, REQUEST the id
    """

    kind: int
    ints: np.ndarray


@dataclass(frozen=True)
class Commit:
    """End of a verify window: n_accepted of n_positions rows were kept; phase is PROMPT or DECODE."""

    window_id: int
    n_positions: int
    n_accepted: int
    phase: int


Record = Routing | Tag | Commit


def read_trace(path: str | Path, n_layers: int | None = None, n_experts: int | None = None) -> Iterator[Record]:
    """The records of a trace in order, one at a time.

    With n_layers and n_experts, routings outside them are refused: the trace is of another model. FileError names the
    byte offset of a record that is truncated or damaged.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        found = getattr(error, "strerror", None) or str(error)
        advice = "Is the path spelled right?"
        raise FileError(f"cannot read '{path}'", found=found, needed="a routing trace", advice=advice) from error
    return _records(path, file_bytes, n_layers, n_experts)


def _records(path: Path, file_bytes: int, n_layers: int | None, n_experts: int | None) -> Iterator[Record]:
    at = 0
    with path.open("rb") as file:
        while at < file_bytes:
            where = f"'{path}': the record at byte {at}"
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise FileError(
                    f"{where} is truncated", found=f"{len(head)} bytes", needed=f"{_HEAD.size} bytes", advice=AGAIN
                )
            layer, k = _HEAD.unpack(head)
            size = _HEAD.size + 8 * k
            if k < 0 or at + size > file_bytes:
                raise FileError(
                    f"{where} is truncated or damaged",
                    found=f"k = {k}, {file_bytes - at} bytes left",
                    needed="k of 0 or more and 8 + 8 k bytes",
                    advice=AGAIN,
                )
            data = file.read(8 * k)
            if len(data) < 8 * k:
                raise FileError(
                    f"{where} is truncated", found=f"{len(data)} bytes", needed=f"{8 * k} bytes", advice=AGAIN
                )
            ints, floats = np.frombuffer(data, "<i4", k), np.frombuffer(data, "<f4", k, 4 * k)
            yield _record(layer, ints, floats, where, n_layers, n_experts)
            at += size


def _record(
    layer: int, ints: np.ndarray, floats: np.ndarray, where: str, n_layers: int | None, n_experts: int | None
) -> Record:
    if layer >= 0:
        if n_layers is not None and layer >= n_layers:
            raise FileError(
                f"{where} is of another model", found=f"layer {layer}", needed=f"below {n_layers}", advice=OTHER
            )
        if len(ints) and (ints.min() < 0 or (n_experts is not None and ints.max() >= n_experts)):
            bad = int(ints.min() if ints.min() < 0 else ints.max())
            top = "" if n_experts is None else f", below {n_experts}"
            raise FileError(f"{where} is of another model", found=f"expert {bad}", needed=f"from 0{top}", advice=OTHER)
        return Routing(layer, ints, floats)
    needed = _FIXED_INTS.get(layer)
    if needed is not None and len(ints) != needed:
        raise FileError(
            f"{where} ({TAG_NAMES[layer]}) is damaged", found=f"{len(ints)} ints", needed=f"{needed}", advice=AGAIN
        )
    if layer == FORMAT and ints[0] != VERSION:
        raise FileError(f"{where} has another format version", found=int(ints[0]), needed=VERSION, advice=AGAIN)
    return Commit(*ints.tolist()) if layer == COMMIT else Tag(layer, ints)


class TraceWriter:
    """Writes a tagged trace; a context manager. Records are buffered until `close`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self._file: BinaryIO | None = self.path.open("wb", buffering=1 << 20)
        except OSError as error:
            raise FileError(
                f"cannot write '{path}'",
                found=error.strerror,
                needed="a writable place",
                advice="Free the disk or choose another path.",
            ) from error
        self._write(FORMAT, [VERSION])

    def request(self, request_id: int) -> None:
        """A new request begins."""
        self._write(REQUEST, [request_id])

    def gpu_experts(self, flat_ids: Sequence[int] | np.ndarray) -> None:
        """Flattened ids (layer * E + expert) that the GPU holds at open."""
        self._write(GPU_EXPERTS, flat_ids)

    def ram_experts(self, flat_ids: Sequence[int] | np.ndarray) -> None:
        """Flattened ids that are resident in RAM at start."""
        self._write(RAM_EXPERTS, flat_ids)

    def routing(
        self, layer: int, experts: Sequence[int] | np.ndarray, weights: Sequence[float] | np.ndarray | None = None
    ) -> None:
        """One token in one layer; within a window layer-major, positions ascending. weights None: not recorded."""
        if layer < 0:
            raise BadArgument("the layer of a routing is negative", found=layer, needed="0 or more")
        self._write(layer, experts, weights)

    def commit(self, window_id: int, n_positions: int, n_accepted: int, phase: int) -> None:
        """The window of the routings since the last commit is done."""
        if not 0 <= n_accepted <= n_positions or phase not in (PROMPT, DECODE):
            raise BadArgument(
                "the commit of a window is out of range",
                found=(n_positions, n_accepted, phase),
                needed="0 <= accepted <= positions, phase 0 or 1",
            )
        self._write(COMMIT, [window_id, n_positions, n_accepted, phase])

    def _write(self, layer: int, ints: Sequence[int] | np.ndarray, floats: Sequence[float] | np.ndarray | None = None):
        if self._file is None:
            raise Closed(f"the trace '{self.path}' was closed", needed="an open one", advice="Write a new trace.")
        wide = np.asarray(ints, np.int64).reshape(-1)
        if len(wide) and (wide.min() < -(2**31) or wide.max() >= 2**31):
            found = f"{wide.min()} to {wide.max()}"
            raise BadArgument("integers of a trace record are out of range", found=found, needed="32-bit")
        weights = np.zeros(len(wide), "<f4") if floats is None else np.asarray(floats, "<f4").reshape(-1)
        if len(weights) != len(wide):
            needed = f"{len(wide)}, one an expert"
            raise BadArgument("a routing has another number of weights", found=len(weights), needed=needed)
        self._file.write(_HEAD.pack(layer, len(wide)) + wide.astype("<i4").tobytes() + weights.tobytes())

    def close(self) -> None:
        """Flushes and closes; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
