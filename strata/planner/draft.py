"""What a draft layer costs, from headers alone: which tensors loading will convert, copy or leave where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from strata.arch.flash_next.contract import VECTOR, draft_needs
from strata.base.errors import FileError, ModelError
from strata.base.geometry import Geometry
from strata.pack.formats import BlockFormat, by_name
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp import canonical, hf, nextn, rt
from strata.pack.mtp.contents import EXPERTS, NORM, PARTS, PROJECTION, VECTORS, DraftShape, need_model
from strata.pack.mtp_files import FORMS, VOCABULARY, find_draft, read_vocabulary
from strata.planner.vram_bytes import aligned, matrix_bytes, relaid_bytes

CONVERTED = "Q8_0"
"""Format that projections and experts of a safetensors checkpoint are brought to."""

MEMORY, MAPPED, MODEL = "memory", "mapped", "model"
"""Where loading holds a tensor: memory of its own, pages of the draft layer's files, pages of the model's file."""

DRAFT_VOCABULARY = 106_299
"""Rows of the usual draft vocabulary (English, code and CJK)."""


@dataclass(frozen=True)
class DraftTensor:
    """A tensor of a draft layer as loading will hold it. shape in numpy order."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    place: str

    @property
    def ggml_type(self) -> int:
        return self.format.ggml_id

    @property
    def row_bytes(self) -> int:
        return self.format.row_bytes(self.shape[-1])

    @property
    def n_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes

    @property
    def is_expert(self) -> bool:
        return self.name.removeprefix("mtp.").removesuffix(".weight") in EXPERTS


@dataclass(frozen=True)
class DraftFacts:
    """Bytes of the draft layer, besides its K and V.

    dense_bytes, experts_bytes   its weights, as its files hold them
    vram_bytes     the same in VRAM: every tensor aligned, vectors in float32
    memory_bytes, mapped_bytes   of them, on the CPU: converted or copied, and pages of the draft layer's own files
    in_model_bytes               of them, on the CPU: pages of the model's file, which other lines count already
    head_bytes     copied rows of the head with their token ids; 0: the head itself is used
    vocabulary     rows of the head that drafts are scored on
    vector_bytes   norms widened to float32
    vram_head_bytes  copied rows of the head in VRAM, without their ids
    private_bytes  what the CPU backend's ops ask for besides the programs' buffers, with the draft layer's programs
    gpu_private_bytes   the same of the GPU backend, without what grows with the context
    source         a file or folder, or "standard form" for a draft layer that is not here
    """

    dense_bytes: int
    experts_bytes: int
    head_bytes: int
    vocabulary: int
    source: str
    memory_bytes: int = 0
    mapped_bytes: int = 0
    in_model_bytes: int = 0
    vector_bytes: int = 0
    private_bytes: int = 0
    gpu_private_bytes: int = 0
    vram_bytes: int = 0
    vram_head_bytes: int = 0

    @property
    def is_standard(self) -> bool:
        return self.source == STANDARD


STANDARD = "standard form"


def _tensor(name: str, shape: tuple[int, ...], kind: str | BlockFormat, place: str) -> DraftTensor:
    return DraftTensor(f"mtp.{name}.weight", shape, by_name(kind) if isinstance(kind, str) else kind, place)


def standard_tensors(g: Geometry, expert_type: str = "Q2_0") -> list[DraftTensor]:
    """The draft layer in its usual form, an `rt` folder: mapped dense weights, experts regrouped in memory."""
    shapes = DraftShape.of_model(g).shapes()
    kinds = {PROJECTION: "Q8_0", NORM: "F32"}
    out = [_tensor(p.name, shapes[p.name], kinds.get(p.use, "BF16"), MAPPED) for p in PARTS]
    for name in EXPERTS:
        kind = by_name(expert_type)
        whole = shapes[name][-1] % kind.block_values == 0
        out.append(_tensor(name, shapes[name], kind if whole else "IQ4_NL", MEMORY))
    return out


def draft_tensors(source: Path, gguf: GgufFile, g: Geometry) -> list[DraftTensor]:
    """The tensors that `read_draft` would hold, without the head. Reads headers only.

    FileError or ModelError for a draft layer that is damaged, incomplete or another model's, as far as headers tell.
    """
    model, source = DraftShape.of_model(g), _located(source)
    if source.is_dir() and (source / rt.DENSE_TXT).exists():
        return _rt_tensors(source, model)
    if source.is_file() and _is_gguf(source):
        return _nextn_tensors(nextn.open_beside(source, gguf), gguf, model, str(source))
    checkpoint = hf.read_checkpoint(source)
    need_model(checkpoint.shape, model, checkpoint.source)
    shapes, kinds = model.shapes(), {PROJECTION: (CONVERTED, MEMORY), NORM: ("F32", MEMORY)}
    out = []
    for p in PARTS:
        kind, place = kinds.get(p.use) or (checkpoint.tensors[p.hf_name].dtype, MAPPED)
        out.append(_tensor(p.name, shapes[p.name], kind, place))
    return out + [_tensor(name, shapes[name], CONVERTED, MEMORY) for name in EXPERTS]


def _located(source: Path) -> Path:
    """The folder or file that is read for a draft layer named `source`."""
    try:
        there, inside = source.exists(), source / "rt"
        is_inside = there and not (source / rt.DENSE_TXT).exists() and (inside / rt.DENSE_TXT).exists()
    except OSError as error:
        raise FileError(f"'{source}' cannot be looked at", found=error.strerror, needed=FORMS) from error
    if not there:
        raise FileError("no draft layer there", found=f"no file '{source}'", needed=FORMS)
    return inside if is_inside else source


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise FileError(f"'{path}' cannot be read", found=error.strerror, needed=FORMS) from error


def _rt_tensors(folder: Path, model: DraftShape) -> list[DraftTensor]:
    lines, shapes = rt.read_table(folder), model.shapes()
    out = []
    for p in PARTS:
        if p.hf not in lines:
            raise ModelError(f"{folder} has no tensor {p.hf}", found=f"{len(lines)} tensors, not this one",
                             needed="every tensor of the draft layer")  # fmt: skip
        line = lines[p.hf]
        if (line.rows * line.columns) != prod(shapes[p.name]):
            raise ModelError(f"tensor {p.hf} of {folder}", found=(line.rows, line.columns), needed=shapes[p.name])
        out.append(_tensor(p.name, shapes[p.name], line.format, MAPPED))
    wide, narrow = rt.expert_types(folder) or (canonical.Q2_0, canonical.Q2_0)
    return out + [_tensor(n, shapes[n], k, MEMORY) for n, k in zip(EXPERTS, (wide, wide, narrow), strict=True)]


def _nextn_tensors(block: GgufFile, gguf: GgufFile, model: DraftShape, source: str) -> list[DraftTensor]:
    place = MODEL if block is gguf else MAPPED
    prefix, shapes = f"blk.{nextn.needed_block(block, source)}.", model.shapes()
    merged = f"{prefix}{nextn.GATE_UP}.weight" in block.tensors
    out = []
    for name in (*(p.name for p in PARTS), *EXPERTS):
        half = name in ("fc_embedding", "fc_hidden")
        apart = merged and name in EXPERTS[:2]
        file_name = nextn.EH_PROJ if half else nextn.GATE_UP if apart else nextn.NEXTN.get(name, name)
        info = block.info(f"{prefix}{file_name}.weight")
        values = prod(shapes[name]) * (2 if half or apart else 1)
        flat = name in VECTORS and prod(info.shape) == values
        if prod(info.shape) != values or (not flat and info.shape[-1] != shapes[name][-1] * (2 if half else 1)):
            needed = f"{values} values for {shapes[name]}"
            raise ModelError(f"tensor {info.name} of {source}", found=info.shape, needed=needed)
        kind, where = info.format, MEMORY if apart else place
        if half and model.D % kind.block_values:  # a block holds values of both halves
            kind, where = by_name("F32"), MEMORY
        out.append(_tensor(name, shapes[name], kind, where))
    if block is not gguf:
        block.close()
    return out


def vocabulary_rows(source: Path, g: Geometry) -> int:
    """Rows of the head that a draft layer's own subset lists, or the whole vocabulary."""
    source = _located(source)
    subset = (source if source.is_dir() else source.parent) / VOCABULARY
    return len(read_vocabulary(subset, g.V)) if subset.exists() else g.V


def head_bytes(g: Geometry, head_row_bytes: int, rows: int) -> int:
    """A subset is a copy of head rows and their ids; the whole vocabulary uses the head itself."""
    return rows * (head_row_bytes + 4) if rows < g.V else 0


def facts_of_tensors(
    g: Geometry,
    tensors: list[DraftTensor],
    head_row_bytes: int,
    rows: int,
    private_bytes: int,
    source: str,
    gpu_private_bytes: int = 0,
) -> DraftFacts:
    """Facts of a draft layer whose tensors are known. rows: of the head that drafts are scored on."""
    at = {place: sum(t.n_bytes for t in tensors if t.place == place) for place in (MEMORY, MAPPED, MODEL)}
    experts = sum(t.n_bytes for t in tensors if t.is_expert)
    return DraftFacts(
        dense_bytes=sum(t.n_bytes for t in tensors) - experts,
        experts_bytes=experts,
        head_bytes=head_bytes(g, head_row_bytes, rows),
        vocabulary=rows,
        source=source,
        memory_bytes=at[MEMORY],
        mapped_bytes=at[MAPPED],
        in_model_bytes=at[MODEL],
        vector_bytes=vector_bytes(g),
        private_bytes=private_bytes,
        gpu_private_bytes=gpu_private_bytes,
        vram_bytes=_vram_bytes(g, tensors),
        vram_head_bytes=relaid_bytes(rows, head_row_bytes) if rows < g.V else 0,
    )


def _vram_bytes(g: Geometry, tensors: list[DraftTensor]) -> int:
    widened, total = set(_vectors(g)), 0
    for t in tensors:
        if t.name in widened:
            total += aligned(4 * prod(t.shape))
        else:
            *stack, rows, _ = (1, *t.shape)[-3:] if len(t.shape) < 3 else t.shape
            total += prod(stack) * matrix_bytes(t.format, rows, t.row_bytes)
    return total


def _vectors(g: Geometry) -> dict[str, int]:
    """Name -> values of the draft layer's norms; the shared expert's gate is a matrix of one row."""
    return {n.name: prod(n.shape) for n in draft_needs(g) if n.use == VECTOR and "shexp" not in n.name}


def vector_bytes(g: Geometry) -> int:
    """Norms of the draft layer as float32; the shared expert's gate is read where it lies."""
    return 4 * sum(_vectors(g).values())


def standard_facts(
    g: Geometry,
    head_row_bytes: int,
    vocabulary: int | None = None,
    private_bytes: int = 0,
    expert_type: str = "Q2_0",
    gpu_private_bytes: int = 0,
) -> DraftFacts:
    """The draft layer in its usual form: Q8_0 projections, BF16 hyper-connections and router, F32 norms,
    `expert_type` experts.

    vocabulary: head rows that drafts are scored on; None is the usual subset, or the whole vocabulary if that is
    smaller.
    """
    rows = min(vocabulary if vocabulary is not None else DRAFT_VOCABULARY, g.V)
    tensors = standard_tensors(g, expert_type)
    return facts_of_tensors(g, tensors, head_row_bytes, rows, private_bytes, STANDARD, gpu_private_bytes)


def draft_source(gguf: GgufFile, draft: object) -> Path | str | None:
    """What a draft option means: the draft layer's file or folder, STANDARD for "mtp" without one, None for no layer.

    draft  None, "off", "lookup", "auto", "mtp", a path, or an object that drafts by itself
    """
    if not isinstance(draft, str | Path) or draft in ("off", "lookup"):
        return None
    if draft in ("auto", "mtp"):
        return find_draft(gguf) or (STANDARD if draft == "mtp" else None)
    return Path(draft)
