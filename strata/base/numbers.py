"""Numbers that callers give: Python's own, those of numpy, and everything else that can stand for one."""

from __future__ import annotations

import math
import operator

import numpy as np


def whole_number(value: object) -> int | None:
    """The int that a value stands for; None if it is no whole number. Truth values and floats are none."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def real_number(value: object) -> float | None:
    """The finite float that a value stands for; None if it is none. Truth values, texts, NaN and infinity are none."""
    single = np.ndim(value) == 0 if hasattr(value, "__float__") or hasattr(value, "__index__") else False
    if not single or isinstance(value, bool | np.bool_) or np.iscomplexobj(value):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
