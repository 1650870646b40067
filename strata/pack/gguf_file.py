"""One logical GGUF model over one or more shards, memory-mapped and checked before any tensor data is read."""

from __future__ import annotations

import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.base.errors import Closed, FileError, ModelError, need
from strata.pack.gguf_header import Header, TensorInfo, read_header
from strata.pack.gguf_metadata import DAMAGED, Metadata

__all__ = ["GgufFile", "Metadata", "Shard", "TensorInfo", "model_file", "shard_paths"]

_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

AGAIN = "Is this the whole, unchanged model? Download or convert it again."
"""What to do about a well-formed file that lacks something."""

SMALLEST_SHARD_BYTES = 24
"""Header of a file without keys and tensors."""

ADVICE = {
    "normal": "MADV_NORMAL",
    "random": "MADV_RANDOM",
    "sequential": "MADV_SEQUENTIAL",
    "willneed": "MADV_WILLNEED",
    "hugepage": "MADV_HUGEPAGE",
}
"""Access patterns of `GgufFile.advise` and the names of the system's constants for them."""


@dataclass(frozen=True)
class Shard:
    """One file of the model. `data_start` and `file_bytes` are byte offsets in it, `metadata` its own keys.

    needed_bytes  length by its header; a file that is shorter was cut
    """

    path: Path
    file_bytes: int
    data_start: int
    n_tensors: int
    metadata: Metadata
    needed_bytes: int = 0


def model_file(path: str | Path, named: str = "path") -> Path:
    """The GGUF file that `path` stands for: itself, or the one model (its first shard) of a folder.

    named: what the user gave it as. FileError for a folder with no model or several; other paths are not looked at.
    """
    path = Path(path)
    try:
        folder = path.is_dir()
    except OSError as error:  # a name that no file system takes
        found = f"{path.name[:60]!r}: {error.strerror}"
        raise FileError(f"{named} cannot be looked at", found=found, needed="the path of a GGUF file") from None
    if not folder:
        return path
    later = {p for p in path.glob("*-of-*.gguf") if not p.stem.rsplit("-of-", 1)[0].endswith("-00001")}
    models = sorted(set(path.glob("*.gguf")) - later)
    if len(models) != 1:
        raise FileError(
            f"'{path}', the folder that {named} names, does not hold one model",
            found=", ".join(p.name for p in models[:6]) or "none",
            needed="one GGUF model",
            advice="Name a file.",
        )
    return models[0]


def shard_paths(path: str | Path) -> list[Path]:
    """All files of the model that `path` is a part of, by the -0000i-of-0000n rule; a name without it stands alone."""
    path = model_file(path)
    match = _SHARD_NAME.fullmatch(path.name)
    if not match:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise FileError(
            f"the name of '{path.name}' has an impossible shard number",
            found=f"{number} of {count}",
            needed=f"1 to {count}",
            advice="Give the shard the name it had in its release.",
        )
    return [path.with_name(f"{match['stem']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


class GgufFile:
    """A GGUF model, found from any one of its shards.

    path           as given
    shards         list of Shard, in order; those present
    metadata       keys of the first shard, then keys that only later shards have
    tensors        name -> TensorInfo over all shards
    missing_bytes  with headers_only: bytes of tensor data that the files lack; a missing later shard, whose size is
                   unknown, counts its smallest header. Otherwise 0
    missing_shards paths of missing later shards (headers_only)

    headers_only=True opens an incomplete model for inspection and planning instead of refusing it. Raises FileError for
    a missing, truncated or damaged file and ModelError for a tensor type that is not known.
    """

    def __init__(self, path: str | Path, headers_only: bool = False):
        self.path = model_file(path)
        self.headers_only = headers_only
        self.missing_bytes = 0
        self.missing_shards: list[Path] = []
        self.tensors: dict[str, TensorInfo] = {}
        self._mappings: list[mmap.mmap] = []
        self._bases: list[np.ndarray] = []
        self._closed = False
        paths = shard_paths(self.path)
        try:
            headers = self._open_all(paths)
        except BaseException:
            self.close()
            raise
        self.shards = [
            Shard(h.path, h.file_bytes, h.data_start, len(h.tensors), h.metadata, h.data_end) for h in headers
        ]
        self.metadata = Metadata([(h.content, h.entries, h.path.name) for h in headers])
        self.architecture = self.metadata.need_str("general.architecture", "")

    def _open_all(self, paths: list[Path]) -> list[Header]:
        headers: list[Header] = []
        for i, path in enumerate(paths):
            if not path.exists():
                if i == 0 or not self.headers_only:
                    raise FileError(
                        f"shard {i + 1} of {len(paths)} is missing" if len(paths) > 1 else "no such file",
                        found=f"no file '{path}'",
                        needed="every shard in one folder" if len(paths) > 1 else "a GGUF file",
                        advice="Download the shards of one release side by side and keep their names."
                        if len(paths) > 1
                        else "Is the path spelled right?",
                    )
                self.missing_shards.append(path)
                self.missing_bytes += SMALLEST_SHARD_BYTES
                continue
            mapping = _map(path)
            self._mappings.append(mapping)
            self._bases.append(np.frombuffer(mapping, np.uint8))
            header = read_header(mapping, path, len(headers), self.headers_only)
            _check_split(header, headers[0] if headers else header, i, len(paths))
            self.missing_bytes += max(0, header.data_end - header.file_bytes)
            for tensor in header.tensors:
                if tensor.name in self.tensors:
                    other = headers[self.tensors[tensor.name].shard].path.name
                    raise FileError(
                        f"tensor '{tensor.name}' is in two shards",
                        found=f"'{other}' and '{path.name}'",
                        needed="each tensor once",
                        advice="The shards belong to different models.",
                    )
                self.tensors[tensor.name] = tensor
            headers.append(header)
        self._check_tensor_count(headers)
        return headers

    def _check_tensor_count(self, headers: list[Header]) -> None:
        needed = headers[0].metadata.need_int("split.tensors.count", -1)
        found = len(self.tensors)
        if needed < 0 or found == needed or (self.missing_shards and found < needed):
            return
        raise FileError(
            f"the shards of '{headers[0].path.name}' have another number of tensors",
            found=found,
            needed=f"{needed} by key 'split.tensors.count'",
            advice="The shards belong to different models.",
        )

    # -- data ---------------------------------------------------------------------------------------------------------

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.n_bytes for t in self.tensors.values())

    def info(self, name: str, shape: tuple[int, ...] | None = None) -> TensorInfo:
        """The tensor's record; ModelError naming it if it is absent or differs from `shape` (numpy order)."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(
                f"{self.path.name}: tensor '{name}' is missing",
                found="no such tensor",
                needed="it in the file or one of its shards",
                advice=self.missing_advice,
            )
        if shape is not None and tensor.shape != tuple(shape):
            raise ModelError(
                f"{self.path.name}: tensor '{name}' has another shape", found=tensor.shape, needed=tuple(shape)
            )
        return tensor

    @property
    def missing_advice(self) -> str:
        """What to do where a tensor is not there."""
        if self.missing_shards:
            return f"A shard is missing: '{self.missing_shards[0]}'."
        return AGAIN

    def raw(self, name: str) -> np.ndarray:
        """Read-only uint8 view onto the mapping, no copy: (rows, row_bytes), or (n_bytes,) for up to one axis.

        The view keeps the mapping alive, also after `close`.
        """
        tensor = self._present(name)
        data = self._bases[tensor.shard][tensor.offset : tensor.offset + tensor.n_bytes]
        return data.reshape(tensor.rows, tensor.row_bytes) if len(tensor.shape) > 1 else data

    def values(self, name: str) -> np.ndarray:
        """The tensor dequantised: float32 of its shape, a new array."""
        tensor = self.info(name)
        return tensor.format.dequantise(self.raw(name)).reshape(tensor.shape)

    def address(self, name: str) -> int:
        """Address of the tensor's first byte in the mapping; valid until `close`, or as long as `keeper` is held."""
        tensor = self._present(name)
        return self._bases[tensor.shard].ctypes.data + tensor.offset

    def keeper(self) -> tuple[np.ndarray, ...]:
        """An object that keeps every mapping, and so every address, alive while it is held."""
        self._need_open()
        return tuple(self._bases)

    def advise(self, name: str, pattern: str) -> None:
        """Tells the system how a tensor will be read: a key of ADVICE. Does nothing where the system lacks it."""
        need(pattern in ADVICE, "access pattern", found=pattern, needed=", ".join(ADVICE))
        tensor = self._present(name)
        option = getattr(mmap, ADVICE[pattern], None)
        if option is None:
            return
        # Whole pages inside the tensor only: the neighbours keep their own advice.
        start = -(-tensor.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        n_bytes = tensor.offset + tensor.n_bytes - start
        if n_bytes > 0:
            self._mappings[tensor.shard].madvise(option, start, n_bytes)

    def check_sizes(self) -> None:
        """FileError naming a shard whose file is shorter or longer than when it was opened.

        Reading pages of a mapping that the file no longer has ends the process, so look before long reads.
        """
        self._need_open()
        for shard, mapping in zip(self.shards, self._mappings, strict=True):
            if (found := mapping.size()) != shard.file_bytes:
                raise FileError(
                    f"'{shard.path}' changed while it was in use",
                    found=f"{found} bytes",
                    needed=f"{shard.file_bytes} bytes, as when it was opened",
                    advice="Load the model again when the file is complete.",
                )

    def _present(self, name: str) -> TensorInfo:
        self._need_open()
        tensor = self.info(name)
        file_bytes = len(self._mappings[tensor.shard])
        if tensor.offset + tensor.n_bytes > file_bytes:
            raise FileError(
                f"data of tensor '{name}' is missing in '{self.shards[tensor.shard].path.name}'",
                found=f"a file of {file_bytes} bytes",
                needed=f"{tensor.offset + tensor.n_bytes} bytes",
                advice="Download the rest of the file.",
            )
        return tensor

    def _need_open(self) -> None:
        if self._closed:
            raise Closed(f"the file '{self.path}' was closed", needed="an open file", advice="Open it again.")

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives the mappings up; views and keepers still held keep theirs until they die. May be called twice."""
        self._closed = True
        self._bases.clear()
        for mapping in self._mappings:
            try:
                mapping.close()
            except BufferError:
                continue  # a view is out: the mapping is unmapped with the last one
        self._mappings.clear()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GgufFile('{self.path}', {len(self.tensors)} tensors, {len(self.shards)} shards)"


def _map(path: Path) -> mmap.mmap:
    if not path.is_file():  # a pipe would block, a device has no end
        raise FileError(f"cannot open '{path}'", found="no regular file", needed="a GGUF file on disk")
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise FileError(f"'{path}' is empty", found="0 bytes", needed="a GGUF file", advice=DAMAGED) from None
    except OSError as error:
        raise FileError(f"cannot open '{path}'", found=error.strerror, needed="a readable GGUF file") from error


def _check_split(header: Header, first: Header, index: int, count: int) -> None:
    """Refuses a shard whose keys say it is another part, or part of another model."""
    of_another = "Every shard must come from the same release and keep its name."
    own, lead, name = header.metadata, first.metadata, header.path.name
    for key, needed in (("split.no", index), ("split.count", count)):
        # A file that was never split may say 0 parts.
        if key in own and (found := own.need_int(key)) != needed and (count, found) != (1, 0):
            raise FileError(
                f"key '{key}' of '{name}' does not fit the file's name", found=found, needed=needed, advice=of_another
            )
    if header is first:
        return
    prefix = lead.need_str("general.architecture", "") + "."
    for key in own:
        same = key in ("general.architecture", "split.tensors.count") or (len(prefix) > 1 and key.startswith(prefix))
        if same and (key not in lead or not _equal(own[key], lead[key])):
            raise FileError(
                f"key '{key}' differs: '{name}' and '{first.path.name}' are shards of different models",
                found=own[key],
                needed=lead.get(key),
                advice=of_another,
            )


def _equal(a: object, b: object) -> bool:
    try:
        return bool(np.array_equal(np.asarray(a), np.asarray(b)))
    except ValueError:  # ragged nested arrays
        return repr(a) == repr(b)
