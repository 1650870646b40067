"""Writes an `rt` folder from safetensors: all of it or nothing."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.base.errors import BadArgument, DoesNotFit, FileError
from strata.pack.formats import by_name
from strata.pack.mtp import canonical
from strata.pack.mtp.contents import INDEXER, NORM, PARTS, PROJECTION, Part
from strata.pack.mtp.hf import Checkpoint, read_checkpoint
from strata.pack.mtp.rt import DENSE_BIN, DENSE_TXT, EXPERTS_BIN, EXPERTS_FMT, Line
from strata.pack.mtp_files import VOCABULARY
from strata.pack.quantise_weights import quantise_weights

EXPERT_FORMATS = {"q2_0": "Q2_0", "q8_0": "Q8_0", "bf16": "BF16"}
ALIGN = 256
"""Every tensor of dense.bin starts at a multiple of it."""

FILES = {DENSE_TXT, DENSE_BIN, EXPERTS_BIN, EXPERTS_FMT, VOCABULARY}


@dataclass(frozen=True)
class Written:
    """What a conversion wrote.

    files  name -> bytes        tensors  besides the experts        experts, format_name  how many, and their format
    """

    files: dict[str, int]
    tensors: int
    experts: int
    format_name: str


def convert(
    source: Path,
    out: Path,
    experts: str = "q2_0",
    force: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Convert a safetensors file or a folder of shards into the folder `out`.

    experts      "q2_0", "q8_0" or "bf16"; projections become Q8_0, hyper-connections and router stay BF16
    force        replace `out` if it is an rt folder; its draft_vocab.bin stays unless one lies beside the source
    on_progress  called with (experts done, experts)

    `out` appears complete or not at all. BadArgument for an unknown format, DoesNotFit if the disk is too small,
    FileError for an `out` that must not be replaced, FileError or ModelError for a source that cannot be read.
    """
    if experts not in EXPERT_FORMATS:
        raise BadArgument("format of the experts is unknown", found=repr(experts), needed=", ".join(EXPERT_FORMATS))
    source, out = Path(source), Path(out)
    if not source.exists():
        raise FileError(
            "no draft layer there",
            found=f"no file '{source}'",
            needed="safetensors: a file or a folder",
            advice="Is the path spelled right?",
        )
    _need_replaceable(out, force)
    checkpoint = read_checkpoint(source)
    kind = by_name(EXPERT_FORMATS[experts])
    s = checkpoint.shape
    expert_bytes = 2 * s.F * kind.row_bytes(s.D) + s.D * kind.row_bytes(s.F)
    beside = (source if source.is_dir() else source.parent) / VOCABULARY
    vocabulary = next((p for p in (beside, out / VOCABULARY) if p.exists()), None)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _need_room(out.parent, s.E * expert_bytes + sum(t.data.size for t in _dense_stored(checkpoint)))
        with _complete_folder(out) as folder:
            lines = _write_dense(checkpoint, folder)
            _write_experts(checkpoint, folder, kind.name, on_progress)
            if kind.name != "Q2_0":  # without the marker, experts.bin holds Q2_0 blobs
                (folder / EXPERTS_FMT).write_text(f"{experts} {kind.ggml_id} {kind.ggml_id}\n", encoding="ascii")
            if vocabulary is not None:
                shutil.copyfile(vocabulary, folder / VOCABULARY)
    except OSError as error:
        raise FileError(
            f"'{out}' cannot be written",
            found=error.strerror or str(error),
            needed="a folder that can be made there",
            advice="Nothing was left behind. Free the disk or choose another folder.",
        ) from error
    files = {p.name: p.stat().st_size for p in sorted(out.iterdir())}
    return Written(files, lines, s.E, kind.name)


def _need_replaceable(out: Path, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise FileError(
            "the output exists", found=f"'{out}'", needed="a new folder", advice="Use --force to replace it."
        )
    strange = [out.name] if out.is_symlink() or not out.is_dir() else sorted({p.name for p in out.iterdir()} - FILES)
    if strange:
        raise FileError(
            f"'{out}' is more than an rt folder and is not replaced",
            found=", ".join(strange[:4]),
            needed=f"a folder of nothing but {', '.join(sorted(FILES))}",
            advice="Choose another folder, or move the rest away.",
        )


def _need_room(folder: Path, n_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        found, needed = f"{free >> 20} MiB free", f"about {n_bytes >> 20} MiB"
        advice = "Free some of it or choose a folder on another disk."
        raise DoesNotFit(f"the disk of '{folder}' is too small", found=found, needed=needed, advice=advice)


@contextmanager
def _complete_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that takes its name when the block ends well, and goes away when it does not."""
    folder = out.with_name(f".{out.name}.{secrets.token_hex(4)}.part")
    old = out.with_name(f".{out.name}.{secrets.token_hex(4)}.old")
    folder.mkdir()
    try:
        yield folder
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if out.exists():
            out.rename(old)
        try:
            folder.rename(out)
        except BaseException:
            if old.exists():
                old.rename(out)
            raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if old.exists():
        shutil.rmtree(old)


def _dense_parts(checkpoint: Checkpoint) -> tuple[Part, ...]:
    # Nothing here reads the indexer; other readers of the folder expect it.
    return (*PARTS, *INDEXER) if checkpoint.indexer else PARTS


def _dense_stored(checkpoint: Checkpoint) -> list:
    return [checkpoint.tensors[p.hf_name] for p in _dense_parts(checkpoint)]


def _dense_kind(checkpoint: Checkpoint, part: Part) -> str:
    if part.use == PROJECTION:
        return "q8_0"
    # float16 and float32 have values that BF16 lacks, so those sources are kept as float32.
    return "bf16" if part.use != NORM and checkpoint.tensors[part.hf_name].dtype == "BF16" else "f32"


def _write_dense(checkpoint: Checkpoint, folder: Path) -> int:
    """dense.bin and dense.txt; returns the number of tensors."""
    lines, offset = [], 0
    with (folder / DENSE_BIN).open("wb") as file:
        for part in _dense_parts(checkpoint):
            values = checkpoint.values(part)
            rows, columns = values.shape if values.ndim == 2 else (1, values.size)
            kind = _dense_kind(checkpoint, part)
            format_name = {"q8_0": "Q8_0", "bf16": "BF16", "f32": "F32"}[kind]
            data = quantise_weights(values, format_name, checkpoint.label(part.hf_name))
            file.write(bytes(-offset % ALIGN))
            offset += -offset % ALIGN
            file.write(np.ascontiguousarray(data))
            lines.append(Line(part.hf, kind, rows, columns, offset, data.size))
            offset += data.size
    (folder / DENSE_TXT).write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
    return len(lines)


def _write_experts(
    checkpoint: Checkpoint, folder: Path, format_name: str, on_progress: Callable[[int, int], None] | None
) -> None:
    s = checkpoint.shape
    with (folder / EXPERTS_BIN).open("wb") as file:
        for e, (gate_up, down) in enumerate(checkpoint.experts(format_name)):
            if format_name == "Q2_0":
                file.write(canonical.pack(gate_up, down, s.D, s.F))
            else:
                file.write(gate_up)
                file.write(down)
            if on_progress is not None:
                on_progress(e + 1, s.E)
