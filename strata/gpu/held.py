"""What a GPU backend holds, under the lines of a plan, and what it drops when it is closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from strata.base.program import Allocation
from strata.gpu.head import SCRATCH, place
from strata.gpu.memory import aligned
from strata.gpu.state import DeviceState
from strata.gpu.upload import UPLOAD_HOST_BYTES, UPLOAD_STAGING_BYTES

if TYPE_CHECKING:
    from strata.gpu.backend import GpuBackend

NOT_OF_V = ("lanes", "history", "rows")
"""Scratch of heads whose size does not come from the vocabulary alone."""


def held(b: GpuBackend, sessions: Sequence[DeviceState]) -> list[Allocation]:
    """Allocations of a backend and `sessions`, all of its states, by line. Lines of 0 bytes are left out."""
    logits = _logits_bytes(b)
    n = f"{len(sessions)} sessions"
    vram = [
        *((line, n_bytes, "uploaded once") for line, n_bytes in b.weights.bytes_by_line().items()),
        ("KV cache", _cells(sessions, draft=False, keys=False), n),
        ("pooled keys", _cells(sessions, draft=False, keys=True), n),
        ("recurrent state", sum(s.recurrent.nbytes for s in sessions), n),
        ("way back", b.recurrent_bytes, "a recurrent state, for chunks that fail"),
        ("draft KV cache", _cells(sessions, draft=True, keys=False), n),
        ("draft rows", sum(s.n_bytes("ring") for s in sessions) + (b.draft.ids_bytes if b.draft else 0), n),
        ("logits", logits, "as they are and after penalties, and their summaries"),
        ("upload staging", UPLOAD_STAGING_BYTES, "raw weights and experts on their way"),
        ("window scratch", b.memory.n_bytes - logits + b.cell_stream_bytes, "activations of the widest program"),
    ]
    ram = [
        ("n-gram cache", b.ngram.cache_bytes if b.ngram else 0, "rows already read"),
        ("upload ring", UPLOAD_HOST_BYTES, "pinned: weights and experts on their way"),
        ("exchange", b.host_bytes + b.slots.table.nbytes, "pinned: what windows and the host exchange; full logits"),
    ]
    lines = [("vram", *line) for line in vram] + [("ram", *line) for line in ram]
    return [Allocation(line, device, n_bytes, reason) for device, line, n_bytes, reason in lines if n_bytes]


OF_OPEN = ("uploader", "draft", "head_rows", "op_by_op", "ngram", "_chunks", "_other_forms", "_ran", "_in", "_host_in",
           "_host_out", "_ticket", "_staged")  # fmt: skip


def let_go(b: GpuBackend) -> None:
    """Drop what shows pinned memory, and what refers back to a backend that was closed.

    The system gets the memory with the last reference, and must not wait for the garbage collector or for whoever keeps
    a closed model.
    """
    b.slots.close()
    if b.draft:
        b.draft.close()
    for name in OF_OPEN:
        vars(b).pop(name, None)


def _logits_bytes(b: GpuBackend) -> int:
    """Everything whose size comes from the vocabulary."""
    private = b.memory.private_bytes
    named = [private[place(name)] for name in SCRATCH if name not in NOT_OF_V]
    return sum(map(aligned, [b.memory.buffer("logits").n_bytes, *named]))


def _cells(sessions: Sequence[DeviceState], *, draft: bool, keys: bool) -> int:
    """Bytes of cells of the trunk or the draft layer: K and V with their scales, or pooled keys."""
    return sum(
        buffer.n_bytes
        for s in sessions
        for name, buffer in s.buffers.items()
        if buffer.role == "cells" and (name.startswith("mtp."), name.endswith("block_keys")) == (draft, keys)
    )
