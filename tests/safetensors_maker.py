"""Writes safetensors files, well-formed or damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

Stored = tuple[str, tuple[int, ...], np.ndarray]
"""Type as the file names it, shape, data."""


def write_raw(path: Path, header: bytes, data: bytes) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def write_safetensors(path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None) -> Path:
    header: dict = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, (dtype, shape, values) in tensors.items():
        part = np.ascontiguousarray(values).tobytes()
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    return write_raw(path, json.dumps(header).encode(), data)
