"""Named tensors from a GGUF mapping, plus tensors held in memory (a draft layer from its own files)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from strata.base.errors import BadArgument
from strata.pack.formats import BlockFormat, format_of
from strata.pack.gguf_file import GgufFile


@dataclass(frozen=True)
class HeldTensor:
    """A tensor in memory or inside another tensor.

    shape in numpy order; data uint8 rows (n_rows, row_bytes), possibly strided along rows; owner keeps it alive;
    mapped: data lies in a file's mapping and takes no memory of its own
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    data: np.ndarray = field(repr=False)
    owner: object = field(default=None, repr=False, compare=False)
    mapped: bool = False

    def __post_init__(self) -> None:
        rows = int(np.prod(self.shape[:-1], dtype=np.int64))
        wanted = (rows, self.format.row_bytes(self.shape[-1]))
        if self.data.dtype != np.uint8 or self.data.shape != wanted or self.data.strides[1] != 1:
            found = f"{self.data.dtype} {self.data.shape}"
            raise BadArgument(
                f"data of tensor {self.name} have another form",
                found=found,
                needed=f"uint8 {wanted}, bytes side by side",
            )

    @property
    def format(self) -> BlockFormat:
        return format_of(self.ggml_type, self.name)

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return self.data.strides[0]

    @property
    def n_bytes(self) -> int:
        return self.data.shape[0] * self.data.shape[1]


class Tensors:
    """Looks a name up among held tensors first, then in the file."""

    def __init__(self, gguf: GgufFile, held: Mapping[str, HeldTensor] | None = None):
        self.gguf, self.held = gguf, dict(held or {})
        self._keeper = gguf.keeper()

    def info(self, name: str):
        """Record with shape, ggml_type, format and row_bytes; ModelError if there is no such tensor."""
        return self.held[name] if name in self.held else self.gguf.info(name)

    def address(self, name: str) -> int:
        return self.held[name].data.ctypes.data if name in self.held else self.gguf.address(name)

    def values(self, name: str) -> np.ndarray:
        """The tensor dequantised, float32 of its shape."""
        if name in self.held:
            t = self.held[name]
            return t.format.dequantise(t.data).reshape(t.shape)
        return self.gguf.values(name)

    def file_name(self, name: str) -> str:
        """Where the tensor comes from, for messages: a shard of the file, or the draft layer."""
        return "draft layer" if name in self.held else self.gguf.shards[self.gguf.info(name).shard].path.name

    def without_data(self) -> Tensors:
        """The same records without the memory of held tensors, once it was copied elsewhere."""
        held = {}
        for name, t in self.held.items():
            row = np.zeros(t.data.shape[1], np.uint8)
            empty = np.lib.stride_tricks.as_strided(row, t.data.shape, (0, 1), writeable=False)
            held[name] = HeldTensor(name, t.shape, t.ggml_type, empty, row, mapped=True)
        return Tensors(self.gguf, held)

    @property
    def held_bytes(self) -> int:
        """Memory that held tensors take; those in a mapping take none."""
        return sum(t.n_bytes for t in self.held.values() if not t.mapped)
