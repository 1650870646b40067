"""The draft layer of a model, whatever files it comes from: found, read, and its head attached.

`strata.pack.mtp` has a file per form. All of them give the same tensors, named `mtp.*.weight`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from strata.base.errors import FileError, ModelError
from strata.base.geometry import Geometry
from strata.pack.gguf_file import GgufFile
from strata.pack.mtp.contents import DraftShape
from strata.pack.mtp.hf import from_safetensors
from strata.pack.mtp.nextn import block_of, open_beside, read_nextn
from strata.pack.mtp.rt import DENSE_TXT, read_rt
from strata.pack.tensors import HeldTensor

__all__ = ["DraftLayer", "draft_head", "find_draft", "from_safetensors", "read_draft", "read_vocabulary"]

VOCABULARY = "draft_vocab.bin"
NO_VOCABULARY = "Make it for this model, or remove it to draft with the whole vocabulary."
FORMS = "a safetensors file, a folder of its shards, an rt folder, or a GGUF with a nextn block"


@dataclass(frozen=True)
class DraftLayer:
    """A draft layer ready to load.

    tensors     by name, `mtp.output.weight` (the rows of the head that drafts are scored on) included
    vocabulary  (head_rows,) int32 token ids of those rows, or None for the whole head
    source      where it came from
    """

    tensors: dict[str, HeldTensor]
    vocabulary: np.ndarray | None
    source: str

    @property
    def head_rows(self) -> int:
        return self.tensors["mtp.output.weight"].shape[0]

    def without_tensors(self) -> DraftLayer:
        """What is left to know once a backend has copied the tensors."""
        return replace(self, tensors={})


def draft_head(gguf: GgufFile, vocabulary: np.ndarray | None) -> HeldTensor:
    """`mtp.output.weight`: the model's head in place, or the vocabulary's rows of it copied as raw blocks."""
    info = gguf.info("output.weight")
    raw = gguf.raw("output.weight")
    if vocabulary is None:
        return HeldTensor("mtp.output.weight", info.shape, info.ggml_type, raw, raw, mapped=True)
    rows = np.ascontiguousarray(raw[vocabulary])
    return HeldTensor("mtp.output.weight", (len(rows), info.shape[1]), info.ggml_type, rows, rows)


def read_vocabulary(path: Path, V: int) -> np.ndarray:
    """`draft_vocab.bin`: little-endian int32 token ids. FileError for a broken file or ids outside the vocabulary."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(
            f"draft vocabulary {path} cannot be read",
            found=error.strerror,
            needed="a readable file",
            advice="Make it readable, or remove it to draft with the whole vocabulary.",
        ) from error
    if len(data) % 4 or not data:
        raise FileError(
            f"draft vocabulary {path} is damaged",
            found=f"{len(data)} bytes",
            needed="int32 ids, 4 bytes each",
            advice=NO_VOCABULARY,
        )
    ids = np.frombuffer(data, "<i4").astype(np.int32)
    if ids.min() < 0 or ids.max() >= V:
        found = f"ids {ids.min()}..{ids.max()}"
        raise FileError(f"draft vocabulary {path} is of another model", found=found, needed=f"ids in 0..{V - 1}",
                        advice=NO_VOCABULARY)  # fmt: skip
    different = len(np.unique(ids))
    if different != len(ids):
        raise FileError(
            f"draft vocabulary {path} is damaged",
            found=f"{len(ids) - different} ids twice",
            needed="each id once",
            advice=NO_VOCABULARY,
        )
    return ids


def find_draft(gguf: GgufFile) -> Path | None:
    """The draft layer beside a model: its own `nextn` block, the folder `mtp/rt`, a folder `mtp` of safetensors, or a
    file called `mtp*.safetensors` or `mtp*.gguf`. FileError if several files bear such a name."""
    if block_of(gguf) is not None:
        return gguf.path
    folder = gguf.path.parent
    if (folder / "mtp" / "rt" / DENSE_TXT).exists():
        return folder / "mtp" / "rt"
    if any((folder / "mtp").glob("*.safetensors")):
        return folder / "mtp"
    files = sorted(folder.glob("mtp*.safetensors")) or sorted(folder.glob("mtp*.gguf"))
    if len(files) > 1:
        raise FileError(
            f"several draft layers lie beside {gguf.path.name}",
            found=", ".join(f.name for f in files[:4]),
            needed="one",
            advice='Name one with draft=; put shards of one layer into a folder "mtp".',
        )
    return files[0] if files else None


def read_draft(source: Path, gguf: GgufFile, g: Geometry) -> DraftLayer:
    """Read a draft layer from any of its forms and attach the model's head, or the rows of it that `draft_vocab.bin`
    beside the draft layer's files lists. FileError or ModelError says what is wrong."""
    source = Path(source)
    if not source.exists():
        raise FileError(
            "no draft layer there", found=f"no file '{source}'", needed=FORMS, advice="Is the path spelled right?"
        )
    model = DraftShape.of_model(g)
    folder = source if source.is_dir() else source.parent
    if source.is_dir():
        if not (source / DENSE_TXT).exists() and (source / "rt" / DENSE_TXT).exists():
            source = folder = source / "rt"
        tensors = _read_folder(source, model)
    elif _is_gguf(source):
        tensors = read_nextn(open_beside(source, gguf), model, str(source))
    else:
        tensors = from_safetensors(source, needed=model)
    subset = folder / VOCABULARY
    vocabulary = read_vocabulary(subset, g.V) if subset.exists() else None
    head = draft_head(gguf, vocabulary)
    return DraftLayer(tensors | {head.name: head}, vocabulary, str(source))


def _read_folder(folder: Path, model: DraftShape) -> dict[str, HeldTensor]:
    if (folder / DENSE_TXT).exists():
        return read_rt(folder, model)
    if any(folder.glob("*.safetensors*")):
        return from_safetensors(folder, needed=model)
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "an empty folder"
    raise ModelError(f"{folder} is no draft layer", found=found, needed=FORMS, advice="Name the folder that has them.")


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        found = error.strerror or str(error)
        raise FileError(f"{path} cannot be read", found=found, needed="a readable file") from error
