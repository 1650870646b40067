"""Where the routed experts lie: per layer the three projections, their types, and the bytes of expert e in each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from strata.base.errors import BadArgument, ModelError, about, need
from strata.pack.formats import BlockFormat
from strata.pack.gguf_file import AGAIN, GgufFile, TensorInfo

PARTS = ("gate", "up", "down")


@dataclass(frozen=True)
class Projection:
    """One projection of all experts of a layer.

    tensor        the file's tensor, (E, rows, columns) or the merged gate and up, (E, 2 rows, columns)
    rows, columns of one expert's matrix
    skip_bytes    from the start of an expert in the tensor to this projection: 0 except for `up` of a merged tensor
    stride_bytes  from one expert to the next
    n_bytes       of one expert's matrix
    scale         (E,) F32 factors on the output of each expert (NVFP4), or None
    """

    tensor: TensorInfo
    rows: int
    columns: int
    skip_bytes: int
    stride_bytes: int
    n_bytes: int
    scale: TensorInfo | None

    @property
    def ggml_type(self) -> int:
        return self.tensor.ggml_type

    @property
    def format(self) -> BlockFormat:
        return self.tensor.format

    def file_offset(self, e: int) -> int:
        """Absolute offset of expert e in the file of shard `tensor.shard`."""
        return self.tensor.offset + self.skip_bytes + e * self.stride_bytes


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer."""

    gate: Projection
    up: Projection
    down: Projection

    @property
    def projections(self) -> tuple[Projection, Projection, Projection]:
        return self.gate, self.up, self.down

    @property
    def blob_bytes(self) -> int:
        """Bytes of one expert: gate, up and down rows."""
        return sum(p.n_bytes for p in self.projections)


class ExpertLayout:
    """All layers' experts; their bytes stay in the mapping.

    layers  tuple of LayerExperts
    E, F, D experts a layer, expert width, hidden size: the same in every layer
    """

    def __init__(self, gguf: GgufFile, layers: tuple[LayerExperts, ...], E: int, F: int, D: int):
        self._gguf, self.layers, self.E, self.F, self.D = gguf, layers, E, F, D
        self._addresses: np.ndarray | None = None
        self._keeper: tuple[np.ndarray, ...] = ()

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def blob_bytes(self, layer: int) -> int:
        """Bytes of one expert of the layer."""
        return self.layers[layer].blob_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return self.E * sum(layer.blob_bytes for layer in self.layers)

    @property
    def types(self) -> np.ndarray:
        """(L, 3) int32: ggml types of gate, up and down."""
        return np.array([[p.ggml_type for p in layer.projections] for layer in self.layers], np.int32)

    def placed_at(self, addresses: np.ndarray) -> ExpertLayout:
        """The same experts with (L, E, 3) int64 `addresses` of gate, up and down: a view, which whoever owns it may
        change. `raw` still reads the mapping."""
        need(addresses.shape == (self.n_layers, self.E, len(PARTS)) and addresses.dtype == np.int64
             and addresses.flags.c_contiguous, "addresses of experts have another form",
             found=f"{addresses.dtype} {addresses.shape}",
             needed=f"int64 ({self.n_layers}, {self.E}, {len(PARTS)}), C order")  # fmt: skip
        other = ExpertLayout(self._gguf, self.layers, self.E, self.F, self.D)
        other._addresses = addresses
        return other

    @property
    def addresses(self) -> np.ndarray:
        """(L, E, 3) int64 addresses of gate, up and down in the mapping; the layout keeps the mapping alive.

        FileError if the data of an expert tensor is missing (a file opened with headers_only).
        """
        if self._addresses is None:
            experts = np.arange(self.E, dtype=np.int64)
            table = np.empty((self.n_layers, self.E, len(PARTS)), np.int64)
            for l, layer in enumerate(self.layers):
                for i, p in enumerate(layer.projections):
                    table[l, :, i] = self._gguf.address(p.tensor.name) + p.skip_bytes + experts * p.stride_bytes
            table.flags.writeable = False
            self._addresses, self._keeper = table, self._gguf.keeper()
        return self._addresses

    def raw(self, layer: int, e: int, part: str) -> np.ndarray:
        """Read-only uint8 view (rows, row_bytes) of one matrix; part is "gate", "up" or "down"."""
        if part not in PARTS:
            raise BadArgument("an expert has no such part", found=repr(part), needed=", ".join(PARTS))
        if not (0 <= layer < self.n_layers and 0 <= e < self.E):
            raise BadArgument(
                "no such expert",
                found=f"layer {layer}, expert {e}",
                needed=f"layer 0..{self.n_layers - 1}, expert 0..{self.E - 1}",
            )
        p = self.layers[layer].projections[PARTS.index(part)]
        row_bytes = p.n_bytes // p.rows
        first = (p.skip_bytes + e * p.stride_bytes) // row_bytes
        return self._gguf.raw(p.tensor.name)[first : first + p.rows]

    def scales(self, layer: int) -> np.ndarray:
        """(3, E) float32: output factors of gate, up and down; ones where the file has none."""
        factors = np.ones((len(PARTS), self.E), np.float32)
        for i, p in enumerate(self.layers[layer].projections):
            if p.scale is not None:
                factors[i] = self._gguf.raw(p.scale.name).view("<f4")
        return factors


def expert_layout(gguf: GgufFile, n_layers: int) -> ExpertLayout:
    """Finds and checks the experts of layers 0..n_layers - 1; types may differ from layer to layer.

    ModelError names the tensor or the layers, found and needed. Works on a file opened with headers_only; only the
    addresses and views then need the data.
    """
    if n_layers < 1:
        raise BadArgument("too few layers with experts", found=n_layers, needed="at least 1")
    with about(gguf.path.name, AGAIN):
        return _layout(gguf, n_layers)


def _layout(gguf: GgufFile, n_layers: int) -> ExpertLayout:
    routers = [_tensor(gguf, l, "ffn_gate_inp.weight", 2) for l in range(n_layers)]
    E = _same([t.shape[0] for t in routers], "experts (router rows)")
    D = _same([t.shape[1] for t in routers], "hidden size (router columns)")
    layers = tuple(_layer(gguf, l, E, D) for l in range(n_layers))
    F = _same([layer.gate.rows for layer in layers], "expert width")
    return ExpertLayout(gguf, layers, E, F, D)


def _layer(gguf: GgufFile, l: int, E: int, D: int) -> LayerExperts:
    down = _tensor(gguf, l, "ffn_down_exps.weight", 3)
    F = down.shape[2]
    _need_shape(down, (E, D, F))
    merged = f"blk.{l}.ffn_gate_up_exps.weight"
    if merged in gguf.tensors:
        for part in ("gate", "up"):
            if (single := f"blk.{l}.ffn_{part}_exps.weight") in gguf.tensors:
                raise ModelError(
                    f"layer {l} has gate and up experts twice",
                    found=f"both '{merged}' and '{single}'",
                    needed="one of them",
                )
        both = gguf.info(merged)
        _need_shape(both, (E, 2 * F, D))
        half = both.n_bytes // E // 2
        gate, up = (_projection(gguf, l, part, both, F, skip) for part, skip in (("gate", 0), ("up", half)))
    else:
        gate, up = (_projection(gguf, l, part, _part(gguf, l, part, (E, F, D)), F, 0) for part in ("gate", "up"))
    return LayerExperts(gate, up, _projection(gguf, l, "down", down, D, 0))


def _part(gguf: GgufFile, l: int, part: str, shape: tuple[int, int, int]) -> TensorInfo:
    tensor = _tensor(gguf, l, f"ffn_{part}_exps.weight", 3)
    _need_shape(tensor, shape)
    return tensor


def _projection(gguf: GgufFile, l: int, part: str, tensor: TensorInfo, rows: int, skip_bytes: int) -> Projection:
    E = tensor.shape[0]
    scale = gguf.tensors.get(f"blk.{l}.ffn_{part}_exps.scale")
    if scale is not None:
        _need_shape(scale, (E,))
        if scale.format.name != "F32":
            raise ModelError(f"tensor '{scale.name}' has another type", found=scale.format.name, needed="F32")
    n_bytes = rows * tensor.row_bytes
    return Projection(tensor, rows, tensor.shape[2], skip_bytes, tensor.n_bytes // E, n_bytes, scale)


def _tensor(gguf: GgufFile, l: int, suffix: str, axes: int) -> TensorInfo:
    tensor = gguf.info(f"blk.{l}.{suffix}")
    if len(tensor.shape) != axes:
        raise ModelError(f"tensor '{tensor.name}' has another shape", found=tensor.shape, needed=f"{axes} axes")
    return tensor


def _need_shape(tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ModelError(f"tensor '{tensor.name}' has another shape", found=tensor.shape, needed=shape)


def _same(values: list[int], what: str) -> int:
    """The common value of all layers; ModelError naming the first layer that differs from layer 0."""
    for l, value in enumerate(values):
        if value != values[0]:
            raise ModelError(
                f"layers disagree about their {what}",
                found=f"{values[0]} in layer 0, {value} in layer {l}",
                needed="the same in every layer",
            )
    return values[0]
