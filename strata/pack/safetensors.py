"""Safetensors files: header and raw data, memory-mapped."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from strata.base.errors import FileError

HEADER_LIMIT = 100 << 20
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
AGAIN = "Download the file again."


@dataclass(frozen=True)
class StoredTensor:
    """dtype is BF16, F16 or F32; data is a read-only uint8 view onto the mapping, (rows, row_bytes)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def read_safetensors(path: str | Path, prefix: str = "") -> dict[str, StoredTensor]:
    """The tensors of a file whose names start with `prefix`, without copying.

    FileError for a damaged file, or a type other than BF16, F16 and F32 among those tensors.
    """
    path = Path(path)
    content = _map(path)
    n = int.from_bytes(bytes(content[:8]), "little")
    if n > min(HEADER_LIMIT, content.size - 8):
        raise FileError(
            f"header of {path.name} has an impossible length",
            found=f"{n} bytes announced",
            needed=f"<= {min(HEADER_LIMIT, content.size - 8)}",
            advice="Is it a safetensors file, and complete?",
        )
    try:
        header = json.loads(bytes(content[8 : 8 + n]))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, AttributeError, RecursionError) as error:
        found = str(error) or type(error).__name__
        raise FileError(f"header of {path.name} is damaged", found=found, needed="JSON", advice=AGAIN) from error
    data = content[8 + n :]
    return {name: _tensor(path, name, entry, data) for name, entry in entries.items() if name.startswith(prefix)}


def _map(path: Path) -> np.ndarray:
    """The whole file as read-only bytes, at least 8 of them."""
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            if file_bytes < 8:
                raise FileError(
                    f"{path.name} is no safetensors file",
                    found=f"{file_bytes} bytes",
                    needed="at least 8",
                    advice=AGAIN,
                )
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        found = error.strerror or str(error)
        raise FileError(f"{path} cannot be read", found=found, needed="a readable safetensors file") from error


def _tensor(path: Path, name: str, entry: Any, data: np.ndarray) -> StoredTensor:
    label = f"tensor {name} of {path.name}"
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"header of {path.name} is damaged at tensor {name}",
            found=repr(error),
            needed="dtype, shape and two data_offsets",
            advice=AGAIN,
        ) from error
    if dtype not in ITEM_BYTES:
        raise FileError(
            f"{label} has another type",
            found=f"type {dtype}",
            needed=", ".join(ITEM_BYTES),
            advice="Take the files in BF16 as they were released.",
        )
    if not all(type(v) is int and v > 0 for v in shape) or type(begin) is not int or type(end) is not int:
        found = f"shape {shape}, bytes {begin}..{end}"
        raise FileError(f"{label} is damaged in the header", found=found, needed="positive integers", advice=AGAIN)
    n_bytes = prod(shape) * ITEM_BYTES[dtype]
    if not 0 <= begin <= end <= data.size or end - begin != n_bytes:
        raise FileError(
            f"{label} is outside the file or has another size",
            found=f"bytes {begin}..{end} of {data.size}",
            needed=f"{n_bytes} bytes inside it",
            advice=AGAIN,
        )
    columns = shape[-1] if shape else 1
    return StoredTensor(name, dtype, shape, data[begin:end].reshape(-1, columns * ITEM_BYTES[dtype]))
