"""Writes small GGUF files by hand, well-formed or damaged in one chosen way."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata.pack.formats import FORMATS
from strata.pack.gguf_metadata import ARRAY, BOOL, STRING

PACK = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass
class Typed:
    """A metadata value: GGUF type and payload; an array's payload is (item type, list) and may nest."""

    kind: int
    value: Any


@dataclass
class MadeTensor:
    """shape in numpy order. None = computed: `ne` from the shape, `offset` behind the tensor before, `data` zeros."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int = 0
    data: bytes | None = None
    ne: Sequence[int] | None = None
    offset: int | None = None

    @property
    def n_bytes(self) -> int:
        values = 1
        for n in self.shape:
            values *= n
        block = FORMATS[self.ggml_type]
        return values // block.block_values * block.block_bytes


@dataclass
class Made:
    """A file to be written; every field may be set wrong."""

    keys: list[tuple[str, Typed]] = field(default_factory=list)
    tensors: list[MadeTensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    n_keys: int | None = None
    n_tensors: int | None = None

    def header(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        out = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_keys)
        for key, typed in self.keys:
            out += text(key) + struct.pack("<I", typed.kind) + packed(typed.kind, typed.value)
        for tensor, offset in zip(self.tensors, self.offsets(), strict=True):
            ne = list(reversed(tensor.shape)) if tensor.ne is None else list(tensor.ne)
            out += text(tensor.name) + struct.pack(f"<I{len(ne)}Q", len(ne), *ne)
            out += struct.pack("<IQ", tensor.ggml_type, offset)
        return out

    def offsets(self) -> list[int]:
        at, result = 0, []
        for tensor in self.tensors:
            result.append(at if tensor.offset is None else tensor.offset)
            at = -(-(at + (tensor.n_bytes if tensor.ggml_type in FORMATS else 32)) // self.alignment) * self.alignment
        return result

    def content(self) -> bytes:
        """The whole file, ending with the last byte of the last tensor."""
        out = bytearray(self.header())
        start = -(-len(out) // self.alignment) * self.alignment
        for tensor, offset in zip(self.tensors, self.offsets(), strict=True):
            n_bytes = tensor.n_bytes if tensor.ggml_type in FORMATS else 32
            data = bytes(n_bytes) if tensor.data is None else tensor.data
            end = start + offset + len(data)
            if tensor.offset is not None and tensor.offset > 1 << 20:
                continue
            out.extend(bytes(max(0, end - len(out))))
            out[start + offset : end] = data
        return bytes(out)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.content())
        return path


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def packed(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        item, values = value
        return struct.pack("<IQ", item, len(values)) + b"".join(packed(item, v) for v in values)
    if kind == BOOL:
        return struct.pack("<B", value)
    return struct.pack("<" + PACK[kind], value)


def string(value: str | bytes) -> Typed:
    return Typed(STRING, value)


def array(item: int, values: Sequence[Any]) -> Typed:
    return Typed(ARRAY, (item, values))
