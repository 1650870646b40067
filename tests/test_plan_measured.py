"""The plan against what really happens: bytes taken by the CPU backend, and the time of a token."""

import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from strata.arch import architecture_of
from strata.base.window import HeadRequest
from strata.cpu.backend import CpuBackend
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.planner.calibrate import measure_costs, types_of
from strata.planner.machine import Machine
from strata.planner.memory import plan, plan_file, read_facts
from tests.model_maker import make_wide_model

TINY = Path(__file__).parents[1] / "examples/models/tiny-flash-next/tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"
TOLERANCE = 0.25


def _backend(path: Path, context: int, kv: str, threads: int) -> CpuBackend:
    gguf = GgufFile(path)
    arch = architecture_of(gguf)
    g = arch.read_geometry(gguf)
    programs = arch.build_programs(g, context, kv)
    return CpuBackend(Tensors(gguf), g, expert_layout(gguf, g.L), programs, threads=threads)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize(("context", "kv", "sessions"), [(512, "f16", 1), (16384, "int8", 3)])
@pytest.mark.parametrize("which", ["tiny", "wide"])
def test_the_cpu_backend_takes_what_was_planned(which, context, kv, sessions, wide):
    path = TINY if which == "tiny" else wide
    p = plan_file(path, machine=Machine.describe(ram_gib=64), context=context, kv=kv, sessions=sessions)
    backend = _backend(path, context, kv, threads=1)
    try:
        taken = backend.allocations(sessions)
    finally:
        backend.close()
    assert p.verify(taken) == []
    assert {a.line for a in taken} == {x.line for x in p.lines if x.kind in ("allocate", "map")}


def _token_ms(path: Path, tokens: int, warm: int) -> float:
    """Median CPU time of a decoded token on one thread: window, head and commit."""
    backend = _backend(path, 512, "f16", threads=1)
    try:
        state, rng, previous, times = backend.new_state(), np.random.default_rng(0), (-1, -1), []
        for _ in range(tokens + warm):
            token = int(rng.integers(0, backend.geometry.V))
            began = time.thread_time()
            backend.window(state, np.array([token], np.int32), previous)
            backend.head(0, 1, HeadRequest())
            backend.commit(state, 1)
            times.append((time.thread_time() - began) * 1e3)
            previous = (token, previous[0])
    finally:
        backend.close()
    return median(times[warm:])


@pytest.mark.parametrize(("which", "tokens"), [("tiny", 150), ("wide", 25)])
def test_predicted_decode_time_is_near_the_measured_one(which, tokens, wide):
    """On one thread, by CPU time. Another program on the sibling core slows one side of a comparison only, so kernels
    and model are measured side by side, up to four times."""
    path = TINY if which == "tiny" else wide
    facts, seen = read_facts(path), []
    for _ in range(4):
        costs = measure_costs(types_of(facts))
        p = plan(facts, Machine.here(measure=True), context=256, kv="f16", threads=1, device="cpu", costs=costs)
        measured = _token_ms(path, tokens, warm=8)
        seen.append((p.estimate.decode_ms, measured))
        if abs(p.estimate.decode_ms / measured - 1) <= TOLERANCE:
            return
    pytest.fail(f"predicted and measured ms: {seen}")
