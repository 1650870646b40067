"""A model of two small layers whose experts a GPU and a CPU share, for tests: windows take a tenth of a second."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import strata
from strata.model import Model
from strata.runtime.orchestrator import Orchestrator
from tests.gpu.loaded import lend_gpu
from tests.tiny_models import TinyModel, ngram, small

L, E, K = 2, 16, 4
TYPES = {"*": "Q8_0", "*norm*": "F32", "*_exps.weight": "Q4_0", "*down_exps.weight": "Q8_0", "*indexer*": "BF16",
         "*ffn_gate_inp*": "BF16", "*hc*": "BF16"}  # fmt: skip
PROMPT = np.arange(3, 8, dtype=np.int32)
TOKENS = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    geometry = small(L=L, kinds=("gdn", "qsa"), E=E, K=K, ngram=ngram(0))
    return TinyModel(geometry, types=TYPES).write(tmp_path_factory.mktemp("shared") / "m.gguf")


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    """Loads find a GPU; `opened` lists the devices."""
    with pytest.MonkeyPatch.context() as made:
        made.opened = lend_gpu(made)
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No thread of ours outlives a test."""
    before = names()
    yield
    gc.collect()
    assert names() <= before


def names() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("strata") and t.is_alive()}


def load(path: Path, **options) -> Model:
    options = {"context": 256, "threads": 1, "prefill": "windows", "checkpoints": 1} | options
    return strata.load(path, device="cuda", **options)


def answer(model: Model, max_tokens: int = TOKENS) -> tuple[int, ...]:
    return model.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True).tokens


def shared(model: Model) -> Orchestrator:
    return model._backend.orchestrator
