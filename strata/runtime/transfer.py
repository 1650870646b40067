"""A conversation as bytes: moved between sessions, processes and backends, with the bits that follow unchanged.

    magic | format version, header bytes (2 x uint32) | header (JSON) | arrays, back to back | CRC-32 of all before

Numbers are little-endian. The arrays are the tokens, the recurrent state, the used cells of K, V and pooled keys, and
what the draft layer's driver keeps. All backends hold these in one form.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

from strata.base.errors import BadArgument, ContextFull, need
from strata.base.program import Buffer
from strata.base.state import State
from strata.runtime.session import SessionState
from strata.spec.mtp import DraftSlot

MAGIC = b"strata session\n"
VERSION = 1
_HEAD = struct.Struct("<II")
_CRC = struct.Struct("<I")

TOKENS, RECURRENT, WAITING = "tokens", "recurrent", "drafter.x"
DRAFT, RING = "mtp.", "mtp.waiting"


@dataclass(frozen=True)
class Identity:
    """What a conversation belongs to: digest of the model, KV format."""

    model: str
    kv: str


def export_session(session: SessionState, identity: Identity) -> bytes:
    """The conversation of a session. The backend's turn must be held."""
    rows, state = session.rows, session.state
    slot = session.mtp.snapshot(state) if session.mtp is not None else None
    arrays = {TOKENS: session.tokens.copy(), RECURRENT: state.recurrent.copy()}
    for b in _cells(state):
        drafts = b.name.startswith(DRAFT)
        if not drafts or slot is not None:
            arrays[b.name] = state.read_cells(b.name, _used(state, b, slot.rows if drafts else rows))
    drafter = None
    if slot is not None:
        drafter = {"rows": slot.rows, "first": slot.first}
        if slot.x is not None:
            arrays[WAITING] = slot.x
    header = {
        **asdict(identity),
        "layout": _layout(state),
        "drafter": drafter,
        "arrays": [[name, a.dtype.str, list(a.shape)] for name, a in arrays.items()],
    }
    text = json.dumps(header).encode()
    parts = [MAGIC, _HEAD.pack(VERSION, len(text)), text, *(np.ascontiguousarray(a).data for a in arrays.values())]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return b"".join([*parts, _CRC.pack(crc)])


def import_session(session: SessionState, blob: bytes, identity: Identity) -> None:
    """Replace a session's conversation by an exported one. The backend's turn must be held.

    Raises BadArgument for bytes that are no export, damaged, or of another model or KV format, ContextFull for more
    tokens than the session holds; the session is then as before.
    """
    header, arrays = _read(blob)
    _check_identity(header, identity)
    state, tokens = session.state, arrays[TOKENS]
    if tokens.dtype != session.tokens.dtype or tokens.ndim != 1:
        raise _damaged(f"tokens as {tokens.dtype} {tokens.shape}")
    if len(tokens) and not (0 <= tokens.min() and tokens.max() < session.backend.geometry.V):
        raise _damaged("tokens outside the vocabulary")
    if len(tokens) > session.context:
        raise ContextFull(
            "the exported conversation is longer than the context",
            found=f"{len(tokens)} tokens",
            needed=f"<= {session.context}",
            advice="Load with a larger context=.",
        )
    recurrent = arrays[RECURRENT]
    same = recurrent.dtype == np.uint8 and recurrent.shape == (state.recurrent.nbytes,)
    same = same and header["layout"] == _layout(state)
    wanted = [b.name for b in _cells(state) if not b.name.startswith(DRAFT)]
    for name in wanted:
        same = same and _fits(state.buffers[name], arrays.get(name))
        same = same and len(arrays[name]) == _used(state, state.buffers[name], len(tokens))
    need(same, "the exported conversation has another geometry", found="other sizes of cells or recurrent state",
         needed="those of this model", advice="Import it where the same model is loaded.")  # fmt: skip
    session.ledger.wrote(0)
    session.clear()
    try:
        for name in wanted:
            state.write_cells(name, arrays[name])
        state.recurrent[:] = recurrent
        _restore_drafter(session, header["drafter"], arrays)
        session.hold(tokens)
    except BaseException:
        session.clear()
        raise


def _restore_drafter(session: SessionState, drafter: dict[str, int] | None, arrays: dict[str, np.ndarray]) -> None:
    """The draft layer's cells, if both sides have the layer; else it begins anew, which changes no answer."""
    if session.mtp is None:
        return
    state = session.state
    names = [b.name for b in _cells(state) if b.name.startswith(DRAFT)]
    rows = len(arrays[TOKENS])
    same = drafter is not None and drafter["rows"] == rows
    same = same and all(_fits(state.buffers[name], arrays.get(name)) for name in names)
    if not same or not _fits_waiting(state, drafter["first"], rows, arrays.get(WAITING)):
        session.mtp.clear(rows)
        return
    for name in names:
        state.write_cells(name, arrays[name])
    session.mtp.restore(state, DraftSlot(rows, drafter["first"], arrays.get(WAITING)))


def _fits_waiting(state: State, first: int, rows: int, x: np.ndarray | None) -> bool:
    """Whether the row that waits is one of the ring's, and the first cell that counts lies before it."""
    if x is None:
        return True  # nothing waits, and nothing of `first` is used
    ring = state.buffers[RING]
    same = x.dtype == np.dtype(ring.dtype) and x.shape == tuple(ring.shape[1:])
    return same and isinstance(first, int) and 0 <= first < rows


def _check_identity(header: dict[str, Any], identity: Identity) -> None:
    advice = "Import it where the same model is loaded with the same kv=."
    need(header["model"] == identity.model, "the exported conversation belongs to another model",
         found=header["model"][:12], needed=identity.model[:12], advice=advice)  # fmt: skip
    need(header["kv"] == identity.kv, "the exported conversation has another KV format",
         found=header["kv"], needed=identity.kv, advice=advice)  # fmt: skip


def _read(blob: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays (views) of an export."""
    need(isinstance(blob, bytes | bytearray | memoryview), "an exported session is bytes", found=type(blob).__name__,
         needed="what Session.export returns")  # fmt: skip
    view = memoryview(blob if memoryview(blob).c_contiguous else bytes(blob)).cast("B")
    start = len(MAGIC) + _HEAD.size
    known = len(view) > start + _CRC.size and bytes(view[: len(MAGIC)]) == MAGIC
    need(known, "these bytes are no exported session", found=f"{len(view)} bytes", needed="what Session.export returns")
    version, n_header = _HEAD.unpack(view[len(MAGIC) : start])
    need(version == VERSION, "the exported session has another format", found=version, needed=VERSION,
         advice="Export it again with this version.")  # fmt: skip
    (crc,) = _CRC.unpack(view[-_CRC.size :])
    if zlib.crc32(view[: -_CRC.size]) != crc:
        raise _damaged("another checksum")
    try:  # a checksum is no proof of who wrote it
        header = json.loads(bytes(view[start : start + n_header]))
        arrays = _arrays(header["arrays"], view[start + n_header : -_CRC.size])
        _ = header["model"] + header["kv"] + "", header["layout"], arrays[TOKENS], arrays[RECURRENT]
        _ = header["drafter"] and (header["drafter"]["rows"], header["drafter"]["first"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(f"a header with {type(error).__name__}: {error}") from error
    return header, arrays


def _arrays(listed: list[list[Any]], data: memoryview) -> dict[str, np.ndarray]:
    """Views of the arrays, by name. ValueError if they do not fit into the data."""
    arrays, at = {}, 0
    for name, kind, shape in listed:
        n_bytes = prod(shape) * np.dtype(kind).itemsize
        if min(shape, default=0) < 0 or at + n_bytes > len(data):
            raise ValueError("too few bytes")
        arrays[name] = np.frombuffer(data[at : at + n_bytes], kind).reshape(shape)
        at += n_bytes
    return arrays


def _damaged(found: str) -> BadArgument:
    return BadArgument("the exported session is damaged", found=found, needed="the bytes as export returned them",
                       advice="Export it again.")  # fmt: skip


def _cells(state: State) -> list[Buffer]:
    return [b for b in state.buffers.values() if b.role == "cells"]


def _used(state: State, b: Buffer, rows: int) -> int:
    """Entries of a cells buffer that `rows` positions use: one each, or one for every complete block."""
    most = max(c.shape[0] for c in _cells(state))
    return rows // (most // b.shape[0])


def _fits(b: Buffer, values: np.ndarray | None) -> bool:
    return (
        values is not None
        and values.dtype == np.dtype(b.dtype)
        and values.shape[1:] == tuple(b.shape[1:])
        and len(values) <= b.shape[0]
    )


def _layout(state: State) -> list[list[Any]]:
    """Recurrent buffers in their order."""
    return [[b.name, str(np.dtype(b.dtype)), list(b.shape)] for b in state.buffers.values() if b.role == "recurrent"]
