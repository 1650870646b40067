"""Whether two files hold the same model: a digest of names, shapes, types and samples of the tensors."""

from __future__ import annotations

import hashlib

from strata.pack.gguf_file import GgufFile

SAMPLED_TENSORS, SAMPLE_BYTES = 64, 64
"""Tensors that are looked into, evenly spread by name, and how many bytes of each, from its middle."""


def fingerprint(gguf: GgufFile) -> str:
    """Hex digest that does not depend on how the file is cut into shards. Reads a few KiB of it."""
    h = hashlib.sha256()
    names = sorted(gguf.tensors)
    for name in names:
        info = gguf.tensors[name]
        h.update(f"{name} {tuple(info.shape)} {info.format.name}\n".encode())
    for name in names[:: max(1, len(names) // SAMPLED_TENSORS)]:
        raw = gguf.raw(name).reshape(-1)
        middle = raw.size // 2
        h.update(raw[middle : middle + SAMPLE_BYTES].tobytes())
    return h.hexdigest()
