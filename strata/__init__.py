"""strata runs Mixture-of-Experts language models larger than the GPU, on one ordinary machine, from their GGUF files.

import strata
with strata.load("model.gguf") as model:
    print(model.generate("def fibonacci(n):", max_tokens=64))
"""

from __future__ import annotations

from strata.base.errors import (
    BadArgument,
    Busy,
    Closed,
    ContextFull,
    DoesNotFit,
    FileError,
    ModelError,
    NoDevice,
    NotFinite,
    SelfTestFailed,
    StrataError,
    TemplateError,
)

TYPE_CHECKING = False
"""As that of `typing`, whose import would take most of the time in which a command cannot hear Ctrl-C yet."""

if TYPE_CHECKING:
    from typing import Any

    from strata.base.plan import Plan
    from strata.base.progress import LoadProgress
    from strata.model import Model, load
    from strata.planning import plan
    from strata.records import ChatResult, Chunk, Result, Timings, TokenLogprob, Usage
    from strata.runtime.checkpoints import Checkpoint
    from strata.runtime.sampling import SamplingParams
    from strata.scoring import Score
    from strata.session import Session
    from strata.streams import ChatStream, TextStream

__version__ = "0.1.0"

__all__ = [
    "BadArgument",
    "Busy",
    "ChatResult",
    "ChatStream",
    "Checkpoint",
    "Chunk",
    "Closed",
    "ContextFull",
    "DoesNotFit",
    "FileError",
    "LoadProgress",
    "Model",
    "ModelError",
    "NoDevice",
    "NotFinite",
    "Plan",
    "Result",
    "SamplingParams",
    "Score",
    "SelfTestFailed",
    "Session",
    "StrataError",
    "TemplateError",
    "TextStream",
    "Timings",
    "TokenLogprob",
    "Usage",
    "__version__",
    "load",
    "plan",
]

_HOMES = {
    "strata.base.plan": ("Plan",),
    "strata.base.progress": ("LoadProgress",),
    "strata.model": ("Model", "load"),
    "strata.planning": ("plan",),
    "strata.records": ("ChatResult", "Chunk", "Result", "Timings", "TokenLogprob", "Usage"),
    "strata.runtime.checkpoints": ("Checkpoint",),
    "strata.runtime.sampling": ("SamplingParams",),
    "strata.scoring": ("Score",),
    "strata.session": ("Session",),
    "strata.streams": ("ChatStream", "TextStream"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Public names are imported on first use, so that the command line starts without the compiler."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'strata' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
