"""Expert profile files ("STRP"): which experts are worth a place in VRAM, hottest first.

Layout (little-endian): "STRP", u32 version, layers, experts a layer, slots, ranked; then per ranked pair u16 layer and
u16 expert; then per (layer, expert) four bytes that readers ignore (here: int32 slot, or -1).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.base.errors import BadArgument, FileError

MAGIC = b"STRP"
VERSION = 1
REMAKE = "Make one for this model with `strata profile`, or leave the profile out."
_HEAD = struct.Struct("<4s5I")


@dataclass(frozen=True, eq=False)
class ExpertProfile:
    """A ranking of (layer, expert) pairs.

    n_layers, n_experts  the model's L and E
    slots                cache slots the ranking was made for, at least its length
    ranked               (n, 2) uint16 pairs (layer, expert), hottest first, no pair twice
    """

    n_layers: int
    n_experts: int
    slots: int
    ranked: np.ndarray

    def __post_init__(self) -> None:
        if problem := _problem(self.n_layers, self.n_experts, self.slots, self.ranked):
            raise BadArgument(problem[0], found=problem[1], needed=problem[2])

    def slot_table(self) -> np.ndarray:
        """(L, E) int32: place in the ranking, or -1."""
        table = np.full((self.n_layers, self.n_experts), -1, np.int32)
        table[self.ranked[:, 0], self.ranked[:, 1]] = np.arange(len(self.ranked), dtype=np.int32)
        return table


def read_profile(path: str | Path, n_layers: int, n_experts: int) -> ExpertProfile:
    """Reads a profile made for a model of n_layers x n_experts; FileError for another geometry or a damaged file."""
    path = Path(path)
    size_limit = _HEAD.size + 8 * n_layers * n_experts
    try:
        with path.open("rb") as file:
            data = file.read(size_limit + 1)
            file_bytes = os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        found = getattr(error, "strerror", None) or str(error)
        raise FileError(f"cannot read '{path}'", found=found, needed="an expert profile", advice=REMAKE) from error
    if data[:4] != MAGIC:
        raise FileError(
            f"'{path}' is not an expert profile", found=f"first bytes {data[:4]!r}", needed=MAGIC, advice=REMAKE
        )
    if len(data) < _HEAD.size:
        raise FileError(
            f"'{path}' is truncated", found=f"{file_bytes} bytes", needed=f"{_HEAD.size} bytes", advice=REMAKE
        )
    _, version, layers, experts, slots, n = _HEAD.unpack_from(data)
    if version != VERSION:
        raise FileError(f"another version of '{path}'", found=version, needed=VERSION, advice=REMAKE)
    if (layers, experts) != (n_layers, n_experts):
        raise FileError(
            f"'{path}' is a profile of another model",
            found=f"{layers} layers x {experts} experts",
            needed=f"{n_layers} layers x {n_experts} experts",
            advice=REMAKE,
        )
    size = _HEAD.size + 4 * n + 4 * layers * experts
    if n > layers * experts:
        raise FileError(f"'{path}' ranks too many pairs", found=n, needed=f"at most {layers * experts}", advice=REMAKE)
    if file_bytes != size:
        raise FileError(
            f"'{path}' is truncated or damaged", found=f"{file_bytes} bytes", needed=f"{size} bytes", advice=REMAKE
        )
    ranked = np.frombuffer(data, "<u2", 2 * n, _HEAD.size).reshape(n, 2).astype(np.uint16)
    if problem := _problem(layers, experts, slots, ranked):
        raise FileError(f"'{path}' is damaged: {problem[0]}", found=problem[1], needed=problem[2], advice=REMAKE)
    return ExpertProfile(layers, experts, slots, ranked)


def write_profile(path: str | Path, profile: ExpertProfile) -> None:
    """Writes a profile; a reader sees the old file or the whole new one, also after a crash."""
    head = _HEAD.pack(MAGIC, VERSION, profile.n_layers, profile.n_experts, profile.slots, len(profile.ranked))
    pairs = np.ascontiguousarray(profile.ranked, "<u2").tobytes()
    write_atomic(Path(path), head + pairs + profile.slot_table().astype("<i4").tobytes())


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file beside its place and renames it into it; FileError if the system refuses."""
    if not path.name:
        raise FileError(f"cannot write '{path}'", found="a folder", needed="the name of a file")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FileError(
            f"cannot write '{path}'",
            found=error.strerror,
            needed="a writable place",
            advice="Free the disk or choose another path.",
        ) from error


def _problem(n_layers: int, n_experts: int, slots: int, ranked: np.ndarray) -> tuple[str, object, object] | None:
    """(what, found, needed) of the first thing that is wrong, or None."""
    if not (0 < n_layers <= 65536 and 0 < n_experts <= 65536):
        return "layers and experts are out of range", (n_layers, n_experts), "1 to 65536 each"
    if ranked.ndim != 2 or ranked.shape[1] != 2 or ranked.dtype != np.uint16:
        return "ranked pairs have another form", f"{ranked.dtype} {ranked.shape}", "uint16 (n, 2)"
    if not len(ranked) <= slots < 2**32:
        return "the slots do not hold the ranked pairs", slots, f"at least the {len(ranked)} ranked pairs"
    layer, expert = ranked[:, 0].astype(np.int64), ranked[:, 1].astype(np.int64)
    outside = np.flatnonzero((layer >= n_layers) | (expert >= n_experts))
    if len(outside):
        pair, limits = tuple(ranked[outside[0]].tolist()), f"below ({n_layers}, {n_experts})"
        return f"ranked pair {outside[0]} is out of range", pair, limits
    flat = layer * n_experts + expert
    if len(np.unique(flat)) != len(flat):
        order = np.sort(flat)
        pair = divmod(int(order[1:][order[1:] == order[:-1]][0]), n_experts)
        return "a pair is ranked twice", pair, "every pair once"
    return None
