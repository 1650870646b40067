"""A small model of real widths with finite values: norms of one, random embedding and routers, everything else zero.

Its logits mean nothing; its ops do the work of a real one, and different tokens ask for different experts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from strata.pack.gguf_file import GgufFile
from tests.header_maker import RELEASES, Shape, make_model


def make_wide_model(
    folder: Path, layers: int = 2, experts: int = 64, vocabulary: int = 4096, seed: int = 3, period: int = 2
) -> Path:
    """Write a model of `layers` full-width layers, every `period`-th an attention; returns the first shard's path."""
    shape = replace(Shape(), L=layers, E=experts, V=vocabulary, period=period, context=32768)
    dense = {**RELEASES["IQ3_XXS"].dense, "embed": ("F16",)}
    path = make_model(folder, "wide", shape, dense, (("IQ3_XXS", "IQ4_NL"),), vocabulary=False)
    with GgufFile(path) as gguf:
        tensors, paths = list(gguf.tensors.values()), [s.path for s in gguf.shards]
    rng = np.random.default_rng(seed)
    for t in tensors:
        n = int(np.prod(t.shape))
        if t.name == "token_embd.weight":
            values = rng.standard_normal(n, np.float32).astype(np.float16)
        elif t.name.endswith("ffn_gate_inp.weight"):
            values = (rng.standard_normal(n, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        elif t.name.endswith("norm.weight") or "_norm_" in t.name:
            values = np.ones(n, np.float32)
        else:
            continue
        with paths[t.shard].open("r+b") as file:
            file.seek(t.offset)
            file.write(values.tobytes())
    return path
