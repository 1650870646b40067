"""A draft layer as HF-named tensors in safetensors: one file, or a folder of shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.base.errors import FileError, ModelError
from strata.pack.formats import by_name
from strata.pack.mtp.contents import (
    EXPERTS,
    HF_DOWN,
    HF_GATE_UP,
    INDEXER,
    ITS_OWN,
    NORM,
    PARTS,
    PROJECTION,
    DraftShape,
    Part,
    held,
    need_model,
    shape_found,
)
from strata.pack.quantise_weights import quantise_weights
from strata.pack.safetensors import StoredTensor, read_safetensors
from strata.pack.tensors import HeldTensor

PREFIX = "mtp."

_FILE_NAMES = {p.name: p.hf_name for p in PARTS} | dict(zip(EXPERTS, (HF_GATE_UP, HF_GATE_UP, HF_DOWN), strict=True))


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder that hold `mtp.` tensors as far as its index says, else all of them.

    FileError for a damaged index and for a shard that it names and that is not there.
    """
    needed: set[str] = set()
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            places = json.loads(index.read_bytes())["weight_map"]
            needed |= {str(file) for name, file in places.items() if name.startswith(PREFIX)}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileError(
                f"index {index.name} is damaged",
                found=str(error) or type(error).__name__,
                needed="JSON with a weight_map",
                advice="Download it again.",
            ) from error
    for name in sorted(needed):
        if not (folder / name).is_file():
            raise FileError(
                f"a shard of the draft layer in {folder} is missing",
                found=f"no file '{name}'",
                needed=", ".join(sorted(needed)),
                advice="Download every shard that the index lists for the names mtp.*",
            )
    return [folder / name for name in sorted(needed)] or sorted(folder.glob("*.safetensors"))


@dataclass(frozen=True)
class Checkpoint:
    """The draft layer's tensors as stored, complete and of matching shapes.

    source  for messages        shape  the numbers behind the shapes        indexer  whether the files have one
    """

    tensors: dict[str, StoredTensor]
    shape: DraftShape
    source: str

    @property
    def indexer(self) -> bool:
        return all(p.hf_name in self.tensors for p in INDEXER)

    def values(self, part: Part) -> np.ndarray:
        """float32 in the checkpoint's shape; norms with 1 added."""
        values = _values(self.tensors[part.hf_name])
        return values + np.float32(1) if part.use == NORM else values

    def label(self, hf_name: str) -> str:
        return f"tensor {hf_name} of {self.source}"

    def experts(self, format_name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Per expert, in order: (2 F, row_bytes) uint8 gate and up rows and (D, row_bytes) down rows.

        Quantised by all cores, a few experts ahead, so that neither memory nor time gets out of hand.
        """
        gate_up, down = self.tensors[HF_GATE_UP], self.tensors[HF_DOWN]

        def one(e: int) -> tuple[np.ndarray, np.ndarray]:
            rows = (_expert(gate_up, e), _expert(down, e))
            return tuple(
                quantise_weights(values, format_name, self.label(t.name))
                for values, t in zip(rows, (gate_up, down), strict=True)
            )

        threads = os.cpu_count() or 1
        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, self.shape.E, 2 * threads):
                yield from pool.map(one, range(first, min(first + 2 * threads, self.shape.E)))


def read_checkpoint(source: Path) -> Checkpoint:
    """Open a file or a folder of shards. FileError or ModelError says what is missing, damaged or does not fit."""
    files = shard_files(source) if source.is_dir() else [source]
    stored: dict[str, StoredTensor] = {}
    places: dict[str, Path] = {}
    for file in files:
        for name, tensor in read_safetensors(file, PREFIX).items():
            if name in stored:
                found = f"{places[name].name} and {file.name}"
                raise FileError(
                    f"tensor {name} of {source} is in two files",
                    found=found,
                    needed="each tensor once",
                    advice="Leave only the files of one draft layer in the folder.",
                )
            stored[name], places[name] = tensor, file
    known = {p.hf_name for p in (*PARTS, *INDEXER)} | {HF_GATE_UP, HF_DOWN}
    strange = sorted(set(stored) - known)
    if strange:
        raise ModelError(
            f"{source} holds another kind of draft layer",
            found=", ".join(strange[:4]) + (" …" if len(strange) > 4 else ""),
            needed="the 31 tensors mtp.* of one layer",
            advice=ITS_OWN,
        )
    shapes = {p.name: stored[p.hf_name].shape for p in PARTS if p.hf_name in stored}
    gate = shapes.get("ffn_gate_inp_shexp", ())
    if len(gate) == 2 and gate[0] == 1:  # the checkpoint keeps the vector as a matrix of one row
        shapes["ffn_gate_inp_shexp"] = gate[1:]
    if HF_GATE_UP in stored:
        E, rows, D = _three_axes(stored[HF_GATE_UP], source)
        if rows % 2:
            raise ModelError(
                f"tensor {HF_GATE_UP} of {source} has an odd number of rows",
                found=(E, rows, D),
                needed="as many gate as up rows",
                advice=ITS_OWN,
            )
        shapes["ffn_gate_exps"] = shapes["ffn_up_exps"] = (E, rows // 2, D)
    if HF_DOWN in stored:
        shapes["ffn_down_exps"] = stored[HF_DOWN].shape
    shape = shape_found(shapes, _FILE_NAMES.__getitem__, str(source))
    return Checkpoint(stored, shape, str(source))


def from_safetensors(
    path: str | Path, projections: str = "Q8_0", experts: str = "Q8_0", needed: DraftShape | None = None
) -> dict[str, HeldTensor]:
    """Held tensors by name, `mtp.` in front. projections, experts: the formats they are quantised to.

    needed  the shape that the model asks for; another one raises ModelError before anything is quantised
    """
    checkpoint = read_checkpoint(Path(path))
    if needed is not None:
        need_model(checkpoint.shape, needed, checkpoint.source)
    shapes = checkpoint.shape.shapes()
    out = []
    for part in PARTS:
        t, shape = checkpoint.tensors[part.hf_name], shapes[part.name]
        if part.use == PROJECTION:
            data = quantise_weights(checkpoint.values(part), projections, checkpoint.label(part.hf_name))
            out.append(held(part.name, shape, projections, data))
        elif part.use == NORM:
            data = quantise_weights(checkpoint.values(part), "F32", checkpoint.label(part.hf_name))
            out.append(held(part.name, shape, "F32", data))
        else:
            quantise_weights(checkpoint.values(part), "F32", checkpoint.label(part.hf_name))  # refuses Inf and NaN
            out.append(held(part.name, shape, t.dtype, t.data, mapped=True))
    s = checkpoint.shape
    wide, narrow = by_name(experts).row_bytes(s.D), by_name(experts).row_bytes(s.F)
    gate, up = (np.empty((s.E, s.F, wide), np.uint8) for _ in range(2))
    down = np.empty((s.E, s.D, narrow), np.uint8)
    for e, (gate_up_rows, down_rows) in enumerate(checkpoint.experts(experts)):
        gate[e], up[e], down[e] = gate_up_rows[: s.F], gate_up_rows[s.F :], down_rows
    out += [held(n, shapes[n], experts, data) for n, data in zip(EXPERTS, (gate, up, down), strict=True)]
    return {t.name: t for t in out}


def _values(t: StoredTensor) -> np.ndarray:
    return by_name(t.dtype).dequantise(t.data).reshape(t.shape)


def _expert(t: StoredTensor, e: int) -> np.ndarray:
    """float32 (rows, columns) of expert e."""
    rows = t.shape[1]
    return by_name(t.dtype).dequantise(t.data[e * rows : (e + 1) * rows])


def _three_axes(t: StoredTensor, source: Path) -> tuple[int, int, int]:
    if len(t.shape) != 3:
        raise ModelError(
            f"tensor {t.name} of {source} has another shape",
            found=t.shape,
            needed="3 axes: experts, rows, columns",
            advice=ITS_OWN,
        )
    return t.shape
