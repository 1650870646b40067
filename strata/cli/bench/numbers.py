"""Lists of numbers and words on the command line, and how figures of repeats are summed up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from strata.base.errors import need


def words(text: str) -> list[str]:
    """The parts of "a,b"."""
    return [w.strip() for w in text.split(",") if w.strip()]


def numbers(what: str, text: str, most: int) -> list[int]:
    """Ascending numbers from 1 to `most` out of "1,4"; BadArgument names `what`."""
    found = words(text)
    good = all(w.isdecimal() and 1 <= int(w) <= most for w in found)
    need(good, f"{what} cannot be read", found=repr(text), needed=f"numbers from 1 to {most}, as 1,4")
    return sorted({int(w) for w in found})


def spread(values: Sequence[float], digits: int = 2) -> dict[str, float]:
    """Median, least and most, rounded."""
    return {name: round(f(values), digits) for name, f in (("median", statistics.median), ("min", min), ("max", max))}
