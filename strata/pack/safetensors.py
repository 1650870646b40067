"""Safetensors files: header and raw data, memory-mapped."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.base.errors import FileError

HEADER_LIMIT = 100 << 20
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class StoredTensor:
    """dtype is BF16, F16 or F32; data is a read-only uint8 view onto the mapping, (rows, row_bytes)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def read_safetensors(path: str | Path) -> dict[str, StoredTensor]:
    """All tensors of a file, without copying. FileError for a damaged file or a type other than BF16, F16, F32."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            if file_bytes < 8:
                raise FileError(f"{path.name} is no safetensors file", found=f"{file_bytes} bytes", needed="at least 8")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FileError(f"{path} cannot be read", found=error.strerror or str(error)) from error
    content = np.frombuffer(mapping, np.uint8)
    n = int.from_bytes(bytes(content[:8]), "little")
    if n > min(HEADER_LIMIT, file_bytes - 8):
        raise FileError(f"header of {path.name}", found=f"{n} bytes announced", needed=f"<= {file_bytes - 8}")
    try:
        entries = json.loads(bytes(content[8 : 8 + n]))
        items = [(k, v["dtype"], tuple(v["shape"]), *v["data_offsets"]) for k, v in entries.items() if k != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"header of {path.name} is damaged", found=str(error)) from error
    data = content[8 + n :]
    return {name: _tensor(path, name, dtype, shape, begin, end, data) for name, dtype, shape, begin, end in items}


def _tensor(path: Path, name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int, data) -> StoredTensor:
    if dtype not in ITEM_BYTES:
        raise FileError(f"tensor {name} of {path.name}", found=dtype, needed=", ".join(ITEM_BYTES))
    if not all(isinstance(n, int) and n > 0 for n in (*shape, 1)) or not isinstance(begin, int):
        raise FileError(f"tensor {name} of {path.name}", found=shape, needed="positive dimensions")
    n_values = 1
    for n in shape:
        n_values *= n
    if not 0 <= begin <= end <= data.size or end - begin != n_values * ITEM_BYTES[dtype]:
        raise FileError(
            f"tensor {name} of {path.name} is outside the file or has another size",
            found=f"bytes {begin}..{end} of {data.size}",
            needed=f"{n_values * ITEM_BYTES[dtype]} bytes",
            advice="Download the file again.",
        )
    columns = shape[-1] if shape else 1
    return StoredTensor(name, dtype, shape, data[begin:end].reshape(n_values // columns, columns * ITEM_BYTES[dtype]))
