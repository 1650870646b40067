"""Parser of one GGUF header: every value type, nested arrays, and checks before anything is allocated.

Layout (little-endian): "GGUF", u32 version, u64 tensors, u64 keys; then per key a string, u32 type and the value; then
per tensor a string, u32 dimensions, u64 each, u32 ggml type, u64 offset in the data section, which begins at the next
multiple of the alignment. A string is a u64 length and its bytes; an array is u32 item type, u64 count and the items.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import numpy as np

from strata.base.errors import FileError
from strata.pack.formats import FORMATS, BlockFormat, format_of
from strata.pack.gguf_metadata import ARRAY, BOOL, DAMAGED, NUMBER_DTYPES, STRING, VALUE_NAMES, Metadata, Stored

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_BYTES = (1 << 63) - 1
MAX_HEADER_BYTES = 1 << 30
"""Bound on what a header may occupy, and so on what a damaged one can make us walk or copy (real ones: 11 MB)."""
MAX_ITEMS = 1 << 24
"""Bound on strings or arrays in one array; a zeroed region would otherwise read as endless empty strings."""
MAX_NESTING = 8

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    shape    numpy order: the last axis is contiguous
    shard    0-based index of the shard that holds it
    offset   absolute byte offset in that shard's file
    n_bytes  bytes of its data
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    shard: int
    offset: int
    n_bytes: int

    @property
    def format(self) -> BlockFormat:
        return FORMATS[self.ggml_type]

    @property
    def rows(self) -> int:
        """Product of all axes but the last."""
        rows = 1
        for n in self.shape[:-1]:
            rows *= n
        return rows

    @property
    def row_bytes(self) -> int:
        return self.n_bytes // self.rows


@dataclass(frozen=True)
class Header:
    """What one shard's header says. Tensor offsets are absolute; `end` is where the header's bytes end."""

    path: Path
    file_bytes: int
    version: int
    alignment: int
    data_start: int
    content: bytes
    entries: dict[str, Stored]
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    data_end: int


def read_header(mapping: mmap.mmap, path: Path, shard: int, headers_only: bool) -> Header:
    """Parse and check the header in `mapping`. Raises FileError or ModelError; reads no tensor data.

    With `headers_only`, tensors may reach past the end of the file.
    """
    return _Parser(mapping, path).header(shard, headers_only)


class _Parser:
    """A cursor over the header; `what` names the key or tensor being read, for errors."""

    def __init__(self, mapping: mmap.mmap, path: Path):
        self.data, self.path, self.file_bytes = mapping, path, len(mapping)
        self.limit = min(self.file_bytes, MAX_HEADER_BYTES)
        self.at = 0

    # -- primitives ---------------------------------------------------------------------------------------------------

    def need_bytes(self, n: int, what: str) -> None:
        """`n` more bytes must exist; checked before anything of that size is made."""
        if n <= self.limit - self.at:
            return
        if self.at + n <= self.file_bytes:
            self.fail(
                f"the header is too long at {what}",
                found=f"{self.at + n} bytes",
                needed=f"at most {MAX_HEADER_BYTES} bytes",
            )
        self.fail(
            f"the header is truncated or damaged in {what}",
            found=f"a file of {self.file_bytes} bytes",
            needed=f"{self.at + n} bytes",
        )

    def fail(self, message: str, *, found: object, needed: object, advice: str = DAMAGED) -> NoReturn:
        raise FileError(f"{self.path.name}: {message}", found=found, needed=needed, advice=advice)

    def u32(self, what: str) -> int:
        self.need_bytes(4, what)
        self.at += 4
        return _U32.unpack_from(self.data, self.at - 4)[0]

    def u64(self, what: str) -> int:
        self.need_bytes(8, what)
        self.at += 8
        return _U64.unpack_from(self.data, self.at - 8)[0]

    def name(self, what: str) -> str:
        n = self.u64(what)
        self.need_bytes(n, what)
        self.at += n
        text = self.data[self.at - n : self.at]
        try:
            return text.decode()
        except UnicodeDecodeError:
            self.fail(f"the name of {what} is not UTF-8", found=text[:40], needed="UTF-8 text")

    # -- parts --------------------------------------------------------------------------------------------------------

    def header(self, shard: int, headers_only: bool) -> Header:
        version = self.preamble()
        n_tensors, n_keys = self.u64("the tensor count"), self.u64("the key count")
        self.need_bytes(n_keys * _MIN_KEY_BYTES, f"the list of {n_keys} keys")
        entries: dict[str, Stored] = {}
        for i in range(n_keys):
            key = self.name(f"key {i}")
            if key in entries:
                self.fail(f"key '{key}' appears twice", found=f"it again as key {i}", needed="each key once")
            entries[key] = self.value(self.u32(f"key '{key}'"), f"key '{key}'")
        self.need_bytes(n_tensors * _MIN_TENSOR_BYTES, f"the list of {n_tensors} tensors")
        listed = list(self.tensor_list(n_tensors))
        content = self.data[: self.at]
        metadata = Metadata([(content, entries, self.path.name)])
        alignment = metadata.need_int("general.alignment", DEFAULT_ALIGNMENT)
        if alignment <= 0 or alignment & (alignment - 1):
            self.fail("key 'general.alignment' is unusable", found=alignment, needed="a power of two")
        data_start = -(-self.at // alignment) * alignment
        tensors = tuple(self.placed(*item, shard, alignment, data_start, headers_only) for item in listed)
        self.check_overlaps(tensors)
        data_end = max((t.offset + t.n_bytes for t in tensors), default=self.at)
        return Header(
            self.path, self.file_bytes, version, alignment, data_start, content, entries, metadata, tensors, data_end
        )

    def preamble(self) -> int:
        magic = self.data[:4]
        if magic != b"GGUF":
            self.fail(
                "not a GGUF file",
                found=f"first bytes {magic!r}",
                needed=b"GGUF",
                advice="Give a .gguf file. If this one is called so, download it again.",
            )
        self.at = 4
        version = self.u32("the version")
        if version & 0xFFFF == 0 and version:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            self.fail(
                "the file is big-endian",
                found=f"version {swapped} byte-swapped",
                needed="little-endian",
                advice="Convert it with the gguf package's endian tool.",
            )
        if version not in VERSIONS:
            self.fail(
                "the GGUF version is not supported",
                found=version,
                needed=" or ".join(map(str, VERSIONS)),
                advice="Download the file again, or convert the model to version 3.",
            )
        return version

    def value(self, kind: int, what: str, depth: int = 0) -> Stored:
        """Steps over one value of type `kind`."""
        if kind >= len(VALUE_NAMES):
            self.fail(f"unknown value type in {what}", found=kind, needed=f"0..{len(VALUE_NAMES) - 1}")
        if kind == STRING:
            n = self.u64(what)
            self.need_bytes(n, what)
            self.at += n
            return Stored(STRING, self.at - n, n)
        if kind == ARRAY:
            return self.array(what, depth)
        start = self.numbers(kind, 1, what)
        return Stored(kind, start)

    def numbers(self, kind: int, count: int, what: str) -> int:
        """Steps over `count` numbers and returns where they start."""
        n_bytes = count * np.dtype(NUMBER_DTYPES[kind]).itemsize
        self.need_bytes(n_bytes, what)
        start, self.at = self.at, self.at + n_bytes
        if kind == BOOL and n_bytes and max(self.data[start : self.at]) > 1:
            self.fail(f"a bool of {what} is neither 0 nor 1", found=max(self.data[start : self.at]), needed="0 or 1")
        return start

    def array(self, what: str, depth: int) -> Stored:
        if depth == MAX_NESTING:
            self.fail(
                f"arrays nested too deep in {what}",
                found=f"more than {MAX_NESTING} levels",
                needed=f"at most {MAX_NESTING}",
            )
        kind, count = self.u32(what), self.u64(what)
        if kind >= len(VALUE_NAMES):
            self.fail(f"unknown item type in {what}", found=kind, needed=f"0..{len(VALUE_NAMES) - 1}")
        if kind not in (STRING, ARRAY):
            return Stored(ARRAY, self.numbers(kind, count, what), count, kind)
        self.need_bytes(count * (8 if kind == STRING else 12), f"{count} items of {what}")
        if count > MAX_ITEMS:
            self.fail(f"too many items in {what}", found=count, needed=f"at most {MAX_ITEMS}")
        start = self.at
        if kind == STRING:
            return Stored(ARRAY, start, count, kind, self.string_starts(count, what))
        return Stored(ARRAY, start, count, kind, [self.array(what, depth + 1) for _ in range(count)])

    def string_starts(self, count: int, what: str) -> np.ndarray:
        """(count + 1,) int64 starts of the strings. A plain loop: half a million strings take 0.1 s."""
        starts = array("q", [self.at])
        append, unpack, data, limit, at = starts.append, _U64.unpack_from, self.data, self.limit, self.at
        for _ in range(count):
            if at + 8 > limit:
                break
            at += 8 + unpack(data, at)[0]
            if at > limit:
                break
            append(at)
        if len(starts) <= count:
            self.at = starts[-1]
            self.need_bytes(max(8, at - self.at), f"string {len(starts) - 1} of {what}")
        self.at = at
        return np.frombuffer(starts, np.int64)

    def tensor_list(self, n_tensors: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """(name, shape, ggml type, relative offset) of each tensor."""
        names: set[str] = set()
        for i in range(n_tensors):
            name = self.name(f"tensor {i}")
            what = f"tensor '{name}'"
            if name in names:
                self.fail(f"{what} appears twice", found=f"it again as tensor {i}", needed="each tensor once")
            names.add(name)
            n_dims = self.u32(what)
            if n_dims > MAX_DIMENSIONS:
                self.fail(f"{what} has too many dimensions", found=n_dims, needed=f"at most {MAX_DIMENSIONS}")
            ne = [self.u64(what) for _ in range(n_dims)]
            yield name, tuple(reversed(ne)), self.u32(what), self.u64(what)

    def placed(
        self,
        name: str,
        shape: tuple[int, ...],
        ggml_type: int,
        relative: int,
        shard: int,
        alignment: int,
        data_start: int,
        headers_only: bool,
    ) -> TensorInfo:
        """Checks one tensor's type, shape and place."""
        what = f"tensor '{name}'"
        block = format_of(ggml_type, f"{what} of {self.path.name}")
        values = 1
        for n in shape:
            values *= n
        if values == 0:
            self.fail(f"{what} is empty", found=f"shape {shape}", needed="at least one value")
        row_values = shape[-1] if shape else 1
        if row_values % block.block_values:
            self.fail(
                f"{what} has rows that are not whole {block.name} blocks",
                found=f"{row_values} values",
                needed=f"a multiple of {block.block_values}",
            )
        n_bytes = values // block.block_values * block.block_bytes
        if values > MAX_BYTES or n_bytes > MAX_BYTES:
            self.fail(f"the dimensions of {what} overflow", found=f"shape {shape}", needed="less than 2^63 bytes")
        if relative % alignment:
            self.fail(f"{what} is misaligned", found=f"offset {relative}", needed=f"a multiple of {alignment}")
        offset = data_start + relative
        end = offset + n_bytes
        if end > MAX_BYTES:
            self.fail(f"the offset of {what} is out of range", found=relative, needed="an end below 2^63")
        if end > self.file_bytes and not headers_only:
            self.fail(
                f"{what} ends at byte {end}, past the end of the file",
                found=f"a file of {self.file_bytes} bytes",
                needed=f"{end} bytes",
                advice="The file is truncated, or still being downloaded: download it again.",
            )
        return TensorInfo(name, shape, ggml_type, shard, offset, n_bytes)

    def check_overlaps(self, tensors: tuple[TensorInfo, ...]) -> None:
        ordered = sorted(tensors, key=lambda t: t.offset)
        for before, after in pairwise(ordered):
            if before.offset + before.n_bytes > after.offset:
                self.fail(
                    f"tensors '{before.name}' and '{after.name}' overlap",
                    found=f"offset {after.offset}",
                    needed=f"at least {before.offset + before.n_bytes}",
                )
