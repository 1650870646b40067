"""Headers of new GGUF files: keys, tensor list, and where each tensor's data goes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from strata.base.errors import BadArgument
from strata.pack.formats import BlockFormat, by_name
from strata.pack.gguf_metadata import ARRAY, STRING

ALIGNMENT = 32

_CODES = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
          "f32": (6, "f"), "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}  # fmt: skip


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written. shape in numpy order."""

    name: str
    shape: tuple[int, ...]
    format_name: str

    @property
    def format(self) -> BlockFormat:
        return by_name(self.format_name)

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.format.row_bytes(self.shape[-1])

    @property
    def n_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class FileLayout:
    """header: the bytes up to the data; offsets: of each tensor in the file; n_bytes: of the whole file."""

    header: bytes
    offsets: tuple[int, ...]
    n_bytes: int


def file_layout(keys: Mapping[str, tuple[str, Any]], tensors: Sequence[NewTensor]) -> FileLayout:
    """Lay a file out. keys: name -> (type, value), a type being one of u8 .. f64, bool, string, or one of them with []
    behind it for an array, as ("i32[]", [0, 4])."""
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(keys))]
    for name, (kind, value) in keys.items():
        parts += [_text(name), _typed(kind, value)]
    at, offsets = 0, []
    for t in tensors:
        ne = t.shape[::-1]
        parts.append(_text(t.name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, t.format.ggml_id, at))
        offsets.append(at)
        at += _aligned(t.n_bytes)
    header = b"".join(parts)
    start = _aligned(len(header))
    end = offsets[-1] + tensors[-1].n_bytes if tensors else 0
    return FileLayout(header.ljust(start, b"\0"), tuple(start + o for o in offsets), start + end)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(kind: str, value: Any) -> bytes:
    if not kind.endswith("[]"):
        return struct.pack("<I", _code(kind)) + _items(kind, [value])
    item = kind[:-2]
    return struct.pack("<IIQ", ARRAY, _code(item), len(value)) + _items(item, value)


def _code(kind: str) -> int:
    if kind == "string":
        return STRING
    if kind not in _CODES:
        needed = f"string, {', '.join(_CODES)}, or one of them with []"
        raise BadArgument("no such type of key", found=repr(kind), needed=needed)
    return _CODES[kind][0]


def _items(kind: str, values: Iterable[Any]) -> bytes:
    values = list(values)
    if kind == "string":
        return b"".join(map(_text, values))
    return struct.pack(f"<{len(values)}{_CODES[kind][1]}", *values)
