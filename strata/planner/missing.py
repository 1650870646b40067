"""A model with a shard that is not downloaded yet: the n-gram table can be assumed, everything else is needed."""

from __future__ import annotations

from math import prod

from strata.base.errors import FileError
from strata.pack.formats import by_name
from strata.pack.gguf_file import GgufFile, TensorInfo
from strata.pack.ngram import TABLE_NAME

ASSUMED_TYPE = "IQ4_NL"
"""Type of the table's rows in every release that keeps the table in a shard of its own."""


def assume_table(gguf: GgufFile) -> str | None:
    """Give a model whose n-gram table lies in a missing shard the table that its metadata describes; say so.

    None when no shard is missing. Raises FileError naming the missing shards when they hold more than the table, or
    when the metadata does not describe it.
    """
    if not gguf.missing_shards:
        return None
    names = ", ".join(p.name for p in gguf.missing_shards)
    lacking = gguf.metadata.need_int("split.tensors.count", len(gguf.tensors) + 1) - len(gguf.tensors)
    rows, width = _described(gguf)
    if lacking != 1 or TABLE_NAME in gguf.tensors or not rows or not width:
        raise FileError(
            f"{gguf.path.name} cannot be described: {names} {'is' if len(gguf.missing_shards) == 1 else 'are'} missing",
            found=f"{len(gguf.tensors)} tensors in {len(gguf.shards)} of "
            f"{len(gguf.shards) + len(gguf.missing_shards)} shards",
            needed=f"the header of every shard; {lacking} tensors are not there",
            advice="The first megabytes of a shard are enough; loading needs all of it.",
        )
    block = by_name(ASSUMED_TYPE)
    n_bytes = rows * block.row_bytes(width)
    gguf.tensors[TABLE_NAME] = TensorInfo(TABLE_NAME, (rows, width), block.ggml_id, len(gguf.shards), 0, n_bytes)
    gguf.missing_bytes += n_bytes
    return (
        f"shard {names} is missing: its n-gram table is assumed to be {ASSUMED_TYPE}, {n_bytes:,} bytes "
        f"({rows:,} rows by the metadata)"
    )


def _described(gguf: GgufFile) -> tuple[int, int]:
    """(rows, row width) of the n-gram table by the model's keys, zeros where they do not tell."""
    prefix = f"{gguf.architecture}."
    named = [key for key in (f"{prefix}ple.head_vocab_sizes", f"{prefix}ple.head_offsets") if key in gguf.metadata]
    if len(named) != 2:
        return 0, 0
    moduli, offsets = map(gguf.metadata.need_ints, named)
    if len(moduli) == 0 or len(moduli) != len(offsets):
        return 0, 0
    rows = max(m + o for m, o in zip(moduli, offsets, strict=True))
    width = gguf.metadata.need_int(f"{prefix}embedding_length_per_layer_input", 0)
    if width == 0:
        key = next((t for n, t in gguf.tensors.items() if n.endswith(".ple_key.weight")), None)
        width = key.shape[-1] // len(moduli) if key is not None else 0
    return (rows, width) if prod((rows, width)) and width % by_name(ASSUMED_TYPE).block_values == 0 else (0, 0)
