"""A draft layer as an `rt` folder.

dense.txt        a line per tensor: name kind rows columns offset bytes; kind is q8_0, bf16 or f32
dense.bin        their data; norms have 1 added already
experts.bin      an expert after the other
experts.fmt      optional, `label id id`: ggml types of gate and up, and of down. An expert is then its gate rows, up
                 rows and down rows as raw blocks; without the file it is a Q2_0 blob (`canonical`)
draft_vocab.bin  optional: the tokens that drafts are chosen from
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.base.errors import FileError, ModelError
from strata.pack.formats import BlockFormat, by_name, format_of
from strata.pack.mtp import canonical
from strata.pack.mtp.contents import (
    EXPERTS,
    INDEXER,
    NORM,
    OTHER_MODEL,
    PARTS,
    VECTORS,
    DraftShape,
    held,
    need_model,
    shape_found,
)
from strata.pack.tensors import HeldTensor

DENSE_TXT, DENSE_BIN, EXPERTS_BIN, EXPERTS_FMT = "dense.txt", "dense.bin", "experts.bin", "experts.fmt"
KINDS = {"q8_0": "Q8_0", "bf16": "BF16", "f32": "F32"}
AGAIN = "Copy or convert the folder again."

_KNOWN = {p.hf: p for p in (*PARTS, *INDEXER)}
_FILE_NAMES = {p.name: p.hf for p in PARTS} | dict.fromkeys(EXPERTS, EXPERTS_BIN)


@dataclass(frozen=True)
class Line:
    """A line of dense.txt."""

    name: str
    kind: str
    rows: int
    columns: int
    offset: int
    n_bytes: int

    def __str__(self) -> str:
        return f"{self.name} {self.kind} {self.rows} {self.columns} {self.offset} {self.n_bytes}"

    @property
    def format(self) -> BlockFormat:
        return by_name(KINDS[self.kind])


def read_table(folder: Path) -> dict[str, Line]:
    """dense.txt by tensor name. FileError or ModelError for the first line that is wrong in itself."""
    path = folder / DENSE_TXT
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read", found=_cause(error), needed="ASCII text", advice=AGAIN) from error
    lines: dict[str, Line] = {}
    for number, written in enumerate(text.splitlines(), start=1):
        label, fields = f"line {number} of {path}", written.split()
        if len(fields) != 6 or not all(f.isdecimal() for f in fields[2:]):
            raise FileError(
                f"{label} is damaged",
                found=repr(written),
                needed="name kind rows columns offset bytes",
                advice=AGAIN,
            )
        line = Line(fields[0], fields[1], *(int(f) for f in fields[2:]))
        if line.kind not in KINDS:
            raise ModelError(
                f"tensor {line.name}, {label}, is of an unknown kind",
                found=line.kind,
                needed=", ".join(KINDS),
                advice=AGAIN,
            )
        if line.name not in _KNOWN or line.name in lines:
            found = "twice the same" if line.name in lines else "an unknown tensor"
            raise ModelError(
                f"tensor {line.name}, {label}, has no place",
                found=found,
                needed="each tensor of a draft layer once",
                advice=AGAIN,
            )
        needed = line.rows * line.format.row_bytes(line.columns)
        if line.n_bytes != needed or not needed:
            found = f"{line.n_bytes} bytes"
            raise FileError(
                f"tensor {line.name}, {label}, has another size",
                found=found,
                needed=f"{needed or 'some'} bytes",
                advice=AGAIN,
            )
        lines[line.name] = line
    return lines


def _map(path: Path) -> np.ndarray:
    """The file as read-only bytes that stay on disk until they are used."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise FileError(f"{path} is empty", found="0 bytes", needed="data", advice=AGAIN)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise FileError(
            f"{path} cannot be read", found=_cause(error), needed="a readable file", advice=AGAIN
        ) from error


def _cause(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def read_rt(folder: Path, model: DraftShape) -> dict[str, HeldTensor]:
    """Held tensors by name, `mtp.` in front; dense ones in place. model: the shape that the model needs.

    FileError for a damaged or incomplete folder, ModelError for another model's or an unknown type.
    """
    lines, dense, experts = read_table(folder), _map(folder / DENSE_BIN), _map(folder / EXPERTS_BIN)
    shapes: dict[str, tuple[int, ...]] = {}
    for part in PARTS:
        if (line := lines.get(part.hf)) is not None:
            flat = part.name in VECTORS and 1 in (line.rows, line.columns)
            shapes[part.name] = (line.rows * line.columns,) if flat else (line.rows, line.columns)
            if part.use == NORM and line.kind != "f32":
                raise ModelError(
                    f"norm {line.name} in {folder} is of another kind", found=line.kind, needed="f32", advice=AGAIN
                )
    if "fc_hidden" in shapes and "ffn_gate_inp" in shapes:
        # experts.bin does not say its shapes; its size is judged against the model's below.
        E, D = shapes["ffn_gate_inp"][0], shapes["fc_hidden"][0]
        shapes |= dict(zip(EXPERTS, ((E, model.F, D), (E, model.F, D), (E, D, model.F)), strict=True))
    need_model(shape_found(shapes, _FILE_NAMES.__getitem__, str(folder)), model, str(folder))
    end = max(line.offset + line.n_bytes for line in lines.values())
    if end > dense.size:
        raise FileError(
            f"{folder / DENSE_BIN} is too short",
            found=f"{dense.size} bytes",
            needed=f"{end} by {DENSE_TXT}",
            advice=AGAIN,
        )
    out = []
    for part in PARTS:
        line = lines[part.hf]
        data = dense[line.offset : line.offset + line.n_bytes]
        out.append(held(part.name, shapes[part.name], line.format.name, data, mapped=True))
    out += _experts(folder, experts, model)
    return {t.name: t for t in out}


def expert_types(folder: Path) -> tuple[BlockFormat, BlockFormat] | None:
    """Formats of gate and up, and of down, by experts.fmt; None without it."""
    path = folder / EXPERTS_FMT
    if not path.exists():
        return None
    try:
        fields = path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read", found=_cause(error), needed="ASCII text", advice=AGAIN) from error
    if len(fields) != 3 or not all(f.isdecimal() for f in fields[1:]):
        raise FileError(
            f"{path} is damaged",
            found=repr(" ".join(fields)[:60]),
            needed="label, ggml id, ggml id, as 'q8_0 8 8'",
            advice=AGAIN,
        )
    wide, narrow = (format_of(int(f), str(path)) for f in fields[1:])
    for kind in (wide, narrow):
        if kind.activation == "none":
            raise ModelError(
                f"{path} names a type that has no products",
                found=kind.name,
                needed="a float or block format",
                advice=AGAIN,
            )
    return wide, narrow


def _experts(folder: Path, data: np.ndarray, s: DraftShape) -> list[HeldTensor]:
    """The routed experts, regrouped into one array per projection.

    They cannot be served where they lie: a Q2_0 blob keeps scales apart from codes, and the kernels step from one
    expert to the next by whole matrices of one projection, while a blob holds all three.
    """
    types = expert_types(folder)
    wide, narrow = types or (canonical.Q2_0, canonical.Q2_0)
    sizes = s.F * wide.row_bytes(s.D), s.D * narrow.row_bytes(s.F)
    blob = 2 * sizes[0] + sizes[1]
    if data.size != s.E * blob:
        form = f"{wide.name} and {narrow.name}" if types else f"Q2_0 (there is no {EXPERTS_FMT})"
        whole = f", {data.size // blob} experts" if data.size % blob == 0 else f", {data.size / blob:.2f} experts"
        raise FileError(
            f"{folder / EXPERTS_BIN} has another size",
            found=f"{data.size} bytes{whole}",
            needed=f"{s.E * blob}: {s.E} experts of {blob} bytes in {form}",
            advice=AGAIN if data.size < s.E * blob else OTHER_MODEL,
        )
    blobs = data.reshape(s.E, blob)
    if types is None:
        parts = canonical.unpack(blobs, s.D, s.F)
    else:
        cuts = np.split(blobs, (sizes[0], 2 * sizes[0]), axis=1)
        parts = tuple(np.ascontiguousarray(c) for c in cuts)
    names = zip(EXPERTS, ((s.E, s.F, s.D), (s.E, s.F, s.D), (s.E, s.D, s.F)), (wide, wide, narrow), parts, strict=True)
    return [held(name, shape, kind.name, rows.reshape(-1)) for name, shape, kind, rows in names]
