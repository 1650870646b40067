"""Texts that commands read from files and from stdin.

What is wrong with the content of one is a FileError (exit status 1); a wrong argument is wrong usage (2).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from strata.base.errors import BadArgument, FileError

if TYPE_CHECKING:
    import numpy as np

    from strata.model import Model

STDIN = "standard input"


def name_of(file: Path) -> str:
    """How messages call a text; "-" is stdin."""
    return STDIN if str(file) == "-" else f"'{file}'"


def read_text(file: Path) -> str:
    """A UTF-8 text, as it is; "-" reads stdin. FileError where it cannot be read or is none."""
    try:
        data = typer.get_binary_stream("stdin").read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise FileError(f"cannot read {name_of(file)}", found=error.strerror, needed="a text file") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FileError(f"{name_of(file)} is not UTF-8 text", found=f"byte {data[error.start]:#04x} at offset "
                        f"{error.start}", needed="UTF-8") from None  # fmt: skip


def typed_text() -> str:
    """All of stdin as text: line ends of any kind become newlines. FileError for bytes that are none, or nothing."""
    take_any_bytes()
    text = sys.stdin.read()
    check_typed(text, STDIN)
    if not text:
        raise FileError(f"{STDIN} is empty", found="0 bytes", needed="a text")
    return text


def typed_lines() -> Iterator[str]:
    """The lines of stdin, one by one. Bytes that are no text are in them for `check_typed` to find."""
    take_any_bytes()
    for line in sys.stdin:
        yield line.rstrip("\n")


def take_any_bytes() -> None:
    """Reading stdin does not fail in the middle: what it cannot decode is kept apart, byte by byte."""
    sys.stdin.reconfigure(errors="surrogateescape")


def check_typed(text: str, name: str) -> None:
    """FileError where a text of stdin had bytes that are none, with the offset of the first in `text`."""
    encoding = sys.stdin.encoding
    try:
        text.encode(encoding)
    except UnicodeEncodeError as error:
        offset, byte = len(text[: error.start].encode(encoding)), ord(text[error.start]) - 0xDC00
        raise FileError(f"{name} is not {encoding.upper()} text", found=f"byte {byte:#04x} at offset {offset}",
                        needed=encoding.upper()) from None  # fmt: skip


def tokens_of(model: Model, text: str, name: str, special: bool = True, least: int = 1) -> np.ndarray:
    """Token ids of a text that was read. FileError, with its name, where it is too short or cannot be tokenised."""
    try:
        tokens = model.tokenize(text, special)
    except BadArgument as error:
        raise FileError(f"{name} cannot be tokenised: {error.message}", found=error.found, needed=error.needed,
                        advice=error.advice) from None  # fmt: skip
    if len(tokens) < least:
        empty = "is empty" if len(tokens) == 0 else "is too short"
        raise FileError(f"{name} {empty}", found=f"{len(tokens)} token{'s'[len(tokens) == 1 :]}", needed=f">= {least}")
    return tokens
