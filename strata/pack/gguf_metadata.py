"""Metadata of a GGUF header: a mapping that decodes strings and arrays only when they are asked for.

Values live in one bytes copy of the header, so they stay readable after the file is closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, overload

import numpy as np

from strata.base.errors import FileError, ModelError

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
VALUE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
NUMBER_DTYPES = {
    U8: "<u1", I8: "<i1", U16: "<u2", I16: "<i2", U32: "<u4", I32: "<i4",
    F32: "<f4", BOOL: "<u1", U64: "<u8", I64: "<i8", F64: "<f8",
}  # fmt: skip

DAMAGED = "The file is damaged: download it again."
"""What to do about most of what can be wrong in a header."""


class HeaderStrings(Sequence[str]):
    """A string array of the header; an element is decoded when it is read.

    header  bytes of the header
    starts  (n + 1,) int64, where each element's 8-byte length word begins; the last is the end of the array
    key, file_name  for messages
    """

    def __init__(self, header: bytes, starts: np.ndarray, key: str, file_name: str):
        self._header, self._starts, self._key, self._file_name = header, starts, key, file_name

    def __len__(self) -> int:
        return len(self._starts) - 1

    def raw(self, index: int) -> bytes:
        """The bytes of one element, not decoded."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of {len(self)} strings in key '{self._key}'")
        index %= len(self)
        return self._header[self._starts[index] + 8 : self._starts[index + 1]]

    def raw_list(self) -> list[bytes]:
        """All elements as bytes: the fast way to read a whole vocabulary."""
        bounds, header = self._starts.tolist(), self._header
        return [header[a + 8 : b] for a, b in pairwise(bounds)]

    def to_list(self) -> list[str]:
        """All elements decoded."""
        try:
            return [text.decode() for text in self.raw_list()]
        except UnicodeDecodeError:
            return [self._decode(i) for i in range(len(self))]  # finds and names the element

    def _decode(self, index: int) -> str:
        data = self.raw(index)
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise FileError(
                f"{self._file_name}: element {index} of key '{self._key}' is not UTF-8",
                found=data[:40],
                needed="UTF-8 text",
                advice=DAMAGED,
            ) from None

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self._decode(i) for i in range(*index.indices(len(self)))]
        return self._decode(index)

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_list())

    def __repr__(self) -> str:
        return f"HeaderStrings('{self._key}', {len(self)} strings)"


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a value lies in the header.

    type   GGUF value type; ARRAY has `item`, the element type
    start  offset of the value (numbers), of the first byte (strings)
    count  elements (number arrays) or bytes (strings)
    parts  (n + 1,) int64 starts of a string array, or the Stored of each element of a nested array
    """

    type: int
    start: int
    count: int = 1
    item: int = -1
    parts: Any = None

    @property
    def type_name(self) -> str:
        return VALUE_NAMES[self.type] if self.type != ARRAY else f"array of {VALUE_NAMES[self.item]}"


def decode(stored: Stored, header: bytes, key: str, file_name: str) -> Any:
    """The Python value: int, float, bool, str, numpy array, HeaderStrings or list (nested arrays)."""
    if stored.type == STRING:
        data = header[stored.start : stored.start + stored.count]
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise FileError(
                f"{file_name}: key '{key}' is not UTF-8", found=data[:40], needed="UTF-8 text", advice=DAMAGED
            ) from None
    if stored.type != ARRAY:
        value = np.frombuffer(header, NUMBER_DTYPES[stored.type], 1, stored.start)[0].item()
        return bool(value) if stored.type == BOOL else value
    if stored.item == STRING:
        return HeaderStrings(header, stored.parts, key, file_name)
    if stored.item == ARRAY:
        return [decode(part, header, key, file_name) for part in stored.parts]
    values = np.frombuffer(header, NUMBER_DTYPES[stored.item], stored.count, stored.start)
    return values.view(np.bool_) if stored.item == BOOL else values


class Metadata(Mapping[str, Any]):
    """Keys and values of one header, or of several: the first header that has a key wins.

    headers    (bytes, entries, name of the file) of each
    file_name  that of the first
    """

    def __init__(self, headers: Sequence[tuple[bytes, Mapping[str, Stored], str]]):
        self.file_name = headers[0][2]
        self._stored: dict[str, tuple[Stored, bytes, str]] = {}
        self._values: dict[str, Any] = {}
        for header, entries, name in headers:
            for key, stored in entries.items():
                self._stored.setdefault(key, (stored, header, name))

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            stored, header, file_name = self._stored[key]
            self._values[key] = decode(stored, header, key, file_name)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, key: object) -> bool:
        return key in self._stored

    def type_name(self, key: str) -> str:
        """GGUF type of a key's value, as "u32" or "array of string"; "nothing" for a key that is absent."""
        return self._stored[key][0].type_name if key in self._stored else "nothing"

    def _need(self, key: str, needed: str, fits: bool) -> Any:
        if not fits:
            what = "has another type" if key in self else "is missing"
            raise self._error(f"key '{key}' {what}", self.type_name(key), needed)
        return self[key]

    def _error(self, message: str, found: str, needed: str) -> ModelError:
        advice = "The file is damaged, or made for another program: download or convert it again."
        return ModelError(f"{self.file_name}: {message}", found=found, needed=needed, advice=advice)

    def _types(self, key: str) -> tuple[int, int]:
        stored = self._stored[key][0] if key in self._stored else None
        return (stored.type, stored.item) if stored else (-1, -1)

    def need_int(self, key: str, default: int | None = None) -> int:
        """An integer of any width; `default` (if given) where the key is absent. ModelError names the key."""
        if default is not None and key not in self:
            return default
        return self._need(key, "an integer", self._types(key)[0] in _INTEGERS)

    def need_float(self, key: str, default: float | None = None) -> float:
        """A float (or integer, converted); `default` (if given) where the key is absent."""
        if default is not None and key not in self:
            return default
        return float(self._need(key, "a float", self._types(key)[0] in _INTEGERS | _FLOATS))

    def need_bool(self, key: str, default: bool | None = None) -> bool:
        """A bool; `default` (if given) where the key is absent."""
        if default is not None and key not in self:
            return default
        return self._need(key, "a bool", self._types(key)[0] == BOOL)

    def need_str(self, key: str, default: str | None = None) -> str:
        """A string; `default` (if given) where the key is absent."""
        if default is not None and key not in self:
            return default
        return self._need(key, "a string", self._types(key)[0] == STRING)

    def need_ints(self, key: str, count: int | None = None) -> tuple[int, ...]:
        """An array of integers of any width, of `count` elements if given."""
        values = self._need(key, "an array of integers", self._types(key) in {(ARRAY, i) for i in _INTEGERS})
        self._need_count(key, len(values), count)
        return tuple(values.tolist())

    def need_strings(self, key: str, count: int | None = None) -> HeaderStrings:
        """An array of strings, of `count` elements if given."""
        values = self._need(key, "an array of strings", self._types(key) == (ARRAY, STRING))
        self._need_count(key, len(values), count)
        return values

    def _need_count(self, key: str, found: int, needed: int | None) -> None:
        if needed is not None and found != needed:
            raise self._error(f"key '{key}' has another length", f"{found} elements", f"{needed} elements")


_INTEGERS = frozenset((U8, I8, U16, I16, U32, I32, U64, I64))
_FLOATS = frozenset((F32, F64))
