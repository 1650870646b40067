"""Architectures: one folder each. `architecture_of(gguf)` picks the folder by the file's own name for itself."""

from __future__ import annotations

from types import ModuleType

from strata.base.errors import ModelError
from strata.base.numbers import shown
from strata.pack.gguf_file import GgufFile


def architecture_of(gguf: GgufFile) -> ModuleType:
    """The package that knows this file: it has read_geometry, check_contract and the program builders.

    Raises ModelError for an architecture strata does not know.
    """
    from strata.arch import flash_next

    known = {"qwen4exp": flash_next}
    name = gguf.metadata.get("general.architecture")
    if name not in known:
        raise ModelError(
            f"{gguf.path.name}: the architecture is not supported",
            found="no such key" if name is None else shown(name),
            needed=" or ".join(sorted(known)),
            advice="Give the first shard of a Qwen3.8-Flash-Next GGUF.",
        )
    return known[name]
