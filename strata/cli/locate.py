"""Which model a command uses: the given one, the variable STRATA_MODEL, or the one bundled with a source checkout."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import strata
from strata.base.errors import BadArgument, FileError
from strata.base.numbers import shown
from strata.pack.gguf_file import model_file

VARIABLE = "STRATA_MODEL"
BUNDLED = Path("examples", "models", "tiny-flash-next")


def find_model(given: Path | None, named: str = "--model") -> Path:
    """The GGUF file to load; a folder stands for the one model in it. named: what the user gave it as.

    Raises BadArgument if nothing is given and this is no source checkout, FileError for a path without a model.
    """
    if given is not None:
        return _file_of(given, named)
    variable = os.environ.get(VARIABLE)
    if variable:
        return _file_of(_with_home(variable), VARIABLE)
    root = checkout()
    if root is not None and (root / BUNDLED).is_dir():
        return _file_of(root / BUNDLED, "the checkout")
    raise BadArgument(
        "no model is given",
        found=f"neither {named} nor {VARIABLE}, and no source checkout",
        needed=f"--model FILE or the variable {VARIABLE}",
        advice="Give any one shard of a GGUF file, or the folder that holds it.",
    )


def checkout() -> Path | None:
    """The root of the source checkout that this package runs from, or None for an installed one."""
    root = Path(strata.__file__).resolve().parent.parent
    return root if (root / "pyproject.toml").is_file() else None


def _with_home(text: str) -> Path:
    """The path with a home folder in place of its ~, or as it is where nobody has that name."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _file_of(path: Path, source: str) -> Path:
    if not is_there(path, f"{source} names nothing that can be read", "a GGUF file or its folder"):
        raise FileError(f"{source} names no file", found=f"'{path}'", needed="a GGUF file or its folder")
    return model_file(path, source)


def is_there(path: Path, message: str, needed: str) -> bool:
    """Whether a file or folder exists. FileError with `message` where that, or what the folder holds, cannot be
    seen."""
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            os.scandir(path).close()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise FileError(message, found=f"{shown(str(path))}: {error.strerror}", needed=needed) from None
    return True
