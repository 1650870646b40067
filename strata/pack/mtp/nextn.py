"""A draft layer as the `nextn` block of a GGUF: the model's own file, or one beside it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from strata.base.errors import ModelError
from strata.pack.gguf_file import GgufFile, TensorInfo
from strata.pack.mtp.contents import EXPERTS, ITS_OWN, PARTS, VECTORS, DraftShape, held, need_model, shape_found
from strata.pack.tensors import HeldTensor

MARK = re.compile(r"blk\.(\d+)\.nextn\.eh_proj\.weight")

NEXTN = {
    "norm_embedding": "nextn.enorm",
    "norm_hidden": "nextn.hnorm",
    "output_hc_norm": "nextn.hc_head_norm",
    "output_hc_down": "nextn.hc_head_down",
    "output_hc_up": "nextn.hc_head_up",
}
"""Our name -> the block's, where they differ. fc_embedding and fc_hidden lie side by side in `nextn.eh_proj`."""

EH_PROJ, GATE_UP = "nextn.eh_proj", "ffn_gate_up_exps"


def block_of(gguf: GgufFile) -> int | None:
    """The first block with a draft layer, or None."""
    found = [int(m[1]) for name in gguf.tensors if (m := MARK.fullmatch(name))]
    return min(found, default=None)


def needed_block(gguf: GgufFile, source: str) -> int:
    """The same; ModelError if there is none."""
    block = block_of(gguf)
    if block is None:
        raise ModelError(
            f"{source} holds no draft layer",
            found=f"{len(gguf.tensors)} other tensors",
            needed="a tensor blk.*.nextn.eh_proj.weight",
            advice="Name the file of the draft layer, not another part of the model.",
        )
    return block


def read_nextn(gguf: GgufFile, model: DraftShape, source: str) -> dict[str, HeldTensor]:
    """Held tensors by name, `mtp.` in front, in place. model: the shape that the model needs.

    Gate and up experts in one tensor are copied apart. ModelError for a missing tensor, another model's, or a block
    with tensors that this layer has no place for.
    """
    block = needed_block(gguf, source)
    prefix = f"blk.{block}."
    files = {p.name: prefix + NEXTN.get(p.name, p.name) + ".weight" for p in PARTS}
    files |= dict.fromkeys(("fc_embedding", "fc_hidden"), f"{prefix}{EH_PROJ}.weight")
    merged = f"{prefix}{GATE_UP}.weight" in gguf.tensors
    files |= {name: f"{prefix}{name}.weight" for name in EXPERTS}
    if merged:
        files |= dict.fromkeys(EXPERTS[:2], f"{prefix}{GATE_UP}.weight")
    _refuse_strange(gguf, prefix, set(files.values()), source)

    found = {name: gguf.tensors[file] for name, file in files.items() if file in gguf.tensors}
    shapes = {name: _shape(name, t, source, merged) for name, t in found.items()}
    shape = shape_found(shapes, files.__getitem__, source)
    need_model(shape, model, source)

    out = []
    for name, t in found.items():
        raw = gguf.raw(t.name).reshape(t.rows, t.row_bytes)
        if name in ("fc_embedding", "fc_hidden"):
            out.append(half(name, t, raw, shape.D))
        elif merged and name in EXPERTS[:2]:
            halves = raw.reshape(shape.E, 2, shape.F * t.row_bytes)
            data = np.ascontiguousarray(halves[:, EXPERTS.index(name)])
            out.append(held(name, shapes[name], t.format.name, data.reshape(-1)))
        else:
            out.append(held(name, shapes[name], t.format.name, raw, mapped=True))
    return {t.name: t for t in out}


def half(name: str, t: TensorInfo, raw: np.ndarray, D: int) -> HeldTensor:
    """The embedding's or the hidden half of every row of eh_proj; in place where blocks end at the border."""
    first = 0 if name == "fc_embedding" else 1
    if D % t.format.block_values == 0:
        n = t.format.row_bytes(D)
        return held(name, (D, D), t.format.name, raw[:, first * n : (first + 1) * n], mapped=True)
    # A block holds values of both halves: the only lossless form of one half is its values.
    values = np.ascontiguousarray(t.format.dequantise(raw)[:, first * D : (first + 1) * D])
    return held(name, (D, D), "F32", values.view(np.uint8))


def _shape(name: str, t: TensorInfo, source: str, merged: bool) -> tuple[int, ...]:
    """The shape of our tensor in the file's tensor."""
    shape = t.shape
    if name in VECTORS and len(shape) == 2 and 1 in shape:
        return (shape[0] * shape[1],)
    two, three = name in ("fc_embedding", "fc_hidden"), merged and name in EXPERTS[:2]
    if two and (len(shape) != 2 or shape[1] % 2):
        raise ModelError(
            f"tensor {t.name} of {source} has another shape", found=shape, needed="(D, 2 D)", advice=ITS_OWN
        )
    if three and (len(shape) != 3 or shape[1] % 2):
        raise ModelError(
            f"tensor {t.name} of {source} has another shape", found=shape, needed="(E, 2 F, D)", advice=ITS_OWN
        )
    if two:
        return shape[0], shape[1] // 2
    return (shape[0], shape[1] // 2, shape[2]) if three else shape


def _refuse_strange(gguf: GgufFile, prefix: str, known: set[str], source: str) -> None:
    """Tensors that would change the result and that nothing here reads; the indexer's do not, attention is dense."""
    strange = sorted(
        n for n in gguf.tensors if n.startswith(prefix) and n not in known and not n.startswith(prefix + "indexer.")
    )
    if strange:
        raise ModelError(
            f"the draft layer of {source} is of another kind",
            found=", ".join(strange[:4]) + (" …" if len(strange) > 4 else ""),
            needed="an attention layer with experts, and nextn.{eh_proj, enorm, hnorm, hc_head_*}",
            advice=ITS_OWN,
        )


def open_beside(path: Path, model: GgufFile) -> GgufFile:
    """The GGUF that a draft layer is read from: the model itself if the path is one of its shards, else another one,
    whose mappings live as long as the tensors held of them."""
    if any(path.resolve() == shard.path.resolve() for shard in model.shards):
        return model
    other = GgufFile(path)
    if other.architecture != model.architecture:
        found, other_path = other.architecture, str(path)
        other.close()
        raise ModelError(
            f"the draft layer {other_path} has another architecture",
            found=found or "none",
            needed=model.architecture,
            advice=ITS_OWN,
        )
    return other
