"""The plan against what really happens: bytes taken by the CPU backend, and the time of a token."""

from pathlib import Path

import pytest

from strata.arch import architecture_of
from strata.cli.bench.plan import measure
from strata.cpu.backend import CpuBackend
from strata.pack.experts import expert_layout
from strata.pack.gguf_file import GgufFile
from strata.pack.tensors import Tensors
from strata.planner.machine import Machine
from strata.planner.of_load import plan_file
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
    p = plan_file(path, machine=Machine.describe(ram_gib=64), context=context, kv=kv, sessions=sessions, checkpoints=0)
    backend = _backend(path, context, kv, threads=1)
    try:
        taken = backend.allocations([backend.new_state() for _ in range(sessions)])
    finally:
        backend.close()
    assert p.verify(taken) == []
    assert {a.line for a in taken} == {x.line for x in p.lines if x.kind in ("allocate", "map")}


ROUNDS, TRIES = 6, 4


@pytest.mark.parametrize(("which", "tokens"), [("tiny", 200), ("wide", 10)])
def test_predicted_decode_time_is_near_the_measured_one(which, tokens, wide):
    """On one thread, by its CPU time. Other programs make cores slower and caches colder, never the other way round.
    So kernels and tokens are timed in turns, and the least counts: of the tokens, and of the rounds' estimates.
    A machine that was never quiet so long is asked again, and everything it showed counts."""
    path = TINY if which == "tiny" else wide
    predicted, times = (), ()
    for n in range(1, TRIES + 1):
        found = measure(path, tokens, ROUNDS)
        predicted, times = predicted + found.predicted_ms, times + found.measured_ms
        assert len(predicted) == n * ROUNDS and len(times) == n * ROUNDS * tokens
        ratio = min(predicted) / min(times) - 1
        print(f"{which}: predicted {min(predicted):.3f} ms, measured {min(times):.3f} ms, {ratio:+.1%}")
        if abs(ratio) <= TOLERANCE:
            return
    pytest.fail(f"predicted {predicted} ms, measured {sorted(times)} ms")
