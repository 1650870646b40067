"""File facts: what of a model costs memory, by class, from its header alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from strata.arch.flash_next.contract import VECTOR, required_tensors
from strata.base.geometry import Geometry
from strata.pack.experts import expert_layout
from strata.pack.formats import by_name
from strata.pack.gguf_file import GgufFile, TensorInfo
from strata.pack.tensor_class import DENSE_CLASSES, DRAFT, EMBEDDING, HEAD, NGRAM_TABLE, classify
from strata.planner.draft import DraftFacts
from strata.planner.vram_bytes import aligned, matrix_bytes

if TYPE_CHECKING:
    from strata.planner.chunk_facts import ChunkFacts
    from strata.planner.split_bytes import SplitFacts


@dataclass(frozen=True)
class WeightClass:
    """Dense weights of one kind. vram_bytes: what they take on a GPU, every tensor aligned and vectors in float32;
    read_bytes are read for each token; by_type and rows_by_type map the ggml type name to bytes and to rows of matrices
    (vectors and convolutions have none)."""

    name: str
    n_tensors: int
    n_bytes: int
    vram_bytes: int
    read_bytes: int
    by_type: Mapping[str, int]
    rows_by_type: Mapping[str, int]


@dataclass(frozen=True)
class ModelFacts:
    """Everything the plan needs of a file.

    dense          trunk classes, without embedding, head, experts and n-gram table
    expert_bytes   per layer: bytes of one expert (gate, up, down); never a constant of the file
    expert_types   per layer: (gate, up, down) type names
    expert_parts   per layer: ((type name, bytes, rows), ...) of one expert's projections
    mapped_bytes   all tensors, the n-gram table included
    vector_bytes   norms, other small vectors and experts' factors, widened to float32
    cpu_private_bytes   what the CPU backend's ops ask for besides the programs' buffers
    gpu_private_bytes   the same of the GPU backend, without what grows with the context
    split          what sharing experts with the CPU takes; None where they cannot be shared, or nobody asked
    chunks         what prefill chunks on a GPU take; None if nobody asked
    scaled_layers  layers whose experts have output factors
    missing_bytes  what a truncated file lacks
    missing_shards (file names, bytes) of shards that are cut short or not there
    """

    name: str
    path: str
    geometry: Geometry
    dense: tuple[WeightClass, ...]
    embedding: WeightClass
    head: WeightClass
    expert_bytes: tuple[int, ...]
    expert_types: tuple[tuple[str, str, str], ...]
    expert_parts: tuple[tuple[tuple[str, int, int], ...], ...]
    ngram_table_bytes: int
    ngram_row_bytes: int
    ngram_rows: int
    file_bytes: int
    mapped_bytes: int
    vector_bytes: int
    cpu_private_bytes: int = 0
    gpu_private_bytes: int = 0
    scaled_layers: int = 0
    missing_bytes: int = 0
    missing_shards: tuple[tuple[str, int], ...] = ()
    n_shards: int = 1
    draft: DraftFacts | None = None
    split: SplitFacts | None = None
    chunks: ChunkFacts | None = field(default=None, compare=False, repr=False)
    notes: tuple[str, ...] = field(default=())

    @property
    def experts_bytes(self) -> int:
        """Bytes of all routed experts."""
        return self.geometry.E * sum(self.expert_bytes)

    @cached_property
    def slot_bytes(self) -> tuple[int, ...]:
        """VRAM of one expert by layer: its three matrices."""
        return tuple(
            sum(matrix_bytes(by_name(kind), rows, n_bytes // rows) for kind, n_bytes, rows in layer)
            for layer in self.expert_parts
        )

    @property
    def n_pairs(self) -> int:
        """(layer, expert) pairs."""
        return self.geometry.E * len(self.expert_bytes)

    @property
    def max_expert_bytes(self) -> int:
        return max(self.expert_bytes)

    @property
    def dense_bytes(self) -> int:
        """Dense weights of trunk, embedding and head."""
        return sum(c.n_bytes for c in self.dense) + self.embedding.n_bytes + self.head.n_bytes

    @property
    def routed_bytes_per_token(self) -> int:
        """Bytes of the routed experts that one token needs."""
        return self.geometry.K * sum(self.expert_bytes)

    @property
    def types_text(self) -> str:
        """Expert types in words, the commonest first."""
        counts: dict[str, int] = {}
        for gate, up, down in self.expert_types:
            key = f"{gate}/{down}" if gate == up else f"{gate}+{up}/{down}"
            counts[key] = counts.get(key, 0) + 1
        order = sorted(counts, key=lambda k: -counts[k])
        return ", ".join(f"{k} x{counts[k]}" if len(order) > 1 else k for k in order)


def _weight_class(name: str, tensors: list[TensorInfo], vectors: frozenset[str] = frozenset()) -> WeightClass:
    by_type: dict[str, int] = {}
    rows: dict[str, int] = {}
    row_lookup, vram = name == EMBEDDING, 0
    for t in tensors:
        kind = t.format.name
        by_type[kind] = by_type.get(kind, 0) + t.n_bytes
        rows[kind] = rows.get(kind, 0) + (t.rows if len(t.shape) > 1 and "conv1d" not in t.name else 0)
        if t.name in vectors:
            vram += aligned(4 * prod(t.shape))
        else:
            vram += aligned(t.n_bytes) if row_lookup else matrix_bytes(t.format, t.n_bytes // t.row_bytes, t.row_bytes)
    n_bytes = sum(t.n_bytes for t in tensors)
    read = sum(t.row_bytes for t in tensors) if row_lookup else n_bytes
    return WeightClass(name, len(tensors), n_bytes, vram, read, by_type, rows)


def _is_product(name: str) -> bool:
    """A vector that a product reads where it lies, so that it is not widened."""
    return name.endswith("ffn_gate_inp_shexp.weight")


def _vectors(g: Geometry) -> dict[str, int]:
    """Name -> bytes in float32 of every small vector."""
    return {
        n.name: 4 * prod(n.shape) for n in required_tensors(g) if n.use == VECTOR and not _is_product(n.name)
    }


def model_facts(
    gguf: GgufFile,
    geometry: Geometry,
    cpu_private_bytes: int = 0,
    gpu_private_bytes: int = 0,
    draft: DraftFacts | None = None,
) -> ModelFacts:
    """Facts of an opened file (headers_only suffices); types and sizes are those of the tensors, never assumed.

    draft: of the draft layer that goes with the model, if one is wanted.

    Raises ModelError for experts that are missing or disagree in shape.
    """
    g = geometry
    classes: dict[str, list[TensorInfo]] = {}
    for t in gguf.tensors.values():
        in_draft = t.name.startswith("blk.") and int(t.name.split(".", 2)[1]) >= g.L
        classes.setdefault(DRAFT if in_draft else classify(t.name), []).append(t)
    layout = expert_layout(gguf, g.L)
    parts = tuple(tuple((p.format.name, p.n_bytes, p.rows) for p in layer.projections) for layer in layout.layers)
    table = classes.get(NGRAM_TABLE, [])
    vectors = _vectors(g)
    names = frozenset(vectors)
    head = _weight_class(HEAD, classes.get(HEAD, []))
    scaled = sum(any(p.scale is not None for p in layer.projections) for layer in layout.layers)
    notes = []
    if gguf.missing_bytes:
        notes.append(f"the file is incomplete: {gguf.missing_bytes:,} bytes of tensor data are missing")
    return ModelFacts(
        name=_model_name(gguf),
        path=str(gguf.path),
        geometry=g,
        dense=tuple(_weight_class(name, classes[name], names) for name in DENSE_CLASSES if name in classes),
        embedding=_weight_class(EMBEDDING, classes.get(EMBEDDING, [])),
        head=head,
        expert_bytes=tuple(layer.blob_bytes for layer in layout.layers),
        expert_types=tuple(tuple(kind for kind, _, _ in layer) for layer in parts),
        expert_parts=parts,
        ngram_table_bytes=sum(t.n_bytes for t in table),
        ngram_row_bytes=table[0].row_bytes if table else 0,
        ngram_rows=table[0].rows if table else 0,
        file_bytes=sum(s.file_bytes for s in gguf.shards) + gguf.missing_bytes,
        mapped_bytes=gguf.total_bytes,
        vector_bytes=sum(vectors.values()) + scaled * 3 * g.E * 4,
        cpu_private_bytes=cpu_private_bytes,
        gpu_private_bytes=gpu_private_bytes,
        scaled_layers=scaled,
        missing_bytes=gguf.missing_bytes,
        missing_shards=_missing_shards(gguf),
        n_shards=len(gguf.shards) + len(gguf.missing_shards),
        draft=draft,
        notes=tuple(notes),
    )


def _missing_shards(gguf: GgufFile) -> tuple[tuple[str, int], ...]:
    """Shards that are cut short, and what each lacks; then those that are not there, whose size is known together."""
    cut = [(s.path.name, s.needed_bytes - s.file_bytes) for s in gguf.shards if s.file_bytes < s.needed_bytes]
    absent = ", ".join(path.name for path in gguf.missing_shards)
    return (*cut, (absent, gguf.missing_bytes - sum(n for _, n in cut))) if absent else tuple(cut)


def _model_name(gguf: GgufFile) -> str:
    name = gguf.metadata.get("general.name")
    stem = Path(gguf.path).name.removesuffix(".gguf").split("-00001-of-")[0]
    return stem or str(name)
