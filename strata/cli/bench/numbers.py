"""Numbers, lists of them and words on a bench's command line, and how figures of repeats are summed up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from strata.base.errors import need
from strata.base.numbers import shown
from strata.cli import flags

MOST = 10_000_000
"""Of tokens, repeats and other counts: more would run for days."""


def count(option: str, value: int | None, least: int, most: int = MOST) -> None:
    """BadArgument if an option was given and is not within these limits."""
    need(value is None or least <= value <= most, f"{option} is out of range", found=value,
         needed=f"{least} to {most:,}")  # fmt: skip


def words(what: str, text: str) -> list[str]:
    """The parts of "a,b", none of an empty text. BadArgument for commas alone, naming `what`."""
    found = [w.strip() for w in text.split(",") if w.strip()]
    need(bool(found) or not text, f"{what} cannot be read", found=shown(text), needed="names, as a,b")
    return found


def numbers(what: str, text: str, most: int = MOST, least: int = 1) -> list[int]:
    """Ascending numbers from `least` to `most` out of "1,4"; BadArgument names `what`."""
    found = text.split(",")
    good = all(flags.is_count(w.strip()) and least <= int(w) <= most for w in found)
    need(good, f"{what} cannot be read", found=shown(text), needed=f"numbers from {least} to {most:,}, as 1,4")
    return sorted({int(w) for w in found})


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Median, least and most, rounded."""
    return {name: round(f(values), digits) for name, f in (("median", statistics.median), ("min", min), ("max", max))}
