"""strata bench versus: greedy decode of one file by this library and by llama.cpp (package xllamacpp), in turn."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version as version_of
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import strata
from strata.base.errors import StrataError, need
from strata.base.geometry import CELL_ROWS, CONTEXT_RESERVE
from strata.base.numbers import shown
from strata.cli import flags
from strata.cli.bench.numbers import count, numbers, spread
from strata.cli.locate import find_model
from strata.cpu.cores import MOST_THREADS, core_facts, usable_cores
from strata.cpu.tiers import VARIABLE, available_tiers, best_tier
from strata.llama_server import LlamaServer, xllamacpp
from strata.synth import SynthSpec, memory_model

WARM_UP_TOKENS = 8
PAUSE_S = 0.05
"""Between the two: their workers have stopped spinning by then."""


def command(
    ctx: typer.Context,
    model: flags.Model = None,
    synth: Annotated[
        str | None, typer.Option(help="Instead of a model: two layers of random weights, GATE_UP/DOWN types.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of --synth.")] = 2,
    tiers: Annotated[str, typer.Option(help="Kernel tiers, comma-separated; default: the one in force.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens decoded in a repeat.")] = 64,
    repeat: Annotated[int, typer.Option("--repeat", "-r", help="Repeats of each; medians are compared.")] = 5,
    threads: flags.Threads = None,
    json_: flags.Json = False,
) -> None:
    """Compare greedy decode with llama.cpp: same file, prompt, threads and number of tokens, float16 KV, interleaved.

    llama.cpp's rate is the one that it reports for decode; it may repack weights as it likes.
    """
    count("--tokens", tokens, 2)
    count("--repeat", repeat, 1)
    count("--threads", threads, 1, MOST_THREADS)
    need(synth is None or model is None, "--model and --synth exclude each other", found="both", needed="one")
    if synth is None:
        flags.refuse_idle(ctx, ("layers",), "without --synth")
    wanted = numbers("--tiers", tiers, max(available_tiers()), least=0) if tiers else [best_tier()]
    good = all(t in available_tiers() for t in wanted)
    need(good, "--tiers cannot be run here", found=shown(tiers), needed=f"some of {available_tiers()}")
    spec = None if synth is None else SynthSpec.of_types(synth, layers=layers)
    threads = usable_cores(core_facts()) if threads is None else threads
    xllamacpp()
    with _file(model, spec) as path:
        if wanted == [best_tier()]:
            found = [_compare(path, tokens, repeat, threads)]
        else:
            found = [_in_tier(t, path, tokens, repeat, threads) for t in wanted]
    about = {
        "command": " ".join(["strata", *sys.argv[1:]]),
        "model": synth or str(path),
        "threads": threads,
        "tokens": tokens,
        "repeats": repeat,
        "versions": {"strata": strata.__version__, **{n: version_of(n) for n in ("xllamacpp", "numba", "llvmlite")}},
    }
    if json_:
        typer.echo(json.dumps(about | {"results": found}, indent=2))
        return
    for name, value in about.items():
        typer.echo(f"{name:<10} {value}")
    for f in found:
        ours, theirs = f["strata_tokens_per_s"], f["llama_tokens_per_s"]
        typer.echo(
            f"tier {f['tier']:<5} {ours['median']:.1f} ({ours['min']:.1f} to {ours['max']:.1f}) tokens/s, llama.cpp "
            f"{theirs['median']:.1f} ({theirs['min']:.1f} to {theirs['max']:.1f}): "
            f"{f['ratio']:.2f} x, fastest repeats {f['fastest_ratio']:.2f} x"
        )
        if "cpu_ratio" in f:
            typer.echo(
                f"           {f['strata_cpu_ms']['median']:.2f} ms of CPU a token, llama.cpp "
                f"{f['llama_cpu_ms']['median']:.2f}: {f['cpu_ratio']:.2f} x"
            )


@contextlib.contextmanager
def _file(model: Path | None, spec: SynthSpec | None) -> Iterator[Path]:
    """The model's file; a synthetic one lies in memory."""
    if spec is None:
        yield find_model(model)
        return
    with memory_model(spec) as path:
        yield path


def _in_tier(tier: int, path: Path, tokens: int, repeat: int, threads: int) -> dict[str, Any]:
    """The comparison in a process of its own, which reads its tier at the start."""
    code = "import sys, json; from pathlib import Path; from strata.cli.bench.versus import _compare; " \
        "print(json.dumps(_compare(Path(sys.argv[1]), *map(int, sys.argv[2:]))))"  # fmt: skip
    command = [sys.executable, "-c", code, str(path), *map(str, (tokens, repeat, threads))]
    done = subprocess.run(command, env=os.environ | {VARIABLE: str(tier)}, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise StrataError(f"the comparison in tier {tier} failed", found=said[-1], needed="a result")
    return json.loads(done.stdout.splitlines()[-1])


def _compare(path: Path, tokens: int, repeat: int, threads: int) -> dict[str, Any]:
    """Both programs on one file. ratio: of the medians of tokens/s; fastest_ratio: of the best repeats, which other
    programs disturbed least. With one thread also of CPU time, which no other program's work is in."""
    from strata.measure import PROMPT_TOKENS, Speed

    context = -(-(PROMPT_TOKENS + tokens + CONTEXT_RESERVE + 1) // CELL_ROWS) * CELL_ROWS
    text = files("strata.cli.bench").joinpath("prompt.txt").read_text(encoding="utf-8")
    ours, theirs, ours_ms, theirs_ms = [], [], [], []
    with strata.load(path, context=context, threads=threads, kv="f16") as model, Llama(path, context, threads) as llama:
        bench = Speed(model, text)
        prompt = bench.prompt(PROMPT_TOKENS)
        bench.decode(WARM_UP_TOKENS, profile=False)
        llama.decode(prompt, WARM_UP_TOKENS)
        for _ in range(repeat):
            time.sleep(PAUSE_S)
            sample = bench.decode(tokens, profile=False)
            ours.append(1e6 / sample.wall_us)
            ours_ms.append(sample.wall_us * sample.busy / 1e3)
            time.sleep(PAUSE_S)
            began = time.process_time()
            theirs.append(llama.decode(prompt, tokens))
            middle = time.process_time()
            if threads == 1:
                llama.decode(prompt, 1)
                prompt_s = time.process_time() - middle
                theirs_ms.append((middle - began - prompt_s) * 1e3 / (tokens - 1))
    ratio = statistics.median(ours) / statistics.median(theirs)
    found = {"tier": best_tier(), "strata_tokens_per_s": spread(ours), "llama_tokens_per_s": spread(theirs),
             "ratio": round(ratio, 3), "fastest_ratio": round(max(ours) / max(theirs), 3)}  # fmt: skip
    if threads == 1:
        found |= {"strata_cpu_ms": spread(ours_ms), "llama_cpu_ms": spread(theirs_ms),
                  "cpu_ratio": round(statistics.median(theirs_ms) / statistics.median(ours_ms), 3)}  # fmt: skip
    return found


class Llama(LlamaServer):
    """A file in llama.cpp, whose decoding is timed."""

    def decode(self, prompt: np.ndarray, tokens: int) -> float:
        """Tokens/s of greedy decode after the prompt, by llama.cpp's own clock; the first token is the prompt's."""
        timings = self.complete({
            "prompt": [int(t) for t in prompt], "n_predict": tokens, "temperature": 0, "samplers": ["top_k"],
            "top_k": 1, "ignore_eos": True, "cache_prompt": False,
        })["timings"]  # fmt: skip
        if timings["predicted_n"] != tokens:
            raise StrataError("llama.cpp stopped early", found=f"{timings['predicted_n']} tokens", needed=tokens)
        return float(timings["predicted_per_second"])
