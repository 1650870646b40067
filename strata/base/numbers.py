"""What callers give: numbers, truth values and names, be they Python's own or another library's."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np


def whole_number(value: object) -> int | None:
    """The int that a value stands for; None if it is no whole number. Truth values and floats are none."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except Exception:  # whatever the value's own code raises, it is no number
        return None


def real_number(value: object) -> float | None:
    """The finite float that a value stands for; None if it is none. Truth values, texts, NaN and infinity are none."""
    if isinstance(value, bool | np.bool_) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        return None
    try:
        number = float(value) if np.ndim(value) == 0 and not np.iscomplexobj(value) else math.nan
    except Exception:  # whatever the value's own code raises, it is no number
        return None
    return number if math.isfinite(number) else None


def truth_value(value: object) -> bool | None:
    """The bool that a value is, numpy's included; None for everything else, numbers too."""
    return bool(value) if isinstance(value, bool | np.bool_) else None


def one_of(value: object, names: Iterable[str]) -> bool:
    """Whether a value is a text, and one of the names. Asks no other value whether it is equal to a text."""
    return isinstance(value, str) and value in names


def plain(value: Any) -> Any:
    """numpy's truth values and texts as Python's own; everything else as it is."""
    return bool(value) if isinstance(value, np.bool_) else str(value) if isinstance(value, np.str_) else value


def not_unicode(text: str) -> str | None:
    """What a text holds that UTF-8 cannot (a lone surrogate, as of input that was none), for a message; or None."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
    return None


MOST_SHOWN = 100
"""Characters of a value in a message; arrays and long lists have more."""


def shown(value: object) -> str:
    """A value for a message, in one line that is not long."""
    if isinstance(value, np.ndarray) and value.size != 1:
        return f"an array of {value.dtype} {value.shape}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a value may not know how to say what it is, or be a number too long to be written
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
