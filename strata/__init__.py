"""strata runs Mixture-of-Experts language models larger than the GPU, on one ordinary machine, from their GGUF files.

import strata
with strata.load("model.gguf") as model:
    print(model.generate("def fibonacci(n):", max_tokens=64))
"""

from strata.base.errors import (
    BadArgument,
    Busy,
    Closed,
    ContextFull,
    DoesNotFit,
    FileError,
    ModelError,
    NotFinite,
    SelfTestFailed,
    StrataError,
    TemplateError,
)
from strata.model import Model, Score, load
from strata.records import ChatResult, Chunk, Result, Timings, TokenLogprob, Usage
from strata.runtime.checkpoints import Checkpoint
from strata.runtime.sampling import SamplingParams
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
    "Model",
    "ModelError",
    "NotFinite",
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
]
