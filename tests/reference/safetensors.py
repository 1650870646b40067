"""Reader of BF16 and F32 safetensors files: an 8-byte length, a JSON header, raw data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def read_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """All tensors as float64, in their own shapes. Raises ValueError for other types."""
    data = Path(path).read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:header_end]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = data[header_end + begin : header_end + end]
        if entry["dtype"] == "BF16":
            # BF16 is the upper half of a float32.
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] == "F32":
            values = np.frombuffer(raw, "<f4")
        else:
            raise ValueError(f"{path}: {name} is {entry['dtype']}, needed BF16 or F32")
        tensors[name] = values.astype(np.float64).reshape(entry["shape"])
    return tensors
