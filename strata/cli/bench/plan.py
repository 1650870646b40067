"""strata bench plan: a plan's estimate of the time of a token beside the measured one, on one thread of the CPU."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from strata.cli import flags
from strata.cli.bench.numbers import count
from strata.cli.output import Bar

if TYPE_CHECKING:
    from strata.cpu.backend import CpuBackend

CONTEXT, KV, WARM_UP = 512, "f16", 8
OF_A_MADE_MODEL = ("layers", "n_experts", "vocabulary")


@dataclass(frozen=True)
class Prediction:
    """ms a token: an estimate of every round, and the CPU time of every token."""

    predicted_ms: tuple[float, ...]
    measured_ms: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The least estimate over the least time, less 1."""
        return min(self.predicted_ms) / min(self.measured_ms) - 1


def command(
    ctx: typer.Context,
    model: flags.Model = None,
    made: Annotated[
        str | None, typer.Option(help="Types of experts, as IQ3_XXS/IQ4_NL: a model of the real widths made in memory.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Its layers.")] = 2,
    n_experts: Annotated[int, typer.Option("--n-experts", help="Its experts a layer.")] = 64,
    vocabulary: Annotated[int, typer.Option(help="Tokens of its vocabulary.")] = 4096,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens of a round.")] = 60,
    repeat: Annotated[int, typer.Option("--repeat", "-r", help="Rounds: an estimate, then tokens.")] = 6,
    json_: flags.Json = False,
) -> None:
    """Compare what `strata plan --measure --device cpu --threads 1` estimates with the CPU time of decoding a token.

    Kernels and tokens are timed in turns, and the least of either counts: other programs make both slower, never
    faster. A made model takes uniformly random experts, since its router would send all tokens to the same ones.
    """
    from strata.cli.bench.gpu import model_path
    from strata.cli.locate import find_model
    from strata.synth import SynthSpec

    if made is None:
        flags.refuse_idle(ctx, OF_A_MADE_MODEL, "without --made")
    else:
        flags.refuse_idle(ctx, ("model",), "with --made")
    count("--tokens", tokens, 1, CONTEXT)
    count("--repeat", repeat, 1)
    spec = None if made is None else SynthSpec.of_types(made, layers=layers, experts=n_experts, vocabulary=vocabulary)
    with model_path(find_model(model) if spec is None else None, spec, None) as path:
        with Bar("measuring", "rounds") as bar:
            found = measure(path, tokens, repeat, uniform=spec is not None, on_progress=bar.update)
        report: dict[str, Any] = {"command": " ".join(["strata", *sys.argv[1:]]), "model": str(path)}
    report |= {"spec": None if spec is None else asdict(spec), "ratio": round(found.ratio, 4), **asdict(found)}
    typer.echo(json.dumps(report, indent=2) if json_ else _text(report, found))


def _text(report: dict[str, Any], found: Prediction) -> str:
    least, most = (f(found.predicted_ms) for f in (min, max))
    return "\n".join([
        f"model      {report['model']}",
        f"predicted  {least:.3f} ms a token (the least of {len(found.predicted_ms)}, most {most:.3f})",
        f"measured   {min(found.measured_ms):.3f} ms (the least of {len(found.measured_ms)}, median "
        f"{float(np.median(found.measured_ms)):.3f})",
        f"ratio      {found.ratio:+.1%}",
    ])  # fmt: skip


# ---- measuring


def measure(
    path: Path,
    tokens: int,
    rounds: int,
    *,
    uniform: bool = False,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Prediction:
    """Rounds of one estimate and `tokens` tokens each, from an empty session. uniform: replay random experts."""
    from strata.planner.calibrate import measure_costs, types_of
    from strata.planner.machine import Machine
    from strata.planner.memory import plan, read_facts
    from strata.planner.probes import ram_read_gbps

    facts, machine = read_facts(path), Machine.here()
    predicted: list[float] = []
    times: list[float] = []
    with _decoder(path, uniform, seed) as decode:
        decode(min(WARM_UP, CONTEXT))
        for i in range(rounds):
            costs = measure_costs(types_of(facts))
            machine = replace(machine, ram_gbps=ram_read_gbps(1), ram_gbps_measured=True)
            p = plan(facts, machine, context=CONTEXT // 2, kv=KV, threads=1, device="cpu", costs=costs)
            predicted.append(p.estimate.decode_ms)
            times += decode(tokens)
            on_progress(i + 1, rounds)
    return Prediction(tuple(predicted), tuple(times))


@contextlib.contextmanager
def _decoder(path: Path, uniform: bool, seed: int) -> Iterator[Callable[[int], list[float]]]:
    """A call that decodes random tokens from an empty session on one thread: ms of CPU time of each."""
    from strata.arch import architecture_of
    from strata.cpu.backend import CpuBackend
    from strata.pack.experts import expert_layout
    from strata.pack.gguf_file import GgufFile
    from strata.pack.tensors import Tensors
    from strata.replay import routing, uniform_ids

    rng = np.random.default_rng(seed)
    with contextlib.ExitStack() as stack:
        gguf = stack.enter_context(GgufFile(path))
        arch = architecture_of(gguf)
        g = arch.read_geometry(gguf)
        programs = arch.build_programs(g, CONTEXT, KV)
        backend = CpuBackend(Tensors(gguf), g, expert_layout(gguf, g.L), programs, threads=1)
        stack.callback(backend.close)
        if uniform:
            stack.enter_context(routing(backend, uniform_ids(CONTEXT, g.L, g.E, g.K, seed + 1)))
        yield lambda n: _decode(backend, rng.integers(0, g.V, n))


def _decode(backend: CpuBackend, tokens: np.ndarray) -> list[float]:
    """CPU time in ms of window, head and commit of each token, from an empty session."""
    from strata.base.window import HeadRequest

    state, previous, times = backend.new_state(), (-1, -1), []
    for token in tokens.tolist():
        began = time.thread_time()
        backend.window(state, np.array([token], np.int32), previous)
        backend.head(0, 1, HeadRequest())
        backend.commit(state, 1)
        times.append((time.thread_time() - began) * 1e3)
        previous = (token, previous[0])
    return times
